"""Numerics, semantics and refusals of `pos_embed_interpolate`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import interpolate

from tests.grids.verify import (
    BATCHES,
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
from torch_ops import pos_embed_interpolate
from torch_ops.testing import assert_close_to_reference, check, poisoned, references
from torch_ops.testing.cases import GridCase, GridInputs, grid_cases, make_grid_inputs

CORNERS = pytest.mark.parametrize("align_corners", [True, False], ids=["corners", "half_pixel"])

pytestmark = pytest.mark.interpret


def verify(
    table: Tensor, dout: Tensor, grid: Tensor, total: int, merge_size: int = 2, align_corners: bool = True
) -> None:
    rest = (grid, total, merge_size, align_corners)
    with poisoned():
        actual = differentiate(torch.ops.vk.pos_embed_interpolate, table, dout, *rest)
    eager, truth = (
        differentiate(references.pos_embed_interpolate, exact, dout, *rest) for exact in (table, table.double())
    )
    check(actual, eager, truth)


def verify_inputs(inputs: GridInputs, align_corners: bool) -> None:
    verify(inputs.table, inputs.dout, inputs.grid, inputs.total, inputs.merge_size, align_corners)


@CORNERS
@pytest.mark.parametrize("dtype", FULL_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_agrees_with_reference(case: GridCase, dtype: torch.dtype, align_corners: bool, device: str) -> None:
    verify_inputs(make_grid_inputs(case, dtype, device), align_corners)


@given(batches(), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**16))
@hypothesis_settings(max_examples=3 if INTERPRET else 60)
def test_agrees_on_anything(case: GridCase, dtype: torch.dtype, align_corners: bool, seed: int) -> None:
    verify_inputs(make_grid_inputs(case, dtype, DEVICE, seed), align_corners)


@pytest.mark.gpu
@pytest.mark.parametrize("case", grid_cases("bench"), ids=ids)
def test_agrees_at_real_shapes(case: GridCase, device: str) -> None:
    verify_inputs(make_grid_inputs(case, torch.bfloat16, device), True)


class TestTransformers(OfTransformers):
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @CORNERS
    @pytest.mark.parametrize("grids", BATCHES)
    def test_positions_of_qwen3(self, grids: Any, align_corners: bool, dtype: torch.dtype, device: str) -> None:
        grid = torch.tensor(grids)
        indices, weights = self.utils.get_vision_interpolation_indices_and_weights(
            grid, num_grid_per_side=9, mode="bilinear", align_corners=align_corners, spatial_merge_size=2
        )
        drawn = torch.randn(81, 40).to(dtype)
        dout = torch.randn(len(indices), 40).to(dtype)

        def theirs(table: Tensor) -> Tensor:
            return (table[indices] * weights.to(torch.promote_types(table.dtype, torch.float32))[:, :, None]).sum(1)

        def rounded(table: Tensor) -> Tensor:
            return theirs(table).to(dtype)

        def ours(table: Tensor) -> Tensor:
            return pos_embed_interpolate(table.to(device), grid, len(indices), align_corners=align_corners).cpu()

        exact = differentiate(
            lambda table: references.pos_embed_interpolate(table, grid, len(indices), 2, align_corners),
            drawn.double(), dout,
        )  # fmt: skip
        check(differentiate(ours, drawn, dout), differentiate(rounded, drawn, dout), exact)

    def test_a_whole_encoder_of_theirs(self, device: str) -> None:
        """Its embedding of patches and positions, as its first block gets them."""
        grid, total = torch.tensor(((1, 8, 12), (2, 4, 6))), 8 * 12 + 2 * 4 * 6
        embedded, table, seen = self.encode(grid, total)
        hidden = embedded + pos_embed_interpolate(table.detach().to(device), grid, total).cpu()
        truth = embedded.double() + references.pos_embed_interpolate(table.detach().double(), grid, total)
        assert_close_to_reference(hidden, seen["hidden"], truth)

    def test_frames_are_where_their_cu_seqlens_say(self) -> None:
        grid = torch.tensor(((1, 4, 30), (2, 8, 8), (3, 10, 6)))
        cu = self.utils.get_vision_cu_seqlens(grid).tolist()
        frames = [(1, 4, 30), *[(1, 8, 8)] * 2, *[(1, 10, 6)] * 3]
        table = torch.randn(49, 8)
        out = pos_embed_interpolate(table, grid, cu[-1])
        for start, end, (t, h, w) in zip(cu[:-1], cu[1:], frames, strict=True):
            assert torch.equal(out[start:end], pos_embed_interpolate(table, torch.tensor([(t, h, w)]), end - start))


def test_rows_past_the_grid_are_padding(device: str) -> None:
    grid = torch.tensor([(1, 4, 4)], device=device)
    table = torch.randn(9, 8, device=device, requires_grad=True)
    out = pos_embed_interpolate(table, grid, 40)
    assert (out[16:] == 0).all()
    dout = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out[:16], table, dout[:16], retain_graph=True)
    dout[16:] = torch.nan
    assert torch.equal(torch.autograd.grad(out, table, dout)[0], expected)


def test_rows_past_the_total_are_left_out(device: str) -> None:
    grid = torch.tensor([(1, 4, 4), (2, 4, 6)], device=device)
    table, dout = torch.randn(9, 8, device=device), torch.randn(30, 8, device=device)
    short, whole = (pos_embed_interpolate(table, grid, total) for total in (30, 64))
    assert torch.equal(short, whole[:30])
    verify(table, dout, grid, 30)


def test_frames_of_a_video_get_the_same(device: str) -> None:
    table = torch.randn(49, 16, device=device)
    video = pos_embed_interpolate(table, torch.tensor([(3, 4, 6)], device=device), 72)
    image = pos_embed_interpolate(table, torch.tensor([(1, 4, 6)], device=device), 24)
    assert torch.equal(video, image.repeat(3, 1))


def test_an_image_is_the_same_among_others(device: str) -> None:
    table = torch.randn(49, 16, device=device)
    grids = ((1, 6, 4), (2, 2, 8), (1, 4, 4))
    packed = pos_embed_interpolate(table, torch.tensor(grids, device=device), 72)
    alone = [pos_embed_interpolate(table, torch.tensor([g], device=device), g[0] * g[1] * g[2]) for g in grids]
    assert torch.equal(packed, torch.cat(alone))


def test_half_pixel_centres_are_those_of_interpolate(device: str) -> None:
    table = torch.randn(25, 8, device=device)

    def theirs(table: Tensor, h: int, w: int) -> Tensor:
        resampled = interpolate(table.t().reshape(1, 8, 5, 5), (h, w), mode="bilinear", align_corners=False)
        return resampled[0].flatten(1).t()

    for h, w in ((3, 11), (5, 5), (1, 20)):
        ours = pos_embed_interpolate(table, torch.tensor([(1, h, w)]), h * w, merge_size=1, align_corners=False)
        assert_close_to_reference(ours, theirs(table, h, w), theirs(table.double(), h, w))


def test_gradient_of_entries_that_nothing_takes_is_zero(device: str) -> None:
    table = torch.randn(400, 8, device=device, requires_grad=True)
    out = pos_embed_interpolate(table, torch.tensor([(1, 2, 2)], device=device), 4)
    (gradient,) = torch.autograd.grad(out, table, torch.ones_like(out))
    corners = gradient.reshape(20, 20, 8)[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 1).all() and gradient.sum() == 32


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", grid_cases("smoke"), ids=ids)
def test_same_bits_every_time(case: GridCase, device: str) -> None:
    inputs = make_grid_inputs(case, torch.float16, device)
    first, second = (
        differentiate(pos_embed_interpolate, inputs.table, inputs.dout, inputs.grid, inputs.total) for _ in range(2)
    )
    assert torch.equal(first["out"], second["out"]) and torch.equal(first["gradient"], second["gradient"])


def test_every_call_sees_its_own_tensors(device: str) -> None:
    case = GridCase("relaunched", "launches kept from the first call", ((1, 6, 8), (1, 4, 4)))
    for seed in range(3):
        verify_inputs(make_grid_inputs(case, torch.float16, device, seed), True)


def test_same_total_of_other_images(device: str) -> None:
    """The plan cache depends on shapes alone, not on the grid's values."""
    table, dout = torch.randn(49, 16, device=device), torch.randn(40, 16, device=device)
    for grids in (((1, 4, 6), (1, 2, 8)), ((1, 2, 8), (1, 4, 6)), ((0, 2, 2), (1, 20, 2))):
        verify(table, dout, torch.tensor(grids, device=device), 40)


