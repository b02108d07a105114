"""Elementwise kernels of `qkv_rope` for calls whose epilogue is not fused: the rotation, and its gradient.

The product of the forward is packed: [T, (H + 2 Hk) D], heads of q, then of k, then of v. `_rotate_kernel` splits and
rotates a product that another kernel computed. `_qkv_rope_bwd_kernel` maps the gradients of q, k and v back to packed
columns and rounds them once. It also sums them for the bias before rounding: a program owns ROWS rows and stores their
sums as one row of `sums`, and those rows are added in a fixed order. Angles are those of tiles/rope.py; the gradient of
a rotation is the rotation back.
"""

import triton
import triton.language as tl

from csrc_free_ops.gemm.portable import COUNTS
from csrc_free_ops.tiles.blocks import load_block, store_block
from csrc_free_ops.tiles.rope import OF_Q, OF_V, first_columns, load_angles, locate_pairs, rotate, rotate_back
from csrc_free_ops.tiles.rows import row_step


@triton.jit
def _load_pair(ptr, rows, cols, mask, STRIDE, HALF: tl.constexpr):
    """The first and the second elements of pairs, [rows, pairs] each."""
    return load_block(ptr, rows, cols, mask, STRIDE), load_block(ptr, rows, cols + HALF, mask, STRIDE)


@triton.jit
def _store_pair(ptr, pair, rows, cols, mask, STRIDE: tl.constexpr, HALF: tl.constexpr):
    store_block(ptr, pair[0], rows, cols, mask, STRIDE)
    store_block(ptr, pair[1], rows, cols + HALF, mask, STRIDE)


@triton.jit(do_not_specialize=COUNTS)
def _rotate_kernel(
    packed_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, num_rows,
    HALF: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr,
    STRIDE_CT: tl.constexpr, STRIDE_ST: tl.constexpr, SHARED_ANGLES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of pairs)."""
    Q_WIDTH: tl.constexpr = 2 * HALF * NUM_HEADS
    K_WIDTH: tl.constexpr = 2 * HALF * NUM_K_HEADS
    section, pairs, valid, begin = locate_pairs(tl.program_id(1), NUM_HEADS, NUM_K_HEADS, HALF, BLOCK_N)
    cols = first_columns(pairs, HALF)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (rows < num_rows)[:, None] & valid[None, :]
    a, b = _load_pair(packed_ptr, rows, begin + cols, mask, Q_WIDTH + 2 * K_WIDTH, HALF)
    if section == OF_V:
        _store_pair(v_ptr, (a, b), rows, cols, mask, K_WIDTH, HALF)
    else:
        cos = load_angles(cos_ptr, rows, pairs, mask, STRIDE_CT, HALF, SHARED_ANGLES)
        sin = load_angles(sin_ptr, rows, pairs, mask, STRIDE_ST, HALF, SHARED_ANGLES)
        rotated = rotate(a, b, cos, sin)
        if section == OF_Q:
            _store_pair(q_ptr, rotated, rows, cols, mask, Q_WIDTH, HALF)
        else:
            _store_pair(k_ptr, rotated, rows, cols, mask, K_WIDTH, HALF)


@triton.jit
def _in_heads(pairs, stride_head, STRIDE_UNIT: tl.constexpr, HALF: tl.constexpr):
    """The offset of each pair in a row. Head strides count STRIDE_UNIT elements, so their alignment is known."""
    return (pairs // HALF).to(tl.int64) * tl.cast(stride_head, tl.int64) * STRIDE_UNIT + pairs % HALF


@triton.jit(do_not_specialize=(*COUNTS, *[f"stride_{name}{axis}" for name in "qkv" for axis in "ht"]))
def _qkv_rope_bwd_kernel(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, packed_ptr, column_sums_ptr,
    stride_qh, stride_kh, stride_vh, stride_qt, stride_kt, stride_vt, num_rows,
    HALF: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    STRIDE_CT: tl.constexpr, STRIDE_ST: tl.constexpr, SHARED_ANGLES: tl.constexpr,
    PACKS: tl.constexpr, COLUMN_SUMS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (runs of ROWS rows, tiles of pairs). PACKS stores packed; COLUMN_SUMS stores column sums."""
    section, pairs, valid, begin = locate_pairs(tl.program_id(1), NUM_HEADS, NUM_K_HEADS, HALF, BLOCK_N)
    cols = begin + first_columns(pairs, HALF)
    WIDTH: tl.constexpr = 2 * HALF * (NUM_HEADS + 2 * NUM_K_HEADS)
    run = tl.program_id(0).to(tl.int64)
    step_q, step_k = row_step(stride_qt, STRIDE_QT, STRIDE_UNIT), row_step(stride_kt, STRIDE_KT, STRIDE_UNIT)
    step_v = row_step(stride_vt, STRIDE_VT, STRIDE_UNIT)
    sum_a = tl.zeros((BLOCK_N,), tl.float32)
    sum_b = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, ROWS, BLOCK_M):
        rows = run * ROWS + start + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & valid[None, :]
        if section == OF_V:
            a, b = _load_pair(dv_ptr, rows, _in_heads(pairs, stride_vh, STRIDE_UNIT, HALF), mask, step_v, HALF)
        else:
            if section == OF_Q:
                a, b = _load_pair(dq_ptr, rows, _in_heads(pairs, stride_qh, STRIDE_UNIT, HALF), mask, step_q, HALF)
            else:
                a, b = _load_pair(dk_ptr, rows, _in_heads(pairs, stride_kh, STRIDE_UNIT, HALF), mask, step_k, HALF)
            cos = load_angles(cos_ptr, rows, pairs, mask, STRIDE_CT, HALF, SHARED_ANGLES)
            sin = load_angles(sin_ptr, rows, pairs, mask, STRIDE_ST, HALF, SHARED_ANGLES)
            a, b = rotate_back(a, b, cos, sin)
        if PACKS:
            _store_pair(packed_ptr, (a, b), rows, cols, mask, WIDTH, HALF)
        if COLUMN_SUMS:
            sum_a += tl.sum(a, 0)
            sum_b += tl.sum(b, 0)
    if COLUMN_SUMS:
        tl.store(column_sums_ptr + run * WIDTH + cols, sum_a, mask=valid)
        tl.store(column_sums_ptr + run * WIDTH + cols + HALF, sum_b, mask=valid)
