"""Numerics, semantics and refusals of the ops on image grids: rotary_table, pos_embed_interpolate, spatial_merge."""

import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import interpolate

import torch_ops
from torch_ops import pos_embed_interpolate, rotary_table, spatial_merge
from torch_ops.bench.app import ROOMS
from torch_ops.bench.contest import Terms, contest
from torch_ops.testing import assert_close_to_reference, check, poisoned, references
from torch_ops.testing.cases import ROW_LAYOUTS, GridCase, GridInputs, grid_cases, lay_out, make_grid_inputs

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
GPU = torch.cuda.is_available()
# The interpreter computes in numpy, which has no bf16.
DTYPES = [torch.float16, torch.float32] if INTERPRET else [torch.float16, torch.bfloat16, torch.float32]
CASES = [case for case in grid_cases("edge") if not INTERPRET or case.layout in ("contiguous", "odd_strides")]
# There the dtypes share all code but a cast, and each program takes milliseconds.
FULL_DTYPES = [torch.float16] if INTERPRET else DTYPES
WAYS = list(itertools.product(("concat", "mean"), ("merge_block", "raster")))

pytestmark = pytest.mark.interpret


def _ids(value: Any) -> str | None:
    return value.name if isinstance(value, GridCase) else None


def verify_rotary(inputs: GridInputs, dim: int, theta: float = 10000.0) -> None:
    with poisoned():
        actual = torch.ops.vk.rotary_table(inputs.grid, inputs.total, dim, theta, inputs.merge_size)
    eager, truth = (
        references.rotary_table(inputs.grid, inputs.total, dim, theta, inputs.merge_size, dtype)
        for dtype in (torch.float32, torch.float64)
    )
    names = ("cos", "sin")
    check(*(dict(zip(names, tables, strict=True)) for tables in (actual, eager, truth)))


def _differentiate(function: Callable[..., Tensor], leaf: Tensor, dout: Tensor, *rest: Any) -> dict[str, Tensor]:
    leaf = leaf.detach().requires_grad_()
    out = function(leaf, *rest)
    (gradient,) = torch.autograd.grad(out, leaf, dout.to(out.dtype))
    return {"out": out, "gradient": gradient}


def verify_positions(inputs: GridInputs, align_corners: bool) -> None:
    rest = (inputs.grid, inputs.total, inputs.merge_size, align_corners)
    with poisoned():
        actual = _differentiate(torch.ops.vk.pos_embed_interpolate, inputs.table, inputs.dout, *rest)
    eager, truth = (
        _differentiate(references.pos_embed_interpolate, table, inputs.dout, *rest)
        for table in (inputs.table, inputs.table.double())
    )
    check(actual, eager, truth)


def dout_of_merge(inputs: GridInputs, mode: str) -> Tensor:
    unit = inputs.merge_size**2
    rows = inputs.total // unit
    if mode == "mean":
        return inputs.dout[:rows]
    return inputs.dout[: rows * unit].reshape(rows, unit * inputs.dout.shape[1])


def verify_merge(inputs: GridInputs, mode: str, order: str) -> None:
    total = inputs.total // inputs.merge_size**2 * inputs.merge_size**2
    rest = (inputs.grid, total, mode, order, inputs.merge_size)
    dout = dout_of_merge(inputs, mode)
    with poisoned():
        actual = _differentiate(torch.ops.vk.spatial_merge, inputs.x, dout, *rest)
    eager, truth = (_differentiate(references.spatial_merge, x, dout, *rest) for x in (inputs.x, inputs.x.double()))
    check(actual, eager, truth)
    if mode == "concat":
        assert torch.equal(actual["out"], eager["out"]) and torch.equal(actual["gradient"], eager["gradient"])


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_rotary_table_agrees_with_reference(case: GridCase, device: str) -> None:
    verify_rotary(make_grid_inputs(case, torch.float32, device), 72)


@pytest.mark.parametrize("dim", [8, 80, 256] if INTERPRET else range(8, 257, 8))
def test_rotary_table_at_every_head_dim(dim: int, device: str) -> None:
    case = GridCase("dim", "columns", ((1, 6, 10), (1, 20, 2)), padding=3)
    verify_rotary(make_grid_inputs(case, torch.float32, device), dim, 10000.0 if dim % 16 else 500.0)


