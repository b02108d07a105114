"""How kernels are launched: on rows they can read, into new outputs, again without a look at each argument, early."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from csrc_free_ops.configs.rows import Gpu, Launch
from torch_ops._core.device import INTERPRETED_GPU, gpu
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


def blocks_of(launch: Launch) -> dict[str, int]:
    """The constants of a kernel that works on tiles of rows and columns."""
    return {
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip


def can_overlap() -> bool:
    """Whether kernels may be launched to begin while the one before ends (`launch_pdl`): by eager calls alone."""
    return is_eager() and not INTERPRET and gpu().backend == "cuda" and int(gpu().arch) >= 90


def length_of(q: Tensor) -> int | None:
    """Its rows where they are a plain number; None in graphs of dynamic shape, which may not branch on it."""
    return None if isinstance(q.shape[2], torch.SymInt) else q.shape[2]


def dense_strides(*tensors: Tensor) -> tuple[int, list[int], list[int]]:
    """UNIT, strides of batch and head of all tensors in it, one after the other, and their row strides.

    Of what has no contiguous columns they are those of its copy.
    """
    strides = [tensor.stride() if tensor.stride(3) == 1 else tensor.contiguous().stride() for tensor in tensors]
    outer = [stride for batch, head, _, _ in strides for stride in (batch, head)]
    unit = 8 if all(stride % 8 == 0 for stride in outer) else 1
    return unit, [stride // unit for stride in outer], [row for _, _, row, _ in strides]


class Relaunch:
    """A plan's launch kept as compiled, for the calls after the first.

    Triton looks some forty arguments over at each launch, which is most of its host time; a plan fixes them all but the
    addresses, and `mode`, whatever else the kernel depends on. Kept are launches on aligned tensors only: for a pointer
    off 16 bytes Triton builds other code. What a debugger or profiler sets in `triton.knobs` for the compiler therefore
    counts before the first call; hooks on launches are called each time.
    """

    def __init__(self, grid: tuple[int, ...], scalars: tuple[Any, ...]) -> None:
        self._grid = (*grid, 1, 1)[:3]
        self._scalars = scalars
        self._kept: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __call__(self, mode: Any, tensors: tuple[Tensor | None, ...], descriptors: tuple[Any, ...] = ()) -> bool:
        """Launches if a launch in this mode was kept and the tensors are aligned; says whether it did.

        `descriptors`, of tensors that are aligned, are the kernel's first arguments.
        """
        kept = self._kept.get(mode)
        if kept is None or not self._aligned(tensors):
            return False
        launch, rest = kept
        launch(*descriptors, *tensors, *rest)
        return True

    def keep(self, mode: Any, tensors: tuple[Tensor | None, ...], constants: dict[str, Any], compiled: Any) -> None:
        """`compiled` is what the launch returned: nothing in traces and in the interpreter, and nothing is kept."""
        if isinstance(compiled, CompiledKernel) and self._aligned(tensors):
            in_order = (constants[name] for name in compiled.src.fn.arg_names if name in constants)
            self._kept[mode] = compiled[self._grid], (*self._scalars, *in_order)

    @staticmethod
    def _aligned(tensors: tuple[Tensor | None, ...]) -> bool:
        addresses = 0
        for tensor in tensors:
            if tensor is not None:
                addresses |= tensor.data_ptr()
        return addresses % 16 == 0


def current_gpu() -> Gpu:
    return INTERPRETED_GPU if INTERPRET else gpu()


def precision_of(q: Tensor) -> str:
    """tf32 for fp32 products only where PyTorch allows it, by whichever of its settings."""
    return "tf32" if q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def contiguous_row(tensor: Tensor) -> int:
    return tensor.shape[1] * tensor.shape[2]


def head_strides(*tensors: Tensor) -> tuple[int, tuple[int, ...]]:
    """UNIT, and the head strides in it: where all are multiples of 8, kernels know it and load 16 bytes at a time."""
    strides = [tensor.stride(1) if tensor.stride(2) == 1 else tensor.shape[2] for tensor in tensors]
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    return unit, tuple(stride // unit for stride in strides)
