"""The graph contract of `vk::patch_merger`, which is made of ops.

It is whole in the graphs of Dynamo and torch.export; all others hold its parts.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.flop_counter import FlopCounterMode

from compile_tests.contract.graph import (
    DEVICE,
    HALF_TYPES,
    Call,
    Fixed,
    GraphContract,
    Subject,
    assert_right,
    backends_of,
    compiled_by,
)
from compile_tests.contract.process import run_python
from compile_tests.contract.trace import assert_kernels, fake_gpu, symbolic_size, trace_kernels
from torch_ops import patch_merger
from torch_ops.testing import references
from torch_ops.testing.cases import MergerCase, make_merger_inputs

FORMS: dict[str, dict[str, Any]] = {
    "norm_after": {"norm_after": True},
    "rms": {"norm": "rms"},
    "no_norm": {"norm": "none"},
    "one_projection": {"outer": None},
    "three_to_a_side": {"merge_size": 3},
}


def _case(name: str, rows: int = 20, **changes: Any) -> MergerCase:
    total = rows * changes.get("merge_size", 2) ** 2
    return MergerCase(name, "", total, 24, **{"outer": 16, "inner": 40, **changes})


LEAVES = ("x", "norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


def draw(case: MergerCase, dtype: torch.dtype, seed: int = 0) -> Call:
    inputs = make_merger_inputs(case, dtype, DEVICE, seed)
    return Call.of(patch_merger, inputs, LEAVES, grads={"out": inputs.dout})


SUBJECT = Subject(
    "patch_merger", patch_merger, references.patch_merger, draw,
    tuple(_case(str(rows), rows) for rows in (63, 200, 7, 320, 128)),
    moving={"x": {0: 4 * torch.export.Dim("rows", min=2, max=65536)}},
    checked=tuple(_case(name, **changes) for name, changes in {"plain": {}, **FORMS}.items()),
    replayed=(_case("graph", 512),) * 2,
    autocast="",
    batched="x",
    parts=("layer_norm", "mlp"),
    forward_graph="vk.layer_norm.default\naten.view.default\nvk.mlp.default\n",
    backward_graph="vk.mlp_backward.default\naten.view.default\nvk.layer_norm_backward.default\n",
)  # fmt: skip


class TestGraphs(GraphContract):
    subjects = (SUBJECT,)


@pytest.mark.parametrize("region", ("eager", *backends_of("patch_merger")))
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_autocast_reaches_the_products_and_not_the_norm(dtype: torch.dtype, region: str) -> None:
    def in_region(**args: Any) -> Any:
        with torch.autocast(DEVICE, dtype):
            return patch_merger(**args)

    call = SUBJECT.call(dtype=torch.float32)
    actual = call.outcome(compiled_by(region, in_region))
    normed = torch.ops.vk.layer_norm(*(call.args[name] for name in LEAVES[:3])).view(-1, 96)
    expected, _ = torch.ops.vk.mlp(normed.to(dtype), *(call.args[name].to(dtype) for name in LEAVES[3:]), "gelu")
    assert actual["out"].dtype is dtype and torch.equal(actual["out"], expected)
    assert all(actual[f"d{name}"].dtype is torch.float32 for name in LEAVES)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_compiles(form: str) -> None:
    assert_right(SUBJECT, compiled_by(backends_of("patch_merger")[-1], patch_merger), _case(form, **FORMS[form]))


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_graphs_keep_the_first_product_only_for_a_gradient(trained: bool, grad_mode: bool) -> None:
    """`mlp` decides once its arguments are known, though Dynamo did not look inside.

    On the CPU, where graphs hold it and not its kernels.
    """
    shapes = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (node,) = (node for node in graph.graph.nodes if node.target is torch.ops.vk.mlp.default)
        shapes.append(tuple(node.meta["val"][1].shape))
        return make_boxed_func(graph.forward)

    inputs = make_merger_inputs(_case("kept"), torch.float32, "cpu")
    for leaf in inputs.leaves.values():
        leaf.requires_grad_(trained)
    aot = aot_autograd(fw_compiler=backend, bw_compiler=lambda graph, _: graph)
    with torch.set_grad_enabled(grad_mode):
        inputs.call(torch.compile(patch_merger, fullgraph=True, backend=aot))
    assert shapes == [(20, 40 if trained and grad_mode else 0)]


def _exported() -> tuple[torch.export.ExportedProgram, Call]:
    call = SUBJECT.call()
    return torch.export.export(Fixed(patch_merger, call), tuple(call.tensors.values())), call


def test_an_empty_table_of_decompositions_leaves_it_whole() -> None:
    graph = _exported()[0].run_decompositions({}).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.vk.patch_merger.default]


LOAD = """
import torch, torch_ops
program = torch.export.load({program!r}).module()
args, expected = torch.load({calls!r})
assert torch.equal(program(*args), expected)
print("equal")
"""


def test_a_saved_program_runs_in_a_process_that_only_imports_the_library(tmp_path: Path) -> None:
    program, calls = str(tmp_path / "merger.pt2"), str(tmp_path / "calls.pt")
    exported, call = _exported()
    torch.export.save(exported, program)
    torch.save((tuple(call.tensors.values()), call(patch_merger)), calls)
    assert run_python(LOAD.format(program=program, calls=calls)) == "equal\n"


def test_flops_are_those_of_its_products() -> None:
    inputs = make_merger_inputs(_case("flops"), torch.float32, DEVICE)
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
