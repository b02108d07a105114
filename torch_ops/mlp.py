"""`vk::mlp`: the two layers of a transformer's MLP with the activation in the first's epilogue, and its backward.

    pre = x w1^T + b1       h = act(pre); of "swiglu", silu of the first half of pre's columns times the second
    out = h w2^T + b2

The halves of "swiglu" may have weights of their own: pre = [x w1^T + b1, x w_up^T + b_up].

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
from torch_ops._gemm_portable import GATED, Rows, padded, product_size, rows_of
from torch_ops._registry import needs_of, remembered, runs_kernels, vk_op

Layer = Callable[..., None]
# Of x, w1, b1, w2, b2, w_up and b_up; empty where none is wanted.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _check_weights(
    op: str, like: Tensor, like_name: str, columns: int | None, w1: Tensor, b1: Tensor | None, w2: Tensor,
    activation: str, w_up: Tensor | None, b_up: Tensor | None,
) -> None:  # fmt: skip
    if activation not in ACTIVATIONS:
        refuse(op, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(activation))
    packed = activation == GATED and w_up is None
    check_matrix(op, "w1", w1, f"[{'2 I' if packed else 'I'}, C]", (None, columns))
    check_like(op, "w1", w1, like_name, like)
    if packed and w1.shape[0] % 2 != 0:
        refuse(op, "the number of rows of w1", "even: gates, then what they gate", w1.shape[0])
    check_bias(op, "b1", b1, w1.shape[0], like_name, like)
    _check_up(op, like, like_name, w1, b1, activation, w_up, b_up)
    check_matrix(op, "w2", w2, "[N, I]", (None, _width(w1, activation, w_up)))
    check_like(op, "w2", w2, like_name, like)
    if 0 in w1.shape or 0 in w2.shape:
        refuse(op, "the sizes of w1 and w2", "1 or more", [*w1.shape, *w2.shape])


def _check_up(
    op: str, like: Tensor, like_name: str, w1: Tensor, b1: Tensor | None, activation: str, w_up: Tensor | None,
    b_up: Tensor | None,
) -> None:  # fmt: skip
    if w_up is None:
        if b_up is not None:
            refuse(op, "b_up", "None where w_up is", "a tensor")
        return
    if activation != GATED:
        refuse(op, "w_up", f"None with activation {activation!r}, since only {GATED!r} gates", "a tensor")
    check_matrix(op, "w_up", w_up, "[I, C]", (w1.shape[0], w1.shape[1]))
    check_like(op, "w_up", w_up, like_name, like)
    if (b1 is None) != (b_up is None):
        refuse(op, "b_up", "given where b1 is, and only there", "None" if b_up is None else "a tensor")
    check_bias(op, "b_up", b_up, w1.shape[0], like_name, like)


def _check_mlp(
    op: str, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str,
    w_up: Tensor | None, b_up: Tensor | None,
) -> None:  # fmt: skip
    check_dense(op, "x", x)
    if x.dim() == 0:
        refuse(op, "x", "of shape [..., C]", list(x.shape))
    check_float(op, "x", x)
    _check_weights(op, x, "x", x.shape[-1], w1, b1, w2, activation, w_up, b_up)
    check_bias(op, "b2", b2, w2.shape[0], "x", x)


def _width(w1: Tensor, activation: str, w_up: Tensor | None) -> int:
    """I, the columns of h."""
    return w1.shape[0] // (2 if activation == GATED and w_up is None else 1)


def _outputs(x: Tensor, w1: Tensor, w2: Tensor, w_up: Tensor | None, return_hidden: bool) -> tuple[Tensor, Tensor]:
    columns, _ = product_size(w1, w_up)
    rows = Rows.of(x).count
    return x.new_empty((*x.shape[:-1], w2.shape[0])), x.new_empty((rows, columns if return_hidden else 0))


def _mlp_fake(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    return_hidden: bool = True, w_up: Tensor | None = None, b_up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_mlp("mlp", x, w1, b1, w2, b2, activation, w_up, b_up)
    return _outputs(x, w1, w2, w_up, return_hidden)


def _mlp_flops(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    return_hidden: bool = True, w_up: Tensor | None = None, *rest: Any, **named: Any,
) -> int:  # fmt: skip
    """Of the products; the activation is not counted."""
    n, k = product_size(w1, w_up)
    return 2 * Rows.of(x).count * (n * k + w2.numel())


def _plan_layer(
    rows: Rows, weight: Tensor, has_bias: bool, activation: str, keeps_pre: bool, width: int, up: Tensor | None = None
) -> Layer:
    if runs_kernels(weight):
        return plan_linear(rows, weight, has_bias, activation, keeps_pre, width, up)
    return partial(linear_cpu, activation)


@remembered
def _prepare_mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, return_hidden: bool,
    w_up: Tensor | None, b_up: Tensor | None,
) -> tuple[Layer, Layer, int]:  # fmt: skip
    """Both layers, and the columns of the rows between them, which begin at 16 bytes."""
    _check_mlp("mlp", x, w1, b1, w2, b2, activation, w_up, b_up)
    rows = Rows.of(x)
    width = padded(w2.shape[1], x.dtype)
    first = _plan_layer(rows, w1, b1 is not None, activation, return_hidden, width, w_up)
    second = _plan_layer(Rows(rows.count, width), w2, b2 is not None, "none", False, w2.shape[0])
    return first, second, width


@vk_op("mlp", fake=_mlp_fake, autocast=True, flops=_mlp_flops)
def mlp_op(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    return_hidden: bool = True, w_up: Tensor | None = None, b_up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    first, second, width = _prepare_mlp(x, w1, b1, w2, b2, activation, return_hidden, w_up, b_up)
    out, hidden = _outputs(x, w1, w2, w_up, return_hidden)
    rows = rows_of(x)
    h = x.new_empty((rows.shape[0], width))
    first(rows, w1, b1, h, hidden if return_hidden else None, w_up, b_up)
    out_rows = out if out.dim() == 2 else out.view(rows.shape[0], w2.shape[0])
    second(h.narrow(1, 0, w2.shape[1]), w2, b2, out_rows, None)
    return out, hidden


def _check_mlp_backward(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor, activation: str,
    w_up: Tensor | None, b_up: Tensor | None, needs_rows: bool, needs_hidden: bool, needs_up: bool,
) -> None:  # fmt: skip
    """needs_rows: whether x is wanted for the gradient of a weight; needs_up: whether one of w_up or b_up is."""
    op = "mlp_backward"
    check_dense(op, "dout", dout)
    check_float(op, "dout", dout)
    _check_weights(op, dout, "dout", None, w1, b1, w2, activation, w_up, b_up)
    if needs_up and w_up is None:
        refuse(op, "needs_w_up and needs_b_up", "False without w_up", True)
    if dout.dim() == 0 or dout.shape[-1] != w2.shape[0]:
        refuse(op, "dout", f"of shape [..., N] with N = {w2.shape[0]}", list(dout.shape))
    check_dense(op, "hidden", hidden)
    check_like(op, "hidden", hidden, "dout", dout)
    n, _ = product_size(w1, w_up)
    made = hidden.dim() == 2 and hidden.shape[1] == n
    if hidden.dim() != 2 or hidden.shape[0] != Rows.of(dout).count or hidden.shape[1] not in (0, n):
        refuse(op, "hidden", f"of shape {[Rows.of(dout).count, n]}, or without columns", list(hidden.shape))
    if needs_rows or (needs_hidden and not made):
        check_dense(op, "x", x)
    if x is not None:
        check_like(op, "x", x, "dout", dout)
        if x.shape != (*dout.shape[:-1], w1.shape[1]):
            refuse(op, "x", f"of shape {[*dout.shape[:-1], w1.shape[1]]}", list(x.shape))


def _mlp_backward_fake(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor,
    activation: str = "gelu_tanh", needs_x: bool = True, needs_w1: bool = True, needs_b1: bool = True,
    needs_w2: bool = True, needs_b2: bool = True, w_up: Tensor | None = None, b_up: Tensor | None = None,
    needs_w_up: bool = False, needs_b_up: bool = False,
) -> Gradients:  # fmt: skip
    needs_up = needs_w_up or needs_b_up
    needs_hidden = needs_x or needs_w1 or needs_b1 or needs_w2 or needs_up
    _check_mlp_backward(
        dout, x, w1, b1, w2, hidden, activation, w_up, b_up, needs_w1 or needs_w_up, needs_hidden, needs_up
    )
    return (
        dout.new_empty((*dout.shape[:-1], w1.shape[1]) if needs_x else (0,)),
        dout.new_empty(w1.shape if needs_w1 else (0,)),
        dout.new_empty(w1.shape[:1] if needs_b1 else (0,)),
        dout.new_empty(w2.shape if needs_w2 else (0,)),
        dout.new_empty(w2.shape[:1] if needs_b2 else (0,)),
        dout.new_empty(w1.shape if needs_w_up else (0,)),
        dout.new_empty(w1.shape[:1] if needs_b_up else (0,)),
    )


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Rows under the leading dimensions of another tensor."""
    return rows if like.dim() == 2 else rows.view(*like.shape[:-1], rows.shape[1])


