"""The norms on the CPU, in ATen.

fp64 computes in fp64, all else in fp32 and rounds once, as the kernels do. Autocast changes nothing in here.
"""

import math

import torch
from torch import Tensor

from torch_ops._norms.tensors import Backward, Forward


def _widened(tensor: Tensor) -> Tensor:
    """Contiguous, so that equal values give equal bits in whatever strides they come."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


def _scales(x: Tensor, eps: float) -> Tensor:
    """Powers of two that bring the largest magnitude of each row near 1, so that squares stay in range, [..., 1].

    An eps that is larger than squares of x sets the scale instead.
    """
    most = x.abs().amax(-1, keepdim=True).clamp(min=math.sqrt(eps))
    _, exponent = torch.frexp(torch.where(most.isfinite(), most, 1.0))
    most_exponent = 126 if x.dtype is torch.float32 else 1022
    return torch.ldexp(torch.ones_like(most), -exponent.clamp(-most_exponent, most_exponent))


def _standardized(x: Tensor, eps: float, has_mean: bool) -> tuple[Tensor, Tensor]:
    """xhat, and rstd [..., 1]."""
    x = _widened(x)
    scale = _scales(x, eps)
    x = x * scale
    if has_mean:
        # The second time what the first mean was rounded by.
        for _ in range(2 if x.dtype is torch.float32 else 1):
            x = x - x.mean(-1, keepdim=True)
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps * scale * scale)
    return x * factor, factor * scale


@torch.autocast("cpu", enabled=False)
def norm_forward_cpu(eps: float, has_mean: bool, tensors: Forward) -> None:
    x, residual, weight, bias, out, total = tensors
    if residual is not None and total is not None:
        x = total.copy_(x + residual)
    result, _ = _standardized(x, eps, has_mean)
    if weight is not None:
        result = result * weight.to(result.dtype)
    if bias is not None:
        result = result + bias.to(result.dtype)
    out.copy_(result)


@torch.autocast("cpu", enabled=False)
def norm_backward_cpu(eps: float, has_mean: bool, needs: tuple[bool, bool, bool], tensors: Backward) -> None:
    needs_dx, needs_dweight, needs_dbias = needs
    dout, dsum, x, weight, dx, dweight, dbias = tensors
    assert dout is not None
    xhat, rstd = _standardized(x, eps, has_mean)
    dout = _widened(dout)
    if needs_dweight:
        dweight.copy_((dout * xhat).reshape(-1, x.shape[-1]).sum(0))
    if needs_dbias:
        dbias.copy_(dout.reshape(-1, x.shape[-1]).sum(0))
    if needs_dx:
        g = dout if weight is None else dout * weight.to(dout.dtype)
        result = g - xhat * (g * xhat).mean(-1, keepdim=True)
        if has_mean:
            result = result - g.mean(-1, keepdim=True)
        result = result * rstd
        dx.copy_(result if dsum is None else result + dsum)


def pass_on(needs_dx: bool, tensors: Backward) -> None:
    """Pass on the gradient of the sum where the norm itself got none; on any device."""
    if needs_dx and tensors.dsum is not None:
        tensors.dx.copy_(tensors.dsum)
    tensors.dweight.zero_()
    tensors.dbias.zero_()