def test_gradients_with_zero_strides(device: str) -> None:
    inputs = make_grid_inputs(grid_cases("smoke")[0], torch.float32, device)
    assert_expanded_gradients(lambda x: pos_embed_interpolate(x, inputs.grid, inputs.total), inputs.table)


@pytest.mark.no_interpret
@CORNERS
def test_gradcheck(align_corners: bool) -> None:
    grid = torch.tensor([(1, 4, 6), (2, 2, 2)])
    table = torch.randn(16, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda table: pos_embed_interpolate(table, grid, 36, 2, align_corners), (table,))


class TestContract(GridContract):
    op = "pos_embed_interpolate"
    kernels = ("pos_embed_fwd", "pos_embed_bwd")
    good = {"table": torch.ones(16, 8), "grid": GRID, "total": 16}

    def call(self, grid: Tensor, device: str) -> Any:
        return pos_embed_interpolate(torch.randn(16, 8, device=device), grid, 40)

    def op_calls(self, grid: Tensor, device: str) -> dict[str, Callable[[], Any]]:
        x = torch.randn(40, 8, device=device)
        return {
            "pos_embed_interpolate": lambda: torch.ops.vk.pos_embed_interpolate(x[:16], grid, 40),
            "pos_embed_interpolate_backward": lambda: torch.ops.vk.pos_embed_interpolate_backward(x, grid, 16),
        }

    def results_of_wild(self, grid: Tensor, x: Tensor) -> list[Tensor]:
        table = torch.randn(16, 8, device=x.device, requires_grad=True)
        results = []
        for align_corners in (True, False):
            out = torch.ops.vk.pos_embed_interpolate(table, grid, x.shape[0], 2, align_corners)
            results += [out, *torch.autograd.grad(out, table, x.detach())]
        return results

    def call_without_waiting(self, inputs: GridInputs) -> None:
        table = inputs.table.requires_grad_()
        pos_embed_interpolate(table, inputs.grid, inputs.total).backward(inputs.dout)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"table": torch.ones(16)}, r"table has shape \[16\], expected shape \[S \* S, C\]"),
    ({"table": torch.ones(15, 8)}, r"entries of table is 15, expected a square"),
    ({"table": torch.ones(16, 8).int()}, r"table is int32, expected float16, bfloat16"),
    ({"total": -4}, r"total is .*, expected from 0"),
    ({"grid": GRID.to("meta")}, r"grid is on meta, expected on .* as table is"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refuses(change: dict[str, Any], message: str, device: str) -> None:
    assert_refuses(pos_embed_interpolate, placed(TestContract.good, device), change, message)


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dout": torch.ones(16)}, r"dout has .*, expected shape \[total, C\]"),
        ({"entries": 15}, r"entries is 15, expected a square"),
    ],
)
def test_backward_refuses(change: dict[str, Any], message: str, device: str) -> None:
    good = {"dout": torch.ones(16, 8), "grid": GRID, "entries": 16}
    assert_refuses(torch.ops.vk.pos_embed_interpolate_backward, placed(good, device), change, message)


def test_forward_mode_is_refused(device: str) -> None:
    x = torch.randn(16, 8, device=device)
    assert_no_tangent("pos_embed_interpolate", lambda x: pos_embed_interpolate(x, GRID, 16), x)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements(device: str) -> None:
    """The last rows of the embedding lie past 2^31 elements."""
    width, side = 1152, 1368
    total = side * side
    assert total * width > 2**31
    grid = torch.tensor([(1, side, side)], device=device)
    table = torch.randn(2304, width, device=device, dtype=torch.bfloat16)
    out = torch.ops.vk.pos_embed_interpolate(table, grid, total)
    # The last patch lies on the last entry.
    assert torch.equal(out[-1], table[-1])
    assert torch.ops.vk.pos_embed_interpolate_backward(out.normal_(), grid, 2304)[-1].isfinite().all()
