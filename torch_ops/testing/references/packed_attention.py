"""Packed attention."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ops._core.philox import keep_weights


class _Segment(NamedTuple):
    """Rows of a segment, by its number, which of its keys each query sees [Lq, Lk], and how far off they are."""

    number: int
    queries: slice
    keys: slice
    seen: Tensor
    distance: Tensor


def _segments(
    cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, causal: bool, window_left: int, window_right: int
) -> Iterator[_Segment]:
    bounds = cu_seqlens.tolist()
    k_bounds = bounds if cu_seqlens_k is None else cu_seqlens_k.tolist()
    device = cu_seqlens.device
    for number, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        k_start, k_end = k_bounds[number], k_bounds[number + 1]
        num_queries, num_keys = end - start, k_end - k_start
        position = torch.arange(num_queries, device=device)[:, None] + (num_keys - num_queries)
        key = torch.arange(num_keys, device=device)[None, :]
        seen = torch.ones((num_queries, num_keys), dtype=torch.bool, device=device)
        if causal:
            seen &= key <= position
        if window_left >= 0:
            seen &= key >= position - window_left
        if window_right >= 0:
            seen &= key <= position + window_right
        yield _Segment(number, slice(start, end), slice(k_start, k_end), seen, (key - position).abs())


def per_query_head(tensor: Tensor, rows: slice | Tensor, num_heads: int) -> Tensor:
    """[H, rows, D], keys and values repeated for the query heads that share them."""
    block = tensor[rows].transpose(0, 1)
    return block.repeat_interleave(num_heads // block.shape[0], 0)


def _biased(scores: Tensor, segment: _Segment, alibi_slopes: Tensor | None) -> Tensor:
    """Scores [H, Lq, Lk] less ALiBi's."""
    if alibi_slopes is None:
        return scores
    slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[segment.number]
    return scores - slopes.to(scores.dtype)[:, None, None] * segment.distance


def _dropped(weights: Tensor, segment: _Segment, first_sequence: int, dropout_p: float, seed: Tensor | None) -> Tensor:
    """Weights, or gradients of them, after dropout."""
    if dropout_p == 0 or seed is None:
        return weights
    heads, queries, keys = weights.shape
    streams = (first_sequence + segment.number) * heads + torch.arange(heads, device=weights.device)
    kept = keep_weights(seed, streams, torch.arange(queries, device=weights.device), keys, dropout_p)
    return weights.masked_fill(~kept, 0.0) / (1 - dropout_p)


def window_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = True,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    first_sequence: int = 0,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `vk::window_attn`, one segment after the other with the whole score matrix of each.

    Segments are counted from `first_sequence` on.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    heads = q.shape[1]
    before = int(cu_seqlens[0])
    outs, lses = [q[:0], q.new_zeros((before, *q.shape[1:]))], [q.new_full((heads, before), -torch.inf)]
    for segment in _segments(cu_seqlens, cu_seqlens_k, causal, window_left, window_right):
        _, queries, keys, seen, _ = segment
        q_segment, k_segment, v_segment = (
            per_query_head(tensor, rows, heads) for tensor, rows in ((q, queries), (k, keys), (v, keys))
        )
        scores = q_segment @ k_segment.transpose(1, 2) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = _biased(scores, segment, alibi_slopes).masked_fill(~seen, -torch.inf)
        lse = torch.logsumexp(scores, -1) if seen.shape[1] else scores.new_full(scores.shape[:2], -torch.inf)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        weights = _dropped(weights, segment, first_sequence, dropout_p, dropout_seed)
        outs.append((weights @ v_segment).transpose(0, 1))
        lses.append(lse)
    rest = q.shape[0] - int(cu_seqlens[-1])
    outs.append(q.new_zeros((rest, *q.shape[1:])))
    lses.append(q.new_full((heads, rest), -torch.inf))
    return torch.cat(outs), torch.cat(lses, 1)


def window_attn_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = True,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    first_sequence: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `vk::window_attn_backward`: weights recomputed from the lse that it is given, not by autograd."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    heads, k_heads = q.shape[1], k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for segment in _segments(cu_seqlens, cu_seqlens_k, causal, window_left, window_right):
        _, queries, keys, seen, _ = segment
        q_segment, dout_segment, out_segment = (per_query_head(tensor, queries, heads) for tensor in (q, dout, out))
        k_segment, v_segment = (per_query_head(tensor, keys, heads) for tensor in (k, v))
        scores = (k_segment @ q_segment.transpose(1, 2)).transpose(1, 2) * scale
        slope = torch.ones_like(scores)
        if softcap > 0:
            capped = torch.tanh(scores / softcap)
            scores, slope = softcap * capped, 1 - capped * capped
        scores = _biased(scores, segment, alibi_slopes)
        row_lse = lse[:, queries]
        unseen = row_lse == -torch.inf
        weights = torch.exp(scores - row_lse.masked_fill(unseen, 0.0)[..., None]).masked_fill(~seen, 0.0).to(q.dtype)
        delta = (dout_segment * out_segment).sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, queries]
        dropout = segment, first_sequence, dropout_p, dropout_seed
        dp = _dropped(dout_segment @ v_segment.transpose(1, 2), *dropout)
        dscores = (weights * (dp - delta.masked_fill(unseen, 0.0)[..., None]) * slope).to(q.dtype)
        dq[queries] = (dscores @ k_segment * scale).transpose(0, 1)
        for gradient, block in (
            (dk, dscores.transpose(1, 2) @ q_segment * scale),
            (dv, _dropped(weights, *dropout).transpose(1, 2) @ dout_segment),
        ):
            gradient[keys] = block.unflatten(0, (k_heads, -1)).sum(1).transpose(0, 1)
    return dq, dk, dv
