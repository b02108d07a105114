"""Checks of ring-flash-attention's arguments, against each other and against the gathered keys."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torch_ops._core.checks import (
    check_cu_seqlens,
    check_dense,
    check_device,
    check_int,
    check_like,
    dtype_name,
    refuse,
)
from torch_ops.compat._flash_attn_checks import check_layout


class Group(NamedTuple):
    """Queries that see each sequence up to the end of a chunk.

    number: the group's place in the lists
    ranges, key_boundaries: from kv_slices
    chunk: None where the ranges alone say what the group sees
    """

    number: int
    q: Tensor
    boundaries: Tensor
    indices: Tensor
    ranges: list[tuple[int, int]]
    key_boundaries: Tensor
    chunk: int | None = None


def check_same_boundaries(op: str, like_name: str, like: Tensor, **boundaries: Tensor) -> None:
    """Refuse boundaries of different numbers of sequences, or on another device than `like`."""
    first = next(iter(boundaries))
    for name, tensor in boundaries.items():
        check_cu_seqlens(op, name, tensor, like_name, like)
        if tensor.shape != boundaries[first].shape:
            refuse(op, name, f"of shape {list(boundaries[first].shape)} as {first} is", list(tensor.shape))


def check_buffer(op: str, kv_buffer: Tensor, nheads: int, head_dim: int) -> None:
    check_dense(op, "kv_buffer", kv_buffer)
    if kv_buffer.dim() != 4 or kv_buffer.shape[0] != 2:
        refuse(op, "kv_buffer", "of shape [2, T, H, D]", list(kv_buffer.shape))
    if head_dim != kv_buffer.shape[3]:
        refuse(op, "head_dim", f"{kv_buffer.shape[3]} as that of kv_buffer is", head_dim)
    if nheads < 1 or kv_buffer.shape[2] < 1 or nheads % kv_buffer.shape[2]:
        refuse(op, "nheads", f"a multiple of the {kv_buffer.shape[2]} heads of kv_buffer", nheads)


def groups_of(
    op: str,
    lists: dict[str, Sequence[Any]],
    kv_buffer: Tensor,
    nheads: int,
    cu_seqlens_k: Tensor,
    world_size: int,
    **chunks: int,
) -> list[Group]:
    """Check all groups by what the host knows, and return those that count. The first ones get the chunks."""
    check_cu_seqlens(op, "cu_seqlens_k", cu_seqlens_k, "kv_buffer", kv_buffer)
    if world_size < 1:
        refuse(op, "world_size", "at least 1", world_size)
    left = [check_int(op, name, chunk) for name, chunk in chunks.items()]
    for name, own in zip(chunks, left, strict=True):
        if not 0 <= own < 2 * world_size:
            refuse(op, name, f"from 0 to {2 * world_size - 1}, as world_size is {world_size}", own)
    names, count = list(lists), len(next(iter(lists.values())))
    for name, each in lists.items():
        if len(each) != count or not count:
            refuse(op, name, f"a list of {count or 'one or more'} groups", f"of length {len(each)}")
    sequences = cu_seqlens_k.shape[0] - 1
    groups: list[Group] = []
    for number, (q, boundaries, indices, slices) in enumerate(zip(*lists.values(), strict=True)):
        of_q, of_boundaries, of_indices, of_slices = (f"{name}[{number}]" for name in names)
        _check_queries(op, of_q, q, nheads, kv_buffer)
        _check_indices(op, of_indices, indices, q)
        ranges, key_boundaries = _slices(op, of_slices, slices)
        for name, tensor in ((of_boundaries, boundaries), (f"{of_slices}[1]", key_boundaries)):
            check_cu_seqlens(op, name, tensor, "kv_buffer", kv_buffer)
        if sequences and boundaries.shape[0] == 1 and q.shape[0] == 0 and not ranges:
            # The rank has no chunk of this group.
            continue
        for name, tensor in ((of_boundaries, boundaries), (f"{of_slices}[1]", key_boundaries)):
            if tensor.shape != cu_seqlens_k.shape:
                refuse(op, name, f"of shape {list(cu_seqlens_k.shape)} as cu_seqlens_k is", list(tensor.shape))
        chunk = left.pop(0) if left else None
        groups.append(Group(number, q, boundaries, indices, ranges, key_boundaries, chunk))
    if not groups:
        refuse(op, names[1], f"a list in which a group has the {sequences} sequences", f"a list of {count} without")
    for group in groups:
        _check_ranges(op, group, groups[0], world_size, sequences, kv_buffer.shape[1])
    return groups


def _check_queries(op: str, name: str, q: Tensor, nheads: int, kv_buffer: Tensor) -> None:
    check_layout(op, name, q, "[T, H, D]")
    check_like(op, name, q, "kv_buffer", kv_buffer)
    heads, head_dim = q.shape[1:]
    if heads != nheads or head_dim != kv_buffer.shape[3]:
        refuse(op, name, f"of shape [T, {nheads}, {kv_buffer.shape[3]}]", list(q.shape))


def _check_indices(op: str, name: str, indices: Tensor, q: Tensor) -> None:
    check_dense(op, name, indices)
    if indices.dtype != torch.int64:
        refuse(op, name, "int64", dtype_name(indices.dtype))
    if indices.dim() != 1 or indices.shape[0] != q.shape[0]:
        refuse(op, name, f"of shape [{q.shape[0]}], one for each row of the group", list(indices.shape))
    check_device(op, name, indices, "kv_buffer", q)


def _slices(op: str, name: str, slices: object) -> tuple[list[tuple[int, int]], Tensor]:
    if not isinstance(slices, tuple | list) or len(slices) != 2 or not isinstance(slices[0], tuple | list):
        refuse(op, name, "a pair (list of ranges, boundaries)", f"of type {type(slices).__name__}")
    ranges, boundaries = cast(tuple[Any, Any], slices)
    return [_range(op, f"{name}[0][{place}]", each) for place, each in enumerate(ranges)], boundaries


def _range(op: str, name: str, given: object) -> tuple[int, int]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        refuse(op, name, "a pair (start, end)", repr(given))
    start, end = cast(tuple[Any, Any], given)
    return check_int(op, name, start), check_int(op, name, end)


def starts_and_stops(ranges: Sequence[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """Return where the sequence of each range begins and ends. Sequences in order fill the rows."""
    return list(pairwise([*(start for start, _ in ranges), rows]))


def _check_ranges(op: str, group: Group, first: Group, world_size: int, sequences: int, rows: int) -> None:
    """Refuse ranges that do not end where the group's chunk does. A sequence without keys may have no range."""
    name, chunk = f"kv_slices[{group.number}][0]", group.chunk
    starts = [start for start, _ in group.ranges]
    if len(starts) > sequences or (not starts and rows):
        refuse(op, name, f"a range for each of the {sequences} sequences that has keys", f"{len(starts)} ranges")
    if starts != [start for start, _ in first.ranges]:
        refuse(op, name, f"ranges that start as those of kv_slices[{first.number}] do", group.ranges)
    if starts and (starts[0] != 0 or sorted(starts) != starts or starts[-1] > rows):
        refuse(op, name, f"ranges with starts that rise from 0 to at most the {rows} rows of kv_buffer", group.ranges)
    sequences_of = starts_and_stops(group.ranges, rows)
    for place, ((start, stop), given) in enumerate(zip(sequences_of, group.ranges, strict=True)):
        if chunk is not None:
            end = start + (stop - start) * (chunk + 1) // (2 * world_size)
            if given[1] != end:
                refuse(op, f"{name}[{place}]", f"{(start, end)}, the sequence up to the end of chunk {chunk}", given)
        elif not start <= given[1] <= stop:
            refuse(op, f"{name}[{place}]", f"within {(start, stop)}, the sequence", given)


