"""Layers of a vision encoder, and whether an op may take their parameters instead of calling them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_ops._core.checks import refuse
from torch_ops._core.torch_private import FakeTensor, FunctionalTensor, has_global_hooks
from torch_ops.layer_norm import add_layer_norm, layer_norm
from torch_ops.mlp import mlp
from torch_ops.models.families import Family
from torch_ops.rms_norm import add_rms_norm, rms_norm

# Subclasses of a tensor hold weights in their own way: quantised, spread over devices. Traces put the last two in the
# place of parameters.
_TENSORS = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)
_TENSORS_OR_NONE = (*_TENSORS, type(None))

LAYERS = (nn.Linear, nn.Conv3d, nn.Embedding)


def untouched(module: Any, kinds: tuple[type, ...]) -> bool:
    """Whether calling this module, of one of these kinds, is no more than the forward of its class."""
    return (
        type(module) in kinds
        # Some adapters replace the forward of the instance, and so do Accelerate's hooks.
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
    )


def plain(layer: Any, kinds: tuple[type, ...] = LAYERS) -> bool:
    """Whether calling this layer, of one of these kinds, is no more than its weight and bias on the input."""
    return (
        untouched(layer, kinds)
        # Asked by name: a loop over the parameters makes torch.compile's guards walk their dictionary in each call.
        and type(layer.weight) in _TENSORS
        and type(getattr(layer, "bias", None)) in _TENSORS_OR_NONE
    )


def watched() -> bool:
    """Whether hooks of all modules are registered: they see, and may change, only what is called as a module."""
    return not torch.compiler.is_compiling() and bool(has_global_hooks())


# All families have an eps of 1e-6. It is written out in each call, as softcap is below: of a float that is no literal,
# be it a default, torch.compile first makes an input, and traces all blocks once more to find it constant.
EPS = 1e-6


def _set_eps(norm: nn.Module, eps: float) -> None:
    if eps != EPS:
        refuse(type(norm).__name__, "eps", f"{EPS}, which the vision encoders have; put another norm here", eps)
    # A norm prints what it finds there.
    vars(norm)["eps"] = eps


class LayerNorm(nn.LayerNorm):
    """`layer_norm`, and with `after_sum` `add_layer_norm`. Optimizers know it as a norm by its class."""

    # As Transformers' module, it tells its eps.
    eps: Any = property(lambda self: EPS, _set_eps)

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, EPS)

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, 1e-6)

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_layer_norm(x, residual, self.weight, self.bias, 1e-6)


class RMSNorm(nn.Module):
    """`rms_norm`, and with `after_sum` `add_rms_norm`. Transformers' is no `nn.RMSNorm` either."""

    variance_epsilon: Any = property(lambda self: EPS, _set_eps)

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, weight = promoted(hidden_states, self.weight)
        return rms_norm(x, weight, 1e-6)

    def after_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if x.dtype is residual.dtype is self.weight.dtype:
            return add_rms_norm(x, residual, self.weight, 1e-6)
        total = x + residual
        return self.forward(total), total


def promoted(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and the weight of their RMSNorm in one dtype, which is that of the result in Transformers.

    Autocast casts what follows, so rows stay as narrow as they are.
    """
    if x.dtype is weight.dtype:
        return x, weight
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if dtype is weight.dtype and torch.is_autocast_enabled(x.device.type):
        return x, weight
    return x.to(dtype), weight.to(dtype)


NORMS = (LayerNorm, RMSNorm)


def after_sum(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and the sum."""
    if plain(norm, NORMS) and not watched():
        return norm.after_sum(x, residual)
    total = x + residual
    return norm(total), total


def norm_of(family: Family, hidden_size: int) -> Any:
    return RMSNorm(hidden_size) if family.rms_norm else LayerNorm(hidden_size)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


# All activations but "swiglu", which takes two layers: silu of the first, times the second.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "silu": functional.silu,
}


def chained(x: Tensor, layers: list[Any], activation: str) -> Tensor:
    """The last of the layers on the activation of those before it: one op where all are plain."""
    *first, last = layers
    fused = all([plain(layer) for layer in layers]) and not watched()
    # The op takes both biases of gate and up, or none.
    if not fused or activation == "swiglu" and (first[0].bias is None) is not (first[1].bias is None):
        if activation == "swiglu":
            return last(functional.silu(first[0](x)) * first[1](x))
        return last(_ACTIVATIONS[activation](first[0](x)))
    gate, *gated = first
    up = (gated[0].weight, gated[0].bias) if gated else ()
    return mlp(x, gate.weight, gate.bias, last.weight, last.bias, activation, False, *up)


__all__ = [
    "LAYERS",
    "NORMS",
    "LayerNorm",
    "RMSNorm",
    "after_sum",
    "chained",
    "norm_of",
    "plain",
    "promoted",
    "untouched",
    "watched",
]
