"""The launcher of the GEMM core's kernels in stock Triton, and what launchers of such kernels share.

Plans are as those of `plan`, which chooses among the paths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from csrc_free_ops.configs.gemm import pick_product
from csrc_free_ops.configs.rows import Launch
from csrc_free_ops.gemm.portable import _gemm_kernel, _gemm_pair_kernel
from torch_ops._core.checks import dtype_name
from torch_ops._core.device import INTERPRETED_GPU, gpu
from torch_ops._core.launch import Relaunch, precision_of
from torch_ops._core.registry import INTERPRET, wrap_triton
from torch_ops.settings import settings

GATED = "swiglu"
# Tiles of rows that take turns at a tile of columns, so that both stay in the L2 cache.
GROUP_ROWS = 8


@dataclass(frozen=True)
class Rows:
    """The layout of a left operand: how many rows there are, and how far from each other they begin."""

    count: int
    stride: int

    @staticmethod
    def of(x: Tensor) -> "Rows":
        """Of `rows_of(x)`, which is not made."""
        width = x.shape[-1]
        count = 1
        for size in x.shape[:-1]:
            count = count * size
        return Rows(count, x.stride(0) if x.dim() == 2 and x.stride(1) == 1 else width)

    @property
    def known(self) -> int | None:
        """How many there are, None in graphs of dynamic shape, which may not branch on it."""
        return None if isinstance(self.count, torch.SymInt) else self.count


def rows_of(x: Tensor) -> Tensor:
    """x as [M, K] with contiguous columns; copied where it does not lie so."""
    if x.dim() == 2:
        return x if x.stride(1) == 1 else x.contiguous()
    return x.contiguous().view(-1, x.shape[-1])


def padded(columns: int, dtype: torch.dtype) -> int:
    """So many columns that each row begins at 16 bytes."""
    per_load = 16 // dtype.itemsize
    return -(-columns // per_load) * per_load


def to_columns(weight: Tensor, columns: int) -> Tensor:
    """A copy with zeros behind its columns, or without the last of them; itself where it has so many."""
    missing = columns - weight.shape[1]
    return torch.nn.functional.pad(weight, (0, missing)) if missing else weight


def product_size(weight: Tensor, up: Tensor | None) -> tuple[int, int]:
    """n x k of the product with a weight, or with both of a gated layer that has two."""
    n, k = weight.shape
    return n if up is None else 2 * n, k


def choose_product(kernel: str, rows: Rows, weight: Tensor, up: Tensor | None = None) -> tuple[Launch, str]:
    """The launch of a kernel of the core for this weight, ATEN where PyTorch is to make the product, and its source."""
    device = INTERPRETED_GPU if INTERPRET else gpu()
    aten = settings.path != "portable"
    n, k = product_size(weight, up)
    dtype, copies = weight.dtype, _Weight.of(weight, rows, up).pads
    return pick_product(
        kernel, device, dtype_name(dtype), dtype.itemsize, n, k, rows.known, settings.rows, aten, copies
    )  # fmt: skip


def partner_rows(weight: Tensor, up: Tensor | None) -> int:
    """From a gate's row to that of what it gates, in the weight that has it."""
    return weight.shape[0] // 2 if up is None else 0


def product_kernel(activation: str) -> str:
    return "gemm_pair" if activation == GATED else "gemm"


def nothing_to_do(*tensors: Tensor | None) -> None:
    """The launch where there are no rows."""


