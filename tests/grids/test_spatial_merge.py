"""Numerics, semantics and refusals of `spatial_merge`."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

import torch_ops
from tests.grids.verify import (
    CASES,
    FULL_DTYPES,
    GRID,
    GridContract,
    OfTransformers,
    batches,
    differentiate,
    ids,
    placed,
)
from tests.verify import DEVICE, DTYPES, INTERPRET, assert_expanded_gradients, assert_no_tangent, assert_refuses
from torch_ops import spatial_merge
from torch_ops.testing import check, poisoned, references
from torch_ops.testing.cases import GridCase, GridInputs, grid_cases, make_grid_inputs

WAYS = list(itertools.product(("concat", "mean"), ("merge_block", "raster")))

pytestmark = pytest.mark.interpret


def dout_of(inputs: GridInputs, mode: str) -> Tensor:
    unit = inputs.merge_size**2
    rows = inputs.total // unit
    if mode == "mean":
        return inputs.dout[:rows]
    return inputs.dout[: rows * unit].reshape(rows, unit * inputs.dout.shape[1])


def verify(inputs: GridInputs, mode: str, order: str) -> None:
    total = inputs.total // inputs.merge_size**2 * inputs.merge_size**2
    rest = (inputs.grid, total, mode, order, inputs.merge_size)
    dout = dout_of(inputs, mode)
    with poisoned():
        actual = differentiate(torch.ops.vk.spatial_merge, inputs.x, dout, *rest)
    eager, truth = (differentiate(references.spatial_merge, x, dout, *rest) for x in (inputs.x, inputs.x.double()))
    check(actual, eager, truth)
    if mode == "concat":
        assert torch.equal(actual["out"], eager["out"]) and torch.equal(actual["gradient"], eager["gradient"])


@pytest.mark.parametrize(("mode", "order"), WAYS)
@pytest.mark.parametrize("dtype", FULL_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_agrees_with_reference(case: GridCase, dtype: torch.dtype, mode: str, order: str, device: str) -> None:
    verify(make_grid_inputs(case, dtype, device), mode, order)


@given(batches(), st.sampled_from(DTYPES), st.sampled_from(WAYS), st.integers(0, 2**16))
@hypothesis_settings(max_examples=3 if INTERPRET else 60)
def test_agrees_on_anything(case: GridCase, dtype: torch.dtype, way: tuple[str, str], seed: int) -> None:
    verify(make_grid_inputs(case, dtype, DEVICE, seed), *way)


@pytest.mark.gpu
@pytest.mark.parametrize("case", grid_cases("bench"), ids=ids)
def test_agrees_at_real_shapes(case: GridCase, device: str) -> None:
    inputs = make_grid_inputs(case, torch.bfloat16, device)
    for way in WAYS:
        verify(inputs, *way)


class TestTransformers(OfTransformers):
    def test_merge_block_order_is_what_their_merger_views(self, device: str) -> None:
        x = torch.randn(48, 8, device=device)
        merged = spatial_merge(x, torch.tensor([(1, 6, 8)]), 48)
        assert torch.equal(merged, x.view(-1, 32)) and merged.data_ptr() != x.data_ptr()
        raster = torch.empty_like(x)
        rows, cols = self.positions(torch.tensor([(1, 6, 8)])).unbind(1)
        raster[(rows * 8 + cols).to(device)] = x
        assert torch.equal(spatial_merge(raster, torch.tensor([(1, 6, 8)]), 48, order="raster"), merged)


def test_rows_past_the_total_are_left_out(device: str) -> None:
    x = torch.randn(64, 8, device=device, requires_grad=True)
    out = spatial_merge(x, torch.tensor([(1, 4, 4)], device=device), 16)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert (gradient[:16] == 1).all() and (gradient[16:] == 0).all()


@pytest.mark.parametrize("mode", ["concat", "mean"])
def test_padding_is_merged_in_place_in_either_order(mode: str, device: str) -> None:
    x = torch.randn(40, 8, device=device)
    grid = torch.tensor([(1, 4, 4)], device=device)
    outs = [spatial_merge(x, grid, 40, mode, order) for order in ("merge_block", "raster")]
    assert torch.equal(outs[0][4:], outs[1][4:]) and not torch.equal(outs[0][:4], outs[1][:4])


def test_every_call_sees_its_own_tensors(device: str) -> None:
    case = GridCase("relaunched", "launches kept from the first call", ((1, 6, 8), (1, 4, 4)))
    for seed in range(3):
        verify(make_grid_inputs(case, torch.float16, device, seed), "mean", "raster")


def test_gradients_with_zero_strides(device: str) -> None:
    inputs = make_grid_inputs(grid_cases("smoke")[0], torch.float32, device)
    for way in (("concat", "raster"), ("mean", "merge_block")):
        assert_expanded_gradients(lambda x, way=way: spatial_merge(x, inputs.grid, inputs.total, *way), inputs.x)


@pytest.mark.no_interpret
@pytest.mark.parametrize(("mode", "order"), WAYS)
def test_gradcheck(mode: str, order: str) -> None:
    grid = torch.tensor([(1, 4, 2), (2, 2, 2)])
    x = torch.randn(22, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: spatial_merge(x, grid, 20, mode, order), (x,))


class TestContract(GridContract):
    op = "spatial_merge"
    kernels = ("spatial_merge_fwd", "spatial_merge_bwd")
    good = {"x": torch.ones(16, 8), "grid": GRID, "total": 16}

    def call(self, grid: Tensor, device: str) -> Any:
        return spatial_merge(torch.randn(40, 8, device=device), grid, 40)

    def op_calls(self, grid: Tensor, device: str) -> dict[str, Callable[[], Any]]:
        x = torch.randn(40, 8, device=device)
        return {
            "spatial_merge": lambda: torch.ops.vk.spatial_merge(x, grid, 40),
            "spatial_merge_backward": lambda: torch.ops.vk.spatial_merge_backward(x[:10], grid, 40, 40, "mean"),
        }

    def results_of_wild(self, grid: Tensor, x: Tensor) -> list[Tensor]:
        results = []
        for mode, order in WAYS:
            out = torch.ops.vk.spatial_merge(x, grid, x.shape[0], mode, order)
            results += [out, *torch.autograd.grad(out, x, torch.ones_like(out))]
        return results

    def call_without_waiting(self, inputs: GridInputs) -> None:
        x = inputs.x.requires_grad_()
        spatial_merge(x, inputs.grid, inputs.total, "mean", "raster").sum().backward()


def test_more_patches_than_are_merged_are_refused(device: str) -> None:
    x = torch.randn(40, 8, device=device)
    grid = torch.tensor([(1, 4, 4), (1, 4, 8)])
    with pytest.raises(ValueError, match=r"has 48 patches, expected at most total = 40"):
        spatial_merge(x, grid, 40)
    with torch_ops.settings(checked=True), pytest.raises(ValueError, match="has 48 patches"):
        torch.ops.vk.spatial_merge(x, grid.to(device), 40)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.ones(16)}, r"x has shape \[16\], expected shape \[rows, columns\]"),
    ({"x": torch.ones(16, 8).int()}, r"x is int32, expected float16, bfloat16"),
    ({"total": 14}, r"total is 14, expected a multiple of 4 = merge_size \* merge_size"),
    ({"total": 20}, r"total is 20, expected at most the 16 rows of x"),
    ({"mode": "sum"}, r"mode is 'sum', expected one of concat, mean"),
    ({"order": "z"}, r"order is 'z', expected one of merge_block, raster"),
    ({"merge_size": 17}, r"merge_size is 17, expected from 1 to 16"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refuses(change: dict[str, Any], message: str, device: str) -> None:
    assert_refuses(spatial_merge, placed(TestContract.good, device), change, message)


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dout": torch.ones(3, 32)}, r"dout has 3, expected 4 rows for total = 16"),
        ({"dout": torch.ones(4, 30)}, r"columns of dout is 30, expected a multiple of 4"),
        ({"rows": 12}, r"rows is 12, expected at least total = 16"),
    ],
)
def test_backward_refuses(change: dict[str, Any], message: str, device: str) -> None:
    good = {"dout": torch.ones(4, 32), "grid": GRID, "total": 16, "rows": 20}
    assert_refuses(torch.ops.vk.spatial_merge_backward, placed(good, device), change, message)


def test_forward_mode_is_refused(device: str) -> None:
    x = torch.randn(16, 8, device=device)
    assert_no_tangent("spatial_merge", lambda x: spatial_merge(x, GRID, 16), x)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements(device: str) -> None:
    """The last rows lie past 2^31 elements of x, of what is made of it and of its gradient."""
    width, side = 1152, 1368
    total = side * side
    assert total * width > 2**31
    grid = torch.tensor([(1, side, side)], device=device)
    x = torch.empty(total, width, device=device, dtype=torch.bfloat16).normal_()
    merged = torch.ops.vk.spatial_merge(x, grid, total, "concat", "merge_block")
    assert torch.equal(merged[-2:], x[-8:].view(2, -1))
    assert torch.equal(torch.ops.vk.spatial_merge_backward(merged, grid, total, total)[-8:], x[-8:])
