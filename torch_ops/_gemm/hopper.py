"""The launcher of the GEMM core's Hopper kernel (Gluon), which no compiler of PyTorch's can take apart.

`refusal` says from metadata alone why a call cannot take this path; the plans are as those of `plan`.

Their `tensors` are the kernel's pointers in its order: bias, up_bias, out, second, third, pre, cos and sin.
In the place of one that is not read stands another of the call.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from triton import next_power_of_2
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from csrc_free_ops.configs.gemm_hopper import WIDEST_ROTATED, finishing_warps, gradient_launch, tall_tiles, whole_tiles
from csrc_free_ops.configs.rows import Gpu, Launch
from csrc_free_ops.gemm.hopper.kernel import _gemm_hopper_kernel
from torch_ops._core.hopper import Descriptors, hopper_refusal, programs
from torch_ops._core.launch import Relaunch
from torch_ops._gemm.portable import GATED, Rows, angle_constants, padded, partner_rows, product_size, rows_of

# By consumer warpgroups and finishing warps: registers of a consumer's thread, of a finisher's, of the producer's, and
# at launch.
REGISTERS = {(2, 2): (168, 168, 168, 168), (2, 4): (168, 128, 40, 128), (3, 4): (112, 104, 40, 96)}
_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def refusal(gpu: Gpu, rows: Rows, weight: Tensor, head_dim: int = 0, up: Tensor | None = None) -> str:
    """Why a product with this weight cannot take the Hopper path, or nothing. Of one that is rotated, by its heads."""
    if reason := hopper_refusal(gpu, weight.dtype):
        return reason
    weights = (weight,) if up is None else (weight, up)
    if rows.stride % 8 or any(each.stride(1) != 1 or each.stride(0) % 8 for each in weights):
        return "TMA cannot address rows that do not begin at 16 bytes"
    if rows.stride == 0 or any(each.stride(0) == 0 for each in weights):
        return "TMA cannot address rows that lie in one place"
    if head_dim > WIDEST_ROTATED or head_dim % 8:
        return f"the Hopper path rotates heads of up to {WIDEST_ROTATED} columns, in steps of 8"
    return ""


def addressable(*tensors: Tensor) -> bool:
    """Whether TMA can start at these addresses."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _describe(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows and 64 columns; what lies outside of the tensor reads as zero."""
    # The stride of a single row may be anything.
    stride = padded(tensor.shape[1], tensor.dtype) if tensor.shape[0] == 1 else tensor.stride(0)
    return TensorDescriptor(tensor, list(tensor.shape), [stride, 1], [rows, 64], _LAYOUT)


# Of what rotates nothing.
_NOT_ROTATED = {
    "HEAD_DIM": 8, "NUM_HEADS": 1, "NUM_K_HEADS": 1, "STRIDE_COS": 0, "STRIDE_SIN": 0, "SHARED_ANGLES": True
}  # fmt: skip


def _constants(
    weight: Tensor, launch: Launch, epilogue: str, has_bias: bool, up: Tensor | None = None
) -> dict[str, Any]:
    groups, finishers = launch.block_m // 64, finishing_warps(launch)
    consumer, finisher, producer, at_launch = REGISTERS[groups, finishers]
    n, k = product_size(weight, up)
    return {
        "N": n, "K": k, "PARTNER": partner_rows(weight, up) if epilogue == GATED else 0, "GROUPS": groups,
        "COLUMNS": launch.block_n, "STAGES": launch.num_stages, "EPILOGUE": epilogue, "HAS_BIAS": has_bias,
        "FINISHERS": finishers, "CONSUMER_REGISTERS": consumer, "FINISHER_REGISTERS": finisher,
        "PRODUCER_REGISTERS": producer, "num_warps": 4, "maxnreg": at_launch,
    }  # fmt: skip


def _descriptors(launch: Launch) -> Descriptors:
    tail = launch.block_n % 64
    makers = (64, 64, max(8, next_power_of_2(tail)) if tail else 64)
    return Descriptors(*[partial(_describe, rows=rows) for rows in makers])


