"""The launcher of the GEMM core's Hopper kernel (Gluon), which no compiler of PyTorch's can take apart.

`why_unsupported` says from metadata alone why a call cannot take this path.

Launches take the kernel's pointers in its order: bias, up_bias, out, second, third, pre, cos and sin. In the place of
one that is not read stands another of the call.
"""

from functools import partial
from typing import Any

from torch import Tensor
from triton import next_power_of_2
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from csrc_free_ops.configs.gemm_hopper import (
    WIDEST_ROTATED,
    count_epilogue_warps,
    gradient_config,
    tall_tiles,
    whole_tiles,
)
from csrc_free_ops.configs.rows import Config, Gpu
from csrc_free_ops.gemm.hopper.kernel import _gemm_hopper_kernel
from csrc_free_ops.tiles.hopper.versions import PTXAS
from torch_ops._core.hopper import Descriptors, programs, why_no_hopper, why_not_this_triton
from torch_ops._core.plan import Bound, Plan
from torch_ops._gemm.portable import (
    GATED,
    Chosen,
    Rows,
    angle_constants,
    padded,
    partner_rows,
    product_name,
    product_size,
    table_rows,
)
from torch_ops._gemm.tensors import Gradient, GradientOptions, Linear, Rotary

# Registers per thread of a consumer, an epilogue warp, the producer, and at launch; keys: consumer warpgroups, epilogue
# warps.
REGISTERS = {(2, 2): (168, 168, 168, 168), (2, 4): (168, 128, 40, 128), (3, 4): (112, 104, 40, 96)}
_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def why_unsupported(gpu: Gpu, rows: Rows, weight: Tensor, head_dim: int = 0, up: Tensor | None = None) -> str:
    """Why a product with this weight cannot take the Hopper path, or nothing. A rotated product has heads of
    `head_dim`."""
    if reason := why_no_hopper(gpu, weight.dtype):
        return reason
    weights = (weight,) if up is None else (weight, up)
    if rows.stride % 8 or any(each.stride(1) != 1 or each.stride(0) % 8 for each in weights):
        return "TMA cannot address rows that do not begin at 16 bytes"
    if rows.stride == 0 or any(each.stride(0) == 0 for each in weights):
        return "TMA cannot address rows that lie in one place"
    if head_dim > WIDEST_ROTATED or head_dim % 8:
        return f"the Hopper path rotates heads of up to {WIDEST_ROTATED} columns, in steps of 8"
    return why_not_this_triton(gpu)


