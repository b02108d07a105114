"""`vk::window_attn`: attention inside the segments of packed tensors, and its backward.

Vision encoders pack images, frames and windows of any size into one [T, H, D] tensor and attend within each; the
boundaries are `cu_seqlens`, on the device. Kernels: `csrc_free_ops.attention`.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from torch_ops._attention.calls import (
    attention_backward_flops,
    attention_flops,
    attention_gradients,
    attention_outputs,
    check_attention,
    check_attention_backward,
    check_values,
    differentiate_attention,
    is_differentiated,
    seed_of,
)
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.plan import backward_tensors, forward_tensors, plan_backward, plan_forward
from torch_ops._attention.tensors import Backward, Forward
from torch_ops._core.checks import check_number
from torch_ops._core.plan import Plan
from torch_ops._core.planned_op import gradient, planned_op


class WindowAttn(NamedTuple):
    """The arguments of `vk::window_attn`; the function below documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor | None = None
    scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    deterministic: bool = True
    return_lse: bool = True
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None


class WindowAttnBackward(NamedTuple):
    """The arguments of `vk::window_attn_backward`."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor | None = None
    scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    deterministic: bool = True
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None


def _plan(t: Forward, call: WindowAttn) -> Plan:
    return plan_forward(t, AttentionOptions.of(call))


window_attn_op = planned_op(
    "window_attn",
    WindowAttn,
    tuple[Tensor, Tensor],
    check=partial(check_attention, "window_attn"),
    outputs=attention_outputs,
    tensors=forward_tensors,
    plan=_plan,
    check_values=partial(check_values, "window_attn"),
    flops=attention_flops,
    autocast=True,
    keeps_dtype=("alibi_slopes", "sinks"),
)


def _plan_backward(t: Backward, call: WindowAttnBackward) -> Plan:
    return plan_backward(t, AttentionOptions.of(call))


window_attn_backward_op = planned_op(
    "window_attn_backward",
    WindowAttnBackward,
    tuple[Tensor, Tensor, Tensor],
    check=partial(check_attention_backward, "window_attn_backward"),
    outputs=attention_gradients,
    tensors=backward_tensors,
    plan=_plan_backward,
    check_values=partial(check_values, "window_attn_backward"),
    flops=attention_backward_flops,
)
window_attn_backward_op.refuse_autograd()
gradient(
    window_attn_op,
    WindowAttn,
    partial(differentiate_attention, window_attn_op, window_attn_backward_op, WindowAttnBackward),
    saves=("q", "k", "v", "cu_seqlens", "cu_seqlens_k", "alibi_slopes", "sinks", "dropout_seed"),
    saves_results=(0, 1),
    refuses=("alibi_slopes",),
)


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
    # The backward takes lse; without one, lse need not lie in memory.
    keeps_lse = return_lse or is_differentiated(q, k, v, sinks)
    seed = seed_of(q, dropout_p, dropout_seed)
    # PyTorch's dispatcher takes longer with more arguments, so defaults are not passed on.
    scored = () if alibi_slopes is None and sinks is None and dropout_p == 0 else (alibi_slopes, sinks, dropout_p, seed)
    out, lse = window_attn_op(
        q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap, deterministic, keeps_lse,
        *scored,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["window_attn"]
