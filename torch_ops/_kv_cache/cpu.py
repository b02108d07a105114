"""Appending to a cache on the CPU, in ATen."""

from typing import Any

import torch
from torch import Tensor

from torch_ops._core.checks import capacity_of
from torch_ops._core.rotation_cpu import rotated


def rotary_dim(cos: Tensor | None, head_dim: int) -> int:
    """The columns of a head that tables of this width turn: all, or twice the table's columns."""
    if cos is None:
        return 0
    return head_dim if cos.shape[1] == head_dim else 2 * cos.shape[1]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, H, S, D] by the angles of its tokens [B, S, columns], not rounded."""
    columns = rotary_dim(cos[0], x.shape[3])

    def in_halves(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if interleaved else x

    if cos.shape[2] == columns:
        cos, sin = in_halves(cos), in_halves(sin)
    heads = in_halves(x[..., :columns]).transpose(1, 2).flatten(0, 1)
    out = rotated(False, heads, cos.flatten(0, 1), sin.flatten(0, 1)).unflatten(0, cos.shape[:2]).transpose(1, 2)
    if interleaved:
        out = out.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat([out, x[..., columns:].to(out.dtype)], -1)


@torch.autocast("cpu", enabled=False)
def append_cpu(interleaved: bool, tensors: Any) -> None:
    """Fill the caches and out."""
    k, v, k_cache, v_cache, cache_seqlens, block_table, q, cos, sin, lengths, out = tensors
    batch, _, tokens, _ = k.shape
    capacity, page_size = capacity_of(k_cache, block_table), k_cache.shape[2]
    before, token = cache_seqlens.long()[:, None], torch.arange(tokens, device=k.device)
    position = before + token
    if cos is not None and sin is not None:
        angle = position.clamp(0, cos.shape[0] - 1)
        cos, sin = cos[angle], sin[angle]
        k = _rotated(k, cos, sin, interleaved)
        if q is not None:
            out.copy_(_rotated(q, cos, sin, interleaved))
    if capacity == 0 or k_cache.shape[0] == 0:
        return
    inside = (before >= 0) & (position < capacity)
    if lengths is not None:
        inside &= token < lengths[:, None]
    if block_table is None:
        page, row = torch.arange(batch, device=k.device)[:, None].expand_as(position), position
    else:
        page = block_table.long().gather(1, position.clamp(0, capacity - 1) // page_size)
        row = position % page_size
        inside &= (page >= 0) & (page < k_cache.shape[0])
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache[page[inside], :, row[inside]] = new.transpose(1, 2)[inside].to(cache.dtype)
