"""The launcher of the attention core's kernels in stock Triton, and what launchers of such kernels share.

Plans are as those of `_attention`, which chooses among the paths.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.attention.portable_bwd import _attention_bwd_dkdv_kernel, _attention_bwd_dq_kernel
from csrc_free_ops.attention.portable_fwd import _attention_fwd_kernel
from csrc_free_ops.configs import Gpu, Launch, Row, attention_products, pick, split_head_dim
from torch_ops._checks import dtype_name
from torch_ops._device import INTERPRETED_GPU, gpu
from torch_ops._launches import Relaunch, readable, row_stride, with_columns
from torch_ops._registry import INTERPRET, wrap_triton
from torch_ops._scores import NO_STEP, Scores, StepTensors
from torch_ops.settings import settings


def mean_length(total: int, num_segments: int) -> int | None:
    """Rows per segment where both are plain numbers; None in graphs of dynamic shape, which may not branch on it."""
    if isinstance(total, torch.SymInt) or isinstance(num_segments, torch.SymInt):
        return None
    return total // max(num_segments, 1)


def current_gpu() -> Gpu:
    return INTERPRETED_GPU if INTERPRET else gpu()


def choose(
    kernel: str, q: Tensor, scores: Scores, length: int | None, own_rows: tuple[Row, ...] | None = None,
    precision: str | None = None,
) -> tuple[Launch, str]:  # fmt: skip
    """The launch of `kernel` for this dtype and head dimension, and where it comes from; the user's rows come first."""
    device = current_gpu()
    busy = scores.alibi > 0 or scores.dropout > 0
    if q.dim() == 4:
        # Kernels of a batch hold strides besides.
        is_old = device.backend == "cuda" and int(device.arch) < 90
        has_tail = split_head_dim(q.shape[-1], q.dtype.itemsize)[1] > 0
        busy = busy or scores.softcap > 0 or is_old or ("dkdv" in kernel and has_tail)
    own_rows = settings.rows if own_rows is None else own_rows
    return pick(
        kernel, device, dtype_name(q.dtype), q.dtype.itemsize, q.shape[-1], scores.causal, length, own_rows,
        # Of a sink, too, tall tiles leave no registers.
        scores.masked or scores.has_sinks,
        busy,
        precision or current_products(q),
    )  # fmt: skip


def current_products(q: Tensor) -> str:
    """How PyTorch's setting of now has these multiplied."""
    return attention_products(current_gpu(), q.shape[-1], precision_of(q))


def precision_of(q: Tensor) -> str:
    """tf32 for fp32 products only where PyTorch allows it, by whichever of its settings."""
    return "tf32" if q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def for_each_precision(plan: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    """Of fp32 a plan for either of PyTorch's settings, since launches differ; which one counts is read at each call."""

    @functools.wraps(plan)
    def planning(*args: Any) -> Callable[..., None]:
        if args[0].dtype is not torch.float32:
            return plan(*args, precision="ieee")
        head_dim = args[0].shape[-1]
        plans = {
            setting: plan(*args, precision=attention_products(current_gpu(), head_dim, setting))
            for setting in ("ieee", "tf32")
        }

        def launch(*tensors: Any) -> None:
            plans[precision_of(tensors[0])](*tensors)

        return launch

    return planning


def contiguous_row(tensor: Tensor) -> int:
    return tensor.shape[1] * tensor.shape[2]


def head_strides(*tensors: Tensor) -> tuple[int, tuple[int, ...]]:
    """UNIT, and the head strides in it: where all are multiples of 8, kernels know it and load 16 bytes at a time."""
    strides = [tensor.stride(1) if tensor.stride(2) == 1 else tensor.shape[2] for tensor in tensors]
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    return unit, tuple(stride // unit for stride in strides)


def constants_of(
    q: Tensor, k: Tensor, scores: Scores, launch: Launch, unit: int, steps: int, precision: str
) -> dict[str, Any]:
    main, tail = split_head_dim(q.shape[-1], q.dtype.itemsize, precision)
    return {
        "UNIT": unit, "HEAD_DIM": q.shape[-1], "MAIN": main, "TAIL": tail, "GROUP": q.shape[1] // k.shape[1],
        "HAS_LEFT": scores.left >= 0, "HAS_RIGHT": scores.right >= 0, "STEPS": steps,
        "PRECISION": precision,
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


def slopes_stride(q: Tensor, scores: Scores) -> int:
    """From one sequence's slopes of ALiBi to the next one's."""
    return q.shape[1] if scores.alibi == 2 else 0


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
