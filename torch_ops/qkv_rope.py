"""`vk::qkv_rope`: the packed q, k, v projection of an encoder with its rotary embedding, and its backward.

    (q, k, v) = x weight^T + bias, split into heads;  q and k rotated by the angles of their row

The rotation is fp32 (csrc_free_ops/tiles/rope.py). The stock Triton kernel, the ROTARY branch of `_gemm_pair_kernel` in
csrc_free_ops/gemm/portable.py, rotates the fp32 sums and rounds once. The Hopper kernel, products left to PyTorch and
the CPU round the product first, as a linear layer does, and round again after the rotation.

Tables that require a gradient get theirs from q and k before their rotation, which the backward makes again.
"""

from typing import Any, NamedTuple

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
from torch_ops._core.plan import Plan, merged, reference_plan
from torch_ops._core.planned_op import gradient, planned_op
from torch_ops._core.registry import runs_kernels
from torch_ops._core.rotation_gradient import new_table_gradients
from torch_ops._core.torch_private import without_autocast
from torch_ops._gemm.cpu import qkv_rope_cpu, rotary_backward_cpu
from torch_ops._gemm.elementwise import ROTATED_RUN, new_column_sums, plan_rotary_backward, sum_runs
from torch_ops._gemm.plan import plan_of, plan_rotary
from torch_ops._gemm.portable import rows_of
from torch_ops._gemm.rotary_tables import RotaryTables, plan_rotary_tables
from torch_ops._gemm.tensors import Rotary, RotaryBackward, RotaryOptions


class QkvRope(NamedTuple):
    """The arguments of `vk::qkv_rope`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cos: Tensor
    sin: Tensor
    num_heads: int
    num_k_heads: int | None = None


class QkvRopeBackward(NamedTuple):
    """The arguments of `vk::qkv_rope_backward`."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    x: Tensor | None
    weight: Tensor
    cos: Tensor
    sin: Tensor
    needs_x: bool = True
    needs_weight: bool = True
    needs_bias: bool = True
    needs_tables: bool = False
    bias: Tensor | None = None

    @property
    def packs(self) -> bool:
        """Whether the gradient of the product is wanted, for those of x and weight."""
        return self.needs_x or self.needs_weight


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


def _check(call: QkvRope) -> None:
    op, x, weight = "qkv_rope", call.x, call.weight
    check_matrix(op, "x", x, "[T, C]", (None, None))
    check_float(op, "x", x)
    if x.shape[1] == 0:
        refuse(op, "the number of columns of x", "1 or more", 0)
    num_k_heads = _check_heads(op, call.num_heads, call.num_k_heads)
    head_dim = _check_weight(op, weight, call.num_heads, num_k_heads, x.shape[1])
    check_like(op, "weight", weight, "x", x)
    check_bias(op, "bias", call.bias, weight.shape[0], "x", x)
    check_tables(op, call.cos, call.sin, x.shape[0], head_dim, "x", x)


def _shapes(call: QkvRope) -> tuple[tuple[int, int, int], ...]:
    """Those of q, k and v."""
    rows, num_heads = call.cos.shape[0], call.num_heads
    num_k_heads = num_heads if call.num_k_heads is None else call.num_k_heads
    head_dim = call.weight.shape[0] // (num_heads + 2 * num_k_heads)
    heads = rows, num_k_heads, head_dim
    return (rows, num_heads, head_dim), heads, heads


def _outputs(call: QkvRope) -> tuple[Tensor, ...]:
    return tuple(call.x.new_empty(shape) for shape in _shapes(call))


def _tensors(call: QkvRope, made: tuple[Tensor, Tensor, Tensor]) -> Rotary:
    return Rotary(rows_of(call.x), *call[1:5], *made)


def _plan(t: Rotary, call: QkvRope) -> Plan:
    if not runs_kernels(call.x):
        return reference_plan(qkv_rope_cpu, call.x)
    plan = plan_rotary(t, RotaryOptions())
    return plan_of(plan.launch, plan)


