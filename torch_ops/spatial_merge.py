"""`vk::spatial_merge`: the 2 x 2 merge of vision encoders over a packed batch of images, and its gradient.

Kernels and maths: `csrc_free_ops.spatial_merge`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from csrc_free_ops.spatial_merge import _spatial_merge_bwd_kernel, _spatial_merge_fwd_kernel
from torch_ops._core.checks import check_dense, check_float, refuse
from torch_ops._core.launch import Relaunch, blocks_of, row_stride, with_columns
from torch_ops._core.registry import remembered, runs_kernels, vk_op, wrap_triton
from torch_ops._grids import (
    check_grid,
    check_on_device,
    check_rows,
    grid_launch,
    place_rows,
    register_gathered,
    send_grid,
    tiles_of,
)

MODES = ("concat", "mean")
ORDERS = ("merge_block", "raster")


def _check_rows(
    op: str, argument: str, rows: Tensor, grid: Tensor, total: int, mode: str, order: str, merge_size: int
) -> None:
    check_dense(op, argument, rows)
    check_float(op, argument, rows)
    if rows.dim() != 2 or rows.shape[1] < 1:
        refuse(op, argument, "of shape [rows, columns]", f"shape {list(rows.shape)}")
    check_grid(op, grid, total, merge_size, argument, rows)
    if total % (merge_size * merge_size):
        refuse(op, "total", f"a multiple of {merge_size * merge_size} = merge_size * merge_size", total)
    for name, value, choices in (("mode", mode, MODES), ("order", order, ORDERS)):
        if value not in choices:
            refuse(op, name, f"one of {', '.join(choices)}", repr(value))


def _check_spatial_merge(x: Tensor, grid: Tensor, total: int, mode: str, order: str, merge_size: int) -> None:
    op = "spatial_merge"
    _check_rows(op, "x", x, grid, total, mode, order, merge_size)
    check_rows(op, "the number of rows of x", x.shape[0])
    if total > x.shape[0]:
        refuse(op, "total", f"at most the {x.shape[0]} rows of x", total)


def _merged(x: Tensor, total: int, mode: str, merge_size: int) -> Tensor:
    unit = merge_size * merge_size
    return x.new_empty((total // unit, x.shape[1] * (unit if mode == "concat" else 1)))


def _spatial_merge_fake(
    x: Tensor, grid: Tensor, total: int, mode: str = "concat", order: str = "merge_block", merge_size: int = 2
) -> Tensor:
    _check_spatial_merge(x, grid, total, mode, order, merge_size)
    return _merged(x, total, mode, merge_size)


def _sources(grid: Tensor, total: int, order: str, merge_size: int) -> Tensor:
    """The row of x at each row of the merged order: of images that are whole each row once."""
    if order == "merge_block":
        return torch.arange(total, device=grid.device)
    places = place_rows(grid, total, merge_size)
    rows = torch.arange(total, device=grid.device)
    source = torch.where(places.inside, places.frame + places.row * places.w + places.col, rows)
    return source.clamp(0, max(total - 1, 0))


def _spatial_merge_cpu(x: Tensor, grid: Tensor, out: Tensor, mode: str, order: str, merge_size: int) -> None:
    unit = merge_size * merge_size
    total = out.shape[0] * unit
    rows = x[:total] if order == "merge_block" else x[_sources(grid, total, order, merge_size)]
    if mode == "concat":
        out.copy_(rows.reshape(out.shape))
    else:
        blocks = rows.reshape(-1, unit, x.shape[1])
        out.copy_(blocks.to(torch.promote_types(x.dtype, torch.float32)).mean(1))


@remembered
def _prepare_spatial_merge(
    x: Tensor, grid: Tensor, total: int, mode: str, order: str, merge_size: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    _check_spatial_merge(x, grid, total, mode, order, merge_size)
    if not runs_kernels(x):
        return lambda x, grid, out: _spatial_merge_cpu(x, grid, out, mode, order, merge_size)
    width, merge_size = int(x.shape[1]), int(merge_size)
    launch, _ = grid_launch("spatial_merge_fwd", x.dtype, width)
    tiles = tiles_of(total // (merge_size * merge_size), width, launch)
    scalars = (total, grid.shape[0])
    constants = {
        "STRIDE_X": int(row_stride(x)), "WIDTH": width, "MERGE": merge_size, "MEAN": mode == "mean",
        "RASTER": order == "raster", **blocks_of(launch),
    }  # fmt: skip
    relaunch = Relaunch(tiles, scalars)

    def launch_forward(x: Tensor, grid: Tensor, out: Tensor) -> None:
        tensors = (with_columns(x), grid.contiguous(), out)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_spatial_merge_fwd_kernel)[tiles](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_forward


@vk_op("spatial_merge", fake=_spatial_merge_fake)
def spatial_merge_op(
    x: Tensor, grid: Tensor, total: int, mode: str = "concat", order: str = "merge_block", merge_size: int = 2
) -> Tensor:
    launch = _prepare_spatial_merge(x, grid, total, mode, order, merge_size)
    check_on_device("spatial_merge", grid, merge_size, total)
    out = _merged(x, total, mode, merge_size)
    launch(x, grid, out)
    return out


def _check_spatial_merge_backward(
    dout: Tensor, grid: Tensor, total: int, rows: int, mode: str, order: str, merge_size: int
) -> None:
    op = "spatial_merge_backward"
    _check_rows(op, "dout", dout, grid, total, mode, order, merge_size)
    unit = merge_size * merge_size
    if dout.shape[0] != total // unit:
        refuse(op, "dout", f"of {total // unit} rows for total = {total}", dout.shape[0])
    if mode == "concat" and dout.shape[1] % unit:
        refuse(op, "the number of columns of dout", f"a multiple of {unit}", dout.shape[1])
    check_rows(op, "rows", rows)
    if rows < total:
        refuse(op, "rows", f"at least total = {total}", rows)


def _gradient(dout: Tensor, rows: int, mode: str, merge_size: int) -> Tensor:
    return dout.new_empty((rows, dout.shape[1] // (merge_size * merge_size if mode == "concat" else 1)))


def _spatial_merge_backward_fake(
    dout: Tensor, grid: Tensor, total: int, rows: int,
    mode: str = "concat", order: str = "merge_block", merge_size: int = 2,
) -> Tensor:  # fmt: skip
    _check_spatial_merge_backward(dout, grid, total, rows, mode, order, merge_size)
    return _gradient(dout, rows, mode, merge_size)


def _spatial_merge_backward_cpu(
    dout: Tensor, grid: Tensor, dx: Tensor, total: int, mode: str, order: str, merge_size: int
) -> None:
    unit = merge_size * merge_size
    if mode == "concat":
        merged = dout.reshape(total, dx.shape[1])
    else:
        scaled = dout.to(torch.promote_types(dout.dtype, torch.float32)) / unit
        merged = scaled.to(dout.dtype).repeat_interleave(unit, 0)
    dx.zero_()
    dx[_sources(grid, total, order, merge_size)] = merged


@remembered
def _prepare_spatial_merge_backward(
    dout: Tensor, grid: Tensor, total: int, rows: int, mode: str, order: str, merge_size: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    _check_spatial_merge_backward(dout, grid, total, rows, mode, order, merge_size)
    if not runs_kernels(dout):
        return lambda dout, grid, dx: _spatial_merge_backward_cpu(dout, grid, dx, total, mode, order, merge_size)
    merge_size = int(merge_size)
    width = int(dout.shape[1]) // (merge_size * merge_size if mode == "concat" else 1)
    launch, _ = grid_launch("spatial_merge_bwd", dout.dtype, width)
    tiles = tiles_of(rows, width, launch)
    scalars = (total, grid.shape[0], rows)
    constants = {
        "STRIDE_D": int(row_stride(dout)), "WIDTH": width, "MERGE": merge_size, "MEAN": mode == "mean",
        "RASTER": order == "raster", **blocks_of(launch),
    }  # fmt: skip
    relaunch = Relaunch(tiles, scalars)

    def launch_backward(dout: Tensor, grid: Tensor, dx: Tensor) -> None:
        tensors = (with_columns(dout), grid.contiguous(), dx)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_spatial_merge_bwd_kernel)[tiles](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_backward


@vk_op("spatial_merge_backward", fake=_spatial_merge_backward_fake)
def spatial_merge_backward_op(
    dout: Tensor, grid: Tensor, total: int, rows: int,
    mode: str = "concat", order: str = "merge_block", merge_size: int = 2,
) -> Tensor:  # fmt: skip
    launch = _prepare_spatial_merge_backward(dout, grid, total, rows, mode, order, merge_size)
    check_on_device("spatial_merge_backward", grid, merge_size, total)
    dx = _gradient(dout, rows, mode, merge_size)
    launch(dout, grid, dx)
    return dx


register_gathered(spatial_merge_op, spatial_merge_backward_op, lambda x, total: (total, x.shape[0]))


def spatial_merge(
    x: Tensor, grid: Tensor, total: int, mode: str = "concat", order: str = "merge_block", merge_size: int = 2
) -> Tensor:
    """Each block of merge_size x merge_size patches as one row, over all images of a packed batch.

    Args:
        x: [T, C] in fp16, bf16 or fp32, a row for each patch. Any strides; columns that are not contiguous are copied.
            On the CPU also fp64.
        grid: int64 [n, 3], a row (t, h, w) for each image or video, in patches. On the CPU it is checked and sent to
            x's device without waiting; on a device its values are never copied to the host, and checked only under
            `torch_ops.settings(checked=True)`. An image whose height or width merge_size does not divide is refused by
            name where it is checked, as are images of more than `total` patches; else nothing is promised of their
            blocks, and nothing is read or written out of bounds.
        total: the number of patches to merge, at most T and a multiple of merge_size^2. Of the rows before `total`,
            those past the last image (the padding of a CUDA graph) are merged as they follow each other. Rows of x
            from `total` on are left out and get gradient 0.
        mode: "concat" puts the rows of a block side by side, row by row; "mean" averages them, in fp32, rounded once.
        order: "merge_block" where the rows of a block follow each other in x, as Qwen-VL has them; "raster" where a
            frame's rows are in raster order.
        merge_size: M; blocks have M x M patches.

    Returns:
        [total / M^2, M^2 C] or, of "mean", [total / M^2, C], in x's dtype. Always a tensor of its own.

    Raises:
        ValueError: names the argument, what was wanted and what came.

    Differentiable in `x`; the gradient is gathered, and has the same bits every time.
    """
    if isinstance(x, Tensor):
        grid = send_grid(
            "spatial_merge", grid, x.device, merge_size,
            lambda grid: _check_spatial_merge(x, grid, total, mode, order, merge_size), total,
        )  # fmt: skip
    return spatial_merge_op(x, grid, total, mode, order, merge_size)


__all__ = ["spatial_merge"]
