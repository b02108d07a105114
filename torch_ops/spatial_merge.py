"""`vk::spatial_merge`: the 2 x 2 merge of vision encoders over a packed batch of images, and its gradient.

Kernels and maths: `csrc_free_ops.spatial_merge`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.spatial_merge import _spatial_merge_bwd_kernel, _spatial_merge_fwd_kernel
from torch_ops._core.checks import check_dense, check_float, integers, refuse
from torch_ops._core.launch import blocks_of, matrix_strides, with_columns
from torch_ops._core.plan import Bound, Plan, reference_plan
from torch_ops._core.planned_op import planned_op, without_tensors
from torch_ops._core.registry import runs_kernels, wrap_triton
from torch_ops._grids import (
    ONE_PATH,
    OnGrid,
    check_grid,
    check_grid_values,
    check_rows,
    grid_config,
    locate_rows,
    register_gathered,
    send_grid,
    tiles_of,
)

MODES = ("concat", "mean")
ORDERS = ("merge_block", "raster")


class SpatialMerge(NamedTuple):
    """The arguments of `vk::spatial_merge`; the function below documents them."""

    x: Tensor
    grid: Tensor
    total: int
    mode: str = "concat"
    order: str = "merge_block"
    merge_size: int = 2


class SpatialMergeBackward(NamedTuple):
    """The arguments of `vk::spatial_merge_backward`; `rows` are those of x."""

    dout: Tensor
    grid: Tensor
    total: int
    rows: int
    mode: str = "concat"
    order: str = "merge_block"
    merge_size: int = 2


def _unit(call: Any) -> int:
    """Rows of a block."""
    unit: int = call.merge_size * call.merge_size
    return unit


def _check_rows(op: str, argument: str, rows: Tensor, call: Any) -> None:
    total, merge_size = call.total, call.merge_size
    check_dense(op, argument, rows)
    check_float(op, argument, rows)
    if rows.dim() != 2 or rows.shape[1] < 1:
        refuse(op, argument, "of shape [rows, columns] with columns", list(rows.shape))
    check_grid(op, call.grid, total, merge_size, argument, rows)
    if total % (merge_size * merge_size):
        refuse(op, "total", f"a multiple of {merge_size * merge_size} = merge_size * merge_size", total)
    for name, value, choices in (("mode", call.mode, MODES), ("order", call.order, ORDERS)):
        if value not in choices:
            refuse(op, name, f"one of {', '.join(choices)}", repr(value))


def _check(call: SpatialMerge) -> None:
    op = "spatial_merge"
    _check_rows(op, "x", call.x, call)
    check_rows(op, "the number of rows of x", call.x.shape[0])
    if call.total > call.x.shape[0]:
        refuse(op, "total", f"at most the {call.x.shape[0]} rows of x", call.total)


def _merged(call: SpatialMerge) -> Tensor:
    unit = _unit(call)
    return call.x.new_empty((call.total // unit, call.x.shape[1] * (unit if call.mode == "concat" else 1)))


def _sources(call: Any) -> Tensor:
    """The row of x at each row of the merged order: of images that are whole each row once."""
    grid, total = call.grid, call.total
    if call.order == "merge_block":
        return torch.arange(total, device=grid.device)
    places = locate_rows(grid, total, call.merge_size)
    rows = torch.arange(total, device=grid.device)
    source = torch.where(places.inside, places.frame + places.row * places.w + places.col, rows)
    return source.clamp(0, max(total - 1, 0))


def _merge_cpu(call: SpatialMerge, t: OnGrid) -> None:
    unit, total = _unit(call), call.total
    rows = t.x[:total] if call.order == "merge_block" else t.x[_sources(call._replace(grid=t.grid))]
    if call.mode == "concat":
        t.out.copy_(rows.reshape(t.out.shape))
    else:
        blocks = rows.reshape(-1, unit, t.x.shape[1])
        t.out.copy_(blocks.to(torch.promote_types(t.x.dtype, torch.float32)).mean(1))


def _constants(call: Any, width: int) -> dict[str, Any]:
    return {
        "WIDTH": width, "MERGE": int(call.merge_size), "MEAN": call.mode == "mean", "RASTER": call.order == "raster"
    }  # fmt: skip


def _plan(t: OnGrid, call: SpatialMerge) -> Plan:
    options = without_tensors(call)
    if not runs_kernels(t.x):
        return reference_plan(lambda t: _merge_cpu(options, t), t.x)
    width = int(t.x.shape[1])
    launch, source = grid_config("spatial_merge_fwd", t.x.dtype, width)
    unit, _, (row,), numbers = matrix_strides(t.x)
    constants = {"STRIDE_X": row, "STRIDE_UNIT": unit, **_constants(call, width), **blocks_of(launch)}
    grid = tiles_of(call.total // _unit(call), width, launch)
    bound = Bound(wrap_triton(_spatial_merge_fwd_kernel), grid, (call.total, t.grid.shape[0], *numbers), constants)
    return Plan(
        lambda t: bound(with_columns(t.x), t.grid.contiguous(), t.out),
        {"spatial_merge_fwd": (launch, source)}, why=ONE_PATH,
    )  # fmt: skip


spatial_merge_op = planned_op(
    "spatial_merge",
    SpatialMerge,
    Tensor,
    check=_check,
    outputs=_merged,
    tensors=lambda call, out: OnGrid(call.x, call.grid, out),
    plan=_plan,
    check_values=lambda call: check_grid_values("spatial_merge", call.grid, call.merge_size, call.total),
)


def _check_backward(call: SpatialMergeBackward) -> None:
    op, unit = "spatial_merge_backward", _unit(call)
    _check_rows(op, "dout", call.dout, call)
    if call.dout.shape[0] != call.total // unit:
        refuse(op, "dout", f"of {call.total // unit} rows for total = {call.total}", call.dout.shape[0])
    if call.mode == "concat" and call.dout.shape[1] % unit:
        refuse(op, "the number of columns of dout", f"a multiple of {unit}", call.dout.shape[1])
    check_rows(op, "rows", call.rows)
    if call.rows < call.total:
        refuse(op, "rows", f"at least total = {call.total}", call.rows)


def _gradient(call: SpatialMergeBackward) -> Tensor:
    return call.dout.new_empty((call.rows, call.dout.shape[1] // (_unit(call) if call.mode == "concat" else 1)))


def _merge_backward_cpu(call: SpatialMergeBackward, t: OnGrid) -> None:
    dout, unit = t.x, _unit(call)
    if call.mode == "concat":
        merged = dout.reshape(call.total, t.out.shape[1])
    else:
        scaled = dout.to(torch.promote_types(dout.dtype, torch.float32)) / unit
        merged = scaled.to(dout.dtype).repeat_interleave(unit, 0)
    t.out.zero_()
    t.out[_sources(call._replace(grid=t.grid))] = merged


def _plan_backward(t: OnGrid, call: SpatialMergeBackward) -> Plan:
    options = without_tensors(call)
    if not runs_kernels(t.x):
        return reference_plan(lambda t: _merge_backward_cpu(options, t), t.x)
    width = int(t.x.shape[1]) // (int(_unit(call)) if call.mode == "concat" else 1)
    launch, source = grid_config("spatial_merge_bwd", t.x.dtype, width)
    unit, _, (row,), numbers = matrix_strides(t.x)
    constants = {"STRIDE_D": row, "STRIDE_UNIT": unit, **_constants(call, width), **blocks_of(launch)}
    scalars = (call.total, t.grid.shape[0], call.rows, *numbers)
    bound = Bound(wrap_triton(_spatial_merge_bwd_kernel), tiles_of(call.rows, width, launch), scalars, constants)
    return Plan(
        lambda t: bound(with_columns(t.x), t.grid.contiguous(), t.out),
        {"spatial_merge_bwd": (launch, source)}, why=ONE_PATH,
    )  # fmt: skip


spatial_merge_backward_op = planned_op(
    "spatial_merge_backward",
    SpatialMergeBackward,
    Tensor,
    check=_check_backward,
    outputs=_gradient,
    tensors=lambda call, dx: OnGrid(call.dout, call.grid, dx),
    plan=_plan_backward,
    check_values=lambda call: check_grid_values("spatial_merge_backward", call.grid, call.merge_size, call.total),
)
register_gathered(spatial_merge_op, spatial_merge_backward_op, lambda x, total: (total, x.shape[0]))


def spatial_merge(
    x: Tensor, grid: Tensor, total: int, mode: str = "concat", order: str = "merge_block", merge_size: int = 2
) -> Tensor:
    """Merge each block of merge_size x merge_size patches into one row, over all images of a packed batch.

    Args:
        x: [T, C], fp16, bf16 or fp32, on the CPU also fp64, a row for each patch. Any strides; columns that are not
            contiguous are copied.
        grid: int64 [n, 3], a row (t, h, w) for each image or video, in patches. A grid on the CPU is checked and sent
            to x's device without waiting. A grid on a device is never copied to the host, and is checked only under
            `torch_ops.settings(checked=True)`. The check refuses by name an image whose height or width is not a
            multiple of merge_size. It also refuses images of more than `total` patches. Unchecked, such images give
            blocks of unspecified rows, and nothing is read or written out of bounds.
        total: number of patches to merge, at most T and a multiple of merge_size^2. Rows before `total` and past the
            last image (the padding of a CUDA graph) are merged in their order. Rows from `total` on are left out and
            get gradient 0.
        mode: "concat" puts the rows of a block side by side, row by row; "mean" averages them in fp32, rounded once.
            Default: "concat".
        order: "merge_block" if the rows of a block follow each other in x, as in Qwen-VL. "raster" if the rows of a
            frame are in raster order. Default: "merge_block".
        merge_size: M, 1 to 16; blocks have M x M patches. Default: 2.

    Returns:
        [total / M^2, M^2 C], for "mean" [total / M^2, C], in x's dtype; always a new tensor.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    Differentiable in `x`. The gradient is gathered and has the same bits every time.
    """
    total, merge_size = integers("spatial_merge", total=total, merge_size=merge_size)
    if isinstance(x, Tensor):
        grid = send_grid(
            "spatial_merge", grid, x.device, merge_size,
            lambda grid: _check(SpatialMerge(x, grid, total, mode, order, merge_size)), total,
        )  # fmt: skip
    return spatial_merge_op(x, grid, total, mode, order, merge_size)


__all__ = ["spatial_merge"]