qkv_rope_op = planned_op(
    "qkv_rope",
    QkvRope,
    tuple[Tensor, Tensor, Tensor],
    check=_check,
    outputs=_outputs,
    tensors=_tensors,
    plan=_plan,
    # FLOPs of the product; the rotation is not counted.
    flops=lambda call: 2 * call.x.numel() * call.weight.shape[0],
    autocast=True,
    keeps_dtype=("cos", "sin"),
)


def _check_backward(call: QkvRopeBackward) -> None:
    op, dq, dk, x, weight = "qkv_rope_backward", call.dq, call.dk, call.x, call.weight
    for name, tensor in (("dq", dq), ("dk", dk), ("dv", call.dv)):
        check_packed(op, name, tensor)
        check_like(op, name, tensor, "dq", dq)
        if (tensor.shape[0], tensor.shape[2]) != (dq.shape[0], dq.shape[2]):
            refuse(op, name, f"of {dq.shape[0]} rows and {dq.shape[2]} columns as dq is", list(tensor.shape))
    check_float(op, "dq", dq)
    _check_heads(op, dq.shape[1], dk.shape[1])
    if call.dv.shape != dk.shape:
        refuse(op, "dv", f"of shape {list(dk.shape)} as dk is", list(call.dv.shape))
    head_dim = _check_weight(op, weight, dq.shape[1], dk.shape[1], None)
    check_like(op, "weight", weight, "dq", dq)
    if head_dim != dq.shape[2]:
        refuse(op, "the head dimension of weight", f"{dq.shape[2]} as that of dq is", head_dim)
    check_tables(op, call.cos, call.sin, dq.shape[0], head_dim, "dq", dq)
    if call.needs_weight or call.needs_tables:
        check_dense(op, "x", x)
    check_bias(op, "bias", call.bias, weight.shape[0], "dq", dq)
    if x is not None:
        check_matrix(op, "x", x, "[T, C]", (dq.shape[0], weight.shape[1]))
        check_like(op, "x", x, "dq", dq)


def _backward_outputs(call: QkvRopeBackward) -> tuple[Tensor, ...]:
    dq, (n, columns) = call.dq, call.weight.shape
    shapes = ((dq.shape[0], columns), call.needs_x), ((n, columns), call.needs_weight), ((n,), call.needs_bias)
    made = tuple(dq.new_empty(shape if needed else (0,)) for shape, needed in shapes)
    return *made, *new_table_gradients(dq, call.cos, call.needs_tables)


def _backward_tensors(call: QkvRopeBackward) -> RotaryBackward:
    dq, dk, dv, _, weight, cos, sin, *_ = call
    n = weight.shape[0]
    packed = dq.new_empty((dq.shape[0] if call.packs else 0, n))
    partial = new_column_sums(dq, dq.shape[0] if call.needs_bias else 0, n, ROTATED_RUN)
    return RotaryBackward(dq, dk, dv, cos, sin, packed, partial)


def _tables_of(call: QkvRopeBackward) -> RotaryTables:
    return RotaryTables(call.dq, call.dk, call.x, call.weight, call.bias, call.cos)


def _plan_backward(call: QkvRopeBackward, _: QkvRopeBackward) -> Plan:
    if runs_kernels(call.dq):
        plan = plan_rotary_backward(_backward_tensors(call), call.weight, call.packs, call.needs_bias)
    else:
        plan = reference_plan(rotary_backward_cpu, call.dq)
    fill, tables = plan.launch, plan_rotary_tables(_tables_of(call)) if call.needs_tables else None

    def launch(call: QkvRopeBackward) -> tuple[Tensor, ...]:
        t, x = _backward_tensors(call), call.x
        if call.packs or call.needs_bias:
            fill(t)
        with without_autocast():
            made = (
                torch.mm(t.packed, call.weight) if call.needs_x else t.dq.new_empty((0,)),
                torch.mm(t.packed.t(), x) if call.needs_weight and x is not None else t.dq.new_empty((0,)),
                sum_runs(t.partial, t.dq.dtype) if call.needs_bias else t.dq.new_empty((0,)),
            )
        if tables is None:
            return *made, *new_table_gradients(t.dq, call.cos, False)
        return *made, *tables.launch(_tables_of(call))

    return Plan(launch, merged(plan.kernels, tables.kernels if tables else {}), plan.path, plan.why)


