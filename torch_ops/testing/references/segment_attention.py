"""Attention of query segments to shared sequences of keys, whose rows lie in pieces."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ops._core.philox import WORD, keep_weights
from torch_ops.testing.references.packed_attention import per_query_head

# A sequence has no keys behind so many.
MOST_KEYS = 2**29


class _Segment(NamedTuple):
    """A segment that has queries.

    Shapes: `positions` [Lq], `keys` and the rows of k that hold them [Lk], which keys a query sees [Lq, Lk].
    """

    sequence: int
    queries: slice
    positions: Tensor
    keys: Tensor
    rows: Tensor
    seen: Tensor

    @property
    def distance(self) -> Tensor:
        return (self.positions[:, None] - self.keys).abs()


def _held_keys(bounds: list[int], rows: list[int], limit: int, total: int) -> tuple[list[int], list[int]]:
    """The keys below `limit` that pieces of a sequence hold, and their rows; k has `total` rows."""
    keys: list[int] = []
    held_by: list[int] = []
    for (start, end), row in zip(pairwise(bounds), rows, strict=True):
        # Key j is in row j + shift, if there is one.
        shift = row - start
        held = range(max(start, 0, -shift), min(end, limit, total - shift))
        keys.extend(held)
        held_by.extend(key + shift for key in held)
    return keys, held_by


def _segments(
    q: Tensor,
    k: Tensor,
    places: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    query_start: Tensor | None,
    left: int,
    right: int,
) -> Iterator[_Segment]:
    """The segments; `left` and `right` are the keys that a query sees on either side, or -1 for all."""
    cu_seqlens_q, key_sequence, key_limit, key_bounds, key_rows = (tensor.tolist() for tensor in places)
    first_positions = [None] * len(key_limit) if query_start is None else query_start.tolist()
    # A boundary that falls counts as the largest before it.
    spans = pairwise(accumulate((min(max(bound, 0), q.shape[0]) for bound in cu_seqlens_q), max))
    for (start, end), sequence, limit, first in zip(spans, key_sequence, key_limit, first_positions, strict=True):
        if start == end:
            continue
        known = 0 <= sequence < len(key_bounds)
        bounds, first_rows = (key_bounds[sequence], key_rows[sequence]) if known else ([0], [])
        kv_len = max(0, min(limit, bounds[-1], MOST_KEYS))
        held = _held_keys(bounds, first_rows, kv_len, k.shape[0])
        keys, rows = (torch.tensor(each, dtype=torch.int64, device=q.device) for each in held)
        positions = torch.arange(end - start, device=q.device) + (kv_len - (end - start) if first is None else first)
        offset = keys - positions[:, None]
        seen = torch.ones_like(offset, dtype=torch.bool)
        if left >= 0:
            seen &= offset >= -left
        if right >= 0:
            seen &= offset <= right
        yield _Segment(sequence, slice(start, end), positions, keys, rows, seen)


def _biased(scores: Tensor, segment: _Segment, alibi_slopes: Tensor | None) -> Tensor:
    """Scores [H, Lq, Lk] less ALiBi's."""
    if alibi_slopes is None or not segment.keys.numel():
        return scores
    slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[segment.sequence]
    return scores - slopes.to(scores.dtype)[:, None, None] * segment.distance


