"""Tiles of the kernel that appends to a cache of keys and values, where no row was measured."""

from triton import next_power_of_2

from csrc_free_ops.configs.rows import Gpu, Launch


def append_rule(gpu: Gpu, head_dim: int) -> Launch:
    """A thread has eight of each half of a head's columns, 16 bytes of a half type; the interpreter few rows.

    Twice as large, programs that take neighbours for pairs have a stack on sm_90.
    """
    pairs = min(64, max(16, next_power_of_2(head_dim // 2)))
    return Launch(4 if gpu.backend == "interpreter" else 512 // pairs, pairs, 2, 1)
