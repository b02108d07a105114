"""`vk::mlp`: the two layers of a transformer's MLP with the activation in the first's epilogue, and its backward.

    pre = x w1^T + b1       h = act(pre); of "swiglu", silu of the first half of pre's columns times the second
    out = h w2^T + b2

Kernels: `csrc_free_ops.gemm`. The gradients' products are PyTorch's own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ops._checks import check_bias, check_dense, check_float, check_like, check_matrix, refuse
from torch_ops._gemm import ACTIVATIONS, plan_linear
from torch_ops._gemm_cpu import activation_backward_cpu, linear_cpu
from torch_ops._gemm_elementwise import new_sums, plan_activate, plan_activation_backward, sum_runs
from torch_ops._gemm_portable import GATED, Rows, padded, rows_of
from torch_ops._registry import remembered, runs_kernels, vk_op

Layer = Callable[..., None]


def _check_weights(
    op: str, like: Tensor, like_name: str, columns: int | None, w1: Tensor, b1: Tensor | None, w2: Tensor,
    activation: str,
) -> None:  # fmt: skip
    if activation not in ACTIVATIONS:
        refuse(op, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(activation))
    rows = "2 I" if activation == GATED else "I"
    check_matrix(op, "w1", w1, f"[{rows}, C]", (None, columns))
    check_like(op, "w1", w1, like_name, like)
    if activation == GATED and w1.shape[0] % 2 != 0:
        refuse(op, "the number of rows of w1", "even: gates, then what they gate", w1.shape[0])
    check_bias(op, "b1", b1, w1.shape[0], like_name, like)
    check_matrix(op, "w2", w2, "[N, I]", (None, _width(w1, activation)))
    check_like(op, "w2", w2, like_name, like)
    if 0 in w1.shape or 0 in w2.shape:
        refuse(op, "the sizes of w1 and w2", "1 or more", [*w1.shape, *w2.shape])


def _check_mlp(
    op: str, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str
) -> None:
    check_dense(op, "x", x)
    if x.dim() == 0:
        refuse(op, "x", "of shape [..., C]", list(x.shape))
    check_float(op, "x", x)
    _check_weights(op, x, "x", x.shape[-1], w1, b1, w2, activation)
    check_bias(op, "b2", b2, w2.shape[0], "x", x)


def _width(w1: Tensor, activation: str) -> int:
    """I, the columns of h."""
    return w1.shape[0] // (2 if activation == GATED else 1)


def _outputs(x: Tensor, w1: Tensor, w2: Tensor, return_hidden: bool) -> tuple[Tensor, Tensor]:
    rows = Rows.of(x).count
    return x.new_empty((*x.shape[:-1], w2.shape[0])), x.new_empty((rows, w1.shape[0] if return_hidden else 0))


def _mlp_fake(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    return_hidden: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_mlp("mlp", x, w1, b1, w2, b2, activation)
    return _outputs(x, w1, w2, return_hidden)


def _mlp_flops(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, *rest: Any, **named: Any) -> int:
    """Of the products; the activation is not counted."""
    return 2 * Rows.of(x).count * (w1.numel() + w2.numel())


def _plan_layer(rows: Rows, weight: Tensor, has_bias: bool, activation: str, keeps_pre: bool, width: int) -> Layer:
    if runs_kernels(weight):
        return plan_linear(rows, weight, has_bias, activation, keeps_pre, width)
    return partial(linear_cpu, activation)


@remembered
def _prepare_mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, return_hidden: bool
) -> tuple[Layer, Layer, int]:
    """Both layers, and the columns of the rows between them, which begin at 16 bytes."""
    _check_mlp("mlp", x, w1, b1, w2, b2, activation)
    rows = Rows.of(x)
    width = padded(w2.shape[1], x.dtype)
    first = _plan_layer(rows, w1, b1 is not None, activation, return_hidden, width)
    second = _plan_layer(Rows(rows.count, width), w2, b2 is not None, "none", False, w2.shape[0])
    return first, second, width


@vk_op("mlp", fake=_mlp_fake, autocast=True, flops=_mlp_flops)
def mlp_op(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    return_hidden: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    first, second, width = _prepare_mlp(x, w1, b1, w2, b2, activation, return_hidden)
    out, hidden = _outputs(x, w1, w2, return_hidden)
    rows = rows_of(x)
    h = x.new_empty((rows.shape[0], width))
    first(rows, w1, b1, h, hidden if return_hidden else None)
    out_rows = out if out.dim() == 2 else out.view(rows.shape[0], w2.shape[0])
    second(h.narrow(1, 0, w2.shape[1]), w2, b2, out_rows, None)
    return out, hidden


def _check_mlp_backward(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor, activation: str,
    needs_w1: bool, needs_hidden: bool,
) -> None:  # fmt: skip
    op = "mlp_backward"
    check_dense(op, "dout", dout)
    check_float(op, "dout", dout)
    _check_weights(op, dout, "dout", None, w1, b1, w2, activation)
    if dout.dim() == 0 or dout.shape[-1] != w2.shape[0]:
        refuse(op, "dout", f"of shape [..., N] with N = {w2.shape[0]}", list(dout.shape))
    check_dense(op, "hidden", hidden)
    check_like(op, "hidden", hidden, "dout", dout)
    made = hidden.dim() == 2 and hidden.shape[1] == w1.shape[0]
    if hidden.dim() != 2 or hidden.shape[0] != Rows.of(dout).count or hidden.shape[1] not in (0, w1.shape[0]):
        refuse(op, "hidden", f"of shape {[Rows.of(dout).count, w1.shape[0]]}, or without columns", list(hidden.shape))
    if needs_w1 or (needs_hidden and not made):
        check_dense(op, "x", x)
    if x is not None:
        check_like(op, "x", x, "dout", dout)
        if x.shape != (*dout.shape[:-1], w1.shape[1]):
            refuse(op, "x", f"of shape {[*dout.shape[:-1], w1.shape[1]]}", list(x.shape))


def _mlp_backward_fake(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor,
    activation: str = "gelu_tanh", needs_x: bool = True, needs_w1: bool = True, needs_b1: bool = True,
    needs_w2: bool = True, needs_b2: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    needs_hidden = needs_x or needs_w1 or needs_b1 or needs_w2
    _check_mlp_backward(dout, x, w1, b1, w2, hidden, activation, needs_w1, needs_hidden)
    return (
        dout.new_empty((*dout.shape[:-1], w1.shape[1]) if needs_x else (0,)),
        dout.new_empty(w1.shape if needs_w1 else (0,)),
        dout.new_empty(w1.shape[:1] if needs_b1 else (0,)),
        dout.new_empty(w2.shape if needs_w2 else (0,)),
        dout.new_empty(w2.shape[:1] if needs_b2 else (0,)),
    )


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Rows under the leading dimensions of another tensor."""
    return rows if like.dim() == 2 else rows.view(*like.shape[:-1], rows.shape[1])


