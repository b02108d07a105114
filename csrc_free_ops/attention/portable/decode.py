"""Attention of a few new queries over a cache of keys, split among programs ("flash-decoding").

For query i = 0 .. Sq-1 of a sequence with L keys in its cache, of which the last Sq belong to the queries themselves,
over the keys j that it sees:

    s_ij  = scale q_i . k_j                (softcap c: c tanh(s_ij / c))
    s_ij -= slope |L - Sq + i - j|         ALiBi, arXiv 2108.12409
    lse_i = log(sum_j exp(s_ij) + exp(sink))
    out_i = sum_j exp(s_ij - lse_i) v_j

The time is that of reading keys and values once. So the queries of all heads that share a key head are rows of one
tile, row r = i GROUP + head, and a sequence's keys are shared out among `num_splits` programs, in whole blocks and by
the length that only the device knows: each normalises what it has seen, rows of out and their exponent, which is lse in
the unit of the exponents (tiles/scores.py). A second kernel adds the parts up in the order of the splits,

    out = sum_p w_p out_p / sum_p w_p,  w_p = exp(lse_p - max lse)

with one running maximum, PARTS_AT_ONCE parts at a time: parts without keys add exact zeros, and one part alone stays as
it is, bit by bit. With SPLIT_KEYS a split is that many keys, so what is added to what depends on the sequence alone.

Keys that several sequences begin with are read once for all of them: with SHARED the rows of a tile are those of all
samples of a group, and their parts are further splits of each. FlashAttention-2's recurrence, arXiv 2307.08691;
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
    scale_rows,
    store_rows,
    zero_rows,
)
from csrc_free_ops.tiles.scores import LN2, exponent_factor, exponent_of_lse, exponential, natural_lse, step_scores
from csrc_free_ops.tiles.softmax import update
from csrc_free_ops.tiles.steps import ALIBI, SINKS

# Sizes that only count, as in portable_fwd.
DECODE_SIZES = (
    "num_queries", "capacity", "key_capacity", "num_pages", "num_splits", "total_rows", "window_left", "window_right",
)  # fmt: skip
COMBINE_SIZES = ("total_rows", "num_parts")
# Rows anywhere in memory are given by their offsets, and reach as far as that: those that are not there lie beyond.
BEYOND = tl.constexpr(2**62)
# Parts of a row that are on their way before the first of them is added.
PARTS_AT_ONCE = tl.constexpr(16)


@triton.jit
def _like(rows, other):
    """Rows in the dtype of the other ones."""
    cast = (rows[0].to(other[0].dtype),)
    for index in tl.static_range(1, len(rows)):
        cast += (rows[index].to(other[0].dtype),)
    return cast


@triton.jit
def _add_weighted(acc, weight, part):
    """acc + weight part, without what has no weight, which may be anything. An fma, whatever a compiler prefers."""
    total = (tl.fma(tl.where(weight > 0, part[0], 0.0), weight, acc[0]),)
    for index in tl.static_range(1, len(acc)):
        total += (tl.fma(tl.where(weight > 0, part[index], 0.0), weight, acc[index]),)
    return total


@triton.jit
def _settle(acc, peak, norm, NATURAL: tl.constexpr):
    """Rows of out and their exponents, 0 and -inf where no key was seen, once sums are complete."""
    # Not norm > 0: a row of NaN is no row without keys.
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
    """One more logit of each row, whose value is 0."""
    norm = tl.where(exponent == float("-inf"), 0.0, 1.0)
    sinks = exponent_of_lse(sinks.to(tl.float32), NATURAL)
    _, rescale, peak, norm = update(sinks[:, None], 1.0, exponent, norm, NATURAL)
    return _settle(scale_rows(out, rescale[:, None]), peak, norm, NATURAL)


@triton.jit
def _load_keys(
    base, starts, start, cols, length, page, stride_block,
    STRIDE: tl.constexpr, UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys (or values) start .. start+BLOCK_N-1 of a head whose first row, or that of its page 0, is at `base`.

    Of a paged cache `page` is the block's page where blocks do not straddle pages, else each key's. What is read past
    `length` has no weight; it is finite wherever the keys are. `cols` may name another key in the place of one.
    """
    if PAGE_SIZE > 0 and PAGE_SIZE % BLOCK_N != 0:
        # A mask would not do: addresses past the end would be of pages that are not there.
        slots = tl.minimum(start + cols, length - 1) % PAGE_SIZE
        offsets = page.to(tl.int64) * (tl.cast(stride_block, tl.int64) * UNIT) + slots.to(tl.int64) * STRIDE
        keys = load_rows(base, starts, offsets, BEYOND, 1, HEAD_DIM, MAIN, TAIL, False)
    else:
        if PAGE_SIZE > 0:
            base += page.to(tl.int64) * (tl.cast(stride_block, tl.int64) * UNIT)
            base += tl.cast(start % PAGE_SIZE, tl.int64) * STRIDE
        else:
            base += tl.cast(start, tl.int64) * STRIDE
        keys = load_rows(base, starts, cols, length - start, STRIDE, HEAD_DIM, MAIN, TAIL, True)
    return keys


