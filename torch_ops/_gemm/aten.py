"""Products of the GEMM core that are PyTorch's: alone, with GELU within, or with an elementwise kernel behind.

Plans are as those of `plan`, which chooses among the paths.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torch_ops._gemm.elementwise import new_sums, plan_activate, plan_activation_backward, plan_rotate
from torch_ops._gemm.portable import Rows, product_size, to_columns


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x weight^T + bias by PyTorch, whatever autocast says; out is [M, n] with contiguous columns.

    Columns of x that weight has none for are zeros, and so are weight's then: 63 us of 4096 x 3424 by 1280, the copy
    among them, where PyTorch takes 196 us for 3420 columns on an H200.
    """
    weight = to_columns(weight, x.shape[1])
    with torch._C._DisableAutocast():
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)


def has_gelu_within(weight: Tensor, has_bias: bool, activation: str, keeps_pre: bool, width: int) -> bool:
    """Whether `gelu_into` can make this layer."""
    return activation == "gelu_tanh" and has_bias and not keeps_pre and width == weight.shape[0]


def gelu_into(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *nothing: Tensor | None) -> None:
    """out = GELU(x weight^T + bias), the tanh form, by cuBLAS's epilogue, of sums that are not rounded before.

    Of one row PyTorch itself launches GELU behind a product that is rounded. So it would of a bias in other strides.
    """
    with torch._C._DisableAutocast():
        torch._addmm_activation(bias.contiguous(), x, weight.t(), use_gelu=True, out=out)


def plan_linear_aten(
    rows: Rows, weight: Tensor, activation: str, keeps_pre: bool, width: int, up: Tensor | None = None
) -> Callable[..., None]:
    n, _ = product_size(weight, up)
    if activation == "none" and width == n and not keeps_pre:
        return lambda x, weight, bias, out, *nothing: linear_into(x, weight, bias, out)
    activate = plan_activate(rows, weight, activation, width, up)

    def launch_linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None,
        up: Tensor | None = None, up_bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        if pre is None:
            pre = x.new_empty((x.shape[0], n))
        if up is None:
            linear_into(x, weight, bias, pre)
        else:
            half = n // 2
            linear_into(x, weight, bias, pre.narrow(1, 0, half))
            linear_into(x, up, up_bias, pre.narrow(1, half, half))
        activate(pre, out)

    return launch_linear


def plan_gradient_aten(rows: Rows, weight: Tensor, activation: str, sums: bool) -> Callable[..., None]:
    width = weight.shape[1]
    columns = (0, width, width)
    differentiate = plan_activation_backward(Rows(rows.count, 0), weight.t(), activation, columns, True, sums)

    def launch_gradient(dout: Tensor, weight: Tensor, pre: Tensor, dpre: Tensor, h: Tensor, partial: Tensor) -> None:
        found = new_sums(dout, dout.shape[0] if sums else 0, width)
        differentiate(torch.mm(dout, weight), pre, dpre, h, found)
        if sums:
            partial.zero_()
            partial[:1] = found.sum(0)

    return launch_gradient


def plan_rotary_aten(
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
