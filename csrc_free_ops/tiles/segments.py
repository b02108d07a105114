"""From a program's number to its segment and rows, with lengths known only on the device.

n segments own the rows from cu[0] to cu[n] of the packed tensors. The rows before and after them form two more segments
that attend to nothing: segment s = 1 .. n has rows cu[s-1] .. cu[s]-1, segment 0 begins at row 0, segment n+1 ends at
`total`.

The grid is an upper bound from shapes alone: `total // BLOCK + n + 2` tiles. A segment that starts at row r gets tiles
from r // BLOCK + s on. That number grows strictly with s, and every segment gets the ceil(length / BLOCK) tiles that it
needs and at most one more. Values are clamped to the tensor, so that a malformed cu cannot address memory outside it.

A kernel finds the last segment whose first tile is not past its own by SEARCH_WIDTH-ary search. The kernel's body must
load from cu itself. torch's mutation analysis treats a pointer that enters a function as written if a stored-to address
depends on the function's result; torch.compile would then clone cu and call it mutated.
"""

import triton
import triton.language as tl

SEARCH_WIDTH = tl.constexpr(128)
# Segments whose lengths a program loads at once.
LOOK = tl.constexpr(1024)


@triton.jit
def probe_segments(low, high):
    """(segments to probe between low and high, the distance between probes)."""
    step = (high - low + SEARCH_WIDTH - 1) // SEARCH_WIDTH
    return low + tl.arange(0, SEARCH_WIDTH) * step, step


@triton.jit
def narrow_segments(cu, probe, step, low, high, total, tile, BLOCK: tl.constexpr):
    """The narrower (low, high), given the first rows cu of the probed segments."""
    first_tile = tl.minimum(tl.maximum(cu, 0), total) // BLOCK + probe
    count = tl.sum(((probe < high) & (first_tile <= tile)).to(tl.int32), 0)
    low += tl.maximum(count - 1, 0) * step
    return low, tl.minimum(high, low + step)


@triton.jit
def find_one(begin, end, total, tile, BLOCK: tl.constexpr):
    """(segment, its first row, its end) if there is a single segment of rows begin .. end-1; needs no search."""
    first_tile = tl.minimum(tl.maximum(begin, 0), total) // BLOCK + 1
    end_tile = tl.minimum(tl.maximum(end, 0), total) // BLOCK + 2
    segment = (first_tile <= tile).to(tl.int32) + (end_tile <= tile).to(tl.int32)
    start = tl.where(segment == 0, 0, tl.where(segment == 1, begin, end))
    return segment, start, tl.where(segment == 0, begin, tl.where(segment == 1, end, total))


@triton.jit
def clamp_span(start, end, total):
    """(start, length) of the rows start .. end-1, clamped to the tensor."""
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.minimum(tl.maximum(end, 0), total)
    return start, tl.maximum(end - start, 0)


@triton.jit
def _load_bounds(cu_ptr, index, num_segments):
    """(starts, ends) of LOOK segments from `index` on; both are 0 past the last."""
    segments = index + tl.arange(0, LOOK)
    inside = segments < num_segments
    start = tl.load(cu_ptr + segments, mask=inside, other=0)
    return start, tl.load(cu_ptr + segments + 1, mask=inside, other=0)


@triton.jit
def longest_segment(cu_ptr, num_segments, total):
    """The rows of the longest segment.

    A function may load from cu_ptr here, because no address depends on the result (see the module's docstring).
    """
    longest = 0
    for index in range(0, num_segments, LOOK):
        start, end = _load_bounds(cu_ptr, index, num_segments)
        longest = tl.maximum(longest, tl.max(clamp_span(start, end, total)[1], 0))
    return longest


@triton.jit
def falls(cu_ptr, num_segments):
    """1 if cu decreases somewhere, which callers must not pass, else 0; loads from cu_ptr like `longest_segment`."""
    decreases = 0
    for index in range(0, num_segments, LOOK):
        start, end = _load_bounds(cu_ptr, index, num_segments)
        decreases = tl.maximum(decreases, tl.max((end < start).to(tl.int32), 0))
    return decreases


@triton.jit
def locate_rows(start, end, segment, total, tile, BLOCK: tl.constexpr):
    """(start, length, first) of `tile`: the segment's rows are start .. start+length-1.

    The tile begins at row `first` of the segment. A surplus tile has first >= length.
    """
    start, length = clamp_span(start, end, total)
    return start, length, (tile - start // BLOCK - segment) * BLOCK


@triton.jit
def locate_tile(
    start, end, streamed_start, streamed_end, segment, total, total_streamed, tile, BLOCK: tl.constexpr
):  # fmt: skip
    """(start, length, first) of `locate_rows`, and (start, length) of the segment's rows on the streamed side."""
    start, length, first = locate_rows(start, end, segment, total, tile, BLOCK)
    streamed_start, streamed_length = clamp_span(streamed_start, streamed_end, total_streamed)
    return start, length, first, streamed_start, streamed_length


@triton.jit
def locate_outside(tile, begin, end, total, BLOCK: tl.constexpr):
    """Tiles of the rows outside of all segments: those before `begin` and those from `end` on.

    Returns (number of such tiles, start, length, first); the last three describe `tile` as in `locate_rows`.
    """
    begin = tl.minimum(tl.maximum(begin, 0), total)
    end = tl.minimum(tl.maximum(end, begin), total)
    before = (begin + BLOCK - 1) // BLOCK
    count = before + (total - end + BLOCK - 1) // BLOCK
    is_before = tile < before
    first = tl.where(is_before, tile, tile - before) * BLOCK
    return count, tl.where(is_before, 0, end), tl.where(is_before, begin, total - end), first


@triton.jit
def locate_dense(tile, length, LONGEST_LAST: tl.constexpr, BLOCK: tl.constexpr):
    """(sequence, first row in it) of `tile`, for sequences of equal length.

    With LONGEST_LAST the tiles of a sequence come from the last to the first. Later rows have the most to compute under
    a causal mask, and long programs should start first.
    """
    tiles = (length + BLOCK - 1) // BLOCK
    first = tile % tiles
    if LONGEST_LAST:
        first = tiles - 1 - first
    return tile // tiles, first * BLOCK
