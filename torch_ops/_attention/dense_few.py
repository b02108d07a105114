"""The launcher of a dense backward whose programs are few (csrc_free_ops/attention/portable/bwd_small.py)."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from triton import cdiv

from csrc_free_ops.attention.portable.bwd_small import _attention_bwd_few_delta_kernel, _attention_bwd_few_kernel
from csrc_free_ops.configs.rows import Launch
from torch_ops._attention.choose import choose, constants_of, slopes_stride
from torch_ops._attention.parts import ROWS, parts_of, plan_parts, splits_of
from torch_ops._attention.scores import Scores, StepTensors
from torch_ops._core.launch import Relaunch, can_overlap, current_gpu, dense_like, dense_strides, length_of
from torch_ops._core.registry import wrap_triton

# For each multiprocessor, of queries and of keys together.
MOST_PROGRAMS = 8


def launches_beside(q: Tensor, k: Tensor, scores: Scores, products: str) -> tuple[Launch, Launch] | None:
    """Those of dq and of dk and dv beside each other, as one kernel has them; None where it is not taken: of fp32 with
    few programs it is, and one kernel has one number of warps.

    On an H100 in tf32, of 8 heads and 64 columns, gradients of 512 causal rows took 28.7 us so and 33.9 otherwise
    (plain maths 49), and of 2 x 2048 rows 376 and 480; as exact as IEEE's and of 128 columns 1600 and 1775.
    """
    sizes = (q.shape[0], q.shape[2], k.shape[2])
    if q.dtype is not torch.float32 or any(isinstance(size, torch.SymInt) for size in sizes) or 0 in sizes:
        return None
    dq, _ = choose("attention_bwd_dq", q, scores, length_of(q), precision=products)
    dkdv, _ = choose("attention_bwd_dkdv", q, scores, length_of(k), precision=products)
    by_rule, _ = choose("attention_bwd_dkdv", q, scores, length_of(k), own_rows=(), precision=products)
    # Whoever gave a row of their own wants that one as it is.
    if dkdv == by_rule and dkdv.num_warps == 2 * dq.num_warps and dkdv.block_n > 64:
        dkdv = replace(dkdv, block_n=dkdv.block_n // 2, num_warps=dq.num_warps)
    alike = (dq.num_warps, dq.num_stages) == (dkdv.num_warps, dkdv.num_stages)
    few = _programs(q, k, dq, dkdv) <= MOST_PROGRAMS * current_gpu().multiprocessors
    return (dq, dkdv) if alike and few else None


def _programs(q: Tensor, k: Tensor, dq: Launch, dkdv: Launch) -> int:
    return q.shape[0] * (cdiv(q.shape[2], dq.block_m) * q.shape[1] + cdiv(k.shape[2], dkdv.block_n) * k.shape[1])


def plan_dense_few(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scores: Scores,
    precision: str, dq_launch: Launch, dkdv_launch: Launch,
) -> Callable[..., None]:  # fmt: skip
    """launch(dout, dlse, q, k, v, out, lse, delta, dq, dk, dv, step) of readable tensors, with `launches_beside`."""
    batch, num_heads, length, _ = q.shape
    k_length = k.shape[2]
    tiles = cdiv(length, dq_launch.block_m) * batch, cdiv(k_length, dkdv_launch.block_n) * batch
    programs = _programs(q, k, dq_launch, dkdv_launch)
    dq_splits = splits_of(q, programs, cdiv(k_length, dq_launch.block_n))
    splits = splits_of(q, programs, cdiv(length, dkdv_launch.block_m))
    results = [dense_like(tensor) for tensor in (q, k, v)]
    parts = [parts_of(tensor, each) for tensor, each in zip(results, (dq_splits, splits, splits), strict=True)]
    unit, outer, rows = dense_strides(out, dout, q, k, v, dout, *parts)
    out_row, dout_row, q_row, k_row, v_row, _, dq_row, dk_row, dv_row = rows
    overlaps = can_overlap()
    early = {"OVERLAPS": overlaps, **({"launch_pdl": True} if overlaps else {})}
    options = constants_of(q, k, scores, dkdv_launch, unit, scores.backward_steps, precision)
    delta_scalars = (*outer[:4], length)
    delta_constants = {
        "STRIDE_OT": out_row, "STRIDE_DOT": dout_row,
        **{name: options[name] for name in ("UNIT", "HEAD_DIM", "MAIN", "TAIL")},
        "HAS_DLSE": dlse is not None, "BLOCK_M": ROWS, "num_warps": 4, "num_stages": 1, **early,
    }  # fmt: skip
    delta_grid = (cdiv(length, ROWS), num_heads, batch)
    scalars = (
        *outer[4:], slopes_stride(q, scores), batch, length, k_length,
        scores.scale, scores.softcap, scores.dropout, *scores.bounds(),
    )  # fmt: skip
    constants = {
        "STRIDE_QT": q_row, "STRIDE_KT": k_row, "STRIDE_VT": v_row, "STRIDE_DOT": dout_row,
        "STRIDE_DQT": dq_row, "STRIDE_DKT": dk_row, "STRIDE_DVT": dv_row,
        "DQ_BLOCK_M": dq_launch.block_m, "DQ_BLOCK_N": dq_launch.block_n, "DQ_SPLITS": dq_splits, "SPLITS": splits,
        **options, **early,
    }  # fmt: skip
    grid = (max(tiles), num_heads, splits + dq_splits)
    relaunch_delta, relaunch = Relaunch(delta_grid, delta_scalars), Relaunch(grid, scalars)
    add_parts = plan_parts(q, k, v, dq_splits, splits) if max(dq_splits, splits) > 1 else None

    def launch_backward(
        dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, step: StepTensors,
    ) -> None:  # fmt: skip
        before = (out, lse, dout, dlse, delta)
        if not relaunch_delta(None, before):
            compiled = wrap_triton(_attention_bwd_few_delta_kernel)[delta_grid](
                *before, *delta_scalars, **delta_constants
            )
            relaunch_delta.keep(None, before, delta_constants, compiled)
        dq_parts, dk_parts, dv_parts = parts_of(dq, dq_splits), parts_of(dk, splits), parts_of(dv, splits)
        tensors = (q, k, v, lse, dout, delta, step.slopes, step.seed, dq_parts, dk_parts, dv_parts)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_attention_bwd_few_kernel)[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)
        if add_parts is not None:
            add_parts(dq_parts, dk_parts, dv_parts, dq, dk, dv)

    return launch_backward