@pytest.mark.parametrize("align_corners", [True, False], ids=["corners", "half_pixel"])
@pytest.mark.parametrize("dtype", FULL_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_positions_agree_with_reference(case: GridCase, dtype: torch.dtype, align_corners: bool, device: str) -> None:
    verify_positions(make_grid_inputs(case, dtype, device), align_corners)


@pytest.mark.parametrize(("mode", "order"), WAYS)
@pytest.mark.parametrize("dtype", FULL_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_merge_agrees_with_reference(case: GridCase, dtype: torch.dtype, mode: str, order: str, device: str) -> None:
    verify_merge(make_grid_inputs(case, dtype, device), mode, order)


@st.composite
def batches(draw: Any) -> GridCase:
    merge_size = draw(st.sampled_from([1, 2, 2, 2, 3]))
    longest, most = (6, 4) if INTERPRET else (24, 8)
    sides = st.integers(0, longest // merge_size).map(lambda n: n * merge_size)
    images = st.tuples(st.integers(0, 3), sides, sides)
    # Of few numbers the largest error of eager may be small by luck, and the rule would ask the same of ours.
    always = (1, 6, 6) if INTERPRET else (1, 12, 18)
    return GridCase(
        "fuzz", "anything", (*draw(st.lists(images, max_size=most)), always),
        width=draw(st.integers(20, 70)), side=draw(st.integers(1, 12)),
        padding=draw(st.sampled_from([0, 0, 1, 9, 36])), merge_size=merge_size,
        layout=draw(st.sampled_from(ROW_LAYOUTS)),
    )  # fmt: skip


@given(batches(), st.sampled_from(DTYPES), st.booleans(), st.sampled_from(WAYS), st.integers(0, 2**16))
@hypothesis_settings(max_examples=3 if INTERPRET else 60)
def test_agrees_on_anything(
    case: GridCase, dtype: torch.dtype, align_corners: bool, way: tuple[str, str], seed: int
) -> None:
    inputs = make_grid_inputs(case, dtype, "cuda" if GPU else "cpu", seed)
    verify_rotary(inputs, 72)
    verify_positions(inputs, align_corners)
    verify_merge(inputs, *way)


@pytest.mark.gpu
@pytest.mark.parametrize("case", grid_cases("bench"), ids=_ids)
def test_agrees_at_real_shapes(case: GridCase, device: str) -> None:
    inputs = make_grid_inputs(case, torch.bfloat16, device)
    verify_rotary(inputs, 72)
    verify_positions(inputs, True)
    for way in WAYS:
        verify_merge(inputs, *way)


class TestTransformers:
    """What the installed Transformers computes for its Qwen-VL encoders."""

    GRIDS = [
        pytest.param(((1, 16, 12),), id="image"),
        pytest.param(((4, 6, 8),), id="video"),
        pytest.param(((1, 4, 30), (2, 8, 8), (1, 2, 2), (3, 10, 6)), id="mixed"),
        pytest.param(((1, 2, 2),) * 150, id="many"),
    ]

    @pytest.fixture(autouse=True)
    def vision(self) -> Any:
        self.utils = pytest.importorskip("transformers.vision_utils")
        self.qwen3 = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
        self.qwen2 = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")

    def _positions(self, grid: Tensor, merge_size: int = 2) -> Tensor:
        return self.utils.get_vision_position_ids(grid, merge_size)

    @pytest.mark.parametrize("grids", GRIDS)
    @pytest.mark.parametrize("dim", [64, 72, 80])
    def test_rotary_table_of_qwen3(self, grids: Any, dim: int, device: str) -> None:
        grid = torch.tensor(grids)
        config = SimpleNamespace(
            rope_parameters={"rope_type": "axial", "rope_theta": 10000.0}, hidden_size=16 * dim, num_attention_heads=16
        )
        try:
            embedding = self.qwen3.Qwen3VLVisionRotaryEmbedding(config)
        except TypeError:
            pytest.skip("this Transformers has another constructor")
        theirs = embedding(torch.empty(1), self._positions(grid))
        ours = rotary_table(grid.to(device), len(theirs[0]), dim)
        for name, table, other, truth in zip(
            ("cos", "sin"), ours, theirs, references.rotary_table(grid, len(theirs[0]), dim, dtype=torch.float64),
            strict=True,
        ):  # fmt: skip
            assert torch.equal(other[:, : dim // 2], other[:, dim // 2 :])
            assert_close_to_reference(table.cpu(), other[:, : dim // 2], truth, name)

    @pytest.mark.parametrize("merge_size", [1, 2])
    def test_positions_are_theirs(self, merge_size: int, device: str) -> None:
        """By angles that tell one from another: at the first frequency, which is 1, an angle is a position."""
        grid = torch.tensor(((1, 4, 30), (2, 8, 8), (1, 2, 2), (3, 10, 6)))
        wanted = self._positions(grid, merge_size)
        cos, sin = rotary_table(grid.to(device), len(wanted), 8, merge_size=merge_size)
        angles = torch.atan2(sin, cos).cpu()[:, [0, 2]]
        turns = (wanted - angles) / (2 * torch.pi)
        torch.testing.assert_close(turns, turns.round(), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("align_corners", [True, False], ids=["corners", "half_pixel"])
    @pytest.mark.parametrize("grids", GRIDS)
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

        exact = _differentiate(
            lambda table: references.pos_embed_interpolate(table, grid, len(indices), 2, align_corners),
            drawn.double(), dout,
        )  # fmt: skip
        check(_differentiate(ours, drawn, dout), _differentiate(rounded, drawn, dout), exact)

    def test_a_whole_encoder_of_theirs(self, device: str) -> None:
        """Its embedding of patches, positions and rotary tables, as its first block gets them."""
        config = self.qwen3.Qwen3VLVisionConfig(
            hidden_size=64, num_heads=2, depth=1, intermediate_size=64, out_hidden_size=32, num_position_embeddings=81,
            deepstack_visual_indexes=[],
        )  # fmt: skip
        model = self.qwen3.Qwen3VLVisionModel(config).eval()
        grid = torch.tensor(((1, 8, 12), (2, 4, 6)))
        total = 8 * 12 + 2 * 4 * 6
        patches = torch.randn(total, config.in_channels * config.temporal_patch_size * config.patch_size**2)
        seen: dict[str, Any] = {}

        def note(module: Any, args: Any, kwargs: Any) -> None:
            seen["hidden"] = args[0] if args else kwargs["hidden_states"]
            seen["rotary"] = kwargs["position_embeddings"]

        model.blocks[0].register_forward_pre_hook(note, with_kwargs=True)
        with torch.no_grad():
            model(patches, grid)
            embedded = model.patch_embed(patches)
            table = model.pos_embed.weight.to(device)
            hidden = embedded + pos_embed_interpolate(table, grid, total).cpu()
        torch.testing.assert_close(hidden, seen["hidden"])
        for ours, theirs in zip(rotary_table(grid, total, 32, device=device), seen["rotary"], strict=True):
            torch.testing.assert_close(ours.cpu(), theirs[:, :16])

    def test_frames_are_where_their_cu_seqlens_say(self) -> None:
        grid = torch.tensor(((1, 4, 30), (2, 8, 8), (3, 10, 6)))
        cu = self.utils.get_vision_cu_seqlens(grid).tolist()
        frames = [(1, 4, 30), *[(1, 8, 8)] * 2, *[(1, 10, 6)] * 3]
        table = torch.randn(49, 8)
        out = pos_embed_interpolate(table, grid, cu[-1])
        for start, end, (t, h, w) in zip(cu[:-1], cu[1:], frames, strict=True):
            assert torch.equal(out[start:end], pos_embed_interpolate(table, torch.tensor([(t, h, w)]), end - start))

    def test_merge_block_order_is_what_their_merger_views(self, device: str) -> None:
        x = torch.randn(48, 8, device=device)
        merged = spatial_merge(x, torch.tensor([(1, 6, 8)]), 48)
        assert torch.equal(merged, x.view(-1, 32)) and merged.data_ptr() != x.data_ptr()
        raster = torch.empty_like(x)
        rows, cols = self._positions(torch.tensor([(1, 6, 8)])).unbind(1)
        raster[(rows * 8 + cols).to(device)] = x
        assert torch.equal(spatial_merge(raster, torch.tensor([(1, 6, 8)]), 48, order="raster"), merged)


@pytest.mark.parametrize("dim", [72, 256])
def test_rotary_table_of_far_positions(dim: int, device: str) -> None:
    """Thousands of patches high: the fast approximations of sine and cosine would be off by as many ulps."""
    case = GridCase("far", "large angles", ((1, 4 if INTERPRET else 9000, 2), (1, 2, 40 if INTERPRET else 5000)))
    verify_rotary(make_grid_inputs(case, torch.float32, device), dim)


@pytest.mark.skipif(not (INTERPRET or GPU), reason="needs the interpreter or a GPU")
def test_kernel_reduces_large_angles() -> None:
    """At the first frequency, 1, an angle is a position: up to a million of them, against fp64."""
    height = 2**8 if INTERPRET else 2**20
    grid = torch.tensor([(1, height, 1)], device="cuda" if GPU else "cpu")
    tables = torch.ops.vk.rotary_table(grid, height, 8, 10000.0, 1)
    angles = torch.arange(height, device=grid.device)
    for table, function in zip(tables, (torch.cos, torch.sin), strict=True):
        exact = function(angles.double())
        assert_close_to_reference(table[:, 0], function(angles.float()), exact)
        assert (table[:, 0] - exact).abs().max() < torch.finfo(torch.float32).eps


def test_rows_past_the_grid_are_padding(device: str) -> None:
    grid = torch.tensor([(1, 4, 4)], device=device)
    cos, sin = rotary_table(grid, 40, 16)
    assert (cos[16:] == 1).all() and (sin[16:] == 0).all()
    table = torch.randn(9, 8, device=device, requires_grad=True)
    out = pos_embed_interpolate(table, grid, 40)
    assert (out[16:] == 0).all()
    dout = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out[:16], table, dout[:16], retain_graph=True)
    dout[16:] = torch.nan
    assert torch.equal(torch.autograd.grad(out, table, dout)[0], expected)


def test_rows_past_the_total_are_left_out(device: str) -> None:
    grid = torch.tensor([(1, 4, 4), (2, 4, 6)], device=device)
    for short, whole in zip(rotary_table(grid, 30, 16), rotary_table(grid, 64, 16), strict=True):
        assert torch.equal(short, whole[:30])
    table = torch.randn(9, 8, device=device, requires_grad=True)
    short, whole = (pos_embed_interpolate(table, grid, total) for total in (30, 64))
    assert torch.equal(short, whole[:30])
    dout = torch.zeros_like(whole)
    dout[:30] = torch.randn_like(short)
    expected = torch.autograd.grad(whole, table, dout)[0]
    torch.testing.assert_close(torch.autograd.grad(short, table, dout[:30])[0], expected)
    x = torch.randn(64, 8, device=device, requires_grad=True)
    out = spatial_merge(x, grid[:1], 16)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert (gradient[:16] == 1).all() and (gradient[16:] == 0).all()


@pytest.mark.parametrize("mode", ["concat", "mean"])
def test_padding_is_merged_in_place_in_either_order(mode: str, device: str) -> None:
    x = torch.randn(40, 8, device=device)
    grid = torch.tensor([(1, 4, 4)], device=device)
    outs = [spatial_merge(x, grid, 40, mode, order) for order in ("merge_block", "raster")]
    assert torch.equal(outs[0][4:], outs[1][4:]) and not torch.equal(outs[0][:4], outs[1][:4])


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
    square = table.t().reshape(1, 8, 5, 5)
    for h, w in ((3, 11), (5, 5), (1, 20)):
        ours = pos_embed_interpolate(table, torch.tensor([(1, h, w)]), h * w, merge_size=1, align_corners=False)
        theirs = interpolate(square, (h, w), mode="bilinear", align_corners=False)
        torch.testing.assert_close(ours, theirs[0].flatten(1).t())


def test_gradient_of_entries_that_nothing_takes_is_zero(device: str) -> None:
    table = torch.randn(400, 8, device=device, requires_grad=True)
    out = pos_embed_interpolate(table, torch.tensor([(1, 2, 2)], device=device), 4)
    (gradient,) = torch.autograd.grad(out, table, torch.ones_like(out))
    corners = gradient.reshape(20, 20, 8)[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 1).all() and gradient.sum() == 32


@pytest.mark.parametrize("case", grid_cases("smoke"), ids=_ids)
def test_same_bits_every_time(case: GridCase, device: str) -> None:
    inputs = make_grid_inputs(case, torch.float16, device)
    first, second = (
        _differentiate(pos_embed_interpolate, inputs.table, inputs.dout, inputs.grid, inputs.total) for _ in range(2)
    )
    assert torch.equal(first["out"], second["out"]) and torch.equal(first["gradient"], second["gradient"])


def test_every_call_sees_its_own_tensors(device: str) -> None:
    case = GridCase("relaunched", "launches kept from the first call", ((1, 6, 8), (1, 4, 4)))
    for seed in range(3):
        inputs = make_grid_inputs(case, torch.float16, device, seed)
        verify_positions(inputs, True)
        verify_merge(inputs, "mean", "raster")


def test_same_total_of_other_images(device: str) -> None:
    """What is remembered of a call depends on shapes alone, not on the grid's values."""
    table = torch.randn(49, 16, device=device)
    for grids in (((1, 4, 6), (1, 2, 8)), ((1, 2, 8), (1, 4, 6)), ((0, 2, 2), (1, 20, 2))):
        grid = torch.tensor(grids, device=device)
        for ours, wanted in zip(rotary_table(grid, 40, 16), references.rotary_table(grid, 40, 16), strict=True):
            torch.testing.assert_close(ours, wanted)
        torch.testing.assert_close(
            pos_embed_interpolate(table, grid, 40), references.pos_embed_interpolate(table, grid, 40)
        )


def test_gradients_with_zero_strides(device: str) -> None:
    inputs = make_grid_inputs(grid_cases("smoke")[0], torch.float32, device)
    table, x = inputs.table.requires_grad_(), inputs.x.requires_grad_()
    for out, leaf in (
        (pos_embed_interpolate(table, inputs.grid, inputs.total), table),
        (spatial_merge(x, inputs.grid, inputs.total, "concat", "raster"), x),
        (spatial_merge(x, inputs.grid, inputs.total, "mean"), x),
    ):
        (summed,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
        (ones,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        assert torch.equal(summed, ones)


def test_grid_of_other_strides(device: str) -> None:
    grid = torch.tensor([(1, 4, 6), (2, 2, 2)], device=device)
    strided = grid.t().contiguous().t()
    for ours, wanted in zip(rotary_table(strided, 32, 16), rotary_table(grid, 32, 16), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.no_interpret
@pytest.mark.parametrize("align_corners", [True, False], ids=["corners", "half_pixel"])
def test_gradcheck_of_positions(align_corners: bool) -> None:
    grid = torch.tensor([(1, 4, 6), (2, 2, 2)])
    table = torch.randn(16, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda table: pos_embed_interpolate(table, grid, 36, 2, align_corners), (table,))


@pytest.mark.no_interpret
@pytest.mark.parametrize(("mode", "order"), WAYS)
def test_gradcheck_of_merge(mode: str, order: str) -> None:
    grid = torch.tensor([(1, 4, 2), (2, 2, 2)])
    x = torch.randn(22, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: spatial_merge(x, grid, 20, mode, order), (x,))


WILD = [
    ((1, 3, 5), (2, 7, 1)),
    ((-3, 4, 4), (1, -4, 4)),
    ((1, 2**40, 2**40), (1, 4, 4)),
    ((2**62, 2, 2),),
    ((1, 1, 2**62), (1, 2**31, 1)),
    ((1, 2, 6), (5, 1, 2)),
    ((0, 0, 0),),
    ((1, 400, 400),),
]


@pytest.mark.parametrize("grids", WILD, ids=str)
def test_wild_grids_stay_inside(grids: Any, device: str) -> None:
    """Nothing is promised of what comes out, but that all of it is written and nothing else is read."""
    grid = torch.tensor(grids, device=device)
    guard, total = 64, 48
    rows = torch.full((guard + total + guard, 8), torch.nan, device=device)
    x = rows[guard : guard + total].requires_grad_()
    with torch.no_grad():
        x.normal_()
    table = torch.randn(16, 8, device=device, requires_grad=True)
    with poisoned():
        results = [*torch.ops.vk.rotary_table(grid, total, 16)]
        for align_corners in (True, False):
            out = torch.ops.vk.pos_embed_interpolate(table, grid, total, 2, align_corners)
            results += [out, *torch.autograd.grad(out, table, x.detach())]
        for mode, order in WAYS:
            out = torch.ops.vk.spatial_merge(x, grid, total, mode, order)
            results += [out, *torch.autograd.grad(out, x, torch.ones_like(out))]
    if GPU:
        torch.cuda.synchronize()
    assert all(result.isfinite().all() for result in results)


BAD_GRIDS = [
    ((1, 4, 4), (1, 3, 4), r"the height of image 1, grid\[1, 1\] must be even and at least 0, got 3"),
    ((1, 4, 7), (1, 4, 4), r"the width of image 0, grid\[0, 2\] must be even and at least 0, got 7"),
    ((1, 4, 4), (1, 4, -2), r"the width of image 1, grid\[1, 2\] must be even and at least 0, got -2"),
    ((-1, 4, 4), (1, 4, 4), r"the number of frames of image 0, grid\[0, 0\] must be at least 0, got -1"),
]


def _calls(grid: Tensor, device: str) -> list[tuple[str, Callable[[], Any]]]:
    x = torch.randn(40, 8, device=device)
    return [
        ("rotary_table", lambda: rotary_table(grid, 40, 16, device=device)),
        ("pos_embed_interpolate", lambda: pos_embed_interpolate(x[:16], grid, 40)),
        ("spatial_merge", lambda: spatial_merge(x, grid, 40)),
    ]


@pytest.mark.parametrize(("one", "other", "message"), BAD_GRIDS)
def test_grids_on_the_cpu_are_checked(one: Any, other: Any, message: str, device: str) -> None:
    for op, call in _calls(torch.tensor([one, other]), device):
        with pytest.raises(ValueError, match=f"^{op}: {message}"):
            call()


@pytest.mark.parametrize(("one", "other", "message"), BAD_GRIDS)
def test_checked_mode_names_the_image(one: Any, other: Any, message: str, device: str) -> None:
    """The op itself takes what it is given, unless settings say otherwise; public functions pass a device's grid on."""
    grid = torch.tensor([one, other], device=device)
    x = torch.randn(40, 8, device=device)
    calls = {
        "rotary_table": lambda: torch.ops.vk.rotary_table(grid, 40, 16),
        "pos_embed_interpolate": lambda: torch.ops.vk.pos_embed_interpolate(x[:16], grid, 40),
        "pos_embed_interpolate_backward": lambda: torch.ops.vk.pos_embed_interpolate_backward(x, grid, 16),
        "spatial_merge": lambda: torch.ops.vk.spatial_merge(x, grid, 40),
        "spatial_merge_backward": lambda: torch.ops.vk.spatial_merge_backward(x[:10], grid, 40, 40, "mean"),
    }
    for op, call in calls.items():
        with torch_ops.settings(checked=True), pytest.raises(ValueError, match=f"^{op}: {message}"):
            call()
        call()


def test_more_patches_than_are_merged_are_refused(device: str) -> None:
    x = torch.randn(40, 8, device=device)
    grid = torch.tensor([(1, 4, 4), (1, 4, 8)])
    with pytest.raises(ValueError, match=r"at most total = 40 patches together, got 48 patches"):
        spatial_merge(x, grid, 40)
    with torch_ops.settings(checked=True), pytest.raises(ValueError, match="got 48 patches"):
        torch.ops.vk.spatial_merge(x, grid.to(device), 40)


def test_another_merge_size_in_words(device: str) -> None:
    with pytest.raises(ValueError, match=r"grid\[0, 1\] must be a multiple of merge_size = 3 and at least 0, got 4"):
        rotary_table(torch.tensor([(1, 4, 6)]), 24, 16, merge_size=3, device=device)


GRID = torch.tensor([(1, 4, 4)])
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (rotary_table, {"grid": GRID.int()}, r"grid must be int64, got int32"),
    (rotary_table, {"grid": GRID[0]}, r"grid must be of shape \[n, 3\], .* got shape \[3\]"),
    (rotary_table, {"grid": GRID[:, :2]}, r"grid must be of shape \[n, 3\], .* got shape \[1, 2\]"),
    (rotary_table, {"grid": GRID.to_sparse()}, r"grid must be a dense tensor, got one of layout"),
    (rotary_table, {"total": -1}, r"total must be from 0 to 1073741824, got -1"),
    (rotary_table, {"total": 2**31}, r"total must be from 0 to 1073741824, got 2147483648"),
    (rotary_table, {"dim": 12}, r"dim must be a multiple of 8 from 8 to 256, got 12"),
    (rotary_table, {"theta": 0.5}, r"theta must be a number of at least 1 that fp32 holds, got 0.5"),
    (rotary_table, {"theta": float("nan")}, r"theta must be a number of at least 1 that fp32 holds, got nan"),
    (rotary_table, {"merge_size": 0}, r"merge_size must be from 1 to 16, got 0"),
    (pos_embed_interpolate, {"table": torch.ones(16)}, r"table must be of shape \[S \* S, C\], got shape \[16\]"),
    (pos_embed_interpolate, {"table": torch.ones(15, 8)}, r"entries of table must be a square, .*, got 15"),
    (pos_embed_interpolate, {"table": torch.ones(16, 8).int()}, r"table must be float16, bfloat16 .* got int32"),
    (pos_embed_interpolate, {"total": -4}, r"total must be from 0"),
    (pos_embed_interpolate, {"grid": GRID.to("meta")}, r"grid must be on .* as table is, got meta"),
    (spatial_merge, {"x": torch.ones(16)}, r"x must be of shape \[rows, columns\], got shape \[16\]"),
    (spatial_merge, {"x": torch.ones(16, 8).int()}, r"x must be float16, bfloat16 .* got int32"),
    (spatial_merge, {"total": 14}, r"total must be a multiple of 4 = merge_size \* merge_size, got 14"),
    (spatial_merge, {"total": 20}, r"total must be at most the 16 rows of x, got 20"),
    (spatial_merge, {"mode": "sum"}, r"mode must be one of concat, mean, got 'sum'"),
    (spatial_merge, {"order": "z"}, r"order must be one of merge_block, raster, got 'z'"),
    (spatial_merge, {"merge_size": 17}, r"merge_size must be from 1 to 16, got 17"),
]
GOOD: dict[str, dict[str, Any]] = {
    "rotary_table": {"grid": GRID, "total": 16, "dim": 16},
    "pos_embed_interpolate": {"table": torch.ones(16, 8), "grid": GRID, "total": 16},
    "spatial_merge": {"x": torch.ones(16, 8), "grid": GRID, "total": 16},
}


def _placed(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) and not value.is_meta else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize(("op", "change", "message"), REFUSED)
def test_refuses(op: Callable[..., Any], change: dict[str, Any], message: str, device: str) -> None:
    good = _placed(GOOD[op.__name__], device)
    op(**good)
    with pytest.raises(ValueError, match=f"^{op.__name__}: .*{message}"):
        op(**good | _placed(change, device))


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("pos_embed_interpolate", {"dout": torch.ones(16)}, r"dout must be of shape \[total, C\]"),
        ("pos_embed_interpolate", {"entries": 15}, r"entries must be a square, .*, got 15"),
        ("spatial_merge", {"dout": torch.ones(3, 32)}, r"dout must be of 4 rows for total = 16, got 3"),
        ("spatial_merge", {"dout": torch.ones(4, 30)}, r"columns of dout must be a multiple of 4, got 30"),
        ("spatial_merge", {"rows": 12}, r"rows must be at least total = 16, got 12"),
    ],
)
def test_backward_refuses(op: str, change: dict[str, Any], message: str, device: str) -> None:
    good = {
        "pos_embed_interpolate": {"dout": torch.ones(16, 8), "grid": GRID, "entries": 16},
        "spatial_merge": {"dout": torch.ones(4, 32), "grid": GRID, "total": 16, "rows": 20},
    }[op]
    backward = getattr(torch.ops.vk, f"{op}_backward")
    backward(**_placed(good, device))
    with pytest.raises(ValueError, match=f"^{op}_backward: .*{message}"):
        backward(**_placed({**good, **change}, device))


def test_forward_mode_is_refused(device: str) -> None:
    x = torch.randn(16, 8, device=device)
    for op, call in (
        ("pos_embed_interpolate", lambda x: pos_embed_interpolate(x, GRID, 16)),
        ("spatial_merge", lambda x: spatial_merge(x, GRID, 16)),
    ):
        with pytest.raises(NotImplementedError, match=f"vk::{op} has no forward-mode derivative"):
            torch.func.jvp(call, (x,), (torch.ones_like(x),))


def test_autocast_changes_no_dtype(device: str) -> None:
    x = torch.randn(16, 8, device=device)
    with torch.autocast(device, dtype=torch.float16):
        assert pos_embed_interpolate(x, GRID, 16).dtype == spatial_merge(x, GRID, 16).dtype == torch.float32
        assert rotary_table(GRID, 16, 8)[0].dtype == torch.float32


@pytest.mark.parametrize("op", ["rotary_table", "pos_embed_interpolate", "spatial_merge"])
def test_explain_says_what_would_run(op: str, device: str) -> None:
    arguments = _placed(GOOD[op], device)
    report = torch_ops.explain(getattr(torch_ops, op), **arguments)
    assert report["op"] == f"vk::{op}"
    computed = GPU or INTERPRET
    assert report["path"] == ("portable" if computed else "reference")
    names = {"rotary_table": ["rotary_table"], "pos_embed_interpolate": ["pos_embed_fwd", "pos_embed_bwd"]}
    expected = names.get(op, ["spatial_merge_fwd", "spatial_merge_bwd"])
    assert list(report["kernels"]) == (expected if computed else [])
    with pytest.raises(ValueError, match=f"^{op}: total must be"):
        torch_ops.explain(getattr(torch_ops, op), **{**arguments, "total": -4})


@pytest.mark.no_interpret
@pytest.mark.parametrize("op", ["rotary_table", "pos_embed_interpolate", "spatial_merge"])
def test_bench_room_finds_all_contenders_right(op: str) -> None:
    """Compiled peers are left to GPUs: here they would take a minute to build."""
    room = ROOMS[op]
    cpu = torch.device("cpu")
    terms = Terms(torch.float32, cpu, backward=True, rounds=2, cold=False)
    case = room.cases(["mixed*"], cpu)[-1]
    peers = [peer for peer in room.peers if peer.name in room.default_peers(cpu)]
    measured = contest(room, case, (room.ours, *peers), terms)
    assert [one.direction for one in measured] == ["forward", "backward"][: 1 if op == "rotary_table" else 2]
    for one in measured:
        assert [timed.status for timed in (one.ours, *one.peers)] == ["ok", "ok"]
        assert one.bytes_moved > 0


@pytest.mark.gpu
def test_no_call_waits_for_the_device(device: str) -> None:
    inputs = make_grid_inputs(grid_cases("smoke")[0], torch.bfloat16, device)
    table, x = inputs.table.requires_grad_(), inputs.x.requires_grad_()

    def calls() -> None:
        rotary_table(inputs.grid, inputs.total, 72)
        pos_embed_interpolate(table, inputs.grid, inputs.total).backward(inputs.dout)
        spatial_merge(x, inputs.grid, inputs.total, "mean", "raster").sum().backward()

    calls()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements(device: str) -> None:
    """The last rows lie past 2^31 elements of x, of what is made of it and of its gradient."""
    width = 1152
    side = 1368
    total = side * side
    assert total * width > 2**31
    grid = torch.tensor([(1, side, side)], device=device)
    table = torch.randn(2304, width, device=device, dtype=torch.bfloat16)
    out = torch.ops.vk.pos_embed_interpolate(table, grid, total)
    corner = references.pos_embed_interpolate(table[-1:].repeat(4, 1), grid[:0], 4) + table[-1]
    torch.testing.assert_close(out[-1:], corner[:1])
    x = out.normal_()
    merged = torch.ops.vk.spatial_merge(x, grid, total, "concat", "merge_block")
    assert torch.equal(merged[-2:], x[-8:].view(2, -1))
    assert torch.equal(torch.ops.vk.spatial_merge_backward(merged, grid, total, total)[-8:], x[-8:])
    last = torch.ops.vk.pos_embed_interpolate_backward(lay_out(x, "contiguous"), grid, 2304)[-1]
    assert last.isfinite().all()
