"""Attention over a cache of keys on the CPU, in ATen, one sequence after the other.

fp64 computes in fp64, all else in fp32 and rounds once. Autocast casts what the op takes, and nothing in here.
"""

from typing import Any

import torch
from torch import Tensor

from torch_ops._attention.options import AttentionOptions
from torch_ops._core.checks import capacity_of
from torch_ops._core.device import host_tensor


def _of_sequence(cache: Tensor, block_table: Tensor | None, index: int, length: int) -> Tensor:
    """Keys or values [Hk, length, D] of a sequence; page numbers are clamped as in the kernels."""
    if block_table is None:
        return cache[index, :, :length]
    page_size = cache.shape[2]
    pages = block_table[index, : (length + page_size - 1) // page_size].long().clamp(0, cache.shape[0] - 1)
    return cache[pages].transpose(0, 1).flatten(1, 2)[:, :length]


@torch.autocast("cpu", enabled=False)
def decode_cpu(options: AttentionOptions, t: Any) -> None:
    """Fill out and lse."""
    q, k_cache, v_cache, cache_seqlens, block_table, slopes, sinks, prefix_k, prefix_v, prefix_seqlens, out, lse = t
    batch, num_heads, queries, _ = q.shape
    heads = k_cache.shape[1]
    dtype = lse.dtype
    lengths = cache_seqlens.clamp(0, capacity_of(k_cache, block_table)).tolist()
    before = [0] * batch
    if prefix_k is not None and prefix_v is not None:
        samples = batch // prefix_k.shape[0]
        whole = host_tensor([prefix_k.shape[2]] * prefix_k.shape[0], torch.int32)
        found = whole if prefix_seqlens is None else prefix_seqlens.clamp(0, prefix_k.shape[2])
        before = found.repeat_interleave(samples).tolist()
    left, right = options.bounds()
    for index, (length, skipped) in enumerate(zip(lengths, before, strict=True)):
        k = _of_sequence(k_cache, block_table, index, length).to(q.dtype)
        v = _of_sequence(v_cache, block_table, index, length).to(q.dtype)
        if prefix_k is not None and prefix_v is not None:
            group = index // samples
            k = torch.cat((prefix_k[group, :, :skipped].to(q.dtype), k), 1)
            v = torch.cat((prefix_v[group, :, :skipped].to(q.dtype), v), 1)
        # Keys that no query sees may be anything, NaN too.
        first = min(max(skipped + length - queries - left, 0), skipped + length)
        k, v = k[:, first:], v[:, first:]
        rows = q[index].to(dtype).unflatten(0, (heads, -1)).contiguous()
        s = rows @ k.to(dtype)[:, None].transpose(-1, -2) * options.scale
        if options.softcap > 0:
            s = torch.tanh(s / options.softcap) * options.softcap
        columns, rows = (torch.arange(*ends, device=q.device) for ends in ((first, skipped + length), (queries,)))
        offset = columns - (skipped + length - queries + rows)[:, None]
        if slopes is not None:
            s = s - slopes.expand(batch, num_heads)[index].to(dtype).view(heads, -1, 1, 1) * offset.abs()
        # All that comes before the cache comes before the queries.
        unseen = (offset < -left) | ((offset > right) & (columns >= skipped))
        s = s.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            s = torch.cat((s, sinks.to(dtype).view(heads, -1, 1, 1).expand(*s.shape[:3], 1)), -1)
        row_lse = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:3], -torch.inf)
        # Weights add up to 1 whatever lse is rounded to.
        p = torch.softmax(s, -1).masked_fill((row_lse == -torch.inf)[..., None], 0.0)
        out[index] = (p[..., : v.shape[1]] @ v.to(dtype)[:, None]).flatten(0, 1).to(out.dtype)
        lse[index] = row_lse.flatten(0, 1)
