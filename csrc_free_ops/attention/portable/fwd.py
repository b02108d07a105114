"""Attention forward in portable Triton.

For each query row i of a segment, over the keys j that it sees:

    s_ij = scale q_i . k_j                 (softcap, ALiBi: `tiles/scores.py`; dropout of the second product's weights)
    lse_i = log sum_j exp(s_ij)            natural logarithm, fp32
    out_i = sum_j exp(s_ij - lse_i) v_j

One pass over blocks of keys keeps the running maximum and sum of FlashAttention-2 (arXiv 2307.08691, algorithm 1).
Accumulators are fp32; weights are rounded to the dtype of v for the second product. A row that sees no key has out 0
and lse -inf, or the logit of its sink. A program owns BLOCK_M query rows of a head; heads of a group share their keys.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.dropout import drop_weights
from csrc_free_ops.tiles.masks import block_span, within_bounds
from csrc_free_ops.tiles.rows import (
    accumulate_rows,
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
from csrc_free_ops.tiles.score_mod import DROPOUT, SINKS, head_score_mod, sequence_score_mod, without_sink
from csrc_free_ops.tiles.scores import exponent_factor, modify_scores
from csrc_free_ops.tiles.segments import (
    LOOK,
    NO_BOUNDARY,
    advance_start,
    count_segments,
    locate_dense,
    locate_tile,
    narrow_segment,
)
from csrc_free_ops.tiles.softmax import normalize, update

# Not specialized: Triton would build the same code again for sizes of another divisibility.
# Strides follow from lengths and batches; STRIDE_UNIT holds their alignment.
STRIDES = (
    "stride_slopes",
    *[f"stride_{name}{axis}" for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv") for axis in "bht"],
)
SIZES = ("total_q", "total_k", "window_left", "window_right", *STRIDES)
# Specialized to 1 but not to other divisors: with a single segment 1024 rows take 4 % less time.
COUNTS = ("num_segments",)
DENSE_SIZES = (
    "q_length", "k_length", "splits", "dq_splits", "dkdv_splits", "window_left", "window_right", "heads", *STRIDES
)  # fmt: skip


@triton.jit
def attend_blocks(
    acc, peak, norm, q, rows, k_base, v_base, starts, low, high, shift, k_length,
    scale, score_mod, window_left, window_right,
    STRIDE_KT, STRIDE_VT, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, first_key=None,
):  # fmt: skip
    """(acc, peak, norm) after the blocks of keys from `low` up to `high`; MASKED for blocks that need the mask.

    Where `first_key` is given, the keys of masked blocks before it are not seen, and their rows are not read.
    """
    NATURAL: tl.constexpr = q[0].dtype == tl.float32
    factor = exponent_factor(scale, SCORE_MODS, NATURAL)
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
        scores, _ = modify_scores(products, rows[:, None], start + cols[None, :], shift, scale, score_mod, SCORE_MODS)
        if MASKED:
            inside = start + cols < k_length
            if first_key is not None:
                inside &= local == cols
            seen = within_bounds(
                inside[None, :], rows[:, None], start + cols[None, :],
                shift, window_left, window_right, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        weights, rescale, peak, norm = update(scores, factor, peak, norm, NATURAL)
        if DROPOUT & SCORE_MODS:
            weights = drop_weights(weights, rows, start, score_mod, BLOCK_N)
        acc = accumulate_rows(scale_rows(acc, rescale[:, None]), weights.to(v[0].dtype), v, PRECISION)  # [BLOCK_M, D]
        k_base += BLOCK_N * STRIDE_KT
        v_base += BLOCK_N * STRIDE_VT
    return acc, peak, norm


@triton.jit
def attend_tile(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, head, q_start, q_length, first, k_start, k_length,
    stride_qh, stride_kh, stride_vh, stride_oh, total_q, scale, score_mod, window_left, window_right,
    STRIDE_QT, STRIDE_KT, STRIDE_VT, STRIDE_OT,
    STRIDE_UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store out and, with HAS_LSE, lse of BLOCK_M query rows of a segment, from row `first` on."""
    scale = tl.cast(scale, tl.float32)
    k_head = head // GROUP
    q_base = row_base(q_ptr, q_start + first, head, stride_qh, STRIDE_QT, STRIDE_UNIT)
    k_base = row_base(k_ptr, k_start, k_head, stride_kh, STRIDE_KT, STRIDE_UNIT)
    v_base = row_base(v_ptr, k_start, k_head, stride_vh, STRIDE_VT, STRIDE_UNIT)

    starts = column_starts(k_head, HEAD_DIM, MAIN)
    local = tl.arange(0, BLOCK_M)
    rows = first + local
    q = load_rows(q_base, starts, local, q_length - first, STRIDE_QT, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    acc = zero_rows(BLOCK_M, HEAD_DIM, MAIN, TAIL)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)

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
    if HAS_LEFT:
        acc, peak, norm = attend_blocks(
            acc, peak, norm, q, rows, k_base, v_base, starts, low, full_low, k_length - q_length, k_length,
            scale, score_mod, window_left, window_right,
            STRIDE_KT, STRIDE_VT, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, True,
        )  # fmt: skip
    acc, peak, norm = attend_blocks(
        acc, peak, norm, q, rows, k_base, v_base, starts, full_low, full_high, k_length - q_length, k_length,
        scale, score_mod, window_left, window_right,
        STRIDE_KT, STRIDE_VT, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, False,
    )  # fmt: skip
    acc, peak, norm = attend_blocks(
        acc, peak, norm, q, rows, k_base, v_base, starts, full_high, high, k_length - q_length, k_length,
        scale, score_mod, window_left, window_right,
        STRIDE_KT, STRIDE_VT, HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_N, True,
    )  # fmt: skip

    out, lse = normalize(acc, peak, norm, score_mod, q[0].dtype == tl.float32, SCORE_MODS)
    out_base = row_base(out_ptr, q_start + first, head, stride_oh, STRIDE_OT, STRIDE_UNIT)
    store_rows(out_base, starts, local, q_length - first, out, STRIDE_OT, HEAD_DIM, MAIN, TAIL)
    if HAS_LSE:
        tl.store(lse_ptr + head * total_q + q_start + rows, lse, mask=rows < q_length)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, sinks_ptr, seed_ptr,
    stride_qh, stride_kh, stride_vh, stride_qt, stride_kt, stride_vt, stride_ot, stride_slopes,
    total_q, total_k, num_segments, scale, softcap, dropout, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M query rows, heads). The module's docstring has the maths."""
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
    score_mod = head_score_mod(score_mod, slopes_ptr, sinks_ptr, sequence, head, stride_slopes, SCORE_MODS)
    if SINKS & SCORE_MODS:
        score_mod = without_sink(score_mod, (segment == 0) | (segment > num_segments))
    attend_tile(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, head, q_start, q_length, first, k_start, k_length,
        stride_qh, stride_kh, stride_vh, HEAD_DIM // STRIDE_UNIT, total_q, scale, score_mod, window_left, window_right,
        row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT),
        row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_ot, STRIDE_OT, STRIDE_UNIT),
        STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, GROUP,
        HAS_LEFT, HAS_RIGHT, SCORE_MODS, HAS_LSE, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=DENSE_SIZES)
