"""Tiles and splits of decoding's kernels where no row was measured."""

from triton import cdiv

from csrc_free_ops.configs.attention import covered_width
from csrc_free_ops.configs.rows import Gpu, Launch

# Keys of a split that does not depend on the call: a multiple of every block of keys.
INVARIANT_KEYS = 512


# Fewer keys are not worth a split of their own.
LEAST_SPLIT = 256


MOST_SPLITS = 128


def decode_splits(gpu: Gpu, launch: Launch, programs: int | None, capacity: int | None, row_bytes: int) -> int:
    """Among how many programs each of `programs` shares of a cache is split, which hold up to `capacity` keys.

    As many as there are multiprocessors for: one program, with what it has under way, reads as fast as several beside
    each other do. Where that leaves a quarter of them idle, or there are more shares than multiprocessors, the fewest
    that leave them as little idle as any number does, within a twentieth: programs come in waves of as many as shared
    memory has room for, and the last one is full or is not. A row of K and of V has `row_bytes`.

    128 shares on the 132 multiprocessors of an H200: one split of 16 x 8 x 8192 keys takes 124 us, three 128; 16 splits
    of 8 x 8192 keys 12.9 us, 48 of them 17.6. Where a trace does not know the sizes, as many as keep half of the
    multiprocessors busy with 8 shares.
    """
    if programs is None:
        return 8
    most = MOST_SPLITS if capacity is None else cdiv(capacity, max(LEAST_SPLIT, launch.block_n))
    most = max(1, min(most, MOST_SPLITS))
    # Of an empty batch as of one.
    programs = max(1, programs)
    in_one_wave = gpu.multiprocessors // programs
    if in_one_wave * programs >= 0.75 * gpu.multiprocessors:
        return min(most, in_one_wave)
    # Products of 64 rows are read from shared memory while the next stage comes in.
    stages = launch.num_stages if launch.block_m >= 64 else launch.num_stages - 1
    resident = max(1, min(8, gpu.shared_memory // (max(1, stages) * launch.block_n * row_bytes)))
    slots = gpu.multiprocessors * resident
    options = range(1, most + 1)
    used = {splits: splits * programs / (slots * cdiv(splits * programs, slots)) for splits in options}
    return next(splits for splits in options if used[splits] >= 0.95 * max(used.values()))


def decode_rule(kernel: str, gpu: Gpu, itemsize: int, head_dim: int) -> Launch:
    """Rows are the most that a tile has: of samples with a prefix ("attention_decode_shared") there are many.

    Of keys so many that 128 KiB of K and V are under way: one program on each multiprocessor of an H200 then reads
    16 x 8 x 8192 keys of 128 columns at 4.3 TB/s, three with a third of that each at 4.2. With half as many at once
    8 x 65536 keys took an H100 92.8 to 98.9 us, not 92.0, and 16 x 8 x 8192 of 64 columns 103.8, not 90.4.
    """
    if gpu.backend == "interpreter":
        return Launch(32, 16, 4, 1)
    width = covered_width(head_dim, itemsize)
    shared = kernel.endswith("_shared")
    rows = 64 if shared else 32 if width <= 128 else 16
    if itemsize == 4:
        # Products of fp32 hold whole operands in registers.
        return Launch(16, 16 if gpu.backend == "hip" or width > 128 else 32, 4, 1)
    if gpu.backend == "hip":
        return Launch(rows, 32, 4, 1)
    # Where operands lie in registers, or rows are wide, four warps spill of that many rows.
    warps = 8 if shared and (width > 128 or not 90 <= int(gpu.arch) < 120) else 4
    cols = 32 if width > 128 else 64 if shared else 128 if width > 64 else 256
    # Beside them lie q, weights and what changes its layout.
    if 2 * cols * 2 * width * itemsize + 2**14 > gpu.shared_memory:
        cols //= 2
    return Launch(rows, cols, warps, 3)