@triton.jit
def _seen_cols(cols, start, first, HAS_LEFT: tl.constexpr):
    """Of a block's keys, with the first that a query sees in the place of those before it, which may be anything."""
    if HAS_LEFT:
        cols = tl.maximum(cols, first - start)
    return cols


@triton.jit
def _find_pages(table_ptr, start, cols, end, length, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of `_load_keys` for the block at `start`, within those that there are; 0 past the `end` of blocks."""
    keys = start
    if PAGE_SIZE % BLOCK_N != 0:
        keys = tl.minimum(start + cols, length - 1)
    page = tl.load(table_ptr + keys // PAGE_SIZE, mask=start < end, other=0)
    return tl.minimum(tl.maximum(page, 0), num_pages - 1)


@triton.jit
def _attend(
    q, positions, k_base, v_base, table_ptr, starts, first, begin, end, length, num_pages, stride_kb, stride_vb,
    scale, window_left, window_right, step,
    STRIDE_KS: tl.constexpr, STRIDE_VS: tl.constexpr, UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums over the keys in blocks from `begin` up to `end`, none of which before `first` is seen.

    Every block is masked, where portable_fwd has loops of their own for those that need it: reading is what takes
    time, and between two loops there would be nothing on its way.
    """
    NATURAL: tl.constexpr = q[0].dtype == tl.float32
    factor = exponent_factor(scale, STEPS, NATURAL)
    cols = tl.arange(0, BLOCK_N)
    acc = zero_rows(BLOCK_M, HEAD_DIM, MAIN, TAIL)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    page = 0
    if PAGE_SIZE > 0:
        own = _seen_cols(cols, begin, first, HAS_LEFT)
        page = _find_pages(table_ptr, begin, own, end, length, num_pages, PAGE_SIZE, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N):
        own = _seen_cols(cols, start, first, HAS_LEFT)
        k = _load_keys(
            k_base, starts, start, own, length, page, stride_kb,
            STRIDE_KS, UNIT, HEAD_DIM, MAIN, TAIL, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
        v = _load_keys(
            v_base, starts, start, own, length, page, stride_vb,
            STRIDE_VS, UNIT, HEAD_DIM, MAIN, TAIL, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
        if PAGE_SIZE > 0:
            # One block ahead, so that addresses do not wait for them.
            own = _seen_cols(cols, start + BLOCK_N, first, HAS_LEFT)
            page = _find_pages(table_ptr, start + BLOCK_N, own, end, length, num_pages, PAGE_SIZE, BLOCK_N)
        keys = (start + cols)[None, :]
        products = dot_rows(q, _like(k, q), PRECISION)  # [BLOCK_M, BLOCK_N]
        scores, _ = step_scores(products, positions[:, None], keys, 0, scale, step, STEPS)
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
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_vb, stride_vh, stride_tb, stride_sb,
    stride_ob, stride_oh, stride_os,
    samples, num_queries, capacity, key_capacity, num_pages, num_splits, first_split, total_rows,
    scale, softcap, window_left, window_right,
    STRIDE_KS: tl.constexpr, STRIDE_VS: tl.constexpr, UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, NUM_K_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STEPS: tl.constexpr,
    SHARED: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr, PARTIAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SPLIT_KEYS: tl.constexpr, OVERLAPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (groups * splits * key heads * tiles of BLOCK_M rows), of `samples` sequences each; 1 without SHARED.

    With PARTIAL, out and lse are those of the splits from `first_split` on, [splits, total_rows, D] and
    [splits, total_rows], rows as in [B, H, Sq]; lse is an exponent. `lengths` says how many keys of its own each
    sequence has, which are the keys here; with SHARED those before them are, `key_capacity` or as many as
    `key_lengths` says.
    """
    NATURAL: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    scale = tl.cast(scale, tl.float32)
    rows_of_group = samples * num_queries * GROUP
    tiles = (rows_of_group + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    tile = program % tiles
    k_head = program // tiles % NUM_K_HEADS
    split = program // tiles // NUM_K_HEADS % num_splits
    group = tl.cast(program // tiles // NUM_K_HEADS // num_splits, tl.int64)

    k_base = k_ptr + tl.cast(k_head, tl.int64) * tl.cast(stride_kh, tl.int64) * UNIT
    v_base = v_ptr + tl.cast(k_head, tl.int64) * tl.cast(stride_vh, tl.int64) * UNIT
    if PAGE_SIZE == 0:
        k_base += group * tl.cast(stride_kb, tl.int64) * UNIT
        v_base += group * tl.cast(stride_vb, tl.int64) * UNIT
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < rows_of_group
    # Rows that are not there do as the last one.
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

    q = load_rows(q_ptr, starts, q_rows, BEYOND, 1, HEAD_DIM, MAIN, TAIL, False)
    slopes = 0.0
    if ALIBI & STEPS:
        slopes = tl.load(slopes_ptr + sample * stride_sb + head)[:, None]
    # As tiles/steps.py has them; sinks come in the end.
    step = tl.cast(softcap, tl.float32), slopes, 0.0, 0.0, 0, 0
    acc, peak, norm = _attend(
        q, positions, k_base, v_base, table_ptr + group * stride_tb, starts, first, begin, end, key_length,
        num_pages, stride_kb, stride_vb, scale, window_left, window_right, step,
        STRIDE_KS, STRIDE_VS, UNIT, HEAD_DIM, MAIN, TAIL,
        HAS_LEFT, HAS_RIGHT, STEPS, PAGE_SIZE, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    out, exponent = _settle(acc, peak, norm, NATURAL)

    row = (sample * (NUM_K_HEADS * GROUP) + head) * num_queries + query
    if PARTIAL:
        out_rows = (tl.cast(first_split + split, tl.int64) * total_rows + row) * HEAD_DIM
        # Of parts without keys the exponent says all.
        reach = tl.where(begin < end, BEYOND, 0)
        lse = exponent
        row += tl.cast(first_split + split, tl.int64) * total_rows
    else:
        if SINKS & STEPS:
            out, exponent = _add_sinks(out, exponent, tl.load(sinks_ptr + head), NATURAL)
        out_rows = sample * stride_ob + tl.cast(head, tl.int64) * stride_oh + tl.cast(query, tl.int64) * stride_os
        reach = BEYOND
        lse = _lse_of_exponent(exponent, NATURAL)
    store_rows(out_ptr, starts, tl.where(inside, out_rows, BEYOND), reach, out, 1, HEAD_DIM, MAIN, TAIL)
    tl.store(lse_ptr + row, lse, mask=inside)


@triton.jit(do_not_specialize=COMBINE_SIZES)
def _attention_decode_combine_kernel(
    parts_ptr, exponents_ptr, sinks_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_os,
    total_rows, num_parts,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    NATURAL: tl.constexpr, STEPS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (B, H, Sq): out and lse of a row from its parts. See the module for the maths."""
    sample = tl.cast(tl.program_id(0), tl.int64)
    head = tl.cast(tl.program_id(1), tl.int64)
    query = tl.cast(tl.program_id(2), tl.int64)
    row = (sample * tl.num_programs(1) + head) * tl.num_programs(2) + query
    one = tl.arange(0, 1)
    starts = column_starts(head, HEAD_DIM, MAIN)
    part_ptr = parts_ptr + row * HEAD_DIM
    exponent_ptr = exponents_ptr + row
    out_base = out_ptr + sample * stride_ob + head * stride_oh + query * stride_os
    # Else a way around the loop is looked for first, and addresses after it, behind the wait.
    tl.assume(num_parts > 0)
    await_before(OVERLAPS)

    acc = zero_rows(1, HEAD_DIM, MAIN, TAIL)
    peak = float("-inf")
    norm = 0.0
    for first in tl.range(0, num_parts, PARTS_AT_ONCE, num_stages=1):
        exponents = ()
        parts = ()
        for index in tl.static_range(PARTS_AT_ONCE):
            left = num_parts - first - index
            exponents += (tl.load(exponent_ptr, mask=left > 0, other=float("-inf")),)
            parts += (load_rows(part_ptr, starts, one, left, 1, HEAD_DIM, MAIN, TAIL, True),)
            exponent_ptr += total_rows
            part_ptr += tl.cast(total_rows, tl.int64) * HEAD_DIM
        before = peak
        for index in tl.static_range(PARTS_AT_ONCE):
            peak = tl.maximum(peak, exponents[index])
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        rescale = exponential(before - anchor, NATURAL)
        acc = scale_rows(acc, rescale)
        norm *= rescale
        for index in tl.static_range(PARTS_AT_ONCE):
            weight = exponential(exponents[index] - anchor, NATURAL)
            norm += weight
            acc = _add_weighted(acc, weight, parts[index])
    out, exponent = _settle(acc, tl.full((1,), peak, tl.float32), tl.full((1,), norm, tl.float32), NATURAL)
    if SINKS & STEPS:
        out, exponent = _add_sinks(out, exponent, tl.load(sinks_ptr + head + one), NATURAL)
    store_rows(out_base, starts, one, 1, out, 1, HEAD_DIM, MAIN, TAIL)
    tl.store(lse_ptr + row + one, _lse_of_exponent(exponent, NATURAL))