def _attention_fwd_dense_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, slopes_ptr, sinks_ptr, seed_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_ob, stride_oh,
    stride_qt, stride_kt, stride_vt, stride_ot, stride_slopes,
    q_length, k_length, scale, softcap, dropout, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M query rows of all sequences, heads), for a batch of sequences of equal length."""
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    sequence, first = locate_dense(tl.program_id(0), q_length, HAS_RIGHT, BLOCK_M)
    score_mod = sequence_score_mod(seed_ptr, sequence, heads, softcap, dropout, SCORE_MODS)
    score_mod = head_score_mod(score_mod, slopes_ptr, sinks_ptr, sequence, head, stride_slopes, SCORE_MODS)
    attend_tile(
        batch_base(q_ptr, sequence, stride_qb, STRIDE_UNIT), batch_base(k_ptr, sequence, stride_kb, STRIDE_UNIT),
        batch_base(v_ptr, sequence, stride_vb, STRIDE_UNIT), batch_base(out_ptr, sequence, stride_ob, STRIDE_UNIT),
        lse_ptr + sequence.to(tl.int64) * heads * q_length, head, 0, q_length, first, 0, k_length,
        stride_qh, stride_kh, stride_vh, stride_oh, q_length, scale, score_mod, window_left, window_right,
        row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT),
        row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_ot, STRIDE_OT, STRIDE_UNIT),
        STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, GROUP,
        HAS_LEFT, HAS_RIGHT, SCORE_MODS, HAS_LSE, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
