"""`vk::layer_norm` and `vk::add_layer_norm`: LayerNorm over the last dimension, alone or of a residual sum.

The sum is rounded to the dtype first, as a model's residual stream is, and is a result of its own. Nothing is saved but
the normed tensor's input and the parameters; gradients that nobody wants are not computed. Kernels:
`csrc_free_ops.norms`.
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

LAYER_NORM = Norm("layer_norm", has_mean=True, has_residual=False)
ADD_LAYER_NORM = Norm("add_layer_norm", has_mean=True, has_residual=True)


def _layer_norm_fake(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    check_norm(LAYER_NORM, x, None, weight, bias, eps)
    return result_of(x)


@vk_op("layer_norm", fake=_layer_norm_fake)
def layer_norm_op(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    launch = prepare_forward(LAYER_NORM, x, None, weight, bias, eps)
    out = result_of(x)
    launch(x, None, weight, bias, out, None)
    return out


def _layer_norm_backward_fake(
    dout: Tensor, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6,
    needs_dx: bool = True, needs_dweight: bool = False, needs_dbias: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_norm_backward(LAYER_NORM, dout, None, x, weight, bias, eps, needs_dweight, needs_dbias)
    return gradients(x, weight, bias, needs_dx, needs_dweight, needs_dbias)


@vk_op("layer_norm_backward", fake=_layer_norm_backward_fake)
def layer_norm_backward_op(
    dout: Tensor, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6,
    needs_dx: bool = True, needs_dweight: bool = False, needs_dbias: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    needs = (needs_dx, needs_dweight, needs_dbias)
    launch = prepare_backward(LAYER_NORM, dout, None, x, weight, bias, eps, *needs)
    dx, dweight, dbias = gradients(x, weight, bias, *needs)
    launch(dout, None, x, weight, dx, dweight, dbias)
    return dx, dweight, dbias


layer_norm_backward_op.refuse_autograd()


def _setup_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate_layer_norm(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    needs = needs_of(ctx, 3)
    grads = layer_norm_backward_op(dout, *ctx.saved_tensors, ctx.eps, *needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None


layer_norm_op.register_autograd(_differentiate_layer_norm, setup_context=_setup_layer_norm)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    Args:
        x: [..., C] in fp16, bf16 or fp32, any number of rows, none included. Any strides; where columns are not
            contiguous or the leading dimensions do not fold into one it is copied. On the CPU also fp64.
        weight, bias: [C] in x's dtype or fp32, on x's device; 1 and 0 where None.
        eps: what is added to the variance, 0 or more (no tensor: it gets no gradient). As in Qwen-VL's vision towers
            1e-6 unless given, where `torch.nn.LayerNorm` has 1e-5.

    Returns:
        out [..., C] in x's dtype, contiguous.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    The mean, the variance (of differences to the mean) and the rest are fp32, and out is rounded once. Autocast changes
    nothing: x comes and goes in its own dtype, with a weight in fp32 beside it or not. Forward and backward give the
    same bits for the same inputs on the same GPU. Gradients of parameters that need none are not computed. Ba, Kiros,
    Hinton, Layer Normalization, arXiv 1607.06450.
    """
    check_number("layer_norm", "eps", eps)
    out: Tensor = layer_norm_op(x, weight, bias, eps)
    return out


def _add_layer_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    check_norm(ADD_LAYER_NORM, x, residual, weight, bias, eps)
    return results_of_sum(x)


@vk_op("add_layer_norm", fake=_add_layer_norm_fake)
def add_layer_norm_op(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    launch = prepare_forward(ADD_LAYER_NORM, x, residual, weight, bias, eps)
    normed, total = results_of_sum(x)
    launch(x, residual, weight, bias, normed, total)
    return normed, total


def _add_layer_norm_backward_fake(
    dnormed: Tensor | None, dsum: Tensor | None, sum: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-6, needs_dx: bool = True, needs_dweight: bool = False, needs_dbias: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_norm_backward(ADD_LAYER_NORM, dnormed, dsum, sum, weight, bias, eps, needs_dweight, needs_dbias)
    return gradients(sum, weight, bias, needs_dx, needs_dweight, needs_dbias)


@vk_op("add_layer_norm_backward", fake=_add_layer_norm_backward_fake)
def add_layer_norm_backward_op(
    dnormed: Tensor | None, dsum: Tensor | None, sum: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-6, needs_dx: bool = True, needs_dweight: bool = False, needs_dbias: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    needs = (needs_dx, needs_dweight, needs_dbias)
    launch = prepare_backward(ADD_LAYER_NORM, dnormed, dsum, sum, weight, bias, eps, *needs)
    dx, dweight, dbias = gradients(sum, weight, bias, *needs)
    launch(dnormed, dsum, sum, weight, dx, dweight, dbias)
    return dx, dweight, dbias


add_layer_norm_backward_op.refuse_autograd()


def _setup_add_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight, bias)
    ctx.set_materialize_grads(False)


def _differentiate_add_layer_norm(ctx: Any, dnormed: Tensor | None, dsum: Tensor | None) -> tuple[Any, ...]:
    if dnormed is None:
        return dsum, dsum, None, None, None
    needs_dx, needs_dresidual, *needs = needs_of(ctx, 4)
    total, weight, bias = ctx.saved_tensors
    needed = (needs_dx or needs_dresidual, *needs)
    dx, *rest = add_layer_norm_backward_op(dnormed, dsum, total, weight, bias, ctx.eps, *needed)
    parameters = (grad if needed else None for grad, needed in zip(rest, needs, strict=True))
    return dx if needs_dx else None, dx if needs_dresidual else None, *parameters, None


add_layer_norm_op.register_autograd(_differentiate_add_layer_norm, setup_context=_setup_add_layer_norm)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """sum = x + residual, rounded to their dtype, and `layer_norm` of it, in one pass.

    Args:
        x: as in `layer_norm`.
        residual: of x's shape, dtype and device, any strides.
        weight, bias, eps: as in `layer_norm`.

    Returns:
        (normed, sum), each [..., C] in x's dtype, contiguous: what the next layer takes, and the residual stream. Both
        are differentiable; x and residual have the same gradient.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        RuntimeError: PyTorch's own, for an argument of another type.

    The bits are those of `layer_norm(x + residual, weight, bias, eps)`. All else is as in `layer_norm`.
    """
    check_number("add_layer_norm", "eps", eps)
    normed, total = add_layer_norm_op(x, residual, weight, bias, eps)
    return normed, total


__all__ = ["add_layer_norm", "layer_norm"]
