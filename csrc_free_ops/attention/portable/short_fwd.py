"""Attention forward for segments of at most one block, in stock Triton: the windows of a vision encoder.

The maths of `portable_fwd`. A window is bound by memory, and a program that first searches its segment, then loads q,
then loops over keys waits for memory several times to do one block's work. Here a program knows its segment by its own
number and loads all of it at once, and holds so little that many are under way on each multiprocessor. Programs of
neighbouring heads are neighbours: the rows of one head, 160 bytes at D = 80, do not end where a line of memory does.

Lengths are known on the device alone, and a segment may be longer than a block after all. A second kernel of few
programs looks for such ones and shares their tiles out, and writes the rows outside of all segments. It is a kernel of
its own because registers are dealt out by kernel: the loop over keys takes twice as many, for half the programs at
once. Neither needs what the other writes: with OVERLAPS the second, launched to begin early (`launch_pdl`), looks
around while the first ends, and ends after it.
"""

import triton
import triton.language as tl

from csrc_free_ops.attention.portable.fwd import COUNTS, attend_tile
from csrc_free_ops.tiles.masks import within_bounds
from csrc_free_ops.tiles.rows import (
    accumulate_rows,
    column_starts,
    dot_rows,
    load_rows,
    row_base,
    store_rows,
    zero_rows,
)
from csrc_free_ops.tiles.scores import exponent_factor, step_scores
from csrc_free_ops.tiles.segments import (
    clamp_span,
    longest_segment,
    narrow_segments,
    place_outside,
    place_rows,
    probe_segments,
)
from csrc_free_ops.tiles.softmax import normalize, update
from csrc_free_ops.tiles.steps import capped_step

SHORT_SIZES = ("total", "window_left", "window_right")


@triton.jit
def _attend_block(
    q, k, v, length, scale, step, window_left, window_right,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out and lse of a segment of 1 .. BLOCK rows, all of it."""
    NATURAL: tl.constexpr = q[0].dtype == tl.float32
    local = tl.arange(0, BLOCK)
    scores, _ = step_scores(dot_rows(q, k, PRECISION), local[:, None], local[None, :], 0, scale, step, STEPS)
    seen = within_bounds(
        (local < length)[None, :], local[:, None], local[None, :], 0, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )  # fmt: skip
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK,), tl.float32)
    factor = exponent_factor(scale, STEPS, NATURAL)
    weights, _, peak, norm = update(scores, factor, peak, norm, NATURAL)
    acc = accumulate_rows(zero_rows(BLOCK, HEAD_DIM, MAIN, TAIL), weights.to(v[0].dtype), v, PRECISION)
    return normalize(acc, peak, norm, step, NATURAL, STEPS)


@triton.jit(do_not_specialize=SHORT_SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_fwd_short_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_ptr,
    stride_qh, stride_kh, stride_vh,
    total, num_segments, scale, softcap, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STEPS: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, NUM_HEADS: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (segments * heads): the segments of 1 .. BLOCK rows."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.cast(scale, tl.float32)
    local = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    segment = program // NUM_HEADS
    start, length = clamp_span(tl.load(cu_ptr + segment), tl.load(cu_ptr + segment + 1), total)
    if (length > 0) & (length <= BLOCK):
        head = program % NUM_HEADS
        starts = column_starts(head, HEAD_DIM, MAIN)
        q_base = row_base(q_ptr, start, head, stride_qh, STRIDE_QT, UNIT)
        k_base = row_base(k_ptr, start, head, stride_kh, STRIDE_KT, UNIT)
        v_base = row_base(v_ptr, start, head, stride_vh, STRIDE_VT, UNIT)
        q = load_rows(q_base, starts, local, length, STRIDE_QT, HEAD_DIM, MAIN, TAIL, True)
        k = load_rows(k_base, starts, local, length, STRIDE_KT, HEAD_DIM, MAIN, TAIL, True)
        v = load_rows(v_base, starts, local, length, STRIDE_VT, HEAD_DIM, MAIN, TAIL, True)
        out, lse = _attend_block(
            q, k, v, length, scale, capped_step(softcap), window_left, window_right,
            HEAD_DIM, MAIN, TAIL, HAS_LEFT, HAS_RIGHT, STEPS, PRECISION, BLOCK,
        )  # fmt: skip
        out_base = row_base(out_ptr, start, head, 1, STRIDE_OT, HEAD_DIM)
        store_rows(out_base, starts, local, length, out, STRIDE_OT, HEAD_DIM, MAIN, TAIL)
        if HAS_LSE:
            tl.store(lse_ptr + tl.cast(head, tl.int64) * total + start + local, lse, mask=local < length)


@triton.jit(do_not_specialize=SHORT_SIZES, do_not_specialize_on_alignment=COUNTS)
def _attention_fwd_rest_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_ptr,
    stride_qh, stride_kh, stride_vh,
    total, num_segments, scale, softcap, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_OT: tl.constexpr,
    UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STEPS: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, NUM_HEADS: tl.constexpr, OVERLAPS: tl.constexpr,
    SHORT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid of any size: segments of more than SHORT rows, and the rows outside of all segments."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    begin = tl.load(cu_ptr)
    end = tl.load(cu_ptr + num_segments)
    tiles = tl.where(longest_segment(cu_ptr, num_segments, total) > SHORT, total // BLOCK_M + num_segments + 2, 0)
    outside, _, _, _ = place_outside(0, begin, end, total, BLOCK_M)
    for item in range(program, (outside + tiles) * NUM_HEADS, programs):
        head = tl.cast(item % NUM_HEADS, tl.int64)
        tile = item // NUM_HEADS - outside
        _, start, length, first = place_outside(tile + outside, begin, end, total, BLOCK_M)
        attended = 0
        if tile >= 0:
            segment = 0
            beyond = num_segments + 2
            while beyond - segment > 1:
                probe, apart = probe_segments(segment, beyond)
                cu = tl.load(cu_ptr + probe - 1, mask=(probe > 0) & (probe < beyond), other=0)
                segment, beyond = narrow_segments(cu, probe, apart, segment, beyond, total, tile, BLOCK_M)
            inside = (segment > 0) & (segment <= num_segments)
            start, attended, first = place_rows(
                tl.load(cu_ptr + segment - 1, mask=inside, other=0), tl.load(cu_ptr + segment, mask=inside, other=0),
                segment, total, tile, BLOCK_M,
            )  # fmt: skip
            length = tl.where(attended > SHORT, attended, 0)
        if first < length:
            attend_tile(
                q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, head, start, length, first, start, attended,
                stride_qh, stride_kh, stride_vh, HEAD_DIM // UNIT, total, scale, capped_step(softcap),
                window_left, window_right,
                STRIDE_QT, STRIDE_KT, STRIDE_VT, STRIDE_OT, UNIT, HEAD_DIM, MAIN, TAIL, 1,
                HAS_LEFT, HAS_RIGHT, STEPS, HAS_LSE, PRECISION, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    if OVERLAPS:
        # What comes next waits for this kernel alone.
        tl.extra.cuda.gdc_wait()
