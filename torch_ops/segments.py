"""The index tensors of `torch_ops.segment_attention`, made once for a batch and used by all layers.

- `zigzag`: context parallel. Each rank has an early and a late chunk of every sequence, so that all ranks have about as
  much causal work. k and v are the rank-major buffer that an all-gather leaves.
- `zigzag_indices`: which tokens of the batch a rank has.
- `whole_sequences`: segments that see whole sequences, for attention without causal order.
- `dual_group`: two groups of queries for each sequence, over packed k and v.

    tokens = batch[zigzag_indices(lengths, rank, world_size)]
    segments = zigzag(lengths, rank, world_size)
    out = segment_attention(q, gathered_k, gathered_v, *segments)
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_ops._core.checks import check_cu_seqlens, check_dense, check_device, check_int, dtype_name, refuse
from torch_ops._core.device import host_tensor
from torch_ops._core.registry import Mode, current_mode, sent
from torch_ops._core.torch_private import assumed_constant

MOST_ROWS = 2**31 - 1


class Segments(NamedTuple):
    """The five index tensors, int32, in the order in which `segment_attention` takes them after q, k and v.

    n is the number of query segments, S the number of sequences and P the number of pieces of a sequence.
    """

    cu_seqlens_q: Tensor  # [n + 1], boundaries of the query segments
    key_sequence: Tensor  # [n], the sequence whose keys a segment sees
    key_limit: Tensor  # [n], how many of its keys
    key_bounds: Tensor  # [S, P + 1], the keys at which pieces of a sequence begin and end
    key_rows: Tensor  # [S, P], the row of k and v at which a piece begins


def zigzag(
    lengths: Sequence[int] | Tensor,
    rank: int,
    world_size: int,
    rows_per_rank: int | None = None,
    device: torch.device | str | None = None,
) -> Segments:
    """Make the index tensors of rank r of W, which has chunks r and 2 W - 1 - r of each sequence.

    Chunk i of a sequence of L tokens is tokens L i // (2 W) to L (i + 1) // (2 W). No length need be a multiple of 2 W,
    and chunks may be empty. A rank's rows are the early and the late chunk of each sequence in turn. Each chunk is a
    segment of queries that sees the keys up to the chunk's end. k and v hold the rows of rank 0, then those of rank 1,
    as `all_gather_into_tensor` leaves them.

    Args:
        lengths: number of tokens of each sequence, all ranks together: S integers, or an integer tensor [S] on any
            device. Values on a GPU are not copied to the host and not checked; negative ones count as 0.
        rank: index of this rank, from 0 to world_size - 1.
        world_size: number of ranks W.
        rows_per_rank: number of rows of each rank in a padded gather: rank w's rows begin at w * rows_per_rank.
            Default: a rank's rows begin after those of the ranks before it.
        device: device of the results. Default: that of `lengths`, or PyTorch's default device for integers.

    Returns:
        Segments with n = 2 S and P = 2 W.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came. The sum of lengths must
            fit into int32, which is not checked for lengths on a GPU.

    The segments are for causal attention; `whole_sequences` makes those for attention without causal order. The layout
    is that of ring-flash-attention's zigzag functions.
    """
    op = "zigzag"
    rank, world_size = _check_ranks(op, rank, world_size)
    sizes = _check_lengths(op, lengths)
    device = _device_of(lengths, device)
    bounds = _chunk_bounds(sizes, world_size)
    rows = _rows_of_ranks(bounds)
    if rows_per_rank is not None:
        rows_per_rank = _check_rows_per_rank(op, rows_per_rank, world_size, rows)
    local = rows[rank].flatten()
    tensors = (
        torch.cat([local.new_zeros(1), local.cumsum(0)]),
        torch.arange(2 * sizes.shape[0], device=sizes.device) // 2,
        torch.stack([bounds[:, rank + 1], bounds[:, 2 * world_size - rank]], 1).flatten(),
        bounds,
        _first_rows(rows, rows_per_rank),
    )
    return Segments._make([sent(tensor.to(torch.int32).contiguous(), device) for tensor in tensors])


def zigzag_indices(
    lengths: Sequence[int] | Tensor, rank: int, world_size: int, device: torch.device | str | None = None
) -> Tensor:
    """Return which tokens of a packed batch a rank has under `zigzag`, int64, in the order of its local rows.

    The batch is [sum(lengths), ...], one sequence after the other. All ranks together have each token once. The inverse
    of the concatenated indices puts gathered rows back into the order of the batch.

    Args:
        lengths, rank, world_size, device: as in `zigzag`. Lengths on a GPU cost a synchronisation, because the host
            needs the number of rows.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
    """
    op = "zigzag_indices"
    rank, world_size = _check_ranks(op, rank, world_size)
    sizes = _check_lengths(op, lengths)
    bounds = _chunk_bounds(sizes, world_size)
    firsts = (sizes.cumsum(0) - sizes)[:, None] + bounds[:, [rank, 2 * world_size - 1 - rank]]  # [S, 2]
    local = _rows_of_ranks(bounds)[rank].flatten()
    # Tokens of a chunk lie this far behind their local rows.
    ahead = (firsts.flatten() - (local.cumsum(0) - local)).repeat_interleave(local)
    return (ahead + torch.arange(ahead.shape[0], device=ahead.device)).to(_device_of(lengths, device))


def dual_group(
    cu_seqlens_q0: Tensor,
    cu_seqlens_q1: Tensor,
    cu_seqlens_k: Tensor,
    limit_q0: int | Tensor,
    limit_q1: int | Tensor,
    rows_q0: int | None = None,
) -> Segments:
    """Make the index tensors for two groups of queries, where both groups of a sequence see its keys up to a limit.

    q is `torch.cat([q0, q1])`: all segments of the first group, then all of the second. k and v are packed.

    Args:
        cu_seqlens_q0, cu_seqlens_q1: int32 [S + 1], boundaries of the sequences in q0 and in q1.
        cu_seqlens_k: int32 [S + 1], boundaries of the sequences in k and v.
        limit_q0, limit_q1: number of keys that a group sees, one integer or int32 [S]; clamped to each sequence's
            length.
        rows_q0: number of rows of q0. Rows between the last boundary in q0 and the first in q1 become one more
            segment, which sees nothing but a sink. Default: q0 ends at its last boundary, and cu_seqlens_q1 begins
            with 0.

    Returns:
        Segments with n = 2 S, or 2 S + 1 with rows_q0, and P = 1. Nothing is copied to the host.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
    """
    op = "dual_group"
    check_cu_seqlens(op, "cu_seqlens_q0", cu_seqlens_q0, "cu_seqlens_q0", cu_seqlens_q0)
    for name, boundaries in (("cu_seqlens_q1", cu_seqlens_q1), ("cu_seqlens_k", cu_seqlens_k)):
        check_cu_seqlens(op, name, boundaries, "cu_seqlens_q0", cu_seqlens_q0)
        if boundaries.shape != cu_seqlens_q0.shape:
            refuse(op, name, f"of shape {list(cu_seqlens_q0.shape)} as cu_seqlens_q0 is", list(boundaries.shape))
    given = (("limit_q0", limit_q0), ("limit_q1", limit_q1))
    for name, limit in given:
        check_limit(op, name, limit, cu_seqlens_k.shape[0] - 1, cu_seqlens_q0)
    keys = rising(cu_seqlens_k)
    lengths = keys.diff()
    bounds, first_rows = torch.stack([torch.zeros_like(lengths), lengths], 1), keys[:-1, None].contiguous()
    limits = [_clamped(limit, lengths) for _, limit in given]
    if rows_q0 is not None:
        rows_q0 = check_int(op, "rows_q0", rows_q0)
        if not 0 <= rows_q0 <= MOST_ROWS:
            refuse(op, "rows_q0", f"from 0 to {MOST_ROWS}", rows_q0)
        return of_groups([cu_seqlens_q0, cu_seqlens_q1], limits, [rows_q0], bounds, first_rows)
    first, second = rising(cu_seqlens_q0), rising(cu_seqlens_q1)
    numbers = torch.arange(lengths.shape[0], dtype=torch.int32, device=lengths.device)
    boundaries = torch.cat([first, first[-1:] + second[1:]])
    return Segments(boundaries, torch.cat([numbers, numbers]), torch.cat(limits), bounds, first_rows)


def whole_sequences(segments: Segments, rows: int | None = None) -> tuple[Segments, Tensor]:
    """Return (segments, query_start) for attention without causal order: each segment sees its whole sequence.

    Rows keep their key positions, which windows, ALiBi and dropout count by:

        segments, query_start = whole_sequences(zigzag(lengths, rank, world_size))
        out = segment_attention(q, k, v, *segments, causal=False, window_left=9, query_start=query_start)

    Args:
        segments: those of `zigzag` or `dual_group`. A segment that sees nothing still sees nothing.
        rows: number of rows of q. The op clamps boundaries to it, so positions follow from clamped boundaries. Default:
            no boundary lies past q.

    Returns:
        The segments with other key limits, and the key position of each segment's first row, int32 [n]. Nothing is
        copied to the host.
    """
    # A segment whose sequence does not exist reads the 0 behind all lengths.
    lengths = torch.cat([segments.key_bounds[:, -1], segments.key_bounds.new_zeros(1)])
    sequences = segments.key_sequence.long()
    missing = (sequences < 0) | (sequences >= segments.key_bounds.shape[0])
    lengths = lengths[sequences.masked_fill(missing, segments.key_bounds.shape[0])]
    boundaries = rising(segments.cu_seqlens_q).clamp(max=MOST_ROWS if rows is None else rows)
    start = torch.minimum(segments.key_limit, lengths) - boundaries.diff()
    return segments._replace(key_limit=torch.where(segments.key_limit > 0, lengths, 0)), start


def of_groups(
    boundaries: Sequence[Tensor], limits: Sequence[Tensor], rows: Sequence[int], key_bounds: Tensor, key_rows: Tensor
) -> Segments:
    """Return the segments of groups of queries that lie one behind the other.

    Each group has a segment for every sequence: boundaries [S + 1], counted within the group, and key limits [S].
    `rows` has the number of rows of each group but the last. A segment that sees nothing lies between two groups.
    """
    numbers = torch.arange(key_bounds.shape[0], dtype=torch.int32, device=key_bounds.device)
    if key_bounds.shape[0] == 0:
        # A segment between groups would have no sequence that it could name.
        return Segments(boundaries[0], numbers, numbers, key_bounds, key_rows)
    within = [rising(own).clamp(max=most) for own, most in zip(boundaries, rows, strict=False)]
    within.append(rising(boundaries[-1]))
    firsts = (0, *itertools.accumulate(rows))
    placed = [own + first if first else own for own, first in zip(within, firsts, strict=True)]
    nothing = numbers[:1]
    return Segments(
        torch.cat(placed),
        torch.cat([numbers, *[nothing, numbers] * len(rows)]),
        torch.cat([limits[0], *(part for limit in limits[1:] for part in (nothing, limit))]),
        key_bounds, key_rows,
    )  # fmt: skip


def check_limit(op: str, argument: str, limit: int | Tensor, sequences: int, like: Tensor) -> None:
    """Refuse key limits that are neither an integer nor int32 [S] on the device of the boundaries `like`."""
    if not isinstance(limit, Tensor):
        if check_int(op, argument, limit) < 0:
            refuse(op, argument, "at least 0", limit)
        return
    check_dense(op, argument, limit)
    if limit.dtype != torch.int32:
        refuse(op, argument, "int32, or an integer", dtype_name(limit.dtype))
    if limit.dim() != 1 or limit.shape[0] != sequences:
        refuse(op, argument, f"of shape [{sequences}], a limit for each sequence", list(limit.shape))
    check_device(op, argument, limit, "cu_seqlens_q0", like)


def _clamped(limit: int | Tensor, lengths: Tensor) -> Tensor:
    """Key limits, int32 [S], within the lengths of the sequences."""
    if isinstance(limit, Tensor):
        return torch.minimum(limit.clamp(min=0), lengths)
    return lengths.clamp(max=min(int(limit), MOST_ROWS))


def rising(boundaries: Tensor) -> Tensor:
    """Boundaries as ops take them: one that falls counts as the largest before it, and none is negative."""
    return boundaries.clamp(min=0).cummax(0).values


def zigzag_pieces(sizes: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Return key_bounds and key_rows of the gathered buffer of `zigzag`, for lengths int64 [S]."""
    bounds = _chunk_bounds(sizes, world_size)
    return bounds.to(torch.int32), _first_rows(_rows_of_ranks(bounds)).to(torch.int32)


