"""The attention core on the CPU, in ATen: PyTorch's own fused kernel per segment, or blocks of query rows.

No T x T mask is built. fp64 computes in fp64, all else in fp32, but for what PyTorch's own kernel rounds. The gradient
is written out, as in the kernels, and not taken by autograd: ops on the CPU are opaque to it. Autocast casts what the
op takes, and nothing in here.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.tiles.pieces import MOST_KEYS
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import Backward, Forward, SegmentBackward, SegmentForward
from torch_ops._core.device import host_tensor
from torch_ops._core.philox import keep_weights

AnyForward = Forward | SegmentForward
AnyBackward = Backward | SegmentBackward
BLOCK_ROWS = 512
# With fewer, less than a vector of the CPU, PyTorch's own kernel takes rows of NaN for rows without keys.
FUSED_KEYS = 16


class _Segment(NamedTuple):
    """A segment that has queries.

    - sequence: number of the sequence, for slopes and the stream of dropout.
    - queries: rows of q, clamped to the tensor.
    - keys: rows of k and v, clamped. Keys that lie apart are a vector.
    - places: key positions of these keys.
    - shift: key position of the first query.
    - first_row: row of the first query for dropout.
    """

    sequence: int
    queries: slice
    keys: slice | Tensor
    places: Tensor
    shift: int
    first_row: int


def _segments(cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int) -> Iterator[_Segment]:
    spans = zip(_spans(cu_q, total_q), _spans(cu_k, total_k), strict=True)
    for index, (queries, keys) in enumerate(spans):
        if queries.start < queries.stop:
            length = keys.stop - keys.start
            places = torch.arange(length, device=cu_q.device)
            yield _Segment(index, queries, keys, places, length - (queries.stop - queries.start), 0)


def _shared_segments(t: SegmentForward | SegmentBackward) -> Iterator[_Segment]:
    """Segments that name the sequence of their keys."""
    total_k, device = t.k.shape[0], t.q.device
    bounds, rows = t.key_bounds.tolist(), t.key_rows.tolist()
    spans, sequences, limits = _spans(t.cu_q, t.q.shape[0]), t.key_sequence.tolist(), t.key_limit.tolist()
    positions = [None] * len(limits) if t.query_start is None else t.query_start.tolist()
    for queries, sequence, limit, position in zip(spans, sequences, limits, positions, strict=True):
        if queries.start == queries.stop:
            continue
        length, pieces = 0, [torch.empty(0, dtype=torch.int64, device=device)]
        places = list(pieces)
        if 0 <= sequence < len(bounds):
            length = min(max(limit, 0), max(bounds[sequence][-1], 0), MOST_KEYS.value)
            for (begin, end), row in zip(pairwise(bounds[sequence]), rows[sequence], strict=True):
                # Keys outside of the tensor do not exist.
                low, high = max(begin, 0, begin - row), min(end, length, begin - row + total_k)
                places.append(torch.arange(low, max(low, high), device=device))
                pieces.append(places[-1] + (row - begin))
        shift = length - (queries.stop - queries.start) if position is None else position
        yield _Segment(sequence, queries, torch.cat(pieces), torch.cat(places), shift, shift)


def _spans(cu: Tensor, total: int) -> Iterator[slice]:
    """Rows of each segment. A boundary that falls counts as the largest before it: its segment is empty."""
    for start, end in pairwise(accumulate((min(max(bound, 0), total) for bound in cu.tolist()), max)):
        yield slice(start, end)


def _blocks(queries: slice) -> Iterator[tuple[slice, int]]:
    """Blocks of query rows, and the number of the first of each in the segment."""
    for start in range(queries.start, queries.stop, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, queries.stop)), start - queries.start


def _add(total: Tensor, rows: slice | Tensor, values: Tensor) -> None:
    """Add values to these rows of total; several values may be for one row."""
    if isinstance(rows, slice):
        total[rows] += values
    else:
        total.index_add_(0, rows, values)


def _grouped(tensor: Tensor, rows: slice | Tensor, num_k_heads: int, dtype: torch.dtype) -> Tensor:
    """[Hk, group, rows, D]; keys and values have a group of one and broadcast.

    Contiguous, so that equal values give equal bits in whatever strides they come.
    """
    return tensor[rows].to(dtype).unflatten(1, (num_k_heads, -1)).permute(1, 2, 0, 3).contiguous()


def _block_scores(
    q: Tensor, k: Tensor, position: int, places: Tensor, options: AttentionOptions, slopes: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Masked scores [Hk, group, M, N], tanh where there is a softcap, and which pairs see each other where not all do.

    `position` is the key position of the first query, `places` are those of the keys. slopes [H] are those of ALiBi.
    """
    products = q @ k.transpose(-1, -2) * options.scale
    capped = None
    if options.softcap > 0:
        capped = torch.tanh(products / options.softcap)
        products = capped * options.softcap
    offset = places - (position + torch.arange(q.shape[-2], device=q.device))[:, None]
    if slopes is not None:
        products = products - slopes.to(products.dtype).view(*q.shape[:2], 1, 1) * offset.abs()
    seen = None
    if options.masked:
        left, right = options.bounds()
        seen = (offset >= -left) & (offset <= right)
        products = products.masked_fill(~seen, -torch.inf)
    return products, capped, seen


