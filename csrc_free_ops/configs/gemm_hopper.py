"""Launches of GEMMs on Hopper: a model of the time that a tile takes for all of its waves.

A tile has two or three warpgroups of 64 rows each, and 128 columns or whole heads. A program computes one tile at a
time; the tiles of all programs at one time are a wave. The time of a wave is measured, and the number of waves
follows from the sizes.

The kernel gains by its epilogue, which hides behind the products. A bare product is often faster in cuBLAS: 784 rows by
4304 x 1152 take 13.6 us there and 16.4 us here (H200). PyTorch therefore gets products without an epilogue and narrow
ones in an encoder. It also gets most products with few rows (`too_few`, `few_for_gelu`), which would leave most
programs without work. docs/experiments/launches.md lists the tiles and clusters that were slower.
"""

import functools
import math

from csrc_free_ops.configs.rows import Config

# (rows, columns) of a tile, and the time of a wave of such tiles relative to 192 x 128. Measured on an H200 with
# weights of 4304 x 1152, 4096 x 1024, 6912 x 1280 and 4608 x 4608 and 784 to 25088 rows.
WAVE = {(128, 128): 0.72, (192, 128): 1.0}
# Time of a tile of 64 rows relative to one of 128: 0.65 to 0.70 with 25088 rows.
SHORT_TILE_COST = 0.67
# Most columns of a rotated tile, which holds as many whole heads as fit.
WIDEST_ROTATED = 240
# Sub-tiles of 8 KiB in shared memory, without the one for mbarriers: stages, a finished tile and a gradient's pre share
# them. Named barriers suffice for MOST_STAGES stages.
SUBTILES, MOST_STAGES = 27, 6
# Short tiles are used if the time falls below this fraction of the time with whole tiles alone.
LEAST_GAIN = 0.98
# The kernel is faster than PyTorch's product with an elementwise kernel if at least this fraction of its waves is
# work. With K < SHORT_K the fraction is lower, because the product ends before the elementwise kernel can start.
# Measured on an H200 with K of 1152, 1280, 4608 and 5120 and 49 to 1764 rows.
SHORT_K, LEAST_WORK = 2048, {True: 0.4, False: 0.8}

# Up to this number of waves of 192 x 128, PyTorch's product with a fused tanh GELU is faster for any K: by 5 to 26 %
# with 196 to 1176 rows on H100s. At 2.0 to 2.1 waves results were mixed.
MOST_WITHIN = 1.6


def tile_config(rows: int, columns: int, epilogue_warps: int = 4, tiles: int = 1) -> Config:
    """The config of a tile of this size, with as many stages as shared memory holds next to `tiles` tiles.

    Warps are counted in warpgroups: the consumers, and the epilogue warps together with the producer warp.
    """
    groups, subtiles = rows // 64, -(-columns // 64)
    stages = (SUBTILES - tiles * groups * subtiles) // (groups + subtiles)
    return Config(rows, columns, 4 * groups + (4 if epilogue_warps == 2 else 8), min(stages, MOST_STAGES))


def count_epilogue_warps(config: Config) -> int:
    """The number of epilogue warps."""
    return 2 if config.num_warps - config.block_m // 16 == 4 else 4


def linear_config(total: int, n: int, programs: int) -> Config:
    """The config of the tile whose waves take the least time in total."""
    return tile_config(*min(WAVE, key=lambda tile: shared_out(tile, total, n, programs)[0]))


def gradient_config() -> Config:
    """The config of a gradient, whose pre takes as much shared memory as the tile.

    Tiles of 192 rows would have one stage less; they were slower with few rows and with short K.
    """
    return tile_config(128, 128, tiles=2)


def whole_tiles(total: int, rows: int) -> int:
    """The number of tiles of rows that need all of their rows; a last one with 64 fewer is not counted."""
    return total // rows + (total % rows > rows - 64)


def tall_tiles(tile: tuple[int, int], total: int, n: int, programs: int) -> int:
    """The number of whole tiles of rows. The others have 64 rows fewer and come last."""
    return shared_out(tile, total, n, programs)[1]


@functools.cache
def shared_out(tile: tuple[int, int], total: int, n: int, programs: int) -> tuple[float, int]:
    """(time in waves of 192 x 128, number of whole tiles of rows) of the fastest mix of whole and short tiles."""
    rows, columns = tile
    across = -(-n // columns)

    def shared(tall: int) -> tuple[float, int]:
        short = max(0, -(-(total - tall * rows) // (rows - 64)))
        return _time(tile, tall * across, short * across, programs), tall

    most = whole_tiles(total, rows)
    uniform = shared(most)
    # For each number of waves, as many whole tiles as fill it, rounded down and up.
    filling = (waves * programs / across for waves in range(most * across // programs + 1))
    best = min(shared(min(most, tall)) for tiles in filling for tall in (math.floor(tiles), math.ceil(tiles)))
    # A smaller gain may vanish in practice.
    return best if best[0] < LEAST_GAIN * uniform[0] else uniform


def _time(tile: tuple[int, int], whole: int, short: int, programs: int) -> float:
    """The time at which the last program ends, with the tile order of the kernel's `TileScheduler`."""
    of_whole = WAVE[tile]
    of_short = WAVE.get((tile[0] - 64, tile[1]), SHORT_TILE_COST * of_whole)
    waves, started = divmod(whole, programs)
    if not started:
        return waves * of_whole + -(-short // programs) * of_short
    left = short - (programs - started)
    if left <= 0:
        return (waves + 1) * of_whole
    more, over = divmod(left, programs)
    # `late` is for programs with a whole tile in the mixed wave, `early` for those with a short one.
    late = of_whole + (more + (over > programs - started)) * of_short
    early = (1 + more + (over > 0)) * of_short
    return waves * of_whole + max(late, early)


def too_few(total: int, n: int, k: int, epilogue: str, head_dim: int, programs: int) -> bool:
    """Whether PyTorch's product and an elementwise kernel are faster, because there are too few rows."""
    if epilogue == "rotary":
        tile = rotary_config(head_dim).tile
        return -(-total // tile[0]) * -(-n // tile[1]) <= programs // 2
    short = k < SHORT_K
    if short and epilogue == "swiglu":
        # An elementwise kernel would have to read gates and values, which is twice as much.
        return False
    counts = {tile: -(-total // tile[0]) * -(-n // tile[1]) for tile in WAVE}
    # With whole tiles, as measured.
    takes = min(-(-count // programs) * WAVE[tile] for tile, count in counts.items())
    return total * n / (192 * 128 * programs) < LEAST_WORK[short] * takes


def few_for_gelu(total: int, n: int, programs: int) -> bool:
    """Whether PyTorch's product with a fused activation is faster, because there are few rows.

    Rows must not outnumber columns, because narrower layers were not measured.
    """
    return total <= n and total * n <= MOST_WITHIN * 192 * 128 * programs


def rotary_config(head_dim: int) -> Config:
    """The config of a rotated tile. Four epilogue warps would leave too few registers for more than 192 columns."""
    return tile_config(128, WIDEST_ROTATED // head_dim * head_dim, epilogue_warps=2)
