"""The order in which tiles of one segment add to blocks of the other side, where each begins at a block of its own.

Tiles that all begin at the first block, and add to it in order, wait there for each other. So a tile begins at an
earlier place of the circle of blocks, its lead: as many blocks before the end as tiles come before it in its round of
ROUND tiles, which run side by side. Of three tiles and six blocks, at each step:

    step      0   1   2   3   4   5
    tile 0    0   1   2   3   4   5
    tile 1    5*  0   1   2   3   4
    tile 2    4*  5*  0   1   2   3

What is added before a tile comes to the first block (*) goes to a second lane of sums. In each lane tiles come to a
block in their order, one step apart where there is room for all leads, and none ever waits for a later tile.

The second lane has no memory of its own. It lies where results will be, which are half as wide: of block b, in the rows
of blocks b and b - `lane_distance`. Rows of the first block are left to counters.
"""

import triton
import triton.language as tl


@triton.jit
def lane_distance(total, BLOCK: tl.constexpr):
    """In blocks, of a tensor of `total` rows."""
    return tl.maximum((total + BLOCK - 1) // BLOCK - 1, 0) // 2


@triton.jit
def limit_lead(lead, blocks, distance):
    """As far as there is memory for it: no block lends its rows twice, and the first does not."""
    return tl.maximum(tl.minimum(lead, tl.minimum(distance, blocks - 1 - distance)), 0)


@triton.jit
def lead_of(tile, blocks, distance, ROUND: tl.constexpr):
    return limit_lead(tile % ROUND, blocks, distance)


@triton.jit
def longest_lead(last, blocks, distance, ROUND: tl.constexpr):
    """Of the tiles 0 .. last: the second lane has so many blocks, the last ones."""
    return limit_lead(tl.minimum(last, ROUND - 1), blocks, distance)


@triton.jit
def block_of_step(step, lead, blocks):
    return tl.where(step < lead, blocks - lead + step, step - lead)


@triton.jit
def turn_in_lane(tile, step, lead, blocks, distance, ROUND: tl.constexpr):
    """How many tiles add to its block at this step, in its lane, before it does."""
    # The least lead that reaches the block, and the first place in a round that has it.
    reach = blocks - block_of_step(step, lead, blocks)
    first = tl.where(reach > limit_lead(ROUND, blocks, distance), ROUND, reach)
    second = tile // ROUND * (ROUND - first) + tl.maximum(tile % ROUND - first, 0)
    return tl.where(step < lead, second, tile - second)
