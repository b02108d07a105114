"""`vk::pos_embed_interpolate`: a learned position table, resampled to every image of a batch, and its gradient.

Kernels and maths: `csrc_free_ops.pos_embed_interpolate`.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.pos_embed_interpolate import _pos_embed_bwd_kernel, _pos_embed_fwd_kernel
from torch_ops._core.checks import check_dense, check_float, integers, refuse
from torch_ops._core.launch import blocks_of, matrix_strides, with_columns
from torch_ops._core.plan import Bound, Plan, reference_plan
from torch_ops._core.planned_op import planned_op
from torch_ops._core.registry import runs_kernels, wrap_triton
from torch_ops._grids import (
    ONE_PATH,
    OnGrid,
    Places,
    check_grid,
    check_grid_values,
    check_rows,
    grid_config,
    locate_rows,
    register_gathered,
    send_grid,
    tiles_of,
)

# Sizes of an image times entries of a side are 32-bit in the kernels.
LARGEST_SIDE = 1000


def _check_entries(op: str, argument: str, entries: int) -> None:
    if not 1 <= entries <= LARGEST_SIDE**2 or math.isqrt(entries) ** 2 != entries:
        refuse(op, argument, f"a square, S x S with S from 1 to {LARGEST_SIDE}", entries)


class PosEmbedInterpolate(NamedTuple):
    """The arguments of `vk::pos_embed_interpolate`; the function below documents them."""

    table: Tensor
    grid: Tensor
    total: int
    merge_size: int = 2
    align_corners: bool = True


class PosEmbedInterpolateBackward(NamedTuple):
    """The arguments of `vk::pos_embed_interpolate_backward`; `entries` are the rows of the table."""

    dout: Tensor
    grid: Tensor
    entries: int
    merge_size: int = 2
    align_corners: bool = True


def _check(call: PosEmbedInterpolate) -> None:
    op, table = "pos_embed_interpolate", call.table
    check_dense(op, "table", table)
    check_float(op, "table", table)
    if table.dim() != 2 or table.shape[1] < 1:
        refuse(op, "table", "of shape [S * S, C] with columns", list(table.shape))
    _check_entries(op, "the number of entries of table", table.shape[0])
    check_grid(op, call.grid, call.total, call.merge_size, "table", table)


def _axis_taps(index: Tensor, size: Tensor, side: int, align_corners: bool, dtype: torch.dtype) -> list[Any]:
    """[(entry, weight), (next entry, its weight)] of patches of an axis."""
    position = index.to(dtype)
    if align_corners:
        src = position * (side - 1) / (size - 1).clamp(min=1)
    else:
        src = (position + 0.5) * side / size.clamp(min=1) - 0.5
    floor = src.floor()
    part = src - floor
    entry = floor.long()
    return [(entry.clamp(0, side - 1), 1 - part), ((entry + 1).clamp(0, side - 1), part)]


def _taps(places: Places, entries: int, align_corners: bool, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Four times (entry, weight) of every row."""
    side = math.isqrt(entries)
    rows = _axis_taps(places.row, places.h, side, align_corners, dtype)
    cols = _axis_taps(places.col, places.w, side, align_corners, dtype)
    for row, down in rows:
        for col, over in cols:
            yield row * side + col, down * over


def _interpolate_cpu(merge_size: int, align_corners: bool, t: OnGrid) -> None:
    dtype = torch.promote_types(t.x.dtype, torch.float32)
    places = locate_rows(t.grid, t.out.shape[0], merge_size)
    total = torch.zeros_like(t.out, dtype=dtype)
    for entry, weight in _taps(places, t.x.shape[0], align_corners, dtype):
        total += t.x[entry] * weight[:, None]
    t.out.copy_(total.masked_fill_(~places.inside[:, None], 0))


def _constants(call: Any, entries: int, width: int) -> dict[str, Any]:
    return {
        "SIDE": math.isqrt(entries), "WIDTH": width, "MERGE": int(call.merge_size),
        "ALIGN_CORNERS": call.align_corners,
    }  # fmt: skip


def _plan(t: OnGrid, call: PosEmbedInterpolate) -> Plan:
    if not runs_kernels(t.x):
        return reference_plan(partial(_interpolate_cpu, call.merge_size, call.align_corners), t.x)
    entries, width = t.x.shape[0], int(t.x.shape[1])
    launch, source = grid_config("pos_embed_fwd", t.x.dtype, width)
    unit, _, (row,), numbers = matrix_strides(t.x)
    constants = {"STRIDE_T": row, "STRIDE_UNIT": unit, **_constants(call, entries, width), **blocks_of(launch)}
    tiles = tiles_of(call.total, width, launch)
    bound = Bound(wrap_triton(_pos_embed_fwd_kernel), tiles, (call.total, t.grid.shape[0], *numbers), constants)
    return Plan(
        lambda t: bound(with_columns(t.x), t.grid.contiguous(), t.out),
        {"pos_embed_fwd": (launch, source)}, why=ONE_PATH,
    )  # fmt: skip


