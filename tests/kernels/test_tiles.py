"""The tiles that index: proved against brute force, in the interpreter and on a GPU."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from csrc_free_ops.attention.hopper.dq_order import (
    acc2_blocks,
    acc2_distance,
    block_of_step,
    semaphore_value,
    start_block_of,
)
from csrc_free_ops.tiles.images import from_merged, locate_rows_in_frames, to_merged
from csrc_free_ops.tiles.masks import block_span, is_seen, tiles_seeing
from csrc_free_ops.tiles.rope import count_tiles, first_columns, locate_pairs
from csrc_free_ops.tiles.scores import exp, natural_lse, tanh
from csrc_free_ops.tiles.segments import (
    LOOK,
    NO_BOUNDARY,
    advance_start,
    count_segments,
    locate_tile,
    narrow_segment,
    survey,
)
from tests.verify import INTERPRET
from torch_ops.testing.cases import cumulative

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not (INTERPRET or torch.cuda.is_available()), reason="tiles need the interpreter or a GPU"),
]


@triton.jit
def _locate_kernel(cu_ptr, other_ptr, out_ptr, num_segments, total, total_other, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    segment, falls, index, seen = 0, 0, 0, LOOK
    while (seen == LOOK) & (index <= num_segments):
        at = index + tl.arange(0, LOOK)
        cu = tl.load(cu_ptr + at, mask=at <= num_segments, other=NO_BOUNDARY)
        other = tl.load(other_ptr + at, mask=at <= num_segments, other=NO_BOUNDARY)
        behind = tl.load(cu_ptr + at + 1, mask=at < num_segments, other=NO_BOUNDARY)
        other_behind = tl.load(other_ptr + at + 1, mask=at < num_segments, other=NO_BOUNDARY)
        seen, falling = count_segments(cu, behind, other, other_behind, at, total, tile, BLOCK)
        segment += seen
        falls += falling
        index += LOOK
    start = tl.load(cu_ptr + segment - 1, mask=segment > 0, other=0)
    other_start = tl.load(other_ptr + segment - 1, mask=segment > 0, other=0)
    if falls > 0:
        segment = num_segments + 1
        start, other_start, index = 0, 0, 0
        while index < segment:
            at = index + tl.arange(0, LOOK)
            cu = tl.load(cu_ptr + at, mask=at <= num_segments, other=0)
            other = tl.load(other_ptr + at, mask=at <= num_segments, other=0)
            segment = narrow_segment(cu, at, segment, total, tile, BLOCK)
            start = advance_start(cu, at, segment, start, total)
            other_start = advance_start(other, at, segment, other_start, total_other)
            index += LOOK
    inside = (segment > 0) & (segment <= num_segments)
    found = locate_tile(
        start, tl.load(cu_ptr + segment, mask=segment <= num_segments, other=total),
        other_start, tl.load(other_ptr + segment, mask=inside, other=0), segment, total, total_other, tile, BLOCK,
    )  # fmt: skip
    for i in tl.static_range(5):
        tl.store(out_ptr + tile * 6 + i, found[i])
    tl.store(out_ptr + tile * 6 + 5, segment)


@triton.jit
def _survey_kernel(cu_ptr, out_ptr, num_segments, total):
    longest, last, is_falling = survey(cu_ptr, num_segments, total)
    tl.store(out_ptr, longest)
    tl.store(out_ptr + 1, last)
    tl.store(out_ptr + 2, is_falling.to(tl.int32))


def _rising(lengths: tuple[int, ...], skipped: int) -> list[int]:
    return (skipped + cumulative(lengths, "cpu")).tolist()


MANY = 300
BOUNDARIES = {
    **{
        f"{len(lengths)} segments from {skipped}": _rising(lengths, skipped)
        for lengths in [(), (5,), (16,), (0, 16, 0, 33, 1, 0), (1,) * 150, (40, 0) * 90]
        for skipped in (0, 5, 32)
    },
    "the end is zeros": [0, 16, 40, 40, 0, 0],
    "one falls and others repeat": [0, 200, 200, 100, 300],
    "only falling": [300, 200, 100, 0],
    "outside of the tensor": [-5, 40, 10**9, 60, -(2**31), 2**31 - 1],
    "many fall to the end": [*_rising((40,) * 40, 3), *[0] * MANY],
    "a late one falls": [*_rising((1,) * MANY, 0), 7, MANY + 60],
}


@pytest.mark.parametrize(
    ("boundaries", "padding"),
    [
        pytest.param(each, padding, id=f"{name}, {padding} rows behind")
        for name, each in BOUNDARIES.items()
        for padding in ((0, 9) if len(each) < MANY else (9,))
    ],
)
def test_tiles_cover_every_row_once(boundaries: list[int], padding: int, device: str) -> None:
    """Against the prefix maximum of the boundaries; the other side has boundaries of its own."""
    block, num_segments = 16, len(boundaries) - 1
    rises = boundaries == sorted(boundaries)
    total = min(max(*boundaries, 0), 2500) + padding
    others = [bound // 2 for bound in (boundaries if rises else reversed(boundaries))]
    cu, other = (torch.tensor(each, dtype=torch.int32, device=device) for each in (boundaries, others))
    tiles = total // block + num_segments + 2
    found = torch.empty(tiles, 6, dtype=torch.int32, device=device)
    _locate_kernel[(tiles,)](cu, other, found, num_segments, total, total // 2, BLOCK=block)
    settled, settled_others = (
        [*np.maximum.accumulate(np.clip(each, 0, rows)).tolist()]
        for each, rows in ((boundaries, total), (others, total // 2))
    )
    starts, ends = [0, *settled], [*settled, total]
    covered = np.zeros(total, dtype=np.int64)
    for start, length, first, other_start, other_length, segment in found.tolist():
        if first >= length:
            continue
        assert first >= 0 and first % block == 0
        assert (start, start + length) == (starts[segment], ends[segment])
        if 0 < segment <= num_segments:
            assert other_length == settled_others[segment] - settled_others[segment - 1]
            assert other_start == settled_others[segment - 1]
        else:
            assert other_length == 0
        covered[start + first : start + min(first + block, length)] += 1
    assert (covered == 1).all()
    surveyed = torch.empty(3, dtype=torch.int32, device=device)
    _survey_kernel[(1,)](cu, surveyed, num_segments, total)
    clamped = np.clip(boundaries, 0, total)
    last = int(np.argmax(clamped)) if clamped.max() else 0
    longest, found_last, is_falling = surveyed.tolist()
    assert found_last == last and bool(is_falling) == bool((np.diff(clamped[: last + 1]) < 0).any())
    assert longest == max(0, *np.diff(clamped).tolist(), 0)


@triton.jit
def _span_kernel(
    out_ptr, first, last, shift, before, after, length,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    span = block_span(first, last, shift, before, after, length, HAS_BEFORE, HAS_AFTER, BLOCK)
    for i in tl.static_range(4):
        tl.store(out_ptr + i, span[i])


@pytest.mark.parametrize("seed", range(40))
def test_spans_hold_all_that_is_seen_and_mask_what_is_not(seed: int, device: str) -> None:
    draw = np.random.default_rng(seed)
    block, length = 8, int(draw.integers(0, 90))
    first = int(draw.integers(0, 60))
    last = first + int(draw.integers(0, 16))
    shift = int(draw.integers(-60, 60))
    before, after = int(draw.integers(0, 50)), int(draw.integers(0, 50))
    has_before, has_after = bool(draw.integers(2)), bool(draw.integers(2))
    out = torch.empty(4, dtype=torch.int32, device=device)
    _span_kernel[(1,)](out, first, last, shift, before, after, length, has_before, has_after, block)
    low, full_low, full_high, high = out.tolist()
    position = np.arange(first, last + 1)[:, None] + shift
    other = np.arange(length)[None, :]
    seen = np.ones((len(position), length), dtype=bool)
    if has_before:
        seen &= other >= position - before
    if has_after:
        seen &= other <= position + after
    assert low % block == full_low % block == full_high % block == 0
    assert low <= full_low <= full_high and (full_high <= length or full_low == full_high)
    assert seen[:, full_low:full_high].all(), "an unmasked block holds what a row does not see"
    visited = np.zeros(length, dtype=bool)
    for start, stop in ((low, full_low), (full_low, full_high), (full_high, high)):
        for begin in range(start, stop, block):
            assert not visited[begin : begin + block].any(), "a block is visited twice"
            visited[begin : begin + block] = True
    assert not seen[:, ~visited].any(), "a key that is seen is not visited"


@triton.jit
def _turns_kernel(
    out_ptr, tiles, blocks, shift, before, after, length, other_length,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, OWNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each tile and block: whether the tile sees it, the first and the last tile that do, and whether any does."""
    for tile in range(tiles):
        first = tile * OWNED
        last = tl.minimum(first + OWNED, length) - 1
        low, _, _, high = block_span(
            first, last, shift, before, after, other_length, HAS_BEFORE, HAS_AFTER, BLOCK
        )  # fmt: skip
        for block in range(blocks):
            other = block * BLOCK
            place = out_ptr + (tile * blocks + block) * 4
            tl.store(place, ((other >= low) & (other < high)).to(tl.int32))
            earliest, latest = tiles_seeing(
                tiles - 1, other, shift, before, after, HAS_BEFORE, HAS_AFTER, OWNED, BLOCK
            )  # fmt: skip
            tl.store(place + 1, earliest)
            tl.store(place + 2, latest)
            tl.store(
                place + 3,
                is_seen(other, shift, before, after, length, HAS_BEFORE, HAS_AFTER, OWNED, BLOCK).to(tl.int32),
            )


