"""Checks and outputs of `vk::segment_attention`, whose segments name the sequence of their keys."""

from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.tiles.pieces import MOST_KEYS
from torch_ops._attention.checks import check_options, check_packed_rows, check_score_tensors, check_upstream
from torch_ops._attention.options import AttentionOptions
from torch_ops._core.checks import (
    check_cu_seqlens,
    check_cu_seqlens_values,
    check_dense,
    check_device,
    dtype_name,
    refuse,
)
from torch_ops._core.launch import contiguous_like
from torch_ops._core.torch_private import FakeTensor

MOST_POSITIONS = MOST_KEYS.value


def check_segments(op: str, call: Any) -> None:
    q = call.q
    check_packed_rows(op, q, call.k, call.v)
    if call.v.shape[0] != call.k.shape[0]:
        refuse(op, "v", f"of {call.k.shape[0]} rows as k is", call.v.shape[0])
    check_cu_seqlens(op, "cu_seqlens_q", call.cu_seqlens_q, "q", q)
    segments = call.cu_seqlens_q.shape[0] - 1
    for name in ("key_sequence", "key_limit"):
        _check_index(op, name, getattr(call, name), q, f"of shape [n] = [{segments}]", (segments,))
    bounds = call.key_bounds
    _check_index(op, "key_bounds", bounds, q)
    if bounds.dim() != 2 or bounds.shape[1] < 2:
        refuse(op, "key_bounds", "of shape [S, P + 1] with one piece or more", list(bounds.shape))
    sequences, pieces = bounds.shape[0], bounds.shape[1] - 1
    wanted = f"of shape [S, P] = [{sequences}, {pieces}]"
    _check_index(op, "key_rows", call.key_rows, q, wanted, (sequences, pieces))
    if call.query_start is not None:
        _check_index(op, "query_start", call.query_start, q, f"of shape [n] = [{segments}]", (segments,))
    check_options(op, call)
    check_score_tensors(op, call, sequences)


def _check_index(
    op: str, argument: str, tensor: Tensor, q: Tensor, wanted: str = "", shape: tuple[int, ...] | None = None
) -> None:
    check_dense(op, argument, tensor)
    if tensor.dtype != torch.int32:
        refuse(op, argument, "int32", dtype_name(tensor.dtype))
    if shape is not None and tensor.shape != shape:
        refuse(op, argument, wanted, list(tensor.shape))
    check_device(op, argument, tensor, "q", q)


def check_segments_backward(op: str, call: Any) -> None:
    check_segments(op, call)
    check_upstream(op, call)


def check_segment_values(op: str, call: Any) -> None:
    """Check values that only the device knows; this costs a synchronisation."""
    check_cu_seqlens_values(op, "cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0])
    bounds, rows, total = call.key_bounds.tolist(), call.key_rows.tolist(), call.k.shape[0]
    for s, (own, first_rows) in enumerate(zip(bounds, rows, strict=True)):
        if own[0] != 0:
            refuse(op, f"key_bounds[{s}, 0]", "0", own[0])
        if own[-1] > MOST_POSITIONS:
            refuse(op, f"key_bounds[{s}, {len(own) - 1}]", f"at most {MOST_POSITIONS}", own[-1])
        for p, row in enumerate(first_rows):
            length = own[p + 1] - own[p]
            if length < 0:
                wanted = f"at least key_bounds[{s}, {p}] = {own[p]}"
                refuse(op, f"key_bounds[{s}, {p + 1}]", wanted, own[p + 1])
            if length > total:
                wanted = f"at most {own[p] + total}, since k has {total} rows"
                refuse(op, f"key_bounds[{s}, {p + 1}]", wanted, own[p + 1])
            if length > 0 and not 0 <= row <= total - length:
                wanted = f"from 0 to {total - length}, since the piece has {length} of the {total} rows of k"
                refuse(op, f"key_rows[{s}, {p}]", wanted, row)
    starts = [] if call.query_start is None else call.query_start.tolist()
    for index, start in enumerate(starts):
        if abs(start) > MOST_POSITIONS:
            refuse(op, f"query_start[{index}]", f"at most {MOST_POSITIONS} from 0", start)
    for index, (sequence, limit) in enumerate(zip(call.key_sequence.tolist(), call.key_limit.tolist(), strict=True)):
        if not 0 <= sequence < len(bounds):
            refuse(op, f"key_sequence[{index}]", f"from 0 to {len(bounds) - 1}", sequence)
        if not 0 <= limit <= bounds[sequence][-1]:
            wanted = f"from 0 to the {bounds[sequence][-1]} keys of sequence {sequence}"
            refuse(op, f"key_limit[{index}]", wanted, limit)


def segment_gradients(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate dq, dk and dv, contiguous; dk and dv in fp32 if the call asks for it."""
    dtype = torch.promote_types(call.k.dtype, torch.float32) if call.float32_kv else call.k.dtype
    dk, dv = (torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (call.k, call.v))
    return contiguous_like(call.q), dk, dv


def segment_flops(call: Any) -> int:
    """4 D per head and seen pair. Where index tensors are fake, every query counts every row of k."""
    q, cu_q = call.q, call.cu_seqlens_q
    options = AttentionOptions.of(call)
    per_pair = 4 * q.shape[1] * q.shape[-1]
    if isinstance(cu_q, FakeTensor) or cu_q.is_meta:
        return per_pair * q.shape[0] * call.k.shape[0]
    bounds = cu_q.clamp(0, q.shape[0]).cummax(0).values.tolist()
    lengths = [max(row[-1], 0) for row in call.key_bounds.tolist()]
    starts = None if call.query_start is None else call.query_start.tolist()
    pairs = 0
    for index, (sequence, limit) in enumerate(zip(call.key_sequence.tolist(), call.key_limit.tolist(), strict=True)):
        if 0 <= sequence < len(lengths):
            keys = min(max(limit, 0), lengths[sequence])
            start = None if starts is None else starts[index]
            pairs += options.count_dense_pairs(bounds[index + 1] - bounds[index], keys, start)
    return per_pair * pairs


def segment_backward_flops(call: Any) -> int:
    """Five products, where the forward has two."""
    return segment_flops(call) * 5 // 2
