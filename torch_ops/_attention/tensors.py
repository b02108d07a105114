"""The tensors of a launch of the attention core, as one value. Without `cu_q` they are dense, [B, H, S, D]."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_ops._core.launch import with_columns


class Forward(NamedTuple):
    """out is filled, and lse unless it has no rows. Without `cu_k` keys have the boundaries of queries."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None
    out: Tensor
    lse: Tensor
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None


class Backward(NamedTuple):
    """dq, dk and dv are filled."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    slopes: Tensor | None = None
    seed: Tensor | None = None


class SegmentForward(NamedTuple):
    """Segments of queries that name the sequence of their keys (`vk::segment_attention`). out and lse are filled."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor
    key_sequence: Tensor
    key_limit: Tensor
    key_bounds: Tensor
    key_rows: Tensor
    out: Tensor
    lse: Tensor
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None
    query_start: Tensor | None = None


class SegmentBackward(NamedTuple):
    """dq, dk and dv are filled."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_q: Tensor
    key_sequence: Tensor
    key_limit: Tensor
    key_bounds: Tensor
    key_rows: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    slopes: Tensor | None = None
    seed: Tensor | None = None
    query_start: Tensor | None = None


# Rows of columns and whole tensors that a kernel reads, by the names of fields. A forward only fills out and lse.
_FORWARD_ROWS, _BACKWARD_ROWS = ("q", "k", "v"), ("q", "k", "v", "out", "dout")
_INDICES = ("cu_q", "cu_k", "key_sequence", "key_limit", "key_bounds", "key_rows", "query_start")


def _read_rows(t: Any) -> tuple[str, ...]:
    return _BACKWARD_ROWS if hasattr(t, "dout") else _FORWARD_ROWS


def _read_whole(t: Any) -> list[str]:
    names = _INDICES + (("lse", "dlse") if hasattr(t, "dout") else ())
    return [name for name in names if getattr(t, name, None) is not None]


def is_readable(t: Any) -> bool:
    """Return whether kernels can read all tensors as they are; by metadata alone."""
    rows, whole = _read_rows(t), _read_whole(t)
    return all(getattr(t, name).stride(-1) == 1 for name in rows) and all(getattr(t, x).is_contiguous() for x in whole)


def made_readable(t: Any) -> Any:
    """Copy rows whose columns are not contiguous, and whole tensors that are not. Outputs stay as they are."""
    rows = {name: with_columns(getattr(t, name)) for name in _read_rows(t)}
    return t._replace(**rows, **{name: getattr(t, name).contiguous() for name in _read_whole(t)})


def num_segments(t: Forward | Backward | SegmentForward | SegmentBackward) -> int:
    return 1 if t.cu_q is None else t.cu_q.shape[0] - 1


def mean_length(rows: int, segments: int) -> int | None:
    """Return rows per segment where both are plain numbers; None in graphs of dynamic shape, which may not branch."""
    if isinstance(rows, torch.SymInt) or isinstance(segments, torch.SymInt):
        return None
    return rows // max(segments, 1)


def query_length(t: Forward | Backward) -> int | None:
    """Return the mean length of queries, None where it is a symbol."""
    return mean_length(t.q.shape[2], 1) if t.cu_q is None else mean_length(t.q.shape[0], num_segments(t))


def key_length(t: Forward | Backward) -> int | None:
    return mean_length(t.k.shape[2], 1) if t.cu_q is None else mean_length(t.k.shape[0], num_segments(t))
