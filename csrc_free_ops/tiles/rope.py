"""Rotary embedding over the halves of a head (Su et al., arXiv 2104.09864, in GPT-NeoX's order of columns).

Column i of the first half and column i of the second are a pair (a, b), turned by the angle of its row. The tables hold
a cosine and a sine for each column of the head, or, if they have half as many columns, one for both of a pair:

    a' = a cos_i - b sin_i        b' = b cos_(i + D/2) + a sin_(i + D/2)

Pairs are counted over heads: half-column f is column f % (D/2) of head f // (D/2). So a tile of pairs holds no column
twice and none that a head does not have, whatever D is: 16 heads of 72 are 576 = 9 * 64 pairs.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.blocks import load_block

# What a tile of pairs is of.
OF_Q = tl.constexpr(0)
OF_V = tl.constexpr(2)


@triton.jit
def first_columns(pairs, HALF: tl.constexpr):
    """Where the first of each pair stands among the columns of all heads; the second stands HALF behind it."""
    return pairs + pairs // HALF * HALF


@triton.jit
def count_tiles(NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Of BLOCK pairs each, for so many heads."""
    return (NUM_HEADS * HALF + BLOCK - 1) // BLOCK


@triton.jit
def place_pairs(
    tile, NUM_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Where a tile of pairs lies among the heads of q, of k and of v, each of which begins at a tile of its own.

    Returns OF_Q, 1 for k, or OF_V; the pairs of its heads; which of them exist; the column of all where it begins.
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
    """A table's entries in fp32 for the first and the second of each pair; SHARED: one for both."""
    of_first = load_block(table_ptr, rows, pairs % HALF, mask, STRIDE)
    if SHARED:
        of_second = of_first
    else:
        of_second = load_block(table_ptr, rows, pairs % HALF + HALF, mask, STRIDE)
    return of_first, of_second


@triton.jit
def rotate(a, b, cos, sin):
    """cos and sin as `load_angles` returns them."""
    return a * cos[0] - b * sin[0], b * cos[1] + a * sin[1]


@triton.jit
def rotate_back(a, b, cos, sin):
    """The gradients of what `rotate` took, from those of what it returned."""
    return a * cos[0] + b * sin[1], b * cos[1] - a * sin[0]