def plan_linear_hopper(
    launch: Launch, rows: Rows, weight: Tensor, has_bias: bool, activation: str, keeps_pre: bool, width: int,
    up: Tensor | None = None,
) -> Callable[..., None]:  # fmt: skip
    """launch(x, weight, bias, out, pre, up, up_bias) on tensors that `addressable` allows, x of one row at least."""
    constants = _constants(weight, launch, activation, has_bias, up)
    constants |= {"KEEPS_PRE": keeps_pre, "SUMS": False, "STRIDE_OUT": width, **_NOT_ROTATED}
    descriptors_of = _descriptors(launch)
    grid = (programs(weight.device.index),)
    sizes = (rows.count, tall_tiles(launch.tile, rows.count, constants["N"], grid[0]))
    relaunch = Relaunch(grid, sizes)

    def launch_linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None,
        up: Tensor | None = None, up_bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        bias = weight if bias is None else bias.contiguous()
        up_bias = bias if up_bias is None else up_bias.contiguous()
        up = weight if up is None else up
        pre = out if pre is None else pre
        descriptors = descriptors_of(x, weight, up)
        tensors = (bias, up_bias, out, out, out, pre, weight, weight)
        if not relaunch(None, tensors, descriptors):
            compiled = _gemm_hopper_kernel[grid](*descriptors, *tensors, *sizes, **constants, launch_pdl=True)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_linear


def plan_gradient_hopper(rows: Rows, weight: Tensor, activation: str, sums: bool) -> Callable[..., None]:
    """launch(dout, weight, pre, dpre, h, partial), as of `plan_gradient`, on tensors that `addressable` allows, dout of
    one row at least."""
    launch = gradient_launch()
    constants = _constants(weight.t(), launch, f"{activation}_gradient", False)
    constants |= {"KEEPS_PRE": False, "SUMS": sums, "STRIDE_OUT": 0, **_NOT_ROTATED}
    descriptors_of = _descriptors(launch)
    grid = (programs(weight.device.index),)
    sizes = (rows.count, tall_tiles(launch.tile, rows.count, constants["N"], grid[0]))
    relaunch = Relaunch(grid, sizes)

    def launch_gradient(dout: Tensor, weight: Tensor, pre: Tensor, dpre: Tensor, h: Tensor, partial: Tensor) -> None:
        descriptors = descriptors_of(dout, weight, pre)
        tensors = (weight, weight, dpre, h, partial, weight, weight, weight)
        if not relaunch(None, tensors, descriptors):
            compiled = _gemm_hopper_kernel[grid](*descriptors, *tensors, *sizes, **constants, launch_pdl=True)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_gradient


def count_of_sums(rows: int) -> int:
    """Rows of sums of a gradient of so many rows, four for every 64."""
    return (rows + 63) // 64 * 4


def plan_rotary_hopper(
    launch: Launch, rows: Rows, weight: Tensor, has_bias: bool, cos: Tensor, sin: Tensor, num_heads: int,
    num_k_heads: int,
) -> Callable[..., None]:  # fmt: skip
    """launch(x, weight, bias, cos, sin, q, k, v), as above."""
    angles = angle_constants(cos, sin, weight.shape[0], num_heads, num_k_heads)
    constants = _constants(weight, launch, "rotary", has_bias)
    constants |= {
        "KEEPS_PRE": False, "SUMS": False, "STRIDE_OUT": 0, "HEAD_DIM": 2 * angles["HALF"], "NUM_HEADS": num_heads,
        "NUM_K_HEADS": num_k_heads, "STRIDE_COS": angles["STRIDE_CT"], "STRIDE_SIN": angles["STRIDE_ST"],
        "SHARED_ANGLES": angles["SHARED_ANGLES"],
    }  # fmt: skip
    descriptors_of = _descriptors(launch)
    grid = (programs(weight.device.index),)
    sizes = (rows.count, whole_tiles(rows.count, launch.block_m))
    relaunch = Relaunch(grid, sizes)

    def launch_rotary(
        x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        bias = weight if bias is None else bias.contiguous()
        descriptors = descriptors_of(x, weight, weight)
        tensors = (bias, bias, q, k, v, q, rows_of(cos), rows_of(sin))
        if not relaunch(None, tensors, descriptors):
            compiled = _gemm_hopper_kernel[grid](*descriptors, *tensors, *sizes, **constants, launch_pdl=True)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_rotary
