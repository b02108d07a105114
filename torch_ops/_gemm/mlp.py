"""Both directions of `vk::mlp`: their refusals, the tensors of their launches, and the plans.

A call is one of `Mlp` or `MlpBackward` of `torch_ops.mlp`; `torch_ops._gemm.plan` chooses the path of each layer.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.configs.rows import ATEN
from torch_ops._core.checks import check_bias, check_dense, check_float, check_like, check_matrix, refuse
from torch_ops._core.plan import Kernels, Plan, reference_plan
from torch_ops._core.registry import runs_kernels
from torch_ops._core.torch_private import without_autocast
from torch_ops._gemm.cpu import activation_backward_cpu, linear_cpu, mlp_cpu
from torch_ops._gemm.elementwise import Launcher, new_column_sums, plan_activate, plan_activation_backward, sum_runs
from torch_ops._gemm.hopper import count_of_column_sums
from torch_ops._gemm.plan import ACTIVATIONS, plan_gradient, plan_linear, plan_of, takes_whole_gradient
from torch_ops._gemm.portable import GATED, Rows, padded, product_size, rows_of, to_columns
from torch_ops._gemm.tensors import Gradient, GradientOptions, Linear, LinearOptions


def _check_weights(op: str, call: Any, name: str, like: Tensor, columns: int | None) -> None:
    w1, w2, activation = call.w1, call.w2, call.activation
    if activation not in ACTIVATIONS:
        refuse(op, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(activation))
    packed = activation == GATED and call.w_up is None
    check_matrix(op, "w1", w1, f"[{'2 I' if packed else 'I'}, C]", (None, columns))
    check_like(op, "w1", w1, name, like)
    if packed and w1.shape[0] % 2 != 0:
        refuse(op, "the number of rows of w1", "even: gates, then what they gate", w1.shape[0])
    check_bias(op, "b1", call.b1, w1.shape[0], name, like)
    _check_up(op, call, name, like)
    check_matrix(op, "w2", w2, "[N, I]", (None, w1.shape[0] // (2 if packed else 1)))
    check_like(op, "w2", w2, name, like)
    for argument, weight in (("w1", w1), ("w2", w2)):
        if 0 in weight.shape:
            refuse(op, argument, "of sizes from 1 on", list(weight.shape))


def _check_up(op: str, call: Any, name: str, like: Tensor) -> None:
    if call.w_up is None:
        if call.b_up is not None:
            refuse(op, "b_up", "None where w_up is", "a tensor")
        return
    if call.activation != GATED:
        refuse(op, "w_up", f"None with activation {call.activation!r}, since only {GATED!r} gates", "a tensor")
    check_matrix(op, "w_up", call.w_up, "[I, C]", (call.w1.shape[0], call.w1.shape[1]))
    check_like(op, "w_up", call.w_up, name, like)
    if (call.b1 is None) != (call.b_up is None):
        refuse(op, "b_up", "a tensor where b1 is one, else None", "None" if call.b_up is None else "a tensor")
    check_bias(op, "b_up", call.b_up, call.w1.shape[0], name, like)


def check_mlp(call: Any) -> None:
    op, x = "mlp", call.x
    check_dense(op, "x", x)
    if x.dim() == 0:
        refuse(op, "x", "of shape [..., C]", list(x.shape))
    check_float(op, "x", x)
    _check_weights(op, call, "x", x, x.shape[-1])
    check_bias(op, "b2", call.b2, call.w2.shape[0], "x", x)


def check_mlp_backward(call: Any) -> None:
    op, dout, x, hidden = "mlp_backward", call.dout, call.x, call.hidden
    check_dense(op, "dout", dout)
    check_float(op, "dout", dout)
    _check_weights(op, call, "dout", dout, None)
    if call.needs_up and call.w_up is None:
        refuse(op, "needs_w_up and needs_b_up", "False without w_up", True)
    if dout.dim() == 0 or dout.shape[-1] != call.w2.shape[0]:
        refuse(op, "dout", f"of shape [..., N] with N = {call.w2.shape[0]}", list(dout.shape))
    check_dense(op, "hidden", hidden)
    check_like(op, "hidden", hidden, "dout", dout)
    n, _ = product_size(call.w1, call.w_up)
    made = hidden.dim() == 2 and hidden.shape[1] == n
    if hidden.dim() != 2 or hidden.shape[0] != Rows.of(dout).count or hidden.shape[1] not in (0, n):
        refuse(op, "hidden", f"of shape {[Rows.of(dout).count, n]}, or without columns", list(hidden.shape))
    if call.needs_w1 or call.needs_w_up or (call.needs_hidden and not made):
        check_dense(op, "x", x)
    if x is not None:
        check_like(op, "x", x, "dout", dout)
        if x.shape != (*dout.shape[:-1], call.w1.shape[1]):
            refuse(op, "x", f"of shape {[*dout.shape[:-1], call.w1.shape[1]]}", list(x.shape))


def keeps_hidden(recompute: bool, *inputs: Tensor | None) -> bool:
    """Whether `mlp` keeps the first product: where a gradient of `inputs` may be wanted, of all but b2.

    Arguments that are no tensors are refused later.
    """
    wanted = torch.is_grad_enabled() and any(
        each is not None and (not isinstance(each, Tensor) or each.requires_grad) for each in inputs
    )
    return wanted and not recompute


def mlp_outputs(call: Any) -> tuple[Tensor, Tensor]:
    x = call.x
    columns, _ = product_size(call.w1, call.w_up)
    hidden = x.new_empty((Rows.of(x).count, columns if call.return_hidden else 0))
    return x.new_empty((*x.shape[:-1], call.w2.shape[0])), hidden


def mlp_flops(call: Any) -> int:
    """FLOPs of the products; the activation is not counted."""
    n, k = product_size(call.w1, call.w_up)
    return 2 * Rows.of(call.x).count * (n * k + call.w2.numel())


def mlp_tensors(call: Any, made: tuple[Tensor, Tensor]) -> tuple[Linear, Linear]:
    """Both layers. The rows between them begin at 16 bytes."""
    x, w1, b1, w2, b2, _, return_hidden, w_up, b_up = call
    out, hidden = made
    rows = rows_of(x)
    h = x.new_empty((rows.shape[0], padded(w2.shape[1], x.dtype)))
    out_rows = out if out.dim() == 2 else out.view(rows.shape[0], w2.shape[0])
    first = Linear(rows, w1, b1, h, hidden if return_hidden else None, w_up, b_up)
    return first, Linear(h, w2, b2, out_rows)


def plan_mlp(layers: tuple[Linear, Linear], call: Any) -> Plan:
    if not runs_kernels(call.x):
        return reference_plan(partial(mlp_cpu, call.activation), call.x)
    # `explain` knows the address of x, and none of a view.
    first = plan_linear(layers[0]._replace(x=call.x), LinearOptions(call.activation))
    second = plan_linear(layers[1], LinearOptions())
    launch_first, launch_second = first.launch, second.launch

    def launch(layers: tuple[Linear, Linear]) -> None:
        launch_first(layers[0])
        launch_second(layers[1])

    return plan_of(launch, first, second)


def mlp_backward_outputs(call: Any) -> tuple[Tensor, ...]:
    dout, w1, w2 = call.dout, call.w1, call.w2
    shapes = (
        ((*dout.shape[:-1], w1.shape[1]), call.needs_x), (w1.shape, call.needs_w1), (w1.shape[:1], call.needs_b1),
        (w2.shape, call.needs_w2), (w2.shape[:1], call.needs_b2), (w1.shape, call.needs_w_up),
        (w1.shape[:1], call.needs_b_up),
    )  # fmt: skip
    return tuple(dout.new_empty(shape if needed else (0,)) for shape, needed in shapes)


def mlp_backward_flops(call: Any) -> int:
    """FLOPs of the wanted products, and of the first layer's again where hidden was not kept."""
    again = call.needs_hidden and call.hidden.shape[1] == 0
    n, k = product_size(call.w1, call.w_up)
    of_w1, of_w2 = call.w1.numel() * (call.needs_w1 + call.needs_w_up), call.w2.numel() * (call.inner + call.needs_w2)
    return 2 * Rows.of(call.dout).count * (n * k * (call.needs_x + again) + of_w1 + of_w2)


