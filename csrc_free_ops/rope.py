"""The rotary embedding of q and k as a pass of its own, and its gradient (maths: tiles/rope.py).

The rotation is computed in fp32 and rounded once to the dtype of q and k, like Transformers'
`apply_rotary_pos_emb_vision` before q k^T. The gradient of a rotation is the rotation back: sin changes its sign. It is
fp32 and rounded once too, exactly as eager PyTorch computes it.

A head is D / 2 pairs of columns. Pairs are counted over rows, D / 2 to a row, so that no lane is idle for any D. A
program rotates BLOCK_N neighbouring pairs of BLOCK_M heads of q or of k, and loads their angles once. A thread has as
many neighbouring columns as divide D / 2: eight (16 bytes of a half type) at D = 64, 80 and 128, four at D = 72.

Rows outside all segments become zeros, whatever q, k and the tables hold there.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.overlap import await_before
from csrc_free_ops.tiles.rope import rotate, rotate_back
from csrc_free_ops.tiles.rows import WIDE_STRIDE, row_step
from csrc_free_ops.tiles.segments import end_of_segments

SIZES = ("num_rows", "num_segments", "stride_qh", "stride_kh", "stride_qt", "stride_kt", "stride_ct", "stride_st")


@triton.jit
def _row_offsets(rows, STRIDE):
    if not isinstance(STRIDE, tl.tensor):
        if STRIDE > WIDE_STRIDE:
            rows = rows.to(tl.int64)
    return rows * STRIDE


@triton.jit
def _load_angles(base, rows, pairs, valid, STRIDE, HALF: tl.constexpr, SHARED: tl.constexpr):
    """Angles in fp32 for the first and the second element of pairs, [1, BLOCK_N] each; with SHARED one serves both."""
    pointers = (base + _row_offsets(rows, STRIDE) + pairs)[None, :]
    of_first = tl.load(pointers, mask=valid[None, :], other=0.0).to(tl.float32)
    if SHARED:
        of_second = of_first
    else:
        of_second = tl.load(pointers + HALF, mask=valid[None, :], other=0.0).to(tl.float32)
    return of_first, of_second


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, cos, sin, tile, first, rows, pairs, valid, inside, stride_head,
    STRIDE_X, STRIDE_OUT: tl.constexpr, STRIDE_UNIT: tl.constexpr, HALF: tl.constexpr,
    NUM_HEADS: tl.constexpr, BACK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rotate one tile of heads [BLOCK_M, BLOCK_N]. Every element is read before it is written, so out may be x."""
    heads = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (heads < NUM_HEADS)[:, None] & valid[None, :]
    from_heads = heads.to(tl.int64) * tl.cast(stride_head, tl.int64) * STRIDE_UNIT
    source = x_ptr + first * STRIDE_X + from_heads[:, None] + (_row_offsets(rows, STRIDE_X) + pairs)[None, :]
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        a, b = rotate_back(a, b, cos, sin)
    else:
        a, b = rotate(a, b, cos, sin)
    # A select, because 0 times an angle outside of all segments may be NaN.
    a = tl.where(inside[None, :], a, 0.0).to(out_ptr.dtype.element_ty)
    b = tl.where(inside[None, :], b, 0.0).to(out_ptr.dtype.element_ty)
    to = (
        out_ptr + first * STRIDE_OUT + (heads * (2 * HALF))[:, None] + (_row_offsets(rows, STRIDE_OUT) + pairs)[None, :]
    )
    tl.store(to, a, mask=mask)
    tl.store(to + HALF, b, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, cu_q_ptr, cu_k_ptr, q_out_ptr, k_out_ptr,
    stride_qh, stride_kh, stride_qt, stride_kt, stride_ct, stride_st, num_rows, num_segments,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_CT: tl.constexpr, STRIDE_ST: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr,
    HALF: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr,
    SHARED_ANGLES: tl.constexpr, BACK: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of pairs, tiles of q's heads and then of k's); results are contiguous."""
    await_before(OVERLAPS)
    begin = tl.program_id(0).to(tl.int64) * BLOCK_N
    first = begin // HALF
    local = (begin % HALF).to(tl.int32) + tl.arange(0, BLOCK_N)
    # Tiles begin and rows end at multiples of RUN columns, which the compiler cannot derive.
    RUN: tl.constexpr = tl.constexpr(HALF & -HALF)
    rows = tl.max_constancy(local // HALF, RUN)
    pairs = tl.max_contiguous(tl.multiple_of(local % HALF, RUN), RUN)
    valid = rows < tl.minimum(num_rows - first, BLOCK_N).to(tl.int32)
    step_c, step_s = row_step(stride_ct, STRIDE_CT, TABLE_UNIT), row_step(stride_st, STRIDE_ST, TABLE_UNIT)
    cos = _load_angles(cos_ptr + first * step_c, rows, pairs, valid, step_c, HALF, SHARED_ANGLES)
    sin = _load_angles(sin_ptr + first * step_s, rows, pairs, valid, step_s, HALF, SHARED_ANGLES)
    tile = tl.program_id(1)
    q_tiles = (NUM_HEADS + BLOCK_M - 1) // BLOCK_M
    if tile < q_tiles:
        end = end_of_segments(cu_q_ptr, num_segments, (begin + BLOCK_N - 1) // HALF)
        inside = (first + rows >= tl.load(cu_q_ptr)) & (first + rows < end)
        _rotate_heads(
            q_ptr, q_out_ptr, cos, sin, tile, first, rows, pairs, valid, inside, stride_qh,
            row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), 2 * HALF * NUM_HEADS,
            STRIDE_UNIT, HALF, NUM_HEADS, BACK, BLOCK_M,
        )  # fmt: skip
    else:
        end = end_of_segments(cu_k_ptr, num_segments, (begin + BLOCK_N - 1) // HALF)
        inside = (first + rows >= tl.load(cu_k_ptr)) & (first + rows < end)
        _rotate_heads(
            k_ptr, k_out_ptr, cos, sin, tile - q_tiles, first, rows, pairs, valid, inside, stride_kh,
            row_step(stride_kt, STRIDE_KT, STRIDE_UNIT), 2 * HALF * NUM_K_HEADS,
            STRIDE_UNIT, HALF, NUM_K_HEADS, BACK, BLOCK_M,
        )  # fmt: skip
