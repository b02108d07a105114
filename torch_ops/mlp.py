"""`vk::mlp`: the two layers of a transformer's MLP with the activation in the first's epilogue, and its backward.

    pre = x w1^T + b1       h = act(pre); of "swiglu", silu of the first half of pre's columns times the second
    out = h w2^T + b2

The halves of "swiglu" may have weights of their own: pre = [x w1^T + b1, x w_up^T + b_up].

Kernels: `csrc_free_ops.gemm`. The gradients' products are PyTorch's own, but for dh on Hopper GPUs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Size, Tensor

from torch_ops._core.planned_op import gradient, planned_op
from torch_ops._core.torch_private import without_autocast
from torch_ops._gemm.mlp import (
    check_mlp,
    check_mlp_backward,
    keeps_hidden,
    mlp_backward_flops,
    mlp_backward_outputs,
    mlp_flops,
    mlp_outputs,
    mlp_tensors,
    plan_mlp,
    plan_mlp_backward,
)
from torch_ops._gemm.portable import rows_of


class Mlp(NamedTuple):
    """The arguments of `vk::mlp`."""

    x: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    activation: str = "gelu_tanh"
    return_hidden: bool = True
    w_up: Tensor | None = None
    b_up: Tensor | None = None


class MlpBackward(NamedTuple):
    """The arguments of `vk::mlp_backward`."""

    dout: Tensor
    x: Tensor | None
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    hidden: Tensor
    activation: str = "gelu_tanh"
    needs_x: bool = True
    needs_w1: bool = True
    needs_b1: bool = True
    needs_w2: bool = True
    needs_b2: bool = True
    w_up: Tensor | None = None
    b_up: Tensor | None = None
    needs_w_up: bool = False
    needs_b_up: bool = False

    @property
    def needs_up(self) -> bool:
        return self.needs_w_up or self.needs_b_up

    @property
    def inner(self) -> bool:
        """Whether the gradient of the first product is wanted, for what it is made of."""
        return self.needs_x or self.needs_w1 or self.needs_b1 or self.needs_up

    @property
    def needs_hidden(self) -> bool:
        return self.inner or self.needs_w2


# Gradients of x, w1, b1, w2, b2, w_up and b_up; empty if not needed.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
DIFFERENTIABLE = ("x", "w1", "b1", "w2", "b2", "w_up", "b_up")
FIRST_LAYER = ("x", "w1", "b1", "w_up", "b_up")

mlp_op = planned_op(
    "mlp",
    Mlp,
    tuple[Tensor, Tensor],
    check=check_mlp,
    outputs=mlp_outputs,
    tensors=mlp_tensors,
    plan=plan_mlp,
    flops=mlp_flops,
    autocast=True,
)
mlp_backward_op = planned_op(
    "mlp_backward",
    MlpBackward,
    Gradients,
    check=check_mlp_backward,
    outputs=mlp_backward_outputs,
    tensors=None,
    plan=plan_mlp_backward,
    flops=mlp_backward_flops,
)
mlp_backward_op.refuse_autograd()


def _saved(call: Mlp, needed: frozenset[str]) -> tuple[str, ...]:
    # x is for the gradients of the first layer's weights, and to make hidden again.
    again = not call.return_hidden and not needed.isdisjoint((*FIRST_LAYER, "w2"))
    return (*(("x",) if again or not needed.isdisjoint(("w1", "w_up")) else ()), "w1", "b1", "w2", "w_up", "b_up")


def _constant(call: Mlp, needed: frozenset[str]) -> tuple[int, ...]:
    # Gradients that are made from hidden depend on x by it, though x may not be kept: then it stays differentiable, so
    # that a second derivative is refused rather than dropped. Elsewhere it is a constant.
    return () if call.return_hidden and not needed.isdisjoint(FIRST_LAYER) else (1,)


def _differentiate(
    call: Mlp, results: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], needed: frozenset[str]
) -> dict[str, Tensor | None]:
    dout, dhidden = grads
    x = call.x if isinstance(call.x, Tensor) else None
    made: dict[str, Tensor | None] = {}
    if dout is not None and needed:
        needs = [name in needed for name in DIFFERENTIABLE]
        tensors = x, call.w1, call.b1, call.w2, results[1]
        values = mlp_backward_op(dout, *tensors, call.activation, *needs[:5], call.w_up, call.b_up, *needs[5:])
        made = {name: value for name, value in zip(DIFFERENTIABLE, values, strict=True) if name in needed}
    if dhidden is not None:
        shape = call.x if x is None else x.shape
        with without_autocast():
            for name, value in _by_hidden(call, x, shape, dhidden, needed):
                before = made.get(name)
                made[name] = value if before is None else before + value
    return made


def _by_hidden(
    call: Mlp, x: Tensor | None, shape: Size, dhidden: Tensor, needed: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    """Gradients by way of `torch.ops.vk.mlp`'s second result, which is a linear layer's or two's."""
    layers = [(call.w1, "w1", "b1"), *([] if call.w_up is None else [(call.w_up, "w_up", "b_up")])]
    for dpre, (weight, of_weight, of_bias) in zip(dhidden.split(call.w1.shape[0], 1), layers, strict=True):
        if "x" in needed:
            yield "x", torch.mm(dpre, weight).view(shape)
        if of_weight in needed and x is not None:
            yield of_weight, torch.mm(dpre.t(), rows_of(x))
        if of_bias in needed:
            yield of_bias, dpre.sum(0)


