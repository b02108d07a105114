"""The launcher of the attention core: from tensors and options to the kernels' arguments.

Ops that stand on the core call `plan_forward` and `plan_backward` by bare name. A plan depends on metadata alone, never
on values on the device; it returns the function that launches, which writes into tensors that the op allocated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from csrc_free_ops.attention.portable_bwd import _attention_bwd_dkdv_kernel, _attention_bwd_dq_kernel
from csrc_free_ops.attention.portable_fwd import _attention_fwd_kernel
from csrc_free_ops.configs import Gpu, Launch, pick, split_head_dim
from torch_ops._checks import dtype_name
from torch_ops._device import gpu
from torch_ops._registry import INTERPRET, Relaunch, wrap_triton
from torch_ops.settings import settings

# Kernels add and subtract window bounds in 32 bits; lengths stay far below this.
UNBOUNDED = 2**30
INTERPRETED_GPU = Gpu("interpreter", "interpreter", 0, 2**30)


@dataclass(frozen=True)
class Scores:
    """What stands between q k^T and softmax; `left` and `right` bound the keys around a query, -1 is unbounded."""

    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0

    @staticmethod
    def of(head_dim: int, scale: float | None, causal: bool, left: int, right: int, softcap: float) -> "Scores":
        """From an op's arguments; causal order is a right bound of 0."""
        scale = head_dim**-0.5 if scale is None else scale
        return Scores(scale, left, 0 if causal else right, softcap)

    @property
    def causal(self) -> bool:
        return self.right == 0 and self.left < 0

    def bounds(self) -> tuple[int, int]:
        left = UNBOUNDED if self.left < 0 else min(self.left, UNBOUNDED)
        right = UNBOUNDED if self.right < 0 else min(self.right, UNBOUNDED)
        return left, right

    def count_pairs(self, cu_q: Tensor, cu_k: Tensor | None, total_q: int, total_k: int) -> int:
        """Query-key pairs that are seen; all pairs, an upper bound, where the lengths are fake."""
        if isinstance(cu_q, FakeTensor) or cu_q.is_meta:
            return total_q * total_k
        q_lengths = _lengths(cu_q, total_q)
        k_lengths = q_lengths if cu_k is None else _lengths(cu_k, total_k)
        left, right = self.bounds()
        pairs = 0
        for q_length, k_length in zip(q_lengths.tolist(), k_lengths.tolist(), strict=True):
            position = np.arange(q_length) + (k_length - q_length)
            low, high = np.maximum(position - left, 0), np.minimum(position + right, k_length - 1)
            pairs += int(np.maximum(high - low + 1, 0).sum())
        return pairs


def _lengths(cu: Tensor, total: int) -> np.ndarray:
    """Rows of each segment, clamped as the kernels clamp them."""
    return np.maximum(np.diff(cu.cpu().numpy().clip(0, total)), 0)


def mean_length(total: int, num_segments: int) -> int | None:
    """Rows per segment where both are plain numbers; None in graphs of dynamic shape, which may not branch on it."""
    if isinstance(total, torch.SymInt) or isinstance(num_segments, torch.SymInt):
        return None
    return total // max(num_segments, 1)


def choose(kernel: str, q: Tensor, causal: bool, length: int | None) -> tuple[Launch, str]:
    """The launch of `kernel` for this dtype and head dimension, and where it comes from."""
    device = INTERPRETED_GPU if INTERPRET else gpu()
    return pick(kernel, device, dtype_name(q.dtype), q.dtype.itemsize, q.shape[2], causal, length, settings.rows)


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


def plan_forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scores: Scores) -> Callable[..., None]:
    """launch(q, k, v, cu_q, cu_k, out, lse) fills out [Tq, H, D] and lse [H, Tq], both contiguous."""
    total_q, num_heads, _ = q.shape
    num_segments = cu_q.shape[0] - 1
    launch, _ = choose("attention_fwd", q, scores.causal, mean_length(total_q, num_segments))
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
    total_q, num_heads, _ = q.shape
    total_k, num_k_heads, _ = k.shape
    num_segments = cu_q.shape[0] - 1
    unit, (q_head, k_head, v_head, out_head, dout_head) = _head_strides(q, k, v, out, dout)
    sizes = (total_q, total_k, num_segments, scores.scale, scores.softcap, *scores.bounds())
    strides = {
        "STRIDE_QT": _row_stride(q), "STRIDE_KT": _row_stride(k), "STRIDE_VT": _row_stride(v),
        "STRIDE_DOT": _row_stride(dout),
    }  # fmt: skip

    dq_launch, _ = choose("attention_bwd_dq", q, scores.causal, mean_length(total_q, num_segments))
    dq_scalars = (q_head, k_head, v_head, out_head, dout_head, *sizes)
    dq_constants = {
        **strides, "STRIDE_OT": _row_stride(out), "STRIDE_DQT": _contiguous_row(q), "HAS_DLSE": dlse is not None,
        **_constants(q, k, scores, dq_launch, unit),
    }  # fmt: skip
    dq_grid = (total_q // dq_launch.block_m + num_segments + 2, num_heads)

    dkdv_launch, _ = choose("attention_bwd_dkdv", q, scores.causal, mean_length(total_k, num_segments))
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
