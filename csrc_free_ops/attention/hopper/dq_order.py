"""The order in which tiles of keys add to blocks of dq, if each tile starts at a block of its own.

If all tiles started at the first block and added in order, they would wait for each other there. So a tile starts
start_block blocks before the end and wraps around. start_block is the tile's index within its wave, of up to WAVE tiles
that run concurrently. For three tiles and six blocks:

    step      0   1   2   3   4   5
    tile 0    0   1   2   3   4   5
    tile 1    5*  0   1   2   3   4
    tile 2    4*  5*  0   1   2   3

What a tile adds before it comes to the first block (*) goes to a second accumulator. In each accumulator tiles come to
a block in the order of their indices, one step apart if all start blocks fit, and no tile waits for a later one.

The second accumulator has no memory of its own. It lies in the memory of dq, which is half as wide: block b takes the
rows of blocks b and b - `acc2_distance`. The rows of the first block are left to the semaphores.
"""

import triton
import triton.language as tl


@triton.jit
def acc2_distance(total, BLOCK: tl.constexpr):
    """Distance in blocks, for a tensor of `total` rows."""
    return tl.maximum((total + BLOCK - 1) // BLOCK - 1, 0) // 2


@triton.jit
def limit_start(start_block, blocks, distance):
    """start_block as far as there is memory: no block lends its rows twice, and the first block lends none."""
    return tl.maximum(tl.minimum(start_block, tl.minimum(distance, blocks - 1 - distance)), 0)


@triton.jit
def start_block_of(tile, blocks, distance, WAVE: tl.constexpr):
    return limit_start(tile % WAVE, blocks, distance)


@triton.jit
def acc2_blocks(last, blocks, distance, WAVE: tl.constexpr):
    """Blocks of the second accumulator for tiles 0 .. last: the last ones."""
    return limit_start(tl.minimum(last, WAVE - 1), blocks, distance)


@triton.jit
def block_of_step(step, start_block, blocks):
    return tl.where(step < start_block, blocks - start_block + step, step - start_block)


@triton.jit
def semaphore_value(tile, step, start_block, blocks, distance, WAVE: tl.constexpr):
    """How many tiles add to this step's block, in the same accumulator, before this tile."""
    # The smallest start_block that reaches the block, and the first tile of a wave that has it.
    reach = blocks - block_of_step(step, start_block, blocks)
    first = tl.where(reach > limit_start(WAVE, blocks, distance), WAVE, reach)
    in_acc2 = tile // WAVE * (WAVE - first) + tl.maximum(tile % WAVE - first, 0)
    return tl.where(step < start_block, in_acc2, tile - in_acc2)
