"""Calls of the ops on image grids on fake CUDA tensors, and what their bodies launch."""

from typing import Any

import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests.contract import SM90, KernelLaunch, fake_gpu, record_launches
from torch_ops._registry import OPS

# What torch must take each op's kernel to write.
WRITES = {
    "rotary_table": {"_rotary_table_kernel": {"cos_ptr", "sin_ptr"}},
    "pos_embed_interpolate": {"_pos_embed_fwd_kernel": {"out_ptr"}},
    "pos_embed_interpolate_backward": {"_pos_embed_bwd_kernel": {"dtable_ptr"}},
    "spatial_merge": {"_spatial_merge_fwd_kernel": {"out_ptr"}},
    "spatial_merge_backward": {"_spatial_merge_bwd_kernel": {"dx_ptr"}},
}
KERNELS: dict[str, JITFunction] = {
    kernel.fn.__name__: kernel for name in WRITES for kernel in get_triton_kernels_for_op(f"vk::{name}")
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half_pixel": {"align_corners": False},
    "raster": {"order": "raster"},
    "mean": {"mode": "mean"},
    "mean_of_raster": {"mode": "mean", "order": "raster"},
    "row_major": {"merge_size": 1},
    "fp32": {"dtype": torch.float32},
    "far_rows": {"gap": 8},
}


def grid_calls(
    rows: Any = 200, images: Any = 3, width: int = 1152, side: int = 48, head_dim: int = 72, mode: str = "concat",
    order: str = "merge_block", merge_size: int = 2, align_corners: bool = True, dtype: torch.dtype = torch.bfloat16,
    gap: int = 0,
) -> dict[str, tuple[Any, ...]]:  # fmt: skip
    """Arguments of all ops on image grids, on CUDA tensors of the fake mode in force; all rows are merged."""

    def packed(rows: Any, width: Any) -> Tensor:
        return torch.empty(rows, width + gap, device="cuda", dtype=dtype).narrow(1, 0, width)

    unit = merge_size * merge_size
    grid = torch.empty(images, 3, device="cuda", dtype=torch.int64)
    merged = packed(rows // unit, width * unit if mode == "concat" else width)
    way = (mode, order, merge_size)
    return {
        "rotary_table": (grid, rows, head_dim, 10000.0, merge_size),
        "pos_embed_interpolate": (packed(side * side, width), grid, rows, merge_size, align_corners),
        "pos_embed_interpolate_backward": (packed(rows, width), grid, side * side, merge_size, align_corners),
        "spatial_merge": (packed(rows, width), grid, rows, *way),
        "spatial_merge_backward": (merged, grid, rows, rows, *way),
    }


def grid_launches(target: GPUTarget = SM90, gpu: str = "no-such-gpu", **variant: Any) -> dict[str, KernelLaunch]:
    """By kernel name, what the bodies of all ops on image grids launch on such a GPU."""
    with fake_gpu(target, gpu) as mode, record_launches() as launches, mode:
        for name, args in grid_calls(**variant).items():
            OPS[name].body(*args)
    return {launch.name: launch for launch in launches}