def _columns(rows: Tensor, first: int, count: int) -> Tensor:
    return rows if rows.shape[1] == count else rows.narrow(1, first, count)


def _mlp_backward_flops(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor,
    activation: str = "gelu_tanh", needs_x: bool = True, needs_w1: bool = True, needs_b1: bool = True,
    needs_w2: bool = True, needs_b2: bool = True, w_up: Tensor | None = None, b_up: Tensor | None = None,
    needs_w_up: bool = False, needs_b_up: bool = False,
) -> int:  # fmt: skip
    """Of the products that are wanted, and of the first layer's again where hidden was not kept."""
    inner = needs_x or needs_w1 or needs_b1 or needs_w_up or needs_b_up
    again = (inner or needs_w2) and hidden.shape[1] == 0
    n, k = product_size(w1, w_up)
    count = n * k * (needs_x + again) + w1.numel() * (needs_w1 + needs_w_up) + w2.numel() * (inner + needs_w2)
    return 2 * Rows.of(dout).count * count


@remembered
def _prepare_mlp_backward(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor, activation: str,
    w_up: Tensor | None, b_up: Tensor | None, needs_rows: bool, inner: bool, needs_h: bool, sums: bool, needs_up: bool,
) -> tuple[Layer | None, Layer | None]:  # fmt: skip
    """What makes hidden again, and what makes of it dpre and h, or h alone."""
    _check_mlp_backward(
        dout, x, w1, b1, w2, hidden, activation, w_up, b_up, needs_rows, inner or needs_h, needs_up
    )  # fmt: skip
    n, _ = product_size(w1, w_up)
    rows = Rows(Rows.of(dout).count, 0)
    widths = padded(n, dout.dtype), padded(w2.shape[1], dout.dtype)
    again = None
    if x is not None and hidden.shape[1] == 0:
        if w_up is None:
            again = _plan_layer(Rows.of(x), w1, b1 is not None, "none", False, n)
        else:
            again = _plan_layer(Rows.of(x), w1, b1 is not None, activation, True, widths[1], w_up)
    if not (inner or needs_h):
        return None, None
    if not runs_kernels(dout):
        return again, partial(activation_backward_cpu, activation)
    if inner:
        return again, plan_activation_backward(rows, w1, activation, widths, needs_h, sums, w_up)
    activate = plan_activate(rows, w1, activation, n, widths[1], w_up)
    return again, lambda dh, pre, dpre, h, sums: activate(pre, h)


