"""ring-flash-attention's functions for zigzag llama3 context parallel, on `vk::segment_attention`.

A rank has two chunks of each sequence, an early and a late one. Queries of a chunk see the keys up to the chunk's end.
One launch computes both groups of queries and reads the gathered keys and values in place. Both functions are
differentiable.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ops._core.checks import check_bool, check_like, check_number, integers, refuse
from torch_ops._tools.explain import explained_as
from torch_ops.compat._flash_attn_checks import bounds_of, check_layout, check_softmax_scale
from torch_ops.compat._ring_flash_attn_checks import (
    check_buffer,
    check_same_boundaries,
    check_values,
    groups_of,
)
from torch_ops.segment_attention import segment_attention
from torch_ops.segments import check_limit, dual_group, is_known, of_groups, rising, whole_sequences, zigzag_pieces
from torch_ops.settings import settings

# Ranges and their boundaries, for each group.
KvSlices = Sequence[tuple[Sequence[tuple[int, int]], Tensor]]


@explained_as("segment_attention")
def fused_zigzag_llama3_flash_attn_varlen_forward(
    q0: Tensor,
    q1: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q0: Tensor,
    cu_seqlens_q1: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q0: int,
    max_seqlen_q1: int,
    max_seqlen_k: int,
    max_kv_len_q0: int | Tensor,
    max_kv_len_q1: int | Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute attention of two groups of queries for each packed sequence, over the sequence's first keys.

    A group sees the first L keys of a sequence, where L is the smaller of max_kv_len and the sequence's keys. Row i of
    its n queries in the sequence stands at key position i + L - n (aligned bottom-right). With `causal` a row sees only
    keys up to its own position. A row that sees no key gives out 0 and lse -inf.

    Args:
        q0, q1: [T0, H, D] and [T1, H, D], fp16, bf16 or fp32; D is a multiple of 8 up to 256.
        k, v: [Tk, Hk, D], dtype and device of q0, H a multiple of Hk. They are read in place.
        cu_seqlens_q0, cu_seqlens_q1, cu_seqlens_k: int32 [S + 1] on q0's device, boundaries of the S sequences.
        max_seqlen_q0, max_seqlen_q1: the width of lse0 and lse1 is the next power of two. Rows past that width are
            computed, but their lse is not stored.
        max_seqlen_k: has no effect.
        max_kv_len_q0, max_kv_len_q1: number of keys that a group sees, one integer or int32 [S]. Chunks of sequences
            with different lengths end at different keys and need int32 [S].
        softmax_scale: number that multiplies q k^T. Default: 1 / sqrt(D).
        causal: whether a query sees only keys up to its own position. Default: True.

    Returns:
        out0 [T0, H, D], out1 [T1, H, D], lse0 and lse1. lse is fp32 [S * H, width] in natural logarithms, and
        differentiable. Row s * H + h is sequence s and head h, entry i is the sequence's row i; the padding is -inf.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.

    No value is copied to the host.
    """
    op = "fused_zigzag_llama3_flash_attn_varlen_forward"
    for name, tensor in (("q0", q0), ("q1", q1), ("k", k), ("v", v)):
        check_layout(op, name, tensor, "[T, H, D]")
    check_like(op, "q1", q1, "q0", q0)
    if q1.shape[1:] != q0.shape[1:]:
        refuse(op, "q1", f"of shape [T, {q0.shape[1]}, {q0.shape[2]}] as q0 is, but for T", list(q1.shape))
    check_same_boundaries(
        op, "q0", q0, cu_seqlens_q0=cu_seqlens_q0, cu_seqlens_q1=cu_seqlens_q1, cu_seqlens_k=cu_seqlens_k
    )
    longest = integers(op, max_seqlen_q0=max_seqlen_q0, max_seqlen_q1=max_seqlen_q1, max_seqlen_k=max_seqlen_k)
    for name, length in zip(("max_seqlen_q0", "max_seqlen_q1", "max_seqlen_k"), longest, strict=True):
        if length < 0:
            refuse(op, name, "at least 0", length)
    sequences = cu_seqlens_k.shape[0] - 1
    for name, limit in (("max_kv_len_q0", max_kv_len_q0), ("max_kv_len_q1", max_kv_len_q1)):
        check_limit(op, name, limit, sequences, cu_seqlens_q0)
    check_softmax_scale(op, softmax_scale)
    causal = check_bool(op, "causal", causal)

    rows = [q0.shape[0], q1.shape[0]]
    # Keys past the tensor do not count for the alignment.
    keys = cu_seqlens_k.clamp(max=k.shape[0])
    segments = dual_group(cu_seqlens_q0, cu_seqlens_q1, keys, max_kv_len_q0, max_kv_len_q1, rows[0])
    out, lse = segment_attention(torch.cat([q0, q1]), k, v, *segments, softmax_scale, causal, return_lse=True)
    out0, out1 = out.split(rows)
    lse0, lse1 = (
        _by_sequence(part, rising(own), _power_of_two(length))
        for part, own, length in zip(lse.split(rows, 1), (cu_seqlens_q0, cu_seqlens_q1), longest[:2], strict=True)
    )
    return out0, out1, lse0, lse1


