"""Attention of a few new queries over a KV cache, split among programs ("flash-decoding").

Query i = 0 .. Sq-1 belongs to a sequence with L keys in its cache. The last Sq of these keys are those of the queries
themselves. Over the keys j that query i sees:

    s_ij  = scale q_i . k_j                (softcap c: c tanh(s_ij / c))
    s_ij -= slope |L - Sq + i - j|         ALiBi, arXiv 2108.12409
    lse_i = log(sum_j exp(s_ij) + exp(sink))
    out_i = sum_j exp(s_ij - lse_i) v_j

The time is that of one read of keys and values. The queries of all heads that share a key head are therefore rows of
one tile, row r = i GROUP + head. `num_splits` programs share a sequence's keys in whole blocks, by a length that only
the device knows. Each program stores normalised rows of out and their exponents: lse in the unit of `tiles/scores.py`.
A second kernel combines the splits in order,

    out = sum_p w_p out_p / sum_p w_p,  w_p = exp(lse_p - max lse)

with one running maximum, SPLITS_AT_ONCE splits at a time. A split without keys adds exact zeros, and a single split
keeps its bits. With SPLIT_KEYS every split has that many keys, so that the order of additions depends on the sequence
alone.

Samples may share a prefix of keys. With SHARED the rows of a tile are those of all samples of a group, so that the
prefix is read once; it adds further splits to each sample. FlashAttention-2's recurrence, arXiv 2307.08691;
Flash-Decoding, https://pytorch.org/blog/flash-decoding.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.masks import block_span, within_bounds
from csrc_free_ops.tiles.overlap import await_before
from csrc_free_ops.tiles.rows import (
    accumulate_rows,
    column_starts,
    dot_rows,
    load_rows,
    row_step,
    scale_rows,
    store_rows,
    zero_rows,
)
from csrc_free_ops.tiles.score_mod import ALIBI, SINKS
from csrc_free_ops.tiles.scores import LN2, exponent_factor, exponent_of_lse, exponential, modify_scores, natural_lse
from csrc_free_ops.tiles.softmax import update

# Not specialized: Triton would build the same code again for sizes of another divisibility.
DECODE_SIZES = (
    "stride_ks", "stride_vs", "num_queries", "capacity", "key_capacity", "num_pages", "num_splits", "total_rows",
    "window_left", "window_right",
)  # fmt: skip
COMBINE_SIZES = ("total_rows", "num_splits")
# Bound of row offsets, where rows are given by their offset in memory. A row that does not exist has this offset.
BEYOND = tl.constexpr(2**62)
# Splits of a row that are loaded before the first of them is added.
SPLITS_AT_ONCE = tl.constexpr(16)


@triton.jit
def _like(rows, like):
    """rows in the dtype of `like`."""
    cast = (rows[0].to(like[0].dtype),)
    for index in tl.static_range(1, len(rows)):
        cast += (rows[index].to(like[0].dtype),)
    return cast


@triton.jit
def _add_weighted(acc, weight, rows):
    """acc + weight rows, [1, D]. rows without a weight may hold NaN and count as 0. An fma fixes the rounding."""
    total = (tl.fma(tl.where(weight > 0, rows[0], 0.0), weight, acc[0]),)
    for index in tl.static_range(1, len(acc)):
        total += (tl.fma(tl.where(weight > 0, rows[index], 0.0), weight, acc[index]),)
    return total


@triton.jit
def _normalize(acc, peak, norm, NATURAL: tl.constexpr):
    """(rows of out, their exponents) from complete sums; 0 and -inf for a row that saw no key."""
    # Not `norm > 0`, because a row of NaN must stay NaN.
    inverse = tl.where(norm == 0, 0.0, 1.0 / norm)
    if NATURAL:
        exponent = natural_lse(peak, norm, True)
    else:
        exponent = peak + tl.log2(norm)
    return scale_rows(acc, inverse[:, None]), tl.where(norm == 0, float("-inf"), exponent)


@triton.jit
def _lse_of_exponent(exponent, NATURAL: tl.constexpr):
    if not NATURAL:
        exponent = exponent * LN2
    return exponent


@triton.jit
def _add_sinks(out, exponent, sinks, NATURAL: tl.constexpr):
    """Add one more logit to each row, whose value is 0."""
    norm = tl.where(exponent == float("-inf"), 0.0, 1.0)
    sinks = exponent_of_lse(sinks.to(tl.float32), NATURAL)
    _, rescale, peak, norm = update(sinks[:, None], 1.0, exponent, norm, NATURAL)
    return _normalize(scale_rows(out, rescale[:, None]), peak, norm, NATURAL)


@triton.jit
def _load_keys(
    base, starts, start, cols, length, page, stride_block, STRIDE,
    STRIDE_UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys (or values) start .. start+BLOCK_N-1 of a head, [BLOCK_N, D]. `base` is its first row, in page 0 if paged.

    In a paged cache `page` is the page of the block if blocks do not straddle pages, else the page of each key. Keys
    past `length` get no weight; they read as finite numbers if the cache is finite. `cols` may repeat a key in place of
    another.
    """
    if PAGE_SIZE > 0 and PAGE_SIZE % BLOCK_N != 0:
        # Clamp instead of masking, because the page table has no pages past the end.
        slots = tl.minimum(start + cols, length - 1) % PAGE_SIZE
        offsets = page.to(tl.int64) * (tl.cast(stride_block, tl.int64) * STRIDE_UNIT) + slots.to(tl.int64) * STRIDE
        keys = load_rows(base, starts, offsets, BEYOND, 1, HEAD_DIM, MAIN, TAIL, False)
    else:
        if PAGE_SIZE > 0:
            base += page.to(tl.int64) * (tl.cast(stride_block, tl.int64) * STRIDE_UNIT)
            base += tl.cast(start % PAGE_SIZE, tl.int64) * STRIDE
        else:
            base += tl.cast(start, tl.int64) * STRIDE
        keys = load_rows(base, starts, cols, length - start, STRIDE, HEAD_DIM, MAIN, TAIL, True)
    return keys


