"""From a program's number to its segment and rows, with lengths known only on the device.

Segments s = 0 .. n-1 own rows cu[s] .. cu[s+1]-1 of the packed tensors. The grid is an upper bound from shapes alone,
`total // BLOCK + n + 1` tiles: segment s starts at tile cu[s] // BLOCK + s, a number that grows strictly with s and
leaves every segment the ceil(length / BLOCK) tiles it needs and at most one more. One segment follows the last: the
rows past cu[n], which attend to nothing. Values are clamped to the tensor, so malformed cu cannot reach outside it.
"""

import triton
import triton.language as tl

SEARCH_WIDTH = tl.constexpr(128)


@triton.jit
def _boundary(cu_ptr, index, total):
    return tl.minimum(tl.maximum(tl.load(cu_ptr + index), 0), total)


@triton.jit
def _find_segment(cu_ptr, num_segments, total, tile, BLOCK: tl.constexpr):
    """The last s in 0 .. n whose first tile is not past `tile`, by SEARCH_WIDTH-ary search."""
    low = 0
    high = num_segments + 1
    while high - low > 1:
        step = (high - low + SEARCH_WIDTH - 1) // SEARCH_WIDTH
        probe = low + tl.arange(0, SEARCH_WIDTH) * step
        inside = probe < high
        cu = tl.load(cu_ptr + probe, mask=inside, other=0)
        first_tile = tl.minimum(tl.maximum(cu, 0), total) // BLOCK + probe
        count = tl.sum((inside & (first_tile <= tile)).to(tl.int32), 0)
        low += tl.maximum(count - 1, 0) * step
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def locate_tile(cu_ptr, cu_other_ptr, num_segments, total, total_other, tile, BLOCK: tl.constexpr):
    """`tile` among the tiles of BLOCK rows over cu, and the rows of the other side that belong to its segment.

    Returns (start, length, first, other_start, other_length): the segment's rows start .. start+length-1, the
    tile's first row within it (a surplus tile has first >= length), and the other side's rows.
    """
    segment = _find_segment(cu_ptr, num_segments, total, tile, BLOCK)
    following = tl.minimum(segment + 1, num_segments)
    start = _boundary(cu_ptr, segment, total)
    end = tl.where(segment == num_segments, total, _boundary(cu_ptr, following, total))
    other_start = _boundary(cu_other_ptr, segment, total_other)
    other_end = _boundary(cu_other_ptr, following, total_other)
    first = (tile - start // BLOCK - segment) * BLOCK
    return (
        start,
        tl.maximum(end - start, 0),
        first,
        other_start,
        tl.maximum(other_end - other_start, 0),
    )
