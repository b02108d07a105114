"""The attention of a vision encoder's block with both projections."""

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torch_ops.testing.references.packed_attention import window_attn
from torch_ops.testing.references.rope import rotated


def vision_attention(
    x: Tensor, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
    cos: Tensor | None, sin: Tensor | None, num_heads: int,
) -> Tensor:  # fmt: skip
    """out of `torch_ops.models.VisionAttention`, all rows one segment; one head after the other, for fp64 to fit."""
    q, k, v = functional.linear(x, qkv_weight, qkv_bias).unflatten(1, (3, num_heads, -1)).unbind(1)
    if cos is not None and sin is not None:
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    borders = torch.tensor([0, x.shape[0]], dtype=torch.int32, device=x.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attn(q, k, v, borders)[0]

    heads = [
        checkpoint(attend, *(each[:, head : head + 1] for each in (q, k, v)), use_reentrant=False)
        for head in range(num_heads)
    ]
    return functional.linear(torch.cat(heads, 1).flatten(1), proj_weight, proj_bias)