def check_values(op: str, groups: list[Group], cu_seqlens_k: Tensor, world_size: int, rows: int) -> None:
    """Compare what tensors hold with the ranges; on a GPU this costs a synchronisation."""
    bounds = cu_seqlens_k.tolist()
    if rows not in (bounds[-1], bounds[-1] * world_size):
        wanted = f"{rows}, the rows of kv_buffer, or a rank's share of them"
        refuse(op, f"cu_seqlens_k[{len(bounds) - 1}]", wanted, bounds[-1])
    factor = 1 if bounds[-1] == rows else world_size
    lengths = [factor * (end - start) for start, end in pairwise(bounds)]
    for group in groups:
        name = f"kv_slices[{group.number}]"
        whole = [stop - start for start, stop in starts_and_stops(group.ranges, rows)]
        if _without_empty(whole) != _without_empty(lengths):
            refuse(op, f"{name}[0]", f"ranges of sequences of {lengths} keys, as cu_seqlens_k has", group.ranges)
        held = [end - start for start, end in group.ranges]
        boundaries = group.key_boundaries.tolist()
        if _without_empty(end - start for start, end in pairwise(boundaries)) != _without_empty(held):
            refuse(op, f"{name}[1]", f"boundaries of {held} keys, as the ranges have", boundaries)
    order = [row for group in groups for row in group.indices.tolist()]
    if sorted(order) != [*range(len(order))]:
        refuse(op, "chunk_indices_list", f"lists that hold each of the {len(order)} local rows once", order)


def _without_empty(lengths: Any) -> list[int]:
    return [length for length in lengths if length]