def gradient_columns(w1: Tensor, w_up: Tensor | None) -> tuple[int, int]:
    """Columns of dpre: where those of up begin, and how many there are.

    Each weight's begin at 16 bytes: products read them apart. With one weight for both halves there is no gap.
    """
    own = w1.shape[0]
    if w_up is None:
        return own // 2, padded(own, w1.dtype)
    return padded(own, w1.dtype), 2 * padded(own, w1.dtype)


def _h_alone(activate: Launcher) -> Launcher:
    return lambda dh, pre, dpre, h, sums: activate(pre, h)


def _plan_separate(t: Gradient, call: Any, sums: bool) -> Plan:
    """PyTorch's product dout w2, where it is wanted, and the elementwise launch behind it; or h alone."""
    inner, width = call.inner, t.h.shape[1]
    begins, stride = gradient_columns(call.w1, call.w_up)
    rows = Rows(Rows.of(t.dout).count, 0)
    kernels: Kernels = {}
    if not runs_kernels(t.dout):
        slope: Launcher = partial(activation_backward_cpu, call.activation, begins)
    elif inner:
        slope, kernels = plan_activation_backward(
            rows, call.w1, call.activation, (begins, stride, width), call.needs_w2, sums, call.w_up
        )
    else:
        activate, kernels = plan_activate(rows, call.w1, call.activation, width, call.w_up)
        slope = _h_alone(activate)

    def launch(t: Gradient) -> None:
        dh = torch.mm(t.dout, to_columns(t.weight, width)) if inner else t.dout
        slope(dh, t.pre, t.dpre, t.h, t.partial)

    return Plan(launch, kernels)


