"""Merges of M x M patches of image grids, and their gradient. Memory-bound.

`tiles/images.py` explains rows and images, merge-block order, and why one launch serves all images.

In merge-block order, row q of the merge order is row q of x. In raster order it is the row of x at that patch. `concat`
copies M^2 such rows behind each other; `mean` is their fp32 sum over M^2. Rows that belong to no image keep their place
in either order. The gradient is gathered without atomics.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.images import (
    COUNTS,
    from_merged,
    locate_rows_in_frames,
    to_merged,
)
from csrc_free_ops.tiles.rows import row_step


@triton.jit
def _load_patch(
    x_ptr, patch: tl.constexpr, corner, below, total, cols, mask, STRIDE_X, MERGE: tl.constexpr
):  # fmt: skip
    """Patch `patch` of each block, counted row by row, [BLOCK_M, BLOCK_N]; rows of a block are `below` rows apart.

    Rows are clamped to existing ones, because a malformed grid may point anywhere.
    """
    source = corner + patch // MERGE * below + patch % MERGE
    source = tl.minimum(tl.maximum(source, 0), total - 1).to(tl.int64)
    return tl.load(x_ptr + source[:, None] * STRIDE_X + cols[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=(*COUNTS, "stride_x"))
def _spatial_merge_fwd_kernel(
    x_ptr, grid_ptr, out_ptr, total, num_images, stride_x,
    STRIDE_X: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr, MERGE: tl.constexpr, MEAN: tl.constexpr, RASTER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M blocks of MERGE x MERGE patches, tiles of BLOCK_N of WIDTH columns)."""
    PATCHES: tl.constexpr = MERGE * MERGE
    total = tl.cast(total, tl.int32)
    first = tl.program_id(0) * BLOCK_M
    blocks = first + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    corner = blocks * PATCHES
    mask = (corner < total)[:, None] & (cols < WIDTH)[None, :]
    # Default: a block is contiguous. In raster order that holds only for rows of no image.
    below = MERGE
    if RASTER:
        inside, frame, index, _, w = locate_rows_in_frames(
            grid_ptr, corner, tl.minimum((first + BLOCK_M) * PATCHES, total) - 1, num_images, total
        )
        row, col = from_merged(index, w, MERGE)
        corner = tl.where(inside, frame + row * w + col, corner)
        below = tl.where(inside, w, MERGE)
    step = row_step(stride_x, STRIDE_X, STRIDE_UNIT)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # The compiler moves no load past a store that could alias. The four patches of a 2 x 2 block are therefore all
    # loaded before the first store. Registers do not hold all patches of larger blocks, which are loaded one by one.
    AHEAD: tl.constexpr = PATCHES if PATCHES <= 4 else 1
    for begin in tl.static_range(0, PATCHES, AHEAD):
        patches = (_load_patch(x_ptr, begin, corner, below, total, cols, mask, step, MERGE),)
        for patch in tl.static_range(begin + 1, begin + AHEAD):
            patches += (_load_patch(x_ptr, patch, corner, below, total, cols, mask, step, MERGE),)
        for offset in tl.static_range(0, AHEAD):
            if MEAN:
                acc += patches[offset].to(tl.float32)
            else:
                merged = blocks.to(tl.int64) * PATCHES + (begin + offset)
                tl.store(out_ptr + merged[:, None] * WIDTH + cols[None, :], patches[offset], mask=mask)
    if MEAN:
        mean_ptr = out_ptr + blocks.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        tl.store(mean_ptr, (acc / PATCHES).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=(*COUNTS, "num_rows", "stride_d"))
def _spatial_merge_bwd_kernel(
    dout_ptr, grid_ptr, dx_ptr, total, num_images, num_rows, stride_d,
    STRIDE_D: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr, MERGE: tl.constexpr, MEAN: tl.constexpr, RASTER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M of num_rows rows of x, tiles of BLOCK_N of WIDTH columns)."""
    PATCHES: tl.constexpr = MERGE * MERGE
    total = tl.cast(total, tl.int32)
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    merged = rows
    if RASTER:
        inside, frame, index, _, w = locate_rows_in_frames(
            grid_ptr, rows, tl.minimum(first + BLOCK_M, total) - 1, num_images, total
        )
        across = tl.maximum(w, 1)
        merged = tl.where(inside, frame + to_merged(index // across, index % across, w, MERGE), rows)
        merged = tl.minimum(tl.maximum(merged, 0), total - 1)
    # dout has a row for each block; a concat has the patch's columns within that row.
    source = (merged // PATCHES).to(tl.int64) * row_step(stride_d, STRIDE_D, STRIDE_UNIT)
    if not MEAN:
        source += merged % PATCHES * WIDTH
    there = (cols < WIDTH)[None, :]
    dout = tl.load(dout_ptr + source[:, None] + cols[None, :], mask=(rows < total)[:, None] & there, other=0.0)
    if MEAN:
        dout = (dout.to(tl.float32) / PATCHES).to(dx_ptr.dtype.element_ty)
    pointers = dx_ptr + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(pointers, dout, mask=(rows < num_rows)[:, None] & there)
