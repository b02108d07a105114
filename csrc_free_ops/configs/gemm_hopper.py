"""The tiles of linear layers on Hopper.

A tile has two or three warpgroups of 64 rows, and 128 columns or whole heads; a program has one at a time, and all
programs side by side make a round. How long a round takes is measured, and how many there are follows from the sizes.

What the kernel gains is what it does behind the product. Alone, one of 784 rows by 4304 x 1152 takes it 16.4 us on an
H200 and cuBLAS, whose tile makes one round of it, 13.6; of 3136 rows 47 and 54. Left to PyTorch are products that
nothing follows, narrow ones in an encoder, and of few rows most (`too_few`, `few_for_gelu`): then most programs have
nothing to do.

Either is bound by what a processor takes in, 85 to 105 bytes a nanosecond: programs two by two that shared what they
load (clusters, multicast) were as fast, 17.0 us of 784 rows and 48 of 3136. One tile of 192 x 168 for each program, a
single round of a third fewer bytes, took 20.4 us of 784 rows with GELU, 17.1 these: nothing hides behind a last tile.
Clusters of two programs that each add up half of a long sum and trade halves through shared memory took 26.4 us of 784
rows of 1152 x 4304 on an H100, weights not in the L2 cache, and cuBLAS 24.5.
"""

import functools
import math

from csrc_free_ops.configs.rows import Launch

# How long a round of tiles takes, by their rows and columns, beside one of 192 x 128. By weights of 4304 x 1152,
# 4096 x 1024, 6912 x 1280 and 4608 x 4608 on an H200, of 784 to 25088 rows. Tiles of 192 and 256 columns were at
# best 1.3 % faster, but for 784 x 4608 (4 %), where PyTorch's product is faster than any.
ROUND = {(128, 128): 0.72, (192, 128): 1.0}
# What tiles of 64 rows take of the time of those of 128: .65 to .70, by 25088 rows.
SHORT = 0.67
# Of a tile that is rotated, at most: it holds as many whole heads as there is room for.
WIDEST_ROTATED = 240
# Units of 8 KiB that stages, a finished tile and what a slope is of share, beside one for barriers; stages that there
# are barriers for.
UNITS, MOST_STAGES = 27, 6
# Of the time of whole tiles alone, what short ones may leave of it to be worth taking.
LEAST_GAIN = 0.98
# How much of a product's rounds must be work for it to be as fast as PyTorch's and a kernel behind it: a short sum is
# over before that begins. By sums of 1152, 1280, 4608 and 5120 products, of 49 to 1764 rows, on an H200.
SHORT_SUM, LEAST_WORK = 2048, {True: 0.4, False: 0.8}

# Rounds of 192 x 128 up to which PyTorch's product that makes tanh GELU too is faster, whatever K: by 5 to 26 % of 196
# to 1176 rows of 4304 x 1152, 4096 x 1024 and 3072 x 3072 on H100s. Of 2.0 to 2.1 rounds it was 8 % faster and 10 %
# slower, of 4.2 10 % slower.
MOST_WITHIN = 1.6


def tile_launch(rows: int, columns: int, finishers: int = 4, tiles: int = 1) -> Launch:
    """The launch of a tile of this size, of as many stages as there is room for beside so many tiles.

    Warps come by four: those that multiply, and the finishing ones with the one that loads.
    """
    groups, parts = rows // 64, -(-columns // 64)
    stages = (UNITS - tiles * groups * parts) // (groups + parts)
    return Launch(rows, columns, 4 * groups + (4 if finishers == 2 else 8), min(stages, MOST_STAGES))


def finishing_warps(launch: Launch) -> int:
    return 2 if launch.num_warps - launch.block_m // 16 == 4 else 4


def linear_launch(total: int, n: int, programs: int) -> Launch:
    """The tile whose rounds take the least time."""
    return tile_launch(*min(ROUND, key=lambda tile: shared_out(tile, total, n, programs)[0]))


def gradient_launch() -> Launch:
    """What the slope is of lies beside the tile. Of 192 rows, with a stage less, tiles were at best 2 % faster on an
    H200, and slower of few rows and of short sums: 467 us of 25088 x 4096 by 1024, 441 by these."""
    return tile_launch(128, 128, tiles=2)


def whole_tiles(total: int, rows: int) -> int:
    """Tiles of rows, without a last one that may have 64 less."""
    return total // rows + (total % rows > rows - 64)


def tall_tiles(tile: tuple[int, int], total: int, n: int, programs: int) -> int:
    """How many tiles of rows are whole. The others have 64 rows less, and come last."""
    return shared_out(tile, total, n, programs)[1]


@functools.cache
def shared_out(tile: tuple[int, int], total: int, n: int, programs: int) -> tuple[float, int]:
    """The time of the best way to share out the rows, in rounds of 192 x 128, and how many of its tiles are whole."""
    rows, columns = tile
    across = -(-n // columns)

    def shared(tall: int) -> tuple[float, int]:
        rest = max(0, -(-(total - tall * rows) // (rows - 64)))
        return _time(tile, tall * across, rest * across, programs), tall

    most = whole_tiles(total, rows)
    uniform = shared(most)
    # As many whole tiles as so many rounds have room for, or are begun there.
    filling = (rounds * programs / across for rounds in range(most * across // programs + 1))
    best = min(shared(min(most, tall)) for tiles in filling for tall in (math.floor(tiles), math.ceil(tiles)))
    # Of a small gain nothing may be left.
    return best if best[0] < LEAST_GAIN * uniform[0] else uniform


def _time(tile: tuple[int, int], whole: int, short: int, programs: int) -> float:
    """Until the last program is done, of tiles that are dealt out as the kernel does (`_place`)."""
    of_whole = ROUND[tile]
    of_short = ROUND.get((tile[0] - 64, tile[1]), SHORT * of_whole)
    rounds, begun = divmod(whole, programs)
    if not begun:
        return rounds * of_whole + -(-short // programs) * of_short
    left = short - (programs - begun)
    if left <= 0:
        return (rounds + 1) * of_whole
    more, over = divmod(left, programs)
    # Of the programs that had a whole tile in the last round of them, and of those that had a short one there.
    late = of_whole + (more + (over > programs - begun)) * of_short
    early = (1 + more + (over > 0)) * of_short
    return rounds * of_whole + max(late, early)


def too_few(total: int, n: int, k: int, epilogue: str, head_dim: int, programs: int) -> bool:
    """Whether there are so few rows that PyTorch's product and a kernel behind it are faster."""
    if epilogue == "rotary":
        tile = rotary_launch(head_dim).tile
        return -(-total // tile[0]) * -(-n // tile[1]) <= programs // 2
    short = k < SHORT_SUM
    if short and epilogue == "swiglu":
        # Gates and what they gate are twice what a kernel behind the product would have to read.
        return False
    counts = {tile: -(-total // tile[0]) * -(-n // tile[1]) for tile in ROUND}
    # As measured, of whole tiles.
    takes = min(-(-count // programs) * ROUND[tile] for tile, count in counts.items())
    return total * n / (192 * 128 * programs) < LEAST_WORK[short] * takes


def few_for_gelu(total: int, n: int, programs: int) -> bool:
    """Whether there are so few rows that PyTorch's product is faster where it makes the activation too.

    Fewer than columns: nothing was measured of narrower layers.
    """
    return total <= n and total * n <= MOST_WITHIN * 192 * 128 * programs


def rotary_launch(head_dim: int) -> Launch:
    """More finishing warps would leave too few registers for more than 192 columns."""
    return tile_launch(128, WIDEST_ROTATED // head_dim * head_dim, finishers=2)
