"""Column sums of one or two matrices with equal rows: the bias gradients of linear layers. Memory-bound.

A program owns BLOCK_N columns and adds all rows in a fixed order. One launch therefore gives rounded sums, without
partial sums in memory. PyTorch's own sum of [4096, 3072] asks for 96 MiB of scratch memory.
"""

import triton
import triton.language as tl

from csrc_free_ops.gemm.portable import COUNTS
from csrc_free_ops.tiles.blocks import load_block


@triton.jit
def _sum_columns(
    ptr, sums_ptr, tile, num_rows, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the sums of BLOCK_N columns. Each row of the block has an accumulator, which shortens chains of sums."""
    local = tl.arange(0, BLOCK_M).to(tl.int64)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = cols < COLUMNS
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, num_rows, BLOCK_M):
        rows = start + local
        sums += load_block(ptr, rows, cols, (rows < num_rows)[:, None] & valid[None, :], STRIDE)  # [BLOCK_M, BLOCK_N]
    if sums_ptr.dtype.element_ty == tl.float32:
        # A thread adds its rows one after the other, which costs more digits than fp32 may lose.
        sums = sums.to(tl.float64)
    tl.store(sums_ptr + cols, tl.sum(sums, 0).to(sums_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=COUNTS)
def _column_sums_kernel(
    first_ptr, second_ptr, first_sums_ptr, second_sums_ptr, num_rows,
    FIRST_COLUMNS: tl.constexpr, SECOND_COLUMNS: tl.constexpr, FIRST_STRIDE: tl.constexpr, SECOND_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_N columns of the first matrix, then of the second). A matrix may have no columns."""
    FIRST_TILES: tl.constexpr = (FIRST_COLUMNS + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    if tile < FIRST_TILES:
        if FIRST_COLUMNS > 0:
            _sum_columns(first_ptr, first_sums_ptr, tile, num_rows, FIRST_COLUMNS, FIRST_STRIDE, BLOCK_M, BLOCK_N)
    else:
        if SECOND_COLUMNS > 0:
            _sum_columns(
                second_ptr, second_sums_ptr, tile - FIRST_TILES, num_rows, SECOND_COLUMNS, SECOND_STRIDE,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
