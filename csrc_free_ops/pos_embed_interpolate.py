"""Learned position embeddings, resampled to image grids, and their gradient. Memory-bound.

`tiles/images.py` explains rows and images, merge-block order, and why one launch serves all images.

A table of S x S entries is resampled to each h x w frame, bilinearly and separably. Along an axis of `size` patches,
patch i lies at

    src = i (S - 1) / max(size - 1, 1)    or, for half-pixel centres,    src = (i + 1/2) S / size - 1/2

src is clamped to the table. The patch takes entry floor(src) with weight 1 - frac(src) and the next entry with
frac(src). Weights and sums are fp32, and out = sum w_i w_j table is rounded once.

The gradient is gathered without atomics. Along an axis, entry r gets a share from every i with |src(i) - r| < 1; the
first and the last entry also get one from every clamped i. These i are an interval with integer bounds. An entry's
addends from an image are therefore frames x (rows of an interval) x (columns of an interval), and their number is
known. A running sum over images finds the k-th addend by its number. A program adds BLOCK_M addends at a time to fp32
accumulators, in an order that depends on the grid alone.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.images import (
    COUNTS,
    IMAGES,
    find_bounds,
    from_merged,
    load_sizes,
    locate_rows_in_frames,
    to_merged,
)
from csrc_free_ops.tiles.rows import row_step


@triton.jit
def _source(index, size, SIDE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """src of patch `index` of an axis."""
    index = index.to(tl.float32)
    if ALIGN_CORNERS:
        src = tl.div_rn(index * (SIDE - 1), tl.maximum(size - 1, 1).to(tl.float32))
    else:
        src = tl.div_rn((index + 0.5) * SIDE, tl.maximum(size, 1).to(tl.float32)) - 0.5
    return tl.minimum(tl.maximum(src, 0.0), SIDE - 1.0)


@triton.jit
def _taps(index, size, SIDE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """(entry, next entry, weight of the next entry) of patch `index` of an axis."""
    src = _source(index, size, SIDE, ALIGN_CORNERS)
    floor = tl.floor(src)
    entry = floor.to(tl.int32)
    return entry, tl.minimum(entry + 1, SIDE - 1), src - floor


@triton.jit
def _weight(entry, index, size, SIDE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """The weight of this entry for patch `index` of an axis, bit for bit that of `_taps`."""
    return tl.maximum(1.0 - tl.abs(_source(index, size, SIDE, ALIGN_CORNERS) - entry), 0.0)


@triton.jit
def _span(entry, size, SIDE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """(first, number) of the patches of an axis that take this entry.

    The bounds are exact in integers. They agree with fp32, because rounding keeps the order of numbers, and the bounds
    themselves are fp32 numbers.
    """
    if ALIGN_CORNERS:
        # (entry - 1) (size - 1) < i (SIDE - 1) < (entry + 1) (size - 1)
        whole: tl.constexpr = SIDE - 1 if SIDE > 1 else 1
        steps = tl.maximum(size - 1, 0)
        first = tl.maximum(entry - 1, 0) * steps // whole + 1
        last = ((entry + 1) * steps + (whole - 1)) // whole - 1
        # The only patch of an axis of one patch lies at 0.
        last = tl.where(steps == 0, tl.where(entry == 0, 0, -1), last)
    else:
        # (2 entry - 1) size < (2 i + 1) SIDE < (2 entry + 3) size
        first = (tl.maximum(2 * entry - 1, 0) * size // SIDE + 1) // 2
        last = (((2 * entry + 3) * size + (SIDE - 1)) // SIDE - 2) // 2
    first = tl.where(entry == 0, 0, first)
    if not ALIGN_CORNERS or SIDE == 1:
        last = tl.where(entry == SIDE - 1, size - 1, last)
    last = tl.minimum(last, size - 1)
    return first, tl.maximum(last - first + 1, 0)


@triton.jit(do_not_specialize=(*COUNTS, "stride_t"))
def _pos_embed_fwd_kernel(
    table_ptr, grid_ptr, out_ptr, total, num_images, stride_t,
    STRIDE_T: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, MERGE: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M rows, tiles of BLOCK_N of WIDTH columns)."""
    total = tl.cast(total, tl.int32)
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, _, index, h, w = locate_rows_in_frames(
        grid_ptr, rows, tl.minimum(first + BLOCK_M, total) - 1, num_images, total
    )
    row, col = from_merged(index, w, MERGE)
    top, bottom, down = _taps(row, h, SIDE, ALIGN_CORNERS)
    left, right, over = _taps(col, w, SIDE, ALIGN_CORNERS)
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    at = table_ptr + cols[None, :]
    step = row_step(stride_t, STRIDE_T, STRIDE_UNIT)
    top = top.to(tl.int64) * SIDE
    bottom = bottom.to(tl.int64) * SIDE
    a = tl.load(at + ((top + left) * step)[:, None], mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    b = tl.load(at + ((top + right) * step)[:, None], mask=mask, other=0.0).to(tl.float32)
    c = tl.load(at + ((bottom + left) * step)[:, None], mask=mask, other=0.0).to(tl.float32)
    d = tl.load(at + ((bottom + right) * step)[:, None], mask=mask, other=0.0).to(tl.float32)
    out = a * ((1.0 - down) * (1.0 - over))[:, None] + b * ((1.0 - down) * over)[:, None]
    out += c * (down * (1.0 - over))[:, None]
    out += d * (down * over)[:, None]
    pointers = out_ptr + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=(rows < total)[:, None] & (cols < WIDTH)[None, :])


