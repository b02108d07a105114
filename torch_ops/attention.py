"""`vk::attention`: attention of batches of sequences, [B, H, S, D], and its backward.

The layout and the semantics of `torch.nn.functional.scaled_dot_product_attention`, but for causal order of unequal
lengths, which is aligned bottom-right. Kernels: `csrc_free_ops.attention`, the core of `vk::window_attn`.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ops._attention.checks import (
    attention_backward_flops,
    attention_flops,
    attention_gradients,
    attention_outputs,
    check_attention,
    check_attention_backward,
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


class Attention(NamedTuple):
    """The arguments of `vk::attention`; the function below documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    deterministic: bool = True
    return_lse: bool = True
    compute_dtype: torch.dtype | None = None


class AttentionBackward(NamedTuple):
    """The arguments of `vk::attention_backward`."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    deterministic: bool = True
    compute_dtype: torch.dtype | None = None


def _plan(t: Forward, call: Attention) -> Plan:
    return plan_forward(t, AttentionOptions.of(call))


attention_op = planned_op(
    "attention",
    Attention,
    tuple[Tensor, Tensor],
    check=partial(check_attention, "attention"),
    outputs=attention_outputs,
    tensors=forward_tensors,
    plan=_plan,
    flops=attention_flops,
    autocast=True,
    keeps_dtype=("alibi_slopes", "sinks"),
    dtype_argument="compute_dtype",
)


def _plan_backward(t: Backward, call: AttentionBackward) -> Plan:
    return plan_backward(t, AttentionOptions.of(call))


attention_backward_op = planned_op(
    "attention_backward",
    AttentionBackward,
    tuple[Tensor, Tensor, Tensor],
    check=partial(check_attention_backward, "attention_backward"),
    outputs=attention_gradients,
    tensors=backward_tensors,
    plan=_plan_backward,
    flops=attention_backward_flops,
)
attention_backward_op.refuse_autograd()
gradient(
    attention_op,
    Attention,
    differentiate_attention(attention_op, Attention, attention_backward_op, AttentionBackward),
    of=("q", "k", "v", "sinks"),
    saves=("q", "k", "v", "alibi_slopes", "sinks", "dropout_seed"),
    saves_results=(0, 1),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale q k^T) v for every sequence of a batch.

    Query row i stands at key position i + Sk - Sq (aligned bottom-right, as in FlashAttention). PyTorch's `is_causal`
    is aligned top-left: see `torch_ops.compat.scaled_dot_product_attention`. A row that sees no key gives out 0 and lse
    -inf, or its sink with `sinks`. It has zero gradient, provided the incoming gradient is finite.

    Args:
        q: [B, H, Sq, D], fp16, bf16 or fp32, on the CPU also fp64; D is a multiple of 8 up to 256. Any strides; columns
            that are not contiguous are copied.
        k, v: [B, Hk, Sk, D], dtype and device of q. H is a multiple of Hk: each key head serves H / Hk query heads.
        scale: positive number that multiplies q k^T; it gets no gradient. Default: 1 / sqrt(D).
        causal: whether a query sees only keys up to its own position. Default: False.
        window_left, window_right: number of keys that a query sees before and after its position. Default: -1, all.
        softcap: c > 0 replaces a score s by c tanh(s / c). Default: 0, none.
        alibi_slopes: fp32 [H] or [B, H]. Slope times the distance of query and key is subtracted from a score, after
            the softcap. Slopes get no gradient. Default: none.
        sinks: [H], fp32 or q's dtype; one more logit in the softmax of each row, without a value. Differentiable. lse
            includes it, also for a row that sees no key. Default: none.
        dropout_p: probability that a weight counts as 0, from 0 to below 1; the other weights grow by 1 / (1 -
            dropout_p). lse is the sum over all weights. Default: 0.
        dropout_seed: int64 [1] on q's device. The mask is Philox of the seed, the sequence, the head and the rows of
            query and key. It has the same bits on every path and device. Default: from PyTorch's generator.
        deterministic: accepted for symmetry with `window_attn`. This backward is always deterministic.
        return_lse: whether to return (out, lse). If it is False and no gradient may be needed, lse is not computed.
            Default: False.
        compute_dtype: torch.float16 or torch.bfloat16: the dtype in which fp32 inputs are computed, at its speed and
            error, whatever autocast says. sinks may have it too. Results are fp32 tensors of values rounded to that
            dtype, except `out` on the Hopper path, which is not rounded. Default: the inputs' dtype.

    Returns:
        out [B, H, Sq, D] in q's dtype, with the dimension order of q in memory. With return_lse also lse [B, H, Sq],
        fp32 (fp64 for fp64): the natural logarithm of the sum of exp(score), differentiable.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    Products accumulate in fp32. fp32 inputs use tf32 only if `torch.backends.cuda.matmul` allows it. Otherwise Hopper
    GPUs multiply three bfloat16 parts of each number, with errors below those of fp32 products, for the head dimensions
    in docs/dense.md. Forward and backward give the same bits for the same inputs. FlashAttention-2, arXiv 2307.08691.
    """
    dropout_p = check_number("attention", "dropout_p", dropout_p)
    # The backward takes lse; without one, lse need not lie in memory.
    keeps_lse = check_bool("attention", "return_lse", return_lse) or is_differentiated(q, k, v, sinks)
    out, lse = attention_op(
        q, k, v, scale, causal, window_left, window_right, softcap, alibi_slopes, sinks,
        dropout_p, seed_of(q, dropout_p, dropout_seed), deterministic, keeps_lse, compute_dtype,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["attention"]
