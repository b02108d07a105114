"""The end of a backward with split sums, in portable Triton: add the splits of dq, dk and dv up.

If there are too few tiles of rows for all multiprocessors, several programs share a tile's gradient: each query head of
a group stores its own dk and dv, or each program passes over a share of the other side. The split sums are added in a
fixed order, so that results have the same bits every time.
"""

import triton
import triton.language as tl

from csrc_free_ops.attention.portable.fwd import DENSE_SIZES
from csrc_free_ops.tiles.overlap import await_before
from csrc_free_ops.tiles.rows import batch_base, row_base, row_step

# Loads in flight together; those of splits past the last are masked.
SPLITS_AT_ONCE = tl.constexpr(8)


@triton.jit
def _add_splits(
    splits_ptr, result_ptr, stride_b, stride_h, heads, length, index, first,
    STRIDE_T, splits, STRIDE_UNIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """result[batch, head] = the sum of `splits` split sums, for BLOCK_M rows of the index-th head of all sequences."""
    tl.static_assert(BLOCK_N >= HEAD_DIM, "a block holds all columns of a head: make BLOCK_N at least HEAD_DIM")
    sequence, head = index // heads, index % heads
    row = first + tl.arange(0, BLOCK_M)[:, None]
    col = tl.arange(0, BLOCK_N)[None, :]
    mask = (row < length) & (col < HEAD_DIM)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(0, splits, SPLITS_AT_ONCE, num_stages=1):
        for offset in tl.static_range(SPLITS_AT_ONCE):
            split = begin + offset
            pointers = splits_ptr + ((index * splits + split) * length + row) * HEAD_DIM + col
            total += tl.load(pointers, mask=mask & (split < splits), other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    result = row_base(batch_base(result_ptr, sequence, stride_b, STRIDE_UNIT), 0, head, stride_h, STRIDE_T, STRIDE_UNIT)
    tl.store(result + row.to(tl.int64) * STRIDE_T + col, total.to(result_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=(*DENSE_SIZES, "batch", "k_heads"))
def _attention_bwd_split_sum_kernel(
    dq_partial_ptr, dk_partial_ptr, dv_partial_ptr, dq_ptr, dk_ptr, dv_ptr,
    stride_dqb, stride_dqh, stride_dkb, stride_dkh, stride_dvb, stride_dvh,
    stride_dqt, stride_dkt, stride_dvt, batch, heads, k_heads, q_length, k_length, dq_splits, dkdv_splits,
    STRIDE_DQT: tl.constexpr, STRIDE_DKT: tl.constexpr, STRIDE_DVT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, IS_DQ_SPLIT: tl.constexpr, IS_DKDV_SPLIT: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (heads of all sequences, blocks of BLOCK_M rows, those of dk, dv and dq that are split): dq, dk and dv.

    Split sums are contiguous, [B, heads splits, S, D], and added up in fp32. A gradient with one part is neither read
    nor written. A block has BLOCK_N >= HEAD_DIM columns. With OVERLAPS the kernel starts while the previous one, which
    stores the split sums, ends.
    """
    await_before(OVERLAPS)
    index = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_M
    which = tl.program_id(2)
    if IS_DKDV_SPLIT and index < batch * k_heads:
        if which == 0:
            _add_splits(
                dk_partial_ptr, dk_ptr, stride_dkb, stride_dkh, k_heads, k_length, index, first,
                row_step(stride_dkt, STRIDE_DKT, STRIDE_UNIT), dkdv_splits, STRIDE_UNIT, HEAD_DIM, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if which == 1:
            _add_splits(
                dv_partial_ptr, dv_ptr, stride_dvb, stride_dvh, k_heads, k_length, index, first,
                row_step(stride_dvt, STRIDE_DVT, STRIDE_UNIT), dkdv_splits, STRIDE_UNIT, HEAD_DIM, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    LAST: tl.constexpr = 2 if IS_DKDV_SPLIT else 0
    if IS_DQ_SPLIT and which == LAST and index < batch * heads:
        _add_splits(
            dq_partial_ptr, dq_ptr, stride_dqb, stride_dqh, heads, q_length, index, first,
            row_step(stride_dqt, STRIDE_DQT, STRIDE_UNIT), dq_splits, STRIDE_UNIT, HEAD_DIM, BLOCK_M, BLOCK_N,
        )  # fmt: skip
