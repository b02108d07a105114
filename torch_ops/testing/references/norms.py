"""LayerNorm and RMSNorm, alone and of a residual sum. With fp32 parameters x is widened, and the result rounded."""

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return _in_one_dtype(functional.layer_norm, x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return _in_one_dtype(functional.rms_norm, x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def _in_one_dtype(function, x: Tensor, *rest: Tensor | float | None) -> Tensor:  # type: ignore[no-untyped-def]
    dtype = x.dtype
    for tensor in rest:
        if isinstance(tensor, Tensor):
            dtype = torch.promote_types(dtype, tensor.dtype)
    tensors = [each.to(dtype) if isinstance(each, Tensor) else each for each in rest]
    return function(x.to(dtype), x.shape[-1:], *tensors).to(x.dtype)
