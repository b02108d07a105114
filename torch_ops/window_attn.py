"""`vk::window_attn`: attention inside the segments of packed tensors, and its backward.

Vision encoders pack images, frames and windows of any size into one [T, H, D] tensor and attend within each of them.
`cu_seqlens` holds the boundaries, on the device. Kernels: `csrc_free_ops.attention`.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from torch_ops._attention.checks import (
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
from torch_ops._core.checks import check_bool, check_number
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
    differentiate_attention(window_attn_op, WindowAttn, window_attn_backward_op, WindowAttnBackward),
    of=("q", "k", "v", "sinks"),
    saves=("q", "k", "v", "cu_seqlens", "cu_seqlens_k", "alibi_slopes", "sinks", "dropout_seed"),
    saves_results=(0, 1),
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
    """Compute softmax(scale q k^T) v within each segment of packed tensors.

    Query row i of a segment with Lq queries and Lk keys stands at key position i + Lk - Lq (aligned bottom-right). A
    row that sees no key gives out 0 and lse -inf. A row before the first boundary or past the largest is in no segment
    and sees none. Such rows have zero gradient, provided the incoming gradient is finite.

    Args:
        q: [Tq, H, D], fp16, bf16 or fp32, on the CPU also fp64; D is a multiple of 8 up to 256. Any strides; columns
            that are not contiguous are copied.
        k, v: [Tk, Hk, D], dtype and device of q. H is a multiple of Hk: each key head serves H / Hk query heads.
        cu_seqlens: int32 [n + 1] on q's device: segment s is rows cu_seqlens[s] to cu_seqlens[s + 1]. Empty segments
            are allowed. Values are never copied to the host. They are clamped to the tensor, and a boundary that falls
            counts as the largest before it. `torch_ops.settings(checked=True)` refuses such values by name.
        cu_seqlens_k: boundaries of the keys, shape of `cu_seqlens`. Default: those of the queries.
        scale: positive number that multiplies q k^T; it gets no gradient. Default: 1 / sqrt(D).
        causal: whether a query sees only keys up to its own position. Default: False.
        window_left, window_right: number of keys that a query sees before and after its position. Default: -1, all.
        softcap: c > 0 replaces a score s by c tanh(s / c). Default: 0, none.
        deterministic: False lets the backward add dq in any order, which the Hopper kernel does if it is faster.
            Default: True, the same bits every time.
        return_lse: whether to return (out, lse). If it is False and no gradient may be needed, lse is not computed and
            the call allocates only out. `torch.ops.vk.window_attn` always returns both: with return_lse=False lse is
            [H, 0], and a later backward recomputes it. Default: False.
        alibi_slopes: fp32 [H], or [n, H] with a row for each segment. Slope times the distance of query and key is
            subtracted from a score, after the softcap. Slopes get no gradient. Default: none.
        sinks: [H], fp32 or q's dtype; one more logit in the softmax of each row, without a value. Differentiable. lse
            includes it, also for a row that sees no key. Default: none.
        dropout_p: probability that a weight counts as 0, from 0 to below 1; the other weights grow by 1 / (1 -
            dropout_p). lse is the sum over all weights. Default: 0.
        dropout_seed: int64 [1] on q's device. The mask is Philox of the seed, the segment, the head and the rows of
            query and key in their segment. It has the same bits on every path and device. Default: from PyTorch's
            generator.

    Returns:
        out [Tq, H, D] in q's dtype. With return_lse also lse [H, Tq], fp32 (fp64 for fp64): the natural logarithm of
        the sum of exp(score), differentiable.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    Products accumulate in fp32. fp32 inputs use tf32 only if `torch.backends.cuda.matmul` allows it. Otherwise Hopper
    GPUs multiply three bfloat16 parts of each number, with errors below those of fp32 products. Forward and backward
    give the same bits for the same inputs, unless `deterministic` is False. FlashAttention-2, arXiv 2307.08691.
    """
    dropout_p = check_number("window_attn", "dropout_p", dropout_p)
    # The backward takes lse; without one, lse need not lie in memory.
    keeps_lse = check_bool("window_attn", "return_lse", return_lse) or is_differentiated(q, k, v, sinks)
    seed = seed_of(q, dropout_p, dropout_seed)
    # PyTorch's dispatcher takes longer with more arguments, so defaults are not passed on.
    plain = alibi_slopes is None and sinks is None and dropout_p == 0 and dropout_seed is None
    scored = () if plain else (alibi_slopes, sinks, dropout_p, seed)
    out, lse = window_attn_op(
        q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap, deterministic, keeps_lse,
        *scored,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["window_attn"]
