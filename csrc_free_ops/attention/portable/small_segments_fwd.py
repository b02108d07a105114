"""Attention forward for segments of at most one block, in portable Triton: the windows of a vision encoder.

The maths is that of `fwd.py`. A window is memory-bound, and `fwd.py` waits for memory several times for one block: it
searches its segment, then loads q, then loops over keys. Here the program's number is its segment, and the program
loads the whole segment at once. It needs so few registers that many programs share a multiprocessor. Neighbouring
programs have neighbouring heads, because the rows of one head do not end at a cache line (160 bytes at D = 80).

Lengths are known only on the device, so a segment may still be longer than a block. A second kernel with few programs
finds longer segments, shares their tiles out, and writes the rows outside of all segments. If a boundary falls, it
writes all rows, once the first kernel is done. It is a kernel of its own,
because its loop over keys needs twice the registers, which would halve the programs that run at once. Neither kernel
reads results of the other. With OVERLAPS the second one starts early (`launch_pdl`) and searches while the first ends.
"""

import triton
import triton.language as tl

from csrc_free_ops.attention.portable.fwd import COUNTS, STRIDES, attend_tile
from csrc_free_ops.tiles.masks import within_bounds
from csrc_free_ops.tiles.rows import (
    accumulate_rows,
    column_starts,
    dot_rows,
    load_rows,
    row_base,
    row_step,
    store_rows,
    zero_rows,
)
from csrc_free_ops.tiles.score_mod import softcap_score_mod
from csrc_free_ops.tiles.scores import exponent_factor, modify_scores
from csrc_free_ops.tiles.segments import (
    LOOK,
    advance_start,
    clamp_span,
    last_with_rows,
    locate_outside,
    locate_rows,
    longest_segment,
    narrow_segment,
    survey,
)
from csrc_free_ops.tiles.softmax import normalize, update

SMALL_SEGMENTS_SIZES = ("total", "window_left", "window_right", *STRIDES)