def _check_ranks(op: str, rank: int, world_size: int) -> tuple[int, int]:
    rank, world_size = check_int(op, "rank", rank), check_int(op, "world_size", world_size)
    if world_size < 1:
        refuse(op, "world_size", "at least 1", world_size)
    if not 0 <= rank < world_size:
        refuse(op, "rank", f"from 0 to {world_size - 1}, as world_size is {world_size}", rank)
    return rank, world_size


def is_known(tensor: Tensor, may_wait: bool = False) -> bool:
    """Whether the host can read values, without waiting unless it may wait."""
    if torch.compiler.is_compiling():
        return False
    return (may_wait or tensor.device.type == "cpu") and current_mode() is Mode.EAGER


def _check_lengths(op: str, lengths: Sequence[int] | Tensor) -> Tensor:
    """Return lengths in int64, on the CPU where they are integers."""
    if isinstance(lengths, Tensor):
        check_dense(op, "lengths", lengths)
        if lengths.dtype not in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
            refuse(op, "lengths", "integers", dtype_name(lengths.dtype))
        if lengths.dim() != 1:
            refuse(op, "lengths", "of shape [S]", list(lengths.shape))
        if not is_known(lengths):
            return lengths.to(torch.int64).clamp(min=0)
        values = lengths.tolist()
    else:
        try:
            values = [check_int(op, f"lengths[{index}]", length) for index, length in enumerate(lengths)]
        except TypeError:
            refuse(op, "lengths", "integers or a tensor of them", repr(lengths))
    for index, length in enumerate(values):
        if length < 0:
            refuse(op, f"lengths[{index}]", "at least 0", length)
    if sum(values) > MOST_ROWS:
        refuse(op, "the sum of lengths", f"at most {MOST_ROWS}, which int32 holds", sum(values))
    return host_tensor(values, torch.int64)


