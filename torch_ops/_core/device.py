"""Which GPU a launch is for. One place asks the Triton driver, so that tests can stand another one in."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from csrc_free_ops.configs.rows import Gpu, gpu_name
from csrc_free_ops.tiles.hopper.limits import SHARED_BYTES
from torch_ops._core.torch_private import current_cuda_device

# Bytes that a block can ask for (CUDA C++ Programming Guide, technical specifications per compute capability).
SHARED_MEMORY = {
    80: 166912,
    86: 101376,
    87: 166912,
    89: 101376,
    90: SHARED_BYTES.value,
    100: 232448,
    103: 232448,
    120: 101376,
}

# The GPU that the interpreter stands in for. It has few processors, so that each program gets several tiles.
INTERPRETED_GPU = Gpu("interpreter", "interpreter", 0, 2**30, 8)


@lru_cache
def _describe(driver: Any, index: int | None) -> Gpu:
    target = driver.get_current_target()
    if index is None:
        shared = SHARED_MEMORY.get(target.arch, 65536)
        return Gpu(f"{target.backend}-{target.arch}", target.backend, target.arch, shared)
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 65536)
    return Gpu(gpu_name(properties.name), target.backend, target.arch, shared, properties.multi_processor_count)


def gpu() -> Gpu:
    """The current device, as Triton's active driver describes it."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    return _describe(triton.runtime.driver.active, index)


def host_tensor(values: Any, dtype: torch.dtype) -> Tensor:
    """Numbers of the host as a tensor on the CPU, whatever PyTorch's default device and dtype are."""
    return torch.tensor(values, dtype=dtype, device="cpu")


def out_of_memory(error: Exception) -> bool:
    """Return whether memory did not suffice. The CPU's allocator, Triton and cuBLAS have no type of error for it."""
    said = str(error).lower()
    words = "can't allocate memory", "out of memory", "status_alloc_failed"
    return isinstance(error, torch.OutOfMemoryError) or any(each in said for each in words)


def run_where_tensors_are(body: Callable[..., Any], *args: Any) -> Any:
    """body(*args), with their GPU as the current one."""
    # An optional first tensor may be absent.
    first = args[0] if args[0] is not None else next(arg for arg in args if arg is not None)
    index = first.get_device()
    if index == current_cuda_device():
        return body(*args)
    with torch.cuda.device(index):
        return body(*args)
