"""The order in which tiles of one segment add to blocks of the other side, where each begins at a block of its own.

Tiles that all begin at the first block, and add to it in order, wait there for each other. So a tile begins at an
earlier place of the circle of blocks, its lead: so many blocks before the end, the more the later it comes in its round
of ROUND tiles, which run side by side. Of three tiles and six blocks, with leads 0, 1 and 2, at each step:

    step      0   1   2   3   4   5
    tile 0    0   1   2   3   4   5
    tile 1    5*  0   1   2   3   4
    tile 2    4*  5*  0   1   2   3

What is added before a tile comes to the first block (*) goes to a second lane of sums. In each lane tiles come to a
block in their order, some steps apart, and the order is one in which none waits for a later tile.

The second lane has no memory of its own. It lies where results will be, which are half as wide: of block b, in the rows
of blocks b and b - `lane_distance`. So it has half as many blocks. Leads are even within that room, and at most two
blocks apart: where a tile's turn takes longer than its step, blocks with one lane should be few.
"""

import triton
import triton.language as tl


@triton.jit
def lane_distance(total, BLOCK: tl.constexpr):
    """In blocks, of a tensor of `total` rows."""
    return (total + BLOCK - 1) // BLOCK // 2


@triton.jit
def leading_tiles(last, ROUND: tl.constexpr):
    """How many of a round have leads, where tiles 0 .. last are."""
    return tl.maximum(tl.minimum(last, ROUND - 1), 0)


@triton.jit
def longest_lead(last, blocks, distance, ROUND: tl.constexpr):
    """The second lane has so many blocks, the last ones: no block lends its rows twice."""
    room = tl.maximum(tl.minimum(distance, blocks - distance), 0)
    return tl.minimum(room, 2 * leading_tiles(last, ROUND))


@triton.jit
def lead_of(tile, last, blocks, distance, ROUND: tl.constexpr):
    leading = leading_tiles(last, ROUND)
    rounded = 2 * (tile % ROUND) * longest_lead(last, blocks, distance, ROUND) + leading
    return rounded // tl.maximum(2 * leading, 1)


@triton.jit
def block_of_step(step, lead, blocks):
    return tl.where(step < lead, blocks - lead + step, step - lead)


@triton.jit
def turn_in_lane(tile, last, step, lead, blocks, distance, ROUND: tl.constexpr):
    """How many tiles add to its block at this step, in its lane, before it does."""
    # The least lead that reaches the block, and the first place in a round that has it.
    reach = blocks - block_of_step(step, lead, blocks)
    longest = longest_lead(last, blocks, distance, ROUND)
    twice = tl.maximum(2 * longest, 1)
    first = ((2 * reach - 1) * leading_tiles(last, ROUND) + twice - 1) // twice
    first = tl.where(reach > longest, ROUND, first)
    second = tile // ROUND * (ROUND - first) + tl.maximum(tile % ROUND - first, 0)
    return tl.where(step < lead, second, tile - second)
