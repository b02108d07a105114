"""Rotary embedding over the halves of a head (Su et al., arXiv 2104.09864, with the column order of GPT-NeoX).

Column i of the first half and column i of the second half are a pair (a, b), which is rotated by the angle of its row:

    a' = a cos_i - b sin_i        b' = b cos_(i + D/2) + a sin_(i + D/2)

The tables have a cosine and a sine for each column of the head. Tables of D/2 columns have one for both of a pair.

Pairs are counted over all heads: pair f is column f % (D/2) of head f // (D/2). A tile of pairs needs no padding to a
head or a power of two: 16 heads of 72 are 576 = 9 * 64 pairs.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.blocks import load_block

# Which of q, k and v a tile of pairs belongs to; 1 is k.
OF_Q = tl.constexpr(0)
OF_V = tl.constexpr(2)


@triton.jit
def first_columns(pairs, HALF: tl.constexpr):
    """The column of each pair's first element among all heads; the second element is HALF columns further."""
    return pairs + pairs // HALF * HALF


@triton.jit
def count_tiles(NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tiles of BLOCK pairs that these heads need."""
    return (NUM_HEADS * HALF + BLOCK - 1) // BLOCK


@triton.jit
def locate_pairs(
    tile, NUM_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Locate a tile of pairs among the heads of q, k and v. Each of the three begins with a new tile.

    Returns (OF_Q, 1 for k, or OF_V; the pairs, counted over its heads; which pairs exist; the first column of q, k or v
    in the packed row).
    """
    q_tiles = count_tiles(NUM_HEADS, HALF, BLOCK)
    k_tiles = count_tiles(NUM_K_HEADS, HALF, BLOCK)
    behind_q = (tile >= q_tiles).to(tl.int32)
    behind_k = (tile >= q_tiles + k_tiles).to(tl.int32)
    tile = tile - behind_q * q_tiles - behind_k * k_tiles
    begin = 2 * HALF * (behind_q * NUM_HEADS + behind_k * NUM_K_HEADS)
    pairs = tile * BLOCK + tl.arange(0, BLOCK)
    heads = NUM_HEADS + behind_q * (NUM_K_HEADS - NUM_HEADS)
    return behind_q + behind_k, pairs, pairs < heads * HALF, begin


@triton.jit
def load_angles(table_ptr, rows, pairs, mask, STRIDE: tl.constexpr, HALF: tl.constexpr, SHARED: tl.constexpr):
    """A table's entries in fp32 for the first and the second element of each pair; with SHARED one serves both."""
    of_first = load_block(table_ptr, rows, pairs % HALF, mask, STRIDE)  # [rows, pairs]
    if SHARED:
        of_second = of_first
    else:
        of_second = load_block(table_ptr, rows, pairs % HALF + HALF, mask, STRIDE)
    return of_first, of_second


@triton.jit
def rotate(a, b, cos, sin):
    """Rotate pairs (a, b) by cos and sin of `load_angles`."""
    return a * cos[0] - b * sin[0], b * cos[1] + a * sin[1]


@triton.jit
def rotate_back(a, b, cos, sin):
    """The gradients of the inputs of `rotate` from the gradients of its results."""
    return a * cos[0] + b * sin[1], b * cos[1] - a * sin[0]
