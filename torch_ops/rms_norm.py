"""`vk::rms_norm` and `vk::add_rms_norm`: RMSNorm over the last dimension, alone or of a residual sum.

The ops are `layer_norm` without mean and bias. Kernels: `csrc_free_ops.norms`.
"""

from typing import NamedTuple

from torch import Tensor

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
    """Compute x / sqrt(mean of x^2 + eps) * weight over the last dimension.

    Args:
        x: [..., C], fp16, bf16 or fp32, on the CPU also fp64; any number of rows, also none. Any strides; copied if
            columns are not contiguous or the leading dimensions do not fold into one.
        weight: [C], x's dtype or fp32, on x's device. Default: 1.
        eps: number, 0 or more, that is added to the mean square; it gets no gradient. Default: 1e-6 (`torch.nn.RMSNorm`
            has its dtype's epsilon).

    Returns:
        out [..., C] in x's dtype, contiguous.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    All of it is fp32, and out is rounded once. Transformers' Qwen2RMSNorm also rounds before it multiplies by the
    weight. Autocast changes nothing: x comes and goes in its own dtype, also with a weight in fp32. Forward and
    backward give the same bits for the same inputs on the same GPU. The gradient of a weight that needs none is not
    computed. Zhang, Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.
    """
    out: Tensor = rms_norm_op(x, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Compute sum = x + residual, rounded to their dtype, and `rms_norm` of it, in one pass.

    Args:
        x: as in `rms_norm`.
        residual: shape, dtype and device of x, any strides.
        weight, eps: as in `rms_norm`.

    Returns:
        (normed, sum), each [..., C] in x's dtype, contiguous: the input of the next layer, and the residual stream.
        Both are differentiable; x and residual have the same gradient.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    The bits are those of `rms_norm(x + residual, weight, eps)`. All else is as in `rms_norm`.
    """
    normed, total = add_rms_norm_op(x, residual, weight, eps)
    return normed, total


__all__ = ["add_rms_norm", "rms_norm"]
