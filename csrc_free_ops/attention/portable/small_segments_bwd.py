"""Attention backward for segments of at most one block, in portable Triton: all three gradients in one pass.

The maths is that of `bwd.py`, the programs are those of `small_segments_fwd.py`. A whole segment is one block, so its
weights serve dq as well as dk and dv. Every tensor is read once, and no sum crosses programs. Scores are transposed,
[keys, queries], so that the products for dk and dv take them from registers.
"""

import triton
import triton.language as tl

from csrc_free_ops.attention.portable.bwd import differentiate_queries
from csrc_free_ops.attention.portable.bwd_dkdv import differentiate_keys
from csrc_free_ops.attention.portable.fwd import COUNTS
from csrc_free_ops.attention.portable.small_segments_fwd import SMALL_SEGMENTS_SIZES
from csrc_free_ops.tiles.masks import within_bounds
from csrc_free_ops.tiles.rows import (
    accumulate_rows,
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
from csrc_free_ops.tiles.score_mod import SOFTCAP, softcap_score_mod
from csrc_free_ops.tiles.scores import exponent_factor, exponent_of_norm, exponential, modify_scores
from csrc_free_ops.tiles.segments import (
    LOOK,
    advance_start,
    clamp_span,
    locate_outside,
    locate_rows,
    longest_segment,
    narrow_segment,
    survey,
)


@triton.jit
def _differentiate_scores(
    k, v, q, dout, lse, delta, length, scale, score_mod, window_left, window_right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(weights, gradient of the scores) of a segment of 1 .. BLOCK rows, [keys, queries] both."""
    NATURAL: tl.constexpr = q[0].dtype == tl.float32
    local = tl.arange(0, BLOCK)
    products = dot_rows(k, q, PRECISION)  # [BLOCK, BLOCK]
    scores, steepness = modify_scores(products, local[None, :], local[:, None], 0, scale, score_mod, SCORE_MODS)
    factor = exponent_factor(scale, SCORE_MODS, NATURAL)
    p = exponential(scores * factor - exponent_of_norm(lse, NATURAL)[None, :], NATURAL)
    seen = within_bounds(
        (local < length)[None, :] & (local < length)[:, None], local[None, :], local[:, None],
        0, window_left, window_right, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    p = tl.where(seen, p, 0.0)
    ds = p * (dot_rows(v, dout, PRECISION) - delta[None, :])
    if SOFTCAP & SCORE_MODS:
        ds = ds * steepness
    return p.to(q[0].dtype), ds.to(q[0].dtype)


@triton.jit(do_not_specialize=SMALL_SEGMENTS_SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_bwd_small_segments_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, cu_ptr, dq_ptr, dk_ptr, dv_ptr,
    stride_qh, stride_kh, stride_vh, stride_oh, stride_doh,
    stride_qt, stride_kt, stride_vt, stride_ot, stride_dot, stride_dqt,
    total, num_segments, scale, softcap, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    STRIDE_DOT: tl.constexpr, STRIDE_DQT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr,
    PRECISION: tl.constexpr, NUM_HEADS: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (segments * heads): segments of 1 .. BLOCK rows."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.cast(scale, tl.float32)
    local = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    segment = program // NUM_HEADS
    start, length = clamp_span(tl.load(cu_ptr + segment), tl.load(cu_ptr + segment + 1), total)
    if (length > 0) & (length <= BLOCK):
        head = program % NUM_HEADS
        step_q, step_k = row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT)
        step_v, step_o = row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_ot, STRIDE_OT, STRIDE_UNIT)
        step_do, step_dq = row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT), row_step(stride_dqt, STRIDE_DQT, STRIDE_UNIT)
        starts = column_starts(head, HEAD_DIM, MAIN)
        q_base = row_base(q_ptr, start, head, stride_qh, step_q, STRIDE_UNIT)
        k_base = row_base(k_ptr, start, head, stride_kh, step_k, STRIDE_UNIT)
        v_base = row_base(v_ptr, start, head, stride_vh, step_v, STRIDE_UNIT)
        out_base = row_base(out_ptr, start, head, stride_oh, step_o, STRIDE_UNIT)
        dout_base = row_base(dout_ptr, start, head, stride_doh, step_do, STRIDE_UNIT)
        q = load_rows(q_base, starts, local, length, step_q, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK, D]
        k = load_rows(k_base, starts, local, length, step_k, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK, D]
        v = load_rows(v_base, starts, local, length, step_v, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK, D]
        out = load_rows(out_base, starts, local, length, step_o, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK, D]
        dout = load_rows(dout_base, starts, local, length, step_do, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK, D]
        row_of_head = tl.cast(head, tl.int64) * total + start
        lse = tl.load(lse_ptr + row_of_head + local, mask=local < length, other=float("-inf"))
        delta = delta_of_rows(out, dout, lse, dlse_ptr + row_of_head + local, local < length, HAS_DLSE)
        p, ds = _differentiate_scores(
            k, v, q, dout, lse, delta, length, scale, softcap_score_mod(softcap), window_left, window_right,
            HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK,
        )  # fmt: skip
        dv = accumulate_rows(zero_rows(BLOCK, HEAD_DIM, MAIN, TAIL), p, dout, PRECISION)  # [BLOCK, D]
        dv_base = row_base(dv_ptr, start, head, 1, step_dq, HEAD_DIM)
        store_rows(dv_base, starts, local, length, dv, step_dq, HEAD_DIM, MAIN, TAIL)
        dk = accumulate_rows(zero_rows(BLOCK, HEAD_DIM, MAIN, TAIL), ds, q, PRECISION)  # [BLOCK, D]
        dk_base = row_base(dk_ptr, start, head, 1, step_dq, HEAD_DIM)
        store_rows(dk_base, starts, local, length, scale_rows(dk, scale), step_dq, HEAD_DIM, MAIN, TAIL)
        dq = accumulate_rows(zero_rows(BLOCK, HEAD_DIM, MAIN, TAIL), tl.trans(ds), k, PRECISION)  # [BLOCK, D]
        dq_base = row_base(dq_ptr, start, head, 1, step_dq, HEAD_DIM)
        store_rows(dq_base, starts, local, length, scale_rows(dq, scale), step_dq, HEAD_DIM, MAIN, TAIL)


@triton.jit(do_not_specialize=SMALL_SEGMENTS_SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_bwd_dq_long_segments_fallback_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, cu_ptr, delta_ptr, dq_ptr,
    stride_qh, stride_kh, stride_vh, stride_oh, stride_doh,
    stride_qt, stride_kt, stride_vt, stride_ot, stride_dot, stride_dqt,
    total, num_segments, scale, softcap, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    STRIDE_DOT: tl.constexpr, STRIDE_DQT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr,
    PRECISION: tl.constexpr, NUM_HEADS: tl.constexpr, OVERLAPS: tl.constexpr, SMALL_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid of any size: delta and dq of segments of more than SMALL_ROWS rows and of rows outside of all segments."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    begin = tl.load(cu_ptr)
    end = tl.load(cu_ptr + num_segments)
    longest = longest_segment(cu_ptr, num_segments, total)
    last = num_segments
    is_falling = False
    if longest > SMALL_ROWS:
        longest, last, is_falling = survey(cu_ptr, num_segments, total)
        for index in range(0, num_segments + 1, LOOK):
            at = index + tl.arange(0, LOOK)
            cu = tl.load(cu_ptr + at, mask=at <= num_segments, other=0)
            end = advance_start(cu, at, num_segments + 1, end, total)
    tiles = tl.where((longest > SMALL_ROWS) | is_falling, total // BLOCK_M + last + 2, 0)
    outside, _, _, _ = locate_outside(0, begin, end, total, BLOCK_M)
    if OVERLAPS and is_falling:
        # The previous kernel took boundaries as they are; what it wrote is written again.
        tl.extra.cuda.gdc_wait()
    for item in range(program, (outside + tiles) * NUM_HEADS, programs):
        head = tl.cast(item % NUM_HEADS, tl.int64)
        tile = item // NUM_HEADS - outside
        _, start, length, first = locate_outside(tile + outside, begin, end, total, BLOCK_M)
        attended = 0
        if tile >= 0:
            # The kernel's body loads from cu itself: torch's mutation analysis treats a pointer that enters a function
            # as written, and torch.compile would clone cu (`tiles/segments.py`).
            segment = num_segments + 1
            start, index = 0, 0
            while index < segment:
                at = index + tl.arange(0, LOOK)
                cu = tl.load(cu_ptr + at, mask=at <= num_segments, other=0)
                segment = narrow_segment(cu, at, segment, total, tile, BLOCK_M)
                start = advance_start(cu, at, segment, start, total)
                index += LOOK
            inside = (segment > 0) & (segment <= num_segments)
            start, attended, first = locate_rows(
                start, tl.load(cu_ptr + segment, mask=inside, other=0), segment, total, tile, BLOCK_M
            )
            length = tl.where((attended > SMALL_ROWS) | is_falling, attended, 0)
        if first < length:
            differentiate_queries(
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr, delta_ptr, dq_ptr,
                head, start, length, first, start, attended, 0,
                stride_qh, stride_kh, stride_vh, stride_oh, stride_doh, HEAD_DIM // STRIDE_UNIT,
                total, scale, softcap_score_mod(softcap), window_left, window_right,
                row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT),
                row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_ot, STRIDE_OT, STRIDE_UNIT),
                row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT), row_step(stride_dqt, STRIDE_DQT, STRIDE_UNIT),
                STRIDE_UNIT, HEAD_DIM, MAIN, TAIL,
                1, HAS_DLSE, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=SMALL_SEGMENTS_SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_bwd_dkdv_long_segments_fallback_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, cu_ptr, dk_ptr, dv_ptr,
    stride_qh, stride_kh, stride_vh, stride_doh, stride_qt, stride_kt, stride_vt, stride_dot, stride_dkt,
    total, num_segments, scale, softcap, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_DOT: tl.constexpr,
    STRIDE_DKT: tl.constexpr, STRIDE_UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr,
    PRECISION: tl.constexpr, NUM_HEADS: tl.constexpr, OVERLAPS: tl.constexpr, SMALL_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid of any size: dk and dv of the segments and rows of the fallback kernel of dq, which runs first."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    begin = tl.load(cu_ptr)
    end = tl.load(cu_ptr + num_segments)
    longest = longest_segment(cu_ptr, num_segments, total)
    last = num_segments
    is_falling = False
    if longest > SMALL_ROWS:
        longest, last, is_falling = survey(cu_ptr, num_segments, total)
        for index in range(0, num_segments + 1, LOOK):
            at = index + tl.arange(0, LOOK)
            cu = tl.load(cu_ptr + at, mask=at <= num_segments, other=0)
            end = advance_start(cu, at, num_segments + 1, end, total)
    tiles = tl.where((longest > SMALL_ROWS) | is_falling, total // BLOCK_N + last + 2, 0)
    outside, _, _, _ = locate_outside(0, begin, end, total, BLOCK_N)
    if OVERLAPS:
        # The previous kernel stores delta.
        tl.extra.cuda.gdc_wait()
    for item in range(program, (outside + tiles) * NUM_HEADS, programs):
        head = tl.cast(item % NUM_HEADS, tl.int64)
        tile = item // NUM_HEADS - outside
        _, start, length, first = locate_outside(tile + outside, begin, end, total, BLOCK_N)
        attended = 0
        if tile >= 0:
            # The kernel's body loads from cu itself: torch's mutation analysis treats a pointer that enters a function
            # as written, and torch.compile would clone cu (`tiles/segments.py`).
            segment = num_segments + 1
            start, index = 0, 0
            while index < segment:
                at = index + tl.arange(0, LOOK)
                cu = tl.load(cu_ptr + at, mask=at <= num_segments, other=0)
                segment = narrow_segment(cu, at, segment, total, tile, BLOCK_N)
                start = advance_start(cu, at, segment, start, total)
                index += LOOK
            inside = (segment > 0) & (segment <= num_segments)
            start, attended, first = locate_rows(
                start, tl.load(cu_ptr + segment, mask=inside, other=0), segment, total, tile, BLOCK_N
            )
            length = tl.where((attended > SMALL_ROWS) | is_falling, attended, 0)
        if first < length:
            differentiate_keys(
                q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, dk_ptr, dv_ptr,
                head, start, length, first, start, attended, 0, None, 0, 0, softcap_score_mod(softcap),
                stride_qh, stride_kh, stride_vh, stride_doh, HEAD_DIM // STRIDE_UNIT, HEAD_DIM // STRIDE_UNIT,
                total, scale, window_left, window_right,
                row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT),
                row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT),
                row_step(stride_dkt, STRIDE_DKT, STRIDE_UNIT), row_step(stride_dkt, STRIDE_DKT, STRIDE_UNIT),
                STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, 1, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_M, BLOCK_N,
            )  # fmt: skip
