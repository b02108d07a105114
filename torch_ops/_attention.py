"""The launcher of the attention core: from tensors and options to the kernels' arguments.

Ops that stand on the core call `plan_forward` and `plan_backward` by bare name. A plan depends on metadata alone, never
on values on the device; it returns the function that launches, which writes into tensors that the op allocated.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.attention.portable_bwd import _attention_bwd_dkdv_kernel, _attention_bwd_dq_kernel
from csrc_free_ops.attention.portable_fwd import _attention_fwd_kernel
from csrc_free_ops.configs import Gpu, Launch, pick, split_head_dim
from torch_ops._attention_hopper import addressable, plan_backward_hopper, plan_forward_hopper, refusal
from torch_ops._checks import dtype_name
from torch_ops._device import gpu
from torch_ops._registry import INTERPRET, Relaunch, is_eager, opaque_launch, remembered, wrap_triton
from torch_ops._scores import Scores
from torch_ops.settings import settings

# Rows per segment, on average, from which the Hopper path is faster.
SHORT = 128
INTERPRETED_GPU = Gpu("interpreter", "interpreter", 0, 2**30)


def mean_length(total: int, num_segments: int) -> int | None:
    """Rows per segment where both are plain numbers; None in graphs of dynamic shape, which may not branch on it."""
    if isinstance(total, torch.SymInt) or isinstance(num_segments, torch.SymInt):
        return None
    return total // max(num_segments, 1)


def choose(kernel: str, q: Tensor, scores: Scores, length: int | None) -> tuple[Launch, str]:
    """The launch of `kernel` for this dtype and head dimension, and where it comes from."""
    device = INTERPRETED_GPU if INTERPRET else gpu()
    dtype = dtype_name(q.dtype)
    return pick(
        kernel, device, dtype, q.dtype.itemsize, q.shape[2], scores.causal, length, settings.rows, scores.masked
    )  # fmt: skip


def _precision(q: Tensor) -> str:
    """tf32 for fp32 products only where PyTorch allows it, by whichever of its settings."""
    return "tf32" if q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _addressable(tensor: Tensor) -> Tensor:
    """Kernels read rows of contiguous columns; a layout without them (a transposed or expanded one) is copied."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _ready(*tensors: Tensor) -> bool:
    """Whether kernels can read all of them as they are."""
    return all(tensor.stride(2) == 1 for tensor in tensors)


def _contiguous_row(tensor: Tensor) -> int:
    return tensor.shape[1] * tensor.shape[2]


def _row_stride(tensor: Tensor) -> int:
    return tensor.stride(0) if tensor.stride(2) == 1 else _contiguous_row(tensor)


def _head_strides(*tensors: Tensor) -> tuple[int, tuple[int, ...]]:
    """UNIT, and the head strides in it: where all are multiples of 8, kernels know it and load 16 bytes at a time."""
    strides = [tensor.stride(1) if tensor.stride(2) == 1 else tensor.shape[2] for tensor in tensors]
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    return unit, tuple(stride // unit for stride in strides)


def _constants(q: Tensor, k: Tensor, scores: Scores, launch: Launch, unit: int) -> dict[str, Any]:
    main, tail = split_head_dim(q.shape[2], q.dtype.itemsize)
    return {
        "UNIT": unit, "HEAD_DIM": q.shape[2], "MAIN": main, "TAIL": tail, "GROUP": q.shape[1] // k.shape[1],
        "HAS_LEFT": scores.left >= 0, "HAS_RIGHT": scores.right >= 0, "SOFTCAP": scores.softcap > 0,
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


def why_portable(softcap: float, length: int | None, backward: bool = False, **tensors: Tensor) -> str:
    """Why a call with these tensors takes the portable path, or nothing where it takes the Hopper path."""
    if INTERPRET:
        return "TRITON_INTERPRET=1"
    if settings.path == "portable":
        return "settings.path is 'portable'"
    if backward and settings.path == "auto":
        return "the Hopper backward has not been measured yet; settings.path 'hopper' takes it"
    reason = refusal(gpu(), softcap, **tensors)
    if not reason and settings.path == "auto" and length is not None and length < SHORT:
        reason = f"segments of {length} rows on average; the Hopper path is faster from {SHORT} on"
    return reason


def _ahead_of_time() -> bool:
    """Whether AOTInductor makes a package, which runs without Python and so without opaque launches."""
    if "torch._inductor.virtualized" not in sys.modules:
        return False
    return bool(sys.modules["torch._inductor.virtualized"].V.aot_compilation)


def plan_forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scores: Scores) -> Callable[..., None]:
    """launch(q, k, v, cu_q, cu_k, out, lse) fills out [Tq, H, D] and lse [H, Tq], both contiguous."""
    num_segments = cu_q.shape[0] - 1
    length = mean_length(q.shape[0], num_segments)
    if not is_eager():
        # Which path is faster shows at run time only: the choice moves there with the launch.
        if why_portable(scores.softcap, None, q=q, k=k, v=v) or _ahead_of_time():
            return _plan_forward_portable(q, k, v, cu_q, cu_k, scores)
        return partial(_launch_forward_opaque, scale=scores.scale, left=scores.left, right=scores.right)
    if why_portable(scores.softcap, length, q=q, k=k, v=v):
        return _plan_forward_portable(q, k, v, cu_q, cu_k, scores)
    chosen, _ = choose("attention_fwd_hopper", q, scores, length)
    hopper = plan_forward_hopper(q, k, num_segments, chosen, scores)
    portable: list[Callable[..., None]] = []

    def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, out: Tensor, lse: Tensor) -> None:
        if addressable(q, k, v):
            hopper(q, k, v, cu_q, cu_k, out, lse)
            return
        if not portable:
            portable.append(_plan_forward_portable(q, k, v, cu_q, cu_k, scores))
        portable[0](q, k, v, cu_q, cu_k, out, lse)

    return launch_forward


