"""The ops of the GEMM core on the CPU, in ATen. Gradients are written out, as in the kernels.

In half types a product is rounded before what follows it, as by a linear layer, where the portable kernels round once.

Autocast casts what an op takes, and nothing in here.
"""

import torch
from torch import Tensor
from torch.nn import functional

from torch_ops._core.rotation_cpu import rotated
from torch_ops._gemm.tensors import ColumnSums, Linear, Rotary, RotaryBackward

QUICK = 1.702


@torch.autocast("cpu", enabled=False)
def qkv_rope_cpu(t: Rotary) -> None:
    x, weight, bias, cos, sin, q, k, v = t
    packed = functional.linear(x, weight, bias).unflatten(1, (-1, q.shape[2]))
    of_q, of_k, of_v = packed.split([q.shape[1], k.shape[1], v.shape[1]], 1)
    q.copy_(rotated(False, of_q, cos, sin))
    k.copy_(rotated(False, of_k, cos, sin))
    v.copy_(of_v)


@torch.autocast("cpu", enabled=False)
def rotary_backward_cpu(t: RotaryBackward) -> None:
    """Fill packed and partial, a row of sums, unless they have no rows."""
    dq, dk, dv, cos, sin, packed, partial = t
    wide = [rotated(True, dq, cos, sin), rotated(True, dk, cos, sin), dv.to(partial.dtype)]
    gradient = torch.cat([each.flatten(1) for each in wide], 1)
    if partial.shape[0]:
        partial.copy_(gradient.sum(0, keepdim=True))
    if packed.shape[0]:
        packed.copy_(gradient)


def _activated(pre: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        gate, up = pre.chunk(2, 1)
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(pre, approximate="tanh")
    if activation == "gelu":
        return functional.gelu(pre)
    if activation == "quick_gelu":
        return pre * torch.sigmoid(QUICK * pre)
    return functional.silu(pre)


@torch.autocast("cpu", enabled=False)
def linear_cpu(activation: str, t: Linear) -> None:
    x, weight, bias, out, pre, up, up_bias = t
    product = functional.linear(x[:, : weight.shape[1]], weight, bias)
    if up is not None:
        product = torch.cat([product, functional.linear(x, up, up_bias)], 1)
    if pre is not None:
        pre.copy_(product)
    if activation == "none":
        out.copy_(product)
        return
    activated = _activated(product.to(torch.promote_types(x.dtype, torch.float32)), activation)
    out.copy_(_padded(activated, out.shape[1]))


def mlp_cpu(activation: str, layers: tuple[Linear, Linear]) -> None:
    linear_cpu(activation, layers[0])
    linear_cpu("none", layers[1])


def _padded(rows: Tensor, columns: int) -> Tensor:
    return functional.pad(rows, (0, columns - rows.shape[1]))


def _pre_gradient(dh: Tensor, pre: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        gate, up = pre.chunk(2, 1)
        return torch.cat([torch.ops.aten.silu_backward(dh * up, gate), dh * functional.silu(gate)], 1)
    if activation == "gelu_tanh":
        return torch.ops.aten.gelu_backward(dh, pre, approximate="tanh")
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(dh, pre)
    if activation == "quick_gelu":
        share = torch.sigmoid(QUICK * pre)
        # In this order, or the largest pre would be infinite before it is multiplied by 0.
        return dh * (share + pre * (share * (1 - share)) * QUICK)
    return torch.ops.aten.silu_backward(dh, pre)


@torch.autocast("cpu", enabled=False)
def activation_backward_cpu(
    activation: str, up_begins: int, dh: Tensor, pre: Tensor, dpre: Tensor, h: Tensor, partial: Tensor
) -> None:
    """Fills dpre, h and partial, those that have rows, as the launch of `plan_activation_backward` does."""
    dtype = torch.promote_types(pre.dtype, torch.float32)
    pre = pre.to(dtype)
    if dpre.shape[0]:
        columns = pre.shape[1] // (2 if activation == "swiglu" else 1)
        gradient = _pre_gradient(dh[:, :columns].to(dtype), pre, activation)
        if activation == "swiglu":
            of_gate, of_up = gradient.chunk(2, 1)
            dpre[:, :up_begins].copy_(_padded(of_gate, up_begins))
            dpre[:, up_begins:].copy_(_padded(of_up, dpre.shape[1] - up_begins))
        else:
            dpre.copy_(_padded(gradient, dpre.shape[1]))
        if partial.shape[0]:
            partial.copy_(gradient.sum(0, keepdim=True))
    if h.shape[0]:
        activated = _activated(pre, activation)
        h[:, : activated.shape[1]].copy_(activated)


def column_sums_cpu(t: ColumnSums) -> None:
    for matrix, sums in ((t.first, t.first_sums), (t.second, t.second_sums)):
        if matrix is not None and sums is not None:
            sums.copy_(matrix.sum(0, dtype=torch.promote_types(matrix.dtype, torch.float32)))
