"""`vk::rotary_table`: cos and sin of the two-dimensional rotary embedding of every patch of a batch of images.

Kernel and maths: `csrc_free_ops.rotary_table`.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from csrc_free_ops.rotary_table import _rotary_table_kernel
from torch_ops._core.checks import check_head_dim, check_number, integers, refuse
from torch_ops._core.launch import blocks_of
from torch_ops._core.plan import Bound, Plan, reference_plan
from torch_ops._core.planned_op import planned_op
from torch_ops._core.registry import INTERPRET, wrap_triton
from torch_ops._grids import ONE_PATH, check_grid, check_grid_values, grid_config, locate_rows, send_grid, tiles_of


class RotaryTable(NamedTuple):
    """The arguments of `vk::rotary_table`; the function below documents them."""

    grid: Tensor
    total: int
    dim: int
    theta: float = 10000.0
    merge_size: int = 2


class Tables(NamedTuple):
    """cos and sin are filled."""

    grid: Tensor
    cos: Tensor
    sin: Tensor


def _check(call: RotaryTable) -> None:
    op, theta = "rotary_table", call.theta
    check_grid(op, call.grid, call.total, call.merge_size)
    check_head_dim(op, "the tables, dim,", call.dim)
    if not 1 <= theta <= torch.finfo(torch.float32).max:
        refuse(op, "theta", "a number of at least 1 that fp32 holds", theta)


def _outputs(call: RotaryTable) -> tuple[Tensor, Tensor]:
    cos, sin = (call.grid.new_empty((call.total, call.dim // 2), dtype=torch.float32) for _ in range(2))
    return cos, sin


def _table_cpu(theta: float, merge_size: int, t: Tables) -> None:
    grid, cos, sin = t
    total, half = cos.shape
    places = locate_rows(grid, total, merge_size)
    frequencies = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=grid.device) / half))
    positions = torch.stack((places.row, places.col), 1) * places.inside[:, None]
    angles = (positions[..., None].float() * frequencies).flatten(1)
    torch.cos(angles, out=cos)
    torch.sin(angles, out=sin)


def _plan(t: Tables, call: RotaryTable) -> Plan:
    theta, merge_size = call.theta, call.merge_size
    if not (t.grid.is_cuda or INTERPRET):
        return reference_plan(partial(_table_cpu, theta, merge_size), t.grid)
    half = int(call.dim) // 2
    launch, source = grid_config("rotary_table", torch.float32, half)
    constants = {"LOG2_THETA": math.log2(theta), "HALF": half, "MERGE": int(merge_size), **blocks_of(launch)}
    tiles = tiles_of(call.total, half, launch)
    bound = Bound(wrap_triton(_rotary_table_kernel), tiles, (call.total, t.grid.shape[0]), constants)
    return Plan(lambda t: bound(t.grid.contiguous(), t.cos, t.sin), {"rotary_table": (launch, source)}, why=ONE_PATH)


rotary_table_op = planned_op(
    "rotary_table",
    RotaryTable,
    tuple[Tensor, Tensor],
    check=_check,
    outputs=_outputs,
    tensors=lambda call, made: Tables(call.grid, *made),
    plan=_plan,
    check_values=lambda call: check_grid_values("rotary_table", call.grid, call.merge_size),
)


def rotary_table(
    grid: Tensor,
    total: int,
    dim: int,
    theta: float = 10000.0,
    merge_size: int = 2,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of the rotary angles of every patch, as Qwen-VL's vision encoders use them.

    A patch at row i and column j of its frame has the angles [i f | j f], f_k = theta^(-2k / (D/2)), k = 0 .. D/4 - 1.
    Transformers' own table is [cos | cos], D wide; this one is its first half.

    Args:
        grid: int64 [n, 3], a row (t, h, w) for each image or video, in patches. A grid on the CPU is checked and sent
            to `device` without waiting. A grid on a device is never copied to the host, and is checked only under
            `torch_ops.settings(checked=True)`. The check refuses by name an image whose height or width is not a
            multiple of merge_size. Other wrong values give wrong angles, and nothing is read or written out of bounds.
        total: number of patches, the rows of the tables. Rows past the last image (the padding of a CUDA graph) have
            cos 1 and sin 0. Patches past `total` are left out.
        dim: D, the head dimension, a multiple of 8 up to 256.
        theta: base, at least 1. Default: 10000.
        merge_size: 1 to 16. Rows of a frame are in blocks of merge_size x merge_size patches; 1 is raster order.
            Default: 2.
        device: device of the tables. Default: that of grid.

    Returns:
        cos, sin: [total, D/2] in fp32. Frequencies and angles are rounded to fp32 where Transformers does so. Their
        cosines are accurate for any position. Nothing is differentiable.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    Qwen2-VL, arXiv 2409.12191, section 2.1.
    """
    total, dim, merge_size = integers("rotary_table", total=total, dim=dim, merge_size=merge_size)
    theta = check_number("rotary_table", "theta", theta)
    if isinstance(grid, Tensor):
        where = grid.device if device is None else torch.device(device)
        grid = send_grid(
            "rotary_table", grid, where, merge_size,
            lambda grid: _check(RotaryTable(grid, total, dim, theta, merge_size)),
        )  # fmt: skip
    return rotary_table_op(grid, total, dim, theta, merge_size)


__all__ = ["rotary_table"]
