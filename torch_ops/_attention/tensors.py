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


# Rows that kernels read and vectors that they read, by the names of fields.
_ROWS = ("q", "k", "v", "out", "dout")
_VECTORS = ("lse", "dlse", "cu_q", "cu_k")


def is_readable(t: Forward | Backward) -> bool:
    """Return whether kernels can read all tensors as they are; by metadata alone."""
    rows: list[Tensor] = [t.q, t.k, t.v]
    vectors: list[Tensor | None] = [t.cu_q, t.cu_k]
    if isinstance(t, Backward):
        rows += [t.out, t.dout]
        vectors += [t.lse, t.dlse]
    return all(row.stride(-1) == 1 for row in rows) and all(x is None or x.is_contiguous() for x in vectors)


def made_readable(t: Any) -> Any:
    """Copy rows whose columns are not contiguous, and vectors that are not. Outputs stay as they are."""
    read = ("q", "k", "v") if isinstance(t, Forward) else _ROWS
    vectors = ("cu_q", "cu_k") if isinstance(t, Forward) else _VECTORS
    rows = {name: with_columns(getattr(t, name)) for name in read}
    copies = {name: None if (x := getattr(t, name)) is None else x.contiguous() for name in vectors}
    return t._replace(**rows, **copies)


def num_segments(t: Forward | Backward) -> int:
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
