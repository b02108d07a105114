"""`vk::rotary_table`: cos and sin of the two-dimensional rotary embedding of every patch of a batch of images.

Kernel and maths: `csrc_free_ops.rotary_table`.
"""

import math
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from csrc_free_ops.rotary_table import _rotary_table_kernel
from torch_ops._core.checks import check_head_dim, check_int, refuse
from torch_ops._core.launch import Relaunch, blocks_of
from torch_ops._core.registry import INTERPRET, remembered, vk_op, wrap_triton
from torch_ops._grids import (
    check_grid,
    check_on_device,
    grid_launch,
    place_rows,
    send_grid,
    tiles_of,
)


def _check_rotary_table(grid: Tensor, total: int, dim: int, theta: float, merge_size: int) -> None:
    op = "rotary_table"
    check_grid(op, grid, total, merge_size)
    check_int(op, "dim", dim)
    check_head_dim(op, "dim", dim)
    if isinstance(theta, bool) or not isinstance(theta, Real | torch.SymInt | torch.SymFloat):
        refuse(op, "theta", "a number", repr(theta))
    if not 1 <= theta <= torch.finfo(torch.float32).max:
        refuse(op, "theta", "a number of at least 1 that fp32 holds", theta)


def _tables(grid: Tensor, total: int, dim: int) -> tuple[Tensor, Tensor]:
    cos, sin = (grid.new_empty((total, dim // 2), dtype=torch.float32) for _ in range(2))
    return cos, sin


def _rotary_table_fake(
    grid: Tensor, total: int, dim: int, theta: float = 10000.0, merge_size: int = 2
) -> tuple[Tensor, Tensor]:
    _check_rotary_table(grid, total, dim, theta, merge_size)
    return _tables(grid, total, dim)


def _rotary_table_cpu(grid: Tensor, cos: Tensor, sin: Tensor, theta: float, merge_size: int) -> None:
    total, half = cos.shape
    places = place_rows(grid, total, merge_size)
    frequencies = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=grid.device) / half))
    positions = torch.stack((places.row, places.col), 1) * places.inside[:, None]
    angles = (positions[..., None].float() * frequencies).flatten(1)
    torch.cos(angles, out=cos)
    torch.sin(angles, out=sin)


@remembered
def _prepare_rotary_table(
    grid: Tensor, total: int, dim: int, theta: float, merge_size: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    _check_rotary_table(grid, total, dim, theta, merge_size)
    if not (grid.is_cuda or INTERPRET):
        return lambda grid, cos, sin: _rotary_table_cpu(grid, cos, sin, theta, merge_size)
    half, merge_size = int(dim) // 2, int(merge_size)
    launch, _ = grid_launch("rotary_table", torch.float32, half)
    tiles = tiles_of(total, half, launch)
    scalars = (total, grid.shape[0])
    constants = {"LOG2_THETA": math.log2(theta), "HALF": half, "MERGE": merge_size, **blocks_of(launch)}
    relaunch = Relaunch(tiles, scalars)

    def launch_table(grid: Tensor, cos: Tensor, sin: Tensor) -> None:
        tensors = (grid.contiguous(), cos, sin)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_rotary_table_kernel)[tiles](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_table


@vk_op("rotary_table", fake=_rotary_table_fake)
def rotary_table_op(
    grid: Tensor, total: int, dim: int, theta: float = 10000.0, merge_size: int = 2
) -> tuple[Tensor, Tensor]:
    launch = _prepare_rotary_table(grid, total, dim, theta, merge_size)
    check_on_device("rotary_table", grid, merge_size)
    cos, sin = _tables(grid, total, dim)
    launch(grid, cos, sin)
    return cos, sin


def rotary_table(
    grid: Tensor,
    total: int,
    dim: int,
    theta: float = 10000.0,
    merge_size: int = 2,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles of every patch, as Qwen-VL's vision encoders turn heads by them.

    A patch at row i and column j of its frame has the angles [i f | j f], f_k = theta^(-2k / (D/2)), k = 0 .. D/4 - 1.
    Transformers' own table is [cos | cos], D wide: this is its first half.

    Args:
        grid: int64 [n, 3], a row (t, h, w) for each image or video, in patches. On the CPU it is checked and sent to
            `device` without waiting; on a device its values are never copied to the host, and checked only under
            `torch_ops.settings(checked=True)`, where an image whose height or width merge_size does not divide is
            refused by name. Else wild values give wild angles, and nothing is read or written out of bounds.
        total: the number of patches in all: rows of the tables. Rows past the last image (the padding of a CUDA graph)
            have cos 1 and sin 0; of images that go beyond, what does not fit is left out.
        dim: D, the head dimension, a multiple of 8 up to 256.
        theta: the base, at least 1.
        merge_size: rows of a frame are in blocks of merge_size x merge_size patches; 1 is raster order.
        device: where the tables are made; where grid is, if None.

    Returns:
        cos, sin: [total, D/2] in fp32. Frequencies and angles are rounded to fp32 where Transformers does so, and their
        cosines are accurate for any position. There is nothing to differentiate.

    Raises:
        ValueError: names the argument, what was wanted and what came.

    Qwen2-VL, arXiv 2409.12191, section 2.1.
    """
    if isinstance(grid, Tensor):
        where = grid.device if device is None else torch.device(device)
        grid = send_grid(
            "rotary_table", grid, where, merge_size,
            lambda grid: _check_rotary_table(grid, total, dim, theta, merge_size),
        )  # fmt: skip
    return rotary_table_op(grid, total, dim, theta, merge_size)


__all__ = ["rotary_table"]
