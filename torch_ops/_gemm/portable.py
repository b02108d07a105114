"""The launcher of the GEMM core's kernels in stock Triton, and what launchers of such kernels share.

Plans are as those of `plan`, which chooses among the paths.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from csrc_free_ops.configs.gemm import pick_product
from csrc_free_ops.configs.rows import Config
from csrc_free_ops.gemm.portable import _gemm_kernel, _gemm_pair_kernel
from torch_ops._core.checks import dtype_name
from torch_ops._core.launch import WIDE_STRIDE, current_gpu, for_each_precision, is_settled
from torch_ops._core.plan import Bound, Plan
from torch_ops._core.registry import wrap_triton
from torch_ops._gemm.tensors import Linear, Rotary
from torch_ops.settings import settings

# A launch, and where it comes from.
Chosen = tuple[Config, str]

GATED = "swiglu"
# Tiles of rows that take turns at a tile of columns, so that both stay in the L2 cache.
GROUP_ROWS = 8


@dataclass(frozen=True)
class Rows:
    """The layout of a left operand: how many rows there are, and how far from each other they begin."""

    count: int
    stride: int
    width: int = 0

    @staticmethod
    def of(x: Tensor) -> "Rows":
        """The rows of `rows_of(x)`, without making it."""
        width = x.shape[-1]
        count = 1
        for size in x.shape[:-1]:
            count = count * size
        return Rows(count, x.stride(0) if x.dim() == 2 and x.stride(1) == 1 else width, width)

    @property
    def is_settled(self) -> bool:
        """Whether a model places rows: without gaps, padded, or as a part of three that are packed.

        Any other stride follows from a length, as that of h[:, -1] does, and would cost a build for each length.
        """
        return is_settled(self.stride, self.width)

    @property
    def unit(self) -> int:
        return 8 if not self.is_settled and self.stride % 8 == 0 else 1

    @property
    def constants(self) -> dict[str, int]:
        """The row stride as a constant, or how it comes at run time (`row_step` of csrc_free_ops/tiles/rows.py)."""
        if self.is_settled:
            return {"STRIDE_XM": self.stride, "STRIDE_UNIT": 1}
        wide = isinstance(self.stride, torch.SymInt) or self.stride > WIDE_STRIDE
        return {"STRIDE_XM": -1 if wide else 0, "STRIDE_UNIT": self.unit}

    @property
    def step(self) -> int:
        """The row stride at run time, in units; 0 beside a constant."""
        return 0 if self.is_settled else self.stride // self.unit

    @property
    def known(self) -> int | None:
        """How many there are, None in graphs of dynamic shape, which may not branch on it."""
        return None if isinstance(self.count, torch.SymInt) else self.count


def rows_of(x: Tensor) -> Tensor:
    """x as [M, K] with contiguous columns; copied where it does not lie so."""
    if x.dim() == 2:
        return x if x.stride(1) == 1 else x.contiguous()
    return x.contiguous().view(-1, x.shape[-1])


def table_rows(table: Tensor) -> Tensor:
    """`rows_of` a table of angles, copied if its row stride is not a model's.

    Products hold that stride as a constant, and one that follows from a batch would cost a build for each.
    """
    rows = rows_of(table)
    return rows if Rows.of(rows).is_settled else rows.contiguous()


def table_stride(table: Tensor) -> int:
    """The row stride of `table_rows`."""
    rows = Rows.of(table)
    return rows.stride if rows.is_settled else rows.width


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


def product_name(kernel: str, weight: Tensor, up: Tensor | None = None) -> str:
    """Its kernel and the size of its weight, as in "gemm 4304x1152": what `explain` calls it."""
    n, k = product_size(weight, up)
    return f"{kernel} {n}x{k}"


def choose_product(kernel: str, rows: Rows, weight: Tensor, up: Tensor | None = None) -> Chosen:
    """The launch of a kernel of the core for this weight, ATEN where PyTorch is to make the product, and its source."""
    aten = settings.path != "portable"
    n, k = product_size(weight, up)
    dtype, copies = weight.dtype, _Weight.of(weight, rows, up).pads
    return pick_product(
        kernel, current_gpu(), dtype_name(dtype), dtype.itemsize, n, k, rows.known, settings.rows, aten, copies
    )  # fmt: skip


def partner_rows(weight: Tensor, up: Tensor | None) -> int:
    """From a gate's row to that of what it gates, in the weight that has it."""
    return weight.shape[0] // 2 if up is None else 0


def product_kernel(activation: str) -> str:
    return "gemm_pair" if activation == GATED else "gemm"


def nothing_to_do(*tensors: Any) -> None:
    """The launch where there are no rows."""