@pytest.mark.parametrize("before", [None, 0, 7, 40])
@pytest.mark.parametrize("after", [None, 0, 9, 70])
@pytest.mark.parametrize(("length", "other_length"), [(64, 64), (70, 33), (17, 90), (90, 17), (1, 1), (33, 1)])
def test_tiles_take_turns_at_a_block(
    length: int, other_length: int, before: int | None, after: int | None, device: str
) -> None:
    """The tiles that see a block are consecutive, so that each knows its turn there."""
    owned, block = 16, 8
    tiles, blocks = -(-length // owned), -(-other_length // block)
    out = torch.zeros(tiles, blocks, 4, dtype=torch.int32, device=device)
    _turns_kernel[(1,)](
        out, tiles, blocks, other_length - length, before or 0, after or 0, length, other_length,
        HAS_BEFORE=before is not None, HAS_AFTER=after is not None, OWNED=owned, BLOCK=block,
    )  # fmt: skip
    for sees, earliest, latest, seen in out.permute(1, 2, 0).tolist():
        seeing = [tile for tile, does in enumerate(sees) if does]
        assert set(seen) == {int(bool(seeing))}
        if seeing:
            assert seeing == list(range(earliest[0], latest[0] + 1))
            assert len(set(earliest)) == len(set(latest)) == 1


@triton.jit
def _accumulators_kernel(out_ptr, longest_ptr, tiles, blocks, total, WAVE: tl.constexpr, BLOCK: tl.constexpr):
    distance = acc2_distance(total, BLOCK)
    tl.store(longest_ptr, acc2_blocks(tiles - 1, blocks, distance, WAVE))
    for tile in range(tiles):
        lead = start_block_of(tile, blocks, distance, WAVE)
        for step in range(blocks):
            place = out_ptr + (tile * blocks + step) * 3
            tl.store(place, block_of_step(step, lead, blocks))
            tl.store(place + 1, (step < lead).to(tl.int32))
            tl.store(place + 2, semaphore_value(tile, step, lead, blocks, distance, WAVE))


@pytest.mark.parametrize("together", [2, 3, 8, 33])
@pytest.mark.parametrize(
    ("tiles", "length", "total"), [(8, 256, 256), (5, 150, 170), (20, 90, 90), (3, 40, 300), (4, 9, 9), (4, 400, 400)]
)
def test_tiles_take_turns_at_two_accumulators(tiles: int, length: int, total: int, together: int, device: str) -> None:
    """A tile adds to every block once, and in each accumulator of a block tiles have turns in their order."""
    block = 16
    blocks, distance = -(-length // block), (-(-total // block) - 1) // 2
    out = torch.zeros(tiles, blocks, 3, dtype=torch.int32, device=device)
    longest = torch.zeros(1, dtype=torch.int32, device=device)
    _accumulators_kernel[(1,)](out, longest, tiles, blocks, total, WAVE=together, BLOCK=block)
    came: dict[tuple[int, int], list[int]] = {}
    for tile, steps in enumerate(out.tolist()):
        assert sorted(step[0] for step in steps) == list(range(blocks))
        for at, lane, turn in steps:
            assert turn == len(came.setdefault((lane, at), [])), (tile, at)
            came[lane, at].append(tile)
    assert all(came[0, at][0] == 0 for at in range(blocks))
    in_lane = {at for lane, at in came if lane}
    assert in_lane == set(range(blocks - longest.item(), blocks))
    # Rows of dq that the second accumulator lies in, of which the first block has none.
    lent = [*in_lane, *(at - distance for at in in_lane)]
    assert len(set(lent)) == len(lent) and min(lent, default=1) > 0
    # Nobody waits where there is memory for all start blocks: a block's tiles of one wave come one step after another.
    if longest.item() == min(tiles, together) - 1 and tiles <= together:
        for (lane, at), in_order in came.items():
            steps_of = [next(s for s, step in enumerate(out[tile].tolist()) if step[0] == at) for tile in in_order]
            assert steps_of == sorted(set(steps_of)), (lane, at)


@triton.jit
def _exp_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(y_ptr + offsets, exp(tl.load(x_ptr + offsets)))


def test_exp_is_accurate_and_keeps_what_is_not_finite(device: str) -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -200.0, 200.0, -87.0])
    x = torch.cat([torch.linspace(-87, 88, 1016), special, torch.linspace(-2, 0, 1024)]).to(device)
    y = torch.empty_like(x)
    _exp_kernel[(1,)](x, y, N=2048)
    exact = torch.exp(x.double())
    finite = (x >= -87) & (x <= 88)
    assert ((y - exact).abs() <= 1.5 * 2**-23 * exact)[finite].all()
    assert y[1016:1023].tolist()[:4] == [1, 1, torch.inf, 0] and y[1020].isnan()
    assert y[1021:1023].tolist() == [0, torch.inf]


