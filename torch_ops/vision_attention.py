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
from torch.nn import functional

from torch_ops._attention.checks import is_differentiated, lse_dtype
from torch_ops._attention.packed_heads import (
    PackedBackward,
    PackedOptions,
    default_options,
    heads_of,
    plan_packed_backward,
)
from torch_ops._attention.plan import plan_forward
from torch_ops._attention.tensors import Forward
from torch_ops._core.checks import (
    check_bias,
    check_cu_seqlens,
    check_cu_seqlens_values,
    check_float,
    check_head_dim,
    check_like,
    check_matrix,
    check_num_heads,
    refuse,
)
from torch_ops._core.launch import contiguous_like, with_columns
from torch_ops._core.plan import Plan
from torch_ops._core.planned_op import gradient, planned_op
from torch_ops._core.torch_private import without_autocast
from torch_ops._gemm.elementwise import plan_column_sums
from torch_ops._gemm.portable import nothing_to_do
from torch_ops._gemm.tensors import ColumnSums

OP = "_vision_attention"
LEAVES = ("x", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias")


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


def _check_weights(op: str, call: Any, columns: int | None) -> None:
    check_num_heads(op, "q", call.num_heads)
    check_matrix(op, "qkv_weight", call.qkv_weight, "[3 H D, C]", (None, columns))
    rows = call.qkv_weight.shape[0]
    if rows % (3 * call.num_heads) != 0:
        refuse(op, "the number of rows of qkv_weight", f"a multiple of its {3 * call.num_heads} heads", rows)
    check_head_dim(op, "qkv_weight", rows // (3 * call.num_heads))
    check_matrix(op, "proj_weight", call.proj_weight, "[C', H D]", (None, rows // 3))


def _check(call: VisionAttention) -> None:
    check_matrix(OP, "x", call.x, "[T, C]", (None, None))
    check_float(OP, "x", call.x)
    _check_weights(OP, call, call.x.shape[1])
    for name, weight, bias in (
        ("qkv", call.qkv_weight, call.qkv_bias),
        ("proj", call.proj_weight, call.proj_bias),
    ):
        check_like(OP, f"{name}_weight", weight, "x", call.x)
        check_bias(OP, f"{name}_bias", bias, weight.shape[0], "x", call.x)
    check_cu_seqlens(OP, "cu_seqlens", call.cu_seqlens, "x", call.x)


def _outputs(call: VisionAttention) -> tuple[Tensor, ...]:
    """out, and what a backward needs: the packed product, attention's result and lse, of no rows if none does."""
    x, (n, _), rows = call.x, call.qkv_weight.shape, call.x.shape[0]
    kept = rows if call.keeps_packed else 0
    attended = (rows if call.keeps_attended else 0, call.num_heads, n // (3 * call.num_heads))
    return (
        x.new_empty((rows, call.proj_weight.shape[0])),
        x.new_empty((kept, n)),
        x.new_empty(attended),
        x.new_empty((call.num_heads, kept), dtype=lse_dtype(x)),
    )


def _forward_tensors(call: VisionAttention, packed: Tensor) -> Forward:
    q, k, v = heads_of(packed, call.num_heads)
    lse = q.new_empty((call.num_heads, q.shape[0] if call.keeps_packed else 0), dtype=lse_dtype(q))
    return Forward(q, k, v, call.cu_seqlens, None, contiguous_like(q), lse)


def _plan(call: VisionAttention, _: VisionAttention) -> Plan:
    n, num_heads = call.qkv_weight.shape[0], call.num_heads
    options = default_options(num_heads, n // 3, call.keeps_packed)
    attend = plan_forward(_forward_tensors(call, call.x.new_empty((call.x.shape[0], n))), options)
    fill = attend.launch

    def launch(call: VisionAttention) -> tuple[Tensor, ...]:
        with without_autocast():
            packed = functional.linear(call.x, call.qkv_weight, call.qkv_bias)
            t = _forward_tensors(call, packed)
            fill(t)
            attended, lse = t.out, t.lse
            # Without gradients, out may take the memory of the product.
            del t
            if not call.keeps_packed:
                packed = packed.new_empty((0, n))
            out = functional.linear(attended.flatten(1), call.proj_weight, call.proj_bias)
            return out, packed, attended if call.keeps_attended else attended.new_empty((0, *attended.shape[1:])), lse

    return Plan(launch, attend.kernels, attend.path, attend.why)


def _count_flops(call: Any, rows: int) -> tuple[int, int, int]:
    """Return those of the first projection, of attention, and of the second projection."""
    n = call.qkv_weight.shape[0]
    pairs = default_options(call.num_heads, n // 3).count_pairs(call.cu_seqlens, None, rows, rows)
    return 2 * rows * call.qkv_weight.numel(), 4 * (n // 3) * pairs, 2 * rows * call.proj_weight.numel()


vision_attention_op = planned_op(
    OP,
    VisionAttention,
    tuple[Tensor, Tensor, Tensor, Tensor],
    check=_check,
    outputs=_outputs,
    tensors=None,
    plan=_plan,
    check_values=lambda call: check_cu_seqlens_values(OP, "cu_seqlens", call.cu_seqlens, call.x.shape[0]),
    flops=lambda call: sum(_count_flops(call, call.x.shape[0])),
    autocast=True,
)


def _check_backward(call: VisionAttentionBackward) -> None:
    op, dout = f"{OP}_backward", call.dout
    check_float(op, "qkv_weight", call.qkv_weight)
    _check_weights(op, call, None)
    check_matrix(op, "dout", dout, "[T, C']", (None, call.proj_weight.shape[0]))
    for name, tensor in (("proj_weight", call.proj_weight), ("dout", dout)):
        check_like(op, name, tensor, "qkv_weight", call.qkv_weight)
    check_cu_seqlens(op, "cu_seqlens", call.cu_seqlens, "dout", dout)
    rows, (n, columns), heads = dout.shape[0], call.qkv_weight.shape, call.num_heads
    needs_attended = call.passes_attention or call.needs_proj_weight
    for name, kept, shape, is_needed in (
        ("x", call.x, (rows, columns), call.needs_qkv_weight),
        ("packed", call.packed, (rows, n), call.passes_attention),
        ("attended", call.attended, (rows, heads, n // (3 * heads)), needs_attended),
        ("lse", call.lse, (heads, rows), call.passes_attention),
    ):
        if is_needed and (kept is None or kept.shape != shape):
            refuse(op, name, f"of shape {list(shape)}", None if kept is None else list(kept.shape))


def _backward_outputs(call: VisionAttentionBackward) -> tuple[Tensor, ...]:
    dout, (n, columns), (width, inner) = call.dout, call.qkv_weight.shape, call.proj_weight.shape
    shapes = (dout.shape[0], columns), (n, columns), (n,), (width, inner), (width,)
    return tuple(dout.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, call[9:], strict=True))


def _attention_tensors(call: VisionAttentionBackward, dattended: Tensor) -> PackedBackward:
    assert call.packed is not None and call.attended is not None and call.lse is not None
    dpacked = dattended.new_empty((dattended.shape[0], call.qkv_weight.shape[0]))
    return PackedBackward(dattended, call.packed, call.attended, call.lse, call.cu_seqlens, dpacked)


def _column_sums(call: VisionAttentionBackward, dpacked: Tensor | None, dout: Tensor) -> ColumnSums:
    """The biases' gradients, unless they are not wanted, of the gradients of the products."""
    needs = call.needs_qkv_bias, call.needs_proj_bias
    sums = [
        x.new_empty((x.shape[1],)) if x is not None and needed else None
        for x, needed in zip((dpacked, dout), needs, strict=True)
    ]
    return ColumnSums(dpacked, dout, *sums)


def _plan_backward(call: VisionAttentionBackward, _: VisionAttentionBackward) -> Plan:
    attention, dpacked = Plan(nothing_to_do), None
    if call.passes_attention:
        t = _attention_tensors(call, call.dout.new_empty((call.dout.shape[0], call.proj_weight.shape[1])))
        attention, dpacked = plan_packed_backward(t, PackedOptions(call.num_heads)), t.dpacked
    sums = plan_column_sums(_column_sums(call, dpacked, with_columns(call.dout)))
    fill, add_up = attention.launch, sums.launch

    def launch(call: VisionAttentionBackward) -> tuple[Tensor, ...]:
        dout, made = with_columns(call.dout), dict[str, Tensor | None]()
        with without_autocast():
            dpacked = None
            if call.passes_attention:
                # The peak of memory; all other gradients are made after it.
                dpacked = fill(_attention_tensors(call, torch.mm(dout, call.proj_weight)))
            t = _column_sums(call, dpacked, dout)
            add_up(t)
            made["qkv_bias"], made["proj_bias"] = t.first_sums, t.second_sums
            if dpacked is not None and call.needs_x:
                made["x"] = torch.mm(dpacked, call.qkv_weight)
            if dpacked is not None and call.needs_qkv_weight and call.x is not None:
                made["qkv_weight"] = torch.mm(dpacked.t(), call.x)
            if call.needs_proj_weight and call.attended is not None:
                made["proj_weight"] = torch.mm(dout.t(), call.attended.flatten(1))
        return tuple(dout.new_empty((0,)) if (each := made.get(name)) is None else each for name in LEAVES)

    why = (attention.path, attention.why) if call.passes_attention else (sums.path, sums.why)
    return Plan(launch, {**attention.kernels, **sums.kernels}, *why)


def _backward_flops(call: VisionAttentionBackward) -> int:
    """Two products for each of a projection, five for attention's two, as far as they are wanted."""
    first, attention, second = _count_flops(call, call.dout.shape[0])
    through = call.passes_attention
    return (
        first * (call.needs_x + call.needs_qkv_weight) + second * (through + call.needs_proj_weight)
        + attention * 5 // 2 * through
    )  # fmt: skip


vision_attention_backward_op = planned_op(
    f"{OP}_backward",
    VisionAttentionBackward,
    tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    check=_check_backward,
    outputs=_backward_outputs,
    tensors=None,
    plan=_plan_backward,
    flops=_backward_flops,
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
