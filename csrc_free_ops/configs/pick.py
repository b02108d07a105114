"""Launch configurations: `pick` chooses one, and nothing is timed at run time.

The order is: measured rows of the user, shipped rows of this GPU (`configs/<gpu>.json`), a rule that works anywhere. A
row belongs to a kernel, a dtype and a head dimension. It may be bound to flags ("causal"; "masked" for causal or a
window) and to a range of mean segment lengths. Eager calls and graphs of fixed shape know the lengths. Elsewhere the
length is None, and the row of the longest segments counts.

For norms, `head_dim` is the row width and `length` the number of rows. For "rope" the length is the number of rows too.
For "kv_cache_append" the length is unknown; rows of a tile are heads of tokens, columns are pairs.

Rows of the GEMM kernels have no head dimension. They belong to the sizes of a weight, n x k, or to any weight; their
lengths are rows of x. Their config has a third block, or another path: {"path": "aten"}.
"""

from csrc_free_ops.configs.attention import attention_rule, segment_rule
from csrc_free_ops.configs.decode import decode_rule
from csrc_free_ops.configs.grids import GRID_TILES, grid_rule
from csrc_free_ops.configs.kv_cache import append_rule
from csrc_free_ops.configs.norms import norm_rule
from csrc_free_ops.configs.rope import rope_rule
from csrc_free_ops.configs.rows import Config, Gpu, TunedConfig, shipped_rows


def rule(
    kernel: str, gpu: Gpu, itemsize: int, head_dim: int, masked: bool = False, busy: bool = False,
    precision: str = "ieee", length: int | None = None,
) -> Config:  # fmt: skip
    """The config that the rule of the kernel's family gives."""
    if kernel.startswith("norm_"):
        return norm_rule(kernel, gpu, itemsize, head_dim, length)
    if kernel == "rope":
        return rope_rule(gpu, length)
    if kernel in GRID_TILES:
        return grid_rule(kernel, gpu, head_dim)
    if kernel == "kv_cache_append":
        return append_rule(gpu, head_dim)
    if kernel.startswith("attention_decode"):
        return decode_rule(kernel, gpu, itemsize, head_dim)
    of = segment_rule if kernel.startswith("segment_attention") else attention_rule
    return of(kernel, gpu, itemsize, head_dim, masked, busy, precision)


def pick(
    kernel: str,
    gpu: Gpu,
    dtype: str,
    itemsize: int,
    head_dim: int,
    causal: bool,
    length: int | None,
    user_rows: tuple[TunedConfig, ...] = (),
    masked: bool | None = None,
    busy: bool = False,
    precision: str = "ieee",
) -> tuple[Config, str]:
    """(config of `kernel`, where it comes from).

    `length` is the mean segment length or, for norms, the number of rows; None if unknown. `masked` says whether keys
    are bounded, causally or by a window (default: `causal`). `busy` says that attention computes more between its
    products than when the shipped rows were measured, which takes registers; shipped rows do not count then.
    `precision` is that of fp32 products.
    """
    masked = causal if masked is None else masked
    for row in user_rows if busy else (*user_rows, *shipped_rows(gpu.name)):
        if row.gpu in ("", gpu.name) and row.fits(kernel, dtype, head_dim, causal, masked, length):
            return row.launch, row.source
    basis = "by figures of an H200" if kernel.startswith(("norm_", "rope")) else "unmeasured"
    config = rule(kernel, gpu, itemsize, head_dim, masked, busy, precision, length)
    return config, f"rule for {gpu.backend} {gpu.arch}, {basis}"
