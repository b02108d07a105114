"""From a program's number to its segment and rows, with lengths known only on the device.

n segments own the rows from cu[0] to cu[n] of the packed tensors; one more before them and one after own the rest, and
attend to nothing. So segment s = 1 .. n is rows cu[s-1] .. cu[s]-1, segment 0 begins at row 0, segment n+1 ends at
`total`. The grid is an upper bound from shapes alone, `total // BLOCK + n + 2` tiles: a segment that starts at row r
starts at tile r // BLOCK + s, a number that grows strictly with s and leaves every segment the ceil(length / BLOCK)
tiles it needs and at most one more. Values are clamped to the tensor, so malformed cu cannot reach outside it.

A kernel finds its segment, the last whose first tile is not past its own, by SEARCH_WIDTH-ary search. It loads from cu
in its own body: torch takes a pointer that enters a function for written where an address that is stored to depends on
what the function returns, and would clone cu and call it mutated.
"""

import triton
import triton.language as tl

SEARCH_WIDTH = tl.constexpr(128)
# Segments whose lengths a program looks at in one step.
LOOK = tl.constexpr(1024)


@triton.jit
def probe_segments(low, high):
    """Where one step of the search between segments low and high looks, and how far apart its probes are."""
    step = (high - low + SEARCH_WIDTH - 1) // SEARCH_WIDTH
    return low + tl.arange(0, SEARCH_WIDTH) * step, step


@triton.jit
def narrow_segments(cu, probe, step, low, high, total, tile, BLOCK: tl.constexpr):
    """The segments between which the search goes on, given the first rows cu of those at its probes."""
    first_tile = tl.minimum(tl.maximum(cu, 0), total) // BLOCK + probe
    count = tl.sum(((probe < high) & (first_tile <= tile)).to(tl.int32), 0)
    low += tl.maximum(count - 1, 0) * step
    return low, tl.minimum(high, low + step)


@triton.jit
def find_one(begin, end, total, tile, BLOCK: tl.constexpr):
    """What the search finds where there is one segment, of rows begin .. end-1: (segment, where it begins, its end)."""
    own_tile = tl.minimum(tl.maximum(begin, 0), total) // BLOCK + 1
    next_tile = tl.minimum(tl.maximum(end, 0), total) // BLOCK + 2
    segment = (own_tile <= tile).to(tl.int32) + (next_tile <= tile).to(tl.int32)
    start = tl.where(segment == 0, 0, tl.where(segment == 1, begin, end))
    return segment, start, tl.where(segment == 0, begin, tl.where(segment == 1, end, total))


@triton.jit
def clamp_span(start, end, total):
    """Start and length of the rows start .. end-1 as far as they are in the tensor."""
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.minimum(tl.maximum(end, 0), total)
    return start, tl.maximum(end - start, 0)


@triton.jit
def _look(cu_ptr, index, num_segments):
    """Starts and ends of LOOK segments from `index` on; 0 and 0 past the last."""
    segments = index + tl.arange(0, LOOK)
    inside = segments < num_segments
    start = tl.load(cu_ptr + segments, mask=inside, other=0)
    return start, tl.load(cu_ptr + segments + 1, mask=inside, other=0)


@triton.jit
def longest_segment(cu_ptr, num_segments, total):
    """Rows of the longest. It decides what is done and never where, or cu_ptr would have to stay out of functions."""
    longest = 0
    for index in range(0, num_segments, LOOK):
        start, end = _look(cu_ptr, index, num_segments)
        longest = tl.maximum(longest, tl.max(clamp_span(start, end, total)[1], 0))
    return longest


@triton.jit
def falls(cu_ptr, num_segments):
    """1 where a boundary lies before the one before it, which no caller may pass, else 0. As `longest_segment`."""
    fallen = 0
    for index in range(0, num_segments, LOOK):
        start, end = _look(cu_ptr, index, num_segments)
        fallen = tl.maximum(fallen, tl.max((end < start).to(tl.int32), 0))
    return fallen


@triton.jit
def place_rows(start, end, segment, total, tile, BLOCK: tl.constexpr):
    """`tile` among the tiles of BLOCK rows: (start, length, first).

    The segment's rows are start .. start+length-1, and the tile's first row is that within it; a surplus tile has
    first >= length.
    """
    start, length = clamp_span(start, end, total)
    return start, length, (tile - start // BLOCK - segment) * BLOCK


@triton.jit
def place_tile(start, end, other_start, other_end, segment, total, total_other, tile, BLOCK: tl.constexpr):
    """`place_rows` over cu, and the rows of the other side that belong to the segment: two more, where and how many."""
    start, length, first = place_rows(start, end, segment, total, tile, BLOCK)
    other_start, other_length = clamp_span(other_start, other_end, total_other)
    return start, length, first, other_start, other_length


@triton.jit
def place_outside(tile, begin, end, total, BLOCK: tl.constexpr):
    """The same for the rows before `begin` and from `end` on, which belong to no segment, by themselves.

    Returns (number of tiles, start, length, first), the latter as `place_rows` does.
    """
    begin = tl.minimum(tl.maximum(begin, 0), total)
    end = tl.minimum(tl.maximum(end, begin), total)
    before = (begin + BLOCK - 1) // BLOCK
    count = before + (total - end + BLOCK - 1) // BLOCK
    is_before = tile < before
    first = tl.where(is_before, tile, tile - before) * BLOCK
    return count, tl.where(is_before, 0, end), tl.where(is_before, begin, total - end), first


@triton.jit
def place_dense(tile, length, LONGEST_LAST: tl.constexpr, BLOCK: tl.constexpr):
    """`tile` among those of BLOCK rows of sequences of one length: (sequence, first row in it).

    With LONGEST_LAST, where later rows have more to do, a sequence's tiles come from the last to the first.
    """
    tiles = (length + BLOCK - 1) // BLOCK
    first = tile % tiles
    if LONGEST_LAST:
        first = tiles - 1 - first
    return tile // tiles, first * BLOCK