def _constants(launch: Launch, rows: Rows, strides: tuple[int, int], k: int) -> dict[str, Any]:
    return {
        "K": k, "STRIDE_XM": rows.stride, "STRIDE_WN": strides[0], "STRIDE_WK": strides[1],
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n, "BLOCK_K": launch.block_k,
        "TAIL_K": max(16, next_power_of_2(k % launch.block_k)), "GROUP_M": GROUP_ROWS,
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


@dataclass(frozen=True)
class _Weight:
    """How kernels read a weight, and beside it one of the same shape: as they lie, or with `copies` in padded rows.

    Copied where two lie differently, and where the rows of x begin at 16 bytes and the weight's own do not. With `pads`
    the copy's rows are longer than the weight's, so that they begin at 16 bytes: such a product is PyTorch's by the
    rule, and only a row or a setting gives it to the kernels.
    """

    strides: tuple[int, int]
    copies: bool
    pads: bool = False

    @staticmethod
    def of(weight: Tensor, rows: Rows, up: Tensor | None = None) -> "_Weight":
        strides = weight.stride(0), weight.stride(1)
        alike = up is None or strides == (up.stride(0), up.stride(1))
        aligned = padded(weight.stride(0), weight.dtype) == weight.stride(0)
        odd = padded(rows.stride, weight.dtype) != rows.stride
        if alike and (weight.stride(1) != 1 or aligned or odd):
            return _Weight(strides, False)
        stride = padded(weight.shape[1], weight.dtype)
        return _Weight((stride, 1), True, stride != weight.shape[1])

    def __call__(self, weight: Tensor) -> Tensor:
        if not self.copies:
            return weight
        return to_columns(weight, self.strides[0]) if self.pads else weight.contiguous()


def plan_linear_portable(
    launch: Launch, rows: Rows, weight: Tensor, has_bias: bool, activation: str, keeps_pre: bool, width: int,
    up: Tensor | None = None,
) -> Callable[..., None]:  # fmt: skip
    n, k = product_size(weight, up)
    if rows.known == 0:
        return nothing_to_do
    operand = _Weight.of(weight, rows, up)
    constants = {
        "STRIDE_OM": width, "HAS_BIAS": has_bias, "KEEPS_PRE": keeps_pre,
        **_constants(launch, rows, operand.strides, k),
    }  # fmt: skip
    gated = activation == GATED
    if gated:
        constants |= {
            "HALF": n // 2, "PARTNER": partner_rows(weight, up), "NUM_HEADS": 1, "NUM_K_HEADS": 0,
            "STRIDE_CT": 0, "STRIDE_ST": 0, "ROTARY": False, "SHARED_ANGLES": True,
        }  # fmt: skip
    else:
        constants |= {"N": n, "ACTIVATION": activation}
    grid = (cdiv(rows.count, launch.block_m) * cdiv(n // 2 if gated else n, launch.block_n), 1)
    relaunch = Relaunch(grid, (rows.count,))

    def launch_linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None,
        up: Tensor | None = None, up_bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        weight = operand(weight)
        pre = weight if pre is None else pre
        bias = weight if bias is None else bias.contiguous()
        if gated:
            up = weight if up is None else operand(up)
            up_bias = bias if up_bias is None else up_bias.contiguous()
            tensors: tuple[Tensor, ...] = (x, weight, up, bias, up_bias, weight, weight, out, pre, weight)
        else:
            tensors = (x, weight, bias, out, pre)
        precision = precision_of(x)
        if not relaunch(precision, tensors):
            options = {"PRECISION": precision, **constants}
            if gated:
                compiled = wrap_triton(_gemm_pair_kernel)[grid](*tensors, rows.count, **options)
            else:
                compiled = wrap_triton(_gemm_kernel)[grid](*tensors, rows.count, **options)
            relaunch.keep(precision, tensors, options, compiled)

    return launch_linear


def plan_rotary_portable(
    launch: Launch, rows: Rows, weight: Tensor, has_bias: bool, cos: Tensor, sin: Tensor, num_heads: int,
    num_k_heads: int,
) -> Callable[..., None]:  # fmt: skip
    n, k = weight.shape
    if rows.known == 0:
        return nothing_to_do
    operand = _Weight.of(weight, rows)
    angles = angle_constants(cos, sin, n, num_heads, num_k_heads)
    half = angles["HALF"]
    constants = {
        **angles, "PARTNER": half, "STRIDE_OM": 0, "ROTARY": True, "HAS_BIAS": has_bias, "KEEPS_PRE": False,
        **_constants(launch, rows, operand.strides, k),
    }  # fmt: skip
    tiles = cdiv(num_heads * half, launch.block_n) + 2 * cdiv(num_k_heads * half, launch.block_n)
    grid = (cdiv(rows.count, launch.block_m) * tiles, 1)
    relaunch = Relaunch(grid, (rows.count,))

    def launch_rotary(
        x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        weight = operand(weight)
        bias = weight if bias is None else bias.contiguous()
        tensors = (x, weight, weight, bias, bias, rows_of(cos), rows_of(sin), q, k, v)
        precision = precision_of(x)
        if not relaunch(precision, tensors):
            options = {"PRECISION": precision, **constants}
            compiled = wrap_triton(_gemm_pair_kernel)[grid](*tensors, rows.count, **options)
            relaunch.keep(precision, tensors, options, compiled)

    return launch_rotary


def angle_constants(cos: Tensor, sin: Tensor, n: int, num_heads: int, num_k_heads: int) -> dict[str, Any]:
    """Of heads packed as n rows or columns, and of the tables, as `rows_of` them lies."""
    half = n // (num_heads + 2 * num_k_heads) // 2
    return {
        "HALF": half, "NUM_HEADS": num_heads, "NUM_K_HEADS": num_k_heads,
        "STRIDE_CT": Rows.of(cos).stride, "STRIDE_ST": Rows.of(sin).stride, "SHARED_ANGLES": cos.shape[1] == half,
    }  # fmt: skip
