"""Launches of the kernels that work row by row on image grids."""

from triton import next_power_of_2

from csrc_free_ops.configs.rows import Config, Gpu

# (elements of a tile, its maximum of columns, warps); no tile spills on any target. In measured rows `head_dim` is the
# width of the result, for merges the width of x.
GRID_TILES = {
    "rotary_table": (2048, 128, 4),
    "pos_embed_fwd": (4096, 256, 8),
    "pos_embed_bwd": (1024, 64, 2),
    "spatial_merge_fwd": (2048, 128, 4),
    "spatial_merge_bwd": (4096, 256, 4),
}


def grid_rule(kernel: str, gpu: Gpu, width: int) -> Config:
    """An unmeasured config with as many columns as GRID_TILES allows, or 128 instead of 256 if that pads much less."""
    if gpu.backend == "interpreter":
        return Config(16, 64, 4, 1)
    elements, most, warps = GRID_TILES[kernel]
    cols = min(most, max(16, next_power_of_2(width)))
    if cols == 256 and 8 * -(-width // 256) * 256 > 9 * -(-width // 128) * 128:
        cols = 128
    return Config(elements // cols, cols, warps, 1)