@vk_op("mlp_backward", fake=_mlp_backward_fake, flops=_mlp_backward_flops)
def mlp_backward_op(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor,
    activation: str = "gelu_tanh", needs_x: bool = True, needs_w1: bool = True, needs_b1: bool = True,
    needs_w2: bool = True, needs_b2: bool = True, w_up: Tensor | None = None, b_up: Tensor | None = None,
    needs_w_up: bool = False, needs_b_up: bool = False,
) -> Gradients:  # fmt: skip
    needs_up = needs_w_up or needs_b_up
    inner = needs_x or needs_w1 or needs_b1 or needs_up
    sums_wanted = needs_b1 or needs_b_up
    again, differentiate = _prepare_mlp_backward(
        dout, x, w1, b1, w2, hidden, activation, w_up, b_up, needs_w1 or needs_w_up, inner, needs_w2, sums_wanted,
        needs_up,
    )  # fmt: skip
    n, _ = product_size(w1, w_up)
    own, width = w1.shape[0], w2.shape[1]
    gradient = rows_of(dout)
    rows = gradient.shape[0]
    makes_pair = again is not None and w_up is not None
    dpre = dout.new_empty((rows if inner else 0, padded(n, dout.dtype)))
    h = dout.new_empty((rows if needs_w2 or makes_pair else 0, padded(width, dout.dtype)))
    sums = new_sums(dout, rows if sums_wanted else 0, n)
    with torch._C._DisableAutocast():
        if differentiate is not None:
            if again is not None and x is not None:
                hidden = x.new_empty((rows, n))
                if makes_pair:
                    # Both halves in one launch, as in the forward; what it makes of them here is not read.
                    again(rows_of(x), w1, b1, h, hidden, w_up, b_up)
                else:
                    again(rows_of(x), w1, b1, hidden, None)
            dh = torch.mm(gradient, w2) if inner else gradient
            differentiate(dh, hidden.contiguous(), dpre, h, sums)
        of_w1 = _columns(dpre, 0, own)
        of_up = of_w1 if w_up is None else _columns(dpre, own, own)
        dx = torch.mm(of_w1, w1) if needs_x else dout.new_empty((0,))
        if needs_x and w_up is not None:
            dx = torch.addmm(dx, of_up, w_up)
        return (
            _shaped(dx, dout) if needs_x else dx,
            torch.mm(of_w1.t(), rows_of(x)) if needs_w1 and x is not None else dout.new_empty((0,)),
            sum_runs(_columns(sums, 0, own), dout.dtype) if needs_b1 else dout.new_empty((0,)),
            torch.mm(gradient.t(), _columns(h, 0, width)) if needs_w2 else dout.new_empty((0,)),
            gradient.sum(0) if needs_b2 else dout.new_empty((0,)),
            torch.mm(of_up.t(), rows_of(x)) if needs_w_up and x is not None else dout.new_empty((0,)),
            sum_runs(_columns(sums, own, own), dout.dtype) if needs_b_up else dout.new_empty((0,)),
        )


