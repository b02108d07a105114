"""Blocks of rows with contiguous columns: fp32 in registers, any dtype in memory."""

import triton
import triton.language as tl


@triton.jit
def load_block(ptr, rows, cols, mask, STRIDE):
    """A block in fp32, zero where masked. rows are int64; cols may be any offsets within a row."""
    return tl.load(ptr + (rows * STRIDE)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)  # [rows, cols]


@triton.jit
def store_padded(ptr, values, rows, cols, mask, num_rows, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Store COLUMNS columns of each row, and zeros up to STRIDE if rows are longer, by less than a block."""
    if STRIDE > COLUMNS:
        values = tl.where(mask, values, 0.0)
        mask = (rows < num_rows)[:, None] & (cols < STRIDE)[None, :]
    store_block(ptr, values, rows, cols, mask, STRIDE)


@triton.jit
def store_block(ptr, values, rows, cols, mask, STRIDE: tl.constexpr):
    tl.store(ptr + (rows * STRIDE)[:, None] + cols[None, :], values.to(ptr.dtype.element_ty), mask=mask)
