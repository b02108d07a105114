"""Appending to a cache, token by token."""

import torch
from torch import Tensor


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [..., S, D] by tables of its tokens, [..., S, D] or, of pairs of its first R columns, [..., S, R / 2]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide), sin.to(wide)
    columns = x.shape[-1]
    if cos.shape[-1] != columns:
        columns = 2 * cos.shape[-1]
        cos, sin = (
            table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1) for table in (cos, sin)
        )
    part = x[..., :columns].to(wide)
    if interleaved:
        partner = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        partner = torch.cat([-second, first], -1)
    return torch.cat([part * cos + partner * sin, x[..., columns:].to(wide)], -1).to(x.dtype)


def kv_cache_append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None = None,
    q: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = False,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(q, turned; k_cache and v_cache after it) of `vk::kv_cache_append`, which returns q alone."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    batch, _, tokens, _ = k.shape
    page_size = k_cache.shape[2]
    out = k.new_empty(0) if q is None else torch.empty_like(q)
    counts = [tokens] * batch if lengths is None else lengths.tolist()
    for b, before in enumerate(cache_seqlens.tolist()):
        keys = k[b]
        if cos is not None and sin is not None:
            rows = (before + torch.arange(tokens, device=k.device)).clamp(0, cos.shape[0] - 1)
            keys = turned(keys, cos[rows], sin[rows], interleaved)
            if q is not None:
                out[b] = turned(q[b], cos[rows], sin[rows], interleaved)
        for i in range(tokens):
            page, row = b, before + i
            if block_table is not None:
                column, row = divmod(before + i, page_size)
                page = int(block_table[b, column]) if 0 <= column < block_table.shape[1] else -1
            if before >= 0 and i < counts[b] and 0 <= page < k_cache.shape[0] and row < page_size:
                k_cache[page, :, row] = keys[:, i].to(k_cache.dtype)
                v_cache[page, :, row] = v[b, :, i].to(v_cache.dtype)
    return out, k_cache, v_cache