gradient(
    mlp_op, Mlp, _differentiate, of=DIFFERENTIABLE,
    saves=_saved, saves_results=(1,), shapes=("x",), constant=_constant,
)  # fmt: skip


def mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str = "gelu_tanh",
    recompute: bool = False,
    w_up: Tensor | None = None,
    b_up: Tensor | None = None,
) -> Tensor:
    """Compute act(x w1^T + b1) w2^T + b2.

    Args:
        x: [..., C], fp16, bf16 or fp32, on the CPU also fp64. Any strides; copied unless contiguous, or two-dimensional
            with contiguous columns.
        w1: [I, C]; for "swiglu" without `w_up` [2 I, C], the rows of the gates and then those of their partners. Dtype
            and device of x, any strides, and so for all that follow.
        b1: [rows of w1], or None.
        w2: [N, I].
        b2: [N], or None.
        activation: "gelu_tanh", "gelu" (by erf), "quick_gelu" (x sigmoid(1.702 x)), "silu", or "swiglu". Default:
            "gelu_tanh".
        recompute: whether the backward computes the first product again instead of keeping it. Keeping it takes as many
            numbers per row of x as w1 and w_up have rows. Default: False.
        w_up: [I, C], for "swiglu" alone: the partners of the gates w1 [I, C], if the two are separate, as gate_proj
            and up_proj of Qwen2.5-VL. Nothing is packed. The two are copied only if their strides differ or,
            beside x, fit no kernel. Default: none.
        b_up: [I]; given if b1 is.

    Returns:
        [..., N], contiguous, in x's dtype. `torch.ops.vk.mlp` returns (out, hidden). hidden is the first product [rows,
        rows of w1 and w_up] for the backward. With return_hidden=False it has no columns, and a backward computes it
        again.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.
        NotImplementedError: for a second derivative.

    Sums and the activation are fp32. In half types the input of the activation is rounded first, as by a linear layer.
    Exceptions are the stock Triton kernels and cuBLAS's own GELU, which takes few rows on Hopper GPUs if no first
    product is kept (docs/gemm.md). The activation's result and out are rounded on every path. fp32 inputs use tf32 only
    if `torch.backends.cuda.matmul` allows it.

    Every width is allowed: 4304, 3420 or 1365 columns need no padded weights. Only gradients that are required are
    computed. With w1 and w_up frozen x is not kept, unless to recompute. Forward and backward give the same bits for
    the same inputs.
    """
    keeps = keeps_hidden(recompute, x, w1, b1, w2, w_up, b_up)
    return mlp_op(x, w1, b1, w2, b2, activation, keeps, w_up, b_up)[0]


__all__ = ["mlp"]
