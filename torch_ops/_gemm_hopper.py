"""The launcher of the GEMM core's Hopper kernel (Gluon), which no compiler of PyTorch's can take apart.

`refusal` says from metadata alone why a call cannot take this path; the plans are as those of `_gemm`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from triton import next_power_of_2
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from csrc_free_ops.configs import Gpu, Launch
from csrc_free_ops.gemm.hopper import _gemm_hopper_kernel
from torch_ops._gemm_portable import Rows, angle_constants, rows_of
from torch_ops._hopper import Descriptors, hopper_refusal, programs
from torch_ops._registry import Relaunch

# By consumer warpgroups: registers of a consumer's thread, of the finishers' and the producer's, and at launch.
REGISTERS = {2: (168, 176, 168), 3: (136, 104, 128)}
# How long a round of tiles takes, by their rows and columns, beside one of 128 x 192. By weights of 1152 x 3456,
# 1152 x 4304 and 4304 x 1152 on an H200.
ROUND = {(128, 128): 0.69, (128, 192): 1.0, (128, 256): 1.37, (192, 128): 0.98, (192, 192): 1.47}
# Of a tile that is rotated, at most: it holds as many whole heads as there is room for.
WIDEST_ROTATED = 240
# Units of 8 KiB that stages and a finished tile share, beside one for barriers; stages that there are barriers for.
UNITS, MOST_STAGES = 27, 6
_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def refusal(gpu: Gpu, rows: Rows, weight: Tensor) -> str:
    """Why a product with this weight cannot take the Hopper path, or nothing."""
    if reason := hopper_refusal(gpu, weight.dtype):
        return reason
    if weight.stride(1) != 1 or weight.stride(0) % 8 or rows.stride % 8:
        return "TMA cannot address rows that do not begin at 16 bytes"
    return ""


def rotary_refusal(gpu: Gpu, rows: Rows, weight: Tensor, head_dim: int) -> str:
    if head_dim > WIDEST_ROTATED:
        return f"the Hopper path rotates heads of up to {WIDEST_ROTATED} columns"
    return refusal(gpu, rows, weight)


def _launch(rows: int, columns: int) -> Launch:
    groups, parts = rows // 64, -(-columns // 64)
    stages = (UNITS - groups * parts) // (groups + parts)
    return Launch(rows, columns, 12 if groups == 2 else 16, min(stages, MOST_STAGES))


def linear_launch(total: int, n: int, gated: bool, programs: int) -> Launch:
    """The tile whose rounds of programs take the least time."""

    def time(tile: tuple[int, int]) -> float:
        tiles = -(-total // tile[0]) * -(-n // tile[1])
        return -(-tiles // programs) * ROUND[tile]

    # Of "swiglu" both halves of a tile are whole units.
    return _launch(*min((tile for tile in ROUND if not gated or tile[1] % 128 == 0), key=time))


def rotary_launch(head_dim: int) -> Launch:
    return _launch(128, WIDEST_ROTATED // head_dim * head_dim)


def addressable(*tensors: Tensor) -> bool:
    """Whether TMA can start at these addresses."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _describe(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows and 64 columns; what lies outside of the tensor reads as zero."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, 64], _LAYOUT)


def _constants(rows: Rows, weight: Tensor, launch: Launch, epilogue: str, has_bias: bool) -> dict[str, Any]:
    groups = launch.block_m // 64
    consumer, other, at_launch = REGISTERS[groups]
    return {
        "N": weight.shape[0], "K": weight.shape[1], "STRIDE_W": weight.stride(0), "GROUPS": groups,
        "COLUMNS": launch.block_n, "STAGES": launch.num_stages, "EPILOGUE": epilogue, "HAS_BIAS": has_bias,
        "CONSUMER_REGISTERS": consumer, "OTHER_REGISTERS": other, "num_warps": 4, "maxnreg": at_launch,
    }  # fmt: skip


def _descriptors(launch: Launch) -> Descriptors:
    tail = launch.block_n % 64
    makers = (64, 64, max(8, next_power_of_2(tail)) if tail else 64)
    return Descriptors(*[partial(_describe, rows=rows) for rows in makers])


def plan_linear_hopper(
    launch: Launch, rows: Rows, weight: Tensor, has_bias: bool, activation: str, keeps_pre: bool, width: int
) -> Callable[..., None]:
    """launch(x, weight, bias, out, pre) on tensors that `addressable` allows, x of one row at least."""
    constants = _constants(rows, weight, launch, activation, has_bias)
    constants |= {
        "KEEPS_PRE": keeps_pre, "STRIDE_OUT": width, "HEAD_DIM": 8, "NUM_HEADS": 1, "NUM_K_HEADS": 1,
        "STRIDE_COS": 0, "STRIDE_SIN": 0, "SHARED_ANGLES": True,
    }  # fmt: skip
    descriptors_of = _descriptors(launch)
    grid = (programs(weight.device.index),)
    relaunch = Relaunch(grid, (rows.count,))

    def launch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None) -> None:
        bias = weight if bias is None else bias.contiguous()
        pre = out if pre is None else pre
        descriptors = descriptors_of(x, weight, weight)
        tensors = (weight, bias, out, out, out, pre, weight, weight)
        if not relaunch(None, tensors, descriptors):
            compiled = _gemm_hopper_kernel[grid](*descriptors, *tensors, rows.count, **constants, launch_pdl=True)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_linear


def plan_rotary_hopper(
    launch: Launch, rows: Rows, weight: Tensor, has_bias: bool, cos: Tensor, sin: Tensor, num_heads: int,
    num_k_heads: int,
) -> Callable[..., None]:  # fmt: skip
    """launch(x, weight, bias, cos, sin, q, k, v), as above."""
    angles = angle_constants(cos, sin, weight.shape[0], num_heads, num_k_heads)
    constants = _constants(rows, weight, launch, "rotary", has_bias)
    constants |= {
        "KEEPS_PRE": False, "STRIDE_OUT": 0, "HEAD_DIM": 2 * angles["HALF"], "NUM_HEADS": num_heads,
        "NUM_K_HEADS": num_k_heads, "STRIDE_COS": angles["STRIDE_CT"], "STRIDE_SIN": angles["STRIDE_ST"],
        "SHARED_ANGLES": angles["SHARED_ANGLES"],
    }  # fmt: skip
    descriptors_of = _descriptors(launch)
    grid = (programs(weight.device.index),)
    relaunch = Relaunch(grid, (rows.count,))

    def launch_rotary(
        x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        bias = weight if bias is None else bias.contiguous()
        descriptors = descriptors_of(x, weight, weight)
        tensors = (weight, bias, q, k, v, q, rows_of(cos), rows_of(sin))
        if not relaunch(None, tensors, descriptors):
            compiled = _gemm_hopper_kernel[grid](*descriptors, *tensors, rows.count, **constants, launch_pdl=True)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_rotary
