"""Projections: the packed one with its rotary embedding, and the MLP."""

import torch
from torch import Tensor
from torch.nn import functional

from torch_ops.testing.references.rope import rotated


def qkv_rope(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, num_heads: int,
    num_k_heads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(q, k, v) of `vk::qkv_rope`: a linear, a split, a rotation."""
    num_k_heads = num_heads if num_k_heads is None else num_k_heads
    packed = functional.linear(x, weight, bias).unflatten(1, (num_heads + 2 * num_k_heads, -1))
    q, k, v = packed.split([num_heads, num_k_heads, num_k_heads], 1)
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def activated(pre: Tensor, activation: str) -> Tensor:
    """The activation between the layers of `vk::mlp`."""
    if activation == "swiglu":
        gate, up = pre.chunk(2, -1)
        return functional.silu(gate) * up
    if activation == "quick_gelu":
        return pre * torch.sigmoid(1.702 * pre)
    if activation == "silu":
        return functional.silu(pre)
    return functional.gelu(pre, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])


def mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    w_up: Tensor | None = None, b_up: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out of `vk::mlp`: a linear, an activation, a linear; of two weights of a gated layer as models have them."""
    if w_up is not None:
        gated = functional.silu(functional.linear(x, w1, b1)) * functional.linear(x, w_up, b_up)
        return functional.linear(gated, w2, b2)
    return functional.linear(activated(functional.linear(x, w1, b1), activation), w2, b2)
