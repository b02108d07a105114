"""Products of the GEMM core that are PyTorch's: alone, with GELU within, or with an elementwise kernel behind.

`plan` chooses among the paths.
"""

import torch
from torch import Tensor

from csrc_free_ops.configs.rows import ATEN
from torch_ops._core.plan import Plan
from torch_ops._core.torch_private import addmm_activation, without_autocast
from torch_ops._gemm.elementwise import new_column_sums, plan_activate, plan_activation_backward, plan_rotate
from torch_ops._gemm.portable import Rows, product_kernel, product_name, product_size, to_columns
from torch_ops._gemm.tensors import Gradient, GradientOptions, Linear, Rotary


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x weight^T + bias by PyTorch, whatever autocast says; out is [M, n] with contiguous columns.

    If x has more columns than weight, they are zeros, and weight is padded with zeros. On an H200, 4096 x 3424 by 1280
    took 63 us with the copy; PyTorch takes 196 us for 3420 columns.
    """
    weight = to_columns(weight, x.shape[1])
    with without_autocast():
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)


def has_gelu_within(t: Linear, activation: str) -> bool:
    """Whether `gelu_into` can make this layer."""
    whole = t.out.shape[1] == t.weight.shape[0]
    return activation == "gelu_tanh" and t.bias is not None and t.pre is None and whole


def gelu_into(t: Linear) -> None:
    """out = GELU(x weight^T + bias), the tanh form, by cuBLAS's epilogue, of sums that are not rounded before.

    For one row, PyTorch launches GELU after a rounded product. It does so for a bias in other strides too.
    """
    assert t.bias is not None
    with without_autocast():
        addmm_activation(t.bias.contiguous(), t.x, t.weight.t(), use_gelu=True, out=t.out)


def plan_linear_aten(source: str, t: Linear, activation: str, within: bool = False) -> Plan:
    """`source` says why PyTorch makes this product; `within`, whether GELU too."""
    kernels = {product_name(product_kernel(activation), t.weight, t.up): (ATEN, source)}
    if within:
        return Plan(gelu_into, kernels, "aten")
    n, _ = product_size(t.weight, t.up)
    width, keeps_pre = t.out.shape[1], t.pre is not None
    if activation == "none" and width == n and not keeps_pre:
        return Plan(lambda t: linear_into(*t[:4]), kernels, "aten")
    activate, beside = plan_activate(Rows.of(t.x), t.weight, activation, width, t.up)

    def launch_linear(t: Linear) -> None:
        x, weight, bias, out, pre, up, up_bias = t
        if pre is None:
            pre = x.new_empty((x.shape[0], n))
        if up is None:
            linear_into(x, weight, bias, pre)
        else:
            half = n // 2
            linear_into(x, weight, bias, pre.narrow(1, 0, half))
            linear_into(x, up, up_bias, pre.narrow(1, half, half))
        activate(pre, out)

    return Plan(launch_linear, {**kernels, **beside}, "aten")


def plan_gradient_aten(t: Gradient, options: GradientOptions) -> Plan:
    activation, sums = options
    rows, width = Rows(Rows.of(t.dout).count, 0), t.weight.shape[1]
    slope, kernels = plan_activation_backward(rows, t.weight.t(), activation, (0, width, width), True, sums)

    def launch_gradient(t: Gradient) -> None:
        dout, weight, pre, dpre, h, partial = t
        found = new_column_sums(dout, dout.shape[0] if sums else 0, width)
        slope(torch.mm(dout, weight), pre, dpre, h, found)
        if sums:
            partial.zero_()
            partial[:1] = found.sum(0)

    return Plan(launch_gradient, kernels, "aten")


def plan_rotary_aten(source: str, t: Rotary) -> Plan:
    rotate, kernels = plan_rotate(t)
    n = t.weight.shape[0]

    def launch_rotary(t: Rotary) -> None:
        packed = t.x.new_empty((t.x.shape[0], n))
        linear_into(t.x, t.weight, t.bias, packed)
        rotate(packed, t)

    return Plan(launch_rotary, {product_name("gemm_pair", t.weight): (ATEN, source), **kernels}, "aten")