def _describe(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` rows and 64 columns; what lies outside of the tensor reads as zero."""
    # The stride of a single row may be anything.
    stride = padded(tensor.shape[1], tensor.dtype) if tensor.shape[0] == 1 else tensor.stride(0)
    return TensorDescriptor(tensor, list(tensor.shape), [stride, 1], [rows, 64], _LAYOUT)


# Scalars of a product without rotation.
_NOT_ROTATED = {
    "HEAD_DIM": 8, "NUM_HEADS": 1, "NUM_K_HEADS": 1, "STRIDE_COS": 0, "STRIDE_SIN": 0, "SHARED_ANGLES": True
}  # fmt: skip


def _binding(
    launch: Config, rows: Rows, weight: Tensor, constants: dict[str, Any], up: Tensor | None = None
) -> tuple[Descriptors, tuple[tuple[int], tuple[int, int], dict[str, Any]]]:
    """The descriptors of a launch's operands, and its grid, scalars and constants. Given are the epilogue's own."""
    groups, epilogue_warps = launch.block_m // 64, count_epilogue_warps(launch)
    consumer, epilogue, producer, at_launch = REGISTERS[groups, epilogue_warps]
    n, k = product_size(weight, up)
    grid = (programs(weight.device.index),)
    if constants["EPILOGUE"] == "rotary":
        tall = whole_tiles(rows.count, launch.block_m)
    else:
        tall = tall_tiles(launch.tile, rows.count, n, grid[0])
    constants = {
        "N": n, "K": k, "PARTNER": partner_rows(weight, up) if constants["EPILOGUE"] == GATED else 0, "GROUPS": groups,
        "COLUMNS": launch.block_n, "STAGES": launch.num_stages, "EPILOGUE_WARPS": epilogue_warps,
        "CONSUMER_REGISTERS": consumer, "EPILOGUE_REGISTERS": epilogue, "PRODUCER_REGISTERS": producer,
        "KEEPS_PRE": False, "COLUMN_SUMS": False,
        "STRIDE_OUT": 0, **_NOT_ROTATED, **constants, "num_warps": 4, "maxnreg": at_launch, "launch_pdl": True,
        **PTXAS,
    }  # fmt: skip
    tail = launch.block_n % 64
    block_rows = (64, 64, max(8, next_power_of_2(tail)) if tail else 64)
    descriptors = Descriptors(*[partial(_describe, rows=rows) for rows in block_rows])
    return descriptors, (grid, (rows.count, tall), constants)


def plan_linear_hopper(chosen: Chosen, t: Linear, activation: str) -> Plan:
    """For tensors that TMA can address, x of one row at least."""
    constants = {
        "EPILOGUE": activation, "HAS_BIAS": t.bias is not None, "KEEPS_PRE": t.pre is not None,
        "STRIDE_OUT": t.out.shape[1],
    }  # fmt: skip
    descriptors_of, binding = _binding(chosen[0], Rows.of(t.x), t.weight, constants, t.up)
    bound = Bound(_gemm_hopper_kernel, *binding)

    def launch_linear(t: Linear) -> None:
        x, weight, bias, out, pre, up, up_bias = t
        bias = weight if bias is None else bias.contiguous()
        up_bias = bias if up_bias is None else up_bias.contiguous()
        descriptors = descriptors_of(x, weight, weight if up is None else up)
        pre = out if pre is None else pre
        bound(bias, up_bias, out, out, out, pre, weight, weight, descriptors=descriptors)

    return Plan(launch_linear, {product_name("gemm_hopper", t.weight, t.up): chosen}, "hopper")


def plan_gradient_hopper(t: Gradient, options: GradientOptions) -> Plan:
    """For tensors that TMA can address, dout of one row at least."""
    launch = gradient_config()
    constants = {"EPILOGUE": f"{options.activation}_gradient", "HAS_BIAS": False, "COLUMN_SUMS": options.sums}
    descriptors_of, binding = _binding(launch, Rows.of(t.dout), t.weight.t(), constants)
    bound = Bound(_gemm_hopper_kernel, *binding)

    def launch_gradient(t: Gradient) -> None:
        dout, weight, pre, dpre, h, partial = t
        descriptors = descriptors_of(dout, weight, pre)
        bound(weight, weight, dpre, h, partial, weight, weight, weight, descriptors=descriptors)

    kernels = {product_name("gemm_hopper_gradient", t.weight): (launch, "the one tile of gradients")}
    return Plan(launch_gradient, kernels, "hopper")


def count_of_column_sums(rows: int) -> int:
    """Rows of sums of a gradient of so many rows, four for every 64."""
    return (rows + 63) // 64 * 4


def plan_rotary_hopper(chosen: Chosen, t: Rotary) -> Plan:
    """For tensors that TMA can address, x of one row at least."""
    angles = angle_constants(t.cos, t.sin, t.q, t.k)
    constants = {
        "EPILOGUE": "rotary", "HAS_BIAS": t.bias is not None, "HEAD_DIM": t.q.shape[2],
        "NUM_HEADS": angles["NUM_HEADS"], "NUM_K_HEADS": angles["NUM_K_HEADS"], "STRIDE_COS": angles["STRIDE_CT"],
        "STRIDE_SIN": angles["STRIDE_ST"], "SHARED_ANGLES": angles["SHARED_ANGLES"],
    }  # fmt: skip
    descriptors_of, binding = _binding(chosen[0], Rows.of(t.x), t.weight, constants)
    bound = Bound(_gemm_hopper_kernel, *binding)

    def launch_rotary(t: Rotary) -> None:
        x, weight, bias, cos, sin, q, k, v = t
        bias = weight if bias is None else bias.contiguous()
        descriptors = descriptors_of(x, weight, weight)
        bound(bias, bias, q, k, v, q, table_rows(cos), table_rows(sin), descriptors=descriptors)

    return Plan(launch_rotary, {product_name("gemm_hopper", t.weight): chosen}, "hopper")
