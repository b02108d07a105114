"""The Hopper kernel of a layer's gradient with the slope of the activation before it, and the op that takes it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from csrc_free_ops.gemm.hopper_launch import GRADIENT_TILES, gradient_launch, tile_launch
from torch_ops import _gemm_hopper, mlp, settings
from torch_ops._device import gpu
from torch_ops._gemm import plan_gradient
from torch_ops._gemm_hopper import count_of_sums, plan_gradient_hopper
from torch_ops._gemm_portable import Rows, padded
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


class Gradient:
    """Of one layer and the activation before it, of random tensors; weight's rows begin `apart` columns behind it."""

    def __init__(
        self, activation: str, columns: int, inner: int, rows: int, dtype: torch.dtype = torch.bfloat16,
        bias: bool = True, apart: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator("cuda").manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        self.activation, self.bias, self.inner = activation, bias, inner
        self.dout, self.pre = draw(rows, columns), draw(rows, inner) * 2
        self.weight = (draw(columns, inner + apart) / columns**0.5)[:, :inner]

    def run(self, plan: Callable[..., None]) -> dict[str, Tensor]:
        """What is left unwritten is NaN."""
        rows, width = self.pre.shape[0], padded(self.inner, self.pre.dtype)
        dpre, h = (self.pre.new_full((rows, width), torch.nan) for _ in range(2))
        sums = self.pre.new_full((count_of_sums(rows), self.inner), torch.nan, dtype=torch.float32)
        plan(self.dout, self.weight, self.pre, dpre, h, sums)
        assert not dpre[:, self.inner :].any() and not h[:, self.inner :].any(), "zeros behind the columns"
        results = {"dpre": dpre[:, : self.inner], "h": h[:, : self.inner]}
        return results | {"db": sums.sum(0).to(self.pre.dtype)} if self.bias else results

    def plan(self, launch: Any = None) -> Callable[..., None]:
        args = (Rows.of(self.dout), self.weight, self.activation, self.bias, padded(self.inner, self.pre.dtype))
        plan = plan_gradient(*args) if launch is None else plan_gradient_hopper(launch, *args)
        assert plan is not None
        return plan

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        pre = self.pre.to(dtype).detach().requires_grad_()
        h = references.linear.activated(pre, self.activation)
        h.backward(self.dout.to(dtype) @ self.weight.to(dtype))
        results = {"dpre": pre.grad, "h": h.detach()}
        return results | {"db": pre.grad.sum(0)} if self.bias else results

    def verify(self, launch: Any = None) -> dict[str, Tensor]:
        actual = self.run(self.plan(launch))
        check(actual, self.reference(self.pre.dtype), self.reference(torch.float64))
        return actual


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
@pytest.mark.parametrize("tile", GRADIENT_TILES, ids=str)
def test_every_tile(tile: tuple[int, int], bias: bool) -> None:
    """Of one program's last tile, which consumers finish, and of others, which they hand over."""
    launch = tile_launch(*tile, finishers=4)
    for rows in (63, 1000, 1050):
        gradient = Gradient("gelu_tanh", 200, 1368, rows, bias=bias)
        alone = gradient.verify(launch)
        with mock.patch.object(_gemm_hopper, "programs", lambda index: 4):
            for name, tensor in gradient.verify(launch).items():
                assert torch.equal(tensor, alone[name]), name


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_fp16_rows_apart_and_addresses_that_tma_cannot_reach() -> None:
    Gradient("gelu_tanh", 1152, 4304, 333, torch.float16).verify()
    Gradient("gelu", 200, 1364, 500, apart=4).verify()
    gradient = Gradient("silu", 200, 1368, 500)
    plan, straight = gradient.plan(), gradient.verify()
    gradient.weight = (
        torch.empty(200 * 1368 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(200, 1368).copy_(gradient.weight)
    )
    found = gradient.run(plan)
    check(found, gradient.reference(torch.bfloat16), gradient.reference(torch.float64))
    assert found.keys() == straight.keys()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_same_bits_every_time_and_in_graphs() -> None:
    gradient = Gradient("gelu_tanh", 1152, 4304, 1111)
    plan = gradient.plan()
    expected = gradient.run(plan)
    for _ in range(10):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in gradient.run(plan).items())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient.run(plan)
    gradient.dout.copy_(gradient.dout.flip(0))
    graph.replay()
    assert all(torch.equal(tensor, captured[name]) for name, tensor in gradient.run(plan).items())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "swiglu"])
def test_the_op_takes_it(activation: str, recompute: bool) -> None:
    for inner in (4304, 1365):
        case = MlpCase("layer", "", (2, 300), 1152, inner, activation, recompute=recompute)
        inputs = make_mlp_inputs(case, torch.bfloat16, "cuda")
        found = outcome(mlp, inputs)
        check(found, outcome(references.mlp, inputs), outcome(references.mlp, inputs, torch.float64))
        again = outcome(mlp, replace(inputs))
        assert all(torch.equal(tensor, again[name]) for name, tensor in found.items())


def test_tiles_are_those_that_are_built() -> None:
    chosen = {gradient_launch(rows, inner, 132) for rows in range(1, 30000, 613) for inner in (1368, 4096, 4304)}
    assert chosen <= {tile_launch(*tile, finishers=4) for tile in GRADIENT_TILES} and len(chosen) == 2