def _plan_again(t: Linear, call: Any, activation: str) -> Plan:
    if not runs_kernels(t.x):
        return Plan(partial(linear_cpu, activation))
    return plan_linear(t._replace(x=call.x), LinearOptions(activation))


def plan_mlp_backward(call: Any, _: Any) -> Plan:
    """Plan the launches that recompute hidden, that make dpre and h (or h alone), and PyTorch's products."""
    inner, needs_h, needs_hidden, sums = call.inner, call.needs_w2, call.needs_hidden, call.needs_b1 or call.needs_b_up
    n, _ = product_size(call.w1, call.w_up)
    own, width = call.w1.shape[0], call.w2.shape[1]
    # The padding behind the columns is zero, and products of whole rows are several times as fast.
    each, whole_width = padded(own, call.dout.dtype), padded(width, call.dout.dtype)
    begins, stride = gradient_columns(call.w1, call.w_up)
    again = needs_hidden and call.x is not None and call.hidden.shape[1] == 0
    # With two weights, and where rows of h are padded, the forward's launch recomputes hidden and h; the gradient's
    # launch makes h anew.
    again_with_h = again and (call.w_up is not None or whole_width != width)
    whole = inner and runs_kernels(call.dout) and takes_whole_gradient(Rows.of(call.dout), call.w2, call.activation)
    # One launch for the product and its slope writes h if that is not wanted too: dpre has the same bits then.
    makes_h = needs_h or again_with_h or whole

    def tensors(call: Any) -> tuple[Linear | None, Gradient]:
        dout = rows_of(call.dout)
        rows = dout.shape[0]
        dpre = dout.new_empty((rows if inner else 0, stride))
        h = dout.new_empty((rows if makes_h else 0, whole_width))
        if whole:
            partial_sums = dout.new_empty((count_of_column_sums(rows) if sums else 0, n), dtype=torch.float32)
        else:
            partial_sums = new_column_sums(dout, rows if sums else 0, n)
        if not again:
            return None, Gradient(dout, call.w2, call.hidden.contiguous(), dpre, h, partial_sums)
        pre, x = dout.new_empty((rows, n)), rows_of(call.x)
        if again_with_h:
            first = Linear(x, call.w1, call.b1, h, pre, call.w_up, call.b_up)
        else:
            first = Linear(x, call.w1, call.b1, pre)
        return first, Gradient(dout, call.w2, pre, dpre, h, partial_sums)

    first, t = tensors(call)
    parts = []
    if first is not None:
        parts.append(_plan_again(first, call, call.activation if again_with_h else "none"))
    if whole:
        parts.append(plan_gradient(t, GradientOptions(call.activation, sums)))
    elif needs_hidden:
        parts.append(_plan_separate(t, call, sums))
    make_again = parts[0].launch if again else None
    differentiate = parts[-1].launch if needs_hidden else None

    def launch(call: Any) -> tuple[Tensor, ...]:
        first, t = tensors(call)
        with without_autocast():
            if make_again is not None:
                make_again(first)
            if differentiate is not None:
                differentiate(t)
            dout, of_w1 = t.dout, _columns(t.dpre, 0, each)
            of_up = of_w1 if call.w_up is None else _columns(t.dpre, begins, each)
            dx = torch.mm(of_w1, _to_rows(call.w1, each)) if call.needs_x else dout.new_empty((0,))
            if call.needs_x and call.w_up is not None:
                dx = torch.addmm(dx, of_up, _to_rows(call.w_up, each))
            return (
                dx.view(*call.dout.shape[:-1], dx.shape[1]) if call.needs_x and call.dout.dim() != 2 else dx,
                _first_rows(torch.mm(of_w1.t(), rows_of(call.x)), own) if call.needs_w1 else dout.new_empty((0,)),
                sum_runs(_columns(t.partial, 0, own), dout.dtype) if call.needs_b1 else dout.new_empty((0,)),
                to_columns(torch.mm(dout.t(), t.h), width) if needs_h else dout.new_empty((0,)),
                dout.sum(0) if call.needs_b2 else dout.new_empty((0,)),
                _first_rows(torch.mm(of_up.t(), rows_of(call.x)), own) if call.needs_w_up else dout.new_empty((0,)),
                sum_runs(_columns(t.partial, own, own), dout.dtype) if call.needs_b_up else dout.new_empty((0,)),
            )

    if not runs_kernels(call.dout):
        return reference_plan(launch, call.dout)
    plan = plan_of(launch, *parts)
    # Products that are PyTorch's whatever the forward's are say nothing of those.
    plan.kernels = {name: chosen for name, chosen in plan.kernels.items() if chosen[0] != ATEN}
    return plan


def _columns(rows: Tensor, first: int, count: int) -> Tensor:
    return rows if rows.shape[1] == count else rows.narrow(1, first, count)


def _first_rows(rows: Tensor, count: int) -> Tensor:
    return rows if rows.shape[0] == count else rows.narrow(0, 0, count)


def _to_rows(weight: Tensor, rows: int) -> Tensor:
    missing = rows - weight.shape[0]
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight
