"""`vk::rope_window_attn`: `window_attn` of q and k with their rotary embedding, and its backward.

    out = softmax(scale R(q) R(k)^T) v,    R(x) = round(x cos + rotate_half(x) sin)

R is Transformers' `apply_rotary_pos_emb_vision`: over the halves of the whole head, in fp32, rounded once to the dtype
before the product. q and k are rotated once, into memory that lives no longer than the call, and the attention core
reads it. The backward rotates them again instead of keeping them. R is linear except for its rounding. With G the
core's gradient for R(q), rounded as any gradient between two ops is,

    dq = round(G cos + rotate_half^T(G sin)),    rotate_half^T = -rotate_half

in fp32: the rotation by the same angles with the sign of sin reversed, where the halves of a table are alike. Eager
PyTorch does the same: the gradient of the rounding of R is G in fp32, and both products are added there. The gradient
of the cast of q to fp32 rounds their sum. dk likewise; v is not rotated. Tables that require a gradient get theirs from
G and the unrotated q and k, by one more kernel.

Kernels: `csrc_free_ops.rope`, `csrc_free_ops.rope_tables`, `csrc_free_ops.attention`. RoFormer, arXiv 2104.09864.
"""

from functools import partial
from typing import Any, NamedTuple

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
)
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.plan import plan_backward, plan_forward
from torch_ops._attention.rotate import Rotation, plan_rotation, workspaces
from torch_ops._attention.tensors import Backward, Forward
from torch_ops._core.checks import check_bool, check_tables, refuse
from torch_ops._core.plan import Plan, merged
from torch_ops._core.planned_op import gradient, planned_op
from torch_ops._core.rotation_gradient import TableGradients, new_table_gradients, plan_table_gradients


class RopeWindowAttn(NamedTuple):
    """The arguments of `vk::rope_window_attn`; the function below documents them."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor | None = None
    scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    deterministic: bool = True
    return_lse: bool = True


class RopeWindowAttnBackward(NamedTuple):
    """The arguments of `vk::rope_window_attn_backward`."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor | None = None
    scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    deterministic: bool = True
    needs_tables: bool = False


class Rotated(NamedTuple):
    """A launch of the attention core, on q and k that are still to be rotated; a backward may fill dcos and dsin."""

    core: Any
    cos: Tensor
    sin: Tensor
    dcos: Tensor | None = None
    dsin: Tensor | None = None


def _check_rotation(op: str, call: Any) -> None:
    """For q and k that `check_attention` has passed."""
    q, k = call.q, call.k
    if k.shape[0] != q.shape[0]:
        refuse(op, "k", f"of {q.shape[0]} rows as q is, since they share the rows of cos and sin", k.shape[0])
    check_tables(op, call.cos, call.sin, q.shape[0], q.shape[2], "q", q)


def _check(call: RopeWindowAttn) -> None:
    check_attention("rope_window_attn", call)
    _check_rotation("rope_window_attn", call)


def _rotation(t: Rotated, q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor) -> Rotation:
    return Rotation(q, k, t.cos, t.sin, t.core.cu_q, t.core.cu_k, q_out, k_out)


def _tensors(call: RopeWindowAttn, made: tuple[Tensor, Tensor]) -> Rotated:
    return Rotated(Forward(*call[:3], *call[5:7], *made), *call[3:5])


def _plan(t: Rotated, call: RopeWindowAttn) -> Plan:
    rotated_q, rotated_k = workspaces(t.core.q, t.core.k)
    rotate = plan_rotation(_rotation(t, t.core.q, t.core.k, rotated_q, rotated_k), False)
    attend = plan_forward(t.core._replace(q=rotated_q, k=rotated_k), AttentionOptions.of(call))

    def launch(t: Rotated) -> None:
        rotated_q, rotated_k = workspaces(t.core.q, t.core.k)
        rotate.launch(_rotation(t, t.core.q, t.core.k, rotated_q, rotated_k))
        attend.launch(t.core._replace(q=rotated_q, k=rotated_k))

    return Plan(launch, merged(rotate.kernels, attend.kernels), attend.path, attend.why)


rope_window_attn_op = planned_op(
    "rope_window_attn",
    RopeWindowAttn,
    tuple[Tensor, Tensor],
    check=_check,
    outputs=attention_outputs,
    tensors=_tensors,
    plan=_plan,
    check_values=partial(check_values, "rope_window_attn"),
    flops=attention_flops,
    autocast=True,
    keeps_dtype=("cos", "sin"),
)


def _check_backward(call: RopeWindowAttnBackward) -> None:
    check_attention_backward("rope_window_attn_backward", call)
    _check_rotation("rope_window_attn_backward", call)


def _gradients(call: RopeWindowAttnBackward) -> tuple[Tensor, ...]:
    """dq, dk, dv, dcos and dsin, of which the last two are empty [0] unless they are needed."""
    return *attention_gradients(call), *new_table_gradients(call.q, call.cos, call.needs_tables)


