"""Dropout of attention weights by position.

Only the seed, the stream and the rows of query and key decide whether a weight is masks. The stream is a number of the
pair of sequence and head. Tiles play no role, so forward and backward agree, and so do any two launches.

The random numbers are those of Philox4x32 with 7 rounds, the fewest that pass BigCrush (Salmon et al., Parallel random
numbers: as easy as 1, 2, 3, SC 2011). Counter (key // 4, row, stream, 0) gives four words; word w is for key 4 n + w.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def _random_words(rows, first_four, score_mod, BLOCK: tl.constexpr):
    """Four words [rows, BLOCK // 4], each for one of four keys, from the keys 4 first_four on."""
    seed, stream = score_mod[4], score_mod[5]
    row = rows[:, None] + tl.zeros((1, BLOCK // 4), tl.int32)
    four = (first_four + tl.arange(0, BLOCK // 4))[None, :] + tl.zeros_like(row)
    zero = tl.zeros_like(row)
    return tl.philox(seed, four, row, zero + tl.cast(stream, tl.int32), zero, ROUNDS)


@triton.jit
def _joined(one, two, three, four):
    """Whether any of [rows, N] is not 0, side by side: [rows, 4 N]."""
    return tl.join(tl.join(one, three), tl.join(two, four)).reshape(one.shape[0], 4 * one.shape[1]) != 0


@triton.jit
def dropout_mask(rows, first, score_mod, BLOCK: tl.constexpr):
    """Which weights [rows, BLOCK] are kept, for BLOCK keys from `first` on, a multiple of 4."""
    tl.static_assert(BLOCK % 4 == 0, "a counter of Philox4x32 gives random numbers for 4 keys at a time")
    limit = (score_mod[3] * 4294967296.0).to(tl.uint32)
    words = _random_words(rows, first // 4, score_mod, BLOCK)
    return _joined(
        (words[0] >= limit).to(tl.int8), (words[1] >= limit).to(tl.int8),
        (words[2] >= limit).to(tl.int8), (words[3] >= limit).to(tl.int8),
    )  # fmt: skip


@triton.jit
def dropout_mask_anywhere(rows, first, score_mod, BLOCK: tl.constexpr):
    """`dropout_mask` for any `first`, with twice the random numbers: key 4 n + w may have its word in the next four."""
    limit = (score_mod[3] * 4294967296.0).to(tl.uint32)
    words = _random_words(rows, first >> 2, score_mod, BLOCK)
    later = _random_words(rows, (first >> 2) + 1, score_mod, BLOCK)
    masks = (
        (words[0] >= limit).to(tl.int8), (words[1] >= limit).to(tl.int8),
        (words[2] >= limit).to(tl.int8), (words[3] >= limit).to(tl.int8),
        (later[0] >= limit).to(tl.int8), (later[1] >= limit).to(tl.int8), (later[2] >= limit).to(tl.int8),
    )  # fmt: skip
    offset = first & 3
    return _joined(
        _pick_word(masks[0], masks[1], masks[2], masks[3], offset),
        _pick_word(masks[1], masks[2], masks[3], masks[4], offset),
        _pick_word(masks[2], masks[3], masks[4], masks[5], offset),
        _pick_word(masks[3], masks[4], masks[5], masks[6], offset),
    )


@triton.jit
def _pick_word(zero, one, two, three, offset):
    return tl.where(offset < 2, tl.where(offset == 0, zero, one), tl.where(offset == 2, two, three))


@triton.jit
def drop_weights(weights, rows, first, score_mod, BLOCK: tl.constexpr):
    """weights [rows, BLOCK] with zeros where they are dropped. The factor 1 / (1 - p) follows after the sum."""
    return tl.where(dropout_mask(rows, first, score_mod, BLOCK), weights, 0.0)
