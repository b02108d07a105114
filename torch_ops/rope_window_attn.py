"""`vk::rope_window_attn`: `window_attn` of q and k with their rotary embedding, and its backward.

    out = softmax(scale R(q) R(k)^T) v,    R(x) = round(x cos + rotate_half(x) sin)

R is Transformers' `apply_rotary_pos_emb_vision`: over the halves of the whole head, in fp32, rounded once to the dtype
before the product. q and k are turned once, into memory that lives no longer than the call, and the attention core
reads it; the backward turns them once more rather than have them kept. R is linear but for its rounding, so with G the
gradient that the core gives for R(q), rounded as any gradient between two ops is,

    dq = round(G cos + rotate_half^T(G sin)),    rotate_half^T = -rotate_half

in fp32: the rotation by the same angles with the sign of sin reversed, where the halves of a table are alike. That is
what eager PyTorch does: the gradient of the rounding of R is G in fp32, both products are made and added there, and the
gradient of the cast of q to fp32 rounds their sum. dk likewise; v is not turned.

Kernels: `csrc_free_ops.rope`, `csrc_free_ops.attention`. RoFormer, arXiv 2104.09864.
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
from torch_ops._attention.rotate import plan_rotation, workspaces
from torch_ops._attention.scores import Scores
from torch_ops._core.checks import check_number, check_tables, refuse
from torch_ops._core.registry import remembered, runs_kernels, vk_op
from torch_ops._core.rotation_cpu import rotate_cpu


def _check_rotation(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """For q and k that `check_attention` has passed."""
    if k.shape[0] != q.shape[0]:
        refuse(op, "k", f"of {q.shape[0]} rows as q is, since they share the rows of cos and sin", k.shape[0])
    check_tables(op, cos, sin, q.shape[0], q.shape[2], "q", q)


def _rope_window_attn_fake(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True, return_lse: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    op = "rope_window_attn"
    check_attention(op, q, k, v, cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap)
    _check_rotation(op, q, k, cos, sin)
    return attention_outputs(q, return_lse)


def _rope_window_attn_flops(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Those of the products; the rotation is not counted."""
    return attention_flops(q, k, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right)


@remembered
def _prepare_rope_window_attn(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None,
    scale: float | None, causal: bool, window_left: int, window_right: int, softcap: float, return_lse: bool,
) -> Callable[..., None]:  # fmt: skip
    op = "rope_window_attn"
    check_attention(op, q, k, v, cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap)
    _check_rotation(op, q, k, cos, sin)
    scores = Scores.of(q.shape[2], scale, causal, window_left, window_right, softcap)
    if runs_kernels(q):
        rotate = plan_rotation(q, k, cos, sin, cu_seqlens, cu_seqlens_k, False)
        attend = plan_forward(*workspaces(q, k), v, cu_seqlens, cu_seqlens_k, scores, return_lse)
    else:
        rotate, attend = partial(rotate_cpu, False), partial(attention_forward_cpu, scores)

    def launch(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cu_q: Tensor, cu_k: Tensor | None,
        out: Tensor, lse: Tensor,
    ) -> None:  # fmt: skip
        turned_q, turned_k = workspaces(q, k)
        rotate(q, k, cos, sin, cu_q, cu_k, turned_q, turned_k)
        attend(turned_q, turned_k, v, cu_q, cu_k, out, lse)

    return launch


@vk_op(
    "rope_window_attn",
    fake=_rope_window_attn_fake,
    autocast=True,
    keeps_dtype=("cos", "sin"),
    flops=_rope_window_attn_flops,
)
def rope_window_attn_op(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True, return_lse: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    launch = _prepare_rope_window_attn(
        q, k, v, cos, sin, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap, return_lse
    )
    check_values("rope_window_attn", q, k, cu_seqlens, cu_seqlens_k)
    out, lse = attention_outputs(q, return_lse)
    launch(q, k, v, cos, sin, cu_seqlens, cu_seqlens_k, out, lse)
    return out, lse


def _check_rope_window_attn_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cos: Tensor, sin: Tensor, *rest: Any,
) -> None:  # fmt: skip
    op = "rope_window_attn_backward"
    check_attention_backward(op, dout, dlse, q, k, v, out, lse, *rest)
    _check_rotation(op, q, k, cos, sin)


def _rope_window_attn_backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cos: Tensor, sin: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_rope_window_attn_backward(
        dout, dlse, q, k, v, out, lse, cos, sin, cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap
    )
    return attention_gradients(q, k, v)


