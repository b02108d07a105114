"""The tensors of a product's launch, as one value, and the options of launches that graphs cannot look into."""

from typing import NamedTuple

from torch import Tensor


class Linear(NamedTuple):
    """out = activation(x weight^T + bias), and pre, where it is given, what the activation is of.

    x is [M, K] with contiguous columns, weight [n, K] in any strides, bias [n]. pre is contiguous [M, n]. out is
    contiguous: n columns, of "swiglu" n / 2, and zeros behind them where its rows are padded. Without an activation x
    may be such an out. A gated layer may have two weights: weight and bias for the gates, up and up_bias, as large, for
    the gated half. n is then the rows of both.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    pre: Tensor | None = None
    up: Tensor | None = None
    up_bias: Tensor | None = None


class LinearOptions(NamedTuple):
    activation: str = "none"


class Gradient(NamedTuple):
    """dpre = (dout weight) f'(pre) and h = f(pre): the gradient of a layer [n, k] and of the activation f before it.

    dout is [M, n]; pre, dpre and h are contiguous [M, k]. partial, fp32, takes parts of the sum of dpre's rows.
    """

    dout: Tensor
    weight: Tensor
    pre: Tensor
    dpre: Tensor
    h: Tensor
    partial: Tensor


class GradientOptions(NamedTuple):
    activation: str
    sums: bool


class Rotary(NamedTuple):
    """q, k and v, contiguous [M, heads, D], are x weight^T + bias split into heads, q and k of them rotated."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cos: Tensor
    sin: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class RotaryOptions(NamedTuple):
    """None: the shapes of q and k say how many heads there are."""


class RotaryBackward(NamedTuple):
    """packed [M, n] takes the gradient of the product, partial parts of the sum of its rows; either may have none."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    cos: Tensor
    sin: Tensor
    packed: Tensor
    partial: Tensor


class ColumnSums(NamedTuple):
    """Two matrices of as many rows, and where the sums of their columns go. One matrix and its sums may be absent."""

    first: Tensor | None
    second: Tensor | None
    first_sums: Tensor | None
    second_sums: Tensor | None
