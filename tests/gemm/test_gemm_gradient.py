"""The Hopper kernel of a layer's gradient with the slope of the activation before it, and the op that takes it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.gemm.verify import Gradient
from tests.verify import misaligned
from torch_ops import mlp, settings
from torch_ops._core.device import gpu
from torch_ops._gemm import hopper as gemm_hopper
from torch_ops._gemm.hopper import count_of_column_sums
from torch_ops._gemm.tensors import Gradient as GradientTensors
from torch_ops.testing import check, references
from torch_ops.testing.cases import MlpCase, make_mlp_inputs, outcome

pytestmark = pytest.mark.no_interpret

ACTIVATIONS = ("gelu_tanh", "gelu", "quick_gelu", "silu")


@pytest.fixture
def hopper(device: str) -> Iterator[None]:
    if device != "cuda" or gpu().arch != 90:
        pytest.skip("needs a Hopper GPU")
    with settings(path="hopper"):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", (1, 77, 784, 3136))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, rows: int) -> None:
    for columns, inner in ((1152, 4304), (512, 1368), (72, 40)):
        Gradient(activation, columns, inner, rows).verify()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("bias", [False, True])
def test_many_tiles_of_a_program(bias: bool) -> None:
    """Covers a program's last tile, which consumers finish, and earlier tiles, which they hand over."""
    for rows in (63, 1000, 1050):
        gradient = Gradient("gelu_tanh", 200, 1368, rows, bias=bias)
        alone = gradient.verify()
        with mock.patch.object(gemm_hopper, "programs", lambda index: 4):
            for name, tensor in gradient.verify().items():
                assert torch.equal(tensor, alone[name]), name


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_fp16_and_rows_apart() -> None:
    Gradient("gelu_tanh", 1152, 4304, 333, torch.float16).verify()
    Gradient("gelu", 200, 1360, 500, apart=8).verify()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("which", ["dout", "weight", "pre"])
def test_addresses_that_tma_cannot_reach_are_computed_too(which: str, launches: list[dict[str, Any]]) -> None:
    gradient = Gradient("silu", 200, 1368, 500)
    plan = gradient.plan()
    aligned = getattr(gradient, which)
    setattr(gradient, which, misaligned(aligned))
    found = gradient.run(plan)
    assert not launches
    check(found, gradient.reference(torch.bfloat16), gradient.reference(torch.float64))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_graphs_replay_on_other_values() -> None:
    gradient = Gradient("gelu_tanh", 1152, 4304, 1111)
    plan = gradient.plan()
    gradient.run(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient.run(plan)
    gradient.dout.copy_(gradient.dout.flip(0))
    graph.replay()
    assert all(torch.equal(tensor, captured[name]) for name, tensor in gradient.run(plan).items())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [100, 784, 3136])
def test_launches_in_a_row(rows: int) -> None:
    """Each begins while the one before is at its end, which writes what it reads: dout, and what its slope is of."""
    first, second = Gradient("gelu_tanh", 1152, 1152, rows), Gradient("silu", 1152, 1152, rows, seed=1)
    plans = first.plan(), second.plan()

    def chain(synchronized: bool) -> tuple[Tensor, ...]:
        made = first.dout.clone(), first.pre.clone(), second.dout.clone(), second.pre.clone()
        dout, first_pre, second_dout, second_pre = made
        sums = [
            dout.new_empty((count_of_column_sums(rows), each.inner), dtype=torch.float32) for each in (first, second)
        ]
        for _ in range(100):
            plans[0](GradientTensors(dout, first.weight, first_pre, second_dout, second_pre, sums[0]))
            if synchronized:
                torch.cuda.synchronize()
            plans[1](GradientTensors(second_dout, second.weight, second_pre, dout, first_pre, sums[1]))
            if synchronized:
                torch.cuda.synchronize()
            # As large as before, whatever the slopes and activations made of them.
            for each in (dout, first_pre):
                each.div_(each.float().square().mean().sqrt())
        return (*made, *sums)

    expected = chain(True)
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(chain(False), expected, strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("inner", [4304, 1365])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "swiglu"])
def test_the_op_takes_it(activation: str, inner: int, recompute: bool, launches: list[dict[str, Any]]) -> None:
    case = MlpCase("layer", "", (2, 300), 1152, inner, activation)
    inputs = make_mlp_inputs(case, torch.bfloat16, "cuda")
    other = replace(inputs, x=inputs.x.flip(0).contiguous())
    function = partial(mlp, recompute=recompute)
    with settings(path="auto"):
        found, after = outcome(function, inputs), outcome(function, other)
    names = [each["EPILOGUE"] for each in launches]
    wanted = inner == 4304 and activation != "swiglu"
    # Later launches of a plan are kept ones.
    assert names.count(f"{activation}_gradient") == wanted
    check(found, outcome(references.mlp, inputs), outcome(references.mlp, inputs, torch.float64))
    for _ in range(5):
        for each, expected in ((inputs, found), (other, after)):
            with settings(path="auto"):
                again = outcome(function, each)
            assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_graph_keeps_what_it_was_traced_for() -> None:
    """Whatever the setting is by the time of its backward."""
    inputs = make_mlp_inputs(MlpCase("layer", "", (300,), 256, 512), torch.bfloat16, "cuda")
    x = inputs.x.clone().requires_grad_()
    torch.compiler.reset()
    out = inputs.call(torch.compile(mlp, fullgraph=True), x=x)
    with settings(path="portable"):
        out.backward(inputs.dout)
    expected = outcome(references.mlp, inputs), outcome(references.mlp, inputs, torch.float64)
    check({"dx": x.grad}, *({"dx": each["dx"]} for each in expected))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_single_row_may_have_any_stride() -> None:
    gradient = Gradient("gelu", 200, 1368, 1)
    wide = torch.empty((1, 1368 + 3), dtype=torch.bfloat16, device="cuda")[:, :1368]
    gradient.pre = wide.copy_(gradient.pre)
    gradient.verify()
