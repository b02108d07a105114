"""Attention backward in portable Triton: two kernels without atomics, so that results have the same bits every time.

P_ij = exp(s_ij - lse_i) is recomputed from q, k and the saved lse. For upstream gradients dout and dlse
(FlashAttention-2, arXiv 2307.08691, algorithm 2; dlse adds P_ij dlse_i to ds_ij):

    delta_i = sum_d dout_id out_id - dlse_i
    ds_ij   = P_ij (dout_i . v_j - delta_i)        softcap: times 1 - tanh^2; a sink counts in lse_i only
    dq_i    = scale sum_j ds_ij k_j
    dk_j    = scale sum_i ds_ij q_i                summed over the query heads of the group
    dv_j    = sum_i P_ij dout_i

With dropout and keep_ij = 0 or 1 / (1 - p), P_ij keep_ij replaces P_ij in dv, and dout_i . v_j keep_ij replaces
dout_i . v_j in ds_ij.

The dq kernel owns query rows and stores delta. The dkdv kernel of `bwd_dkdv.py` owns keys, reads delta and runs second.
`bwd_small.py` computes both in one kernel. In a batch either kernel may store split sums, which `bwd_split.py` adds up.
Accumulators are fp32; P and ds are rounded to the input dtype for the products, as in the forward. SCORE_MODS has no
bit for sinks here.
"""

import triton
import triton.language as tl

