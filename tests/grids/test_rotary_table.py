"""Numerics, semantics and refusals of `rotary_table`."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from torch import Tensor

from tests.grids.verify import BATCHES, CASES, GRID, GridContract, OfTransformers, batches, ids, placed
from tests.verify import DEVICE, GPU, INTERPRET, assert_refuses
from torch_ops import rotary_table
from torch_ops.testing import assert_close_to_reference, check, poisoned, references
from torch_ops.testing.cases import GridCase, GridInputs, grid_cases, make_grid_inputs

pytestmark = pytest.mark.interpret


def verify(grid: Tensor, total: int, dim: int, theta: float = 10000.0, merge_size: int = 2) -> None:
    with poisoned():
        actual = torch.ops.vk.rotary_table(grid, total, dim, theta, merge_size)
    eager, truth = (
        references.rotary_table(grid, total, dim, theta, merge_size, dtype) for dtype in (torch.float32, torch.float64)
    )
    names = ("cos", "sin")
    check(*(dict(zip(names, tables, strict=True)) for tables in (actual, eager, truth)))


def verify_case(case: GridCase, device: str, dim: int = 72, theta: float = 10000.0) -> None:
    inputs = make_grid_inputs(case, torch.float32, device)
    verify(inputs.grid, inputs.total, dim, theta, inputs.merge_size)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_agrees_with_reference(case: GridCase, device: str) -> None:
    verify_case(case, device)


@pytest.mark.parametrize("dim", [8, 80, 256] if INTERPRET else range(8, 257, 8))
def test_every_head_dim(dim: int, device: str) -> None:
    case = GridCase("dim", "columns", ((1, 6, 10), (1, 20, 2)), padding=3)
    verify_case(case, device, dim, 10000.0 if dim % 16 else 500.0)


@given(batches())
@hypothesis_settings(max_examples=3 if INTERPRET else 60)
def test_agrees_on_anything(case: GridCase) -> None:
    verify_case(case, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", grid_cases("bench"), ids=ids)
def test_agrees_at_real_shapes(case: GridCase, device: str) -> None:
    verify_case(case, device)


@pytest.mark.parametrize("dim", [72, 256])
def test_far_positions(dim: int, device: str) -> None:
    """Thousands of patches high: the fast approximations of sine and cosine would be off by as many ulps."""
    case = GridCase("far", "large angles", ((1, 4 if INTERPRET else 9000, 2), (1, 2, 40 if INTERPRET else 5000)))
    verify_case(case, device, dim)


@pytest.mark.skipif(not (INTERPRET or GPU), reason="needs the interpreter or a GPU")
def test_kernel_reduces_large_angles() -> None:
    """At the first frequency, 1, an angle is a position: up to a million of them, against fp64."""
    height = 2**8 if INTERPRET else 2**20
    grid = torch.tensor([(1, height, 1)], device=DEVICE)
    tables = torch.ops.vk.rotary_table(grid, height, 8, 10000.0, 1)
    angles = torch.arange(height, device=grid.device)
    for table, function in zip(tables, (torch.cos, torch.sin), strict=True):
        exact = function(angles.double())
        assert_close_to_reference(table[:, 0], function(angles.float()), exact)
        assert (table[:, 0] - exact).abs().max() < torch.finfo(torch.float32).eps


class TestTransformers(OfTransformers):
    @pytest.mark.parametrize("grids", BATCHES)
    @pytest.mark.parametrize("dim", [64, 72, 80])
    def test_table_of_qwen3(self, grids: Any, dim: int, device: str) -> None:
        grid = torch.tensor(grids)
        config = SimpleNamespace(
            rope_parameters={"rope_type": "axial", "rope_theta": 10000.0}, hidden_size=16 * dim, num_attention_heads=16
        )
        try:
            embedding = self.qwen3.Qwen3VLVisionRotaryEmbedding(config)
        except TypeError:
            pytest.skip("this Transformers has another constructor")
        self._assert_theirs(embedding(torch.empty(1), self.positions(grid)), grid, dim, device)

    def _assert_theirs(self, theirs: tuple[Tensor, Tensor], grid: Tensor, dim: int, device: str) -> None:
        total = len(theirs[0])
        ours = rotary_table(grid.to(device), total, dim)
        exact = references.rotary_table(grid, total, dim, dtype=torch.float64)
        for name, table, other, truth in zip(("cos", "sin"), ours, theirs, exact, strict=True):
            assert torch.equal(other[:, : dim // 2], other[:, dim // 2 :])
            assert_close_to_reference(table.cpu(), other[:, : dim // 2], truth, name)

    @pytest.mark.parametrize("merge_size", [1, 2])
    def test_positions_are_theirs(self, merge_size: int, device: str) -> None:
        """Angles tell positions apart: at the first frequency, which is 1, an angle is a position."""
        grid = torch.tensor(((1, 4, 30), (2, 8, 8), (1, 2, 2), (3, 10, 6)))
        wanted = self.positions(grid, merge_size)
        tables = rotary_table(grid.to(device), len(wanted), 8, merge_size=merge_size)
        for table, function in zip(tables, (torch.cos, torch.sin), strict=True):
            assert_close_to_reference(table.cpu()[:, [0, 2]], function(wanted.float()), function(wanted.double()))

    def test_a_whole_encoder_of_theirs(self, device: str) -> None:
        """Its rotary tables, as its first block gets them."""
        grid = torch.tensor(((1, 8, 12), (2, 4, 6)))
        _, _, seen = self.encode(grid, 8 * 12 + 2 * 4 * 6)
        self._assert_theirs(seen["rotary"], grid, 32, device)


def test_rows_past_the_grid_are_padding(device: str) -> None:
    cos, sin = rotary_table(torch.tensor([(1, 4, 4)], device=device), 40, 16)
    assert (cos[16:] == 1).all() and (sin[16:] == 0).all()


def test_rows_past_the_total_are_left_out(device: str) -> None:
    grid = torch.tensor([(1, 4, 4), (2, 4, 6)], device=device)
    for short, whole in zip(rotary_table(grid, 30, 16), rotary_table(grid, 64, 16), strict=True):
        assert torch.equal(short, whole[:30])


def test_same_total_of_other_images(device: str) -> None:
    """The plan cache depends on shapes alone, not on the grid's values."""
    for grids in (((1, 4, 6), (1, 2, 8)), ((1, 2, 8), (1, 4, 6)), ((0, 2, 2), (1, 20, 2))):
        verify(torch.tensor(grids, device=device), 40, 16)