pos_embed_interpolate_op = planned_op(
    "pos_embed_interpolate",
    PosEmbedInterpolate,
    Tensor,
    check=_check,
    outputs=lambda call: call.table.new_empty((call.total, call.table.shape[1])),
    tensors=lambda call, out: OnGrid(call.table, call.grid, out),
    plan=_plan,
    check_values=lambda call: check_grid_values("pos_embed_interpolate", call.grid, call.merge_size),
)


def _check_backward(call: PosEmbedInterpolateBackward) -> None:
    op, dout = "pos_embed_interpolate_backward", call.dout
    check_dense(op, "dout", dout)
    check_float(op, "dout", dout)
    if dout.dim() != 2 or dout.shape[1] < 1:
        refuse(op, "dout", "of shape [total, C]", f"shape {list(dout.shape)}")
    check_rows(op, "the number of rows of dout", dout.shape[0])
    _check_entries(op, "entries", call.entries)
    check_grid(op, call.grid, dout.shape[0], call.merge_size, "dout", dout)


def _gather_cpu(merge_size: int, align_corners: bool, t: OnGrid) -> None:
    dout, dtype = t.x, torch.promote_types(t.x.dtype, torch.float32)
    places = locate_rows(t.grid, dout.shape[0], merge_size)
    total = torch.zeros_like(t.out, dtype=dtype)
    for entry, weight in _taps(places, t.out.shape[0], align_corners, dtype):
        taken = places.inside & (weight > 0)
        total.index_add_(0, entry[taken], dout[taken] * weight[taken, None])
    t.out.copy_(total)


def _plan_backward(t: OnGrid, call: PosEmbedInterpolateBackward) -> Plan:
    if not runs_kernels(t.x):
        return reference_plan(partial(_gather_cpu, call.merge_size, call.align_corners), t.x)
    total, width = t.x.shape[0], int(t.x.shape[1])
    launch, source = grid_config("pos_embed_bwd", t.x.dtype, width)
    unit, _, (row,), numbers = matrix_strides(t.x)
    constants = {"STRIDE_D": row, "STRIDE_UNIT": unit, **_constants(call, call.entries, width), **blocks_of(launch)}
    tiles = call.entries, tiles_of(1, width, launch)[1]
    bound = Bound(wrap_triton(_pos_embed_bwd_kernel), tiles, (total, t.grid.shape[0], *numbers), constants)
    return Plan(
        lambda t: bound(with_columns(t.x), t.grid.contiguous(), t.out),
        {"pos_embed_bwd": (launch, source)}, why=ONE_PATH,
    )  # fmt: skip


pos_embed_interpolate_backward_op = planned_op(
    "pos_embed_interpolate_backward",
    PosEmbedInterpolateBackward,
    Tensor,
    check=_check_backward,
    outputs=lambda call: call.dout.new_empty((call.entries, call.dout.shape[1])),
    tensors=lambda call, dtable: OnGrid(call.dout, call.grid, dtable),
    plan=_plan_backward,
    check_values=lambda call: check_grid_values("pos_embed_interpolate_backward", call.grid, call.merge_size),
)
register_gathered(pos_embed_interpolate_op, pos_embed_interpolate_backward_op, lambda table, total: (table.shape[0],))


def pos_embed_interpolate(
    table: Tensor, grid: Tensor, total: int, merge_size: int = 2, align_corners: bool = True
) -> Tensor:
    """Resample a learned S x S position table bilinearly to the grid of each image of a packed batch.

    Every frame of a video gets the same rows. Transformers' Qwen3-VL adds these rows to the patches of its images.

    Args:
        table: [S * S, C], fp16, bf16 or fp32, on the CPU also fp64, row by row. Any strides; columns that are not
            contiguous are copied.
        grid: int64 [n, 3], a row (t, h, w) for each image or video, in patches. A grid on the CPU is checked and sent
            to the table's device without waiting. A grid on a device is never copied to the host, and is checked only
            under `torch_ops.settings(checked=True)`. The check refuses by name an image whose height or width is not a
            multiple of merge_size. Other wrong values give wrong rows, and nothing is read or written out of bounds.
        total: number of patches, the rows of the result. Rows past the last image (the padding of a CUDA graph) are 0
            and have no gradient. Patches past `total` are left out.
        merge_size: 1 to 16. Rows of a frame are in blocks of merge_size x merge_size patches; 1 is raster order.
            Default: 2.
        align_corners: whether the first and last patch of an axis lie on the first and last entry, as in Qwen3-VL.
            False: half-pixel centres, clamped to the table, as in `torch.nn.functional.interpolate`. Default: True.

    Returns:
        [total, C] in the table's dtype. Weights and sums are fp32, rounded once.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    Differentiable in `table`. The gradient is gathered entry by entry in a fixed order, without atomics: the same bits
    every time.
    """
    total, merge_size = integers("pos_embed_interpolate", total=total, merge_size=merge_size)
    if isinstance(table, Tensor):
        grid = send_grid(
            "pos_embed_interpolate", grid, table.device, merge_size,
            lambda grid: _check(PosEmbedInterpolate(table, grid, total, merge_size)),
        )  # fmt: skip
    return pos_embed_interpolate_op(table, grid, total, merge_size, align_corners)


__all__ = ["pos_embed_interpolate"]
