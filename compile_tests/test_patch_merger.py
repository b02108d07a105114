"""`patch_merger` under torch.compile, torch.export, CUDA graphs, and in traces: the graph of its parts."""

from pathlib import Path

import pytest
import torch

from compile_tests.contract import (
    assert_expected_inline,
    assert_kernels,
    capture_graphs,
    fake_gpu,
    recompiling_fails,
    symbolic_size,
    trace_kernels,
)
from compile_tests.linear import BACKENDS, DEVICE, DTYPE
from torch_ops import patch_merger
from torch_ops.testing import check, references
from torch_ops.testing.cases import MergerCase, make_merger_inputs, outcome

CASE = MergerCase("contract", "", 140, 24, 40)
TOTALS = (140, 28, 320, 64)


def _of(total: int, dtype: torch.dtype = DTYPE, **changes: object) -> MergerCase:
    return make_merger_inputs(MergerCase("contract", "", total, 24, 40, **changes), dtype, DEVICE)


def test_graphs_hold_its_parts_and_views() -> None:
    function, graphs = capture_graphs(patch_merger)
    outcome(function, _of(140))
    if DEVICE == "cpu":
        assert_expected_inline(graphs.forward, "vk.layer_norm.default\naten.view.default\nvk.mlp.default\n")
        assert_expected_inline(
            graphs.backward, "vk.mlp_backward.default\naten.view.default\nvk.layer_norm_backward.default\n"
        )


@pytest.mark.parametrize("options", [{}, {"norm_after": True}, {"norm": "rms"}, {"norm": "none"}], ids=str)
def test_compiled_equals_eager(options: dict[str, object]) -> None:
    inputs = _of(140, **options)
    actual, expected = (
        outcome(function, inputs) for function in (torch.compile(patch_merger, fullgraph=True), patch_merger)
    )
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes_never_recompile(backend: str) -> None:
    compiled = torch.compile(patch_merger, fullgraph=True, dynamic=True, backend=backend)
    with recompiling_fails():
        for total in TOTALS:
            inputs = _of(total)
            results = (outcome(references.patch_merger, inputs, dtype) for dtype in (None, torch.float64))
            check(outcome(compiled, inputs), *results)


def test_exported_program_survives_saving_and_runs_at_other_sizes(tmp_path: Path) -> None:
    class Merger(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return patch_merger(*tensors)

    inputs = _of(140)
    tensors = inputs.call(lambda *args: args[:7])
    total = 4 * torch.export.Dim("quarter", min=2, max=4096)
    program = torch.export.export(Merger(), tensors, dynamic_shapes=(({0: total}, *(None,) * 6),))
    torch.export.save(program, tmp_path / "merger.pt2")
    loaded = torch.export.load(tmp_path / "merger.pt2").module()
    for rows in TOTALS:
        x = _of(rows).x
        assert torch.equal(loaded(x, *tensors[1:]), patch_merger(x, *tensors[1:]))


@pytest.mark.parametrize("path", ["portable", "auto"])
def test_traces_for_cuda_hold_the_kernels_of_its_parts(path: str) -> None:
    """And no copy of the rows that are merged."""
    with fake_gpu(name="h200", path=path) as mode:
        with mode:
            rows = symbolic_size(mode, "rows", 100) * 4
            new = lambda *shape: torch.empty(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
            args = (
                new(rows, 1152), new(1152), new(1152), new(4608, 4608), new(4608), new(4096, 4608), new(4096)
            )  # fmt: skip
        trace = trace_kernels(patch_merger, args)
    normed = ("_norm_fwd_kernel", {"out_ptr"})
    products = [("_gemm_kernel", {"out_ptr"})] * 2 if path == "portable" else []
    assert_kernels(trace, [normed, *products])
    assert trace.targets.count("auto_functionalized") == (path == "auto")
    assert "clone" not in trace.targets and "copy" not in trace.targets


def test_meta_outputs_have_the_strides_of_real_ones() -> None:
    inputs = _of(140)
    out = inputs.call(patch_merger)
    leaves = {name: leaf.to("meta") for name, leaf in inputs.leaves.items()}
    meta = inputs.call(patch_merger, **leaves)
    assert (meta.shape, meta.stride(), meta.dtype) == (out.shape, out.stride(), out.dtype)


@pytest.mark.gpu
def test_cuda_graph_replays_on_other_values() -> None:
    inputs = make_merger_inputs(MergerCase("graph", "", 784, 1152, 4096), torch.bfloat16, "cuda")
    inputs.call(patch_merger)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = inputs.call(patch_merger)
    inputs.x.copy_(torch.randn_like(inputs.x))
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, inputs.call(patch_merger))
