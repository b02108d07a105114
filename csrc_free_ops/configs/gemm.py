"""Launches of the GEMM kernels: measured rows, or a rule."""

from collections.abc import Iterable

from csrc_free_ops.configs.rows import ATEN, PRODUCTS, Config, Gpu, TunedConfig, shipped_rows


def product_row(
    of: Iterable[TunedConfig], kernel: str, gpu: Gpu, dtype: str, n: int, k: int, rows: int | None
) -> TunedConfig | None:  # fmt: skip
    """The first row of `of` that fits a product (arguments as in `pick_product`), or None."""
    fitting = (row for row in of if row.gpu in ("", gpu.name) and row.fits_product(kernel, dtype, n, k, rows))
    return next(fitting, None)


def pick_product(
    kernel: str,
    gpu: Gpu,
    dtype: str,
    itemsize: int,
    n: int,
    k: int,
    rows: int | None,
    user_rows: tuple[TunedConfig, ...] = (),
    aten: bool = True,
    copies: bool = False,
) -> tuple[Config, str]:
    """(config of a GEMM kernel, where it comes from). The config may be ATEN only with `aten`.

    The weight is n x k. x has `rows` rows, None if unknown. `copies` says that the kernels read a padded copy of the
    weight.
    """
    usable = (row for row in (*user_rows, *shipped_rows(gpu.name)) if aten or row.launch != ATEN)
    if row := product_row(usable, kernel, gpu, dtype, n, k, rows):
        return row.launch, row.source
    config = product_rule(kernel, gpu, itemsize, aten, copies)
    return config, f"rule for {gpu.backend} {gpu.arch}, unmeasured"


# (rows, columns, warps) of the elementwise kernels around products, which are memory-bound.
_ELEMENTWISE = {
    "rotate": (32, 64, 4),
    # As wide as all heads of q, because these share their angles: on an H200 it took 18 to 37 % less time than narrow
    # tiles.
    "qkv_rope_bwd": (1, 1024, 4),
    "activate": (16, 256, 4),
    "mlp_bwd": (8, 64, 2),
}


def product_rule(kernel: str, gpu: Gpu, itemsize: int, aten: bool = True, copies: bool = False) -> Config:
    """An unmeasured config that fits and spills no registers on any target of compile_tests."""
    if gpu.backend == "interpreter":
        return Config(32, 16, 4, 1, 16 if kernel in PRODUCTS else 0)
    if kernel in _ELEMENTWISE:
        return Config(*_ELEMENTWISE[kernel], 1)
    if copies and aten:
        # Each call would copy the weight again; PyTorch's products need no copy.
        return ATEN
    cols = 128 // (2 if kernel == "gemm_pair" else 1)
    if itemsize == 4:
        # Exact fp32 products use no tensor cores and keep whole operands in registers, so PyTorch's are faster.
        return ATEN if aten else Config(cols // 2, cols // 2, 8, 1, 16)
    if gpu.backend == "hip":
        return Config(128, cols, 8, 2, 64)
    if int(gpu.arch) == 90:
        # Three stages leave room for a second block on each multiprocessor. The pair kernel's two accumulators leave no
        # registers for a second block, so it takes a fourth stage.
        return Config(128, cols, 8, 3 if kernel == "gemm" else 4, 64)
    return Config(128, cols, 8, 3 if gpu.shared_memory > 2**17 else 2, 64)
