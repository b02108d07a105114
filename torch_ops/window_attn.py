"""`vk::window_attn`: attention inside the segments of packed tensors, and its backward.

Vision encoders pack images, frames and windows of any size into one [T, H, D] tensor and attend within each; the
boundaries are `cu_seqlens`, on the device. Kernels: `csrc_free_ops.attention`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ops._attention.calls import (
    attention_flops,
    attention_gradients,
    attention_outputs,
    check_attention,
    check_attention_backward,
    check_values,
)
from torch_ops._attention.cpu import attention_backward_cpu, attention_forward_cpu
from torch_ops._attention.plan import plan_backward, plan_forward
from torch_ops._attention.scores import Scores, StepTensors
from torch_ops._attention.steps import check_steps, refuse_slopes_gradient, seed_of, sinks_gradient
from torch_ops._core.checks import check_number
from torch_ops._core.registry import needs_of, remembered, runs_kernels, vk_op


def _window_attn_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True, return_lse: bool = True,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_attention("window_attn", q, k, v, cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap)
    check_steps("window_attn", q, cu_seqlens.shape[0] - 1, alibi_slopes, sinks, dropout_p, dropout_seed)
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
    dropout_p: float, slopes: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
) -> Callable[..., None]:  # fmt: skip
    check_attention("window_attn", q, k, v, cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap)
    check_steps("window_attn", q, cu_seqlens.shape[0] - 1, slopes, sinks, dropout_p, seed)
    step = StepTensors(slopes, sinks, seed)
    scores = Scores.of(q.shape[2], scale, causal, window_left, window_right, softcap, step, dropout_p)
    if runs_kernels(q):
        return plan_forward(q, k, v, cu_seqlens, cu_seqlens_k, scores, return_lse)
    return partial(attention_forward_cpu, scores)


@vk_op(
    "window_attn",
    fake=_window_attn_fake,
    autocast=True,
    keeps_dtype=("alibi_slopes", "sinks"),
    flops=_window_attn_flops,
)
def window_attn_op(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True, return_lse: bool = True,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    step = StepTensors.of(alibi_slopes, sinks, dropout_seed)
    launch = _prepare_window_attn(
        q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap, return_lse,
        dropout_p, *step,
    )  # fmt: skip
    check_values("window_attn", q, k, cu_seqlens, cu_seqlens_k)
    out, lse = attention_outputs(q, return_lse)
    launch(q, k, v, cu_seqlens, cu_seqlens_k, out, lse, step)
    return out, lse


def _window_attn_backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True,
    alibi_slopes: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_attention_backward(
        "window_attn_backward", dout, dlse, q, k, v, out, lse,
        cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap,
    )  # fmt: skip
    check_steps("window_attn_backward", q, cu_seqlens.shape[0] - 1, alibi_slopes, None, dropout_p, dropout_seed)
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
    dropout_p: float, slopes: Tensor | None, seed: Tensor | None,
) -> Callable[..., None]:  # fmt: skip
    check_attention_backward(
        "window_attn_backward", dout, dlse, q, k, v, out, lse,
        cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap,
    )  # fmt: skip
    check_steps("window_attn_backward", q, cu_seqlens.shape[0] - 1, slopes, None, dropout_p, seed)
    step = StepTensors(slopes, seed=seed)
    scores = Scores.of(q.shape[2], scale, causal, window_left, window_right, softcap, step, dropout_p)
    if runs_kernels(q):
        return plan_backward(dout, dlse, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, scores, deterministic)
    return partial(attention_backward_cpu, scores)


@vk_op("window_attn_backward", fake=_window_attn_backward_fake, flops=_window_attn_backward_flops)
def window_attn_backward_op(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True,
    alibi_slopes: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    launch = _prepare_window_attn_backward(
        dout, dlse, q, k, v, out, lse, cu_seqlens, cu_seqlens_k,
        scale, causal, window_left, window_right, softcap, deterministic, dropout_p, alibi_slopes, dropout_seed,
    )  # fmt: skip
    check_values("window_attn_backward", q, k, cu_seqlens, cu_seqlens_k)
    dq, dk, dv = attention_gradients(q, k, v)
    step = StepTensors.of(alibi_slopes, None, dropout_seed)
    launch(dout, dlse, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, dq, dk, dv, step)
    return dq, dk, dv


window_attn_backward_op.refuse_autograd()


# The place of sinks among the op's arguments.
SINKS_PLACE = 13


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, cu_seqlens_k, *options, _, slopes, sinks, dropout_p, seed = inputs
    refuse_slopes_gradient("window_attn", slopes is not None and slopes.requires_grad)
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, cu_seqlens_k, slopes, sinks, seed)
    ctx.options, ctx.dropout_p = options, dropout_p
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, cu_seqlens, cu_seqlens_k, slopes, sinks, seed = ctx.saved_tensors
    nothing = (None,) * (3 + len(ctx.options))
    if dout is None and dlse is None:
        return None, None, None, *nothing, None, None, None, None
    q, _, _, out, lse = tensors
    if dout is None:
        dout = out.new_zeros(()).expand_as(out)
    if lse.shape[1] != q.shape[0]:
        # Not made: captured without gradients, in an exported program say, and run with them.
        with torch._C._DisableAutocast():
            steps = slopes, sinks, ctx.dropout_p, seed
            lse = tensors[4] = window_attn_op(*tensors[:3], cu_seqlens, cu_seqlens_k, *ctx.options, True, *steps)[1]
        dlse = None
    gradients = window_attn_backward_op(
        dout, dlse, *tensors, cu_seqlens, cu_seqlens_k, *ctx.options, slopes, ctx.dropout_p, seed
    )
    dsinks = None
    if needs_of(ctx, SINKS_PLACE + 1)[SINKS_PLACE]:
        dsinks = sinks_gradient(dout, dlse, out, lse, sinks)
    return *gradients, *nothing, None, dsinks, None, None


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
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
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

        alibi_slopes: fp32 [H], or [n, H] with a row for each segment: a query's score of a key is lowered by the slope
            times their distance (after the softcap). They get no gradient.
        sinks: [H] in fp32 or q's dtype, one more logit in each row's softmax, without a value. Differentiable. lse
            counts it, also of a row that sees no key.
        dropout_p: the probability with which a weight counts as 0 and the others grow by 1 / (1 - dropout_p); lse is
            that of all. Which are dropped follows from the seed and their places alone, see `dropout_seed`.
        dropout_seed: int64 [1] on q's device; drawn by PyTorch's generator where None. The mask is that of Philox for
            the seed, the segment, the head, the query's row and the key's in their segment: the same bits on every
            path and device.

    Returns:
        out [Tq, H, D] in q's dtype; with return_lse also lse [H, Tq], fp32 (fp64 for fp64), natural logarithm of the
        sum of exp(score), differentiable.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    Products accumulate in fp32; fp32 inputs use tf32 only where `torch.backends.cuda.matmul` allows it. Where it does
    not, Hopper GPUs multiply three bfloat16 parts of each number, with errors below those of fp32's own products.
    Forward and backward give the same bits for the same inputs, the backward unless told otherwise. FlashAttention-2,
    arXiv 2307.08691.
    """
    for name, number in (("scale", scale), ("softcap", softcap), ("dropout_p", dropout_p)):
        check_number("window_attn", name, number)
    # The backward takes lse; where there will be none, it need not lie in memory.
    learnt = (q, k, v) if sinks is None else (q, k, v, sinks)
    differentiable = torch.is_grad_enabled() and any(not isinstance(x, Tensor) or x.requires_grad for x in learnt)
    if alibi_slopes is None and sinks is None and dropout_p == 0:
        # Defaults need not be passed on, which takes the host as long as other arguments.
        steps: tuple[Any, ...] = ()
    else:
        steps = alibi_slopes, sinks, dropout_p, seed_of(q, dropout_p, dropout_seed)
    out, lse = window_attn_op(
        q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap, deterministic,
        return_lse or differentiable, *steps,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["window_attn"]
