"""`vk::mlp` under torch.compile, torch.export, CUDA graphs, autocast and checkpointing."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.contract import (
    assert_expected_inline,
    capture_graphs,
    fake_gpu,
    opcheck_fully,
    recompiling_fails,
    trace_kernels,
)
from compile_tests.gemm import gemm_calls
from compile_tests.linear import BACKENDS, DEVICE, DTYPE, GraphContract, Subject
from torch_ops import mlp
from torch_ops.testing import check, references
from torch_ops.testing.cases import LINEAR_LAYOUTS, MlpCase, MlpInputs, make_mlp_inputs, outcome

ACTIVATIONS = ("gelu_tanh", "gelu", "quick_gelu", "silu", "swiglu")


def _of_rows(rows: int, dtype: torch.dtype, device: str, seed: int = 0, activation: str = "swiglu") -> MlpInputs:
    return make_mlp_inputs(MlpCase("contract", "", (rows,), 24, 37, activation, outer=16), dtype, device, seed)


def _backward(inputs: MlpInputs) -> tuple[Any, ...]:
    _, hidden = inputs.call(torch.ops.vk.mlp)
    return inputs.dout, inputs.x, inputs.w1, inputs.b1, inputs.w2, hidden, inputs.activation


class TestMlp(GraphContract):
    subject = Subject(
        "mlp", mlp, references.mlp, of_rows=_of_rows, backward=_backward, moving=("x",),
        source="args = (draw(63, 24), draw(74, 24), draw(74), draw(16, 37), draw(16), 'swiglu')",
    )  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("return_hidden", [True, False])
def test_opcheck_passes_for_every_activation(activation: str, return_hidden: bool) -> None:
    inputs = _of_rows(40, torch.float32, DEVICE, activation=activation)
    for leaf in inputs.leaves.values():
        leaf.requires_grad_()
    opcheck_fully(torch.ops.vk.mlp.default, (*inputs.call(lambda *args: args), return_hidden))


APART = MlpCase("apart", "two weights", (40,), 24, 37, "swiglu", outer=16, apart=True)


@pytest.mark.parametrize("return_hidden", [True, False])
def test_opcheck_passes_of_two_weights(return_hidden: bool) -> None:
    inputs = make_mlp_inputs(APART, torch.float32, DEVICE)
    for leaf in inputs.leaves.values():
        leaf.requires_grad_()
    *args, activation = _args(inputs)
    up = inputs.w_up, inputs.b_up
    opcheck_fully(torch.ops.vk.mlp.default, (*args, activation, return_hidden, *up))
    hidden = torch.ops.vk.mlp(*args, activation, return_hidden, *up)[1].detach()
    x, w1, b1, w2, _ = args
    for needs, needs_up in (((True,) * 5, (True, True)), ((True, False, False, False, False), (False, True))):
        given = (inputs.dout, x, w1, b1, w2, hidden, activation, *needs, *up, *needs_up)
        opcheck_fully(
            torch.ops.vk.mlp_backward.default,
            tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in given),
        )


def _args(inputs: MlpInputs) -> tuple[Any, ...]:
    return inputs.call(lambda *args, **up: args)


def test_two_weights_enter_the_graph_as_they_are() -> None:
    function, graphs = capture_graphs(mlp)
    outcome(function, make_mlp_inputs(APART, DTYPE, DEVICE))
    assert_expected_inline(graphs.dynamo, "vk.mlp.default\n")


def _assert_right(compiled: Any, inputs: Any) -> None:
    check(outcome(compiled, inputs), outcome(mlp, inputs), outcome(references.mlp, inputs, torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_weights_never_recompile(backend: str) -> None:
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=backend)
    with recompiling_fails():
        for rows in (63, 200, 7):
            _assert_right(compiled, make_mlp_inputs(replace(APART, lead=(rows,)), DTYPE, DEVICE))


def test_two_weights_export(tmp_path: Path) -> None:
    inputs = make_mlp_inputs(APART, DTYPE, DEVICE)

    class Gated(torch.nn.Module):
        def forward(self, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            w1, b1, w2, b2, w_up, b_up = weights
            return mlp(x, w1, b1, w2, b2, "swiglu", w_up=w_up, b_up=b_up)

    tensors = (*_args(inputs)[:5], inputs.w_up, inputs.b_up)
    rows = {0: torch.export.Dim("rows", min=2, max=4096)}
    program = torch.export.export(Gated(), tensors, dynamic_shapes=(rows, (None,) * 6))
    torch.export.save(program, tmp_path / "gated.pt2")
    loaded = torch.export.load(tmp_path / "gated.pt2").module()
    for each in (inputs, make_mlp_inputs(replace(APART, lead=(9,)), DTYPE, DEVICE)):
        assert torch.equal(loaded(each.x, *tensors[1:]), inputs.call(mlp, x=each.x))


@pytest.mark.parametrize("layout", LINEAR_LAYOUTS)
def test_opcheck_passes_in_every_layout(layout: str) -> None:
    inputs = make_mlp_inputs(MlpCase(layout, "", (2, 20), 24, 40, layout=layout), torch.float32, DEVICE)
    opcheck_fully(torch.ops.vk.mlp.default, inputs.call(lambda *args: args))
    opcheck_fully(torch.ops.vk.mlp_backward.default, _backward(inputs))


@pytest.mark.parametrize(
    "needs",
    [(True, False, False, False, False), (False, True, False, True, False), (False,) * 4 + (True,)],
    ids=("x", "weights", "b2"),
)
@pytest.mark.parametrize("kept", [True, False])
def test_opcheck_passes_backward_of_some_gradients(needs: tuple[bool, ...], kept: bool) -> None:
    inputs = _of_rows(40, torch.float32, DEVICE)
    dout, *rest, hidden, activation = _backward(inputs)
    hidden = hidden if kept else hidden[:, :0]
    args = (dout[:1, :1].expand(dout.shape), *rest, hidden, activation, *needs)
    opcheck_fully(torch.ops.vk.mlp_backward.default, args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_equals_eager_where_the_first_product_is_made_again(backend: str) -> None:
    inputs = _of_rows(63, DTYPE, DEVICE)
    again = partial(mlp, recompute=True)
    compiled = torch.compile(again, fullgraph=True, backend=backend)
    actual, expected = (outcome(function, inputs) for function in (compiled, again))
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_leading_dimensions_never_recompiles(backend: str) -> None:
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=backend)
    with recompiling_fails():
        for lead in ((3, 20), (5, 7), (2, 40)):
            _assert_right(compiled, make_mlp_inputs(MlpCase("lead", "", lead, 24, 40), DTYPE, DEVICE))


def test_graphs_for_cuda_hold_only_allocations_products_and_kernels() -> None:
    with fake_gpu() as mode:
        with mode:
            calls = gemm_calls()
        forward, backward = (
            trace_kernels(getattr(torch.ops.vk, op), *calls[op]).targets for op in ("mlp", "mlp_backward")
        )
    assert_expected_inline(
        forward,
        """\
aten.new_empty.default
aten.new_empty.default
aten.new_empty.default
triton_kernel_wrapper_functional
triton_kernel_wrapper_functional
""",
    )
    assert_expected_inline(
        backward,
        """\
aten.new_empty.default
aten.new_empty.default
aten.new_empty.default
aten.mm.default
triton_kernel_wrapper_functional
aten.mm.default
aten.t.default
aten.mm.default
aten.sum.dim_IntList
aten._to_copy.default
aten.t.default
aten.mm.default
aten.sum.dim_IntList
aten.new_empty.default
aten.new_empty.default
""",
    )
