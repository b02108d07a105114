"""Launches and splits of the decoding kernels for which no row was measured."""

from triton import cdiv

from csrc_free_ops.configs.attention import covered_width
from csrc_free_ops.configs.rows import Config, Gpu

# Keys of a split in batch-invariant calls; a multiple of every block of keys.
INVARIANT_KEYS = 512
# Splits with fewer keys cost more than they save.
LEAST_SPLIT = 256
MOST_SPLITS = 128


def decode_splits(gpu: Gpu, config: Config, programs: int | None, capacity: int | None, row_bytes: int) -> int:
    """The number of splits for each of `programs` shares of a cache with up to `capacity` keys.

    A share is a sequence and key head; a row of K and a row of V have `row_bytes` together. The rule first takes as
    many splits as give each multiprocessor one program, because one program has enough loads in flight to reach full
    bandwidth. On an H200, 16 x 8 x 8192 keys take 124 us with one split and 128 us with three.

    If that leaves a quarter of the multiprocessors idle or shares outnumber multiprocessors, programs run in waves of
    as many as shared memory holds. The rule then takes the fewest splits whose last wave is within 5 % of the fullest
    that any number gives. If a trace does not know the sizes (None), 8 splits keep half of the multiprocessors busy
    with 8 shares.
    """
    if programs is None:
        return 8
    most = MOST_SPLITS if capacity is None else cdiv(capacity, max(LEAST_SPLIT, config.block_n))
    most = max(1, min(most, MOST_SPLITS))
    # An empty batch counts as one share.
    programs = max(1, programs)
    in_one_wave = gpu.multiprocessors // programs
    if in_one_wave * programs >= 0.75 * gpu.multiprocessors:
        return min(most, in_one_wave)
    # wgmma, with 64 rows or more, reads a stage from shared memory while the next one is loaded.
    stages = config.num_stages if config.block_m >= 64 else config.num_stages - 1
    resident = max(1, min(8, gpu.shared_memory // (max(1, stages) * config.block_n * row_bytes)))
    slots = gpu.multiprocessors * resident
    options = range(1, most + 1)
    used = {splits: splits * programs / (slots * cdiv(splits * programs, slots)) for splits in options}
    return next(splits for splits in options if used[splits] >= 0.95 * max(used.values()))


def decode_rule(kernel: str, gpu: Gpu, itemsize: int, head_dim: int) -> Config:
    """An unmeasured config. block_m is a bound: a tile has no more rows than the call.

    "attention_decode_shared" has many rows, those of all samples with one prefix. Blocks of keys are so large that 128
    KiB of K and V are in flight: one program on each multiprocessor of an H200 then reads 16 x 8 x 8192 keys of 128
    columns at 4.3 TB/s.
    """
    if gpu.backend == "interpreter":
        return Config(32, 16, 4, 1)
    width = covered_width(head_dim, itemsize)
    shared = kernel.endswith("_shared")
    rows = 64 if shared else 32 if width <= 128 else 16
    if itemsize == 4:
        # fp32 products keep whole operands in registers.
        return Config(16, 16 if gpu.backend == "hip" or width > 128 else 32, 4, 1)
    if gpu.backend == "hip":
        return Config(rows, 32, 4, 1)
    # With 64 rows four warps spill if operands lie in registers (no wgmma) or rows are wide.
    warps = 8 if shared and (width > 128 or not 90 <= int(gpu.arch) < 120) else 4
    cols = 32 if width > 128 else 64 if shared else 128 if width > 64 else 256
    # q, weights and layout conversions need 16 KiB more.
    if 2 * cols * 2 * width * itemsize + 2**14 > gpu.shared_memory:
        cols //= 2
    return Config(rows, cols, warps, 3)