def _weigh(weights: Tensor, rows: Tensor, seen: Tensor | None) -> Tensor:
    """weights [..., M, N] @ rows [..., N, D], in which a row counts only where it is seen, whatever it holds.

    Weights are 0 elsewhere, but 0 times an infinity or a NaN is NaN. So these are counted, and added to the product of
    the other entries.
    """
    finite = rows.isfinite()
    if seen is None or bool(finite.all()):
        return weights @ rows
    up, down = ((rows == torch.inf).to(rows.dtype), (rows == -torch.inf).to(rows.dtype))
    more, less = ((weights > 0).to(rows.dtype), (weights < 0).to(rows.dtype))
    undefined = seen.to(rows.dtype) @ rows.isnan().to(rows.dtype)
    undefined = undefined + (seen & (weights == 0)).to(rows.dtype) @ (up + down)
    total = weights @ rows.masked_fill(~finite, 0.0)
    for count, value in (
        (more @ up + less @ down, torch.inf), (more @ down + less @ up, -torch.inf), (undefined, torch.nan)
    ):  # fmt: skip
        total = total + torch.zeros_like(total).masked_fill(count > 0, value)
    return total


def _slopes(t: AnyForward | AnyBackward, sequence: int) -> Tensor | None:
    return t.slopes if t.slopes is None or t.slopes.dim() == 1 else t.slopes[sequence]


def _kept(t: AnyForward | AnyBackward, segment: _Segment, first: int, weights: Tensor, dropout: float) -> Tensor:
    """Which of the weights [Hk, group, M, N] of rows from the segment's `first` on dropout keeps."""
    assert t.seed is not None
    k_heads, group, num_rows, num_keys = weights.shape
    streams = segment.sequence * k_heads * group + torch.arange(k_heads * group, device=weights.device)
    rows = segment.first_row + torch.arange(first, first + num_rows, device=weights.device)
    if isinstance(segment.keys, slice):
        return keep_weights(t.seed, streams.view(k_heads, group), rows, num_keys, dropout)
    most = int(segment.places.max()) + 1
    return keep_weights(t.seed, streams.view(k_heads, group), rows, most, dropout)[..., segment.places]


@torch.autocast("cpu", enabled=False)
def _forward(options: AttentionOptions, t: AnyForward, segments: Iterable[_Segment]) -> None:
    """Fill out and lse. If lse has no rows, it is not kept."""
    q, k, v, out, lse = t.q, t.k, t.v, t.out, t.lse
    heads = k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    plain = not options.masked and not options.score_mods and q.shape[1] == heads
    if plain:
        # PyTorch's kernel takes it that columns are contiguous, and reads past the tensor where they are not.
        q, k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (q, k, v))
        if min(q.stride(0), q.stride(1)) < q.shape[2]:
            # Its output takes q's layout, in which overlapping rows leave columns apart; it writes them side by side.
            q = q.clone(memory_format=torch.contiguous_format)
    out.zero_()
    if lse.shape[1] < q.shape[0]:
        lse = lse.new_empty((q.shape[1], q.shape[0]))
    lse.fill_(-torch.inf)
    for segment in segments:
        queries, keys, places = segment.queries, segment.keys, segment.places
        if places.numel() == 0:
            if t.sinks is not None:
                lse[:, queries] = t.sinks.to(lse.dtype)[:, None]
            continue
        if plain and places.numel() >= FUSED_KEYS:
            fused, fused_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(tensor[rows].transpose(0, 1)[None] for tensor, rows in ((q, queries), (k, keys), (v, keys))),
                scale=options.scale,
            )
            out[queries] = fused[0].transpose(0, 1)
            lse[:, queries] = fused_lse[0]
            continue
        k_segment, v_segment = (_grouped(tensor, keys, heads, dtype) for tensor in (k, v))
        slopes = _slopes(t, segment.sequence)
        for rows, first in _blocks(queries):
            q_block, position = _grouped(q, rows, heads, dtype), segment.shift + first
            s, _, seen = _block_scores(q_block, k_segment, position, places, options, slopes)
            block_lse = own_lse = torch.logsumexp(s, -1)
            # Weights add up to 1 whatever lse is rounded to.
            p = torch.softmax(s, -1)
            if t.sinks is not None:
                block_lse = torch.logaddexp(own_lse, t.sinks.to(dtype).view(heads, -1, 1))
                p = p * torch.exp(own_lse - block_lse)[..., None]
            p = p.masked_fill((own_lse == -torch.inf)[..., None], 0.0)
            if options.dropout > 0:
                p = p.masked_fill(~_kept(t, segment, first, p, options.dropout), 0.0) / (1 - options.dropout)
            out[rows] = _weigh(p, v_segment, seen).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
            lse[:, rows] = block_lse.flatten(0, 1)


