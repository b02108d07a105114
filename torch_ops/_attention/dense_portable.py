"""The launcher of the attention core's kernels in stock Triton for batches of sequences of one length, [B, H, S, D].

Of some fp32 calls on Hopper gradients of keys are those of `hopper_dkdv`.

Plans are as those of `portable`, without boundaries.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from triton import cdiv

from csrc_free_ops.attention.portable.bwd import _attention_bwd_dkdv_dense_kernel, _attention_bwd_dq_dense_kernel
from csrc_free_ops.attention.portable.fwd import _attention_fwd_dense_kernel
from torch_ops._attention.choose import choose, constants_of, for_each_precision, slopes_stride
from torch_ops._attention.dense_few import launches_beside, plan_dense_few
from torch_ops._attention.hopper_dkdv import plan_dense_keys, takes_hopper_keys
from torch_ops._attention.parts import parts_of, plan_parts, splits_of
from torch_ops._attention.scores import NO_STEP, Scores, StepTensors
from torch_ops._core.launch import Relaunch, can_overlap, dense_like, dense_strides, length_of, readable, with_columns
from torch_ops._core.registry import wrap_triton


@for_each_precision
def plan_dense_forward_portable(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, has_lse: bool, precision: str
) -> Callable[..., None]:
    batch, num_heads, length, _ = q.shape
    launch, _ = choose("attention_fwd", q, scores, length_of(q), precision=precision)
    unit, outer, (q_row, k_row, v_row, out_row) = dense_strides(q, k, v, dense_like(q))
    scalars = (
        *outer, slopes_stride(q, scores), length, k.shape[2],
        scores.scale, scores.softcap, scores.dropout, *scores.bounds(),
    )  # fmt: skip
    constants = {
        "STRIDE_QT": q_row, "STRIDE_KT": k_row, "STRIDE_VT": v_row, "STRIDE_OT": out_row, "HAS_LSE": has_lse,
        **constants_of(q, k, scores, launch, unit, scores.steps, precision),
    }  # fmt: skip
    grid = (cdiv(length, launch.block_m) * batch, num_heads)
    relaunch = Relaunch(grid, scalars)
    ready = readable(q, k, v)

    def launch_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, step: StepTensors = NO_STEP) -> None:
        if not ready:
            q, k, v = with_columns(q), with_columns(k), with_columns(v)
        tensors = (q, k, v, out, lse, *step)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_attention_fwd_dense_kernel)[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_forward


@for_each_precision
def plan_dense_backward_portable(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores,
    precision: str,
) -> Callable[..., None]:  # fmt: skip
    batch, num_heads, length, _ = q.shape
    num_k_heads, k_length = k.shape[1:3]
    dq_launch, _ = choose("attention_bwd_dq", q, scores, length_of(q), precision=precision)
    dkdv_launch, _ = choose("attention_bwd_dkdv", q, scores, length_of(k), precision=precision)
    # Instead of kernels in stock Triton, whose launches stay below: `torch._library.triton` reads them there.
    beside = launches_beside(q, k, scores, precision)
    takes_keys = takes_hopper_keys(q, k, scores, precision, beside is not None)
    keys = plan_dense_keys(dout, q, k, v, scores) if takes_keys else None
    few = None
    if beside is not None and not takes_keys:
        few = plan_dense_few(dout, dlse, q, k, v, out, scores, precision, *beside)
    dq_tiles, dkdv_tiles = cdiv(length, dq_launch.block_m) * batch, cdiv(k_length, dkdv_launch.block_n) * batch
    # A kernel that runs by itself has half as many programs as two that run beside each other.
    dq_splits = splits_of(q, 2 * dq_tiles * num_heads, cdiv(k_length, dq_launch.block_n))
    dkdv_splits = splits_of(q, 2 * dkdv_tiles * num_k_heads, cdiv(length, dkdv_launch.block_m))
    dq_grid, dkdv_grid = (dq_tiles, num_heads, dq_splits), (dkdv_tiles, num_k_heads, dkdv_splits)
    results = [dense_like(tensor) for tensor in (q, k, v)]
    dq_parts, dk_parts, dv_parts = (
        parts_of(tensor, each) for tensor, each in zip(results, (dq_splits, dkdv_splits, dkdv_splits), strict=True)
    )
    unit, outer, rows = dense_strides(q, k, v, out, dout, dq_parts, dk_parts, dv_parts)
    q_row, k_row, v_row, out_row, dout_row, dq_row, dk_row, dv_row = rows
    read, dq_outer, dkdv_outer = outer[:10], outer[10:12], outer[12:]
    sizes = (
        slopes_stride(q, scores), length, k_length, scores.scale, scores.softcap, scores.dropout, *scores.bounds()
    )  # fmt: skip
    strides = {"STRIDE_QT": q_row, "STRIDE_KT": k_row, "STRIDE_VT": v_row, "STRIDE_DOT": dout_row}

    overlaps = can_overlap()
    early = {"OVERLAPS": overlaps, **({"launch_pdl": True} if overlaps else {})}
    dq_scalars = (*read, *dq_outer, *sizes)
    dq_constants = {
        **strides, "STRIDE_OT": out_row, "STRIDE_DQT": dq_row, "HAS_DLSE": dlse is not None,
        "SPLITS": dq_splits, **early,
        **constants_of(q, k, scores, dq_launch, unit, scores.backward_steps, precision),
    }  # fmt: skip

    dkdv_scalars = (*read[:6], *read[8:], *dkdv_outer, *sizes)
    dkdv_constants = {
        **strides, "STRIDE_DKT": dk_row, "STRIDE_DVT": dv_row, "SPLITS": dkdv_splits, **early,
        **constants_of(q, k, scores, dkdv_launch, unit, scores.backward_steps, precision),
    }  # fmt: skip

    relaunch_dq = Relaunch(dq_grid, dq_scalars)
    relaunch_dkdv = Relaunch(dkdv_grid, dkdv_scalars)
    splits = dq_splits, 1 if keys else dkdv_splits
    add_parts = plan_parts(q, k, v, *splits) if max(splits) > 1 else None
    ready = readable(q, k, v, out, dout) and lse.is_contiguous() and (dlse is None or dlse.is_contiguous())

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, step: StepTensors = NO_STEP,
    ) -> None:  # fmt: skip
        dlse = lse if dlse is None else dlse
        if not ready:
            q, k, v, out, dout = (with_columns(tensor) for tensor in (q, k, v, out, dout))
            lse, dlse = lse.contiguous(), dlse.contiguous()
        delta = torch.empty_like(lse)
        if few is not None:
            few(dout, dlse, q, k, v, out, lse, delta, dq, dk, dv, step)
            return
        dq_parts = parts_of(dq, dq_splits)
        tensors = (q, k, v, out, lse, dout, dlse, step.slopes, step.seed, delta, dq_parts)
        if not relaunch_dq(None, tensors):
            compiled = wrap_triton(_attention_bwd_dq_dense_kernel)[dq_grid](*tensors, *dq_scalars, **dq_constants)
            relaunch_dq.keep(None, tensors, dq_constants, compiled)
        if keys is not None:
            keys(q, k, v, lse, dout, delta, dk, dv)
            if add_parts is not None:
                add_parts(dq_parts, dk, dv, dq, dk, dv)
            return
        dk_parts, dv_parts = parts_of(dk, dkdv_splits), parts_of(dv, dkdv_splits)
        after = (q, k, v, lse, dout, delta, step.slopes, step.seed, dk_parts, dv_parts)
        if not relaunch_dkdv(None, after):
            compiled = wrap_triton(_attention_bwd_dkdv_dense_kernel)[dkdv_grid](*after, *dkdv_scalars, **dkdv_constants)
            relaunch_dkdv.keep(None, after, dkdv_constants, compiled)
        if add_parts is not None:
            add_parts(dq_parts, dk_parts, dv_parts, dq, dk, dv)

    return launch_backward
