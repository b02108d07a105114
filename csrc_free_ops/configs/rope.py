"""Tiles of the rotary embedding's own pass, where no row was measured."""

from csrc_free_ops.configs.rows import Gpu, Launch

# Below, one pass over q and k is too little for all lanes of a GPU.
FEW_ROWS = 4096


def rope_rule(gpu: Gpu, rows: int | None) -> Launch:
    """Of each half of the heads a thread has 16 elements, so that many loads are under way at once; of few rows 8, so
    that all multiprocessors have some. By 784, 1024 and 16384 rows on an H200."""
    if gpu.backend == "interpreter":
        return Launch(2, 64, 4, 1)
    return Launch(4, 256, 4, 1) if rows is not None and rows < FEW_ROWS else Launch(16, 256, 8, 1)