def _constants(launch: Config, rows: Rows, strides: tuple[int, int], k: int) -> dict[str, Any]:
    return {
        "K": k, **rows.constants, "STRIDE_WN": strides[0], "STRIDE_WK": strides[1],
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n, "BLOCK_K": launch.block_k,
        "TAIL_K": max(16, next_power_of_2(k % launch.block_k)), "GROUP_M": GROUP_ROWS,
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


@dataclass(frozen=True)
class _Weight:
    """How kernels read a weight, and beside it one of the same shape: as they lie, or with `copies` in padded rows.

    Copied where two lie differently, and where the rows of x begin at 16 bytes and the weight's own do not. With `pads`
    the copy's rows are longer than the weight's, so that they begin at 16 bytes. The rule leaves such a product to
    PyTorch; only a row or a setting gives it to the kernels.
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


def plan_linear_portable(chosen: Chosen, t: Linear, activation: str) -> Plan:
    launch, rows = chosen[0], Rows.of(t.x)
    n, k = product_size(t.weight, t.up)
    gated = activation == GATED
    kernels = {product_name(product_kernel(activation), t.weight, t.up): chosen}
    if rows.known == 0:
        return Plan(nothing_to_do, kernels)
    operand = _Weight.of(t.weight, rows, t.up)
    constants = {
        "STRIDE_OM": t.out.shape[1], "HAS_BIAS": t.bias is not None, "KEEPS_PRE": t.pre is not None,
        **_constants(launch, rows, operand.strides, k),
    }  # fmt: skip
    if gated:
        constants |= {
            "HALF": n // 2, "PARTNER": partner_rows(t.weight, t.up), "NUM_HEADS": 1, "NUM_K_HEADS": 0,
            "STRIDE_CT": 0, "STRIDE_ST": 0, "ROTARY": False, "SHARED_ANGLES": True,
        }  # fmt: skip
    else:
        constants |= {"N": n, "ACTIVATION": activation}
    grid = (cdiv(rows.count, launch.block_m) * cdiv(n // 2 if gated else n, launch.block_n), 1)

    def plan(precision: str) -> Plan:
        function = wrap_triton(_gemm_pair_kernel) if gated else wrap_triton(_gemm_kernel)
        bound = Bound(function, grid, (rows.count, rows.step), {"PRECISION": precision, **constants})

        def launch_linear(t: Linear) -> None:
            x, weight, bias, out, pre, up, up_bias = t
            weight = operand(weight)
            pre = weight if pre is None else pre
            bias = weight if bias is None else bias.contiguous()
            if gated:
                up = weight if up is None else operand(up)
                up_bias = bias if up_bias is None else up_bias.contiguous()
                bound(x, weight, up, bias, up_bias, weight, weight, out, pre, weight)
            else:
                bound(x, weight, bias, out, pre)

        return Plan(launch_linear, kernels)

    return for_each_precision(t.x, plan)


def plan_rotary_portable(chosen: Chosen, t: Rotary) -> Plan:
    launch, rows = chosen[0], Rows.of(t.x)
    kernels = {product_name("gemm_pair", t.weight): chosen}
    if rows.known == 0:
        return Plan(nothing_to_do, kernels)
    operand = _Weight.of(t.weight, rows)
    angles = angle_constants(t.cos, t.sin, t.q, t.k)
    half = angles["HALF"]
    constants = {
        **angles, "PARTNER": half, "STRIDE_OM": 0, "ROTARY": True, "HAS_BIAS": t.bias is not None, "KEEPS_PRE": False,
        **_constants(launch, rows, operand.strides, t.weight.shape[1]),
    }  # fmt: skip
    grid = (cdiv(rows.count, launch.block_m) * pair_tiles(angles, launch), 1)

    def plan(precision: str) -> Plan:
        scalars = rows.count, rows.step
        bound = Bound(wrap_triton(_gemm_pair_kernel), grid, scalars, {"PRECISION": precision, **constants})

        def launch_rotary(t: Rotary) -> None:
            x, weight, bias, cos, sin, q, k, v = t
            weight = operand(weight)
            bias = weight if bias is None else bias.contiguous()
            bound(x, weight, weight, bias, bias, table_rows(cos), table_rows(sin), q, k, v)

        return Plan(launch_rotary, kernels)

    return for_each_precision(t.x, plan)


def angle_constants(cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Scalars of the heads of q and k, or of their gradients, and of the tables, as `table_rows` lays them out."""
    half = q.shape[2] // 2
    return {
        "HALF": half, "NUM_HEADS": q.shape[1], "NUM_K_HEADS": k.shape[1],
        "STRIDE_CT": table_stride(cos), "STRIDE_ST": table_stride(sin), "SHARED_ANGLES": cos.shape[1] == half,
    }  # fmt: skip


def pair_tiles(angles: dict[str, Any], launch: Config) -> int:
    """How many tiles of pairs the heads of q, k and v take."""
    of_q, of_k = (cdiv(angles[heads] * angles["HALF"], launch.block_n) for heads in ("NUM_HEADS", "NUM_K_HEADS"))
    return int(of_q + 2 * of_k)