@torch.autocast("cpu", enabled=False)
def _backward(options: AttentionOptions, t: AnyBackward, segments: Iterable[_Segment]) -> None:
    dout, dlse, q, k, v, out, lse, dq = t.dout, t.dlse, t.q, t.k, t.v, t.out, t.lse, t.dq
    heads = k.shape[1]
    # In the precision that lse came from: scores of another would be off by its rounding, and P would not sum to 1.
    dtype = lse.dtype
    dq.zero_()
    dk_sum, dv_sum = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    for segment in segments:
        keys, places = segment.keys, segment.places
        if places.numel() == 0:
            continue
        k_segment, v_segment = (_grouped(tensor, keys, heads, dtype) for tensor in (k, v))
        slopes = _slopes(t, segment.sequence)
        for rows, first in _blocks(segment.queries):
            q_block, dout_block, out_block = (_grouped(tensor, rows, heads, dtype) for tensor in (q, dout, out))
            position = segment.shift + first
            s, capped, seen = _block_scores(q_block, k_segment, position, places, options, slopes)
            block_lse = lse[:, rows].unflatten(0, (heads, -1))
            unseen = block_lse == -torch.inf
            p = torch.exp(s - block_lse.masked_fill(unseen, 0.0)[..., None])
            delta = (dout_block * out_block).sum(-1)
            if dlse is not None:
                delta = delta - dlse[:, rows].unflatten(0, (heads, -1))
            dp = dout_block @ v_segment.transpose(-1, -2)
            weights = p
            if options.dropout > 0:
                kept = _kept(t, segment, first, p, options.dropout)
                weights, dp = (x.masked_fill(~kept, 0.0) / (1 - options.dropout) for x in (p, dp))
            ds = p * (dp - delta.masked_fill(unseen, 0.0)[..., None])
            if capped is not None:
                ds = ds * (1 - capped * capped)
            seen_by = None
            if seen is not None:
                ds, weights, seen_by = ds.masked_fill(~seen, 0.0), weights.masked_fill(~seen, 0.0), seen.T
            dq[rows] = (_weigh(ds, k_segment, seen) * options.scale).permute(2, 0, 1, 3).flatten(1, 2).to(dq.dtype)
            dk_block = _weigh(ds.transpose(-1, -2), q_block, seen_by).sum(1)
            _add(dk_sum, keys, dk_block.permute(1, 0, 2) * options.scale)
            _add(dv_sum, keys, _weigh(weights.transpose(-1, -2), dout_block, seen_by).sum(1).permute(1, 0, 2))
    t.dk.copy_(dk_sum)
    t.dv.copy_(dv_sum)


def segment_forward_cpu(options: AttentionOptions, t: SegmentForward) -> None:
    """Fill out and lse of segments that name the sequence of their keys."""
    _forward(options, t, _shared_segments(t))


def segment_backward_cpu(options: AttentionOptions, t: SegmentBackward) -> None:
    """Fill dq, dk and dv of segments that name the sequence of their keys."""
    _backward(options, t, _shared_segments(t))


def _packed_forward(options: AttentionOptions, t: Forward, first_sequence: int = 0) -> None:
    """Fill out and lse; `first_sequence` is the number of the first segment among all sequences."""
    _forward(options, t, _numbered(t, first_sequence))


def _packed_backward(options: AttentionOptions, t: Backward, first_sequence: int = 0) -> None:
    _backward(options, t, _numbered(t, first_sequence))


def _numbered(t: Forward | Backward, first_sequence: int) -> Iterator[_Segment]:
    assert t.cu_q is not None
    for segment in _segments(t.cu_q, t.cu_q if t.cu_k is None else t.cu_k, t.q.shape[0], t.k.shape[0]):
        yield segment._replace(sequence=first_sequence + segment.sequence)


def _boundaries(tensor: Tensor) -> Tensor:
    return host_tensor([0, tensor.shape[2]], torch.int32)


def forward_cpu(options: AttentionOptions, t: Forward) -> None:
    """Fill out and lse; dense calls sequence by sequence."""
    if t.cu_q is not None:
        _packed_forward(options, t)
        return
    cu_q, cu_k = _boundaries(t.q), _boundaries(t.k)
    for sequence in range(t.q.shape[0]):
        rows = {name: getattr(t, name)[sequence].transpose(0, 1) for name in ("q", "k", "v", "out")}
        _packed_forward(options, t._replace(**rows, lse=t.lse[sequence], cu_q=cu_q, cu_k=cu_k), sequence)


def backward_cpu(options: AttentionOptions, t: Backward) -> None:
    """Fill dq, dk and dv; dense calls sequence by sequence."""
    if t.cu_q is not None:
        _packed_backward(options, t)
        return
    cu_q, cu_k = _boundaries(t.q), _boundaries(t.k)
    names = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
    for sequence in range(t.q.shape[0]):
        rows = {name: getattr(t, name)[sequence].transpose(0, 1) for name in names}
        dlse = None if t.dlse is None else t.dlse[sequence]
        own = t._replace(**rows, lse=t.lse[sequence], dlse=dlse, cu_q=cu_q, cu_k=cu_k)
        _packed_backward(options, own, sequence)
