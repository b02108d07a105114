"""The launches that `vk bench tune` measures for each kernel. Being listed here says nothing about their speed."""

from dataclasses import replace
from itertools import product

from csrc_free_ops.configs.grids import GRID_TILES
from csrc_free_ops.configs.rows import ATEN, HOPPER_CONFIGS, Config

# They include the tiles of common attention kernels.
_SQUARE = tuple(
    Config(rows, cols, warps, stages)
    for rows, cols, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
)
_SMALL = tuple(Config(32, 32, 4, stages) for stages in (2, 3))

# A thread loads 4 to 16 elements of each chunk of a row.
_NORM = tuple(
    Config(rows, cols, warps, 1)
    for rows, cols, warps in product((1, 2, 4, 8), (128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8, 16))
    if 4 <= rows * cols // (32 * warps) <= 16
)

# A thread has 4 to 32 elements of each half of its heads.
_ROPE = tuple(
    Config(heads, pairs, warps, 1)
    for heads, pairs, warps in product((1, 2, 4, 8, 16), (128, 256, 512, 1024), (2, 4, 8))
    if 4 <= heads * pairs // (32 * warps) <= 32
)

# A thread has 4 to 16 elements of each half of its heads.
_APPEND = tuple(
    Config(rows, pairs, warps, 1)
    for rows, pairs, warps in product((4, 8, 16, 32), (32, 64, 128), (1, 2, 4, 8))
    if 4 <= rows * pairs // (32 * warps) <= 16
)

CANDIDATES: dict[str, tuple[Config, ...]] = {
    "attention_fwd": _SQUARE + _SMALL,
    "attention_bwd_dq": _SQUARE + _SMALL,
    "attention_bwd_dkdv": tuple(
        Config(rows, cols, warps, stages)
        for rows, cols, warps, stages in product((32, 64), (64, 128), (4, 8), (2, 3, 4))
    )
    + _SMALL,
    "attention_fwd_small_segments": tuple(Config(rows, rows, warps, 1) for rows, warps in product((32, 64), (2, 4, 8))),
    "attention_bwd_small_segments": tuple(Config(rows, rows, warps, 1) for rows, warps in product((32, 64), (2, 4, 8))),
    # block_m is a bound here: a tile has no more rows than the call.
    **{
        kernel: tuple(
            Config(32, cols, warps, stages)
            for cols, warps, stages in product((32, 64, 128), (1, 2, 4, 8), (2, 3, 4, 6))
        )
        for kernel in ("attention_decode", "attention_decode_split")
    },
    "attention_decode_shared": tuple(
        Config(rows, cols, warps, stages)
        for rows, cols, warps, stages in product((16, 32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    ),
    "gemm": tuple(
        Config(rows, cols, warps, stages, 64)
        for rows, cols, warps, stages in product((64, 128), (64, 128, 256), (4, 8), (3, 4))
    )
    + (ATEN,),
    "gemm_pair": tuple(
        Config(rows, cols, warps, stages, 64)
        for rows, cols, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (3, 4))
    )
    + (ATEN,),
    **HOPPER_CONFIGS,
    "norm_fwd": _NORM,
    # With 3 stages the backward prefetches its next rows.
    "norm_bwd": tuple(replace(config, num_stages=stages) for config in _NORM for stages in (1, 3)),
    **dict.fromkeys(
        GRID_TILES,
        tuple(Config(rows, cols, warps, 1) for rows, cols, warps in product((16, 32, 64), (64, 128, 256), (2, 4, 8))),
    ),
    "rope": _ROPE,
    "kv_cache_append": _APPEND,
}