def _dropped(weights: Tensor, segment: _Segment, dropout_p: float, seed: Tensor | None) -> Tensor:
    """Weights [H, Lq, Lk], or gradients of them, after dropout."""
    if dropout_p == 0 or seed is None or not segment.keys.numel():
        return weights
    heads = weights.shape[0]
    streams = segment.sequence * heads + torch.arange(heads, device=weights.device)
    num_keys = int(segment.keys.max()) + 1
    kept = keep_weights(seed, streams, segment.positions & WORD, num_keys, dropout_p)[..., segment.keys]
    return weights.masked_fill(~kept, 0.0) / (1 - dropout_p)


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    key_sequence: Tensor,
    key_limit: Tensor,
    key_bounds: Tensor,
    key_rows: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = True,
    return_lse: bool = True,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    query_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `vk::segment_attention`, one segment after the other with the whole score matrix of each."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    heads, total = q.shape[1], q.shape[0]
    places = (cu_seqlens_q, key_sequence, key_limit, key_bounds, key_rows)
    outs, lses, end = [q[:0]], [q.new_zeros((heads, 0))], 0

    def skip_to(row: int) -> None:
        outs.append(q.new_zeros((row - end, *q.shape[1:])))
        lses.append(q.new_full((heads, row - end), -torch.inf))

    for segment in _segments(q, k, places, query_start, window_left, 0 if causal else window_right):
        skip_to(segment.queries.start)
        end = segment.queries.stop
        k_segment, v_segment = (per_query_head(tensor, segment.rows, heads) for tensor in (k, v))
        scores = per_query_head(q, segment.queries, heads) @ k_segment.transpose(1, 2) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = _biased(scores, segment, alibi_slopes).masked_fill(~segment.seen, -torch.inf)
        lse = torch.logsumexp(scores, -1) if scores.shape[2] else scores.new_full(scores.shape[:2], -torch.inf)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        outs.append((_dropped(weights, segment, dropout_p, dropout_seed) @ v_segment).transpose(0, 1))
        lses.append(lse)
    skip_to(total)
    return torch.cat(outs), torch.cat(lses, 1)[:, : total if return_lse else 0]


def segment_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    key_sequence: Tensor,
    key_limit: Tensor,
    key_bounds: Tensor,
    key_rows: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = True,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    float32_kv: bool = False,
    query_start: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `vk::segment_attention_backward`: weights recomputed from the lse given, not by autograd.

    With `float32_kv` segments add to dk and dv in fp32, or in fp64 for fp64 inputs.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    heads, k_heads = q.shape[1], k.shape[1]
    kv_dtype = torch.promote_types(k.dtype, torch.float32) if float32_kv else k.dtype
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=kv_dtype), torch.zeros_like(v, dtype=kv_dtype)
    places = (cu_seqlens_q, key_sequence, key_limit, key_bounds, key_rows)
    for segment in _segments(q, k, places, query_start, window_left, 0 if causal else window_right):
        queries = segment.queries
        q_segment, dout_segment, out_segment = (per_query_head(tensor, queries, heads) for tensor in (q, dout, out))
        k_segment, v_segment = (per_query_head(tensor, segment.rows, heads) for tensor in (k, v))
        scores = q_segment @ k_segment.transpose(1, 2) * scale
        slope = torch.ones_like(scores)
        if softcap > 0:
            capped = torch.tanh(scores / softcap)
            scores, slope = softcap * capped, 1 - capped * capped
        scores = _biased(scores, segment, alibi_slopes)
        unseen = lse[:, queries] == -torch.inf
        row_lse = lse[:, queries].masked_fill(unseen, 0.0)[..., None]
        weights = torch.exp((scores - row_lse).masked_fill(~segment.seen, -torch.inf)).to(q.dtype)
        delta = (dout_segment * out_segment).sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, queries]
        dp = _dropped(dout_segment @ v_segment.transpose(1, 2), segment, dropout_p, dropout_seed)
        dscores = (weights * (dp - delta.masked_fill(unseen, 0.0)[..., None]) * slope).to(q.dtype)
        dq[queries] = (dscores @ k_segment * scale).transpose(0, 1)
        dropped = _dropped(weights, segment, dropout_p, dropout_seed)
        for gradient, block in (
            (dk, dscores.transpose(1, 2) @ q_segment * scale),
            (dv, dropped.transpose(1, 2) @ dout_segment),
        ):
            own = block.unflatten(0, (k_heads, -1)).sum(1).transpose(0, 1)
            gradient.index_add_(0, segment.rows, own.to(kv_dtype))
    return dq, dk, dv