def _backward_tensors(call: RopeWindowAttnBackward, made: tuple[Tensor, ...]) -> Rotated:
    return Rotated(Backward(*call[:7], *call[9:11], *made[:3]), *call[7:9], *made[3:])


def _table_gradients(t: Rotated) -> TableGradients:
    core = t.core
    assert t.dcos is not None and t.dsin is not None
    return TableGradients(core.dq, core.dk, core.q, core.k, core.cu_q, core.cu_k, t.dcos, t.dsin)


def _plan_backward(t: Rotated, call: RopeWindowAttnBackward) -> Plan:
    rotated_q, rotated_k = workspaces(t.core.q, t.core.k)
    rotate = plan_rotation(_rotation(t, t.core.q, t.core.k, rotated_q, rotated_k), False)
    rotate_back = plan_rotation(_rotation(t, t.core.dq, t.core.dk, t.core.dq, t.core.dk), True)
    differentiate = plan_backward(t.core._replace(q=rotated_q, k=rotated_k), AttentionOptions.of(call))
    tables = plan_table_gradients(_table_gradients(t)) if call.needs_tables else None

    def launch(t: Rotated) -> None:
        core = t.core
        rotated_q, rotated_k = workspaces(core.q, core.k)
        rotate.launch(_rotation(t, core.q, core.k, rotated_q, rotated_k))
        differentiate.launch(core._replace(q=rotated_q, k=rotated_k))
        if tables is not None:
            tables.launch(_table_gradients(t))
        rotate_back.launch(_rotation(t, core.dq, core.dk, core.dq, core.dk))

    of_tables = {} if tables is None else tables.kernels
    kernels = merged(rotate.kernels, differentiate.kernels, of_tables, rotate_back.kernels)
    return Plan(launch, kernels, differentiate.path, differentiate.why)


rope_window_attn_backward_op = planned_op(
    "rope_window_attn_backward",
    RopeWindowAttnBackward,
    tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    check=_check_backward,
    outputs=_gradients,
    tensors=_backward_tensors,
    plan=_plan_backward,
    check_values=partial(check_values, "rope_window_attn_backward"),
    flops=attention_backward_flops,
)
rope_window_attn_backward_op.refuse_autograd()
gradient(
    rope_window_attn_op,
    RopeWindowAttn,
    differentiate_attention(rope_window_attn_op, RopeWindowAttn, rope_window_attn_backward_op, RopeWindowAttnBackward),
    of=("q", "k", "v", "cos", "sin"),
    saves=("q", "k", "v", "cos", "sin", "cu_seqlens", "cu_seqlens_k"),
    saves_results=(0, 1),
)


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
    """Compute `window_attn` of q and k after their rotary embedding, which the caller need not hold.

    Column i of the first half of a head is rotated with column i of the second (GPT-NeoX's order). (a, b) becomes (a
    cos_i - b sin_i, b cos_(i + D/2) + a sin_(i + D/2)). The rotation is fp32, rounded once to q's dtype, as in
    `apply_rotary_pos_emb_vision` of Transformers.

    Args:
        q: [T, H, D], fp16, bf16 or fp32, on the CPU also fp64; D is a multiple of 8 up to 256. Any strides, such as
            views of a packed projection; columns that are not contiguous are copied.
        k, v: [T, Hk, D], dtype and device of q. H is a multiple of Hk: each key head serves H / Hk query heads.
        cos, sin: [T, D], as Transformers' encoders make them, or [T, D / 2] for both halves of a head; fp32 or q's
            dtype. q and k use the same row. Autocast leaves fp32 tables.
        cu_seqlens: int32 [n + 1] on q's device: segment s is rows cu_seqlens[s] to cu_seqlens[s + 1]. A boundary that
            falls counts as the largest before it. Values of any tensor outside all segments reach neither results nor
            gradients.
        cu_seqlens_k: boundaries of the keys, shape of `cu_seqlens`; k still has as many rows as q. Default: those of
            the queries.
        scale, causal, window_left, window_right, softcap, deterministic: as in `window_attn`.
        return_lse: whether to return (out, lse). `torch.ops.vk.rope_window_attn` always returns both: with
            return_lse=False lse is [H, 0], and a later backward recomputes it. Default: False.

    Returns:
        out [T, H, D] in q's dtype. With return_lse also lse [H, T], fp32 (fp64 for fp64): the natural logarithm of the
        sum of exp(score), differentiable.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    Rotated q and k take as much memory as q and k during a call, and the backward makes them again. It keeps q, k, v,
    out, lse and the tables. Gradients of tables are summed in fp32 and rounded once. Forward and backward give the same
    bits for the same inputs, unless `deterministic` is False. RoFormer, arXiv 2104.09864; FlashAttention-2, arXiv
    2307.08691.
    """
    # The backward takes lse; without one, lse need not lie in memory.
    keeps_lse = check_bool("rope_window_attn", "return_lse", return_lse) or is_differentiated(q, k, v, cos, sin)
    out, lse = rope_window_attn_op(
        q, k, v, cos, sin, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap, deterministic,
        keeps_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["rope_window_attn"]
