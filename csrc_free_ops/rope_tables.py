"""The gradients of a rotary embedding's tables, for users who learn frequencies (maths: tiles/rope.py).

With (da', db') the gradients of a pair after its rotation, and sums over all heads of q and of k:

    dcos_i       = sum a da'        dcos_(i + D/2) = sum b db'
    dsin_i       = - sum b da'      dsin_(i + D/2) = sum a db'

Tables of D/2 columns get the sum of both halves. Sums are fp32, over heads in a fixed order, and are rounded once.

A program owns BLOCK_N pairs, counted over rows as in rope.py, and passes over all heads, BLOCK_M at a time. Rows
outside all segments add nothing, whatever they hold.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.rows import of_unit
from csrc_free_ops.tiles.segments import end_of_segments

SIZES = ("num_rows", "num_segments", *[f"stride_{name}{axis}" for name in ("dq", "dk", "q", "k") for axis in "ht"])


@triton.jit
def _add_heads(
    dcos, dsin, dx_ptr, x_ptr, rows, pairs, inside, stride_dxt, stride_dxh, stride_xt, stride_xh,
    STRIDE_UNIT: tl.constexpr, HALF: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(dcos, dsin), the sums for first and second elements, after all heads of q or of k."""
    cos_a, cos_b = dcos
    sin_a, sin_b = dsin
    dx_ptr += (rows * of_unit(tl.cast(stride_dxt, tl.int64), STRIDE_UNIT) * STRIDE_UNIT + pairs)[None, :]
    x_ptr += (rows * of_unit(tl.cast(stride_xt, tl.int64), STRIDE_UNIT) * STRIDE_UNIT + pairs)[None, :]
    for begin in tl.range(0, NUM_HEADS, BLOCK_M):
        heads = begin + tl.arange(0, BLOCK_M)
        mask = (heads < NUM_HEADS)[:, None] & inside[None, :]
        heads = heads.to(tl.int64)[:, None] * STRIDE_UNIT
        dx = dx_ptr + heads * of_unit(tl.cast(stride_dxh, tl.int64), STRIDE_UNIT)
        x = x_ptr + heads * of_unit(tl.cast(stride_xh, tl.int64), STRIDE_UNIT)
        da = tl.load(dx, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        db = tl.load(dx + HALF, mask=mask, other=0.0).to(tl.float32)
        a = tl.load(x, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
        cos_a += tl.sum(a * da, 0)
        cos_b += tl.sum(b * db, 0)
        sin_a -= tl.sum(b * da, 0)
        sin_b += tl.sum(a * db, 0)
    return (cos_a, cos_b), (sin_a, sin_b)


@triton.jit
def _store_halves(ptr, halves, rows, pairs, valid, HALF: tl.constexpr, SHARED: tl.constexpr):
    dtype = ptr.dtype.element_ty
    if SHARED:
        tl.store(ptr + rows * HALF + pairs, (halves[0] + halves[1]).to(dtype), mask=valid)
    else:
        tl.store(ptr + rows * (2 * HALF) + pairs, halves[0].to(dtype), mask=valid)
        tl.store(ptr + rows * (2 * HALF) + pairs + HALF, halves[1].to(dtype), mask=valid)


@triton.jit(do_not_specialize=SIZES)
def _rope_tables_bwd_kernel(
    dq_ptr, dk_ptr, q_ptr, k_ptr, cu_q_ptr, cu_k_ptr, dcos_ptr, dsin_ptr,
    stride_dqt, stride_dqh, stride_dkt, stride_dkh, stride_qt, stride_qh, stride_kt, stride_kh, num_rows, num_segments,
    STRIDE_UNIT: tl.constexpr, HALF: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr,
    SHARED_ANGLES: tl.constexpr, HAS_SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of pairs); gradients are contiguous, [T, D] or with SHARED_ANGLES [T, D / 2]."""
    index = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = index // HALF
    pairs = index % HALF
    valid = rows < num_rows
    inside_q = valid
    inside_k = valid
    if HAS_SEGMENTS:
        last_row = (tl.program_id(0).to(tl.int64) * BLOCK_N + BLOCK_N - 1) // HALF
        inside_q &= (rows >= tl.load(cu_q_ptr)) & (rows < end_of_segments(cu_q_ptr, num_segments, last_row))
        inside_k &= (rows >= tl.load(cu_k_ptr)) & (rows < end_of_segments(cu_k_ptr, num_segments, last_row))
    zeros = tl.zeros((BLOCK_N,), tl.float32)
    dcos, dsin = _add_heads(
        (zeros, zeros), (zeros, zeros), dq_ptr, q_ptr, rows, pairs, inside_q,
        stride_dqt, stride_dqh, stride_qt, stride_qh, STRIDE_UNIT, HALF, NUM_HEADS, BLOCK_M,
    )  # fmt: skip
    dcos, dsin = _add_heads(
        dcos, dsin, dk_ptr, k_ptr, rows, pairs, inside_k,
        stride_dkt, stride_dkh, stride_kt, stride_kh, STRIDE_UNIT, HALF, NUM_K_HEADS, BLOCK_M,
    )  # fmt: skip
    _store_halves(dcos_ptr, dcos, rows, pairs, valid, HALF, SHARED_ANGLES)
    _store_halves(dsin_ptr, dsin, rows, pairs, valid, HALF, SHARED_ANGLES)
