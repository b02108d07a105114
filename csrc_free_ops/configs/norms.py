"""Tiles of the norms' kernels where no row was measured."""

import math
from dataclasses import replace

from triton import cdiv, next_power_of_2

from csrc_free_ops.configs.rows import Gpu, Launch

# Columns of a norm's row that registers hold without a spill on any target; the backward has sums of columns beside it.
WIDEST_NORM = {"norm_fwd": 16384, "norm_bwd": 6144}


def norm_tail(width: int, main: int) -> int:
    """The last part of a norm's row, which is as wide as those before it or not there (tiles/rows.py)."""
    return main if width > main and width % main else 0


def norm_kernel(kernel: str, width: int) -> str:
    """`kernel` ("norm_fwd", "norm_bwd"), or the one that passes over rows that are too wide for registers."""
    return kernel if width <= WIDEST_NORM[kernel] else f"{kernel}_wide"


def norm_programs(gpu: Gpu, launch: Launch, rows: int | None, sums: bool) -> int:
    """Programs of a norm's backward, which take tiles of rows in turn: equally many, where the number of rows is known.

    Where each sums columns of its own, as many warps for each multiprocessor as its registers hold; else three times
    as many, which evens out their ends.
    """
    programs = gpu.multiprocessors * max(1, (_backward_warps(gpu) if sums else 24) // launch.num_warps)
    if rows is None:
        return programs
    tiles = max(1, cdiv(rows, launch.block_m))
    return cdiv(tiles, cdiv(tiles, programs))


def _backward_warps(gpu: Gpu) -> int:
    """That a multiprocessor's registers hold of a norm's backward."""
    return 8 if gpu.backend == "cuda" else 12


def parameters_early(gpu: Gpu, launch: Launch, rows: int | None) -> bool:
    """Whether weight and bias of a norm without a residual come while x does: where there are not more rows than
    multiprocessors hold at once, registers do, and one row's time is what counts.

    layer_norm of 784 x 1152 takes 2.0 us so on an H200, 3.5 otherwise; of 4096 x 1152 5.6, and 4.3 otherwise.
    """
    return rows is not None and cdiv(rows, launch.block_m) * launch.num_warps <= 24 * gpu.multiprocessors


def norm_rule(kernel: str, gpu: Gpu, itemsize: int, width: int, rows: int | None) -> Launch:
    """As few warps share a row as have registers for it: up to 1280 columns that is one, and no warp waits for another.
    Threads load 16 bytes of each part. Forward, a program has four warps and one tile, of a single row and the warps
    that share it where rows are few: 25088 x 1152 take 29.9 us on an H200, where a copy of the same bytes takes 28.5,
    and programs of one warp 33. Backward, a program has one row at a time, and the next two are on their way."""
    if kernel.endswith("_wide"):
        return Launch(1, 4096, 8, 1)
    if kernel == "norm_bwd_sums":
        return Launch(512, 16, 8, 1)
    if gpu.backend == "interpreter":
        return Launch(4 if width < 1024 else 1, 256 if width < 1024 else 1024, 8, 1)
    lanes = 64 if gpu.backend == "hip" else 32
    vector = 16 // itemsize
    # Of each row a thread's registers hold so many columns; in the backward sums of them as well.
    columns = 40 if kernel == "norm_fwd" or itemsize == 2 else 24
    share = 1
    while share < 16 and width > columns * lanes * share:
        share *= 2
    main = min(share * lanes * vector, max(16, next_power_of_2(width)))
    tile = share * lanes * vector // main
    if kernel == "norm_fwd":
        together = 1 if rows is not None and rows <= 16 * gpu.multiprocessors else max(1, 4 // share)
        return Launch(together * tile, main, together * share, 1)
    launch = Launch(tile, main, share, 1)
    tiles = math.inf if rows is None else rows / tile
    if gpu.backend == "hip" or tiles <= norm_programs(gpu, launch, None, True):
        return launch
    # What comes in: dout, x and dsum.
    in_flight = 3 * (cdiv(width, main) * main) * tile * itemsize
    stages = max(1, min(3, gpu.shared_memory // max(1, _backward_warps(gpu) // share) // in_flight))
    return replace(launch, num_stages=stages)
