"""What the four norms share: checks, allocation, and the choice between kernels and ATen.

The ops call `prepare_forward` and `prepare_backward` by bare name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ops._core.checks import check_dense, check_device, check_eps, check_float, check_like, dtype_name, refuse
from torch_ops._core.launch import contiguous_like
from torch_ops._core.registry import remembered, runs_kernels
from torch_ops._core.report import by_reference, called_on_fakes, describe
from torch_ops._norms.cpu import norm_backward_cpu, norm_forward_cpu, pass_on
from torch_ops._norms.portable import norm_launches, plan_backward, plan_forward


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


def check_norm(
    norm: Norm, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    _check_normed(norm.op, "x", x, weight, bias, eps)
    if norm.has_residual:
        _check_same(norm.op, "residual", residual, "x", x)


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


def check_norm_backward(
    norm: Norm, dout: Tensor | None, dsum: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    eps: float, needs_dweight: bool, needs_dbias: bool,
) -> None:  # fmt: skip
    """Of a residual sum's gradients one at least must be there."""
    op = f"{norm.op}_backward"
    _check_normed(op, norm.normed, x, weight, bias, eps)
    grads = {"dnormed": dout, "dsum": dsum} if norm.has_residual else {"dout": dout}
    if all(grad is None for grad in grads.values()):
        refuse(op, " or ".join(grads), "a dense tensor", "None")
    for name, grad in grads.items():
        if grad is not None:
            _check_same(op, name, grad, norm.normed, x)
    for name, vector, needed in (("weight", weight, needs_dweight), ("bias", bias, needs_dbias)):
        if needed and vector is None:
            refuse(op, f"needs_d{name}", f"False without a {name}", True)


def result_of(x: Tensor) -> Tensor:
    return contiguous_like(x)


def results_of_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    return contiguous_like(x), contiguous_like(x)


def gradients(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, needs_dx: bool, needs_dweight: bool, needs_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias, empty [0] where none is needed."""

    def allocate(tensor: Tensor | None, needed: bool) -> Tensor:
        return x.new_empty(0) if tensor is None or not needed else contiguous_like(tensor)

    return allocate(x, needs_dx), allocate(weight, needs_dweight), allocate(bias, needs_dbias)


@remembered
def prepare_forward(
    norm: Norm, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Callable[..., None]:
    """launch(x, residual, weight, bias, out, total) fills out and, of a residual, total = x + residual, contiguous."""
    check_norm(norm, x, residual, weight, bias, eps)
    if runs_kernels(x):
        return plan_forward(norm.has_mean, x, residual, weight, bias, eps)
    return partial(norm_forward_cpu, eps, norm.has_mean)


@remembered
def prepare_backward(
    norm: Norm, dout: Tensor | None, dsum: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    eps: float, needs_dx: bool, needs_dweight: bool, needs_dbias: bool,
) -> Callable[..., None]:  # fmt: skip
    """launch(dout, dsum, x, weight, dx, dweight, dbias) fills the gradients that are needed, contiguous."""
    check_norm_backward(norm, dout, dsum, x, weight, bias, eps, needs_dweight, needs_dbias)
    if dout is None:
        return partial(pass_on, needs_dx)
    if runs_kernels(x):
        return plan_backward(norm.has_mean, dout, dsum, x, weight, eps, needs_dx, needs_dweight, needs_dbias)
    return partial(norm_backward_cpu, eps, norm.has_mean, needs_dx, needs_dweight, needs_dbias)


def explain_norm(op: str, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
    called_on_fakes(op, x, *args, **kwargs)
    if not runs_kernels(x):
        return by_reference(op, x.device)
    return describe(op, x.device, "portable", "norms have one path", norm_launches(x))
