"""`vk::window_attn`: attention inside the segments of packed tensors, and its backward.

Vision encoders pack images, frames and windows of any size into one [T, H, D] tensor and attend within each; the
boundaries are `cu_seqlens`, on the device. Kernels: `csrc_free_ops.attention`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ops._attention import plan_backward, plan_forward
from torch_ops._attention_calls import (
    attention_flops,
    attention_gradients,
    attention_outputs,
    check_attention,
    check_attention_backward,
    check_values,
)
from torch_ops._attention_cpu import attention_backward_cpu, attention_forward_cpu
from torch_ops._checks import refuse
from torch_ops._registry import remembered, runs_kernels, vk_op
from torch_ops._scores import Scores


def _window_attn_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True, return_lse: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_attention("window_attn", q, k, v, cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap)
    return attention_outputs(q, return_lse)


def _window_attn_flops(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    return attention_flops(q, k, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right)


@remembered
def _prepare_window_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None,
    scale: float | None, causal: bool, window_left: int, window_right: int, softcap: float, return_lse: bool,
) -> Callable[..., None]:  # fmt: skip
    check_attention("window_attn", q, k, v, cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap)
    scores = Scores.of(q.shape[2], scale, causal, window_left, window_right, softcap)
    if runs_kernels(q):
        return plan_forward(q, k, v, cu_seqlens, cu_seqlens_k, scores, return_lse)
    return partial(attention_forward_cpu, scores)


@vk_op("window_attn", fake=_window_attn_fake, autocast=True, flops=_window_attn_flops)
def window_attn_op(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True, return_lse: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    launch = _prepare_window_attn(
        q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap, return_lse
    )
    check_values("window_attn", q, k, cu_seqlens, cu_seqlens_k)
    out, lse = attention_outputs(q, return_lse)
    launch(q, k, v, cu_seqlens, cu_seqlens_k, out, lse)
    return out, lse


def _window_attn_backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_attention_backward(
        "window_attn_backward", dout, dlse, q, k, v, out, lse,
        cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap,
    )  # fmt: skip
    return attention_gradients(q, k, v)


def _window_attn_backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> int:
    """Five products where the forward has two."""
    return _window_attn_flops(q, k, v, *rest) * 5 // 2


@remembered
def _prepare_window_attn_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens: Tensor, cu_seqlens_k: Tensor | None,
    scale: float | None, causal: bool, window_left: int, window_right: int, softcap: float, deterministic: bool,
) -> Callable[..., None]:  # fmt: skip
    check_attention_backward(
        "window_attn_backward", dout, dlse, q, k, v, out, lse,
        cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap,
    )  # fmt: skip
    scores = Scores.of(q.shape[2], scale, causal, window_left, window_right, softcap)
    if runs_kernels(q):
        return plan_backward(dout, dlse, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, scores, deterministic)
    return partial(attention_backward_cpu, scores)


@vk_op("window_attn_backward", fake=_window_attn_backward_fake, flops=_window_attn_backward_flops)
def window_attn_backward_op(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    launch = _prepare_window_attn_backward(
        dout, dlse, q, k, v, out, lse, cu_seqlens, cu_seqlens_k,
        scale, causal, window_left, window_right, softcap, deterministic,
    )  # fmt: skip
    check_values("window_attn_backward", q, k, cu_seqlens, cu_seqlens_k)
    dq, dk, dv = attention_gradients(q, k, v)
    launch(dout, dlse, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, dq, dk, dv)
    return dq, dk, dv


window_attn_backward_op.refuse_autograd()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, cu_seqlens_k, *options, _ = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, cu_seqlens_k)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, cu_seqlens, cu_seqlens_k = ctx.saved_tensors
    nothing = (None,) * (3 + len(ctx.options))
    if dout is None and dlse is None:
        return None, None, None, *nothing
    q, _, _, out, lse = tensors
    if dout is None:
        dout = out.new_zeros(()).expand_as(out)
    if lse.shape[1] != q.shape[0]:
        # Not made: captured without gradients, in an exported program say, and run with them.
        with torch._C._DisableAutocast():
            tensors[4] = window_attn_op(*tensors[:3], cu_seqlens, cu_seqlens_k, *ctx.options)[1]
        dlse = None
    return *window_attn_backward_op(dout, dlse, *tensors, cu_seqlens, cu_seqlens_k, *ctx.options), *nothing


window_attn_op.register_autograd(_backward, setup_context=_setup_context)


def window_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v within each segment of packed tensors.

    Query row i of a segment with Lq queries and Lk keys stands at key position i + Lk - Lq (aligned bottom-right).
    A row that sees no key gives out 0 and lse -inf; so do rows before `cu_seqlens[0]` and past `cu_seqlens[-1]`.
    Neither passes on any gradient, as long as what comes in for it is finite.

    Args:
        q: [Tq, H, D] in fp16, bf16 or fp32; D a multiple of 8 up to 256. Any strides; columns that are not contiguous
            are copied. On the CPU also fp64.
        k, v: [Tk, Hk, D], dtype and device of q, H a multiple of Hk: each key head serves H / Hk query heads.
        cu_seqlens: int32 [n + 1] on q's device, never falling: segment s is rows cu_seqlens[s] up to
            cu_seqlens[s + 1]. Empty segments are fine. Values are never copied to the host; out-of-range ones are
            clamped, and refused by name under `torch_ops.settings(checked=True)`.
        cu_seqlens_k: the keys' own boundaries, of the same shape; those of the queries where None.
        scale: what multiplies q k^T, a positive number (no tensor: it gets no gradient); 1 / sqrt(D) where None.
        causal: whether a query sees only keys up to its own position.
        window_left, window_right: how many keys before and after its position a query sees; -1 is all.
        softcap: c > 0 replaces a score s by c tanh(s / c).
        deterministic: False lets the backward add dq up in any order. Hopper's own kernel makes use of it where that
            is faster; else the bits are the same either way.
        return_lse: whether to return (out, lse). Without it, and where no gradient may be wanted, lse is not made, and
            the call needs no memory but out's. `torch.ops.vk.window_attn` always returns both, lse [H, 0] where its
            own return_lse is False; a backward after all then makes it anew.

    Returns:
        out [Tq, H, D] in q's dtype; with return_lse also lse [H, Tq], fp32 (fp64 for fp64), natural logarithm of the
        sum of exp(score), differentiable.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    Products accumulate in fp32; fp32 inputs use tf32 only where `torch.backends.cuda.matmul` allows it. Forward and
    backward give the same bits for the same inputs, the backward unless told otherwise. FlashAttention-2, arXiv
    2307.08691.
    """
    for name, number in (("scale", scale), ("softcap", softcap)):
        if isinstance(number, Tensor):
            refuse("window_attn", name, "a number, since a tensor would get no gradient", "a tensor")
    # The backward takes lse; where there will be none, it need not lie in memory.
    differentiable = torch.is_grad_enabled() and any(not isinstance(x, Tensor) or x.requires_grad for x in (q, k, v))
    out, lse = window_attn_op(
        q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap, deterministic,
        return_lse or differentiable,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["window_attn"]
