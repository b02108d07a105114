"""Rotary tables of image grids: cos and sin of the angles of every patch of a batch. Memory-bound.

`tiles/images.py` explains rows and images, merge-block order, and why one launch serves all images.

The patch at (i, j) (Qwen2-VL, arXiv 2409.12191, section 2.1; `rotary_pos_emb` of Transformers) has

    cos, sin of [i f_0 .. i f_(D/4-1) | j f_0 .. j f_(D/4-1)],    f_k = 1 / theta^(2k / (D/2))

Powers, reciprocals and angles are computed in fp64 and rounded to fp32 where Transformers rounds them. The angle's
remainder by pi/2 is fp64 too, which is exact enough for any position that fp32 holds. fp32 polynomials then give cos
and sin (S. L. Moshier, Cephes, sinf.c). The device functions behind Triton's sin and cos would need local memory.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.images import COUNTS, from_merged, locate_rows_in_frames


@triton.jit
def _cos_sin(angle):
    """(cos, sin) of fp32 angles, each within about one unit in the last place."""
    exact = angle.to(tl.float64)
    quarters = tl.floor(exact * tl.full((), 0.6366197723675814, tl.float64) + tl.full((), 0.5, tl.float64))
    remainder = (exact - quarters * tl.full((), 1.5707963267948966, tl.float64)).to(tl.float32)
    quadrant = quarters.to(tl.int64) & 3
    square = remainder * remainder
    sin = ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1) * square * remainder + remainder
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
    inside, _, index, _, w = locate_rows_in_frames(
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
