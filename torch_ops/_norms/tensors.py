"""The tensors of a norm's launch, as one value."""

from typing import NamedTuple

from torch import Tensor


class Forward(NamedTuple):
    """out, and with a residual total = x + residual, are filled; both are contiguous."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    out: Tensor
    total: Tensor | None


class Backward(NamedTuple):
    """dx, dweight and dbias are filled where they are wanted; they are contiguous."""

    dout: Tensor | None
    dsum: Tensor | None
    x: Tensor
    weight: Tensor | None
    dx: Tensor
    dweight: Tensor
    dbias: Tensor
