"""The config of the kernel that appends to a KV cache, if no row was measured."""

from triton import next_power_of_2

from csrc_free_ops.configs.rows import Config, Gpu


def append_rule(gpu: Gpu, head_dim: int) -> Config:
    """An unmeasured config: a thread has eight columns of each half of a head, which are 16 bytes of a half type.

    With twice as many, the kernel for interleaved pairs needs local memory on sm_90. The interpreter gets few rows.
    """
    pairs = min(64, max(16, next_power_of_2(head_dim // 2)))
    return Config(4 if gpu.backend == "interpreter" else 512 // pairs, pairs, 2, 1)