mlp_backward_op.refuse_autograd()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w1, b1, w2, _, activation, _, w_up, b_up = inputs
    hidden = output[1]
    needs = needs_of(ctx, 9)
    # Of (x, w1, b1, w2, b2) and of (w_up, b_up).
    ctx.needs = needs[:5], needs[7:]
    ctx.activation = activation
    # x is for the gradients of the first layer's weights, and to make hidden again.
    keeps_x = needs[1] or needs[7] or (hidden.shape[1] == 0 and any((*needs[:4], *needs[7:])))
    ctx.save_for_backward(x if keeps_x else None, w1, b1, w2, hidden, w_up, b_up)
    ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dhidden: Tensor | None) -> tuple[Any, ...]:
    *tensors, w_up, b_up = ctx.saved_tensors
    needs, needs_up = ctx.needs
    if dout is None or not any((*needs, *needs_up)):
        return (None,) * 9
    made = mlp_backward_op(dout, *tensors, ctx.activation, *needs, w_up, b_up, *needs_up)
    grads = [gradient if needed else None for gradient, needed in zip(made, (*needs, *needs_up), strict=True)]
    return *grads[:5], None, None, *grads[5:]


mlp_op.register_autograd(_backward, setup_context=_setup_context)


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
    """act(x w1^T + b1) w2^T + b2.

    Args:
        x: [..., C] in fp16, bf16 or fp32, any strides; copied where it has not two dimensions and contiguous columns,
            nor is contiguous. On the CPU also fp64.
        w1: [I, C], for "swiglu" without `w_up` [2 I, C]: the rows of the gates, then those of what they gate. x's
            dtype and device, any strides, as all that follow.
        b1: as many as w1 has rows, or None.
        w2: [N, I].
        b2: [N], or None.
        activation: "gelu_tanh", "gelu" (by erf), "quick_gelu" (x sigmoid(1.702 x)), "silu", or "swiglu".
        recompute: whether the backward makes the first product again instead of keeping it, which takes as much memory
            as w1 and w_up have rows for each row of x.
        w_up: [I, C], for "swiglu" alone: what the gates w1 [I, C] gate, where the two are parameters of their own, as
            the gate_proj and up_proj of Qwen2.5-VL. Nothing is packed; they are copied only where their strides differ.
        b_up: [I]; given where b1 is.

    Returns:
        [..., N], contiguous, in x's dtype. `torch.ops.vk.mlp` returns (out, hidden): hidden is the first product
        [rows, as many as w1 and w_up have], for the backward alone, or without columns where its return_hidden is
        False; a backward then makes it again.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    Sums are fp32 and rounded after the activation and at the end; fp32 inputs use tf32 only where
    `torch.backends.cuda.matmul` allows it. No width is special: 4304, 3420 or 1365 columns take no padding of weights
    from the caller. Gradients are made for what requires them: with w1 frozen x is not kept. Forward and backward give
    the same bits for the same inputs.
    """
    wanted = torch.is_grad_enabled() and any(
        tensor is not None and (not isinstance(tensor, Tensor) or tensor.requires_grad)
        for tensor in (x, w1, b1, w2, w_up, b_up)
    )
    return mlp_op(x, w1, b1, w2, b2, activation, wanted and not recompute, w_up, b_up)[0]


__all__ = ["mlp"]
