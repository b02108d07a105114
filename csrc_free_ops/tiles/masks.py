"""Which keys a query sees. Causal order and sliding windows are one pair of bounds.

Query row i of a segment with Lq queries and Lk keys stands at key position i + shift, shift = Lk - Lq (aligned
bottom-right), and sees from `left` keys before it to `right` keys after it; causal is right = 0. Seen from the keys the
same holds with shift = Lq - Lk and the bounds exchanged: key j is seen by positions j - right .. j + left.
"""

import triton
import triton.language as tl


@triton.jit
def within_bounds(mask, rows, cols, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """mask, and of query rows and key cols (which broadcast against each other) those that see each other."""
    if HAS_LEFT:
        mask = mask & (cols >= rows + (shift - left))
    if HAS_RIGHT:
        mask = mask & (cols <= rows + (shift + right))
    return mask


@triton.jit
def block_span(
    first,
    last,
    shift,
    before,
    after,
    length,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The blocks of the other side that positions first .. last see, of which the inner ones need no mask.

    Position p sees p + shift - before .. p + shift + after, within 0 .. length-1. Returns the positions (low, full_low,
    full_high, high), all but the last multiples of BLOCK: what lies in low .. full_low and full_high .. high needs the
    mask, every entry in full_low .. full_high is seen.
    """
    low = 0
    full_low = 0
    high = length
    full_high = length
    if HAS_BEFORE:
        low = tl.maximum(first + shift - before, 0)
        full_low = tl.maximum(last + shift - before, 0)
    if HAS_AFTER:
        high = tl.maximum(tl.minimum(last + shift + after + 1, length), 0)
        full_high = tl.maximum(tl.minimum(first + shift + after + 1, length), 0)
    low = low // BLOCK * BLOCK
    full_low = tl.minimum((full_low + BLOCK - 1) // BLOCK, (high + BLOCK - 1) // BLOCK) * BLOCK
    full_low = tl.maximum(full_low, low)
    full_high = tl.maximum(full_high // BLOCK * BLOCK, full_low)
    return low, full_low, full_high, high


@triton.jit
def share_of_span(low, full_low, full_high, high, share, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """Of the blocks of such a span those of one share: SHARES, as long as each other but for the last."""
    blocks = (high - low + BLOCK - 1) // BLOCK
    begin = tl.minimum(low + share * ((blocks + SHARES - 1) // SHARES) * BLOCK, high)
    end = tl.minimum(begin + (blocks + SHARES - 1) // SHARES * BLOCK, high)
    full_low = tl.minimum(tl.maximum(full_low, begin), end)
    full_high = tl.minimum(tl.maximum(full_high, begin), end)
    return begin, full_low, full_high, end


@triton.jit
def tiles_seeing(
    last, other, shift, before, after,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, OWNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first and the last of the tiles that see the block at `other`, which one at least does.

    Tiles 0 .. last of OWNED positions see blocks of BLOCK as `block_span` says.
    """
    first = 0
    if HAS_AFTER:
        first = tl.maximum(other - shift - after, 0) // OWNED
    if HAS_BEFORE:
        last = tl.minimum((other + BLOCK - 1 - shift + before) // OWNED, last)
    return first, last


@triton.jit
def is_seen(
    other, shift, before, after, length,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, OWNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether any tile of `tiles_seeing`, of `length` positions in all, sees the block at `other`."""
    low = 0
    high = length - 1
    if HAS_AFTER:
        low = tl.maximum(other - shift - after, 0)
    if HAS_BEFORE:
        high = tl.minimum(other + BLOCK - 1 - shift + before, high)
    return (high >= 0) & (low < length) & (low // OWNED <= high // OWNED)
