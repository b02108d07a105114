"""The tiles that index: proved against brute force, in the interpreter and on a GPU."""

import math
import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from csrc_free_ops.tiles.masks import block_span
from csrc_free_ops.tiles.scores import exp, tanh
from csrc_free_ops.tiles.segments import narrow_segments, place_tile, probe_segments
from torch_ops.testing.cases import cumulative

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not (INTERPRET or torch.cuda.is_available()), reason="tiles need the interpreter or a GPU"),
]


@triton.jit
def _locate_kernel(cu_ptr, other_ptr, out_ptr, num_segments, total, total_other, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    segment = 0
    beyond = num_segments + 2
    while beyond - segment > 1:
        probe, step = probe_segments(segment, beyond)
        cu = tl.load(cu_ptr + probe - 1, mask=(probe > 0) & (probe < beyond), other=0)
        segment, beyond = narrow_segments(cu, probe, step, segment, beyond, total, tile, BLOCK)
    before = tl.maximum(segment - 1, 0)
    behind = tl.minimum(segment, num_segments)
    found = place_tile(
        tl.load(cu_ptr + before, mask=segment > 0, other=0),
        tl.load(cu_ptr + behind, mask=segment <= num_segments, other=total),
        tl.load(other_ptr + before), tl.load(other_ptr + behind), segment, total, total_other, tile, BLOCK,
    )  # fmt: skip
    for i in tl.static_range(5):
        tl.store(out_ptr + tile * 5 + i, found[i])


@pytest.mark.parametrize("lengths", [(), (5,), (16,), (0, 16, 0, 33, 1, 0), (1,) * 150, (40, 0) * 90], ids=len)
@pytest.mark.parametrize("skipped", [0, 5, 32, 50])
@pytest.mark.parametrize("padding", [0, 9])
def test_tiles_cover_every_row_once(lengths: tuple[int, ...], padding: int, skipped: int, device: str) -> None:
    block, total = 16, skipped + sum(lengths) + padding
    cu = skipped + cumulative(lengths, device)
    tiles = total // block + len(lengths) + 2
    found = torch.empty(tiles, 5, dtype=torch.int32, device=device)
    _locate_kernel[(tiles,)](cu, cu, found, len(lengths), total, total, BLOCK=block)
    covered = np.zeros(total, dtype=np.int64)
    starts = [0, *cu.tolist()]
    for start, length, first, other_start, other_length in found.tolist():
        if first >= length:
            continue
        assert first >= 0 and first % block == 0 and start in starts
        assert (other_start, other_length) in ((start, length), (starts[1], 0), (starts[-1], 0))
        assert other_length or start in (0, starts[-1])
        covered[start + first : start + min(first + block, length)] += 1
    assert (covered == 1).all()


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
def _tanh_kernel(x_ptr, y_ptr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(y_ptr + offsets, tanh(tl.load(x_ptr + offsets)))


def test_tanh_is_accurate_near_zero_and_far_out(device: str) -> None:
    x = torch.cat([torch.linspace(-20, 20, 512), torch.logspace(-8, 0, 256), -torch.logspace(-8, 0, 256)]).to(device)
    y = torch.empty_like(x)
    _tanh_kernel[(1,)](x, y, N=1024)
    exact = torch.tanh(x.double())
    assert ((y - exact).abs() <= 4 * 2**-23 * exact.abs()).all()
    assert math.isclose(y[0].item(), -1.0)
