"""Keys of a sequence that lie in pieces, and the list of tiles of segments that name such sequences.

Piece p of sequence s holds the sequence's keys bounds[s, p] .. bounds[s, p + 1] - 1. They lie in rows rows[s, p] and
following of the key tensors. Blocks of keys begin at multiples of their size within the sequence, whatever piece they
lie in. Dropout's random numbers, which belong to four keys, therefore need no shift. A block across a border is passed
over once for each of its pieces.

A kernel of one launch writes the list of tiles (`attention/portable/segment_tiles.py`), and the attention kernels of
the next launches read it. A field of the list is an array of one number for each tile.
"""

import triton
import triton.language as tl

# Fields of a tile of queries:
# - ROW, COUNT: its first row in q, and how many rows it has, 0 in a surplus tile.
# - POSITION: the key position of its first row.
# - KEYS, SEQUENCE: how many keys its segment sees, and their sequence, -1 outside of all segments.
# - FIRST_PIECE, END_PIECE: the pieces first .. end-1 hold these keys.
ROW, COUNT, POSITION, KEYS, SEQUENCE, FIRST_PIECE, END_PIECE = (tl.constexpr(field) for field in range(7))
QUERY_FIELDS = tl.constexpr(7)
# Fields of a segment, in the order of sequences: its first row in q, its number of rows, how many keys it sees, and the
# key position of its first row.
SEGMENT_ROW, SEGMENT_ROWS, SEGMENT_KEYS, SEGMENT_START = (tl.constexpr(field) for field in range(4))
SEGMENT_FIELDS = tl.constexpr(4)
# Fields of a tile of rows of k: the first and the last piece that has rows in it, and how many have. Pieces of all
# sequences are numbered together.
KEY_FIRST, KEY_LAST, KEY_COUNT = (tl.constexpr(field) for field in range(3))
KEY_FIELDS = tl.constexpr(3)
NO_PIECE = tl.constexpr(2**31 - 1)
# Loops and windows count the keys of a sequence in 32 bits.
MOST_KEYS = tl.constexpr(2**29)


@triton.jit
def has_rows(begin, behind, row, first_row, end_row):
    """Which pieces, of the keys begin .. behind-1 from row `row` on, have rows in first_row .. end_row-1."""
    return (begin < behind) & (row < end_row) & (row.to(tl.int64) + behind - begin > first_row)


@triton.jit
def piece_span(low, full_low, full_high, high, begin, end, row, total_k, BLOCK: tl.constexpr):
    """The blocks of `block_span` that a piece holds: (first key, low, full_low, full_high, high).

    The piece holds the keys begin .. end-1, from row `row` of total_k rows on. Keys outside of these rows do not exist.
    Blocks in full_low .. full_high need no mask; masked ones see the keys from the first one up to `high`.
    """
    first_key = tl.maximum(tl.maximum(begin, low), begin - row)
    high = tl.maximum(tl.minimum(tl.minimum(end, high), begin - row + total_k), first_key)
    low = first_key // BLOCK * BLOCK
    full_low = (tl.maximum(full_low, first_key) + BLOCK - 1) // BLOCK * BLOCK
    full_high = tl.minimum(full_high, high) // BLOCK * BLOCK
    is_whole = full_low < full_high
    full_low = tl.where(is_whole, full_low, low)
    full_high = tl.where(is_whole, full_high, low)
    # An empty span has no block at all.
    high = tl.where(first_key < high, high, low)
    return first_key.to(tl.int32), low.to(tl.int32), full_low.to(tl.int32), full_high.to(tl.int32), high.to(tl.int32)


@triton.jit
def key_span(
    first_key, last_key, seen_from, seen_to, shift, before, after, length,
    HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The blocks of query rows that see the keys first_key .. last_key, as `block_span` has them.

    Only the keys seen_from .. seen_to-1 are seen. If others are among them, all blocks need the mask.
    """
    low = 0
    high = length
    full_low = 0
    full_high = length
    if HAS_BEFORE:
        low = tl.maximum(tl.maximum(first_key, seen_from) + shift - before, 0)
        full_low = tl.maximum(last_key + shift - before, 0)
    if HAS_AFTER:
        high = tl.maximum(tl.minimum(tl.minimum(last_key, seen_to - 1) + shift + after + 1, length), 0)
        full_high = tl.maximum(tl.minimum(first_key + shift + after + 1, length), 0)
    is_empty = (tl.maximum(first_key, seen_from) > tl.minimum(last_key, seen_to - 1)) | (low >= high)
    is_partial = (first_key < seen_from) | (last_key >= seen_to)
    low = low // BLOCK * BLOCK
    high = tl.where(is_empty, low, high)
    full_low = tl.minimum((full_low + BLOCK - 1) // BLOCK, (high + BLOCK - 1) // BLOCK) * BLOCK
    full_low = tl.where(is_empty | is_partial, low, tl.maximum(full_low, low))
    full_high = tl.where(is_empty | is_partial, low, tl.maximum(full_high // BLOCK * BLOCK, full_low))
    return low, full_low, full_high, high
