"""`vk::rms_norm` and `vk::add_rms_norm`: RMSNorm over the last dimension, alone or of a residual sum.

As `layer_norm` without mean and bias. Kernels: `csrc_free_ops.norms`.
"""

from typing import Any

from torch import Tensor

from torch_ops._core.checks import check_number
from torch_ops._core.registry import needs_of, vk_op
from torch_ops._norms.plan import (
    Norm,
    check_norm,
    check_norm_backward,
    gradients,
    prepare_backward,
    prepare_forward,
    result_of,
    results_of_sum,
)

RMS_NORM = Norm("rms_norm", has_mean=False, has_residual=False)
ADD_RMS_NORM = Norm("add_rms_norm", has_mean=False, has_residual=True)


def _rms_norm_fake(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    check_norm(RMS_NORM, x, None, weight, None, eps)
    return result_of(x)


@vk_op("rms_norm", fake=_rms_norm_fake)
def rms_norm_op(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    launch = prepare_forward(RMS_NORM, x, None, weight, None, eps)
    out = result_of(x)
    launch(x, None, weight, None, out, None)
    return out


def _rms_norm_backward_fake(
    dout: Tensor, x: Tensor, weight: Tensor | None = None, eps: float = 1e-6,
    needs_dx: bool = True, needs_dweight: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_norm_backward(RMS_NORM, dout, None, x, weight, None, eps, needs_dweight, False)
    return gradients(x, weight, None, needs_dx, needs_dweight, False)[:2]


@vk_op("rms_norm_backward", fake=_rms_norm_backward_fake)
def rms_norm_backward_op(
    dout: Tensor, x: Tensor, weight: Tensor | None = None, eps: float = 1e-6,
    needs_dx: bool = True, needs_dweight: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    needs = (needs_dx, needs_dweight, False)
    launch = prepare_backward(RMS_NORM, dout, None, x, weight, None, eps, *needs)
    dx, dweight, dbias = gradients(x, weight, None, *needs)
    launch(dout, None, x, weight, dx, dweight, dbias)
    return dx, dweight


rms_norm_backward_op.refuse_autograd()


def _setup_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _differentiate_rms_norm(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    needs = needs_of(ctx, 2)
    dx, dweight = rms_norm_backward_op(dout, *ctx.saved_tensors, ctx.eps, *needs)
    return dx if needs[0] else None, dweight if needs[1] else None, None


rms_norm_op.register_autograd(_differentiate_rms_norm, setup_context=_setup_rms_norm)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean of x^2 + eps) * weight over the last dimension.

    Args:
        x: [..., C] in fp16, bf16 or fp32, any number of rows, none included. Any strides; where columns are not
            contiguous or the leading dimensions do not fold into one it is copied. On the CPU also fp64.
        weight: [C] in x's dtype or fp32, on x's device; 1 where None.
        eps: what is added to the mean square, 0 or more (no tensor: it gets no gradient). A number, where
            `torch.nn.RMSNorm` takes its dtype's epsilon unless told otherwise.

    Returns:
        out [..., C] in x's dtype, contiguous.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    All of it is fp32, and out is rounded once, where Transformers' Qwen2RMSNorm rounds before it multiplies by the
    weight as well. Autocast changes nothing: x comes and goes in its own dtype, with a weight in fp32 beside it or not.
    Forward and backward give the same bits for the same inputs on the same GPU. The gradient of a weight that needs
    none is not computed. Zhang, Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.
    """
    check_number("rms_norm", "eps", eps)
    out: Tensor = rms_norm_op(x, weight, eps)
    return out


def _add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    check_norm(ADD_RMS_NORM, x, residual, weight, None, eps)
    return results_of_sum(x)


@vk_op("add_rms_norm", fake=_add_rms_norm_fake)
def add_rms_norm_op(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    launch = prepare_forward(ADD_RMS_NORM, x, residual, weight, None, eps)
    normed, total = results_of_sum(x)
    launch(x, residual, weight, None, normed, total)
    return normed, total


def _add_rms_norm_backward_fake(
    dnormed: Tensor | None, dsum: Tensor | None, sum: Tensor, weight: Tensor | None = None, eps: float = 1e-6,
    needs_dx: bool = True, needs_dweight: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_norm_backward(ADD_RMS_NORM, dnormed, dsum, sum, weight, None, eps, needs_dweight, False)
    return gradients(sum, weight, None, needs_dx, needs_dweight, False)[:2]


@vk_op("add_rms_norm_backward", fake=_add_rms_norm_backward_fake)
def add_rms_norm_backward_op(
    dnormed: Tensor | None, dsum: Tensor | None, sum: Tensor, weight: Tensor | None = None, eps: float = 1e-6,
    needs_dx: bool = True, needs_dweight: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    needs = (needs_dx, needs_dweight, False)
    launch = prepare_backward(ADD_RMS_NORM, dnormed, dsum, sum, weight, None, eps, *needs)
    dx, dweight, dbias = gradients(sum, weight, None, *needs)
    launch(dnormed, dsum, sum, weight, dx, dweight, dbias)
    return dx, dweight


add_rms_norm_backward_op.refuse_autograd()


def _setup_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)


def _differentiate_add_rms_norm(ctx: Any, dnormed: Tensor | None, dsum: Tensor | None) -> tuple[Any, ...]:
    if dnormed is None:
        return dsum, dsum, None, None
    needs_dx, needs_dresidual, needs_dweight = needs_of(ctx, 3)
    total, weight = ctx.saved_tensors
    needs = (needs_dx or needs_dresidual, needs_dweight)
    dx, dweight = add_rms_norm_backward_op(dnormed, dsum, total, weight, ctx.eps, *needs)
    return dx if needs_dx else None, dx if needs_dresidual else None, dweight if needs_dweight else None, None


add_rms_norm_op.register_autograd(_differentiate_add_rms_norm, setup_context=_setup_add_rms_norm)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """sum = x + residual, rounded to their dtype, and `rms_norm` of it, in one pass.

    Args:
        x: as in `rms_norm`.
        residual: of x's shape, dtype and device, any strides.
        weight, eps: as in `rms_norm`.

    Returns:
        (normed, sum), each [..., C] in x's dtype, contiguous: what the next layer takes, and the residual stream. Both
        are differentiable; x and residual have the same gradient.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    The bits are those of `rms_norm(x + residual, weight, eps)`. All else is as in `rms_norm`.
    """
    check_number("add_rms_norm", "eps", eps)
    normed, total = add_rms_norm_op(x, residual, weight, eps)
    return normed, total


__all__ = ["add_rms_norm", "rms_norm"]
