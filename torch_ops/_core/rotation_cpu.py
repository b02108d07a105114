"""The rotary embedding on the CPU, in ATen: of the halves of whole heads, in fp32 or more."""

from typing import Any

import torch
from torch import Tensor


def rotated(back: bool, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] by the angles of its rows, or back by them, not rounded; tables are [T, D] or [T, D / 2]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[2] // 2
    (cos_a, cos_b), (sin_a, sin_b) = (
        (table[:, None, :half].to(dtype), table[:, None, -half:].to(dtype)) for table in (cos, sin)
    )
    a, b = x.to(dtype).split(half, 2)
    if back:
        return torch.cat([a * cos_a + b * sin_b, b * cos_b - a * sin_a], 2)
    return torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b], 2)


def _inside(x: Tensor, cu: Tensor) -> slice:
    """Rows from the first boundary to the largest, clamped."""
    begin, end = (min(max(int(bound), 0), x.shape[0]) for bound in (cu[0], cu.max()))
    return slice(begin, max(begin, end))


@torch.autocast("cpu", enabled=False)
def rotate_cpu(back: bool, tensors: Any) -> None:
    """Fill q_out and k_out of (q, k, cos, sin, cu_q, cu_k, q_out, k_out)."""
    q, k, cos, sin, cu_q, cu_k, q_out, k_out = tensors
    for x, out, cu in ((q, q_out, cu_q), (k, k_out, cu_q if cu_k is None else cu_k)):
        rows = _inside(x, cu)
        # Before out is written, which may be x itself.
        rotated_rows = rotated(back, x[rows], cos[rows], sin[rows])
        out.zero_()
        out[rows] = rotated_rows.to(out.dtype)


@torch.autocast("cpu", enabled=False)
def table_gradients_cpu(tensors: Any) -> None:
    """Fill dcos and dsin of (dq, dk, q, k, cu_q, cu_k, dcos, dsin); see `csrc_free_ops.rope_tables`."""
    dq, dk, q, k, cu_q, cu_k, dcos, dsin = tensors
    dtype = torch.promote_types(q.dtype, torch.float32)
    half = q.shape[2] // 2
    sums = torch.zeros((2, q.shape[0], 2 * half), dtype=dtype, device="cpu")
    for dx, x, cu in ((dq, q, cu_q), (dk, k, cu_q if cu_k is None else cu_k)):
        rows = slice(None) if cu is None else _inside(x, cu)
        dx, x = dx[rows].to(dtype), x[rows].to(dtype)
        a, b = x.split(half, 2)
        sums[0, rows] += (dx * x).sum(1)
        sums[1, rows] += (dx * torch.cat([-b, a], 2)).sum(1)
    for out, total in zip((dcos, dsin), sums, strict=True):
        out.copy_(total if out.shape[1] == 2 * half else total[:, :half] + total[:, half:])
