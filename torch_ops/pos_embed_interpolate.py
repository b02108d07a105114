"""`vk::pos_embed_interpolate`: a learned table of positions, resampled to every image of a batch, and its gradient.

Kernels and maths: `csrc_free_ops.pos_embed_interpolate`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.pos_embed_interpolate import _pos_embed_bwd_kernel, _pos_embed_fwd_kernel
from torch_ops._core.checks import check_dense, check_float, refuse
from torch_ops._core.launch import Relaunch, blocks_of, row_stride, with_columns
from torch_ops._core.registry import remembered, runs_kernels, vk_op, wrap_triton
from torch_ops._grids import (
    Places,
    check_grid,
    check_on_device,
    check_rows,
    grid_launch,
    place_rows,
    register_gathered,
    send_grid,
    tiles_of,
)

# Sizes of an image times entries of a side are 32-bit in the kernels.
LARGEST_SIDE = 1000


def _check_entries(op: str, argument: str, entries: int) -> None:
    if not 1 <= entries <= LARGEST_SIDE**2 or math.isqrt(entries) ** 2 != entries:
        refuse(op, argument, f"a square, S x S with S from 1 to {LARGEST_SIDE}", entries)


def _check_pos_embed(table: Tensor, grid: Tensor, total: int, merge_size: int) -> None:
    op = "pos_embed_interpolate"
    check_dense(op, "table", table)
    check_float(op, "table", table)
    if table.dim() != 2 or table.shape[1] < 1:
        refuse(op, "table", "of shape [S * S, C]", f"shape {list(table.shape)}")
    _check_entries(op, "the number of entries of table", table.shape[0])
    check_grid(op, grid, total, merge_size, "table", table)


def _embeddings(table: Tensor, total: int) -> Tensor:
    return table.new_empty((total, table.shape[1]))


def _pos_embed_fake(table: Tensor, grid: Tensor, total: int, merge_size: int = 2, align_corners: bool = True) -> Tensor:
    _check_pos_embed(table, grid, total, merge_size)
    return _embeddings(table, total)


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


def _pos_embed_cpu(table: Tensor, grid: Tensor, out: Tensor, merge_size: int, align_corners: bool) -> None:
    dtype = torch.promote_types(table.dtype, torch.float32)
    places = place_rows(grid, out.shape[0], merge_size)
    total = torch.zeros(out.shape, dtype=dtype)
    for entry, weight in _taps(places, table.shape[0], align_corners, dtype):
        total += table[entry] * weight[:, None]
    out.copy_(total.masked_fill_(~places.inside[:, None], 0))


@remembered
def _prepare_pos_embed(
    table: Tensor, grid: Tensor, total: int, merge_size: int, align_corners: bool
) -> Callable[[Tensor, Tensor, Tensor], None]:
    _check_pos_embed(table, grid, total, merge_size)
    if not runs_kernels(table):
        return lambda table, grid, out: _pos_embed_cpu(table, grid, out, merge_size, align_corners)
    width, merge_size = int(table.shape[1]), int(merge_size)
    launch, _ = grid_launch("pos_embed_fwd", table.dtype, width)
    tiles = tiles_of(total, width, launch)
    scalars = (total, grid.shape[0])
    constants = {
        "STRIDE_T": int(row_stride(table)), "SIDE": math.isqrt(table.shape[0]), "WIDTH": width, "MERGE": merge_size,
        "ALIGN_CORNERS": align_corners, **blocks_of(launch),
    }  # fmt: skip
    relaunch = Relaunch(tiles, scalars)

    def launch_forward(table: Tensor, grid: Tensor, out: Tensor) -> None:
        tensors = (with_columns(table), grid.contiguous(), out)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_pos_embed_fwd_kernel)[tiles](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_forward


@vk_op("pos_embed_interpolate", fake=_pos_embed_fake)
def pos_embed_interpolate_op(
    table: Tensor, grid: Tensor, total: int, merge_size: int = 2, align_corners: bool = True
) -> Tensor:
    launch = _prepare_pos_embed(table, grid, total, merge_size, align_corners)
    check_on_device("pos_embed_interpolate", grid, merge_size)
    out = _embeddings(table, total)
    launch(table, grid, out)
    return out


def _check_pos_embed_backward(dout: Tensor, grid: Tensor, entries: int, merge_size: int) -> None:
    op = "pos_embed_interpolate_backward"
    check_dense(op, "dout", dout)
    check_float(op, "dout", dout)
    if dout.dim() != 2 or dout.shape[1] < 1:
        refuse(op, "dout", "of shape [total, C]", f"shape {list(dout.shape)}")
    check_rows(op, "the number of rows of dout", dout.shape[0])
    _check_entries(op, "entries", entries)
    check_grid(op, grid, dout.shape[0], merge_size, "dout", dout)


def _gradient(dout: Tensor, entries: int) -> Tensor:
    return dout.new_empty((entries, dout.shape[1]))


def _pos_embed_backward_fake(
    dout: Tensor, grid: Tensor, entries: int, merge_size: int = 2, align_corners: bool = True
) -> Tensor:
    _check_pos_embed_backward(dout, grid, entries, merge_size)
    return _gradient(dout, entries)


def _pos_embed_backward_cpu(dout: Tensor, grid: Tensor, dtable: Tensor, merge_size: int, align_corners: bool) -> None:
    dtype = torch.promote_types(dout.dtype, torch.float32)
    places = place_rows(grid, dout.shape[0], merge_size)
    total = torch.zeros(dtable.shape, dtype=dtype)
    for entry, weight in _taps(places, dtable.shape[0], align_corners, dtype):
        taken = places.inside & (weight > 0)
        total.index_add_(0, entry[taken], dout[taken] * weight[taken, None])
    dtable.copy_(total)


@remembered
def _prepare_pos_embed_backward(
    dout: Tensor, grid: Tensor, entries: int, merge_size: int, align_corners: bool
) -> Callable[[Tensor, Tensor, Tensor], None]:
    _check_pos_embed_backward(dout, grid, entries, merge_size)
    if not runs_kernels(dout):
        return lambda dout, grid, dtable: _pos_embed_backward_cpu(dout, grid, dtable, merge_size, align_corners)
    total, width, merge_size = dout.shape[0], int(dout.shape[1]), int(merge_size)
    launch, _ = grid_launch("pos_embed_bwd", dout.dtype, width)
    tiles = entries, tiles_of(1, width, launch)[1]
    scalars = (total, grid.shape[0])
    constants = {
        "STRIDE_D": int(row_stride(dout)), "SIDE": math.isqrt(entries), "WIDTH": width, "MERGE": merge_size,
        "ALIGN_CORNERS": align_corners, **blocks_of(launch),
    }  # fmt: skip
    relaunch = Relaunch(tiles, scalars)

    def launch_backward(dout: Tensor, grid: Tensor, dtable: Tensor) -> None:
        tensors = (with_columns(dout), grid.contiguous(), dtable)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_pos_embed_bwd_kernel)[tiles](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_backward


@vk_op("pos_embed_interpolate_backward", fake=_pos_embed_backward_fake)
def pos_embed_interpolate_backward_op(
    dout: Tensor, grid: Tensor, entries: int, merge_size: int = 2, align_corners: bool = True
) -> Tensor:
    launch = _prepare_pos_embed_backward(dout, grid, entries, merge_size, align_corners)
    check_on_device("pos_embed_interpolate_backward", grid, merge_size)
    dtable = _gradient(dout, entries)
    launch(dout, grid, dtable)
    return dtable


register_gathered(pos_embed_interpolate_op, pos_embed_interpolate_backward_op, lambda table, total: (table.shape[0],))


def pos_embed_interpolate(
    table: Tensor, grid: Tensor, total: int, merge_size: int = 2, align_corners: bool = True
) -> Tensor:
    """A learned S x S table of positions, bilinearly resampled to the grid of each image of a packed batch.

    Every frame of a video gets the same. What Transformers' Qwen3-VL adds to the patches of its images, at once.

    Args:
        table: [S * S, C] in fp16, bf16 or fp32, row by row. Any strides; columns that are not contiguous are copied. On
            the CPU also fp64.
        grid: int64 [n, 3], a row (t, h, w) for each image or video, in patches. On the CPU it is checked and sent to
            the table's device without waiting; on a device its values are never copied to the host, and checked only
            under `torch_ops.settings(checked=True)`, where an image whose height or width merge_size does not divide
            is refused by name. Else wild values give wild rows, and nothing is read or written out of bounds.
        total: the number of patches in all: rows of the result. Rows past the last image (the padding of a CUDA graph)
            are 0 and pass on no gradient; of images that go beyond, what does not fit is left out.
        merge_size: rows of a frame are in blocks of merge_size x merge_size patches; 1 is raster order.
        align_corners: whether the first and last patch of an axis lie on the first and last entry, as in Qwen3-VL;
            else half-pixel centres, clamped to the table, as in `torch.nn.functional.interpolate`.

    Returns:
        [total, C] in the table's dtype. Weights and sums are in fp32, rounded once.

    Raises:
        ValueError: names the argument, what was wanted and what came.

    Differentiable in `table`. The gradient is gathered entry by entry in a fixed order, without atomics: the same bits
    every time.
    """
    if isinstance(table, Tensor):
        grid = send_grid(
            "pos_embed_interpolate", grid, table.device, merge_size,
            lambda grid: _check_pos_embed(table, grid, total, merge_size),
        )  # fmt: skip
    return pos_embed_interpolate_op(table, grid, total, merge_size, align_corners)


__all__ = ["pos_embed_interpolate"]
