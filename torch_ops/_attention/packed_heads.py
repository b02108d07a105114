"""Attention of q, k and v that a projection packed, [T, 3 H D]: in place, and with one packed gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.plan import plan_backward
from torch_ops._attention.tensors import Backward
from torch_ops._core.launch import contiguous_like
from torch_ops._core.plan import Plan
from torch_ops._core.planned_op import opaque_plan
from torch_ops._core.registry import is_eager


class PackedBackward(NamedTuple):
    """dpacked [T, 3 H D] is filled. dout is [T, H D], out [T, H, D]; packed has contiguous columns."""

    dout: Tensor
    packed: Tensor
    out: Tensor
    lse: Tensor
    cu_seqlens: Tensor
    dpacked: Tensor


class PackedOptions(NamedTuple):
    num_heads: int


def heads_of(packed: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [T, H, D] of q, k and v, or of their gradients."""
    rows, columns = packed.shape
    parts = packed.view(rows, 3, num_heads, columns // (3 * num_heads))
    return parts.select(1, 0), parts.select(1, 1), parts.select(1, 2)


def default_options(num_heads: int, columns: int, has_lse: bool = True) -> AttentionOptions:
    """Return the options that `window_attn` has by default, for queries of so many columns."""
    # Graphs of dynamic shape specialise on the head dimension, as kernels do.
    return AttentionOptions(int(columns // num_heads) ** -0.5, has_lse=has_lse)


def _tensors(t: PackedBackward, num_heads: int, gradients: tuple[Tensor, ...]) -> Backward:
    dout = t.dout.view(gradients[0].shape)
    return Backward(dout, None, *heads_of(t.packed, num_heads), t.out, t.lse, t.cu_seqlens, None, *gradients)


def plan_packed_backward(t: PackedBackward, options: PackedOptions) -> Plan:
    """Plan the gradient of packed, which the launch returns: dpacked, or in graphs another tensor.

    Eager calls write dq, dk and dv where they belong. torch.compile does not see that they are parts of one tensor, and
    would copy each before and after a kernel writes to it. In a graph, the Hopper path is therefore opaque as a whole,
    and the portable path copies dq, dk and dv once.
    """
    num_heads, gradients = options.num_heads, heads_of(t.dpacked, options.num_heads)
    of_attention = default_options(num_heads, t.packed.shape[1] // 3)
    plan = plan_backward(_tensors(t, num_heads, gradients), of_attention)
    if is_eager():
        fill = plan.launch

        def launch(t: PackedBackward) -> Tensor:
            fill(_tensors(t, num_heads, heads_of(t.dpacked, num_heads)))
            return t.dpacked
    elif plan.path == "hopper":
        fill = _plan_packed_opaque(options).launch

        def launch(t: PackedBackward) -> Tensor:
            fill(t)
            return t.dpacked
    else:
        fill = plan_backward(_tensors(t, num_heads, tuple(map(contiguous_like, gradients))), of_attention).launch

        def launch(t: PackedBackward) -> Tensor:
            apart = tuple(map(contiguous_like, heads_of(t.dpacked, num_heads)))
            fill(_tensors(t, num_heads, apart))
            return torch.stack(apart, 1).view(t.dpacked.shape)

    return Plan(launch, plan.kernels, plan.path, plan.why)


_plan_packed_opaque = opaque_plan(
    "_packed_attention_bwd", PackedBackward, PackedOptions, writes=("dpacked",), plan=plan_packed_backward
)
