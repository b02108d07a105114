"""`vk::layer_norm` and `vk::add_layer_norm`: LayerNorm over the last dimension, alone or of a residual sum.

The sum is rounded to its dtype first, as the residual stream of a model is, and is a result of its own. Only the input
of the norm and the parameters are saved. Gradients that are not needed are not computed. Kernels:
`csrc_free_ops.norms`.
"""

from typing import NamedTuple

from torch import Tensor

from torch_ops._norms.plan import Norm, register_norm


class LayerNorm(NamedTuple):
    """The arguments of `vk::layer_norm`."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6


class LayerNormBackward(NamedTuple):
    """The arguments of `vk::layer_norm_backward`."""

    dout: Tensor
    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    needs_dx: bool = True
    needs_dweight: bool = False
    needs_dbias: bool = False


class AddLayerNorm(NamedTuple):
    """The arguments of `vk::add_layer_norm`."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6


class AddLayerNormBackward(NamedTuple):
    """The arguments of `vk::add_layer_norm_backward`."""

    dnormed: Tensor | None
    dsum: Tensor | None
    sum: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    needs_dx: bool = True
    needs_dweight: bool = False
    needs_dbias: bool = False


layer_norm_op, layer_norm_backward_op = register_norm(
    Norm("layer_norm", has_mean=True, has_residual=False), LayerNorm, LayerNormBackward
)
add_layer_norm_op, add_layer_norm_backward_op = register_norm(
    Norm("add_layer_norm", has_mean=True, has_residual=True), AddLayerNorm, AddLayerNormBackward
)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Compute (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    Args:
        x: [..., C], fp16, bf16 or fp32, on the CPU also fp64; any number of rows, also none. Any strides; copied if
            columns are not contiguous or the leading dimensions do not fold into one.
        weight, bias: [C], x's dtype or fp32, on x's device. Default: 1 and 0.
        eps: number, 0 or more, that is added to the variance; it gets no gradient. Default: 1e-6, as in Qwen-VL's
            vision towers (`torch.nn.LayerNorm` has 1e-5).

    Returns:
        out [..., C] in x's dtype, contiguous.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    Mean, variance (of differences to the mean) and all else are fp32, and out is rounded once. Autocast changes
    nothing: x comes and goes in its own dtype, also with a weight in fp32. Forward and backward give the same bits for
    the same inputs on the same GPU. Gradients of parameters that need none are not computed. Ba, Kiros, Hinton, Layer
    Normalization, arXiv 1607.06450.
    """
    out: Tensor = layer_norm_op(x, weight, bias, eps)
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Compute sum = x + residual, rounded to their dtype, and `layer_norm` of it, in one pass.

    Args:
        x: as in `layer_norm`.
        residual: shape, dtype and device of x, any strides.
        weight, bias, eps: as in `layer_norm`.

    Returns:
        (normed, sum), each [..., C] in x's dtype, contiguous: the input of the next layer, and the residual stream.
        Both are differentiable; x and residual have the same gradient.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    The bits are those of `layer_norm(x + residual, weight, bias, eps)`. All else is as in `layer_norm`.
    """
    normed, total = add_layer_norm_op(x, residual, weight, bias, eps)
    return normed, total


__all__ = ["add_layer_norm", "layer_norm"]
