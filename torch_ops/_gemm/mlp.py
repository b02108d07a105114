"""What both directions of `vk::mlp` begin with: their refusals, and the plans of their launches.

Plans depend on metadata alone; `torch_ops._gemm.plan` chooses the path of each layer.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torch_ops._core.checks import check_bias, check_dense, check_float, check_like, check_matrix, refuse
from torch_ops._core.registry import remembered, runs_kernels
from torch_ops._gemm.cpu import activation_backward_cpu, linear_cpu
from torch_ops._gemm.elementwise import new_sums, plan_activate, plan_activation_backward
from torch_ops._gemm.hopper import count_of_sums
from torch_ops._gemm.plan import ACTIVATIONS, plan_gradient, plan_linear
from torch_ops._gemm.portable import GATED, Rows, padded, product_size, to_columns

Layer = Callable[..., None]
# differentiate(dout, w2, pre, dpre, h) fills dpre and h, those that have rows, and returns parts of the sums of dpre.
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _width(w1: Tensor, activation: str, w_up: Tensor | None) -> int:
    """I, the columns of h."""
    return w1.shape[0] // (2 if activation == GATED and w_up is None else 1)


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


def check_mlp(
    op: str, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str,
    w_up: Tensor | None, b_up: Tensor | None,
) -> None:  # fmt: skip
    check_dense(op, "x", x)
    if x.dim() == 0:
        refuse(op, "x", "of shape [..., C]", list(x.shape))
    check_float(op, "x", x)
    _check_weights(op, x, "x", x.shape[-1], w1, b1, w2, activation, w_up, b_up)
    check_bias(op, "b2", b2, w2.shape[0], "x", x)


def check_mlp_backward(
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


def _plan_layer(
    rows: Rows, weight: Tensor, has_bias: bool, activation: str, keeps_pre: bool, width: int, up: Tensor | None = None
) -> Layer:
    if runs_kernels(weight):
        return plan_linear(rows, weight, has_bias, activation, keeps_pre, width, up)
    return partial(linear_cpu, activation)


@remembered
def prepare_mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, return_hidden: bool,
    w_up: Tensor | None, b_up: Tensor | None,
) -> tuple[Layer, Layer, int]:  # fmt: skip
    """Both layers, and the columns of the rows between them, which begin at 16 bytes."""
    check_mlp("mlp", x, w1, b1, w2, b2, activation, w_up, b_up)
    rows = Rows.of(x)
    width = padded(w2.shape[1], x.dtype)
    first = _plan_layer(rows, w1, b1 is not None, activation, return_hidden, width, w_up)
    second = _plan_layer(Rows(rows.count, width), w2, b2 is not None, "none", False, w2.shape[0])
    return first, second, width


def keeps_hidden(recompute: bool, *inputs: Tensor | None) -> bool:
    """Whether `mlp` keeps the first product: where a gradient of `inputs` may be wanted, of all but b2.

    What is no tensor is refused later.
    """
    wanted = torch.is_grad_enabled() and any(
        each is not None and (not isinstance(each, Tensor) or each.requires_grad) for each in inputs
    )
    return wanted and not recompute


def gradient_columns(w1: Tensor, w_up: Tensor | None) -> tuple[int, int]:
    """Of the rows of dpre: where what is of up begins, and how many there are.

    Each weight's begin at 16 bytes: products read them apart. Of one weight for both halves they are not apart.
    """
    own = w1.shape[0]
    if w_up is None:
        return own // 2, padded(own, w1.dtype)
    return padded(own, w1.dtype), 2 * padded(own, w1.dtype)


def _h_alone(activate: Layer) -> Layer:
    return lambda dh, pre, dpre, h, sums: activate(pre, h)


def _after_product(launch: Layer, inner: bool, width: int, sums: bool) -> Gradient:
    """PyTorch's product dout w2, where it is wanted, and the elementwise launch behind it."""

    def differentiate(dout: Tensor, w2: Tensor, pre: Tensor, dpre: Tensor, h: Tensor) -> Tensor:
        partial_sums = new_sums(dout, dout.shape[0] if sums else 0, pre.shape[1])
        dh = torch.mm(dout, to_columns(w2, width)) if inner else dout
        launch(dh, pre, dpre, h, partial_sums)
        return partial_sums

    return differentiate


def _with_product(launch: Layer, makes_h: bool, sums: bool) -> Gradient:
    """One launch for the product and its slope. It writes h if that is not wanted too: dpre has the same bits then."""

    def differentiate(dout: Tensor, w2: Tensor, pre: Tensor, dpre: Tensor, h: Tensor) -> Tensor:
        count = count_of_sums(dout.shape[0]) if sums else 0
        partial_sums = dout.new_empty((count, pre.shape[1]), dtype=torch.float32)
        launch(dout, w2, pre, dpre, h if makes_h else torch.empty_like(dpre), partial_sums)
        return partial_sums

    return differentiate


def makes_h_again(w2: Tensor, w_up: Tensor | None) -> bool:
    """Whether hidden is made again by the forward's launch, with h: of two weights, and where rows of h are padded."""
    return w_up is not None or padded(w2.shape[1], w2.dtype) != w2.shape[1]


@remembered
def prepare_mlp_backward(
    dout: Tensor, x: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, hidden: Tensor, activation: str,
    w_up: Tensor | None, b_up: Tensor | None, needs_rows: bool, inner: bool, needs_h: bool, sums: bool, needs_up: bool,
) -> tuple[Layer | None, Gradient | None]:  # fmt: skip
    """What makes hidden again, and what makes dpre and h of it and of dout, or h alone."""
    check_mlp_backward(dout, x, w1, b1, w2, hidden, activation, w_up, b_up, needs_rows, inner or needs_h, needs_up)
    if not (inner or needs_h):
        return None, None
    n, _ = product_size(w1, w_up)
    rows = Rows(Rows.of(dout).count, 0)
    width = padded(w2.shape[1], dout.dtype)
    again = None
    if x is not None and hidden.shape[1] == 0:
        if makes_h_again(w2, w_up):
            again = _plan_layer(Rows.of(x), w1, b1 is not None, activation, True, width, w_up)
        else:
            again = _plan_layer(Rows.of(x), w1, b1 is not None, "none", False, n)
    columns = gradient_columns(w1, w_up)
    if not runs_kernels(dout):
        launch: Layer = partial(activation_backward_cpu, activation, columns[0])
    elif inner:
        whole = plan_gradient(Rows.of(dout), w2, activation, sums)
        if whole is not None:
            return again, _with_product(whole, needs_h, sums)
        launch = plan_activation_backward(rows, w1, activation, (*columns, width), needs_h, sums, w_up)
    else:
        launch = _h_alone(plan_activate(rows, w1, activation, width, w_up))
    return again, _after_product(launch, inner, width, sums)
