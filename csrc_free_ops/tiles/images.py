"""From a row of a packed sequence of images to its position in its image, with grids known only on the device.

Image (or video) s has a grid (t, h, w): t frames of h x w patches, one row for each patch, frame after frame and image
after image. Rows of a frame are in merge-block order: blocks of MERGE x MERGE patches in raster order, and within a
block its patches in raster order. MERGE = 1 is raster order.

Rows past the last image belong to none. The rows of a frame and of an image are clamped to `total`, the number of rows,
so that malformed grids cannot overflow 32 bits. Kernels also clamp an address that depends on a grid.

One launch serves all images: a program has a fixed tile of output rows, so the addresses that it writes depend on its
number alone.
"""

import triton
import triton.language as tl

# Images whose sizes a program loads at once.
IMAGES = tl.constexpr(128)
# Bound of an image's height and width.
LONGEST_SIDE = tl.constexpr(2**20)
# Not specialized: Triton would build the same code again for sizes of another divisibility.
COUNTS = ("total", "num_images")


@triton.jit
def load_sizes(grid_ptr, images, inside, total):
    """(height, width, rows of a frame, rows of all frames) of images; all are 0 where not `inside`."""
    at = grid_ptr + images.to(tl.int64) * 3
    t = tl.load(at, mask=inside, other=0)
    h = tl.load(at + 1, mask=inside, other=0)
    w = tl.load(at + 2, mask=inside, other=0)
    most = tl.cast(total, tl.int64)
    h = tl.minimum(tl.maximum(h, 0), LONGEST_SIDE)
    w = tl.minimum(tl.maximum(w, 0), LONGEST_SIDE)
    frame = tl.minimum(h * w, most)
    count = tl.minimum(frame * tl.minimum(tl.maximum(t, 0), most), most)
    return h.to(tl.int32), w.to(tl.int32), frame.to(tl.int32), count.to(tl.int32)


@triton.jit
def find_bounds(counts, before, total):
    """(first rows, ends) of images with `counts` rows, at most `total`; the first image begins at row `before`."""
    ends = before + tl.cumsum(counts.to(tl.int64), 0)
    most = tl.cast(total, tl.int64)
    return tl.minimum(ends - counts, most).to(tl.int32), tl.minimum(ends, most).to(tl.int32)


@triton.jit
def find_images(grid_ptr, rows, last, num_images, total):
    """(image, its first row) of each of `rows`, up to row `last`; image num_images means that a row has none.

    A row's image is the number of images that end at or before it, including empty ones. Images are loaded IMAGES at a
    time, up to the one that holds row `last`.
    """
    image = tl.zeros_like(rows)
    start = tl.zeros_like(rows)
    before = 0
    index = 0
    while (index < num_images) & (before <= last):
        images = index + tl.arange(0, IMAGES)
        _, _, _, counts = load_sizes(grid_ptr, images, images < num_images, total)
        _, ends = find_bounds(counts, before, total)
        passed = (ends[None, :] <= rows[:, None]) & (images < num_images)[None, :]  # [rows, IMAGES]
        image += tl.sum(passed.to(tl.int32), 1)
        start = tl.maximum(start, tl.max(tl.where(passed, ends[None, :], 0), 1))
        before = tl.max(ends, 0)
        index += IMAGES
    return image, start


@triton.jit
def from_merged(index, w, MERGE: tl.constexpr):
    """(row, column) of the index-th patch in merge-block order, in a frame of width w."""
    across = tl.maximum(w // MERGE, 1)
    block = index // (MERGE * MERGE)
    row = block // across * MERGE + index // MERGE % MERGE
    return row, block % across * MERGE + index % MERGE


@triton.jit
def to_merged(row, col, w, MERGE: tl.constexpr):
    """The inverse of `from_merged`."""
    block = row // MERGE * tl.maximum(w // MERGE, 1) + col // MERGE
    return block * (MERGE * MERGE) + row % MERGE * MERGE + col % MERGE


@triton.jit
def locate_rows_in_frames(grid_ptr, rows, last, num_images, total):
    """(whether it belongs to an image, first row of its frame, its index in the frame, h, w) for each row."""
    image, start = find_images(grid_ptr, rows, last, num_images, total)
    inside = (image < num_images) & (rows < total)
    h, w, frame, _ = load_sizes(grid_ptr, image, inside, total)
    index = (rows - start) % tl.maximum(frame, 1)
    return inside, rows - index, index, h, w
