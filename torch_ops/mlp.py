"""`vk::mlp`: the two layers of a transformer's MLP with the activation in the first's epilogue, and its backward.

    pre = x w1^T + b1       h = act(pre); of "swiglu", silu of the first half of pre's columns times the second
    out = h w2^T + b2

The halves of "swiglu" may have weights of their own: pre = [x w1^T + b1, x w_up^T + b_up].

Kernels: `csrc_free_ops.gemm`. The gradients' products are PyTorch's own, but for dh on Hopper GPUs.
"""

from typing import Any

import torch
from torch import Tensor

from torch_ops._core.registry import needs_of, vk_op
from torch_ops._gemm.elementwise import sum_runs
from torch_ops._gemm.mlp import (
    check_mlp,
    check_mlp_backward,
    gradient_columns,
    keeps_hidden,
    makes_h_again,
    prepare_mlp,
    prepare_mlp_backward,
)
from torch_ops._gemm.portable import Rows, padded, product_size, rows_of, to_columns

# Of x, w1, b1, w2, b2, w_up and b_up; empty where none is wanted.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _outputs(x: Tensor, w1: Tensor, w2: Tensor, w_up: Tensor | None, return_hidden: bool) -> tuple[Tensor, Tensor]:
    columns, _ = product_size(w1, w_up)
    rows = Rows.of(x).count
    return x.new_empty((*x.shape[:-1], w2.shape[0])), x.new_empty((rows, columns if return_hidden else 0))


