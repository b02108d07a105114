"""Gradients of keys and values in portable Triton, with the maths and the delta of `bwd.py`."""

import triton
import triton.language as tl

from csrc_free_ops.attention.portable.fwd import COUNTS, DENSE_SIZES, SIZES
from csrc_free_ops.tiles.dropout import dropout_mask, dropout_mask_anywhere
from csrc_free_ops.tiles.masks import block_span, count_splits, share_of_span, within_bounds
from csrc_free_ops.tiles.overlap import await_before
from csrc_free_ops.tiles.rows import (
    accumulate_rows,
    add_rows,
    batch_base,
    column_starts,
    dot_rows,
    load_rows,
    row_base,
    row_step,
    scale_rows,
    store_rows,
    zero_rows,
)
from csrc_free_ops.tiles.score_mod import DROPOUT, SOFTCAP, dropout_factor, head_score_mod, sequence_score_mod
from csrc_free_ops.tiles.scores import exponent_factor, exponent_of_norm, exponential, modify_scores
from csrc_free_ops.tiles.segments import (
    LOOK,
    NO_BOUNDARY,
    advance_start,
    count_segments,
    locate_dense,
    locate_tile,
    narrow_segment,
)


@triton.jit
def accumulate_dkdv(
    dk, dv, k, v, cols, first, q_base, dout_base, lse_base, delta_base, starts, low, high, q_length, shift,
    scale, score_mod, window_left, window_right,
    STRIDE_QT, STRIDE_DOT, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr, seen_keys=None,
):  # fmt: skip
    """(dk, dv) after the blocks of query rows from `low` up to `high`; MASKED for blocks that need the mask.

    `seen_keys` is (from, to): masked blocks see only these keys. Dropout then counts rows by their key
    position, and `first` may be any number.
    """
    NATURAL: tl.constexpr = k[0].dtype == tl.float32
    factor = exponent_factor(scale, SCORE_MODS, NATURAL)
    dropout_scale = dropout_factor(score_mod, SCORE_MODS)
    local = tl.arange(0, BLOCK_M)
    q_base += tl.cast(low, tl.int64) * STRIDE_QT
    dout_base += tl.cast(low, tl.int64) * STRIDE_DOT
    # With several heads in a group the registers do not hold loop invariants as well. Masked loops have few blocks, so
    # that computing the invariants in each of them is cheap.
    DISABLE_LICM: tl.constexpr = MASKED and (GROUP > 1 or seen_keys is not None)
    for start in tl.range(low, high, BLOCK_M, disable_licm=DISABLE_LICM):
        remaining = q_length - start
        q = load_rows(q_base, starts, local, remaining, STRIDE_QT, HEAD_DIM, MAIN, TAIL, MASKED)  # [BLOCK_M, D]
        dout = load_rows(dout_base, starts, local, remaining, STRIDE_DOT, HEAD_DIM, MAIN, TAIL, MASKED)  # [BLOCK_M, D]
        if MASKED:
            lse = tl.load(lse_base + start + local, mask=local < remaining, other=0.0)
            delta = tl.load(delta_base + start + local, mask=local < remaining, other=0.0)
        else:
            lse = tl.load(lse_base + start + local)
            delta = tl.load(delta_base + start + local)
        products = dot_rows(k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
        scores, steepness = modify_scores(
            products, start + local[None, :], cols[:, None], shift, scale, score_mod, SCORE_MODS
        )
        p = exponential(scores * factor - exponent_of_norm(lse, NATURAL)[None, :], NATURAL)
        if MASKED:
            inside = (local < remaining)[None, :]
            if seen_keys is not None:
                # Computed here, because registers do not hold it across the loops of all pieces.
                keys = first + tl.arange(0, cols.shape[0])
                inside &= ((keys >= seen_keys[0]) & (keys < seen_keys[1]))[:, None]
            seen = within_bounds(
                inside, local[None, :], cols[:, None],
                start + shift, window_left, window_right, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            p = tl.where(seen, p, 0.0)
        # Combine both factors of ds now, because registers do not hold two during the next product.
        slopes = p
        if SOFTCAP & SCORE_MODS:
            slopes = p * steepness
        dp = dot_rows(v, dout, PRECISION)  # [BLOCK_N, BLOCK_M]
        weights = p
        if DROPOUT & SCORE_MODS:
            if seen_keys is not None:
                mask = tl.trans(dropout_mask_anywhere(start + shift + local, first, score_mod, cols.shape[0]))
            else:
                mask = tl.trans(dropout_mask(start + local, first, score_mod, cols.shape[0]))
            weights = tl.where(mask, p, 0.0) * dropout_scale
            dp = tl.where(mask, dp, 0.0) * dropout_scale
        dv = accumulate_rows(dv, weights.to(dout[0].dtype), dout, PRECISION)  # [BLOCK_N, D]
        ds = slopes * (dp - delta[None, :])
        if MASKED and seen_keys is not None:
            # A key that nothing sees may hold NaN, as the padding of a gather does, and its gradient is 0.
            ds = tl.where(seen, ds, 0.0)
        dk = accumulate_rows(dk, ds.to(q[0].dtype), q, PRECISION)  # [BLOCK_N, D]
        q_base += BLOCK_M * STRIDE_QT
        dout_base += BLOCK_M * STRIDE_DOT
    return dk, dv


@triton.jit
def differentiate_keys(
    q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, dk_ptr, dv_ptr,
    k_head, k_start, k_length, first, q_start, q_length, split, slopes_ptr, sequence, stride_slopes, score_mod,
    stride_qh, stride_kh, stride_vh, stride_doh, stride_dkh, stride_dvh, total_q, scale, window_left, window_right,
    STRIDE_QT, STRIDE_KT, STRIDE_VT, STRIDE_DOT, STRIDE_DKT, STRIDE_DVT, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS=1,
):  # fmt: skip
    """Store dk and dv of BLOCK_N keys of a segment, from key `first` on, summed over the GROUP query heads in order.

    Where SPLITS is a number at run time, a program passes over its share of the query rows and stores split sums, as in
    `differentiate_queries`.
    """
    scale = tl.cast(scale, tl.float32)
    first_row = k_start + first
    k_base = row_base(k_ptr, first_row, k_head, stride_kh, STRIDE_KT, STRIDE_UNIT)
    v_base = row_base(v_ptr, first_row, k_head, stride_vh, STRIDE_VT, STRIDE_UNIT)

    starts = column_starts(k_head, HEAD_DIM, MAIN)
    local = tl.arange(0, BLOCK_N)
    cols = first + local
    remaining = k_length - first
    k = load_rows(k_base, starts, local, remaining, STRIDE_KT, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_N, D]
    v = load_rows(v_base, starts, local, remaining, STRIDE_VT, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_N, D]
    dk = zero_rows(BLOCK_N, HEAD_DIM, MAIN, TAIL)
    dv = zero_rows(BLOCK_N, HEAD_DIM, MAIN, TAIL)

    last = tl.minimum(first + BLOCK_N, k_length) - 1
    low, full_low, full_high, high = block_span(
        first,
        last,
        q_length - k_length,
        window_right,
        window_left,
        q_length,
        HAS_RIGHT,
        HAS_LEFT,
        BLOCK_M,
    )
    split_head = k_head
    if isinstance(SPLITS, tl.tensor):
        low, full_low, full_high, high = share_of_span(low, full_low, full_high, high, split, SPLITS, BLOCK_M)
        split_head = k_head * SPLITS + split
    # In fp32 each query head has its own accumulators: a shorter chain of additions rounds less.
    SUM_PER_HEAD: tl.constexpr = GROUP > 1 and k[0].dtype == tl.float32
    # Loop invariants stay in the loop, because hoisted ones would spill.
    for index in tl.range(0, GROUP, disable_licm=True):
        if SUM_PER_HEAD:
            dk_before, dv_before = dk, dv
            dk = zero_rows(BLOCK_N, HEAD_DIM, MAIN, TAIL)
            dv = zero_rows(BLOCK_N, HEAD_DIM, MAIN, TAIL)
        head = k_head * GROUP + index
        q_score_mod = head_score_mod(score_mod, slopes_ptr, None, sequence, head, stride_slopes, SCORE_MODS)
        q_base = row_base(q_ptr, q_start, head, stride_qh, STRIDE_QT, STRIDE_UNIT)
        dout_base = row_base(dout_ptr, q_start, head, stride_doh, STRIDE_DOT, STRIDE_UNIT)
        lse_base = lse_ptr + head * total_q + q_start
        delta_base = delta_ptr + head * total_q + q_start
        if HAS_RIGHT:
            dk, dv = accumulate_dkdv(
                dk, dv, k, v, cols, first, q_base, dout_base, lse_base, delta_base, starts, low, full_low,
                q_length, k_length - q_length, scale, q_score_mod, window_left, window_right,
                STRIDE_QT, STRIDE_DOT, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION,
                GROUP, BLOCK_M, True,
            )  # fmt: skip
        dk, dv = accumulate_dkdv(
            dk, dv, k, v, cols, first, q_base, dout_base, lse_base, delta_base, starts, full_low, full_high,
            q_length, k_length - q_length, scale, q_score_mod, window_left, window_right,
            STRIDE_QT, STRIDE_DOT, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION,
            GROUP, BLOCK_M, False,
        )  # fmt: skip
        dk, dv = accumulate_dkdv(
            dk, dv, k, v, cols, first, q_base, dout_base, lse_base, delta_base, starts, full_high, high,
            q_length, k_length - q_length, scale, q_score_mod, window_left, window_right,
            STRIDE_QT, STRIDE_DOT, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION,
            GROUP, BLOCK_M, True,
        )  # fmt: skip
        if SUM_PER_HEAD:
            dk = add_rows(dk_before, dk)
            dv = add_rows(dv_before, dv)
    dk_base = row_base(dk_ptr, first_row, split_head, stride_dkh, STRIDE_DKT, STRIDE_UNIT)
    dv_base = row_base(dv_ptr, first_row, split_head, stride_dvh, STRIDE_DVT, STRIDE_UNIT)
    store_rows(
        dk_base,
        starts,
        local,
        remaining,
        scale_rows(dk, scale),
        STRIDE_DKT,
        HEAD_DIM,
        MAIN,
        TAIL,
    )
    store_rows(dv_base, starts, local, remaining, dv, STRIDE_DVT, HEAD_DIM, MAIN, TAIL)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, seed_ptr, dk_ptr, dv_ptr,
    stride_qh, stride_kh, stride_vh, stride_doh,
    stride_qt, stride_kt, stride_vt, stride_dot, stride_dkt, stride_slopes,
    total_q, total_k, num_segments, scale, softcap, dropout, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_DOT: tl.constexpr,
    STRIDE_DKT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_N keys, key heads): dk and dv."""
    k_head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    # The kernel's body loads from cu_k itself: torch's mutation analysis treats a pointer that enters a function as
    # written, and torch.compile would clone cu_k (`tiles/segments.py`).
    segment, falls, index, seen = 0, 0, 0, LOOK
    while (seen == LOOK) & (index <= num_segments):
        at = index + tl.arange(0, LOOK)
        cu_q = tl.load(cu_q_ptr + at, mask=at <= num_segments, other=NO_BOUNDARY)
        cu_k = tl.load(cu_k_ptr + at, mask=at <= num_segments, other=NO_BOUNDARY)
        q_behind = tl.load(cu_q_ptr + at + 1, mask=at < num_segments, other=NO_BOUNDARY)
        k_behind = tl.load(cu_k_ptr + at + 1, mask=at < num_segments, other=NO_BOUNDARY)
        seen, falling = count_segments(cu_k, k_behind, cu_q, q_behind, at, total_k, tile, BLOCK_N)
        segment += seen
        falls += falling
        index += LOOK
    k_start = tl.load(cu_k_ptr + segment - 1, mask=segment > 0, other=0)
    q_start = tl.load(cu_q_ptr + tl.maximum(segment - 1, 0))
    if falls > 0:
        segment = num_segments + 1
        k_start, index = 0, 0
        q_start = tl.load(cu_q_ptr)
        while index < segment:
            at = index + tl.arange(0, LOOK)
            cu_q = tl.load(cu_q_ptr + at, mask=at <= num_segments, other=0)
            cu_k = tl.load(cu_k_ptr + at, mask=at <= num_segments, other=0)
            segment = narrow_segment(cu_k, at, segment, total_k, tile, BLOCK_N)
            k_start = advance_start(cu_k, at, segment, k_start, total_k)
            q_start = advance_start(cu_q, at, segment, q_start, total_q)
            index += LOOK
    k_start, k_length, first, q_start, q_length = locate_tile(
        k_start, tl.load(cu_k_ptr + segment, mask=segment <= num_segments, other=total_k),
        q_start, tl.load(cu_q_ptr + tl.minimum(segment, num_segments)), segment, total_k, total_q, tile, BLOCK_N,
    )  # fmt: skip
    if first >= k_length:
        return
    sequence = tl.maximum(tl.minimum(segment, num_segments) - 1, 0)
    score_mod = sequence_score_mod(seed_ptr, sequence, tl.num_programs(1) * GROUP, softcap, dropout, SCORE_MODS)
    differentiate_keys(
        q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, dk_ptr, dv_ptr,
        k_head, k_start, k_length, first, q_start, q_length, 0, slopes_ptr, sequence, stride_slopes, score_mod,
        stride_qh, stride_kh, stride_vh, stride_doh, HEAD_DIM // STRIDE_UNIT, HEAD_DIM // STRIDE_UNIT,
        total_q, scale, window_left, window_right,
        row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT),
        row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT),
        row_step(stride_dkt, STRIDE_DKT, STRIDE_UNIT), row_step(stride_dkt, STRIDE_DKT, STRIDE_UNIT),
        STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, GROUP,
        HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=DENSE_SIZES)
def _attention_bwd_dkdv_dense_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, slopes_ptr, seed_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_dob, stride_doh,
    stride_dkb, stride_dkh, stride_dvb, stride_dvh,
    stride_qt, stride_kt, stride_vt, stride_dot, stride_dkt, stride_dvt, stride_slopes,
    q_length, k_length, splits, scale, softcap, dropout, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_DOT: tl.constexpr,
    STRIDE_DKT: tl.constexpr, STRIDE_DVT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_N keys of all sequences, key heads, splits): dk and dv for sequences of equal length.

    With OVERLAPS the kernel starts while the previous one, which stores delta, ends.
    """
    await_before(OVERLAPS)
    k_head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1) * GROUP
    # Under a causal mask the first keys are seen by the most queries, so their programs start first.
    sequence, first = locate_dense(tl.program_id(0), k_length, False, BLOCK_N)
    score_mod = sequence_score_mod(seed_ptr, sequence, heads, softcap, dropout, SCORE_MODS)
    statistics = sequence.to(tl.int64) * heads * q_length
    differentiate_keys(
        batch_base(q_ptr, sequence, stride_qb, STRIDE_UNIT), batch_base(k_ptr, sequence, stride_kb, STRIDE_UNIT),
        batch_base(v_ptr, sequence, stride_vb, STRIDE_UNIT), lse_ptr + statistics,
        batch_base(dout_ptr, sequence, stride_dob, STRIDE_UNIT),
        delta_ptr + statistics,
        batch_base(dk_ptr, sequence, stride_dkb, STRIDE_UNIT), batch_base(dv_ptr, sequence, stride_dvb, STRIDE_UNIT),
        k_head, 0, k_length, first, 0, q_length, tl.program_id(2), slopes_ptr, sequence, stride_slopes, score_mod,
        stride_qh, stride_kh, stride_vh, stride_doh, stride_dkh, stride_dvh,
        q_length, scale, window_left, window_right,
        row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT),
        row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT),
        row_step(stride_dkt, STRIDE_DKT, STRIDE_UNIT), row_step(stride_dvt, STRIDE_DVT, STRIDE_UNIT),
        STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, GROUP,
        HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_M, BLOCK_N,
        count_splits(splits, IS_SPLIT),
    )  # fmt: skip