def _mlp_backward_flops(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor,
    activation: str = "gelu_tanh", needs_x: bool = True, needs_w1: bool = True, needs_b1: bool = True,
    needs_w2: bool = True, needs_b2: bool = True,
) -> int:  # fmt: skip
    """Of the products that are wanted, and of the first layer's again where hidden was not kept."""
    inner = needs_x or needs_w1 or needs_b1
    again = (inner or needs_w2) and hidden.shape[1] == 0
    count = w1.numel() * (needs_x + needs_w1 + again) + w2.numel() * (inner + needs_w2)
    return 2 * Rows.of(dout).count * count


@remembered
def _prepare_mlp_backward(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor, activation: str,
    needs_w1: bool, inner: bool, needs_h: bool, sums: bool,
) -> tuple[Layer | None, Layer | None]:  # fmt: skip
    """What makes hidden again, and what makes of it dpre and h, or h alone."""
    _check_mlp_backward(dout, x, w1, b1, w2, hidden, activation, needs_w1, inner or needs_h)
    n = w1.shape[0]
    rows = Rows(Rows.of(dout).count, 0)
    again = None
    if x is not None and hidden.shape[1] == 0:
        again = _plan_layer(Rows.of(x), w1, b1 is not None, "none", False, n)
    if not (inner or needs_h):
        return None, None
    widths = padded(n, dout.dtype), padded(w2.shape[1], dout.dtype)
    if not runs_kernels(dout):
        return again, partial(activation_backward_cpu, activation)
    if inner:
        return again, plan_activation_backward(rows, w1, activation, widths, needs_h, sums)
    activate = plan_activate(rows, w1, activation, n, widths[1])
    return again, lambda dh, pre, dpre, h, sums: activate(pre, h)