def _power_of_two(least: int) -> int:
    """Return the least power of two that is not below. A loop, because a symbol of a trace has no bits to count."""
    power = 1
    while power < least:
        power *= 2
    return power


def _sequence_of_rows(boundaries: Tensor, rows: int) -> Tensor:
    """Return the sequence of each row, int64 [T]; -1 before the first boundary and S past the last."""
    numbers = torch.arange(rows, dtype=boundaries.dtype, device=boundaries.device)
    return torch.bucketize(numbers, boundaries, right=True) - 1


def _by_sequence(lse: Tensor, boundaries: Tensor, width: int) -> Tensor:
    """Return lse [H, T] as [S * H, width], padded with -inf.

    Each column is written to its place, because the gradient is then a gather and needs no atomics.
    """
    heads, rows = lse.shape
    sequences = boundaries.shape[0] - 1
    sequence = _sequence_of_rows(boundaries, rows)
    column = torch.arange(rows, device=lse.device) - boundaries[sequence.clamp(min=0)]
    is_outside = (sequence < 0) | (sequence >= sequences) | (column >= width)
    # One more column takes what has no place.
    places = (sequence * width + column).masked_fill(is_outside, sequences * width)
    padded = lse.new_full((heads, sequences * width + 1), -torch.inf).index_copy(1, places, lse)
    return padded[:, :-1].unflatten(1, (sequences, width)).transpose(0, 1).flatten(0, 1)


