"""From a program's number to its segment and rows, with lengths known only on the device.

n segments own the rows from cu[0] to cu[n] of the packed tensors. The rows before and after them form two more segments
that attend to nothing: segment s = 1 .. n has rows cu[s-1] .. cu[s]-1, segment 0 begins at row 0, segment n+1 ends at
`total`. Boundaries are clamped to the tensor, and a boundary that falls counts as the largest one before it: its
segment is empty. So every row has one segment of these n + 2, whatever cu holds.

The grid is an upper bound from shapes alone: `total // BLOCK + n + 2` tiles. A segment that starts at row r gets tiles
from r // BLOCK + s on. That number grows strictly with s, and every segment gets the ceil(length / BLOCK) tiles that it
needs and at most one more.

If no boundary falls, the segment of a tile is the number of segments behind the first that begin with the tile or
before. Otherwise it is the first s whose next segment begins behind the tile. Boundary j alone puts that at
s >= tile - cu[j] // BLOCK, for the s from j on; so s is the least max(j, tile - cu[j] // BLOCK). A program reads the
boundaries LOOK at a time, up to its own segment. The kernel's body must load from cu itself. torch's
mutation analysis treats a pointer that enters a function as written if a stored-to address depends on the function's
result; torch.compile would then clone cu and call it mutated.
"""

import triton
import triton.language as tl

# LOOK: boundaries that each of many programs loads at once. LOOK_FAR: the same where there are few programs.
# NO_BOUNDARY stands for those behind the last.
LOOK, LOOK_FAR = tl.constexpr(256), tl.constexpr(1024)
NO_BOUNDARY = tl.constexpr(2**31 - 1)


@triton.jit
def clamp_rows(cu, total):
    """Boundaries clamped to the tensor."""
    return tl.minimum(tl.maximum(cu, 0), total)


@triton.jit
def count_segments(cu, behind, streamed_cu, streamed_behind, at, total, tile, BLOCK: tl.constexpr):
    """(segments behind the first that begin with `tile` or before, whether a boundary falls) of LOOK boundaries.

    The boundaries have indices `at`, and `behind` are those one further. One sum gives both, so that this takes no
    longer than a count.
    """
    FALL: tl.constexpr = 2 * LOOK
    begins = clamp_rows(cu, total) // BLOCK + at < tile
    falls = (behind < cu) | (streamed_behind < streamed_cu)
    found = tl.sum(begins.to(tl.int32) + falls.to(tl.int32) * FALL, 0)
    return found % FALL, found // FALL


@triton.jit
def narrow_segment(cu, at, segment, total, tile, BLOCK: tl.constexpr):
    """The least segment that `segment` and the boundaries cu, of indices `at`, allow for `tile`."""
    return tl.minimum(segment, tl.min(tl.maximum(at, tile - clamp_rows(cu, total) // BLOCK), 0))


@triton.jit
def advance_start(cu, at, segment, start, total):
    """The first row of `segment`: the largest of `start` and the boundaries cu, of indices `at`, before it."""
    return tl.maximum(start, tl.max(tl.where(at < segment, clamp_rows(cu, total), 0), 0))


@triton.jit
def find_one(begin, end, total, tile, BLOCK: tl.constexpr):
    """(segment, its first row, its end) if there is a single segment of rows begin .. end-1; needs no search."""
    begin = clamp_rows(begin, total)
    end = tl.maximum(clamp_rows(end, total), begin)
    segment = (begin // BLOCK + 1 <= tile).to(tl.int32) + (end // BLOCK + 2 <= tile).to(tl.int32)
    start = tl.where(segment == 0, 0, tl.where(segment == 1, begin, end))
    return segment, start, tl.where(segment == 0, begin, tl.where(segment == 1, end, total))


@triton.jit
def clamp_span(start, end, total):
    """(start, length) of the rows start .. end-1, clamped to the tensor."""
    start = clamp_rows(start, total)
    return start, tl.maximum(clamp_rows(end, total) - start, 0)


@triton.jit
def longest_segment(cu_ptr, num_segments, total):
    """The rows of the longest segment, or NO_BOUNDARY if a boundary falls; loads from cu_ptr like `survey`."""
    longest = 0
    for index in range(0, num_segments, LOOK_FAR):
        at = index + tl.arange(0, LOOK_FAR)
        inside = at < num_segments
        start = clamp_rows(tl.load(cu_ptr + at, mask=inside, other=0), total)
        length = clamp_rows(tl.load(cu_ptr + at + 1, mask=inside, other=0), total) - start
        longest = tl.maximum(longest, tl.max(tl.where(length < 0, NO_BOUNDARY, length), 0))
    return longest


@triton.jit
def end_of_segments(cu_ptr, num_segments, last_row):
    """The largest boundary, or the last one if `last_row` lies before it; loads from cu_ptr like `survey`."""
    end = tl.load(cu_ptr + num_segments)
    if last_row >= end:
        for index in range(0, num_segments, LOOK):
            at = index + tl.arange(0, LOOK)
            end = tl.maximum(end, tl.max(tl.load(cu_ptr + at, mask=at < num_segments, other=0), 0))
    return end


@triton.jit
def last_with_rows(cu_ptr, num_segments):
    """The number of the last segment that has rows, if no boundary falls; loads from cu_ptr like `survey`."""
    last = 0
    for index in range(0, num_segments, LOOK_FAR):
        at = index + tl.arange(0, LOOK_FAR)
        start = tl.load(cu_ptr + at, mask=at < num_segments, other=0)
        end = tl.load(cu_ptr + at + 1, mask=at < num_segments, other=0)
        last = tl.maximum(last, tl.max(tl.where(end > start, at + 1, 0), 0))
    return last


@triton.jit
def survey(cu_ptr, num_segments, total):
    """(rows of the longest segment, number of the last that has rows, whether a boundary falls before it).

    Boundaries behind that segment may fall to anything, since no later one is larger. A function may load from cu_ptr
    here, because no address depends on the result (see the module's docstring).
    """
    longest, most, last = 0, 0, 0
    fall = num_segments
    for index in range(0, num_segments + 1, LOOK_FAR):
        at = index + tl.arange(0, LOOK_FAR)
        start = clamp_rows(tl.load(cu_ptr + at, mask=at <= num_segments, other=0), total)
        end = clamp_rows(tl.load(cu_ptr + at + 1, mask=at < num_segments, other=0), total)
        longest = tl.maximum(longest, tl.max(tl.where(at < num_segments, end - start, 0), 0))
        fall = tl.minimum(fall, tl.min(tl.where(end < start, at, num_segments), 0))
        highest = tl.max(start, 0)
        last = tl.where(highest > most, tl.min(tl.where(start == highest, at, num_segments), 0), last)
        most = tl.maximum(most, highest)
    return longest, last, fall < last


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
    begin = clamp_rows(begin, total)
    end = tl.maximum(clamp_rows(end, total), begin)
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
