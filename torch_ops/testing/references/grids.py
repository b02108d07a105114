"""Rotary tables, learned positions and merges, image by image; grids are read back."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import interpolate


def _frames(grid: Tensor) -> Iterator[tuple[int, int, int]]:
    """(first row, height, width) of each frame that holds anything."""
    start = 0
    for t, h, w in grid.tolist():
        for _ in range(t):
            if h * w:
                yield start, h, w
            start += h * w


def _merge_order(raster: Tensor, merge_size: int) -> Tensor:
    """[h, w, ...] as rows in merge-block order."""
    h, w = raster.shape[:2]
    blocks = raster.reshape(h // merge_size, merge_size, w // merge_size, merge_size, *raster.shape[2:])
    return blocks.transpose(1, 2).flatten(0, 3)


def _fill(rows: list[Tensor], empty: Tensor, total: int) -> Tensor:
    """The rows one after another, as many as `total`, padded by `empty`."""
    packed = torch.cat([empty[:0], *rows])[:total]
    return torch.cat([packed, empty.expand(total - packed.shape[0], *empty.shape[1:])])


def rotary_table(
    grid: Tensor, total: int, dim: int, theta: float = 10000.0, merge_size: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of `vk::rotary_table`, worked out in `dtype`; frequencies on the CPU, where models make them."""
    steps = torch.arange(0, dim // 2, 2, dtype=dtype, device="cpu")
    frequencies = (1.0 / (theta ** (steps / (dim // 2)))).to(grid.device)
    rows = []
    for _, h, w in _frames(grid):
        axes = torch.meshgrid(*(torch.arange(n, device=grid.device) for n in (h, w)), indexing="ij")
        rows.append(_merge_order(torch.stack(axes, -1), merge_size))
    positions = _fill(rows, torch.zeros(1, 2, dtype=torch.int64, device=grid.device), total)
    angles = (positions[..., None].to(dtype) * frequencies).flatten(1)
    return angles.cos(), angles.sin()


def pos_embed_interpolate(
    table: Tensor, grid: Tensor, total: int, merge_size: int = 2, align_corners: bool = True
) -> Tensor:
    """`vk::pos_embed_interpolate` by `torch.nn.functional.interpolate`, in fp32 or wider."""
    side = math.isqrt(table.shape[0])
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    square = wide.t().reshape(1, -1, side, side)
    sized: dict[tuple[int, int], Tensor] = {}
    rows = []
    for _, h, w in _frames(grid):
        if (h, w) not in sized:
            resampled = interpolate(square, (h, w), mode="bilinear", align_corners=align_corners)
            sized[h, w] = _merge_order(resampled[0].permute(1, 2, 0), merge_size)
        rows.append(sized[h, w])
    return _fill(rows, wide[:1] * 0, total).to(table.dtype)


def spatial_merge(
    x: Tensor, grid: Tensor, total: int, mode: str = "concat", order: str = "merge_block", merge_size: int = 2
) -> Tensor:
    """`vk::spatial_merge`; a mean of half types is worked out in fp32."""
    rows = x[:total]
    if order == "raster":
        frames = [
            _merge_order(rows[start : start + h * w].reshape(h, w, -1), merge_size) for start, h, w in _frames(grid)
        ]
        held = sum(frame.shape[0] for frame in frames)
        rows = torch.cat([*frames, rows[held:]])
    blocks = rows.reshape(-1, merge_size * merge_size, x.shape[1])
    if mode == "concat":
        return blocks.flatten(1).clone()
    return blocks.to(torch.promote_types(x.dtype, torch.float32)).mean(1).to(x.dtype)
