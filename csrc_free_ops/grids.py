"""What vision encoders work out from image grids: rotary tables, learned positions, 2 x 2 merges. Memory-bound.

Rows, images and merge-block order: `tiles/images.py`. One launch serves all images: programs take fixed tiles of output
rows, so the addresses they write depend on their number alone, and find the image of each row by themselves.

Rotary table (Qwen2-VL, arXiv 2409.12191, section 2.1; `rotary_pos_emb` of Transformers): the patch at (i, j) has

    cos, sin of [i f_0 .. i f_(D/4-1) | j f_0 .. j f_(D/4-1)],    f_k = 1 / theta^(2k / (D/2))

with powers, reciprocals and angles rounded to fp32 where Transformers rounds them. Each is worked out in fp64 before,
and so is the angle's remainder by pi/2, exactly enough for any position that fp32 holds; polynomials in fp32 then give
both (S. L. Moshier, Cephes, sinf.c). The device functions that Triton's sin and cos call would take local memory.

Learned positions: a table of S x S entries is resampled to each h x w frame, bilinearly and separably. Along an axis of
`size` patches, patch i lies at

    src = i (S - 1) / max(size - 1, 1)    or, of half-pixel centres,    src = (i + 1/2) S / size - 1/2

and takes entry floor(src) by 1 - frac(src) and the next by frac(src), once src is clamped to the table. With weights
and sums in fp32, out = sum w_i w_j table, rounded once.

Its gradient is gathered. Entry r gets something along an axis from those i for which |src(i) - r| < 1 (the first and
the last also from all that were clamped to them), which is an interval of i with bounds in integers. So an entry's
addends from an image are frames x (rows of an interval) x (columns of an interval), their number is known, and with a
running sum over images the k-th addend of all is found by its number: BLOCK_M of them are added at a time, into fp32
accumulators that are summed at the end. No atomics, and the order depends on the grid alone.

Merge: row q of the merged order is row q of x, or, where x is in raster order, the row at that patch; `concat` of M^2
such rows is a copy in memory, `mean` their fp32 sum over M^2. Rows that belong to no image stay in place in either
order. Gradients are gathered too.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.images import (
    IMAGES,
    find_bounds,
    from_merged,
    load_sizes,
    place_rows_in_frames,
    to_merged,
)

# Sizes that only count: for those of another divisibility Triton would build the same code again.
COUNTS = ("total", "num_images", "num_rows")


@triton.jit
def _cos_sin(angle):
    """cos and sin of fp32 angles, each within about an ulp."""
    exact = angle.to(tl.float64)
    turns = tl.floor(exact * tl.full((), 0.6366197723675814, tl.float64) + tl.full((), 0.5, tl.float64))
    rest = (exact - turns * tl.full((), 1.5707963267948966, tl.float64)).to(tl.float32)
    quadrant = turns.to(tl.int64) & 3
    square = rest * rest
    sin = ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1) * square * rest + rest
    cos = ((2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2) * square * square
    cos = cos - 0.5 * square + 1.0
    swapped = (quadrant & 1) == 1
    cosine = tl.where(swapped, sin, cos)
    sine = tl.where(swapped, cos, sin)
    cosine = tl.where((quadrant == 1) | (quadrant == 2), -cosine, cosine)
    return cosine, tl.where(quadrant >= 2, -sine, sine)


@triton.jit(do_not_specialize=COUNTS)
def _rotary_table_kernel(
    grid_ptr, cos_ptr, sin_ptr, total, num_images,
    LOG2_THETA: tl.constexpr, HALF: tl.constexpr, MERGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M rows, tiles of BLOCK_N of HALF = D/2 columns)."""
    total = tl.cast(total, tl.int32)
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, _, index, _, w = place_rows_in_frames(
        grid_ptr, rows, tl.minimum(first + BLOCK_M, total) - 1, num_images, total
    )
    row, col = from_merged(index, w, MERGE)
    vertical = cols < HALF // 2
    exponent = (2 * tl.where(vertical, cols, cols - HALF // 2)).to(tl.float64) / tl.full((), HALF, tl.float64)
    power = tl.exp2(exponent.to(tl.float32).to(tl.float64) * tl.full((), LOG2_THETA, tl.float64)).to(tl.float32)
    frequency = (tl.full((), 1.0, tl.float64) / power.to(tl.float64)).to(tl.float32)
    position = tl.where(vertical[None, :], row[:, None], col[:, None])
    position = tl.where(inside[:, None], position, 0)
    cos, sin = _cos_sin(position.to(tl.float32) * frequency[None, :])  # [BLOCK_M, BLOCK_N]
    at = rows.to(tl.int64)[:, None] * HALF + cols[None, :]
    mask = (rows < total)[:, None] & (cols < HALF)[None, :]
    tl.store(cos_ptr + at, cos, mask=mask)
    tl.store(sin_ptr + at, sin, mask=mask)


@triton.jit
def _source(index, size, SIDE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """Where patch `index` of an axis lies among the entries."""
    index = index.to(tl.float32)
    if ALIGN_CORNERS:
        src = tl.div_rn(index * (SIDE - 1), tl.maximum(size - 1, 1).to(tl.float32))
    else:
        src = tl.div_rn((index + 0.5) * SIDE, tl.maximum(size, 1).to(tl.float32)) - 0.5
    return tl.minimum(tl.maximum(src, 0.0), SIDE - 1.0)


@triton.jit
def _taps(index, size, SIDE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """(entry, next entry, weight of the next) that patch `index` of an axis takes."""
    src = _source(index, size, SIDE, ALIGN_CORNERS)
    floor = tl.floor(src)
    entry = floor.to(tl.int32)
    return entry, tl.minimum(entry + 1, SIDE - 1), src - floor


@triton.jit
def _weight(entry, index, size, SIDE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """By how much patch `index` of an axis takes this entry; to the bit what `_taps` says."""
    return tl.maximum(1.0 - tl.abs(_source(index, size, SIDE, ALIGN_CORNERS) - entry), 0.0)


@triton.jit
def _span(entry, size, SIDE: tl.constexpr, ALIGN_CORNERS: tl.constexpr):
    """(first, number) of the patches of an axis that take this entry.

    Exact in integers, and in fp32 too: rounding keeps order, and the bounds are numbers that it does not change.
    """
    if ALIGN_CORNERS:
        # (entry - 1) (size - 1) < i (SIDE - 1) < (entry + 1) (size - 1)
        whole: tl.constexpr = SIDE - 1 if SIDE > 1 else 1
        steps = tl.maximum(size - 1, 0)
        first = tl.maximum(entry - 1, 0) * steps // whole + 1
        last = ((entry + 1) * steps + (whole - 1)) // whole - 1
        # All of an axis of one patch lies at 0.
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


@triton.jit(do_not_specialize=COUNTS)
def _pos_embed_fwd_kernel(
    table_ptr, grid_ptr, out_ptr, total, num_images,
    STRIDE_T: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr, MERGE: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BLOCK_M rows, tiles of BLOCK_N of WIDTH columns)."""
    total = tl.cast(total, tl.int32)
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, _, index, h, w = place_rows_in_frames(
        grid_ptr, rows, tl.minimum(first + BLOCK_M, total) - 1, num_images, total
    )
    row, col = from_merged(index, w, MERGE)
    top, bottom, down = _taps(row, h, SIDE, ALIGN_CORNERS)
    left, right, over = _taps(col, w, SIDE, ALIGN_CORNERS)
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    at = table_ptr + cols[None, :]
    top = top.to(tl.int64) * SIDE
    bottom = bottom.to(tl.int64) * SIDE
    a = tl.load(at + ((top + left) * STRIDE_T)[:, None], mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    b = tl.load(at + ((top + right) * STRIDE_T)[:, None], mask=mask, other=0.0).to(tl.float32)
    c = tl.load(at + ((bottom + left) * STRIDE_T)[:, None], mask=mask, other=0.0).to(tl.float32)
    d = tl.load(at + ((bottom + right) * STRIDE_T)[:, None], mask=mask, other=0.0).to(tl.float32)
    out = a * ((1.0 - down) * (1.0 - over))[:, None] + b * ((1.0 - down) * over)[:, None]
    out += c * (down * (1.0 - over))[:, None]
    out += d * (down * over)[:, None]
    place = out_ptr + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=(rows < total)[:, None] & (cols < WIDTH)[None, :])


@triton.jit
def _box(
    row_entry, col_entry, h, w, frame, start, end,
    SIDE: tl.constexpr, MERGE: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
):  # fmt: skip
    """Which patches of an image take an entry of the table: (first row, rows, first column, columns, frames)."""
    first_row, num_rows = _span(row_entry, h, SIDE, ALIGN_CORNERS)
    first_col, num_cols = _span(col_entry, w, SIDE, ALIGN_CORNERS)
    # Of an image that is cut off, what is not there is not looked at: it may be a billion patches.
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
    """How many patches of an image take an entry of the table, over all frames."""
    _, rows, _, cols, frames = _box(row_entry, col_entry, h, w, frame, start, end, SIDE, MERGE, ALIGN_CORNERS)
    return frames.to(tl.int64) * rows * cols


@triton.jit(do_not_specialize=COUNTS)
def _pos_embed_bwd_kernel(
    dout_ptr, grid_ptr, dtable_ptr, total, num_images,
    STRIDE_D: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr, MERGE: tl.constexpr, ALIGN_CORNERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (entries, tiles of BLOCK_N of WIDTH columns)."""
    total = tl.cast(total, tl.int32)
    entry = tl.program_id(0)
    row_entry = entry // SIDE
    col_entry = entry % SIDE
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
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
                dout_ptr + source.to(tl.int64)[:, None] * STRIDE_D + cols[None, :],
                mask=taken[:, None] & (cols < WIDTH)[None, :], other=0.0,
            )  # [BLOCK_M, BLOCK_N]  # fmt: skip
            acc += tl.where(taken, weight, 0.0)[:, None] * dout.to(tl.float32)
        before = tl.max(ends, 0)
        index += IMAGES
    place = dtable_ptr + tl.cast(entry, tl.int64) * WIDTH + cols
    tl.store(place, tl.sum(acc, 0).to(dtable_ptr.dtype.element_ty), mask=cols < WIDTH)


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
    below = MERGE
    if RASTER:
        inside, frame, index, _, w = place_rows_in_frames(
            grid_ptr, corner, tl.minimum((first + BLOCK_M) * UNIT, total) - 1, num_images, total
        )
        row, col = from_merged(index, w, MERGE)
        corner = tl.where(inside, frame + row * w + col, corner)
        below = tl.where(inside, w, MERGE)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in tl.static_range(UNIT):
        source = corner + part // MERGE * below + part % MERGE
        source = tl.minimum(tl.maximum(source, 0), total - 1).to(tl.int64)
        x = tl.load(x_ptr + source[:, None] * STRIDE_X + cols[None, :], mask=mask, other=0.0)  # [BLOCK_M, BLOCK_N]
        if MEAN:
            acc += x.to(tl.float32)
        else:
            merged = blocks.to(tl.int64) * UNIT + part
            tl.store(out_ptr + merged[:, None] * WIDTH + cols[None, :], x, mask=mask)
    if MEAN:
        place = out_ptr + blocks.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        tl.store(place, (acc / UNIT).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
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
    source = (merged // UNIT).to(tl.int64) * STRIDE_D
    if not MEAN:
        source += merged % UNIT * WIDTH
    there = (cols < WIDTH)[None, :]
    dout = tl.load(dout_ptr + source[:, None] + cols[None, :], mask=(rows < total)[:, None] & there, other=0.0)
    if MEAN:
        dout = (dout.to(tl.float32) / UNIT).to(dx_ptr.dtype.element_ty)
    place = dx_ptr + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(place, dout, mask=(rows < num_rows)[:, None] & there)