def test_grid_of_other_strides(device: str) -> None:
    grid = torch.tensor([(1, 4, 6), (2, 2, 2)], device=device)
    strided = grid.t().contiguous().t()
    for ours, wanted in zip(rotary_table(strided, 32, 16), rotary_table(grid, 32, 16), strict=True):
        assert torch.equal(ours, wanted)


class TestContract(GridContract):
    op = "rotary_table"
    kernels = ("rotary_table",)
    directions = ("forward",)
    good = {"grid": GRID, "total": 16, "dim": 16}

    def call(self, grid: Tensor, device: str) -> Any:
        return rotary_table(grid, 40, 16, device=device)

    def op_calls(self, grid: Tensor, device: str) -> dict[str, Callable[[], Any]]:
        return {"rotary_table": lambda: torch.ops.vk.rotary_table(grid, 40, 16)}

    def results_of_wild(self, grid: Tensor, x: Tensor) -> list[Tensor]:
        return [*torch.ops.vk.rotary_table(grid, x.shape[0], 16)]

    def call_without_waiting(self, inputs: GridInputs) -> None:
        rotary_table(inputs.grid, inputs.total, 72)


def test_another_merge_size_in_words(device: str) -> None:
    with pytest.raises(ValueError, match=r"grid\[0, 1\] is 4, expected a multiple of merge_size = 3 and at least 0"):
        rotary_table(torch.tensor([(1, 4, 6)]), 24, 16, merge_size=3, device=device)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"grid": GRID.int()}, r"grid is int32, expected int64"),
    ({"grid": GRID[0]}, r"grid has shape \[3\], expected shape \[n, 3\]"),
    ({"grid": GRID[:, :2]}, r"grid has shape \[1, 2\], expected shape \[n, 3\]"),
    ({"grid": GRID.to_sparse()}, r"grid is of layout .*, expected a dense tensor"),
    ({"total": -1}, r"total is -1, expected from 0 to 1073741824"),
    ({"total": 2**31}, r"total is 2147483648, expected from 0 to 1073741824"),
    ({"dim": 12}, r"dim, is 12, expected a multiple of 8 from 8 to 256"),
    ({"theta": 0.5}, r"theta is 0.5, expected a number of at least 1 that fp32 holds"),
    ({"theta": float("nan")}, r"theta is nan, expected a number of at least 1 that fp32 holds"),
    ({"merge_size": 0}, r"merge_size is 0, expected from 1 to 16"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refuses(change: dict[str, Any], message: str, device: str) -> None:
    assert_refuses(rotary_table, placed(TestContract.good, device), change, message)
