"""The launcher of the attention core's kernels in stock Triton, for packed calls; `plan` chooses among the paths."""

from collections.abc import Callable

import torch
from torch import Tensor

from csrc_free_ops.attention.portable.bwd import _attention_bwd_dkdv_kernel, _attention_bwd_dq_kernel
from csrc_free_ops.attention.portable.fwd import _attention_fwd_kernel
from torch_ops._attention.choose import choose, constants_of, for_each_precision, mean_length, slopes_stride
from torch_ops._attention.scores import NO_STEP, Scores, StepTensors
from torch_ops._core.launch import Relaunch, contiguous_row, head_strides, readable, row_stride, with_columns
from torch_ops._core.registry import wrap_triton


@for_each_precision
def plan_forward_portable(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, scores: Scores, has_lse: bool, precision: str
) -> Callable[..., None]:
    total_q, num_heads, _ = q.shape
    num_segments = cu_q.shape[0] - 1
    launch, _ = choose("attention_fwd", q, scores, mean_length(total_q, num_segments), precision=precision)
    unit, strides = head_strides(q, k, v)
    scalars = (
        *strides, slopes_stride(q, scores), total_q, k.shape[0], num_segments,
        scores.scale, scores.softcap, scores.dropout, *scores.bounds(),
    )  # fmt: skip
    constants = {
        "STRIDE_QT": row_stride(q), "STRIDE_KT": row_stride(k), "STRIDE_VT": row_stride(v),
        "STRIDE_OT": contiguous_row(q), "HAS_LSE": has_lse,
        **constants_of(q, k, scores, launch, unit, scores.steps, precision),
    }  # fmt: skip
    ready = readable(q, k, v) and cu_q.is_contiguous() and (cu_k is None or cu_k.is_contiguous())
    # One tile more per segment than its rows fill, and those of the rows outside all segments (tiles/segments.py).
    grid = (total_q // launch.block_m + num_segments + 2, num_heads)
    relaunch = Relaunch(grid, scalars)

    def launch_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, out: Tensor, lse: Tensor,
        step: StepTensors = NO_STEP,
    ) -> None:  # fmt: skip
        cu_k = cu_q if cu_k is None else cu_k
        if not ready:
            q, k, v = with_columns(q), with_columns(k), with_columns(v)
            cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
        tensors = (q, k, v, out, lse, cu_q, cu_k, *step)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_attention_fwd_kernel)[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_forward


@for_each_precision
def plan_backward_portable(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor, cu_k: Tensor | None, scores: Scores, precision: str,
) -> Callable[..., None]:  # fmt: skip
    total_q, num_heads, _ = q.shape
    total_k, num_k_heads, _ = k.shape
    num_segments = cu_q.shape[0] - 1
    unit, (q_head, k_head, v_head, out_head, dout_head) = head_strides(q, k, v, out, dout)
    sizes = (
        slopes_stride(q, scores), total_q, total_k, num_segments,
        scores.scale, scores.softcap, scores.dropout, *scores.bounds(),
    )  # fmt: skip
    strides = {
        "STRIDE_QT": row_stride(q), "STRIDE_KT": row_stride(k), "STRIDE_VT": row_stride(v),
        "STRIDE_DOT": row_stride(dout),
    }  # fmt: skip

    dq_launch, _ = choose("attention_bwd_dq", q, scores, mean_length(total_q, num_segments), precision=precision)
    dq_scalars = (q_head, k_head, v_head, out_head, dout_head, *sizes)
    dq_constants = {
        **strides, "STRIDE_OT": row_stride(out), "STRIDE_DQT": contiguous_row(q), "HAS_DLSE": dlse is not None,
        **constants_of(q, k, scores, dq_launch, unit, scores.backward_steps, precision),
    }  # fmt: skip
    dq_grid = (total_q // dq_launch.block_m + num_segments + 2, num_heads)

    dkdv_launch, _ = choose("attention_bwd_dkdv", q, scores, mean_length(total_k, num_segments), precision=precision)
    dkdv_scalars = (q_head, k_head, v_head, dout_head, *sizes)
    dkdv_constants = {
        **strides, "STRIDE_DKT": contiguous_row(k),
        **constants_of(q, k, scores, dkdv_launch, unit, scores.backward_steps, precision),
    }  # fmt: skip
    dkdv_grid = (total_k // dkdv_launch.block_n + num_segments + 2, num_k_heads)

    relaunch_dq = Relaunch(dq_grid, dq_scalars)
    relaunch_dkdv = Relaunch(dkdv_grid, dkdv_scalars)
    vectors = (lse, lse if dlse is None else dlse, cu_q, cu_q if cu_k is None else cu_k)
    ready = readable(q, k, v, out, dout) and all(tensor.is_contiguous() for tensor in vectors)

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Tensor, cu_k: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor, step: StepTensors = NO_STEP,
    ) -> None:  # fmt: skip
        dlse = lse if dlse is None else dlse
        cu_k = cu_q if cu_k is None else cu_k
        if not ready:
            q, k, v, out, dout = (with_columns(tensor) for tensor in (q, k, v, out, dout))
            lse, dlse, cu_q, cu_k = (tensor.contiguous() for tensor in (lse, dlse, cu_q, cu_k))
        delta = torch.empty_like(lse)
        tensors = (q, k, v, out, lse, dout, dlse, cu_q, cu_k, step.slopes, step.seed, delta, dq)
        if not relaunch_dq(None, tensors):
            compiled = wrap_triton(_attention_bwd_dq_kernel)[dq_grid](*tensors, *dq_scalars, **dq_constants)
            relaunch_dq.keep(None, tensors, dq_constants, compiled)
        after = (q, k, v, lse, dout, delta, cu_q, cu_k, step.slopes, step.seed, dk, dv)
        if not relaunch_dkdv(None, after):
            compiled = wrap_triton(_attention_bwd_dkdv_kernel)[dkdv_grid](*after, *dkdv_scalars, **dkdv_constants)
            relaunch_dkdv.keep(None, after, dkdv_constants, compiled)

    return launch_backward
