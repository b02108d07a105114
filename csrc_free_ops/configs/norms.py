"""Launches of the norm kernels for which no row was measured."""

import math
from dataclasses import replace

from triton import cdiv, next_power_of_2

from csrc_free_ops.configs.rows import Config, Gpu

# The widest row that registers hold without spills on any target. The backward also holds column sums.
WIDEST_NORM = {"norm_fwd": 16384, "norm_bwd": 6144}


def norm_tail(width: int, main: int) -> int:
    """The width of a row's last chunk (tiles/rows.py): `main`, or 0 if the row is a multiple of it."""
    return main if width > main and width % main else 0


def norm_kernel(kernel: str, width: int) -> str:
    """`kernel` ("norm_fwd", "norm_bwd"), or its wide form if registers cannot hold a row."""
    return kernel if width <= WIDEST_NORM[kernel] else f"{kernel}_wide"


def norm_programs(gpu: Gpu, config: Config, rows: int | None, column_sums: bool) -> int:
    """The number of programs of a norm's backward, which share the tiles of rows out.

    With `column_sums` there are as many warps as the registers of all multiprocessors hold, because each program
    stores its own sums. Without them there are about three times as many, so that programs end at about the same time.
    If `rows` is known, all programs get equally many tiles, up to the last one.
    """
    programs = gpu.multiprocessors * max(1, (_backward_warps(gpu) if column_sums else 24) // config.num_warps)
    if rows is None:
        return programs
    tiles = max(1, cdiv(rows, config.block_m))
    return cdiv(tiles, cdiv(tiles, programs))


def _backward_warps(gpu: Gpu) -> int:
    """Warps of a norm's backward that the registers of a multiprocessor hold."""
    return 8 if gpu.backend == "cuda" else 12


def parameters_early(gpu: Gpu, config: Config, rows: int | None) -> bool:
    """Whether a norm without a residual loads weight and bias together with x.

    It does if all rows run at once. The time is then that of a single row, and registers suffice for the parameters. On
    an H200 layer_norm of 784 x 1152 takes 2.0 us with early loads and 3.5 us without.
    """
    return rows is not None and cdiv(rows, config.block_m) * config.num_warps <= 24 * gpu.multiprocessors


def norm_rule(kernel: str, gpu: Gpu, itemsize: int, width: int, rows: int | None) -> Config:
    """A config measured on an H200: as few warps share a row as have registers for it.

    One warp holds up to 1280 columns, and then no warp waits for another. Threads load 16 bytes of each chunk. A
    forward program has four warps and one tile, or a single row if there are few rows. 25088 x 1152 take 29.9 us; a
    copy of these bytes takes 28.5 us. A backward program has one row at a time and prefetches the next two.
    """
    if kernel.endswith("_wide"):
        return Config(1, 4096, 8, 1)
    if kernel == "norm_bwd_sums":
        return Config(512, 16, 8, 1)
    if gpu.backend == "interpreter":
        return Config(4 if width < 1024 else 1, 256 if width < 1024 else 1024, 8, 1)
    warp_size = 64 if gpu.backend == "hip" else 32
    vector = 16 // itemsize
    # Columns of a row that a thread's registers hold. The backward holds column sums as well.
    columns = 40 if kernel == "norm_fwd" or itemsize == 2 else 24
    share = 1
    while share < 16 and width > columns * warp_size * share:
        share *= 2
    main = min(share * warp_size * vector, max(16, next_power_of_2(width)))
    tile = share * warp_size * vector // main
    if kernel == "norm_fwd":
        together = 1 if rows is not None and rows <= 16 * gpu.multiprocessors else max(1, 4 // share)
        return Config(together * tile, main, together * share, 1)
    config = Config(tile, main, share, 1)
    tiles = math.inf if rows is None else rows / tile
    if gpu.backend == "hip" or tiles <= norm_programs(gpu, config, None, True):
        return config
    # Bytes of dout, x and dsum that one stage loads.
    in_flight = 3 * (cdiv(width, main) * main) * tile * itemsize
    stages = max(1, min(3, gpu.shared_memory // max(1, _backward_warps(gpu) // share) // in_flight))
    return replace(config, num_stages=stages)
