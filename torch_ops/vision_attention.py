"""`vk::_vision_attention`: two projections with attention in segments between them, and its backward.

    q, k, v = x qkv_weight^T + qkv_bias, split into heads
    out = window_attn(q, k, v) proj_weight^T + proj_bias

The op is private: `torch_ops.models.VisionAttention` calls it where nothing is rotated. PyTorch makes the products, and
attention reads q, k and v where the product wrote them. The backward writes dq, dk and dv into one tensor, which is the
gradient of the product. One launch sums up the gradients of both biases. Autograd of linear layers would copy dq, dk
and dv together, and PyTorch's sums would ask for three times their memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops._attention.checks import is_differentiated
from torch_ops._core.checks import check_cu_seqlens_values
from torch_ops._core.planned_op import gradient, planned_op
from torch_ops._core.torch_private import without_autocast
from torch_ops._projected_attention import (
    LEAVES,
    OP,
    check_vision_attention,
    check_vision_attention_backward,
    count_vision_attention_flops,
    plan_vision_attention,
    plan_vision_attention_backward,
    vision_attention_backward_flops,
    vision_attention_gradients,
    vision_attention_outputs,
)


class VisionAttention(NamedTuple):
    """The arguments of `vk::_vision_attention`."""

    x: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    proj_weight: Tensor
    proj_bias: Tensor | None
    cu_seqlens: Tensor
    num_heads: int
    keeps_packed: bool = True
    keeps_attended: bool = True


class VisionAttentionBackward(NamedTuple):
    """The arguments of `vk::_vision_attention_backward`. Tensors that no wanted gradient needs may be absent."""

    dout: Tensor
    x: Tensor | None
    qkv_weight: Tensor
    proj_weight: Tensor
    cu_seqlens: Tensor
    packed: Tensor | None
    attended: Tensor | None
    lse: Tensor | None
    num_heads: int
    needs_x: bool = True
    needs_qkv_weight: bool = True
    needs_qkv_bias: bool = True
    needs_proj_weight: bool = True
    needs_proj_bias: bool = True

    @property
    def passes_attention(self) -> bool:
        """Whether a gradient is wanted of what lies before attention."""
        return self.needs_x or self.needs_qkv_weight or self.needs_qkv_bias


vision_attention_op = planned_op(
    OP,
    VisionAttention,
    tuple[Tensor, Tensor, Tensor, Tensor],
    check=check_vision_attention,
    outputs=vision_attention_outputs,
    tensors=None,
    plan=plan_vision_attention,
    check_values=lambda call: check_cu_seqlens_values(OP, "cu_seqlens", call.cu_seqlens, call.x.shape[0]),
    flops=lambda call: sum(count_vision_attention_flops(call, call.x.shape[0])),
    autocast=True,
)


vision_attention_backward_op = planned_op(
    f"{OP}_backward",
    VisionAttentionBackward,
    tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    check=check_vision_attention_backward,
    outputs=vision_attention_gradients,
    tensors=None,
    plan=plan_vision_attention_backward,
    flops=vision_attention_backward_flops,
)
vision_attention_backward_op.refuse_autograd()


def _lacks(call: VisionAttention, needed: frozenset[str]) -> bool:
    """Whether the forward kept too little: exported without gradients, and run with them."""
    return bool(needed & {*LEAVES[:3]} and not call.keeps_packed or needed - {"proj_bias"} and not call.keeps_attended)


def _saved(call: VisionAttention, needed: frozenset[str]) -> tuple[str, ...]:
    if _lacks(call, needed):
        return (*LEAVES, "cu_seqlens")
    return (*(("x",) if "qkv_weight" in needed else ()), "qkv_weight", "proj_weight", "cu_seqlens")


def _differentiate(call: VisionAttention, results: Any, grads: Any, needed: frozenset[str]) -> dict[str, Tensor | None]:
    needs = [name in needed for name in LEAVES]
    if not any(needs):
        return {}
    if _lacks(call, needed):
        with without_autocast():
            results = vision_attention_op(*call._replace(keeps_packed=True, keeps_attended=True))
    kept = call.cu_seqlens, *results[1:], call.num_heads
    dout, _, dattended, _ = grads
    made: list[Tensor | None] = [None] * len(LEAVES)
    if dout is not None:
        made[:] = vision_attention_backward_op(dout, call.x, call.qkv_weight, call.proj_weight, *kept, *needs)
    if dattended is not None and any(needs[:3]):
        # Only callers of the operator itself use this result: a projection by the identity stands behind it.
        rows = dattended.flatten(1)
        one = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        more = vision_attention_backward_op(rows, call.x, call.qkv_weight, one, *kept, *needs[:3], False, False)
        made[:3] = [new if old is None else old + new for old, new in zip(made[:3], more[:3], strict=True)]
    return dict(zip(LEAVES, made, strict=True))


gradient(
    vision_attention_op,
    VisionAttention,
    _differentiate,
    of=LEAVES,
    saves=_saved,
    saves_results=(1, 2, 3),
    # Attention's result stays differentiable, so that a second derivative is refused rather than dropped.
    constant=lambda call, needed: (1, 3),
)


def vision_attention(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    cu_seqlens: Tensor,
    num_heads: int,
) -> Tensor:
    """Compute attention of x [T, C] between two projections, [T, C'], without a rotation.

    Args:
        x: [T, C], fp16, bf16 or fp32, on the CPU also fp64; any strides.
        qkv_weight, qkv_bias: [3 H D, C] and [3 H D], or no bias. Rows are q's heads, then k's, then v's.
        proj_weight, proj_bias: [C', H D] and [C'], or no bias.
        cu_seqlens: int32 [n + 1], as in `window_attn`.
        num_heads: H.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.

    Products are PyTorch's. Only gradients that are required are computed, and only what they need is kept. Forward and
    backward give the same bits for the same inputs.
    """
    before = is_differentiated(x, qkv_weight, qkv_bias)
    attended = before or is_differentiated(proj_weight)
    return vision_attention_op(
        x, qkv_weight, qkv_bias, proj_weight, proj_bias, cu_seqlens, num_heads, before, attended
    )[0]  # fmt: skip


__all__ = ["vision_attention"]
