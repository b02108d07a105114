"""Tiles of the attention forward on Hopper: every choice that needs sizes alone, for the rule and for launchers.

A tile is one edit: block_m, block_n and stages of a head dimension stand in HEAD_DIMS, or in the measured rows of a
GPU. Registers, overlap and descriptors follow from them. The kernels assert in words what a tile needs
(`attention.hopper.fwd_config`).
"""

import math
from dataclasses import dataclass

from csrc_free_ops.configs.rows import Config


def _config(block_m: int, block_n: int, stages: int) -> Config:
    """A tile of block_m query rows; each consumer warpgroup has 64 of them."""
    return Config(block_m, block_n, block_m // 16, stages)


@dataclass(frozen=True)
class ForwardTiles:
    """What the forward takes at one head dimension."""

    # Columns of the tiles of q, k and out (main, and the tail's or 16) and of v's tiles.
    main: int
    tail: int
    v_columns: int
    # Launches without masks, with masks, and for fp32 inputs, whose cast stages leave room for fewer keys.
    unmasked: Config
    masked: Config
    fp32: Config
    # Whether scores and weights of a block fit the registers at once beside those of two more warpgroups.
    overlaps_tall: bool
    # For one segment in tiles of 128 rows: keys of a block and stages, where they differ from the tall tile's.
    low_block_n: int | None = None
    low_stages: int | None = None
    # Time of a wave of tiles of 1, 2 and 3 warpgroups, relative to 2. Measured with 2048 and 16 x 1024 rows on an H200.
    wave_times: tuple[float, float, float] = (0.8, 1.0, 1.35)


# Consumers share K and V, so the tallest tile is best. A third consumer leaves no registers for masks or wider heads.
HEAD_DIMS = {
    64: ForwardTiles(64, 16, 64, _config(192, 128, 3), _config(128, 128, 3), _config(128, 128, 3), True,
                     low_stages=3, wave_times=(0.5, 1.0, 1.2)),
    72: ForwardTiles(64, 16, 16, _config(192, 128, 3), _config(128, 128, 3), _config(128, 64, 3), True,
                     low_block_n=64, low_stages=3),
    80: ForwardTiles(64, 16, 16, _config(192, 128, 3), _config(128, 128, 3), _config(128, 64, 3), False, low_stages=3),
    96: ForwardTiles(64, 32, 32, _config(192, 128, 2), _config(128, 128, 2), _config(128, 64, 2), False),
    128: ForwardTiles(128, 16, 64, _config(128, 128, 2), _config(128, 128, 2), _config(128, 64, 3), False),
}  # fmt: skip
# Registers of a thread by consumer warpgroups and overlap: in a consumer, in the producer, and at the launch.
_REGISTERS = {(2, True): (232, 40, 168), (3, True): (160, 32, 128), (3, False): (152, 56, 128)}
# With fp32 inputs the cast warps need more registers than a producer.
_FP32_REGISTERS = (224, 56, 168)


def forward_rule(width: int, masked: bool) -> Config:
    """The config of tiles that are `width` columns wide, where no row was measured."""
    tiles = HEAD_DIMS[min((each for each in HEAD_DIMS if each >= width), default=max(HEAD_DIMS))]
    return tiles.masked if masked else tiles.unmasked


def overlaps(config: Config, head_dim: int) -> bool:
    """Whether a block's q k^T runs beside the last block's p v (OVERLAP of the kernel)."""
    return config.block_m == 128 or HEAD_DIMS[head_dim].overlaps_tall


def registers(config: Config, head_dim: int, fp32: bool = False) -> tuple[int, int, int]:
    """Registers of a thread: in a consumer, in a producer or cast warp, and at the launch (maxnreg)."""
    return _FP32_REGISTERS if fp32 else _REGISTERS[config.block_m // 64, overlaps(config, head_dim)]


def one_segment_config(
    config: Config, head_dim: int, rows: int, heads: int, programs: int, masked: bool, dense: bool
) -> Config:  # fmt: skip
    """The config for one segment, or for a batch of sequences of one length (`dense`, `heads` are those of all).

    `config` is that of long segments. Where tiles of 128 rows finish sooner than its tall ones, they are taken. With at
    most one wave of them, blocks of 64 keys let the products start sooner.
    """
    if config.block_m != 192:
        return config
    tiles = HEAD_DIMS[head_dim]
    each = -(-rows // 64) * heads / programs
    if dense and head_dim == 64 and masked and each > 2:
        # 4 x 32 x 1024 causal rows take 54.7 us on an H200, with tiles of three warpgroups 58.0.
        return _config(128, 128, 3)
    waves, rest = divmod(each, 3)
    tall = waves * tiles.wave_times[2] + (tiles.wave_times[math.ceil(rest) - 1] if rest else 0)
    if each > 2 and tall <= math.ceil(each / 2):
        return config
    block_n = 64 if each <= 2 else tiles.low_block_n or config.block_n
    return _config(128, block_n, tiles.low_stages or config.num_stages)


def pairs_ends(config: Config, rows: int, heads: int, programs: int, left: int, right: int) -> bool:
    """Whether a batch takes the order DENSE_ENDS, with `heads` of all sequences.

    Later rows see more keys under a causal mask. Tiles of a single wave would then end at very different times.
    """
    blocks = -(-rows // 64)
    one_wave = 1 < blocks * heads / programs <= 2
    return config.block_m == 128 and blocks % 2 == 0 and one_wave and left < 0 <= right
