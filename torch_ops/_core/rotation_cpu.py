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
    """Rows from the first boundary to the last, clamped."""
    begin, end = (min(max(int(cu[index]), 0), x.shape[0]) for index in (0, -1))
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
