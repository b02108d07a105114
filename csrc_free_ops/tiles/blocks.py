"""Blocks of rows of contiguous columns, read and written in fp32 whatever their dtype in memory."""

import triton
import triton.language as tl


@triton.jit
def load_block(ptr, rows, cols, mask, STRIDE: tl.constexpr):
    """In fp32; rows are int64, cols may be any offsets within a row; what is masked reads as zero."""
    return tl.load(ptr + (rows * STRIDE)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_padded(ptr, values, rows, cols, mask, num_rows, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """COLUMNS of each row, and zeros behind them where rows are longer, by less than a block."""
    if STRIDE > COLUMNS:
        values = tl.where(mask, values, 0.0)
        mask = (rows < num_rows)[:, None] & (cols < STRIDE)[None, :]
    store_block(ptr, values, rows, cols, mask, STRIDE)


@triton.jit
def store_block(ptr, values, rows, cols, mask, STRIDE: tl.constexpr):
    tl.store(ptr + (rows * STRIDE)[:, None] + cols[None, :], values.to(ptr.dtype.element_ty), mask=mask)
