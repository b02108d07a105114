"""The launcher of the attention core's kernels for short segments, windows above all.

`short_launch` says from metadata alone whether a call takes them; plans are as those of `plan`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.attention.portable.short_bwd import (
    _attention_bwd_dkdv_rest_kernel,
    _attention_bwd_dq_rest_kernel,
    _attention_bwd_short_kernel,
)
from csrc_free_ops.attention.portable.short_fwd import _attention_fwd_rest_kernel, _attention_fwd_short_kernel
from csrc_free_ops.configs.attention import split_head_dim
from csrc_free_ops.configs.rows import Launch
from torch_ops._attention.choose import choose
from torch_ops._attention.scores import NO_STEP, Scores, StepTensors
from torch_ops._core.launch import (
    Relaunch,
    can_overlap,
    contiguous_row,
    head_strides,
    readable,
    row_stride,
    with_columns,
)
from torch_ops._core.registry import wrap_triton

# Programs of the kernels that look for longer segments: two on each multiprocessor of an H200.
REST_PROGRAMS = 264
# Wider heads do not fit the registers, nor does fp32.
WIDEST = 128


def short_launch(kernel: str, q: Tensor, k: Tensor, cu_k: Tensor | None, scores: Scores, length: int | None) -> Any:
    """The launch of `kernel` if segments of `length` rows on average should take it, and where it comes from; or None.

    Whether single segments are longer is known on the device alone; those are right too, and slower.
    """
    own_boundaries = cu_k is not None or q.shape[1] != k.shape[1]
    steps = scores.alibi or scores.dropout or scores.has_sinks
    if length is None or own_boundaries or q.dtype.itemsize != 2 or q.shape[2] > WIDEST or q.shape[0] == 0 or steps:
        return None
    launch, source = choose(kernel, q, scores, length)
    return (launch, source) if length <= launch.block_m else None


def _constants(q: Tensor, num_segments: int, scores: Scores, unit: int) -> dict[str, Any]:
    main, tail = split_head_dim(q.shape[2], q.dtype.itemsize)
    return {
        "UNIT": unit, "HEAD_DIM": q.shape[2], "MAIN": main, "TAIL": tail,
        "HAS_LEFT": scores.left >= 0, "HAS_RIGHT": scores.right >= 0, "STEPS": scores.steps,
        "PRECISION": "ieee", "NUM_HEADS": q.shape[1], "OVERLAPS": can_overlap() and num_segments > 0,
    }  # fmt: skip


def _rest(short: Launch, launch: Launch, shared: dict[str, Any]) -> dict[str, Any]:
    """Its options beside those of `shared`."""
    early = {"launch_pdl": True} if shared["OVERLAPS"] else {}
    return {
        "SHORT": short.block_m, "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps, "num_stages": launch.num_stages, **early,
    }  # fmt: skip


def _programs(total: int, num_segments: int, num_heads: int, rows: int) -> int:
    return min(REST_PROGRAMS, (total // rows + num_segments + 2) * num_heads)


def plan_forward_short(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, scores: Scores, launch: Launch, has_lse: bool
) -> Callable[..., None]:
    total, num_heads, _ = q.shape
    num_segments = cu_q.shape[0] - 1
    unit, strides = head_strides(q, k, v)
    scalars = (*strides, total, num_segments, scores.scale, scores.softcap, *scores.bounds())
    shared = {
        "STRIDE_QT": row_stride(q), "STRIDE_KT": row_stride(k), "STRIDE_VT": row_stride(v),
        "STRIDE_OT": contiguous_row(q), "HAS_LSE": has_lse, **_constants(q, num_segments, scores, unit),
    }  # fmt: skip
    constants = {**shared, "BLOCK": launch.block_m, "num_warps": launch.num_warps, "num_stages": launch.num_stages}
    rest, _ = choose("attention_fwd_rest", q, scores, None)
    rest_constants = {**shared, **_rest(launch, rest, shared)}
    grid = (num_segments * num_heads,)
    rest_grid = (_programs(total, num_segments, num_heads, rest.block_m),)
    relaunch = Relaunch((*grid, 1), scalars)
    relaunch_rest = Relaunch((*rest_grid, 1), scalars)
    ready = readable(q, k, v) and cu_q.is_contiguous()

    def launch_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, out: Tensor, lse: Tensor,
        step: StepTensors = NO_STEP,
    ) -> None:  # fmt: skip
        if not ready:
            q, k, v, cu_q = with_columns(q), with_columns(k), with_columns(v), cu_q.contiguous()
        tensors = (q, k, v, out, lse, cu_q)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_attention_fwd_short_kernel)[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)
        if not relaunch_rest(None, tensors):
            compiled = wrap_triton(_attention_fwd_rest_kernel)[rest_grid](*tensors, *scalars, **rest_constants)
            relaunch_rest.keep(None, tensors, rest_constants, compiled)

    return launch_forward


def plan_backward_short(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor,
    scores: Scores, launch: Launch,
) -> Callable[..., None]:  # fmt: skip
    total, num_heads, _ = q.shape
    num_segments = cu_q.shape[0] - 1
    unit, strides = head_strides(q, k, v, out, dout)
    sizes = (total, num_segments, scores.scale, scores.softcap, *scores.bounds())
    shared = {
        "STRIDE_QT": row_stride(q), "STRIDE_KT": row_stride(k), "STRIDE_VT": row_stride(v),
        "STRIDE_DOT": row_stride(dout), **_constants(q, num_segments, scores, unit),
    }  # fmt: skip
    of_queries = {
        **shared, "STRIDE_OT": row_stride(out), "STRIDE_DQT": contiguous_row(q), "HAS_DLSE": dlse is not None
    }  # fmt: skip
    constants = {**of_queries, "BLOCK": launch.block_m, "num_warps": launch.num_warps, "num_stages": launch.num_stages}
    dq_rest, _ = choose("attention_bwd_dq_rest", q, scores, None)
    dq_constants = {**of_queries, **_rest(launch, dq_rest, shared)}
    dkdv_rest, _ = choose("attention_bwd_dkdv_rest", q, scores, None)
    dkdv_constants = {**shared, "STRIDE_DKT": contiguous_row(k), **_rest(launch, dkdv_rest, shared)}
    grid = (num_segments * num_heads,)
    dq_grid = (_programs(total, num_segments, num_heads, dq_rest.block_m),)
    dkdv_grid = (_programs(total, num_segments, num_heads, dkdv_rest.block_n),)
    scalars = (*strides, *sizes)
    q_head, k_head, v_head, _, dout_head = strides
    dkdv_scalars = (q_head, k_head, v_head, dout_head, *sizes)
    relaunch = Relaunch((*grid, 1), scalars)
    relaunch_dq = Relaunch((*dq_grid, 1), scalars)
    relaunch_dkdv = Relaunch((*dkdv_grid, 1), dkdv_scalars)
    vectors = (lse, lse if dlse is None else dlse, cu_q)
    ready = readable(q, k, v, out, dout) and all(tensor.is_contiguous() for tensor in vectors)

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Tensor, cu_k: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor, step: StepTensors = NO_STEP,
    ) -> None:  # fmt: skip
        dlse = lse if dlse is None else dlse
        if not ready:
            q, k, v, out, dout = (with_columns(tensor) for tensor in (q, k, v, out, dout))
            lse, dlse, cu_q = (tensor.contiguous() for tensor in (lse, dlse, cu_q))
        delta = torch.empty_like(lse)
        tensors = (q, k, v, out, lse, dout, dlse, cu_q, dq, dk, dv)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_attention_bwd_short_kernel)[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)
        of_dq = (q, k, v, out, lse, dout, dlse, cu_q, delta, dq)
        if not relaunch_dq(None, of_dq):
            compiled = wrap_triton(_attention_bwd_dq_rest_kernel)[dq_grid](*of_dq, *scalars, **dq_constants)
            relaunch_dq.keep(None, of_dq, dq_constants, compiled)
        of_dkdv = (q, k, v, lse, dout, delta, cu_q, dk, dv)
        if not relaunch_dkdv(None, of_dkdv):
            compiled = wrap_triton(_attention_bwd_dkdv_rest_kernel)[dkdv_grid](
                *of_dkdv, *dkdv_scalars, **dkdv_constants
            )
            relaunch_dkdv.keep(None, of_dkdv, dkdv_constants, compiled)

    return launch_backward
