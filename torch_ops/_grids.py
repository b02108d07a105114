"""Shared by the ops on image grids: checks, launches, and the places of patches, in ATen.

Rows, images and merge-block order: `csrc_free_ops.tiles.images`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.configs.pick import pick
from csrc_free_ops.configs.rows import Config
from torch_ops._core.checks import check_dense, check_device, dtype_name, refuse
from torch_ops._core.launch import current_gpu
from torch_ops._core.registry import KernelOp, Mode, current_mode
from torch_ops._core.torch_private import has_functorch_transforms
from torch_ops.settings import settings

# Row numbers are 32-bit in the kernels.
MOST_ROWS = 2**30
MOST_MERGED = 16
# The longest side of an image, in patches; kernels clamp longer ones.
LONGEST_SIDE = 2**20
ONE_PATH = "stock Triton on every GPU"


class OnGrid(NamedTuple):
    """out is filled from x, for the images of a grid."""

    x: Tensor
    grid: Tensor
    out: Tensor


def check_grid(
    op: str, grid: Tensor, total: int, merge_size: int, like_name: str = "", like: Tensor | None = None
) -> None:
    check_dense(op, "grid", grid)
    if grid.dtype != torch.int64:
        refuse(op, "grid", "int64", dtype_name(grid.dtype))
    if grid.dim() != 2 or grid.shape[1] != 3:
        refuse(op, "grid", "of shape [n, 3], a row (t, h, w) for each image", list(grid.shape))
    if like is not None:
        check_device(op, "grid", grid, like_name, like)
    check_rows(op, "total", total)
    if not 1 <= merge_size <= MOST_MERGED:
        refuse(op, "merge_size", f"from 1 to {MOST_MERGED}", merge_size)


def check_rows(op: str, argument: str, rows: int) -> None:
    # A graph of dynamic shape may not branch on a number of rows, of which none is negative.
    if not isinstance(rows, torch.SymInt) and not 0 <= rows <= MOST_ROWS:
        refuse(op, argument, f"from 0 to {MOST_ROWS}", rows)


def check_grid_values(op: str, grid: Tensor, merge_size: int, most: int | None = None) -> None:
    """Check the values of a grid; on a device this costs a synchronisation.

    `most` is the number of patches that all images may have together.
    """
    patches = 0
    for image, (t, h, w) in enumerate(grid.tolist()):
        if t < 0:
            refuse(op, f"the number of frames of image {image}, grid[{image}, 0]", "at least 0", t)
        for column, (name, size) in enumerate((("height", h), ("width", w)), start=1):
            if size < 0 or size % merge_size:
                wanted = "even" if merge_size == 2 else f"a multiple of merge_size = {merge_size}"
                refuse(op, f"the {name} of image {image}, grid[{image}, {column}]", f"{wanted} and at least 0", size)
            if size > LONGEST_SIDE:
                refuse(op, f"the {name} of image {image}, grid[{image}, {column}]", f"at most {LONGEST_SIDE}", size)
        patches += t * h * w
    if most is not None and patches > most:
        refuse(op, "grid", f"of at most total = {most} patches together", f"{patches} patches")


def send_grid(
    op: str, grid: Tensor, device: torch.device, merge_size: int, check: Callable[[Tensor], None],
    most: int | None = None,
) -> Tensor:  # fmt: skip
    """A public function's grid, on `device`: one on the CPU is checked at no cost and sent without waiting.

    `check(grid)` is what the op refuses without a look at the values.
    """
    if not isinstance(grid, Tensor) or grid.device.type != "cpu":
        return grid
    sent = grid if device.type == "cpu" else grid.to(device, non_blocking=True)
    # Under torch.func.vmap a grid may be a batch of grids, which has no values here.
    if not torch.compiler.is_compiling() and current_mode() is Mode.EAGER and not has_functorch_transforms():
        check(sent)
        check_grid_values(op, grid, merge_size, most)
    return sent


def grid_config(kernel: str, dtype: torch.dtype, width: int) -> tuple[Config, str]:
    """The launch of a kernel that works on rows of this width, and where it comes from; the user's rows come first."""
    return pick(kernel, current_gpu(), dtype_name(dtype), dtype.itemsize, width, False, None, settings.rows)


def tiles_of(rows: int, width: int, launch: Config) -> tuple[int, int]:
    """Tiles of rows, of which the last may be empty (no launch may be), and of columns."""
    return rows // launch.block_m + 1, -(-width // launch.block_n)


def register_gathered(op: KernelOp, backward: KernelOp, sizes: Callable[[Tensor, int], tuple[int, ...]]) -> None:
    """Register the gradient of op(leaf, grid, total, ...): backward(dout, grid, *sizes(leaf, total), ...)."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        leaf, grid, total, *options = inputs
        ctx.save_for_backward(grid)
        ctx.sizes = sizes(leaf, total)
        ctx.options = options
        ctx.set_materialize_grads(False)

    def gather(ctx: Any, dout: Tensor | None) -> tuple[Any, ...]:
        nothing = (None,) * (2 + len(ctx.options))
        if dout is None:
            return None, *nothing
        (grid,) = ctx.saved_tensors
        return backward(dout, grid, *ctx.sizes, *ctx.options), *nothing

    backward.refuse_autograd()
    op.register_autograd(gather, setup_context=setup_context)


@dataclass(frozen=True)
class Places:
    """For each of `total` rows: whether it belongs to an image, and if so where.

    `frame` is its frame's first row; `row` and `col` are those of its patch in a frame of h x w.
    """

    inside: Tensor
    frame: Tensor
    row: Tensor
    col: Tensor
    h: Tensor
    w: Tensor


def locate_rows(grid: Tensor, total: int, merge_size: int) -> Places:
    """Computed by ATen without reading the values: `tiles/images.py` says what becomes of wild ones."""
    rows = torch.arange(total, device=grid.device)
    if grid.shape[0] == 0:
        return Places(torch.zeros_like(rows, dtype=torch.bool), rows, rows, rows, rows, rows)
    t, h, w = grid.clamp(min=0).unbind(1)
    h, w = h.clamp(max=LONGEST_SIDE), w.clamp(max=LONGEST_SIDE)
    frames = (h * w).clamp(max=total)
    counts = (frames * t.clamp(max=total)).clamp(max=total)
    ends = counts.cumsum(0)
    image = torch.searchsorted(ends, rows, right=True)
    inside = image < grid.shape[0]
    image = image.clamp(max=grid.shape[0] - 1)
    h, w = h[image], w[image]
    index = (rows - (ends - counts)[image]) % frames[image].clamp(min=1)
    block = index // (merge_size * merge_size)
    across = (w // merge_size).clamp(min=1)
    row = block // across * merge_size + index // merge_size % merge_size
    col = block % across * merge_size + index % merge_size
    return Places(inside, rows - index, row, col, h, w)
