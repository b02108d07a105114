"""Sizes of the attention backward on Hopper, for its kernels, for configurations and for launchers.

Each number stands here alone. The form of the kernels fixes the block sizes: a wgmma has 64 rows, and two consumer
warpgroups of 64 keys share a program. `bwd_protocol` asserts what the kernels need of these numbers.
"""

# Query rows of a block, keys of a program, and warps of the two consumer warpgroups.
BLOCK_M, BLOCK_N, NUM_WARPS = 64, 128, 8
# Blocks of q that shared memory may hold, and blocks of both streamed operands in `bwd_small`.
PIPELINE_STAGES, SMALL_STAGES = (2, 3), 4
# Rows of dq that a program of `bwd_dq_finalize` rounds.
FINALIZED_ROWS = 16
# Rows of dq that one TMA request adds to the second accumulator: of its first columns, and of the others.
DQ_ACC2_ROWS = (32, 64)


def pipeline_stages(width: int) -> int:
    """Return how many blocks of q a kernel holds whose tiles have this many columns."""
    return 2 if width > 96 else 3


def kv_stages(head_dim: int) -> int:
    """Return how many tiles of keys and values shared memory has room for."""
    return 2 if head_dim <= 80 else 1


def registers(head_dim: int) -> tuple[int, int, int]:
    """Return the registers of a thread: in a consumer, in another warp, and at the launch.

    Two accumulators of 128 columns need 240. With fewer, ptxas makes every product wait for the last one.
    """
    return (232, 40, 168) if head_dim <= 96 else (240, 24, 168)