def _mlp_fake(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    return_hidden: bool = True, w_up: Tensor | None = None, b_up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_mlp("mlp", x, w1, b1, w2, b2, activation, w_up, b_up)
    return _outputs(x, w1, w2, w_up, return_hidden)


def _mlp_flops(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    return_hidden: bool = True, w_up: Tensor | None = None, *rest: Any, **named: Any,
) -> int:  # fmt: skip
    """Of the products; the activation is not counted."""
    n, k = product_size(w1, w_up)
    return 2 * Rows.of(x).count * (n * k + w2.numel())


@vk_op("mlp", fake=_mlp_fake, autocast=True, flops=_mlp_flops)
def mlp_op(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    return_hidden: bool = True, w_up: Tensor | None = None, b_up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    first, second, width = prepare_mlp(x, w1, b1, w2, b2, activation, return_hidden, w_up, b_up)
    out, hidden = _outputs(x, w1, w2, w_up, return_hidden)
    rows = rows_of(x)
    h = x.new_empty((rows.shape[0], width))
    first(rows, w1, b1, h, hidden if return_hidden else None, w_up, b_up)
    out_rows = out if out.dim() == 2 else out.view(rows.shape[0], w2.shape[0])
    second(h, w2, b2, out_rows, None)
    return out, hidden


def _mlp_backward_fake(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor,
    activation: str = "gelu_tanh", needs_x: bool = True, needs_w1: bool = True, needs_b1: bool = True,
    needs_w2: bool = True, needs_b2: bool = True, w_up: Tensor | None = None, b_up: Tensor | None = None,
    needs_w_up: bool = False, needs_b_up: bool = False,
) -> Gradients:  # fmt: skip
    needs_up = needs_w_up or needs_b_up
    needs_hidden = needs_x or needs_w1 or needs_b1 or needs_w2 or needs_up
    check_mlp_backward(
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


def _first_rows(rows: Tensor, count: int) -> Tensor:
    return rows if rows.shape[0] == count else rows.narrow(0, 0, count)


def _to_rows(weight: Tensor, rows: int) -> Tensor:
    missing = rows - weight.shape[0]
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


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
    again, differentiate = prepare_mlp_backward(
        dout, x, w1, b1, w2, hidden, activation, w_up, b_up, needs_w1 or needs_w_up, inner, needs_w2, sums_wanted,
        needs_up,
    )  # fmt: skip
    n, _ = product_size(w1, w_up)
    own, width = w1.shape[0], w2.shape[1]
    gradient = rows_of(dout)
    rows = gradient.shape[0]
    whole = padded(width, dout.dtype)
    with_h = again is not None and makes_h_again(w2, w_up)
    up_begins, stride = gradient_columns(w1, w_up)
    dpre = dout.new_empty((rows if inner else 0, stride))
    h = dout.new_empty((rows if needs_w2 or with_h else 0, whole))
    sums = dout.new_empty((0, n))
    with torch._C._DisableAutocast():
        if differentiate is not None:
            if again is not None and x is not None:
                hidden = x.new_empty((rows, n))
                if with_h:
                    # The forward's launch, with h, which the gradient's makes anew.
                    again(rows_of(x), w1, b1, h, hidden, w_up, b_up)
                else:
                    again(rows_of(x), w1, b1, hidden, None)
            sums = differentiate(gradient, w2, hidden.contiguous(), dpre, h)
        # What is behind the columns of each is zero, and products of whole rows are several times as fast.
        each = padded(own, dout.dtype)
        of_w1 = _columns(dpre, 0, each)
        of_up = of_w1 if w_up is None else _columns(dpre, up_begins, each)
        dx = torch.mm(of_w1, _to_rows(w1, each)) if needs_x else dout.new_empty((0,))
        if needs_x and w_up is not None:
            dx = torch.addmm(dx, of_up, _to_rows(w_up, each))
        return (
            _shaped(dx, dout) if needs_x else dx,
            _first_rows(torch.mm(of_w1.t(), rows_of(x)), own) if needs_w1 and x is not None else dout.new_empty((0,)),
            sum_runs(_columns(sums, 0, own), dout.dtype) if needs_b1 else dout.new_empty((0,)),
            to_columns(torch.mm(gradient.t(), h), width) if needs_w2 else dout.new_empty((0,)),
            gradient.sum(0) if needs_b2 else dout.new_empty((0,)),
            _first_rows(torch.mm(of_up.t(), rows_of(x)), own) if needs_w_up and x is not None else dout.new_empty((0,)),
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
    ctx.shape = x.shape
    # Gradients that are made from hidden depend on x by it, though x may not be kept: then it stays differentiable, so
    # that a second derivative is refused rather than dropped. Elsewhere it is a constant.
    if hidden.shape[1] == 0 or not any((*needs[:3], *needs[7:])):
        ctx.mark_non_differentiable(hidden)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dhidden: Tensor | None) -> tuple[Any, ...]:
    *tensors, w_up, b_up = ctx.saved_tensors
    needs = (*ctx.needs[0], *ctx.needs[1])
    grads: list[Tensor | None] = [None] * 7
    if dout is not None and any(needs):
        made = mlp_backward_op(dout, *tensors, ctx.activation, *ctx.needs[0], w_up, b_up, *ctx.needs[1])
        grads = [gradient if needed else None for gradient, needed in zip(made, needs, strict=True)]
    if dhidden is not None:
        with torch._C._DisableAutocast():
            _add_hidden(grads, dhidden, needs, ctx.shape, tensors[0], tensors[1], w_up)
    return *grads[:5], None, None, *grads[5:]


def _add_hidden(
    grads: list[Tensor | None], dhidden: Tensor, needs: tuple[bool, ...], shape: torch.Size, x: Tensor | None,
    w1: Tensor, w_up: Tensor | None,
) -> None:  # fmt: skip
    """To the gradients, those by way of `torch.ops.vk.mlp`'s second result, which is a linear layer's or two's."""

    def add(place: int, gradient: Tensor) -> None:
        before = grads[place]
        grads[place] = gradient if before is None else before + gradient

    layers = [(w1, 1, 2)] if w_up is None else [(w1, 1, 2), (w_up, 5, 6)]
    for dpre, (weight, of_weight, of_bias) in zip(dhidden.split(w1.shape[0], 1), layers, strict=True):
        if needs[0]:
            add(0, torch.mm(dpre, weight).view(shape))
        if needs[of_weight] and x is not None:
            add(of_weight, torch.mm(dpre.t(), rows_of(x)))
        if needs[of_bias]:
            add(of_bias, dpre.sum(0))


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
        x: [..., C] in fp16, bf16 or fp32, any strides; copied unless it is contiguous, or two-dimensional with
            contiguous columns. On the CPU also fp64.
        w1: [I, C], for "swiglu" without `w_up` [2 I, C]: the rows of the gates, then those of what they gate. x's
            dtype and device, any strides, as all that follow.
        b1: as many as w1 has rows, or None.
        w2: [N, I].
        b2: [N], or None.
        activation: "gelu_tanh", "gelu" (by erf), "quick_gelu" (x sigmoid(1.702 x)), "silu", or "swiglu".
        recompute: whether the backward makes the first product again instead of keeping it, which takes as much memory
            as w1 and w_up have rows for each row of x.
        w_up: [I, C], for "swiglu" alone: what the gates w1 [I, C] gate, where the two are parameters of their own, as
            the gate_proj and up_proj of Qwen2.5-VL. Nothing is packed; they are copied only where their strides differ
            or, beside x, fit no kernel.
        b_up: [I]; given where b1 is.

    Returns:
        [..., N], contiguous, in x's dtype. `torch.ops.vk.mlp` returns (out, hidden): hidden is the first product
        [rows, as many as w1 and w_up have], for the backward, or without columns where its return_hidden is False; a
        backward then makes it again.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    Sums and the activation are fp32. In half types the activation's input is rounded first, as by a linear layer,
    except in the kernels in stock Triton and in cuBLAS's own GELU, which takes few rows on Hopper GPUs where no first
    product is kept (docs/gemm.md); its result and out are rounded on every path. fp32 inputs use tf32 only where
    `torch.backends.cuda.matmul` allows it. No width is special: 4304, 3420 or 1365 columns take no padding of weights
    from the caller. Gradients are made for what requires them: with w1 and w_up frozen x is not kept, unless to
    recompute. A second derivative raises NotImplementedError. Forward and backward give the same bits for the same
    inputs.
    """
    keeps = keeps_hidden(recompute, x, w1, b1, w2, w_up, b_up)
    return mlp_op(x, w1, b1, w2, b2, activation, keeps, w_up, b_up)[0]


__all__ = ["mlp"]