def _device_of(lengths: Sequence[int] | Tensor, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return lengths.device if isinstance(lengths, Tensor) else _default_device()


# Dynamo does not trace the question.
@assumed_constant
def _default_device() -> torch.device:
    return torch.get_default_device()


def _chunk_bounds(sizes: Tensor, world_size: int) -> Tensor:
    """[S, 2 W + 1], the first token of each chunk, and the length."""
    chunks = torch.arange(2 * world_size + 1, device=sizes.device)
    return sizes[:, None] * chunks // (2 * world_size)


def _rows_of_ranks(bounds: Tensor) -> Tensor:
    """[W, S, 2], how many rows the early and the late chunk of each sequence give each rank."""
    early, late = bounds.diff().chunk(2, 1)
    return torch.stack([early, late.flip(1)], 2).transpose(0, 1)


def _check_rows_per_rank(op: str, rows_per_rank: int, world_size: int, rows: Tensor) -> int:
    rows_per_rank = check_int(op, "rows_per_rank", rows_per_rank)
    most = max(rows.sum((1, 2)).tolist()) if is_known(rows) else 0
    if rows_per_rank < most:
        refuse(op, "rows_per_rank", f"at least {most}, the rows of the rank with the most", rows_per_rank)
    if world_size * rows_per_rank > MOST_ROWS:
        wanted = f"at most {MOST_ROWS // world_size}, so that int32 counts the rows of {world_size} ranks"
        refuse(op, "rows_per_rank", wanted, rows_per_rank)
    return rows_per_rank


def _first_rows(rows: Tensor, rows_per_rank: int | None = None) -> Tensor:
    """[S, 2 W], the row of the gathered buffer at which each chunk begins."""
    if rows_per_rank is None:
        firsts = rows.flatten().cumsum(0).reshape(rows.shape) - rows
    else:
        of_rank = torch.arange(rows.shape[0], device=rows.device) * rows_per_rank
        firsts = rows.flatten(1).cumsum(1).reshape(rows.shape) - rows + of_rank[:, None, None]
    return torch.cat([firsts[:, :, 0].t(), firsts[:, :, 1].t().flip(1)], 1)


__all__ = ["Segments", "dual_group", "whole_sequences", "zigzag", "zigzag_indices"]