from csrc_free_ops.attention.portable.fwd import COUNTS, DENSE_SIZES, SIZES
from csrc_free_ops.tiles.dropout import drop_weights
from csrc_free_ops.tiles.masks import block_span, count_splits, share_of_span, within_bounds
from csrc_free_ops.tiles.overlap import await_before
from csrc_free_ops.tiles.rows import (
    accumulate_rows,
    batch_base,
    column_starts,
    delta_of_rows,
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
def accumulate_dq(
    dq, q, dout, lse, delta, rows, k_base, v_base, starts, low, high, shift, k_length,
    scale, score_mod, window_left, window_right,
    STRIDE_KT, STRIDE_VT, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, first_key=None,
):  # fmt: skip
    """dq after the blocks of keys from `low` up to `high`, with MASKED and `first_key` as in `attend_blocks`."""
    NATURAL: tl.constexpr = q[0].dtype == tl.float32
    factor = exponent_factor(scale, SCORE_MODS, NATURAL)
    dropout_scale = dropout_factor(score_mod, SCORE_MODS)
    cols = tl.arange(0, BLOCK_N)
    k_base += tl.cast(low, tl.int64) * STRIDE_KT
    v_base += tl.cast(low, tl.int64) * STRIDE_VT
    for start in tl.range(low, high, BLOCK_N, num_stages=1 if MASKED else None):
        local = cols
        if MASKED and first_key is not None:
            local = tl.maximum(cols, first_key - start)
        k = load_rows(k_base, starts, local, k_length - start, STRIDE_KT, HEAD_DIM, MAIN, TAIL, MASKED)  # [BLOCK_N, D]
        v = load_rows(v_base, starts, local, k_length - start, STRIDE_VT, HEAD_DIM, MAIN, TAIL, MASKED)  # [BLOCK_N, D]
        products = dot_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
        scores, steepness = modify_scores(
            products, rows[:, None], start + cols[None, :], shift, scale, score_mod, SCORE_MODS
        )
        p = exponential(scores * factor - lse[:, None], NATURAL)
        if MASKED:
            inside = start + cols < k_length
            if first_key is not None:
                inside &= local == cols
            seen = within_bounds(
                inside[None, :], rows[:, None], start + cols[None, :],
                shift, window_left, window_right, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            p = tl.where(seen, p, 0.0)
        dp = dot_rows(dout, v, PRECISION)  # [BLOCK_M, BLOCK_N]
        if DROPOUT & SCORE_MODS:
            dp = drop_weights(dp, rows, start, score_mod, BLOCK_N) * dropout_scale
        ds = p * (dp - delta[:, None])
        if SOFTCAP & SCORE_MODS:
            ds = ds * steepness
        dq = accumulate_rows(dq, ds.to(k[0].dtype), k, PRECISION)  # [BLOCK_M, D]
        k_base += BLOCK_N * STRIDE_KT
        v_base += BLOCK_N * STRIDE_VT
    return dq


@triton.jit
def differentiate_queries(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, delta_ptr, dq_ptr,
    head, q_start, q_length, first, k_start, k_length, split,
    stride_qh, stride_kh, stride_vh, stride_oh, stride_doh, stride_dqh,
    total_q, scale, score_mod, window_left, window_right,
    STRIDE_QT, STRIDE_KT, STRIDE_VT, STRIDE_OT, STRIDE_DOT, STRIDE_DQT, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS=1,
    HAS_DELTA: tl.constexpr = False,
):  # fmt: skip
    """Store dq of BLOCK_M query rows of a segment, from row `first` on, and their delta unless HAS_DELTA.

    Where SPLITS is a number at run time (`count_splits`), a program passes over its share of the keys and stores a
    split sum of dq. The split sums of a head follow each other like heads.
    """
    scale = tl.cast(scale, tl.float32)
    k_head = head // GROUP
    first_row = q_start + first
    q_base = row_base(q_ptr, first_row, head, stride_qh, STRIDE_QT, STRIDE_UNIT)
    out_base = row_base(out_ptr, first_row, head, stride_oh, STRIDE_OT, STRIDE_UNIT)
    dout_base = row_base(dout_ptr, first_row, head, stride_doh, STRIDE_DOT, STRIDE_UNIT)
    k_base = row_base(k_ptr, k_start, k_head, stride_kh, STRIDE_KT, STRIDE_UNIT)
    v_base = row_base(v_ptr, k_start, k_head, stride_vh, STRIDE_VT, STRIDE_UNIT)

    starts = column_starts(k_head, HEAD_DIM, MAIN)
    local = tl.arange(0, BLOCK_M)
    rows = first + local
    inside = rows < q_length
    remaining = q_length - first
    q = load_rows(q_base, starts, local, remaining, STRIDE_QT, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    dout = load_rows(dout_base, starts, local, remaining, STRIDE_DOT, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    statistics = head * total_q + q_start + rows
    if HAS_DELTA:
        lse = tl.load(lse_ptr + statistics, mask=inside, other=float("-inf"))
        delta = tl.load(delta_ptr + statistics, mask=inside, other=0.0)
    else:
        out = load_rows(out_base, starts, local, remaining, STRIDE_OT, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
        lse = tl.load(lse_ptr + statistics, mask=inside, other=float("-inf"))
        delta = delta_of_rows(out, dout, lse, dlse_ptr + statistics, inside, HAS_DLSE)
        tl.store(delta_ptr + statistics, delta, mask=inside)
    lse = exponent_of_norm(lse, q[0].dtype == tl.float32)

    last = tl.minimum(first + BLOCK_M, q_length) - 1
    low, full_low, full_high, high = block_span(
        first,
        last,
        k_length - q_length,
        window_left,
        window_right,
        k_length,
        HAS_LEFT,
        HAS_RIGHT,
        BLOCK_N,
    )
    split_head = head
    if isinstance(SPLITS, tl.tensor):
        low, full_low, full_high, high = share_of_span(low, full_low, full_high, high, split, SPLITS, BLOCK_N)
        split_head = head * SPLITS + split
    dq = zero_rows(BLOCK_M, HEAD_DIM, MAIN, TAIL)
    if HAS_LEFT:
        dq = accumulate_dq(
            dq, q, dout, lse, delta, rows, k_base, v_base, starts, low, full_low, k_length - q_length, k_length,
            scale, score_mod, window_left, window_right,
            STRIDE_KT, STRIDE_VT, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, True,
        )  # fmt: skip
    dq = accumulate_dq(
        dq, q, dout, lse, delta, rows, k_base, v_base, starts, full_low, full_high, k_length - q_length, k_length,
        scale, score_mod, window_left, window_right,
        STRIDE_KT, STRIDE_VT, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, False,
    )  # fmt: skip
    dq = accumulate_dq(
        dq, q, dout, lse, delta, rows, k_base, v_base, starts, full_high, high, k_length - q_length, k_length,
        scale, score_mod, window_left, window_right,
        STRIDE_KT, STRIDE_VT, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, True,
    )  # fmt: skip
    dq_base = row_base(dq_ptr, first_row, split_head, stride_dqh, STRIDE_DQT, STRIDE_UNIT)
    store_rows(
        dq_base,
        starts,
        local,
        remaining,
        scale_rows(dq, scale),
        STRIDE_DQT,
        HEAD_DIM,
        MAIN,
        TAIL,
    )


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, seed_ptr,
    delta_ptr, dq_ptr,
    stride_qh, stride_kh, stride_vh, stride_oh, stride_doh,
    stride_qt, stride_kt, stride_vt, stride_ot, stride_dot, stride_dqt, stride_slopes,
    total_q, total_k, num_segments, scale, softcap, dropout, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    STRIDE_DOT: tl.constexpr, STRIDE_DQT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M query rows, heads): delta and dq. dlse_ptr is read only with HAS_DLSE."""
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    # The kernel's body loads from cu_q itself: torch's mutation analysis treats a pointer that enters a function as
    # written, and torch.compile would clone cu_q (`tiles/segments.py`).
    segment, falls, index, seen = 0, 0, 0, LOOK
    while (seen == LOOK) & (index <= num_segments):
        at = index + tl.arange(0, LOOK)
        cu_q = tl.load(cu_q_ptr + at, mask=at <= num_segments, other=NO_BOUNDARY)
        cu_k = tl.load(cu_k_ptr + at, mask=at <= num_segments, other=NO_BOUNDARY)
        q_behind = tl.load(cu_q_ptr + at + 1, mask=at < num_segments, other=NO_BOUNDARY)
        k_behind = tl.load(cu_k_ptr + at + 1, mask=at < num_segments, other=NO_BOUNDARY)
        seen, falling = count_segments(cu_q, q_behind, cu_k, k_behind, at, total_q, tile, BLOCK_M)
        segment += seen
        falls += falling
        index += LOOK
    q_start = tl.load(cu_q_ptr + segment - 1, mask=segment > 0, other=0)
    k_start = tl.load(cu_k_ptr + tl.maximum(segment - 1, 0))
    if falls > 0:
        segment = num_segments + 1
        q_start, index = 0, 0
        k_start = tl.load(cu_k_ptr)
        while index < segment:
            at = index + tl.arange(0, LOOK)
            cu_q = tl.load(cu_q_ptr + at, mask=at <= num_segments, other=0)
            cu_k = tl.load(cu_k_ptr + at, mask=at <= num_segments, other=0)
            segment = narrow_segment(cu_q, at, segment, total_q, tile, BLOCK_M)
            q_start = advance_start(cu_q, at, segment, q_start, total_q)
            k_start = advance_start(cu_k, at, segment, k_start, total_k)
            index += LOOK
    q_start, q_length, first, k_start, k_length = locate_tile(
        q_start, tl.load(cu_q_ptr + segment, mask=segment <= num_segments, other=total_q),
        k_start, tl.load(cu_k_ptr + tl.minimum(segment, num_segments)), segment, total_q, total_k, tile, BLOCK_M,
    )  # fmt: skip
    if first >= q_length:
        return
    sequence = tl.maximum(tl.minimum(segment, num_segments) - 1, 0)
    score_mod = sequence_score_mod(seed_ptr, sequence, tl.num_programs(1), softcap, dropout, SCORE_MODS)
    score_mod = head_score_mod(score_mod, slopes_ptr, None, sequence, head, stride_slopes, SCORE_MODS)
    differentiate_queries(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, delta_ptr, dq_ptr,
        head, q_start, q_length, first, k_start, k_length, 0,
        stride_qh, stride_kh, stride_vh, stride_oh, stride_doh, HEAD_DIM // STRIDE_UNIT,
        total_q, scale, score_mod, window_left, window_right,
        row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT),
        row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_ot, STRIDE_OT, STRIDE_UNIT),
        row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT), row_step(stride_dqt, STRIDE_DQT, STRIDE_UNIT),
        STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, GROUP,
        HAS_DLSE, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=DENSE_SIZES)
def _attention_bwd_dq_dense_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, slopes_ptr, seed_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_ob, stride_oh, stride_dob, stride_doh,
    stride_dqb, stride_dqh, stride_qt, stride_kt, stride_vt, stride_ot, stride_dot, stride_dqt, stride_slopes,
    q_length, k_length, splits, scale, softcap, dropout, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    STRIDE_DOT: tl.constexpr, STRIDE_DQT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M query rows of all sequences, heads, splits): delta and dq for sequences of equal length.

    With OVERLAPS the kernel starts while the previous one ends.
    """
    await_before(OVERLAPS)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    sequence, first = locate_dense(tl.program_id(0), q_length, HAS_RIGHT, BLOCK_M)
    score_mod = sequence_score_mod(seed_ptr, sequence, heads, softcap, dropout, SCORE_MODS)
    score_mod = head_score_mod(score_mod, slopes_ptr, None, sequence, head, stride_slopes, SCORE_MODS)
    statistics = sequence.to(tl.int64) * heads * q_length
    differentiate_queries(
        batch_base(q_ptr, sequence, stride_qb, STRIDE_UNIT), batch_base(k_ptr, sequence, stride_kb, STRIDE_UNIT),
        batch_base(v_ptr, sequence, stride_vb, STRIDE_UNIT), batch_base(out_ptr, sequence, stride_ob, STRIDE_UNIT),
        lse_ptr + statistics,
        batch_base(dout_ptr, sequence, stride_dob, STRIDE_UNIT), dlse_ptr + statistics, delta_ptr + statistics,
        batch_base(dq_ptr, sequence, stride_dqb, STRIDE_UNIT), head, 0, q_length, first, 0, k_length, tl.program_id(2),
        stride_qh, stride_kh, stride_vh, stride_oh, stride_doh, stride_dqh,
        q_length, scale, score_mod, window_left, window_right,
        row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT),
        row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_ot, STRIDE_OT, STRIDE_UNIT),
        row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT), row_step(stride_dqt, STRIDE_DQT, STRIDE_UNIT),
        STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, GROUP,
        HAS_DLSE, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_M, BLOCK_N,
        count_splits(splits, IS_SPLIT),
    )  # fmt: skip