@explained_as("segment_attention")
def replace_execute_grouped_attention_with_fused_varlen(
    chunk_q_list: Sequence[Tensor],
    chunk_cu_seqlens_q_list: Sequence[Tensor],
    chunk_indices_list: Sequence[Tensor],
    kv_buffer: Tensor,
    kv_slices: KvSlices,
    nheads: int,
    head_dim: int,
    softmax_scale: float | None,
    dropout_p: float,
    causal: bool,
    window_size: tuple[int, int],
    alibi_slopes: Tensor | None,
    deterministic: bool,
    world_size: int,
    cu_seqlens_k: Tensor,
    chunk_idx_0: int,
    chunk_idx_1: int,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Compute ring-flash-attention's `execute_grouped_attention` in one launch that reads kv_buffer in place.

    A group of queries sees each sequence up to the end of a chunk. The chunk of the first group is chunk_idx_0, that of
    the second chunk_idx_1. Further groups see the keys that their kv_slices hold. An empty group with the boundaries
    [0] does not count, because the rank has no chunk of it.

    Args:
        chunk_q_list: a tensor [T_g, nheads, head_dim] for each group; fp16, bf16 or fp32.
        chunk_cu_seqlens_q_list: int32 [S + 1] for each group, boundaries of the S sequences in it.
        chunk_indices_list: int64 [T_g] for each group, where its rows lie among all T local rows.
        kv_buffer: [2, rows, Hk, head_dim], gathered keys and values in rank-major zigzag order; nheads is a multiple of
            Hk. It is read in place. It may hold some of the model's heads, as with heads_k_stride.
        kv_slices: (ranges, boundaries) for each group. ranges has (start, end), integers, for each sequence with keys:
            the keys that the group sees, counted over all sequences in order. boundaries is int32 [S + 1], those of
            the ranges.
        nheads, head_dim: number of query heads in this call, and their dimension.
        softmax_scale: number that multiplies q k^T. None is 1 / sqrt(head_dim).
        dropout_p: probability that a weight counts as 0. PyTorch's generator draws the seed.
        causal: whether a query sees only keys up to its own position. With False a group sees whole sequences, unless
            its range of a sequence is empty.
        window_size: number of keys that a query sees before and after its position; -1 is all. causal makes the second
            0.
        alibi_slopes: fp32 [nheads] or [S, nheads], or None. They get no gradient.
        deterministic: accepted for later kernels; results always have the same bits.
        world_size: number of ranks W.
        cu_seqlens_k: int32 [S + 1], boundaries of a rank's own rows, or of the rows of all ranks, as in the backward of
            ring-flash-attention. The total decides, on the device.
        chunk_idx_0, chunk_idx_1: chunks of the first two groups, from 0 to 2 W - 1.

    Returns:
        out [T, nheads, head_dim] and lse [nheads, T] in the order of the local rows, and chunk_info. lse is fp32 in
        natural logarithms. Both are differentiable. chunk_info is a dict of chunk_cu_seqlens_q_list,
        chunk_indices_list and kv_slices, as given.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came. Ranges that disagree with
            the chunks or with the rows of kv_buffer are refused. Tensors that disagree with the ranges are refused on
            the CPU, and on a GPU within `torch_ops.settings(checked=True)`.

    No value is copied to the host.
    """
    op = "replace_execute_grouped_attention_with_fused_varlen"
    nheads, head_dim, world_size = integers(op, nheads=nheads, head_dim=head_dim, world_size=world_size)
    check_buffer(op, kv_buffer, nheads, head_dim)
    lists: dict[str, Sequence[Any]] = {
        "chunk_q_list": chunk_q_list, "chunk_cu_seqlens_q_list": chunk_cu_seqlens_q_list,
        "chunk_indices_list": chunk_indices_list, "kv_slices": kv_slices,
    }  # fmt: skip
    groups = groups_of(
        op, lists, kv_buffer, nheads, cu_seqlens_k, world_size, chunk_idx_0=chunk_idx_0, chunk_idx_1=chunk_idx_1
    )
    rows = kv_buffer.shape[1]
    if is_known(cu_seqlens_k, may_wait=settings.checked):
        check_values(op, groups, cu_seqlens_k, world_size, rows)
    check_softmax_scale(op, softmax_scale)
    causal, dropout_p = check_bool(op, "causal", causal), check_number(op, "dropout_p", dropout_p)
    bounds = bounds_of(op, window_size)

    # cu_seqlens_k counts the rows of all ranks if its total equals the buffer's rows. Otherwise it counts one rank's.
    factor = 1 + (world_size - 1) * (cu_seqlens_k[-1:] != rows)
    lengths = rising(cu_seqlens_k).diff().to(torch.int64) * factor
    key_bounds, key_rows = zigzag_pieces(lengths, world_size)
    whole = key_bounds[:, -1]
    ends = [
        torch.minimum(rising(group.key_boundaries).diff(), whole) if group.chunk is None
        else key_bounds[:, group.chunk + 1]
        for group in groups
    ]  # fmt: skip
    attend = partial(
        segment_attention, deterministic=deterministic, return_lse=True, alibi_slopes=alibi_slopes, dropout_p=dropout_p
    )
    k, v = kv_buffer.unbind(0)
    segments = of_groups(
        [group.boundaries for group in groups], ends, [group.q.shape[0] for group in groups][:-1], key_bounds, key_rows
    )
    query_start = None
    if not causal:
        segments, query_start = whole_sequences(segments, sum(group.q.shape[0] for group in groups))
    out, lse = attend(
        torch.cat([group.q for group in groups]), k, v, *segments, softmax_scale, causal, *bounds,
        query_start=query_start,
    )  # fmt: skip
    order = torch.cat([group.indices for group in groups])
    out = out.new_zeros(out.shape).index_copy(0, order, out)
    lse = lse.new_full(lse.shape, -torch.inf).index_copy(1, order, lse)
    return out, lse, {name: each for name, each in lists.items() if name != "chunk_q_list"}


__all__ = ["fused_zigzag_llama3_flash_attn_varlen_forward", "replace_execute_grouped_attention_with_fused_varlen"]
