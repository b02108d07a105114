"""Merges of M x M patches of image grids, and their gradient. Memory-bound.

Rows, images, merge-block order, and one launch for all images: `tiles/images.py`.

Row q of the merged order is row q of x, or, where x is in raster order, the row at that patch; `concat` of M^2 such
rows is a copy in memory, `mean` their fp32 sum over M^2. Rows that belong to no image stay in place in either order.
Gradients are gathered too.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.images import (
    COUNTS,
    from_merged,
    place_rows_in_frames,
    to_merged,
)


@triton.jit
def _load_patch(
    x_ptr, part: tl.constexpr, corner, below, total, cols, mask, STRIDE_X: tl.constexpr, MERGE: tl.constexpr
):  # fmt: skip
    """[BLOCK_M, BLOCK_N]: patch `part`, counted row by row, of each block; its rows are `below` apart in memory.

    Clamped to rows that there are, since a wild grid may name any.
    """
    source = corner + part // MERGE * below + part % MERGE
    source = tl.minimum(tl.maximum(source, 0), total - 1).to(tl.int64)
    return tl.load(x_ptr + source[:, None] * STRIDE_X + cols[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=COUNTS)
def _spatial_merge_fwd_kernel(
    x_ptr, grid_ptr, out_ptr, total, num_images,
    STRIDE_X: tl.constexpr, WIDTH: tl.constexpr, MERGE: tl.constexpr, MEAN: tl.constexpr, RASTER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M blocks of MERGE x MERGE patches, tiles of BLOCK_N of WIDTH columns)."""
    UNIT: tl.constexpr = MERGE * MERGE
    total = tl.cast(total, tl.int32)
    first = tl.program_id(0) * BLOCK_M
    blocks = first + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    corner = blocks * UNIT
    mask = (corner < total)[:, None] & (cols < WIDTH)[None, :]
    # Blocks of rows as they lie: in merge-block order all, in raster order those of no image.
    below = MERGE
    if RASTER:
        inside, frame, index, _, w = place_rows_in_frames(
            grid_ptr, corner, tl.minimum((first + BLOCK_M) * UNIT, total) - 1, num_images, total
        )
        row, col = from_merged(index, w, MERGE)
        corner = tl.where(inside, frame + row * w + col, corner)
        below = tl.where(inside, w, MERGE)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # The compiler moves no load past a store, which could be to the same place: so all four of 2 x 2 patches are loaded
    # before any is stored. Of larger blocks the registers do not hold all, and patches come one by one.
    AHEAD: tl.constexpr = UNIT if UNIT <= 4 else 1
    for begin in tl.static_range(0, UNIT, AHEAD):
        parts = (_load_patch(x_ptr, begin, corner, below, total, cols, mask, STRIDE_X, MERGE),)
        for part in tl.static_range(begin + 1, begin + AHEAD):
            parts += (_load_patch(x_ptr, part, corner, below, total, cols, mask, STRIDE_X, MERGE),)
        for place in tl.static_range(0, AHEAD):
            if MEAN:
                acc += parts[place].to(tl.float32)
            else:
                merged = blocks.to(tl.int64) * UNIT + (begin + place)
                tl.store(out_ptr + merged[:, None] * WIDTH + cols[None, :], parts[place], mask=mask)
    if MEAN:
        mean_ptr = out_ptr + blocks.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        tl.store(mean_ptr, (acc / UNIT).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=(*COUNTS, "num_rows"))
def _spatial_merge_bwd_kernel(
    dout_ptr, grid_ptr, dx_ptr, total, num_images, num_rows,
    STRIDE_D: tl.constexpr, WIDTH: tl.constexpr, MERGE: tl.constexpr, MEAN: tl.constexpr, RASTER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M of num_rows rows of x, tiles of BLOCK_N of WIDTH columns)."""
    UNIT: tl.constexpr = MERGE * MERGE
    total = tl.cast(total, tl.int32)
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    merged = rows
    if RASTER:
        inside, frame, index, _, w = place_rows_in_frames(
            grid_ptr, rows, tl.minimum(first + BLOCK_M, total) - 1, num_images, total
        )
        across = tl.maximum(w, 1)
        merged = tl.where(inside, frame + to_merged(index // across, index % across, w, MERGE), rows)
        merged = tl.minimum(tl.maximum(merged, 0), total - 1)
    # In dout, the row of its block and, of a concat, its part of that row.
    source = (merged // UNIT).to(tl.int64) * STRIDE_D
    if not MEAN:
        source += merged % UNIT * WIDTH
    there = (cols < WIDTH)[None, :]
    dout = tl.load(dout_ptr + source[:, None] + cols[None, :], mask=(rows < total)[:, None] & there, other=0.0)
    if MEAN:
        dout = (dout.to(tl.float32) / UNIT).to(dx_ptr.dtype.element_ty)
    place = dx_ptr + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(place, dout, mask=(rows < num_rows)[:, None] & there)