@opaque_launch("_attention_fwd", writes=("out", "lse"))
def _launch_forward_opaque(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, out: Tensor, lse: Tensor,
    scale: float, left: int, right: int,
) -> None:  # fmt: skip
    _prepare_forward(q, k, v, cu_q, cu_k, scale, left, right)(q, k, v, cu_q, cu_k, out, lse)


@remembered
def _prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, left: int, right: int
) -> Callable[..., None]:
    return plan_forward(q, k, v, cu_q, cu_k, Scores(scale, left, right))


def _plan_forward_portable(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scores: Scores
) -> Callable[..., None]:
    total_q, num_heads, _ = q.shape
    num_segments = cu_q.shape[0] - 1
    launch, _ = choose("attention_fwd", q, scores, mean_length(total_q, num_segments))
    unit, strides = _head_strides(q, k, v)
    scalars = (*strides, total_q, k.shape[0], num_segments, scores.scale, scores.softcap, *scores.bounds())
    constants = {
        "STRIDE_QT": _row_stride(q), "STRIDE_KT": _row_stride(k), "STRIDE_VT": _row_stride(v),
        "STRIDE_OT": _contiguous_row(q), **_constants(q, k, scores, launch, unit),
    }  # fmt: skip
    ready = _ready(q, k, v) and cu_q.is_contiguous() and cu_k.is_contiguous()
    # One tile more per segment than its rows fill, and those of the rows outside all segments (tiles/segments.py).
    grid = (total_q // launch.block_m + num_segments + 2, num_heads)
    relaunch = Relaunch(grid, scalars)

    def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, out: Tensor, lse: Tensor) -> None:
        if not ready:
            q, k, v = _addressable(q), _addressable(k), _addressable(v)
            cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
        tensors = (q, k, v, out, lse, cu_q, cu_k)
        precision = _precision(q)
        if not relaunch(precision, tensors):
            options = {"PRECISION": precision, **constants}
            compiled = wrap_triton(_attention_fwd_kernel)[grid](*tensors, *scalars, **options)
            relaunch.keep(precision, tensors, options, compiled)

    return launch_forward


def plan_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    scores: Scores,
) -> Callable[..., None]:
    """launch(dout, dlse, q, k, v, out, lse, cu_q, cu_k, dq, dk, dv) fills the gradients, contiguous.

    out and lse come from anywhere, so that a context-parallel caller can pass merged ones.
    """
    num_segments = cu_q.shape[0] - 1
    length = mean_length(q.shape[0], num_segments)
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
    if not is_eager():
        if why_portable(scores.softcap, None, True, **tensors) or _ahead_of_time():
            return _plan_backward_portable(dout, dlse, q, k, v, out, lse, cu_q, cu_k, scores)
        return partial(_launch_backward_opaque, scale=scores.scale, left=scores.left, right=scores.right)
    if why_portable(scores.softcap, length, True, **tensors):
        return _plan_backward_portable(dout, dlse, q, k, v, out, lse, cu_q, cu_k, scores)
    dq_launch, _ = choose("attention_bwd_dq_hopper", q, scores, length)
    dkdv_launch, _ = choose("attention_bwd_dkdv_hopper", q, scores, mean_length(k.shape[0], num_segments))
    hopper = plan_backward_hopper(q, k, num_segments, (dq_launch, dkdv_launch), scores, dlse is not None)
    portable: list[Callable[..., None]] = []

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Tensor, cu_k: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        if addressable(q, k, v, out, dout):
            hopper(dout, dlse, q, k, v, out, lse, cu_q, cu_k, dq, dk, dv)
            return
        if not portable:
            portable.append(_plan_backward_portable(dout, dlse, q, k, v, out, lse, cu_q, cu_k, scores))
        portable[0](dout, dlse, q, k, v, out, lse, cu_q, cu_k, dq, dk, dv)

    return launch_backward