@triton.jit
def _attend_block(
    q, k, v, length, scale, score_mod, window_left, window_right,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(out, lse) of a whole segment of 1 .. BLOCK rows."""
    NATURAL: tl.constexpr = q[0].dtype == tl.float32
    local = tl.arange(0, BLOCK)
    products = dot_rows(q, k, PRECISION)  # [BLOCK, BLOCK]
    scores, _ = modify_scores(products, local[:, None], local[None, :], 0, scale, score_mod, SCORE_MODS)
    seen = within_bounds(
        (local < length)[None, :], local[:, None], local[None, :], 0, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )  # fmt: skip
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK,), tl.float32)
    factor = exponent_factor(scale, SCORE_MODS, NATURAL)
    weights, _, peak, norm = update(scores, factor, peak, norm, NATURAL)
    acc = accumulate_rows(zero_rows(BLOCK, HEAD_DIM, MAIN, TAIL), weights.to(v[0].dtype), v, PRECISION)
    return normalize(acc, peak, norm, score_mod, NATURAL, SCORE_MODS)


@triton.jit
def _attend_small_segment(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, head, start, length,
    stride_qh, stride_kh, stride_vh, total, scale, softcap, window_left, window_right,
    STRIDE_QT, STRIDE_KT, STRIDE_VT, STRIDE_OT,
    STRIDE_UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store out and, with HAS_LSE, lse of a segment of 1 .. BLOCK rows."""
    local = tl.arange(0, BLOCK)
    starts = column_starts(head, HEAD_DIM, MAIN)
    q_base = row_base(q_ptr, start, head, stride_qh, STRIDE_QT, STRIDE_UNIT)
    k_base = row_base(k_ptr, start, head, stride_kh, STRIDE_KT, STRIDE_UNIT)
    v_base = row_base(v_ptr, start, head, stride_vh, STRIDE_VT, STRIDE_UNIT)
    q = load_rows(q_base, starts, local, length, STRIDE_QT, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK, D]
    k = load_rows(k_base, starts, local, length, STRIDE_KT, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK, D]
    v = load_rows(v_base, starts, local, length, STRIDE_VT, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK, D]
    out, lse = _attend_block(
        q, k, v, length, tl.cast(scale, tl.float32), softcap_score_mod(softcap), window_left, window_right,
        HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK,
    )  # fmt: skip
    out_base = row_base(out_ptr, start, head, 1, STRIDE_OT, HEAD_DIM)
    store_rows(out_base, starts, local, length, out, STRIDE_OT, HEAD_DIM, MAIN, TAIL)
    if HAS_LSE:
        tl.store(lse_ptr + tl.cast(head, tl.int64) * total + start + local, lse, mask=local < length)


@triton.jit(do_not_specialize=SMALL_SEGMENTS_SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_fwd_small_segments_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_ptr,
    stride_qh, stride_kh, stride_vh, stride_qt, stride_kt, stride_vt, stride_ot,
    total, num_segments, scale, softcap, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, NUM_HEADS: tl.constexpr, OVERLAPS: tl.constexpr, PERSISTENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (segments * heads), or of any size if PERSISTENT: segments of 1 .. BLOCK rows.

    A persistent grid costs less where most segments may have no rows: programs end at the last that has.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    step_q, step_k = row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT)
    step_v, step_o = row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_ot, STRIDE_OT, STRIDE_UNIT)
    if PERSISTENT:
        for item in tl.range(
            program, last_with_rows(cu_ptr, num_segments) * NUM_HEADS, tl.num_programs(0), num_stages=1
        ):
            segment = item // NUM_HEADS
            start, length = clamp_span(tl.load(cu_ptr + segment), tl.load(cu_ptr + segment + 1), total)
            if (length > 0) & (length <= BLOCK):
                _attend_small_segment(
                    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, item % NUM_HEADS, start, length,
                    stride_qh, stride_kh, stride_vh, total, scale, softcap, window_left, window_right,
                    step_q, step_k, step_v, step_o, STRIDE_UNIT, HEAD_DIM, MAIN, TAIL,
                    HAS_LEFT, HAS_RIGHT, SCORE_MODS, HAS_LSE, PRECISION, BLOCK,
                )  # fmt: skip
    else:
        segment = program // NUM_HEADS
        start, length = clamp_span(tl.load(cu_ptr + segment), tl.load(cu_ptr + segment + 1), total)
        if (length > 0) & (length <= BLOCK):
            _attend_small_segment(
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, program % NUM_HEADS, start, length,
                stride_qh, stride_kh, stride_vh, total, scale, softcap, window_left, window_right,
                step_q, step_k, step_v, step_o, STRIDE_UNIT, HEAD_DIM, MAIN, TAIL,
                HAS_LEFT, HAS_RIGHT, SCORE_MODS, HAS_LSE, PRECISION, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=SMALL_SEGMENTS_SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_fwd_long_segments_fallback_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_ptr,
    stride_qh, stride_kh, stride_vh, stride_qt, stride_kt, stride_vt, stride_ot,
    total, num_segments, scale, softcap, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, NUM_HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
    SMALL_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid of any size: segments of more than SMALL_ROWS rows, and the rows outside of all segments."""
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
            attend_tile(
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, head, start, length, first, start, attended,
                stride_qh, stride_kh, stride_vh, HEAD_DIM // STRIDE_UNIT, total, scale, softcap_score_mod(softcap),
                window_left, window_right,
                row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT),
                row_step(stride_vt, STRIDE_VT, STRIDE_UNIT), row_step(stride_ot, STRIDE_OT, STRIDE_UNIT),
                STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, 1,
                HAS_LEFT, HAS_RIGHT, SCORE_MODS, HAS_LSE, PRECISION, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    if OVERLAPS:
        # The next kernel waits only for this one, so this one must not end before the kernel that it overlaps.
        tl.extra.cuda.gdc_wait()
