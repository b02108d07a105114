"""Elementwise kernels of `mlp` for calls whose epilogue is not fused: the activation, and its gradient.

pre = x w1^T + b1 is saved. h = act(pre); for "swiglu" h is silu of the first half of the columns times the second half.
With dh = dout w2:

    dpre = dh act'(pre)       h is recomputed, for dw2 = dout^T h
    db1  = sum of dpre over the rows, before rounding

A program owns ROWS rows and stores their column sums as one row of `sums`. Those rows are added in a fixed order.
"""

import triton
import triton.language as tl

from csrc_free_ops.gemm.portable import COUNTS
from csrc_free_ops.tiles.activations import activate_with_slope, swiglu_gradients
from csrc_free_ops.tiles.blocks import load_block, store_block, store_padded


@triton.jit(do_not_specialize=COUNTS)
def _activate_kernel(
    pre_ptr, out_ptr, num_rows, N: tl.constexpr, STRIDE_PM: tl.constexpr, STRIDE_OM: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of the N columns of out). For "swiglu" pre has 2 N columns.

    The arithmetic is that of `_mlp_bwd_kernel`, so that h has the same bits from either kernel.
    """
    EXACT: tl.constexpr = pre_ptr.dtype.element_ty == tl.float32
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < N)[None, :]
    pre = load_block(pre_ptr, rows, cols, mask, STRIDE_PM)
    if ACTIVATION == "swiglu":
        up = load_block(pre_ptr, rows, cols + N, mask, STRIDE_PM)
        out, _, _ = swiglu_gradients(pre, up, pre, EXACT)
    elif ACTIVATION == "none":
        out = pre
    else:
        out, _ = activate_with_slope(pre, ACTIVATION, EXACT)
    store_padded(out_ptr, out, rows, cols, mask, num_rows, N, STRIDE_OM)


@triton.jit(do_not_specialize=COUNTS)
def _mlp_bwd_kernel(
    dh_ptr, pre_ptr, dpre_ptr, h_ptr, column_sums_ptr, num_rows,
    N: tl.constexpr, STRIDE_GM: tl.constexpr, STRIDE_PM: tl.constexpr, UP_BEGINS: tl.constexpr,
    STRIDE_DM: tl.constexpr, STRIDE_HM: tl.constexpr, ACTIVATION: tl.constexpr, MAKES_H: tl.constexpr,
    COLUMN_SUMS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (runs of ROWS rows, tiles of the N columns of h). MAKES_H stores h; COLUMN_SUMS stores column sums of dpre.

    UP_BEGINS is the column of dpre at which the gradient of up begins. Columns between the gradients and behind the
    last one are zero.
    """
    EXACT: tl.constexpr = pre_ptr.dtype.element_ty == tl.float32
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = cols < N
    # Columns past N read as zero, so their gradients are zero as well.
    OF_A: tl.constexpr = UP_BEGINS if ACTIVATION == "swiglu" else STRIDE_DM
    run = tl.program_id(0).to(tl.int64)
    sum_a = tl.zeros((BLOCK_N,), tl.float32)
    sum_b = tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, ROWS, BLOCK_M):
        rows = run * ROWS + start + tl.arange(0, BLOCK_M)
        inside = (rows < num_rows)[:, None]
        mask = inside & valid[None, :]
        dh = load_block(dh_ptr, rows, cols, mask, STRIDE_GM)  # [BLOCK_M, BLOCK_N]
        pre = load_block(pre_ptr, rows, cols, mask, STRIDE_PM)  # [BLOCK_M, BLOCK_N]
        if ACTIVATION == "swiglu":
            h, a, b = swiglu_gradients(pre, load_block(pre_ptr, rows, cols + N, mask, STRIDE_PM), dh, EXACT)
            if COLUMN_SUMS:
                sum_b += tl.sum(b, 0)
            mask_b = inside & (cols < STRIDE_DM - UP_BEGINS)[None, :]
            store_block(dpre_ptr, b, rows, cols + UP_BEGINS, mask_b, STRIDE_DM)
        else:
            h, slope = activate_with_slope(pre, ACTIVATION, EXACT)
            a = dh * slope
        if COLUMN_SUMS:
            sum_a += tl.sum(a, 0)
        store_block(dpre_ptr, a, rows, cols, inside & (cols < OF_A)[None, :], STRIDE_DM)
        if MAKES_H:
            store_block(h_ptr, h, rows, cols, mask, STRIDE_HM)
    if COLUMN_SUMS and ACTIVATION == "swiglu":
        tl.store(column_sums_ptr + run * (2 * N) + cols, sum_a, mask=valid)
        tl.store(column_sums_ptr + run * (2 * N) + N + cols, sum_b, mask=valid)
    elif COLUMN_SUMS:
        tl.store(column_sums_ptr + run * N + cols, sum_a, mask=valid)