qkv_rope_backward_op = planned_op(
    "qkv_rope_backward",
    QkvRopeBackward,
    tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    check=_check_backward,
    outputs=_backward_outputs,
    tensors=None,
    plan=_plan_backward,
    flops=lambda call: (
        2 * call.dq.shape[0] * call.weight.numel() * (call.needs_x + call.needs_weight)
        + 2 * call.dq.shape[0] * call.weight.shape[1] * _tables_of(call).columns * call.needs_tables
    ),
)
qkv_rope_backward_op.refuse_autograd()


GRADIENTS = ("x", "weight", "bias", "cos", "sin")


def _needs_tables(needed: frozenset[str]) -> bool:
    return "cos" in needed or "sin" in needed


def _saved(call: QkvRope, needed: frozenset[str]) -> tuple[str, ...]:
    # x is for the gradients of the weight and of tables: where these are frozen, nothing of it is kept.
    tables = ("x", "bias") if _needs_tables(needed) else ("x",) if "weight" in needed else ()
    return *tables, "weight", "cos", "sin"


def _differentiate(call: QkvRope, results: Any, grads: Any, needed: frozenset[str]) -> dict[str, Tensor | None]:
    needs = [*[name in needed for name in ("x", "weight", "bias")], _needs_tables(needed)]
    if not any(needs):
        return {}
    each = (
        call.weight.new_zeros(()).expand(shape) if grad is None else grad
        for grad, shape in zip(grads, _shapes(call), strict=True)
    )
    made = qkv_rope_backward_op(*each, call.x, call.weight, call.cos, call.sin, *needs, call.bias)
    return dict(zip(GRADIENTS, made, strict=True))


gradient(qkv_rope_op, QkvRope, _differentiate, of=GRADIENTS, saves=_saved)


def qkv_rope(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_k_heads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute x weight^T + bias, split into the heads of q, k and v, with q and k rotated by the angles of their row.

    Args:
        x: [T, C], fp16, bf16 or fp32, on the CPU also fp64. Any strides; columns that are not contiguous are copied.
        weight: [(H + 2 Hk) D, C], dtype and device of x, any strides. Rows are q's heads, then k's, then v's, as in the
            `qkv` of Transformers' vision encoders. D is a multiple of 8 up to 256.
        bias: [(H + 2 Hk) D], or None.
        cos, sin: [T, D], as Transformers' encoders make them, or [T, D / 2] for both halves of a head; fp32 or x's
            dtype. Autocast leaves fp32 tables.
        num_heads, num_k_heads: H and Hk. Default of Hk: H.

    Returns:
        q [T, H, D], k and v [T, Hk, D], contiguous, in x's dtype, as `window_attn` takes them.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    Column i of the first half of a head is rotated with column i of the second (GPT-NeoX's order). (a, b) becomes (a
    cos_i - b sin_i, b cos_(i + D/2) + a sin_(i + D/2)). Sums and rotation are fp32. In half types sums are rounded
    before they are rotated, except in the stock Triton kernels, which round once (docs/gemm.md). fp32 inputs use tf32
    only if `torch.backends.cuda.matmul` allows it. Only gradients that are required are computed: with a frozen weight
    x is not kept. Gradients of tables are summed in fp32 and rounded once. Forward and backward give the same bits for
    the same inputs. RoFormer, arXiv 2104.09864.
    """
    return qkv_rope_op(x, weight, bias, cos, sin, num_heads, num_k_heads)


__all__ = ["qkv_rope"]
