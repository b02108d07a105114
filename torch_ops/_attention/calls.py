"""What the ops of packed attention check, allocate and count alike."""

from typing import Any

import torch
from torch import Tensor

from torch_ops._attention.scores import Scores
from torch_ops._core.checks import (
    check_cu_seqlens,
    check_cu_seqlens_values,
    check_dense,
    check_device,
    check_float,
    check_head_dim,
    check_like,
    check_num_heads,
    check_packed,
    check_scale,
    check_softcap,
    check_window,
    dtype_name,
    refuse,
)
from torch_ops._core.launch import contiguous_like
from torch_ops._core.registry import is_eager
from torch_ops.settings import settings


def check_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Heads, the second dimension of each, and head dimensions, the last."""
    check_num_heads(op, "q", q.shape[1])
    check_head_dim(op, "q", q.shape[-1])
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[-1] != q.shape[-1]:
            refuse(op, f"the head dimension of {name}", f"{q.shape[-1]} as that of q is", tensor.shape[-1])
    if v.shape[:2] != k.shape[:2]:
        refuse(op, "v", f"of shape {list(k.shape)} as k is", list(v.shape))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        refuse(op, "the number of heads of k", f"a divisor of the {q.shape[1]} heads of q", k.shape[1])


def check_attention(
    op: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None,
    scale: float | None, window_left: int, window_right: int, softcap: float,
) -> None:  # fmt: skip
    check_packed(op, "q", q)
    check_float(op, "q", q)
    for name, tensor in (("k", k), ("v", v)):
        check_packed(op, name, tensor)
        check_like(op, name, tensor, "q", q)
    check_heads(op, q, k, v)
    check_cu_seqlens(op, "cu_seqlens", cu_seqlens, "q", q)
    if cu_seqlens_k is None:
        if k.shape[0] != q.shape[0]:
            refuse(op, "k", f"of {q.shape[0]} rows as q is, unless cu_seqlens_k is given", k.shape[0])
    else:
        check_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k, "q", q)
        if cu_seqlens_k.shape != cu_seqlens.shape:
            refuse(op, "cu_seqlens_k", f"of shape {list(cu_seqlens.shape)} as cu_seqlens is", list(cu_seqlens_k.shape))
    check_scale(op, scale)
    check_window(op, "window_left", window_left)
    check_window(op, "window_right", window_right)
    check_softcap(op, softcap)


def check_values(op: str, q: Tensor, k: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None) -> None:
    if settings.checked and is_eager():
        check_cu_seqlens_values(op, "cu_seqlens", cu_seqlens, q.shape[0])
        if cu_seqlens_k is not None:
            check_cu_seqlens_values(op, "cu_seqlens_k", cu_seqlens_k, k.shape[0])


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def attention_outputs(q: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    rows = q.shape[0] if return_lse else 0
    return contiguous_like(q), q.new_empty((q.shape[1], rows), dtype=lse_dtype(q))


def attention_flops(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, scale: float | None, causal: bool,
    window_left: int, window_right: int,
) -> int:  # fmt: skip
    """4 D per head and seen pair; counts a single segment, the upper bound, where cu_seqlens is fake."""
    scores = Scores.of(q.shape[2], scale, causal, window_left, window_right, 0.0)
    return 4 * q.shape[1] * q.shape[2] * scores.count_pairs(cu_seqlens, cu_seqlens_k, q.shape[0], k.shape[0])


def check_attention_backward(
    op: str, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> None:
    """`rest` is what `check_attention` takes after v."""
    check_attention(op, q, k, v, *rest)
    for name, tensor in (("out", out), ("dout", dout)):
        check_dense(op, name, tensor)
        check_like(op, name, tensor, "q", q)
        if tensor.shape != q.shape:
            refuse(op, name, f"of shape {list(q.shape)} as q is", list(tensor.shape))
    for name, statistic in (("lse", lse), *([] if dlse is None else [("dlse", dlse)])):
        check_dense(op, name, statistic)
        if statistic.dtype != lse_dtype(q):
            refuse(op, name, dtype_name(lse_dtype(q)), dtype_name(statistic.dtype))
        if statistic.shape != (q.shape[1], q.shape[0]):
            refuse(op, name, f"of shape [H, T] = {[q.shape[1], q.shape[0]]}", list(statistic.shape))
        check_device(op, name, statistic, "q", q)


def attention_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return contiguous_like(q), contiguous_like(k), contiguous_like(v)