@triton.jit
def _seen_cols(cols, start, first, HAS_LEFT: tl.constexpr):
    """cols, with the first key that a query sees in place of earlier keys, whose memory may hold anything."""
    if HAS_LEFT:
        cols = tl.maximum(cols, first - start)
    return cols


@triton.jit
def _find_pages(table_ptr, start, cols, end, length, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """`page` of `_load_keys` for the block at `start`, clamped to existing pages; 0 past the `end` of blocks."""
    keys = start
    if PAGE_SIZE % BLOCK_N != 0:
        keys = tl.minimum(start + cols, length - 1)
    page = tl.load(table_ptr + keys // PAGE_SIZE, mask=start < end, other=0)
    return tl.minimum(tl.maximum(page, 0), num_pages - 1)


@triton.jit
def _attend(
    q, positions, k_base, v_base, table_ptr, starts, first, begin, end, length, num_pages, stride_kb, stride_vb,
    scale, window_left, window_right, score_mod, STRIDE_KS, STRIDE_VS, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(acc, peak, norm) over the blocks of keys from `begin` up to `end`; no key before `first` is seen.

    Every block is masked, whereas `fwd.py` has separate loops for the blocks that need the mask. The kernel is bound by
    reads, and no load would be in flight between two loops.
    """
    NATURAL: tl.constexpr = q[0].dtype == tl.float32
    factor = exponent_factor(scale, SCORE_MODS, NATURAL)
    cols = tl.arange(0, BLOCK_N)
    acc = zero_rows(BLOCK_M, HEAD_DIM, MAIN, TAIL)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    page = 0
    if PAGE_SIZE > 0:
        seen_cols = _seen_cols(cols, begin, first, HAS_LEFT)
        page = _find_pages(table_ptr, begin, seen_cols, end, length, num_pages, PAGE_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        seen_cols = _seen_cols(cols, start, first, HAS_LEFT)
        k = _load_keys(
            k_base, starts, start, seen_cols, length, page, stride_kb,
            STRIDE_KS, STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, PAGE_SIZE, BLOCK_N,
        )  # [BLOCK_N, D]  # fmt: skip
        v = _load_keys(
            v_base, starts, start, seen_cols, length, page, stride_vb,
            STRIDE_VS, STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, PAGE_SIZE, BLOCK_N,
        )  # [BLOCK_N, D]  # fmt: skip
        if PAGE_SIZE > 0:
            # Load pages one block ahead, so that addresses of keys do not wait for them.
            seen_cols = _seen_cols(cols, start + BLOCK_N, first, HAS_LEFT)
            page = _find_pages(table_ptr, start + BLOCK_N, seen_cols, end, length, num_pages, PAGE_SIZE, BLOCK_N)
        keys = (start + cols)[None, :]
        products = dot_rows(q, _like(k, q), PRECISION)  # [BLOCK_M, BLOCK_N]
        scores, _ = modify_scores(products, positions[:, None], keys, 0, scale, score_mod, SCORE_MODS)
        seen = within_bounds(
            keys < length, positions[:, None], keys, 0, window_left, window_right, HAS_LEFT, HAS_RIGHT
        )  # fmt: skip
        scores = tl.where(seen, scores, float("-inf"))
        weights, rescale, peak, norm = update(scores, factor, peak, norm, NATURAL)
        acc = accumulate_rows(scale_rows(acc, rescale[:, None]), weights.to(q[0].dtype), _like(v, q), PRECISION)
    return acc, peak, norm


@triton.jit(do_not_specialize=DECODE_SIZES)
def _attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, key_lengths_ptr, table_ptr, slopes_ptr, sinks_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_ks, stride_vs, stride_tb, stride_sb,
    stride_ob, stride_oh, stride_os,
    samples, num_queries, capacity, key_capacity, num_pages, num_splits, first_split, total_rows,
    scale, softcap, window_left, window_right,
    STRIDE_KS: tl.constexpr, STRIDE_VS: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, NUM_K_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr,
    SHARED: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr, PARTIAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SPLIT_KEYS: tl.constexpr, OVERLAPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (groups * splits * key heads * tiles of BLOCK_M rows). A group has `samples` sequences, 1 without SHARED.

    `lengths` holds the number of each sequence's own keys. Without SHARED these are the keys that are read. With SHARED
    the keys are those of the prefix: `key_lengths` of them, or `key_capacity`.

    With PARTIAL, out [splits, total_rows, D] and lse [splits, total_rows] take the splits from `first_split` on. Rows
    have the order of [B, H, Sq]; lse is an exponent.
    """
    tl.static_assert(SPLIT_KEYS % BLOCK_N == 0, "SPLIT_KEYS must be a multiple of BLOCK_N: a split has whole blocks")
    NATURAL: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    scale = tl.cast(scale, tl.float32)
    rows_of_group = samples * num_queries * GROUP
    tiles = (rows_of_group + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    tile = program % tiles
    k_head = program // tiles % NUM_K_HEADS
    split = program // tiles // NUM_K_HEADS % num_splits
    group = tl.cast(program // tiles // NUM_K_HEADS // num_splits, tl.int64)

    k_base = k_ptr + tl.cast(k_head, tl.int64) * tl.cast(stride_kh, tl.int64) * STRIDE_UNIT
    v_base = v_ptr + tl.cast(k_head, tl.int64) * tl.cast(stride_vh, tl.int64) * STRIDE_UNIT
    if PAGE_SIZE == 0:
        k_base += group * tl.cast(stride_kb, tl.int64) * STRIDE_UNIT
        v_base += group * tl.cast(stride_vb, tl.int64) * STRIDE_UNIT
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < rows_of_group
    # Rows past the last one repeat it and are not stored.
    rows = tl.minimum(rows, rows_of_group - 1)
    query = rows // GROUP
    sample = group
    if SHARED:
        sample = group * samples + query // num_queries
        query = query % num_queries
    head = k_head * GROUP + rows % GROUP
    starts = column_starts(k_head, HEAD_DIM, MAIN)
    q_rows = sample * stride_qb + tl.cast(head, tl.int64) * stride_qh + tl.cast(query, tl.int64) * stride_qs
    await_before(OVERLAPS)

    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + sample), 0), capacity)
    positions = length - num_queries + query
    key_length = length
    if SHARED:
        key_length = key_capacity
        if HAS_KEY_LENGTHS:
            key_length = tl.minimum(tl.maximum(tl.load(key_lengths_ptr + group), 0), key_capacity)
        positions += key_length

    nearest = tl.min(positions, 0)
    first = tl.maximum(nearest - window_left, 0)
    low, _, _, high = block_span(
        nearest, tl.max(positions, 0), 0, window_left, window_right, key_length,
        HAS_LEFT, HAS_RIGHT, BLOCK_N,
    )  # fmt: skip
    if SPLIT_KEYS > 0:
        begin = tl.maximum(split * SPLIT_KEYS, low)
        end = tl.minimum((split + 1) * SPLIT_KEYS, high)
    else:
        blocks = tl.maximum(high - low + BLOCK_N - 1, 0) // BLOCK_N
        begin = low + split * blocks // num_splits * BLOCK_N
        end = tl.minimum(low + (split + 1) * blocks // num_splits * BLOCK_N, high)

    q = load_rows(q_ptr, starts, q_rows, BEYOND, 1, HEAD_DIM, MAIN, TAIL, False)  # [BLOCK_M, D]
    slopes = 0.0
    if ALIBI & SCORE_MODS:
        slopes = tl.load(slopes_ptr + sample * stride_sb + head)[:, None]
    # The tuple of tiles/score_mod.py; sinks are added at the end.
    score_mod = tl.cast(softcap, tl.float32), slopes, 0.0, 0.0, 0, 0
    acc, peak, norm = _attend(
        q, positions, k_base, v_base, table_ptr + group * stride_tb, starts, first, begin, end, key_length,
        num_pages, stride_kb, stride_vb, scale, window_left, window_right, score_mod,
        row_step(stride_ks, STRIDE_KS, STRIDE_UNIT), row_step(stride_vs, STRIDE_VS, STRIDE_UNIT), STRIDE_UNIT,
        HEAD_DIM, MAIN, TAIL,
        HAS_LEFT, HAS_RIGHT, SCORE_MODS, PAGE_SIZE, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    out, exponent = _normalize(acc, peak, norm, NATURAL)

    row = (sample * (NUM_K_HEADS * GROUP) + head) * num_queries + query
    if PARTIAL:
        out_rows = (tl.cast(first_split + split, tl.int64) * total_rows + row) * HEAD_DIM
        # A split without keys stores only its exponent, -inf: the combine kernel ignores its rows.
        reach = tl.where(begin < end, BEYOND, 0)
        lse = exponent
        row += tl.cast(first_split + split, tl.int64) * total_rows
    else:
        if SINKS & SCORE_MODS:
            out, exponent = _add_sinks(out, exponent, tl.load(sinks_ptr + head), NATURAL)
        out_rows = sample * stride_ob + tl.cast(head, tl.int64) * stride_oh + tl.cast(query, tl.int64) * stride_os
        reach = BEYOND
        lse = _lse_of_exponent(exponent, NATURAL)
    store_rows(out_ptr, starts, tl.where(inside, out_rows, BEYOND), reach, out, 1, HEAD_DIM, MAIN, TAIL)
    tl.store(lse_ptr + row, lse, mask=inside)


@triton.jit(do_not_specialize=COMBINE_SIZES)
def _attention_decode_combine_kernel(
    partial_ptr, exponents_ptr, sinks_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_os,
    total_rows, num_splits,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    NATURAL: tl.constexpr, SCORE_MODS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (B, H, Sq): out and lse of a row from its splits. The module's docstring has the maths."""
    sample = tl.cast(tl.program_id(0), tl.int64)
    head = tl.cast(tl.program_id(1), tl.int64)
    query = tl.cast(tl.program_id(2), tl.int64)
    row = (sample * tl.num_programs(1) + head) * tl.num_programs(2) + query
    one = tl.arange(0, 1)
    starts = column_starts(head, HEAD_DIM, MAIN)
    split_ptr = partial_ptr + row * HEAD_DIM
    exponent_ptr = exponents_ptr + row
    out_base = out_ptr + sample * stride_ob + head * stride_oh + query * stride_os
    # Without this, code that skips the loop comes first, and addresses are computed only after the wait.
    tl.assume(num_splits > 0)
    await_before(OVERLAPS)

    acc = zero_rows(1, HEAD_DIM, MAIN, TAIL)
    peak = float("-inf")
    norm = 0.0
    for first in tl.range(0, num_splits, SPLITS_AT_ONCE, num_stages=1):
        exponents = ()
        splits = ()
        for index in tl.static_range(SPLITS_AT_ONCE):
            left = num_splits - first - index
            exponents += (tl.load(exponent_ptr, mask=left > 0, other=float("-inf")),)
            splits += (load_rows(split_ptr, starts, one, left, 1, HEAD_DIM, MAIN, TAIL, True),)
            exponent_ptr += total_rows
            split_ptr += tl.cast(total_rows, tl.int64) * HEAD_DIM
        before = peak
        for index in tl.static_range(SPLITS_AT_ONCE):
            peak = tl.maximum(peak, exponents[index])
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        rescale = exponential(before - anchor, NATURAL)
        acc = scale_rows(acc, rescale)
        norm *= rescale
        for index in tl.static_range(SPLITS_AT_ONCE):
            weight = exponential(exponents[index] - anchor, NATURAL)
            norm += weight
            acc = _add_weighted(acc, weight, splits[index])
    out, exponent = _normalize(acc, tl.full((1,), peak, tl.float32), tl.full((1,), norm, tl.float32), NATURAL)
    if SINKS & SCORE_MODS:
        out, exponent = _add_sinks(out, exponent, tl.load(sinks_ptr + head + one), NATURAL)
    store_rows(out_base, starts, one, 1, out, 1, HEAD_DIM, MAIN, TAIL)
    tl.store(lse_ptr + row + one, _lse_of_exponent(exponent, NATURAL))