@opaque_launch("_attention_bwd", writes=("dq", "dk", "dv"))
def _launch_backward_opaque(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor, cu_k: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, scale: float, left: int, right: int,
) -> None:  # fmt: skip
    plan = _prepare_backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, scale, left, right)
    plan(dout, dlse, q, k, v, out, lse, cu_q, cu_k, dq, dk, dv)


@remembered
def _prepare_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor, cu_k: Tensor, scale: float, left: int, right: int,
) -> Callable[..., None]:  # fmt: skip
    return plan_backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, Scores(scale, left, right))


def _plan_backward_portable(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor, cu_k: Tensor, scores: Scores,
) -> Callable[..., None]:  # fmt: skip
    total_q, num_heads, _ = q.shape
    total_k, num_k_heads, _ = k.shape
    num_segments = cu_q.shape[0] - 1
    unit, (q_head, k_head, v_head, out_head, dout_head) = _head_strides(q, k, v, out, dout)
    sizes = (total_q, total_k, num_segments, scores.scale, scores.softcap, *scores.bounds())
    strides = {
        "STRIDE_QT": _row_stride(q), "STRIDE_KT": _row_stride(k), "STRIDE_VT": _row_stride(v),
        "STRIDE_DOT": _row_stride(dout),
    }  # fmt: skip

    dq_launch, _ = choose("attention_bwd_dq", q, scores, mean_length(total_q, num_segments))
    dq_scalars = (q_head, k_head, v_head, out_head, dout_head, *sizes)
    dq_constants = {
        **strides, "STRIDE_OT": _row_stride(out), "STRIDE_DQT": _contiguous_row(q), "HAS_DLSE": dlse is not None,
        **_constants(q, k, scores, dq_launch, unit),
    }  # fmt: skip
    dq_grid = (total_q // dq_launch.block_m + num_segments + 2, num_heads)

    dkdv_launch, _ = choose("attention_bwd_dkdv", q, scores, mean_length(total_k, num_segments))
    dkdv_scalars = (q_head, k_head, v_head, dout_head, *sizes)
    dkdv_constants = {**strides, "STRIDE_DKT": _contiguous_row(k), **_constants(q, k, scores, dkdv_launch, unit)}
    dkdv_grid = (total_k // dkdv_launch.block_n + num_segments + 2, num_k_heads)

    relaunch_dq = Relaunch(dq_grid, dq_scalars)
    relaunch_dkdv = Relaunch(dkdv_grid, dkdv_scalars)
    vectors = (lse, lse if dlse is None else dlse, cu_q, cu_k)
    ready = _ready(q, k, v, out, dout) and all(tensor.is_contiguous() for tensor in vectors)

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Tensor, cu_k: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        dlse = lse if dlse is None else dlse
        if not ready:
            q, k, v, out, dout = (_addressable(tensor) for tensor in (q, k, v, out, dout))
            lse, dlse, cu_q, cu_k = (tensor.contiguous() for tensor in (lse, dlse, cu_q, cu_k))
        delta = torch.empty_like(lse)
        precision = _precision(q)
        tensors = (q, k, v, out, lse, dout, dlse, cu_q, cu_k, delta, dq)
        if not relaunch_dq(precision, tensors):
            options = {"PRECISION": precision, **dq_constants}
            compiled = wrap_triton(_attention_bwd_dq_kernel)[dq_grid](*tensors, *dq_scalars, **options)
            relaunch_dq.keep(precision, tensors, options, compiled)
        after = (q, k, v, lse, dout, delta, cu_q, cu_k, dk, dv)
        if not relaunch_dkdv(precision, after):
            options = {"PRECISION": precision, **dkdv_constants}
            compiled = wrap_triton(_attention_bwd_dkdv_kernel)[dkdv_grid](*after, *dkdv_scalars, **options)
            relaunch_dkdv.keep(precision, after, options, compiled)

    return launch_backward
