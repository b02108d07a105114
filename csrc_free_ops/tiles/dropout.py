"""Dropout of attention weights, by the position of each.

Whether the weight of a key for a query is kept follows from the seed, the stream (a number of the pair of sequence and
head), the query's row and the key's, and from nothing else: not from tiles, so forward and backward agree, and so do
any two launches. The numbers are those of Philox4x32 with 7 rounds, the fewest that pass BigCrush (Salmon et al.,
Parallel random numbers: as easy as 1, 2, 3, SC 2011): word w of counter (key // 4, row, stream, 0) is of key 4 n + w.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def keep_weights(rows, first, step, BLOCK: tl.constexpr):
    """Which weights [rows, BLOCK] of the keys from `first`, a multiple of 4, on are kept."""
    _, _, _, dropout, seed, stream = step
    limit = (dropout * 4294967296.0).to(tl.uint32)
    row = rows[:, None] + tl.zeros((1, BLOCK // 4), tl.int32)
    four = (first // 4 + tl.arange(0, BLOCK // 4))[None, :] + tl.zeros_like(row)
    zero = tl.zeros_like(row)
    words = tl.philox(seed, four, row, zero + tl.cast(stream, tl.int32), zero, ROUNDS)
    even = tl.join((words[0] >= limit).to(tl.int8), (words[2] >= limit).to(tl.int8))
    odd = tl.join((words[1] >= limit).to(tl.int8), (words[3] >= limit).to(tl.int8))
    return tl.join(even, odd).reshape(rows.shape[0], BLOCK) != 0


@triton.jit
def drop_weights(weights, rows, first, step, BLOCK: tl.constexpr):
    """weights [rows, BLOCK], 0 where they are dropped. Those that are kept grow when the sum is done."""
    return tl.where(keep_weights(rows, first, step, BLOCK), weights, 0.0)
