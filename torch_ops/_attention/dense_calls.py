"""What the ops of dense attention check, allocate and count."""

from typing import Any

import torch
from torch import Tensor

from torch_ops._attention.calls import check_heads, lse_dtype
from torch_ops._attention.scores import Scores
from torch_ops._attention.steps import check_steps
from torch_ops._core.checks import (
    check_dense,
    check_device,
    check_float,
    check_like,
    check_scale,
    check_softcap,
    check_window,
    dtype_name,
    refuse,
)
from torch_ops._core.launch import dense_like

HALF_TYPES = torch.float16, torch.bfloat16


def check_batch(op: str, argument: str, tensor: Tensor) -> None:
    check_dense(op, argument, tensor)
    if tensor.dim() != 4:
        refuse(op, argument, "of shape [B, H, S, D]", list(tensor.shape))


def check_dense_attention(
    op: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window_left: int, window_right: int, softcap: float,
    alibi_slopes: Tensor | None, sinks: Tensor | None, dropout_p: float, dropout_seed: Tensor | None,
    compute_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    if compute_dtype is not None:
        _check_downcast(op, q, k, v, compute_dtype)
    check_batch(op, "q", q)
    check_float(op, "q", q)
    for name, tensor in (("k", k), ("v", v)):
        check_batch(op, name, tensor)
        check_like(op, name, tensor, "q", q)
        if tensor.shape[0] != q.shape[0]:
            refuse(op, f"the batch of {name}", f"{q.shape[0]} as that of q is", tensor.shape[0])
    check_heads(op, q, k, v)
    if v.shape[2] != k.shape[2]:
        refuse(op, "v", f"of {k.shape[2]} rows as k is", v.shape[2])
    check_scale(op, scale)
    check_window(op, "window_left", window_left)
    check_window(op, "window_right", window_right)
    check_softcap(op, softcap)
    check_steps(op, q, q.shape[0], alibi_slopes, sinks, dropout_p, dropout_seed, compute_dtype)


def _check_downcast(op: str, q: Tensor, k: Tensor, v: Tensor, compute_dtype: torch.dtype) -> None:
    if compute_dtype not in HALF_TYPES:
        refuse(op, "compute_dtype", "torch.float16, torch.bfloat16 or None", compute_dtype)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_batch(op, name, tensor)
        if tensor.dtype != torch.float32:
            refuse(op, name, "float32 where compute_dtype is given", dtype_name(tensor.dtype))


def check_dense_backward(
    op: str, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> None:
    """`rest` is what `check_dense_attention` takes after v."""
    check_dense_attention(op, q, k, v, *rest)
    for name, tensor in (("out", out), ("dout", dout)):
        check_dense(op, name, tensor)
        check_like(op, name, tensor, "q", q)
        if tensor.shape != q.shape:
            refuse(op, name, f"of shape {list(q.shape)} as q is", list(tensor.shape))
    for name, statistic in (("lse", lse), *([] if dlse is None else [("dlse", dlse)])):
        check_dense(op, name, statistic)
        if statistic.dtype != lse_dtype(q):
            refuse(op, name, dtype_name(lse_dtype(q)), dtype_name(statistic.dtype))
        if statistic.shape != q.shape[:3]:
            refuse(op, name, f"of shape [B, H, S] = {list(q.shape[:3])}", list(statistic.shape))
        check_device(op, name, statistic, "q", q)


def dense_outputs(q: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = q.shape
    return dense_like(q), q.new_empty((batch, heads, rows if return_lse else 0), dtype=lse_dtype(q))


def dense_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return dense_like(q), dense_like(k), dense_like(v)


def dense_flops(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False, window_left: int = -1,
    window_right: int = -1, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """4 D per head and seen pair."""
    batch, heads, length, head_dim = q.shape
    scores = Scores.of(head_dim, scale, causal, window_left, window_right, 0.0)
    return 4 * batch * heads * head_dim * scores.count_dense_pairs(length, k.shape[2])
