"""What the four norms share: registration with its gradient, checks, and the choice between kernels and ATen."""

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ops._core.checks import check_dense, check_device, check_eps, check_float, check_like, dtype_name, refuse
from torch_ops._core.launch import contiguous_like
from torch_ops._core.plan import Plan, reference_plan
from torch_ops._core.planned_op import gradient, planned_op
from torch_ops._core.registry import KernelOp, runs_kernels
from torch_ops._norms.cpu import norm_backward_cpu, norm_forward_cpu, pass_on
from torch_ops._norms.portable import plan_backward_portable, plan_forward_portable
from torch_ops._norms.tensors import Backward, Forward

ONE_PATH = "norms have one path"


@dataclass(frozen=True)
class Norm:
    """One of the four, by the name of its op."""

    op: str
    has_mean: bool
    has_residual: bool

    @property
    def normed(self) -> str:
        """What its backward calls the tensor that was normed."""
        return "sum" if self.has_residual else "x"

    @property
    def grads(self) -> tuple[str, ...]:
        """The first arguments of its backward."""
        return ("dnormed", "dsum") if self.has_residual else ("dout",)

    def normed_of(self, call: Any) -> Tensor:
        tensor: Tensor = call.sum if self.has_residual else call.x
        return tensor

    def bias_of(self, call: Any) -> Tensor | None:
        bias: Tensor | None = call.bias if self.has_mean else None
        return bias


def register_norm(norm: Norm, arguments: Any, backward_arguments: Any) -> tuple[KernelOp, KernelOp]:
    """Register an op and its backward, and the one as the gradient of the other.

    `arguments` are x, residual, weight, bias and eps, those of them that the norm has. `backward_arguments` are its
    `grads`, the tensor that was normed, weight, bias, eps, and which gradients are wanted.
    """

    has_mean, has_residual, normed_place = norm.has_mean, norm.has_residual, len(norm.grads)

    def outputs(call: Any) -> Any:
        return (contiguous_like(call.x), contiguous_like(call.x)) if has_residual else contiguous_like(call.x)

    def tensors(call: Any, made: Any) -> Forward:
        bias = call.bias if has_mean else None
        if has_residual:
            return Forward(call.x, call.residual, call.weight, bias, *made)
        return Forward(call.x, None, call.weight, bias, made, None)

    def plan(t: Forward, call: Any) -> Plan:
        return plan_norm(norm.has_mean, t, call.eps)

    op = planned_op(
        norm.op,
        arguments,
        tuple[Tensor, Tensor] if norm.has_residual else Tensor,
        check=partial(_check_forward, norm),
        outputs=outputs,
        tensors=tensors,
        plan=plan,
    )

    def gradients(call: Any) -> tuple[Tensor, ...]:
        """dx, dweight and dbias, empty [0] where none is wanted."""
        x, weight = call[normed_place], call.weight
        dx = contiguous_like(x) if call.needs_dx else x.new_empty(0)
        dweight = contiguous_like(weight) if call.needs_dweight and weight is not None else x.new_empty(0)
        if not has_mean:
            return dx, dweight
        bias = call.bias
        return dx, dweight, contiguous_like(bias) if call.needs_dbias and bias is not None else x.new_empty(0)

    def backward_tensors(call: Any, made: tuple[Tensor, ...]) -> Backward:
        # Without a bias dbias is neither wanted nor written.
        dsum = call[1] if has_residual else None
        return Backward(call[0], dsum, call[normed_place], call.weight, made[0], made[1], made[-1])

    def plan_backward(t: Backward, call: Any) -> Plan:
        needs = call.needs_dx, call.needs_dweight, norm.has_mean and call.needs_dbias
        return plan_norm_backward(norm.has_mean, t, call.eps, needs)

    backward = planned_op(
        f"{norm.op}_backward",
        backward_arguments,
        tuple[Tensor, Tensor, Tensor] if norm.has_mean else tuple[Tensor, Tensor],
        check=partial(_check_backward, norm),
        outputs=gradients,
        tensors=backward_tensors,
        plan=plan_backward,
    )
    backward.refuse_autograd()
    parameters = ("weight", "bias") if norm.has_mean else ("weight",)
    inputs = ("x", "residual") if norm.has_residual else ("x",)

    differentiated = (*inputs, *parameters)

    @functools.cache
    def wanted_of(needed: frozenset[str]) -> tuple[bool, ...]:
        return not needed.isdisjoint(inputs), *[name in needed for name in parameters]

    def differentiate(call: Any, results: Any, grads: Any, needed: frozenset[str]) -> dict[str, Tensor | None]:
        if grads[0] is None:
            # The norm itself got no gradient, only the sum before it.
            return dict.fromkeys(inputs, grads[1])
        normed = results[1] if has_residual else call.x
        # Behind the inputs the arguments of both ops are the parameters and eps.
        made = backward(*grads, normed, *call[len(inputs) :], *wanted_of(needed))
        return dict(zip(differentiated, (made[0], *made) if has_residual else made, strict=True))

    saved = parameters if norm.has_residual else ("x", *parameters)
    results = (1,) if norm.has_residual else ()
    gradient(op, arguments, differentiate, of=differentiated, saves=saved, saves_results=results)
    return op, backward


