"""`vk::rms_norm` and `vk::add_rms_norm`: RMSNorm over the last dimension, alone or of a residual sum.

As `layer_norm` without mean and bias. Kernels: `csrc_free_ops.norms`.
"""

from typing import NamedTuple

from torch import Tensor

from torch_ops._core.checks import check_number
from torch_ops._norms.plan import Norm, register_norm


class RmsNorm(NamedTuple):
    """The arguments of `vk::rms_norm`."""

    x: Tensor
    weight: Tensor | None = None
    eps: float = 1e-6


class RmsNormBackward(NamedTuple):
    """The arguments of `vk::rms_norm_backward`."""

    dout: Tensor
    x: Tensor
    weight: Tensor | None = None
    eps: float = 1e-6
    needs_dx: bool = True
    needs_dweight: bool = False


class AddRmsNorm(NamedTuple):
    """The arguments of `vk::add_rms_norm`."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None = None
    eps: float = 1e-6


class AddRmsNormBackward(NamedTuple):
    """The arguments of `vk::add_rms_norm_backward`."""

    dnormed: Tensor | None
    dsum: Tensor | None
    sum: Tensor
    weight: Tensor | None = None
    eps: float = 1e-6
    needs_dx: bool = True
    needs_dweight: bool = False


rms_norm_op, rms_norm_backward_op = register_norm(
    Norm("rms_norm", has_mean=False, has_residual=False), RmsNorm, RmsNormBackward
)
add_rms_norm_op, add_rms_norm_backward_op = register_norm(
    Norm("add_rms_norm", has_mean=False, has_residual=True), AddRmsNorm, AddRmsNormBackward
)


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
