"""`vk::patch_merger` under torch.compile, torch.export, AOTInductor, CUDA graphs, autocast and in traces.

It is made of ops: whole in the graphs of Dynamo and torch.export, its parts in all others.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.flop_counter import FlopCounterMode

from compile_tests.contract import assert_kernels, fake_gpu, opcheck_fully, run_python, symbolic_size, trace_kernels
from compile_tests.linear import BACKENDS, DEVICE, DTYPE, GraphContract, Subject
from torch_ops import patch_merger
from torch_ops.testing import check, references
from torch_ops.testing.cases import MergerCase, MergerInputs, make_merger_inputs, outcome

FORMS: dict[str, dict[str, Any]] = {
    "norm_after": {"norm_after": True},
    "rms": {"norm": "rms"},
    "no_norm": {"norm": "none"},
    "one_projection": {"outer": None},
    "three_to_a_side": {"merge_size": 3},
}


def _of_rows(rows: int, dtype: torch.dtype, device: str, seed: int = 0, **changes: Any) -> MergerInputs:
    named = {"outer": 16, "inner": 40, **changes}
    total = rows * named.get("merge_size", 2) ** 2
    return make_merger_inputs(MergerCase("contract", "", total, 24, **named), dtype, device, seed)


class TestPatchMerger(GraphContract):
    subject = Subject(
        "patch_merger", patch_merger, references.patch_merger, of_rows=_of_rows, backward=None, moving=("x",),
        source="args = (draw(252, 24), draw(24), draw(24), draw(40, 96), draw(40), draw(16, 40), draw(16))",
        parts=("layer_norm", "mlp"),
        forward_graph="vk.layer_norm.default\naten.view.default\nvk.mlp.default\n",
        backward_graph="vk.mlp_backward.default\naten.view.default\nvk.layer_norm_backward.default\n",
        step=4,
    )  # fmt: skip

    @pytest.mark.parametrize("backend", (None, *BACKENDS), ids=("eager", *BACKENDS))
    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
    def test_autocast_follows_the_dtype_of_its_region(self, dtype: torch.dtype, backend: str | None) -> None:
        """The products do; the norm before them has x's dtype."""

        def in_region(*args: Any) -> Any:
            with torch.autocast(DEVICE, dtype):
                return patch_merger(*args)

        inputs = self.subject.inputs(dtype=torch.float32)
        function = torch.compile(in_region, fullgraph=True, backend=backend) if backend else in_region
        actual = outcome(function, inputs)
        leaves = inputs.leaves
        normed = torch.ops.vk.layer_norm(leaves["x"], leaves["norm_weight"], leaves["norm_bias"]).view(-1, 96)
        layers = [leaves[name].to(dtype) for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")]
        expected, _ = torch.ops.vk.mlp(normed.to(dtype), *layers, "gelu")
        assert actual["out"].dtype is dtype and torch.equal(actual["out"], expected)
        assert all(actual[f"d{name}"].dtype is torch.float32 for name in leaves)


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_opcheck_passes_of_every_form(changes: dict[str, Any]) -> None:
    inputs = _of_rows(20, torch.float32, DEVICE, **changes)
    for leaf in inputs.leaves.values():
        leaf.requires_grad_()
    opcheck_fully(torch.ops.vk.patch_merger.default, inputs.call(lambda *args: args))


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_every_form_compiles(changes: dict[str, Any]) -> None:
    inputs = _of_rows(20, DTYPE, DEVICE, **changes)
    results = (outcome(references.patch_merger, inputs, dtype) for dtype in (None, torch.float64))
    check(outcome(torch.compile(patch_merger, fullgraph=True), inputs), *results)


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_graphs_keep_the_first_product_only_for_a_gradient(trained: bool, grad_mode: bool) -> None:
    """What `mlp` itself asks for once its arguments are known, though Dynamo did not look inside.

    On the CPU, where graphs hold it and not its kernels.
    """
    shapes = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (node,) = (node for node in graph.graph.nodes if node.target is torch.ops.vk.mlp.default)
        shapes.append(tuple(node.meta["val"][1].shape))
        return make_boxed_func(graph.forward)

    inputs = _of_rows(20, torch.float32, "cpu")
    for leaf in inputs.leaves.values():
        leaf.requires_grad_(trained)
    aot = aot_autograd(fw_compiler=backend, bw_compiler=lambda graph, _: graph)
    with torch.set_grad_enabled(grad_mode):
        inputs.call(torch.compile(patch_merger, fullgraph=True, backend=aot))
    assert shapes == [(20, 40 if trained and grad_mode else 0)]


class Merger(torch.nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return patch_merger(*tensors)


def test_an_empty_table_of_decompositions_leaves_it_whole() -> None:
    tensors = _of_rows(20, DTYPE, DEVICE).call(lambda *args: args[:7])
    graph = torch.export.export(Merger(), tensors).run_decompositions({}).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.vk.patch_merger.default]


LOAD = """
import torch, torch_ops
program = torch.export.load({program!r}).module()
args, expected = torch.load({calls!r})
assert torch.equal(program(*args), expected)
print("equal")
"""


def test_a_saved_program_runs_in_a_process_that_only_imports_the_library(tmp_path: Path) -> None:
    tensors = _of_rows(20, DTYPE, DEVICE).call(lambda *args: args[:7])
    program, calls = str(tmp_path / "merger.pt2"), str(tmp_path / "calls.pt")
    torch.export.save(torch.export.export(Merger(), tensors), program)
    torch.save((tensors, patch_merger(*tensors)), calls)
    assert run_python(LOAD.format(program=program, calls=calls)) == "equal\n"


def test_flops_are_those_of_its_products() -> None:
    inputs = _of_rows(20, torch.float32, DEVICE)
    product = 2 * 20 * (96 * 40 + 40 * 16)
    leaves = {name: leaf.requires_grad_() for name, leaf in inputs.leaves.items()}
    with FlopCounterMode(display=False) as counter:
        out = inputs.call(patch_merger, **leaves)
    assert counter.get_total_flops() == product
    with FlopCounterMode(display=False) as counter:
        out.backward(inputs.dout)
    assert counter.get_total_flops() == 2 * product


@pytest.mark.parametrize("path", ["portable", "auto"])
def test_traces_for_cuda_hold_the_kernels_of_its_parts(path: str) -> None:
    """And no copy of the rows that are merged."""
    with fake_gpu(name="h200", path=path) as mode:
        with mode:
            rows = symbolic_size(mode, "rows", 100) * 4
            new = partial(torch.empty, device="cuda", dtype=torch.bfloat16)
            args = (
                new(rows, 1152), new(1152), new(1152), new(4608, 4608), new(4608), new(4096, 4608), new(4096)
            )  # fmt: skip
        trace = trace_kernels(patch_merger, args)
    normed = ("_norm_fwd_kernel", {"out_ptr"})
    products = [("_gemm_kernel", {"out_ptr"})] * 2 if path == "portable" else []
    assert_kernels(trace, [normed, *products])
    assert trace.targets.count("auto_functionalized") == (path == "auto")
    assert "clone" not in trace.targets and "copy" not in trace.targets
