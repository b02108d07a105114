"""`vk::attention`: attention of batches of sequences, [B, H, S, D], and its backward.

The layout and the semantics of `torch.nn.functional.scaled_dot_product_attention`, but for causal order of unequal
lengths, which is aligned bottom-right. Kernels: `csrc_free_ops.attention`, the core of `vk::window_attn`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops._attention.dense import plan_dense_backward, plan_dense_forward
from torch_ops._attention.dense_calls import (
    check_dense_attention,
    check_dense_backward,
    dense_flops,
    dense_gradients,
    dense_outputs,
)
from torch_ops._attention.downcast import plan_dense_backward_in, plan_dense_forward_in
from torch_ops._attention.scores import Scores, StepTensors
from torch_ops._attention.steps import refuse_slopes_gradient, seed_of, sinks_gradient
from torch_ops._core.checks import check_number
from torch_ops._core.registry import needs_of, remembered, vk_op

# The place of sinks among the op's arguments.
SINKS_PLACE = 9


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False,
    window_left: int = -1, window_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, dropout_seed: Tensor | None = None, deterministic: bool = True, return_lse: bool = True,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_dense_attention(
        "attention", q, k, v, scale, window_left, window_right, softcap, alibi_slopes, sinks, dropout_p, dropout_seed,
        compute_dtype,
    )  # fmt: skip
    return dense_outputs(q, return_lse)


@remembered
def _prepare_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window_left: int, window_right: int,
    softcap: float, slopes: Tensor | None, sinks: Tensor | None, dropout_p: float, seed: Tensor | None,
    return_lse: bool, compute_dtype: torch.dtype | None,
) -> Callable[..., None]:  # fmt: skip
    check_dense_attention(
        "attention", q, k, v, scale, window_left, window_right, softcap, slopes, sinks, dropout_p, seed, compute_dtype
    )
    step = StepTensors(slopes, sinks, seed)
    scores = Scores.of(q.shape[3], scale, causal, window_left, window_right, softcap, step, dropout_p)
    if compute_dtype is None:
        return plan_dense_forward(q, k, v, scores, return_lse)
    return plan_dense_forward_in(compute_dtype, q, k, v, scores, return_lse)


@vk_op(
    "attention",
    fake=_attention_fake,
    autocast=True,
    keeps_dtype=("alibi_slopes", "sinks"),
    dtype_argument="compute_dtype",
    flops=dense_flops,
)
def attention_op(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False,
    window_left: int = -1, window_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, dropout_seed: Tensor | None = None, deterministic: bool = True, return_lse: bool = True,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    launch = _prepare_attention(
        q, k, v, scale, causal, window_left, window_right, softcap, alibi_slopes, sinks, dropout_p, dropout_seed,
        return_lse, compute_dtype,
    )  # fmt: skip
    out, lse = dense_outputs(q, return_lse)
    launch(q, k, v, out, lse, StepTensors.of(alibi_slopes, sinks, dropout_seed))
    return out, lse


def _attention_backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, deterministic: bool = True, compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_dense_backward(
        "attention_backward", dout, dlse, q, k, v, out, lse,
        scale, window_left, window_right, softcap, alibi_slopes, None, dropout_p, dropout_seed, compute_dtype,
    )  # fmt: skip
    return dense_gradients(q, k, v)


def _attention_backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any,
    **options: Any,
) -> int:  # fmt: skip
    """Five products where the forward has two."""
    return dense_flops(q, k, v, *rest, **options) * 5 // 2


@remembered
def _prepare_attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float | None, causal: bool, window_left: int, window_right: int, softcap: float,
    slopes: Tensor | None, dropout_p: float, seed: Tensor | None, compute_dtype: torch.dtype | None,
) -> Callable[..., None]:  # fmt: skip
    check_dense_backward(
        "attention_backward", dout, dlse, q, k, v, out, lse,
        scale, window_left, window_right, softcap, slopes, None, dropout_p, seed, compute_dtype,
    )  # fmt: skip
    step = StepTensors(slopes, seed=seed)
    scores = Scores.of(q.shape[3], scale, causal, window_left, window_right, softcap, step, dropout_p)
    if compute_dtype is None:
        return plan_dense_backward(dout, dlse, q, k, v, out, lse, scores)
    return plan_dense_backward_in(compute_dtype, scores)


@vk_op("attention_backward", fake=_attention_backward_fake, flops=_attention_backward_flops)
def attention_backward_op(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, deterministic: bool = True, compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    launch = _prepare_attention_backward(
        dout, dlse, q, k, v, out, lse, scale, causal, window_left, window_right, softcap,
        alibi_slopes, dropout_p, dropout_seed, compute_dtype,
    )  # fmt: skip
    dq, dk, dv = dense_gradients(q, k, v)
    launch(dout, dlse, q, k, v, out, lse, dq, dk, dv, StepTensors.of(alibi_slopes, None, dropout_seed))
    return dq, dk, dv


attention_backward_op.refuse_autograd()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options, slopes, sinks, dropout_p, seed, deterministic, _, compute_dtype = inputs
    refuse_slopes_gradient("attention", slopes is not None and slopes.requires_grad)
    ctx.save_for_backward(q, k, v, *output, slopes, sinks, seed)
    ctx.options, ctx.dropout_p, ctx.modes = options, dropout_p, (deterministic, compute_dtype)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, slopes, sinks, seed = ctx.saved_tensors
    dropout = ctx.dropout_p, seed
    deterministic, compute_dtype = ctx.modes
    nothing = (None,) * 5
    unlearnt = (None,) * (len(ctx.options) + 1)
    if dout is None and dlse is None:
        return None, None, None, *unlearnt, None, *nothing
    q, k, v, out, lse = tensors
    if dout is None:
        dout = out.new_zeros(()).expand_as(out)
    if lse.shape[2] != q.shape[2]:
        # Not made: captured without gradients, in an exported program say, and run with them.
        with torch._C._DisableAutocast():
            lse = attention_op(q, k, v, *ctx.options, slopes, sinks, *dropout, deterministic, True, compute_dtype)[1]
        dlse = None
    gradients = attention_backward_op(
        dout, dlse, q, k, v, out, lse, *ctx.options, slopes, *dropout, deterministic, compute_dtype
    )
    dsinks = None
    if needs_of(ctx, SINKS_PLACE + 1)[SINKS_PLACE]:
        dsinks = sinks_gradient(dout.transpose(1, 2), dlse, out.transpose(1, 2), lse, sinks)
    return *gradients, *unlearnt, dsinks, *nothing


attention_op.register_autograd(_backward, setup_context=_setup_context)


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
    """softmax(scale q k^T) v of every sequence of a batch.

    Query row i stands at key position i + Sk - Sq (aligned bottom-right, as in FlashAttention; PyTorch's own
    `is_causal` is aligned top-left, see `torch_ops.compat.scaled_dot_product_attention`). A row that sees no key gives
    out 0 and lse -inf (its sink, with `sinks`), and passes on no gradient, as long as what comes in for it is finite.

    Args:
        q: [B, H, Sq, D] in fp16, bf16 or fp32; D a multiple of 8 up to 256. Any strides; columns that are not
            contiguous are copied. On the CPU also fp64.
        k, v: [B, Hk, Sk, D], dtype and device of q, H a multiple of Hk: each key head serves H / Hk query heads.
        scale: what multiplies q k^T, a positive number (no tensor: it gets no gradient); 1 / sqrt(D) where None.
        causal: whether a query sees only keys up to its own position.
        window_left, window_right: how many keys before and after its position a query sees; -1 is all.
        softcap: c > 0 replaces a score s by c tanh(s / c).
        alibi_slopes: fp32 [H] or [B, H]: a query's score of a key is lowered by the slope times their distance (after
            the softcap). They get no gradient.
        sinks: [H] in fp32 or q's dtype, one more logit in each row's softmax, without a value. Differentiable. lse
            counts it, also of a row that sees no key.
        dropout_p: the probability with which a weight counts as 0 and the others grow by 1 / (1 - dropout_p); lse is
            that of all.
        dropout_seed: int64 [1] on q's device; drawn by PyTorch's generator where None. The mask is that of Philox for
            the seed, the sequence, the head, the query's row and the key's: the same bits on every path and device.
        deterministic: there for `window_attn`'s sake, whose backward may add dq up in any order where it is False. Here
            bits are the same each time in either case.
        return_lse: whether to return (out, lse). Without it, and where no gradient may be wanted, lse is not made.
        compute_dtype: torch.float16 or torch.bfloat16 to compute fp32 inputs in, at the rate and with the error of that
            type, whatever autocast says; sinks may have it too. out and gradients are fp32, and rounded to that type
            but for out on the Hopper path, whose kernel casts inputs as it goes. None is the inputs' own type.

    Returns:
        out [B, H, Sq, D] in q's dtype, its dimensions in q's order of memory; with return_lse also lse [B, H, Sq],
        fp32 (fp64 for fp64), natural logarithm of the sum of exp(score), differentiable.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    Products accumulate in fp32; fp32 inputs use tf32 only where `torch.backends.cuda.matmul` allows it. Where it does
    not, Hopper GPUs multiply three bfloat16 parts of each number, with errors below those of fp32's own products, of
    the head dimensions that docs/dense.md lists.
    Forward and backward give the same bits for the same inputs. FlashAttention-2,
    arXiv 2307.08691.
    """
    for name, number in (("scale", scale), ("softcap", softcap), ("dropout_p", dropout_p)):
        check_number("attention", name, number)
    # The backward takes lse; where there will be none, it need not lie in memory.
    learnt = (q, k, v) if sinks is None else (q, k, v, sinks)
    differentiable = torch.is_grad_enabled() and any(not isinstance(x, Tensor) or x.requires_grad for x in learnt)
    out, lse = attention_op(
        q, k, v, scale, causal, window_left, window_right, softcap, alibi_slopes, sinks,
        dropout_p, seed_of(q, dropout_p, dropout_seed), deterministic, return_lse or differentiable, compute_dtype,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["attention"]
