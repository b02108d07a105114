"""The launcher of the GEMM core: from tensors and options to the kernels' arguments.

Ops that stand on the core call `plan_linear` and `plan_rotary` by bare name. A plan depends on metadata alone, never on
values on the device; it returns the function that launches, which writes into tensors that the op allocated. Here the
path is chosen: the kernels in stock Triton, or, where a row or the rule says so, PyTorch's own product and an
elementwise kernel behind it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from csrc_free_ops.configs import ATEN
from torch_ops._gemm_elementwise import plan_activate, plan_rotate
from torch_ops._gemm_portable import (
    Rows,
    choose_product,
    plan_linear_portable,
    plan_rotary_portable,
    product_kernel,
)

ACTIVATIONS = ("gelu_tanh", "gelu", "quick_gelu", "silu", "swiglu")


def plan_linear(
    rows: Rows, weight: Tensor, has_bias: bool, activation: str = "none", keeps_pre: bool = False,
    width: int | None = None,
) -> Callable[..., None]:  # fmt: skip
    """launch(x, weight, bias, out, pre) fills out with activation(x weight^T + bias).

    x is [M, K] with contiguous columns, its layout `rows`; weight [n, K] in any strides; bias [n], None without
    `has_bias`. out is contiguous, rows of `width` columns, of which the first are filled: n, or of "swiglu" n / 2.
    With `keeps_pre` pre, contiguous [M, n], is filled with what the activation is of; else it is None.
    """
    n = weight.shape[0]
    width = n if width is None else width
    launch, _ = choose_product(product_kernel(activation), rows, weight)
    if launch == ATEN:
        return _plan_linear_aten(rows, weight, activation, keeps_pre, width)
    return plan_linear_portable(launch, rows, weight, has_bias, activation, keeps_pre, width)


def plan_rotary(
    rows: Rows, weight: Tensor, has_bias: bool, cos: Tensor, sin: Tensor, num_heads: int, num_k_heads: int
) -> Callable[..., None]:
    """launch(x, weight, bias, cos, sin, q, k, v) fills q, k and v, contiguous; x, weight and bias as above."""
    launch, _ = choose_product("gemm_pair", rows, weight)
    if launch == ATEN:
        return _plan_rotary_aten(rows, weight, cos, sin, num_heads, num_k_heads)
    return plan_rotary_portable(launch, rows, weight, has_bias, cos, sin, num_heads, num_k_heads)


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x weight^T + bias by PyTorch, whatever autocast says; out is contiguous [M, n]."""
    with torch._C._DisableAutocast():
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)


def _plan_linear_aten(rows: Rows, weight: Tensor, activation: str, keeps_pre: bool, width: int) -> Callable[..., None]:
    n = weight.shape[0]
    if activation == "none" and width == n and not keeps_pre:
        return lambda x, weight, bias, out, pre: linear_into(x, weight, bias, out)
    activate = plan_activate(rows, weight, activation, n, width)

    def launch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None) -> None:
        if pre is None:
            pre = x.new_empty((x.shape[0], n))
        linear_into(x, weight, bias, pre)
        activate(pre, out)

    return launch_linear


def _plan_rotary_aten(
    rows: Rows, weight: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_k_heads: int
) -> Callable[..., None]:
    rotate = plan_rotate(rows, weight, cos, sin, num_heads, num_k_heads)
    n = weight.shape[0]

    def launch_rotary(
        x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        packed = x.new_empty((x.shape[0], n))
        linear_into(x, weight, bias, packed)
        rotate(packed, cos, sin, q, k, v)

    return launch_rotary