@triton.jit
def _box(
    row_entry, col_entry, h, w, frame, start, end,
    SIDE: tl.constexpr, MERGE: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
):  # fmt: skip
    """The patches of an image that take an entry of the table: (first row, rows, first column, columns, frames)."""
    first_row, num_rows = _span(row_entry, h, SIDE, ALIGN_CORNERS)
    first_col, num_cols = _span(col_entry, w, SIDE, ALIGN_CORNERS)
    # Clamp to existing rows, because the grid of a truncated image may describe a billion patches.
    rows_there = (end - start) // tl.maximum(w // MERGE * MERGE, 1) + MERGE
    cols_there = (end - start) // MERGE + MERGE
    num_rows = tl.maximum(tl.minimum(num_rows, rows_there - first_row), 0)
    num_cols = tl.maximum(tl.minimum(num_cols, cols_there - first_col), 0)
    frame = tl.maximum(frame, 1)
    return first_row, num_rows, first_col, num_cols, (end - start + frame - 1) // frame


@triton.jit
def _count(
    row_entry, col_entry, h, w, frame, start, end,
    SIDE: tl.constexpr, MERGE: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
):  # fmt: skip
    """The number of patches of an image that take an entry of the table, over all frames."""
    _, rows, _, cols, frames = _box(row_entry, col_entry, h, w, frame, start, end, SIDE, MERGE, ALIGN_CORNERS)
    return frames.to(tl.int64) * rows * cols


@triton.jit(do_not_specialize=(*COUNTS, "stride_d"))
def _pos_embed_bwd_kernel(
    dout_ptr, grid_ptr, dtable_ptr, total, num_images, stride_d,
    STRIDE_D: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, MERGE: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (entries, tiles of BLOCK_N of WIDTH columns)."""
    total = tl.cast(total, tl.int32)
    entry = tl.program_id(0)
    row_entry = entry // SIDE
    col_entry = entry % SIDE
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = row_step(stride_d, STRIDE_D, STRIDE_UNIT)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    before = 0
    index = 0
    while (index < num_images) & (before < total):
        images = index + tl.arange(0, IMAGES)
        hs, ws, frames, counts = load_sizes(grid_ptr, images, images < num_images, total)
        starts, ends = find_bounds(counts, before, total)
        addends = tl.cumsum(_count(row_entry, col_entry, hs, ws, frames, starts, ends, SIDE, MERGE, ALIGN_CORNERS), 0)
        addends = tl.minimum(addends, 2**31 - 2**15).to(tl.int32)
        count = tl.max(addends, 0)
        for base in range(0, count, BLOCK_M):
            k = base + tl.arange(0, BLOCK_M)
            passed = addends[None, :] <= k[:, None]  # [BLOCK_M, IMAGES]
            image = index + tl.sum(passed.to(tl.int32), 1)
            k -= tl.max(tl.where(passed, addends[None, :], 0), 1)
            start = tl.maximum(tl.max(tl.where(passed, ends[None, :], 0), 1), before)
            inside = image < tl.minimum(index + IMAGES, num_images)
            h, w, frame, rows = load_sizes(grid_ptr, image, inside, total)
            end = start + tl.minimum(rows, total - start)
            row, num_rows, col, num_cols, _ = _box(
                row_entry, col_entry, h, w, frame, start, end, SIDE, MERGE, ALIGN_CORNERS
            )
            num_rows = tl.maximum(num_rows, 1)
            num_cols = tl.maximum(num_cols, 1)
            col += k % num_cols
            row += k // num_cols % num_rows
            weight = _weight(row_entry, row, h, SIDE, ALIGN_CORNERS) * _weight(col_entry, col, w, SIDE, ALIGN_CORNERS)
            source = start + k // num_cols // num_rows * frame + to_merged(row, col, w, MERGE)
            taken = inside & (weight > 0) & (source >= 0) & (source < end)
            dout = tl.load(
                dout_ptr + source.to(tl.int64)[:, None] * step + cols[None, :],
                mask=taken[:, None] & (cols < WIDTH)[None, :], other=0.0,
            )  # [BLOCK_M, BLOCK_N]  # fmt: skip
            acc += tl.where(taken, weight, 0.0)[:, None] * dout.to(tl.float32)
        before = tl.max(ends, 0)
        index += IMAGES
    pointers = dtable_ptr + tl.cast(entry, tl.int64) * WIDTH + cols
    tl.store(pointers, tl.sum(acc, 0).to(dtable_ptr.dtype.element_ty), mask=cols < WIDTH)
