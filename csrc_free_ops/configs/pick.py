"""Launch configurations: one `pick` chooses, nothing is timed at run time.

The order is: the user's measured rows, the shipped rows of this GPU (`configs/<gpu>.json`), a rule that launches
anywhere. A row belongs to a kernel, a dtype and a head dimension, and may be bound to flags ("causal"; "masked", causal
or by a window) and to a range of mean segment lengths; lengths are known to eager calls and to graphs of fixed shape,
and are None elsewhere, where the row of the longest segments counts. Of a norm's kernel the head dimension is the width
of its rows and the length their number; of the rotary embedding's ("rope") the length is the number of rows too. That
of "kv_cache_append" is unknown: its rows and columns are heads of tokens and pairs.

Rows of the GEMM core have no head dimension; they belong to the sizes of a weight, n x k, or to any, and their lengths
are rows of x. Their launch has a third block, and may be another path's: {"path": "aten"}.
"""

from csrc_free_ops.configs.attention import attention_rule
from csrc_free_ops.configs.decode import decode_rule
from csrc_free_ops.configs.grids import GRID_TILES, grid_rule
from csrc_free_ops.configs.kv_cache import append_rule
from csrc_free_ops.configs.norms import norm_rule
from csrc_free_ops.configs.rope import rope_rule
from csrc_free_ops.configs.rows import Gpu, Launch, Row, shipped_rows


def rule(
    kernel: str, gpu: Gpu, itemsize: int, head_dim: int, masked: bool = False, busy: bool = False,
    precision: str = "ieee", length: int | None = None,
) -> Launch:  # fmt: skip
    """The launch by the rule of the kernel's family."""
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
    return attention_rule(kernel, gpu, itemsize, head_dim, masked, busy, precision)


def pick(
    kernel: str,
    gpu: Gpu,
    dtype: str,
    itemsize: int,
    head_dim: int,
    causal: bool,
    length: int | None,
    user_rows: tuple[Row, ...] = (),
    masked: bool | None = None,
    busy: bool = False,
    precision: str = "ieee",
) -> tuple[Launch, str]:
    """The launch of `kernel`, and where it comes from.

    `length` is the mean segment length, of a norm the number of rows, None if unknown; `masked` whether there are
    bounds on keys, causal or not. `busy`: attention does more between its products than what shipped rows were measured
    with, which takes registers. `precision` is that of fp32 products.
    """
    masked = causal if masked is None else masked
    for row in user_rows if busy else (*user_rows, *shipped_rows(gpu.name)):
        if row.gpu in ("", gpu.name) and row.fits(kernel, dtype, head_dim, causal, masked, length):
            return row.launch, row.source
    basis = "by figures of an H200" if kernel.startswith(("norm_", "rope")) else "unmeasured"
    launch = rule(kernel, gpu, itemsize, head_dim, masked, busy, precision, length)
    return launch, f"rule for {gpu.backend} {gpu.arch}, {basis}"
