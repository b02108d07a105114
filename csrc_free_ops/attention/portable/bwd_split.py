"""The end of a backward whose programs made gradients in parts, in stock Triton.

Parts are made where programs for tiles of rows alone would leave multiprocessors without work: of dk and dv by each
query head of a group, or of any gradient by each share of what is passed over. They are added up in order, and so to
the same bits every time.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.overlap import await_before
from csrc_free_ops.tiles.rows import batch_base, row_base


@triton.jit
def _add_parts(
    parts_ptr, result_ptr, stride_b, stride_h, heads, length, line, first,
    STRIDE_T: tl.constexpr, UNIT: tl.constexpr, HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch, head = line // heads, line % heads
    row = first + tl.arange(0, BLOCK_M)[:, None]
    col = tl.arange(0, BLOCK_N)[None, :]
    mask = (row < length) & (col < HEAD_DIM)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in tl.static_range(PARTS):
        place = parts_ptr + ((line * PARTS + part) * length + row) * HEAD_DIM + col
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    result = row_base(batch_base(result_ptr, batch, stride_b, UNIT), 0, head, stride_h, STRIDE_T, UNIT)
    tl.store(result + row.to(tl.int64) * STRIDE_T + col, total.to(result_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("batch", "heads", "k_heads", "q_length", "k_length"))
def _attention_bwd_parts_kernel(
    dq_parts_ptr, dk_parts_ptr, dv_parts_ptr, dq_ptr, dk_ptr, dv_ptr,
    stride_dqb, stride_dqh, stride_dkb, stride_dkh, stride_dvb, stride_dvh, batch, heads, k_heads, q_length, k_length,
    STRIDE_DQT: tl.constexpr, STRIDE_DKT: tl.constexpr, STRIDE_DVT: tl.constexpr, UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, DQ_PARTS: tl.constexpr, DKDV_PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (heads of all sequences, blocks of BLOCK_M rows, what has parts of dk, dv and dq): dq, dk and dv.

    Parts are contiguous, [B, heads PARTS, S, D], and added up in fp32; what has one part is neither read nor written.
    BLOCK_N columns hold HEAD_DIM. With OVERLAPS it begins while the kernel before it ends, which makes the parts.
    """
    await_before(OVERLAPS)
    line = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_M
    which = tl.program_id(2)
    if DKDV_PARTS > 1 and line < batch * k_heads:
        if which == 0:
            _add_parts(
                dk_parts_ptr, dk_ptr, stride_dkb, stride_dkh, k_heads, k_length, line, first,
                STRIDE_DKT, UNIT, HEAD_DIM, DKDV_PARTS, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if which == 1:
            _add_parts(
                dv_parts_ptr, dv_ptr, stride_dvb, stride_dvh, k_heads, k_length, line, first,
                STRIDE_DVT, UNIT, HEAD_DIM, DKDV_PARTS, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    LAST: tl.constexpr = 2 if DKDV_PARTS > 1 else 0
    if DQ_PARTS > 1 and which == LAST and line < batch * heads:
        _add_parts(
            dq_parts_ptr, dq_ptr, stride_dqb, stride_dqh, heads, q_length, line, first,
            STRIDE_DQT, UNIT, HEAD_DIM, DQ_PARTS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
