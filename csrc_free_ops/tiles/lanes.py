"""The order in which tiles of one segment add to blocks of the other side, where each begins at a block of its own.

Tiles that all begin at the first block, and add to it in order, start one after the other. So ROUND of them that run
side by side begin so many blocks before the end, their lead, as come before them in their round; from the last block
they go on with the first. What a tile adds before that goes to a second lane of sums: in each lane tiles then come to a
block in their order, one block after each other, and none waits for a later one.

The second lane has no memory of its own. It lies where results will be, which are half as wide: of block b, in rows of
blocks b and b - `lane_distance`. The first block's rows are left alone.
"""

import triton
import triton.language as tl


@triton.jit
def lane_distance(total, BLOCK: tl.constexpr):
    """In blocks, of a tensor of `total` rows."""
    return tl.maximum((total + BLOCK - 1) // BLOCK - 1, 0) // 2


@triton.jit
def limit_lead(lead, blocks, distance):
    """As far as there is memory for it: the second lane's blocks are others than those that half of it lies in."""
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
    # Leads that reach the block; none does where that is more than there is memory for.
    reach = blocks - block_of_step(step, lead, blocks)
    least = tl.where(reach > limit_lead(ROUND, blocks, distance), ROUND, reach)
    second = tile // ROUND * (ROUND - least) + tl.maximum(tile % ROUND - least, 0)
    return tl.where(step < lead, second, tile - second)
