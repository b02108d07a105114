"""Dropout of attention weights by position.

Only the seed, the stream and the rows of query and key decide whether a weight is kept. The stream is a number of the
pair of sequence and head. Tiles play no role, so forward and backward agree, and so do any two launches.

The random numbers are those of Philox4x32 with 7 rounds, the fewest that pass BigCrush (Salmon et al., Parallel random
numbers: as easy as 1, 2, 3, SC 2011). Counter (key // 4, row, stream, 0) gives four words; word w is for key 4 n + w.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def dropout_mask(rows, first, score_mod, BLOCK: tl.constexpr):
    """Which weights [rows, BLOCK] are kept, for BLOCK keys from `first` on, a multiple of 4."""
    tl.static_assert(BLOCK % 4 == 0, "a counter of Philox4x32 gives random numbers for 4 keys at a time")
    _, _, _, dropout, seed, stream = score_mod
    limit = (dropout * 4294967296.0).to(tl.uint32)
    row = rows[:, None] + tl.zeros((1, BLOCK // 4), tl.int32)
    four = (first // 4 + tl.arange(0, BLOCK // 4))[None, :] + tl.zeros_like(row)
    zero = tl.zeros_like(row)
    words = tl.philox(seed, four, row, zero + tl.cast(stream, tl.int32), zero, ROUNDS)
    even = tl.join((words[0] >= limit).to(tl.int8), (words[2] >= limit).to(tl.int8))
    odd = tl.join((words[1] >= limit).to(tl.int8), (words[3] >= limit).to(tl.int8))
    return tl.join(even, odd).reshape(rows.shape[0], BLOCK) != 0


@triton.jit
def drop_weights(weights, rows, first, score_mod, BLOCK: tl.constexpr):
    """weights [rows, BLOCK] with zeros where they are dropped. The factor 1 / (1 - p) follows after the sum."""
    return tl.where(dropout_mask(rows, first, score_mod, BLOCK), weights, 0.0)
