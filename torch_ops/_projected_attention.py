"""The parts of `vk::_vision_attention` and its backward: checks, products of PyTorch's, attention between them.

A call is that of `torch_ops.vision_attention`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torch_ops._attention.checks import lse_dtype
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
    check_float,
    check_head_dim,
    check_like,
    check_matrix,
    check_num_heads,
    refuse,
)
from torch_ops._core.launch import contiguous_like, with_columns
from torch_ops._core.plan import Plan
from torch_ops._core.torch_private import without_autocast
from torch_ops._gemm.elementwise import plan_column_sums
from torch_ops._gemm.portable import nothing_to_do
from torch_ops._gemm.tensors import ColumnSums

OP = "_vision_attention"
LEAVES = ("x", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias")


def _check_weights(op: str, call: Any, columns: int | None) -> None:
    check_num_heads(op, "q", call.num_heads)
    check_matrix(op, "qkv_weight", call.qkv_weight, "[3 H D, C]", (None, columns))
    rows = call.qkv_weight.shape[0]
    if rows % (3 * call.num_heads) != 0:
        refuse(op, "the number of rows of qkv_weight", f"a multiple of its {3 * call.num_heads} heads", rows)
    check_head_dim(op, "qkv_weight", rows // (3 * call.num_heads))
    check_matrix(op, "proj_weight", call.proj_weight, "[C', H D]", (None, rows // 3))


def check_vision_attention(call: Any) -> None:
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


def vision_attention_outputs(call: Any) -> tuple[Tensor, ...]:
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


def _forward_tensors(call: Any, packed: Tensor) -> Forward:
    q, k, v = heads_of(packed, call.num_heads)
    lse = q.new_empty((call.num_heads, q.shape[0] if call.keeps_packed else 0), dtype=lse_dtype(q))
    return Forward(q, k, v, call.cu_seqlens, None, contiguous_like(q), lse)


def plan_vision_attention(call: Any, _: Any) -> Plan:
    n, num_heads = call.qkv_weight.shape[0], call.num_heads
    options = default_options(num_heads, n // 3, call.keeps_packed)
    attend = plan_forward(_forward_tensors(call, call.x.new_empty((call.x.shape[0], n))), options)
    fill = attend.launch

    def launch(call: Any) -> tuple[Tensor, ...]:
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


def count_vision_attention_flops(call: Any, rows: int) -> tuple[int, int, int]:
    """Return those of the first projection, of attention, and of the second projection."""
    n = call.qkv_weight.shape[0]
    pairs = default_options(call.num_heads, n // 3).count_pairs(call.cu_seqlens, None, rows, rows)
    return 2 * rows * call.qkv_weight.numel(), 4 * (n // 3) * pairs, 2 * rows * call.proj_weight.numel()


def check_vision_attention_backward(call: Any) -> None:
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


def vision_attention_gradients(call: Any) -> tuple[Tensor, ...]:
    dout, (n, columns), (width, inner) = call.dout, call.qkv_weight.shape, call.proj_weight.shape
    shapes = (dout.shape[0], columns), (n, columns), (n,), (width, inner), (width,)
    return tuple(dout.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, call[9:], strict=True))


def _attention_tensors(call: Any, dattended: Tensor) -> PackedBackward:
    assert call.packed is not None and call.attended is not None and call.lse is not None
    dpacked = dattended.new_empty((dattended.shape[0], call.qkv_weight.shape[0]))
    return PackedBackward(dattended, call.packed, call.attended, call.lse, call.cu_seqlens, dpacked)


def _column_sums(call: Any, dpacked: Tensor | None, dout: Tensor) -> ColumnSums:
    """The biases' gradients, unless they are not wanted, of the gradients of the products."""
    needs = call.needs_qkv_bias, call.needs_proj_bias
    sums = [
        x.new_empty((x.shape[1],)) if x is not None and needed else None
        for x, needed in zip((dpacked, dout), needs, strict=True)
    ]
    return ColumnSums(dpacked, dout, *sums)


def plan_vision_attention_backward(call: Any, _: Any) -> Plan:
    attention, dpacked = Plan(nothing_to_do), None
    if call.passes_attention:
        t = _attention_tensors(call, call.dout.new_empty((call.dout.shape[0], call.proj_weight.shape[1])))
        attention, dpacked = plan_packed_backward(t, PackedOptions(call.num_heads)), t.dpacked
    sums = plan_column_sums(_column_sums(call, dpacked, with_columns(call.dout)))
    fill, add_up = attention.launch, sums.launch

    def launch(call: Any) -> tuple[Tensor, ...]:
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


def vision_attention_backward_flops(call: Any) -> int:
    """Two products for each of a projection, five for attention's two, as far as they are wanted."""
    first, attention, second = count_vision_attention_flops(call, call.dout.shape[0])
    through = call.passes_attention
    return (
        first * (call.needs_x + call.needs_qkv_weight) + second * (through + call.needs_proj_weight)
        + attention * 5 // 2 * through
    )  # fmt: skip
