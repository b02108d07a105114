"""Which keys a query sees. Causal order and sliding windows are one pair of bounds.

A segment has Lq queries and Lk keys. Its query row i has key position i + shift with shift = Lk - Lq, which aligns the
mask bottom-right. The row sees from `left` keys before that position to `right` keys after it; causal is right = 0.

Key j is seen by query positions j - right .. j + left: a key has shift = Lq - Lk and the bounds exchanged. Below, the
resident side is the one whose rows a program holds; it streams blocks of the other side.
"""

import triton
import triton.language as tl


@triton.jit
def within_bounds(mask, rows, cols, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """mask without the pairs of query rows and key cols that do not see each other; rows and cols broadcast."""
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
    """The streamed blocks that resident positions first .. last see, as (low, full_low, full_high, high).

    Position p sees p + shift - before .. p + shift + after, within 0 .. length-1. Blocks in low .. full_low and in
    full_high .. high need the mask; in full_low .. full_high every entry is seen. All four but `high` are multiples of
    BLOCK.
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
def count_splits(splits, IS_SPLIT: tl.constexpr):
    """The number of splits: at run time with IS_SPLIT, because it follows from sizes, and else the constant 1."""
    if IS_SPLIT:
        return tl.cast(splits, tl.int32)
    else:
        return 1


@triton.jit
def share_of_span(low, full_low, full_high, high, share, SHARES, BLOCK: tl.constexpr):
    """The blocks of one of SHARES shares of a `block_span`. Shares are equally long; the last may be shorter."""
    blocks = (high - low + BLOCK - 1) // BLOCK
    begin = tl.minimum(low + share * ((blocks + SHARES - 1) // SHARES) * BLOCK, high)
    end = tl.minimum(begin + (blocks + SHARES - 1) // SHARES * BLOCK, high)
    full_low = tl.minimum(tl.maximum(full_low, begin), end)
    full_high = tl.minimum(tl.maximum(full_high, begin), end)
    return begin, full_low, full_high, end


@triton.jit
def tiles_seeing(
    last, block, shift, before, after,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, RESIDENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first and the last of the resident tiles that see the streamed block at `block`; at least one must.

    Tiles 0 .. last have RESIDENT positions each; they see blocks of BLOCK as in `block_span`.
    """
    first = 0
    if HAS_AFTER:
        first = tl.maximum(block - shift - after, 0) // RESIDENT
    if HAS_BEFORE:
        last = tl.minimum((block + BLOCK - 1 - shift + before) // RESIDENT, last)
    return first, last


@triton.jit
def is_seen(
    block, shift, before, after, length,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, RESIDENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether any tile of `tiles_seeing`, of `length` positions in all, sees the streamed block at `block`."""
    low = 0
    high = length - 1
    if HAS_AFTER:
        low = tl.maximum(block - shift - after, 0)
    if HAS_BEFORE:
        high = tl.minimum(block + BLOCK - 1 - shift + before, high)
    return (high >= 0) & (low < length) & (low // RESIDENT <= high // RESIDENT)