@triton.jit
def _lse_kernel(peak_ptr, norm_ptr, lse_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(lse_ptr + offsets, natural_lse(tl.load(peak_ptr + offsets), tl.load(norm_ptr + offsets), True))


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_lse_is_rounded_once(spread: float, device: str) -> None:
    """Twice would be up to a whole unit in the last place, which all weights of a row then are off by."""
    peak, norm = (torch.randn(2048) * spread).to(device), torch.logspace(0, 5, 2048).to(device)
    lse = torch.empty_like(peak)
    _lse_kernel[(1,)](peak, norm, lse, N=2048)
    exact = peak.double() + norm.double().log()
    assert ((lse - exact).abs() <= (exact.float() - exact).abs() + 2**-23).all()


@triton.jit
def _tanh_kernel(x_ptr, y_ptr, slope_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    y, slope = tanh(tl.load(x_ptr + offsets))
    tl.store(y_ptr + offsets, y)
    tl.store(slope_ptr + offsets, slope)


def test_tanh_is_accurate_near_zero_and_far_out(device: str) -> None:
    x = torch.cat([torch.linspace(-20, 20, 512), torch.logspace(-8, 0, 256), -torch.logspace(-8, 0, 256)]).to(device)
    y, slope = torch.empty_like(x), torch.empty_like(x)
    _tanh_kernel[(1,)](x, y, slope, N=1024)
    exact = torch.tanh(x.double())
    assert ((y - exact).abs() <= 4 * 2**-23 * exact.abs()).all()
    # An exponent of -40 is off by half a unit in its own last place, which the power is off by as well.
    exact = 1 / torch.cosh(x.double()) ** 2
    assert ((slope - exact).abs() <= (8 + 2 * x.abs()) * 2**-23 * exact).all()
    assert math.isclose(y[0].item(), -1.0)


@triton.jit
def _pairs_kernel(out_ptr, NUM_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    part, pairs, valid, begin = locate_pairs(tile, NUM_HEADS, NUM_K_HEADS, HALF, BLOCK)
    columns = tl.where(valid, begin + first_columns(pairs, HALF), -1)
    tl.store(out_ptr + tile * (BLOCK + 2) + tl.arange(0, BLOCK), columns)
    tl.store(out_ptr + tile * (BLOCK + 2) + BLOCK, part)
    tl.store(
        out_ptr + tile * (BLOCK + 2) + BLOCK + 1,
        count_tiles(NUM_HEADS, HALF, BLOCK) + 2 * count_tiles(NUM_K_HEADS, HALF, BLOCK),
    )


@pytest.mark.parametrize(("heads", "k_heads", "half"), [(16, 16, 36), (4, 2, 20), (3, 1, 4), (1, 1, 128), (5, 5, 32)])
def test_pairs_cover_every_head_of_q_k_and_v_once(heads: int, k_heads: int, half: int, device: str) -> None:
    block = 16
    tiles = -(-heads * half // block) + 2 * -(-k_heads * half // block)
    found = torch.full((tiles, block + 2), -7, dtype=torch.int32, device=device)
    _pairs_kernel[(tiles,)](found, NUM_HEADS=heads, NUM_K_HEADS=k_heads, HALF=half, BLOCK=block)
    assert (found[:, -1] == tiles).all()
    ends = 2 * half * np.cumsum([0, heads, k_heads, k_heads])
    covered = np.zeros(ends[-1], dtype=np.int64)
    for *columns, part, _ in found.tolist():
        for column in (each for each in columns if each >= 0):
            assert ends[part] <= column < ends[part + 1] and column % (2 * half) < half
            covered[[column, column + half]] += 1
    assert (covered == 1).all()


@triton.jit
def _place_kernel(grid_ptr, out_ptr, total, num_images, MERGE: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    rows = first + tl.arange(0, BLOCK)
    inside, frame, index, h, w = locate_rows_in_frames(
        grid_ptr, rows, tl.minimum(first + BLOCK, total) - 1, num_images, total
    )
    row, col = from_merged(index, w, MERGE)
    back = to_merged(row, col, w, MERGE)
    mask = rows < total
    at = out_ptr + rows * 6
    tl.store(at, inside.to(tl.int32), mask=mask)
    tl.store(at + 1, frame, mask=mask)
    tl.store(at + 2, row, mask=mask)
    tl.store(at + 3, col, mask=mask)
    tl.store(at + 4, h * 1000 + w, mask=mask)
    tl.store(at + 5, back - index, mask=mask)


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("images", [(), ((1, 1, 1),), ((2, 1, 2), (0, 1, 1), (1, 2, 1), (1, 0, 5)), ((1, 1, 1),) * 150])
@pytest.mark.parametrize("padding", [0, 7])
def test_rows_lie_where_images_follow_each_other(
    images: tuple[tuple[int, int, int], ...], padding: int, merge: int, device: str
) -> None:
    """Sizes of images are in blocks of merge x merge patches."""
    sizes = [(t, h * merge, w * merge) for t, h, w in images]
    wanted = []
    for t, h, w in sizes:
        for _ in range(t):
            start = len(wanted)
            for index in range(h * w):
                block, part = divmod(index, merge * merge)
                row, col = (block // (w // merge)) * merge + part // merge, block % (w // merge) * merge + part % merge
                wanted.append([1, start, row, col, h * 1000 + w, 0])
    total = len(wanted) + padding
    grid = torch.tensor(sizes, dtype=torch.int64, device=device).reshape(-1, 3)
    found = torch.full((total, 6), -1, dtype=torch.int32, device=device)
    _place_kernel[(total // 16 + 1,)](grid, found, total, len(sizes), MERGE=merge, BLOCK=16)
    assert found.tolist()[: len(wanted)] == wanted
    assert (found[len(wanted) :, 0] == 0).all()