def _rope_window_attn_backward_flops(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> int:
    """Five products where the forward has two."""
    return _rope_window_attn_flops(q, k, v, *rest) * 5 // 2


@remembered
def _prepare_rope_window_attn_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cos: Tensor, sin: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None,
    scale: float | None, causal: bool, window_left: int, window_right: int, softcap: float, deterministic: bool,
) -> Callable[..., None]:  # fmt: skip
    _check_rope_window_attn_backward(
        dout, dlse, q, k, v, out, lse, cos, sin, cu_seqlens, cu_seqlens_k, scale, window_left, window_right, softcap
    )
    scores = Scores.of(q.shape[2], scale, causal, window_left, window_right, softcap)
    if runs_kernels(q):
        spaces = workspaces(q, k)
        rotate = plan_rotation(q, k, cos, sin, cu_seqlens, cu_seqlens_k, False)
        rotate_back = plan_rotation(*spaces, cos, sin, cu_seqlens, cu_seqlens_k, True)
        differentiate = plan_backward(dout, dlse, *spaces, v, out, lse, cu_seqlens, cu_seqlens_k, scores, deterministic)
    else:
        rotate, rotate_back = partial(rotate_cpu, False), partial(rotate_cpu, True)
        differentiate = partial(attention_backward_cpu, scores)

    def launch(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cos: Tensor, sin: Tensor, cu_q: Tensor, cu_k: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        turned_q, turned_k = workspaces(q, k)
        rotate(q, k, cos, sin, cu_q, cu_k, turned_q, turned_k)
        differentiate(dout, dlse, turned_q, turned_k, v, out, lse, cu_q, cu_k, dq, dk, dv)
        rotate_back(dq, dk, cos, sin, cu_q, cu_k, dq, dk)

    return launch


@vk_op("rope_window_attn_backward", fake=_rope_window_attn_backward_fake, flops=_rope_window_attn_backward_flops)
def rope_window_attn_backward_op(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cos: Tensor, sin: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    launch = _prepare_rope_window_attn_backward(
        dout, dlse, q, k, v, out, lse, cos, sin, cu_seqlens, cu_seqlens_k,
        scale, causal, window_left, window_right, softcap, deterministic,
    )  # fmt: skip
    check_values("rope_window_attn_backward", q, k, cu_seqlens, cu_seqlens_k)
    dq, dk, dv = attention_gradients(q, k, v)
    launch(dout, dlse, q, k, v, out, lse, cos, sin, cu_seqlens, cu_seqlens_k, dq, dk, dv)
    return dq, dk, dv


rope_window_attn_backward_op.refuse_autograd()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cos, sin, cu_seqlens, cu_seqlens_k, *options, _ = inputs
    ctx.save_for_backward(q, k, v, *output, cos, sin, cu_seqlens, cu_seqlens_k)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *places = ctx.saved_tensors
    nothing = (None,) * (5 + len(ctx.options))
    if dout is None and dlse is None:
        return None, None, None, *nothing
    if dout is None:
        dout = out.new_zeros(()).expand_as(out)
    if lse.shape[1] != q.shape[0]:
        # Not made: captured without gradients, in an exported program say, and run with them.
        with torch._C._DisableAutocast():
            lse = rope_window_attn_op(q, k, v, *places, *ctx.options)[1]
        dlse = None
    return *rope_window_attn_backward_op(dout, dlse, q, k, v, out, lse, *places, *ctx.options), *nothing


rope_window_attn_op.register_autograd(_backward, setup_context=_setup_context)


def rope_window_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
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
    """`window_attn` of q and k with their rotary embedding, which no caller needs to hold.

    Column i of a head's first half is turned with column i of its second (GPT-NeoX's order):
    (a, b) becomes (a cos_i - b sin_i, b cos_(i + D/2) + a sin_(i + D/2)), in fp32, rounded once to q's dtype, as by
    `apply_rotary_pos_emb_vision` of Transformers.

    Args:
        q: [T, H, D] in fp16, bf16 or fp32; D a multiple of 8 up to 256. Any strides, such as views of a packed
            projection; columns that are not contiguous are copied. On the CPU also fp64.
        k, v: [T, Hk, D], dtype and device of q, H a multiple of Hk: each key head serves H / Hk query heads.
        cos, sin: [T, D], as Transformers' encoders make them, or [T, D / 2] for both halves of a head; in fp32 or q's
            dtype, of the same row for q and k. They are constants: they get no gradient. Autocast leaves those of fp32
            as they are.
        cu_seqlens: int32 [n + 1] on q's device, never falling: segment s is rows cu_seqlens[s] up to
            cu_seqlens[s + 1]. What q, k, v, cos and sin hold outside all segments reaches neither results nor
            gradients.
        cu_seqlens_k: the keys' own boundaries, of the same shape; those of the queries where None. k has as many rows
            as q in either case, since both are turned by the same rows of cos and sin.
        scale, causal, window_left, window_right, softcap, deterministic: as those of `window_attn`.
        return_lse: whether to return (out, lse). `torch.ops.vk.rope_window_attn` always returns both, lse [H, 0] where
            its own return_lse is False; a backward after all then makes it anew.

    Returns:
        out [T, H, D] in q's dtype; with return_lse also lse [H, T], fp32 (fp64 for fp64), natural logarithm of the sum
        of exp(score), differentiable.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    Turned q and k take memory while a call runs, as much as q and k themselves, and are made anew in the backward: kept
    for it are q, k, v, out, lse and the tables. Forward and backward give the same bits for the same inputs, the
    backward unless told otherwise. RoFormer, arXiv 2104.09864; FlashAttention-2, arXiv 2307.08691.
    """
    for name, number in (("scale", scale), ("softcap", softcap)):
        check_number("rope_window_attn", name, number)
    # The backward takes lse; where there will be none, it need not lie in memory.
    differentiable = torch.is_grad_enabled() and any(not isinstance(x, Tensor) or x.requires_grad for x in (q, k, v))
    out, lse = rope_window_attn_op(
        q, k, v, cos, sin, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap, deterministic,
        return_lse or differentiable,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["rope_window_attn"]
