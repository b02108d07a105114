"""The config of the rotary embedding's own pass, if no row was measured."""

from csrc_free_ops.configs.rows import Config, Gpu

# With fewer rows, q and k do not fill all multiprocessors.
FEW_ROWS = 4096


def rope_rule(gpu: Gpu, rows: int | None) -> Config:
    """A config measured on an H200 with 784, 1024 and 16384 rows.

    A thread has 16 elements of each half of its heads, so that many loads are in flight. With few rows it has 8, so
    that all multiprocessors have work.
    """
    if gpu.backend == "interpreter":
        return Config(2, 64, 4, 1)
    return Config(4, 256, 4, 1) if rows is not None and rows < FEW_ROWS else Config(16, 256, 8, 1)