@vk_op("mlp_backward", fake=_mlp_backward_fake, flops=_mlp_backward_flops)
def mlp_backward_op(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor,
    activation: str = "gelu_tanh", needs_x: bool = True, needs_w1: bool = True, needs_b1: bool = True,
    needs_w2: bool = True, needs_b2: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inner = needs_x or needs_w1 or needs_b1
    again, differentiate = _prepare_mlp_backward(
        dout, x, w1, b1, w2, hidden, activation, needs_w1, inner, needs_w2, needs_b1
    )
    n, width = w1.shape[0], w2.shape[1]
    gradient = rows_of(dout)
    rows = gradient.shape[0]
    dpre = dout.new_empty((rows if inner else 0, padded(n, dout.dtype)))
    h = dout.new_empty((rows if needs_w2 else 0, padded(width, dout.dtype)))
    sums = new_sums(dout, rows if needs_b1 else 0, n)
    with torch._C._DisableAutocast():
        if differentiate is not None:
            if again is not None and x is not None:
                hidden = x.new_empty((rows, n))
                again(rows_of(x), w1, b1, hidden, None)
            dh = torch.mm(gradient, w2) if inner else gradient
            differentiate(dh, hidden.contiguous(), dpre, h, sums)
        dpre, h = dpre.narrow(1, 0, n), h.narrow(1, 0, width)
        return (
            _shaped(torch.mm(dpre, w1), dout) if needs_x else dout.new_empty((0,)),
            torch.mm(dpre.t(), rows_of(x)) if needs_w1 and x is not None else dout.new_empty((0,)),
            sum_runs(sums, dout.dtype) if needs_b1 else dout.new_empty((0,)),
            torch.mm(gradient.t(), h) if needs_w2 else dout.new_empty((0,)),
            gradient.sum(0) if needs_b2 else dout.new_empty((0,)),
        )


mlp_backward_op.refuse_autograd()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w1, b1, w2, _, activation, _ = inputs
    hidden = output[1]
    ctx.needs = tuple(ctx.needs_input_grad[:5])
    ctx.activation = activation
    # x is for the gradient of w1, and to make hidden again.
    keeps_x = ctx.needs[1] or (hidden.shape[1] == 0 and any(ctx.needs[:4]))
    ctx.save_for_backward(x if keeps_x else None, w1, b1, w2, hidden)
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dhidden: Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    if dout is None or not any(ctx.needs):
        return (None,) * 7
    made = mlp_backward_op(dout, *tensors, ctx.activation, *ctx.needs)
    return *(gradient if needed else None for gradient, needed in zip(made, ctx.needs, strict=True)), None, None


mlp_op.register_autograd(_backward, setup_context=_setup_context)


def mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str = "gelu_tanh",
    recompute: bool = False,
) -> Tensor:
    """act(x w1^T + b1) w2^T + b2.

    Args:
        x: [..., C] in fp16, bf16 or fp32, any strides; copied where it has not two dimensions and contiguous columns,
            nor is contiguous. On the CPU also fp64.
        w1: [I, C], for "swiglu" [2 I, C]: the rows of the gates, then those of what they gate. x's dtype and device,
            any strides, as all that follow.
        b1: as many as w1 has rows, or None.
        w2: [N, I].
        b2: [N], or None.
        activation: "gelu_tanh", "gelu" (by erf), "quick_gelu" (x sigmoid(1.702 x)), "silu", or "swiglu".
        recompute: whether the backward makes the first product again instead of keeping it, which takes as much memory
            as w1 has rows for each row of x.

    Returns:
        [..., N], contiguous, in x's dtype. `torch.ops.vk.mlp` returns (out, hidden): hidden is the first product
        [rows, as many as w1 has], for the backward alone, or without columns where its return_hidden is False; a
        backward then makes it again.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    Sums are fp32 and rounded after the activation and at the end; fp32 inputs use tf32 only where
    `torch.backends.cuda.matmul` allows it. No width is special: 4304, 3420 or 1365 columns take no padding of weights
    from the caller. Gradients are made for what requires them: with w1 frozen x is not kept. Forward and backward give
    the same bits for the same inputs.
    """
    wanted = torch.is_grad_enabled() and any(
        tensor is not None and (not isinstance(tensor, Tensor) or tensor.requires_grad) for tensor in (x, w1, b1, w2)
    )
    return mlp_op(x, w1, b1, w2, b2, activation, wanted and not recompute)[0]


__all__ = ["mlp"]
