"""Tiles of the kernels that work row by row on image grids."""

from triton import next_power_of_2

from csrc_free_ops.configs.rows import Gpu, Launch

# Of kernels that work row by row on image grids: elements of a tile, its most columns, and warps. The head dimension of
# their rows is the width of what they write, of merges that of x. Tiles that spill somewhere were left out.
GRID_TILES = {
    "rotary_table": (2048, 128, 4),
    "pos_embed_fwd": (4096, 256, 8),
    "pos_embed_bwd": (1024, 64, 2),
    "spatial_merge_fwd": (2048, 128, 4),
    "spatial_merge_bwd": (4096, 256, 4),
}


def grid_rule(kernel: str, gpu: Gpu, width: int) -> Launch:
    """The most columns, or half of 256 where those pad by much less."""
    if gpu.backend == "interpreter":
        return Launch(16, 64, 4, 1)
    elements, most, warps = GRID_TILES[kernel]
    cols = min(most, max(16, next_power_of_2(width)))
    if cols == 256 and 8 * -(-width // 256) * 256 > 9 * -(-width // 128) * 128:
        cols = 128
    return Launch(elements // cols, cols, warps, 1)
