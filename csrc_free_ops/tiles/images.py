"""From a row of a packed sequence of images to its place in its image, with grids known only on the device.

Image (or video) s has a grid (t, h, w): t frames of h x w patches, one row each, frame after frame, image after image.
Within a frame rows are in merge-block order: MERGE x MERGE blocks in raster order, and in raster order the patches of
each (block row, block column, row in it, column in it). MERGE = 1 is raster order.

Rows past the last image belong to none. Sizes are clamped, a frame's rows and an image's to `total`, the rows that
there are, so that wild ones do not overflow 32 bits; where a row's address comes from them, kernels clamp it too.

Kernels that find their rows' images here serve all images in one launch: programs take fixed tiles of output rows, so
the addresses they write depend on their number alone.
"""

import triton
import triton.language as tl

# Images whose sizes a program looks at in one step.
IMAGES = tl.constexpr(128)
# No image is higher or wider.
LONGEST_SIDE = tl.constexpr(2**20)
# Sizes that only count: for those of another divisibility Triton would build the same code again.
COUNTS = ("total", "num_images")


@triton.jit
def load_sizes(grid_ptr, images, inside, total):
    """(height, width, rows of a frame, rows of all its frames) of images; those that are not `inside` hold nothing."""
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
    """First rows of images of so many rows, and where they end; the first begins at row `before`, none past `total`."""
    ends = before + tl.cumsum(counts.to(tl.int64), 0)
    most = tl.cast(total, tl.int64)
    return tl.minimum(ends - counts, most).to(tl.int32), tl.minimum(ends, most).to(tl.int32)


@triton.jit
def find_images(grid_ptr, rows, last, num_images, total):
    """(image, its first row) of each of `rows`, none of which is past row `last`; image num_images is none.

    Images are looked over in steps of IMAGES, up to the one that holds row `last`. An image of a row is the number of
    images that end before it, empty ones among them.
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
    """(row, column) in a frame of width w of the index-th patch in merge-block order."""
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
def place_rows_in_frames(grid_ptr, rows, last, num_images, total):
    """(whether it belongs to an image, its frame's first row, its index in the frame, h, w) of each row."""
    image, start = find_images(grid_ptr, rows, last, num_images, total)
    inside = (image < num_images) & (rows < total)
    h, w, frame, _ = load_sizes(grid_ptr, image, inside, total)
    index = (rows - start) % tl.maximum(frame, 1)
    return inside, rows - index, index, h, w
