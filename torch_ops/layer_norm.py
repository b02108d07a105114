"""`vk::layer_norm` and `vk::add_layer_norm`: LayerNorm over the last dimension, alone or of a residual sum.

The sum is rounded to the dtype first, as a model's residual stream is, and is a result of its own. Nothing is saved but
the normed tensor's input and the parameters; gradients that nobody wants are not computed. Kernels:
`csrc_free_ops.norms`.
"""

from typing import NamedTuple

from torch import Tensor

from torch_ops._core.checks import check_number
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
