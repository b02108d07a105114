"""The backward of calls with few tiles, in portable Triton: gradients of queries and of keys in one kernel.

Such calls do not fill the multiprocessors, and their time is that of the longest program. One kernel computes delta,
and a second one computes dq, dk and dv side by side (`bwd.py` has the maths).
"""

import triton
import triton.language as tl

from csrc_free_ops.attention.portable.bwd import differentiate_queries
from csrc_free_ops.attention.portable.bwd_dkdv import differentiate_keys
from csrc_free_ops.attention.portable.fwd import DENSE_SIZES
from csrc_free_ops.tiles.masks import count_splits
from csrc_free_ops.tiles.overlap import await_before
from csrc_free_ops.tiles.rows import batch_base, column_starts, delta_of_rows, load_rows, row_base, row_step
from csrc_free_ops.tiles.score_mod import head_score_mod, sequence_score_mod
from csrc_free_ops.tiles.segments import locate_dense


@triton.jit(do_not_specialize=DENSE_SIZES)
def _attention_bwd_small_delta_kernel(
    out_ptr, lse_ptr, dout_ptr, dlse_ptr, delta_ptr, stride_ob, stride_oh, stride_dob, stride_doh,
    stride_ot, stride_dot, q_length,
    STRIDE_OT: tl.constexpr, STRIDE_DOT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    HAS_DLSE: tl.constexpr, OVERLAPS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M query rows, heads, sequences): delta. OVERLAPS: start while the previous kernel ends."""
    await_before(OVERLAPS)
    first = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    starts = column_starts(head, HEAD_DIM, MAIN)
    local = tl.arange(0, BLOCK_M)
    step_o = row_step(stride_ot, STRIDE_OT, STRIDE_UNIT)
    step_do = row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT)
    out_base = row_base(
        batch_base(out_ptr, sequence, stride_ob, STRIDE_UNIT), first, head, stride_oh, step_o, STRIDE_UNIT
    )
    dout_base = row_base(
        batch_base(dout_ptr, sequence, stride_dob, STRIDE_UNIT), first, head, stride_doh, step_do, STRIDE_UNIT
    )
    out = load_rows(out_base, starts, local, q_length - first, step_o, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    dout = load_rows(dout_base, starts, local, q_length - first, step_do, HEAD_DIM, MAIN, TAIL, True)  # [BLOCK_M, D]
    rows = (sequence * tl.num_programs(1) + head) * q_length + first + local
    inside = first + local < q_length
    lse = tl.load(lse_ptr + rows, mask=inside, other=float("-inf"))
    tl.store(delta_ptr + rows, delta_of_rows(out, dout, lse, dlse_ptr + rows, inside, HAS_DLSE), mask=inside)


@triton.jit(do_not_specialize=(*DENSE_SIZES, "batch"))
def _attention_bwd_small_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, dout_ptr, delta_ptr, slopes_ptr, seed_ptr, dq_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_dob, stride_doh,
    stride_dqb, stride_dqh, stride_dkb, stride_dkh, stride_dvb, stride_dvh,
    stride_qt, stride_kt, stride_vt, stride_dot, stride_dqt, stride_dkt, stride_dvt, stride_slopes,
    batch, q_length, k_length, dq_splits, splits, scale, softcap, dropout, window_left, window_right,
    STRIDE_QT: tl.constexpr, STRIDE_KT: tl.constexpr, STRIDE_VT: tl.constexpr, STRIDE_DOT: tl.constexpr,
    STRIDE_DQT: tl.constexpr, STRIDE_DKT: tl.constexpr, STRIDE_DVT: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORE_MODS: tl.constexpr, PRECISION: tl.constexpr,
    DQ_BLOCK_M: tl.constexpr, DQ_BLOCK_N: tl.constexpr, IS_DQ_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (the larger number of tiles of both kinds, heads, splits + dq_splits): dk and dv of BLOCK_N keys, and dq.

    Split sums are those of `bwd.py`. With OVERLAPS the kernel starts while the previous one, which stores delta, ends.
    """
    await_before(OVERLAPS)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    split = tl.program_id(2)
    step_q = row_step(stride_qt, STRIDE_QT, STRIDE_UNIT)
    step_k = row_step(stride_kt, STRIDE_KT, STRIDE_UNIT)
    step_v = row_step(stride_vt, STRIDE_VT, STRIDE_UNIT)
    step_do = row_step(stride_dot, STRIDE_DOT, STRIDE_UNIT)
    if split < splits:
        sequence, first = locate_dense(tl.program_id(0), k_length, False, BLOCK_N)
        if (sequence < batch) & (head * GROUP < heads):
            score_mod = sequence_score_mod(seed_ptr, sequence, heads, softcap, dropout, SCORE_MODS)
            statistics = sequence.to(tl.int64) * heads * q_length
            differentiate_keys(
                batch_base(q_ptr, sequence, stride_qb, STRIDE_UNIT),
                batch_base(k_ptr, sequence, stride_kb, STRIDE_UNIT),
                batch_base(v_ptr, sequence, stride_vb, STRIDE_UNIT), lse_ptr + statistics,
                batch_base(dout_ptr, sequence, stride_dob, STRIDE_UNIT), delta_ptr + statistics,
                batch_base(dk_ptr, sequence, stride_dkb, STRIDE_UNIT),
                batch_base(dv_ptr, sequence, stride_dvb, STRIDE_UNIT),
                head, 0, k_length, first, 0, q_length, split, slopes_ptr, sequence, stride_slopes, score_mod,
                stride_qh, stride_kh, stride_vh, stride_doh, stride_dkh, stride_dvh,
                q_length, scale, window_left, window_right,
                step_q, step_k, step_v, step_do,
                row_step(stride_dkt, STRIDE_DKT, STRIDE_UNIT), row_step(stride_dvt, STRIDE_DVT, STRIDE_UNIT),
                STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, GROUP,
                HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, BLOCK_M, BLOCK_N,
                count_splits(splits, IS_SPLIT),
            )  # fmt: skip
    else:
        sequence, first = locate_dense(tl.program_id(0), q_length, HAS_RIGHT, DQ_BLOCK_M)
        if sequence < batch:
            score_mod = sequence_score_mod(seed_ptr, sequence, heads, softcap, dropout, SCORE_MODS)
            score_mod = head_score_mod(score_mod, slopes_ptr, None, sequence, head, stride_slopes, SCORE_MODS)
            statistics = sequence.to(tl.int64) * heads * q_length
            dout_base = batch_base(dout_ptr, sequence, stride_dob, STRIDE_UNIT)
            # out and dlse are not read, because delta is there; dout stands in for out.
            differentiate_queries(
                batch_base(q_ptr, sequence, stride_qb, STRIDE_UNIT),
                batch_base(k_ptr, sequence, stride_kb, STRIDE_UNIT),
                batch_base(v_ptr, sequence, stride_vb, STRIDE_UNIT), dout_base, lse_ptr + statistics, dout_base,
                None, delta_ptr + statistics, batch_base(dq_ptr, sequence, stride_dqb, STRIDE_UNIT),
                head, 0, q_length, first, 0, k_length, split - splits,
                stride_qh, stride_kh, stride_vh, 0, stride_doh, stride_dqh,
                q_length, scale, score_mod, window_left, window_right,
                step_q, step_k, step_v, step_do, step_do, row_step(stride_dqt, STRIDE_DQT, STRIDE_UNIT),
                STRIDE_UNIT, HEAD_DIM, MAIN, TAIL, GROUP,
                False, HAS_LEFT, HAS_RIGHT, SCORE_MODS, PRECISION, DQ_BLOCK_M, DQ_BLOCK_N,
                count_splits(dq_splits, IS_DQ_SPLIT), True,
            )  # fmt: skip
