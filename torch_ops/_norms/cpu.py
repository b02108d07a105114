"""The norms on the CPU, in ATen.

fp64 computes in fp64, all else in fp32 and rounds once, as the kernels do. Autocast changes nothing in here.
"""

import torch
from torch import Tensor


def _widened(tensor: Tensor) -> Tensor:
    """Contiguous, so that equal values give equal bits in whatever strides they come."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


def _standardized(x: Tensor, eps: float, has_mean: bool) -> tuple[Tensor, Tensor]:
    """xhat, and rstd [..., 1]."""
    x = _widened(x)
    if has_mean:
        # The second time what the first mean was rounded by.
        for _ in range(2 if x.dtype is torch.float32 else 1):
            x = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


@torch.autocast("cpu", enabled=False)
def norm_forward_cpu(
    eps: float, has_mean: bool, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    out: Tensor, total: Tensor | None,
) -> None:  # fmt: skip
    """Fills out and total, as the launch of `prepare_forward` does."""
    if residual is not None and total is not None:
        x = total.copy_(x + residual)
    result, _ = _standardized(x, eps, has_mean)
    if weight is not None:
        result = result * weight.to(result.dtype)
    if bias is not None:
        result = result + bias.to(result.dtype)
    out.copy_(result)


@torch.autocast("cpu", enabled=False)
def norm_backward_cpu(
    eps: float, has_mean: bool, needs_dx: bool, needs_dweight: bool, needs_dbias: bool,
    dout: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, dx: Tensor, dweight: Tensor, dbias: Tensor,
) -> None:  # fmt: skip
    """Fills the gradients that are needed, as the launch of `prepare_backward` does."""
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


def pass_on(
    needs_dx: bool,
    dout: None, dsum: Tensor, x: Tensor, weight: Tensor | None, dx: Tensor, dweight: Tensor, dbias: Tensor,
) -> None:  # fmt: skip
    """Gradients where the norm itself got none, only the sum before it; on any device."""
    if needs_dx:
        dx.copy_(dsum)
    dweight.zero_()
    dbias.zero_()