def _check_forward(norm: Norm, call: Any) -> None:
    _check_normed(norm.op, "x", call.x, call.weight, norm.bias_of(call), call.eps)
    if norm.has_residual:
        _check_same(norm.op, "residual", call.residual, "x", call.x)


def _check_normed(op: str, name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    check_dense(op, name, x)
    check_float(op, name, x)
    if x.dim() < 1 or x.shape[-1] < 1:
        refuse(op, name, "[..., C] with C of 1 or more", f"shape {list(x.shape)}")
    for vector_name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        check_dense(op, vector_name, vector)
        if vector.dtype not in (x.dtype, torch.float32):
            dtypes = dtype_name(x.dtype) if x.dtype is torch.float32 else f"{dtype_name(x.dtype)} or float32"
            refuse(op, vector_name, f"{dtypes} beside {name} in {dtype_name(x.dtype)}", dtype_name(vector.dtype))
        check_device(op, vector_name, vector, name, x)
        if vector.shape != x.shape[-1:]:
            refuse(op, vector_name, f"of shape [C] = {[x.shape[-1]]}", list(vector.shape))
    check_eps(op, eps)


def _check_same(op: str, argument: str, tensor: Tensor | None, name: str, x: Tensor) -> None:
    check_dense(op, argument, tensor)
    assert tensor is not None
    check_like(op, argument, tensor, name, x)
    if tensor.shape != x.shape:
        refuse(op, argument, f"of shape {list(x.shape)} as {name} is", list(tensor.shape))


def _check_backward(norm: Norm, call: Any) -> None:
    """Of a residual sum's two gradients one at least must be there."""
    op, x = f"{norm.op}_backward", norm.normed_of(call)
    vectors = {"weight": call.weight, **({"bias": call.bias} if norm.has_mean else {})}
    _check_normed(op, norm.normed, x, call.weight, norm.bias_of(call), call.eps)
    grads = dict(zip(norm.grads, call, strict=False))
    if all(grad is None for grad in grads.values()):
        refuse(op, " or ".join(grads), "a dense tensor", "None")
    for name, grad in grads.items():
        if grad is not None:
            _check_same(op, name, grad, norm.normed, x)
    for name, vector in vectors.items():
        if getattr(call, f"needs_d{name}") and vector is None:
            refuse(op, f"needs_d{name}", f"False without a {name}", True)


def plan_norm(has_mean: bool, t: Forward, eps: float) -> Plan:
    if not runs_kernels(t.x):
        return reference_plan(partial(norm_forward_cpu, eps, has_mean), t.x)
    return plan_forward_portable(has_mean, t, eps).because(ONE_PATH)


def plan_norm_backward(has_mean: bool, t: Backward, eps: float, needs: tuple[bool, bool, bool]) -> Plan:
    if t.dout is None:
        return Plan(partial(pass_on, needs[0]))
    if not runs_kernels(t.x):
        return reference_plan(partial(norm_backward_cpu, eps, has_mean, needs), t.x)
    return plan_backward_portable(has_mean, t, eps, needs).because(ONE_PATH)
