"""`vk::qkv_rope`: the packed q, k, v projection of an encoder with its rotary embedding, and its backward.

    (q, k, v) = x weight^T + bias, split into heads;  q and k rotated by the angles of their row

The rotation is that of csrc_free_ops/tiles/rope.py, in fp32. The kernel in stock Triton, the ROTARY branch of
`_gemm_pair_kernel` in csrc_free_ops/gemm/portable.py, rotates the fp32 sums and rounds once. Elsewhere (the Hopper
kernel, products left to PyTorch, the CPU) the product is rounded first, as by a linear layer, and what was rotated
again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops._core.checks import (
    check_bias,
    check_dense,
    check_float,
    check_head_dim,
    check_like,
    check_matrix,
    check_num_heads,
    check_packed,
    check_tables,
    refuse,
)
from torch_ops._core.registry import remembered, runs_kernels, vk_op
from torch_ops._gemm.cpu import qkv_rope_cpu, rotary_backward_cpu
from torch_ops._gemm.elementwise import ROTATED_RUN, new_sums, plan_rotary_backward, sum_runs
from torch_ops._gemm.plan import plan_rotary
from torch_ops._gemm.portable import Rows, rows_of


def _check_heads(op: str, num_heads: int, num_k_heads: int | None) -> int:
    """The number of key heads."""
    num_k_heads = num_heads if num_k_heads is None else num_k_heads
    check_num_heads(op, "q", num_heads)
    check_num_heads(op, "k", num_k_heads)
    return num_k_heads


def _check_weight(op: str, weight: Tensor, num_heads: int, num_k_heads: int, columns: int | None) -> int:
    """The head dimension."""
    check_matrix(op, "weight", weight, "[(H + 2 Hk) D, C]", (None, columns))
    heads = num_heads + 2 * num_k_heads
    if weight.shape[0] % heads != 0:
        refuse(op, "the number of rows of weight", f"a multiple of its {heads} heads", weight.shape[0])
    check_head_dim(op, "weight", weight.shape[0] // heads)
    return weight.shape[0] // heads


def _check_qkv_rope(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, num_heads: int,
    num_k_heads: int | None,
) -> tuple[int, int]:  # fmt: skip
    """(number of key heads, head dimension)"""
    check_matrix(op, "x", x, "[T, C]", (None, None))
    check_float(op, "x", x)
    if x.shape[1] == 0:
        refuse(op, "the number of columns of x", "1 or more", 0)
    num_k_heads = _check_heads(op, num_heads, num_k_heads)
    head_dim = _check_weight(op, weight, num_heads, num_k_heads, x.shape[1])
    check_like(op, "weight", weight, "x", x)
    check_bias(op, "bias", bias, weight.shape[0], "x", x)
    check_tables(op, cos, sin, x.shape[0], head_dim, "x", x)
    return num_k_heads, head_dim


def _outputs(x: Tensor, weight: Tensor, num_heads: int, num_k_heads: int | None) -> tuple[Tensor, Tensor, Tensor]:
    num_k_heads = num_heads if num_k_heads is None else num_k_heads
    head_dim = weight.shape[0] // (num_heads + 2 * num_k_heads)
    q = x.new_empty((x.shape[0], num_heads, head_dim))
    k, v = (x.new_empty((x.shape[0], num_k_heads, head_dim)) for _ in range(2))
    return q, k, v


def _qkv_rope_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, num_heads: int,
    num_k_heads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_qkv_rope("qkv_rope", x, weight, bias, cos, sin, num_heads, num_k_heads)
    return _outputs(x, weight, num_heads, num_k_heads)


def _qkv_rope_flops(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> int:
    """Of the product; the rotation is not counted."""
    return 2 * x.numel() * weight.shape[0]


@remembered
def _prepare_qkv_rope(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, num_heads: int, num_k_heads: int | None
) -> Callable[..., None]:
    num_k_heads, _ = _check_qkv_rope("qkv_rope", x, weight, bias, cos, sin, num_heads, num_k_heads)
    if runs_kernels(x):
        return plan_rotary(Rows.of(x), weight, bias is not None, cos, sin, num_heads, num_k_heads)
    return qkv_rope_cpu


@vk_op("qkv_rope", fake=_qkv_rope_fake, autocast=True, keeps_dtype=("cos", "sin"), flops=_qkv_rope_flops)
def qkv_rope_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, num_heads: int,
    num_k_heads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    launch = _prepare_qkv_rope(x, weight, bias, cos, sin, num_heads, num_k_heads)
    q, k, v = _outputs(x, weight, num_heads, num_k_heads)
    launch(rows_of(x), weight, bias, cos, sin, q, k, v)
    return q, k, v


def _check_qkv_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor | None, weight: Tensor, cos: Tensor, sin: Tensor, needs_weight: bool
) -> None:
    op = "qkv_rope_backward"
    for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
        check_packed(op, name, gradient)
        check_like(op, name, gradient, "dq", dq)
        if (gradient.shape[0], gradient.shape[2]) != (dq.shape[0], dq.shape[2]):
            refuse(op, name, f"of {dq.shape[0]} rows and {dq.shape[2]} columns as dq is", list(gradient.shape))
    check_float(op, "dq", dq)
    _check_heads(op, dq.shape[1], dk.shape[1])
    if dv.shape != dk.shape:
        refuse(op, "dv", f"of shape {list(dk.shape)} as dk is", list(dv.shape))
    head_dim = _check_weight(op, weight, dq.shape[1], dk.shape[1], None)
    check_like(op, "weight", weight, "dq", dq)
    if head_dim != dq.shape[2]:
        refuse(op, "the head dimension of weight", f"{dq.shape[2]} as that of dq is", head_dim)
    check_tables(op, cos, sin, dq.shape[0], head_dim, "dq", dq)
    if needs_weight:
        check_dense(op, "x", x)
    if x is not None:
        check_matrix(op, "x", x, "[T, C]", (dq.shape[0], weight.shape[1]))
        check_like(op, "x", x, "dq", dq)


def _qkv_rope_backward_fake(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor | None, weight: Tensor, cos: Tensor, sin: Tensor,
    needs_x: bool = True, needs_weight: bool = True, needs_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_qkv_rope_backward(dq, dk, dv, x, weight, cos, sin, needs_weight)
    n, columns = weight.shape
    return (
        dq.new_empty((dq.shape[0], columns) if needs_x else (0,)),
        dq.new_empty((n, columns) if needs_weight else (0,)),
        dq.new_empty((n,) if needs_bias else (0,)),
    )


def _qkv_rope_backward_flops(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor | None, weight: Tensor, cos: Tensor, sin: Tensor,
    needs_x: bool = True, needs_weight: bool = True, *rest: Any, **named: Any,
) -> int:  # fmt: skip
    return 2 * dq.shape[0] * weight.numel() * (needs_x + needs_weight)


@remembered
def _prepare_qkv_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor | None, weight: Tensor, cos: Tensor, sin: Tensor,
    needs_weight: bool, packs: bool, sums: bool,
) -> Callable[..., None]:  # fmt: skip
    _check_qkv_rope_backward(dq, dk, dv, x, weight, cos, sin, needs_weight)
    if runs_kernels(dq):
        return plan_rotary_backward(dq, dk, dv, weight, cos, sin, packs, sums)
    return rotary_backward_cpu


@vk_op("qkv_rope_backward", fake=_qkv_rope_backward_fake, flops=_qkv_rope_backward_flops)
def qkv_rope_backward_op(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor | None, weight: Tensor, cos: Tensor, sin: Tensor,
    needs_x: bool = True, needs_weight: bool = True, needs_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # packed: the gradient of the product, for those of x and weight. partial: its sums by runs of rows, for the bias's.
    packs = needs_x or needs_weight
    launch = _prepare_qkv_rope_backward(dq, dk, dv, x, weight, cos, sin, needs_weight, packs, needs_bias)
    n = weight.shape[0]
    packed = dq.new_empty((dq.shape[0], n) if packs else (0, n))
    partial = new_sums(dq, dq.shape[0] if needs_bias else 0, n, ROTATED_RUN)
    launch(dq, dk, dv, cos, sin, packed, partial)
    with torch._C._DisableAutocast():
        return (
            torch.mm(packed, weight) if needs_x else dq.new_empty((0,)),
            torch.mm(packed.t(), x) if needs_weight and x is not None else dq.new_empty((0,)),
            sum_runs(partial, dq.dtype) if needs_bias else dq.new_empty((0,)),
        )


qkv_rope_backward_op.refuse_autograd()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, cos, sin, *_ = inputs
    # x is for the gradient of the weight alone: where that is frozen, nothing of it is kept.
    ctx.needs = tuple(ctx.needs_input_grad[:3])
    ctx.save_for_backward(x if ctx.needs[1] else None, weight, cos, sin)
    ctx.shapes = tuple(each.shape for each in output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    x, weight, cos, sin = ctx.saved_tensors
    if all(gradient is None for gradient in grads) or not any(ctx.needs):
        return (None,) * 7
    dq, dk, dv = (
        weight.new_zeros(()).expand(shape) if gradient is None else gradient
        for gradient, shape in zip(grads, ctx.shapes, strict=True)
    )
    made = qkv_rope_backward_op(dq, dk, dv, x, weight, cos, sin, *ctx.needs)
    return *(gradient if needed else None for gradient, needed in zip(made, ctx.needs, strict=True)), *(None,) * 4


qkv_rope_op.register_autograd(_backward, setup_context=_setup_context)


def qkv_rope(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_k_heads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x weight^T + bias split into the heads of q, k and v, with q and k rotated by the angles of their row.

    Args:
        x: [T, C] in fp16, bf16 or fp32, any strides; columns that are not contiguous are copied. On the CPU also fp64.
        weight: [(H + 2 Hk) D, C], x's dtype and device, any strides: the rows of q's heads, then k's, then v's, as the
            `qkv` of Transformers' vision encoders has them. D is a multiple of 8 up to 256.
        bias: [(H + 2 Hk) D], or None.
        cos, sin: [T, D], as Transformers' encoders make them, or [T, D / 2] for both halves of a head; in fp32 or x's
            dtype. They are constants: they get no gradient. Autocast leaves those of fp32 as they are.
        num_heads, num_k_heads: H, and Hk, which is H where None.

    Returns:
        q [T, H, D], k and v [T, Hk, D], contiguous, in x's dtype, as `window_attn` takes them.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    Column i of a head's first half is turned with column i of its second (GPT-NeoX's order):
    (a, b) becomes (a cos_i - b sin_i, b cos_(i + D/2) + a sin_(i + D/2)). Sums and rotation are fp32. In half types
    sums are rounded before they are rotated, as by a linear layer, but in the kernels in stock Triton, which round once
    (docs/gemm.md). fp32 inputs use tf32 only where `torch.backends.cuda.matmul` allows it. Gradients are made for what
    requires them: with a frozen weight x is not kept. Forward and backward give the same bits for the same inputs.
    RoFormer, arXiv 2104.09864.
    """
    return qkv_rope_op(x, weight, bias, cos, sin, num_heads, num_k_heads)


__all__ = ["qkv_rope"]
