"""Attention over a cache of keys."""

import torch
from torch import Tensor


def _keys_of(
    cache: Tensor, block_table: Tensor | None, prefix: Tensor | None, index: int, before: int, length: int,
    samples: int, like: Tensor,
) -> Tensor:  # fmt: skip
    """[H, keys, D]: those of the prefix and of the cache, repeated for the query heads that share them."""
    own = cache[index] if block_table is None else cache[block_table[index].long()].transpose(0, 1).flatten(1, 2)
    keys = own[:, :length].to(like.dtype)
    if prefix is not None:
        keys = torch.cat((prefix[index // samples, :, :before].to(like.dtype), keys), 1)
    return keys.repeat_interleave(like.shape[1] // keys.shape[0], 0)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    prefix_k: Tensor | None = None,
    prefix_v: Tensor | None = None,
    prefix_seqlens: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `vk::attention_decode`, one sequence after the other with the whole score matrix of each."""
    batch, heads, queries, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    samples, before = 1, [0] * batch
    if prefix_k is not None:
        samples = batch // prefix_k.shape[0]
        lengths = [prefix_k.shape[2]] * prefix_k.shape[0] if prefix_seqlens is None else prefix_seqlens.tolist()
        before = [lengths[index // samples] for index in range(batch)]
    outs, lses = [], []
    for index, (skipped, length) in enumerate(zip(before, cache_seqlens.tolist(), strict=True)):
        k, v = (
            _keys_of(cache, block_table, prefix, index, skipped, length, samples, q)
            for cache, prefix in ((k_cache, prefix_k), (v_cache, prefix_v))
        )
        key = torch.arange(skipped + length, device=q.device)[None, :]
        position = torch.arange(queries, device=q.device)[:, None] + (skipped + length - queries)
        seen = torch.ones((queries, skipped + length), dtype=torch.bool, device=q.device)
        if causal:
            seen &= (key <= position) | (key < skipped)
        if window_left >= 0:
            seen &= key >= position - window_left
        if window_right >= 0:
            seen &= (key <= position + window_right) | (key < skipped)
        scores = q[index] @ k.transpose(1, 2) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            slopes = alibi_slopes.expand(batch, heads)[index].to(q.dtype)
            scores = scores - slopes[:, None, None] * (position - key).abs()
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(q.dtype)[:, None, None].expand(heads, queries, 1)), -1)
        lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        outs.append(weights[..., : skipped + length] @ v)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)
