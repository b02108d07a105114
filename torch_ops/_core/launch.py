"""How kernels are launched: on rows they can read, into new outputs, again without a look at each argument, early."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.configs.rows import Config, Gpu
from torch_ops._core.device import INTERPRETED_GPU, gpu
from torch_ops._core.plan import Plan
from torch_ops._core.registry import INTERPRET, is_eager


def with_columns(tensor: Tensor) -> Tensor:
    """Kernels read rows of contiguous columns; a layout without them (a transposed or expanded one) is copied."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def readable(*tensors: Tensor) -> bool:
    """Whether kernels can read all of them as they are."""
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def row_stride(tensor: Tensor) -> int:
    """From one row of `with_columns(tensor)` to the next; a row is all but the first dimension."""
    return tensor.stride(0) if tensor.stride(-1) == 1 else math.prod(tensor.shape[1:])


def dense_like(tensor: Tensor) -> Tensor:
    """The same with dimensions in its order of memory, so that what is transposed on the way in is so on the way out.

    Columns lie innermost in any case, since kernels write rows of them.
    """
    if tensor.stride(-1) == 1:
        like = torch.empty_like(tensor)
        if like.stride(-1) == 1:
            return like
    return contiguous_like(tensor)


def contiguous_like(tensor: Tensor) -> Tensor:
    """An empty output of its shape, dtype and device; `new_empty(tensor.shape)` takes the host twice as long."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def blocks_of(launch: Config) -> dict[str, int]:
    """The constants of a kernel that works on tiles of rows and columns."""
    return {
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


def can_overlap() -> bool:
    """Whether kernels may be launched to begin while the one before ends (`launch_pdl`): by eager calls alone."""
    return is_eager() and not INTERPRET and gpu().backend == "cuda" and int(gpu().arch) >= 90


# Larger strides need 64 bits: offsets within a tile of rows may pass 2^31 elements.
_WIDE_STRIDE = 2**22


def row_constants(strides: Sequence[int], settled: bool, unit: int) -> tuple[list[int], list[int]]:
    """Row strides as constants of a kernel, and as its arguments at run time (`row_step` of csrc_free_ops/tiles/rows.py).

    Strides that a model settles are constants. Others follow from a batch or a length, and as constants each would cost
    a build. Either all are constants or none, so that few builds serve all sizes.
    """
    if settled:
        return list(strides), [0] * len(strides)
    wide = any(stride > _WIDE_STRIDE for stride in strides)
    return [-1 if wide else 0] * len(strides), [stride // unit for stride in strides]


def dense_strides(*tensors: Tensor) -> tuple[int, list[int], list[int]]:
    """STRIDE_UNIT, strides of batch and head of all tensors in it, one after the other, and their row strides.

    A tensor without contiguous columns has the strides of its copy.
    """
    strides = [tensor.stride() if tensor.stride(3) == 1 else tensor.contiguous().stride() for tensor in tensors]
    outer = [stride for batch, head, _, _ in strides for stride in (batch, head)]
    stride_unit = 8 if all(stride % 8 == 0 for stride in outer) else 1
    return stride_unit, [stride // stride_unit for stride in outer], [row for _, _, row, _ in strides]


def current_gpu() -> Gpu:
    return INTERPRETED_GPU if INTERPRET else gpu()


def precision_of(q: Tensor) -> str:
    """tf32 for fp32 products only where PyTorch allows it, by whichever of its settings."""
    return "tf32" if q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def for_each_precision(tensor: Tensor, plan: Callable[[str], Plan]) -> Plan:
    """Plan an fp32 call for each setting of PyTorch's products, since it may change between calls.

    The first tensor of a launch has the dtype of the call; the setting is read at each launch.
    """
    if tensor.dtype is not torch.float32:
        return plan("ieee")
    plans = {precision: plan(precision) for precision in ("ieee", "tf32")}
    current = plans[precision_of(tensor)]
    launches = {precision: each.launch for precision, each in plans.items()}

    def launch(tensors: Any) -> None:
        launches[precision_of(tensors[0])](tensors)

    return Plan(launch, current.kernels, current.path, current.why, current.extra)


def head_strides(*tensors: Tensor) -> tuple[int, tuple[int, ...]]:
    """STRIDE_UNIT, and the head strides in it: if all are multiples of 8, kernels load 16 bytes at a time."""
    strides = [tensor.stride(1) if tensor.stride(2) == 1 else tensor.shape[2] for tensor in tensors]
    stride_unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    return stride_unit, tuple(stride // stride_unit for stride in strides)
