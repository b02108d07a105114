"""How kernels are launched: on rows they can read, into new outputs, again without a look at each argument, early."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
WIDE_STRIDE = 2**22


class Strides(NamedTuple):
    """Strides of dense or packed tensors, one tensor after the other, as kernels take them.

    unit: STRIDE_UNIT, in which strides that are arguments at run time count.
    outer: strides between batches, if tensors are dense, and between heads, at run time.
    constants, rows: strides between rows as constants, or as arguments at run time (`row_step` of tiles/rows.py).
    """

    unit: int
    outer: list[int]
    constants: list[int]
    rows: list[int]


def are_settled(rows: list[int], heads: list[int], head_dim: int) -> bool:
    """Return whether sizes of a model place rows of tensors, of so many heads each, and no batch or length."""
    packed = max(heads) + 2 * min(heads)
    return all(
        not isinstance(row, torch.SymInt) and row in (head_dim, each * head_dim, 2 * each * head_dim, packed * head_dim)
        for row, each in zip(rows, heads, strict=True)
    )


def dense_strides(*tensors: Tensor) -> Strides:
    """Strides of [B, H, S, D] tensors; one without contiguous columns has those of its copy.

    Rows that a model's sizes place are a constant number of heads apart: one, all heads, or those of a packed
    projection. Any other row stride follows from a batch or a length, as in [S, B, H, D]. As a constant it would cost a
    build for each size. Either all row strides of a launch are constants or none, so that few builds serve all.
    """
    strides = [tensor.stride() if tensor.stride(3) == 1 else tensor.contiguous().stride() for tensor in tensors]
    outer = [stride for batch, head, _, _ in strides for stride in (batch, head)]
    rows = [row for _, _, row, _ in strides]
    return _counted(outer, rows, are_settled(rows, [x.shape[1] for x in tensors], tensors[0].shape[3]))


def packed_strides(*tensors: Tensor) -> Strides:
    """Strides of [T, H, D] tensors, by the rule of `dense_strides`.

    A row stride follows from a batch in a sequence of [T, B, H, D], for example.
    """
    rows = [row_stride(tensor) for tensor in tensors]
    heads = [tensor.stride(1) if tensor.stride(2) == 1 else tensor.shape[2] for tensor in tensors]
    return _counted(heads, rows, are_settled(rows, [x.shape[1] for x in tensors], tensors[0].shape[2]))


def matrix_strides(*tensors: Tensor) -> Strides:
    """Row strides of [T, C] tensors: either all are constants that a model settles, or none is.

    A model places rows without gaps, padded, or as a part of three that are packed. Any other stride follows from a
    length, as that of h[:, -1] does.
    """
    rows = [row_stride(tensor) for tensor in tensors]
    return _counted([], rows, all(is_settled(row, x.shape[1]) for row, x in zip(rows, tensors, strict=True)))


def is_settled(row: int, width: int) -> bool:
    """Return whether a model places rows of `width` columns, `row` columns apart."""
    return not isinstance(row, torch.SymInt) and (0 < row < 2 * width or row == 3 * width)


def _counted(outer: list[int], rows: list[int], settled: bool) -> Strides:
    if settled:
        unit = 8 if all(stride % 8 == 0 for stride in outer) else 1
        return Strides(unit, [stride // unit for stride in outer], rows, [0] * len(rows))
    unit = 8 if all(stride % 8 == 0 for stride in (*outer, *rows)) else 1
    wide = any(isinstance(row, torch.SymInt) or row > WIDE_STRIDE for row in rows)
    constants = [-1 if wide else 0] * len(rows)
    return Strides(unit, [stride // unit for stride in outer], constants, [row // unit for row in rows])


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
