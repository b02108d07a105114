"""The rotary embedding, and packed attention of what it has turned."""

from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.references.packed_attention import window_attn, window_attn_backward


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, H, D] turned as Transformers' vision encoders do it: in fp32 or wider, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[:, None].to(wide) for table in (cos, sin))
    if cos.shape[-1] != x.shape[-1]:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return (x.to(wide) * cos + _rotate_half(x.to(wide)) * sin).to(x.dtype)


def rope_window_attn(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of `vk::rope_window_attn`; options are those of `window_attn`."""
    return window_attn(rotated(q, cos, sin), rotated(k, cos, sin), v, cu_seqlens, cu_seqlens_k, **options)


def rope_window_attn_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cos: Tensor, sin: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of `vk::rope_window_attn_backward`: that of attention, and autograd through the rotation."""
    q_leaf, k_leaf = q.detach().requires_grad_(), k.detach().requires_grad_()
    with torch.enable_grad():
        q, k = rotated(q_leaf, cos, sin), rotated(k_leaf, cos, sin)
    dq, dk, dv = window_attn_backward(
        dout, dlse, q.detach(), k.detach(), v, out, lse, cu_seqlens, cu_seqlens_k, **options
    )
    (dq,), (dk,) = torch.autograd.grad(q, q_leaf, dq), torch.autograd.grad(k, k_leaf, dk)
    return dq, dk, dv
