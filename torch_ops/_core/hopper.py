"""Shared by launchers of Hopper kernels (Gluon): when one can run, TMA descriptors, memory that is kept."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from csrc_free_ops.configs.rows import Gpu
from torch_ops._core import self_test
from torch_ops._core.device import gpu
from torch_ops._core.driver import MOST_DESCRIBED, Address

# Kernels ran on H200 with 3.6, 3.8 and 3.9 (docs/benchmarks.md). 3.7 lies between them and passes the checks of builds
# alone. Kernels rely on where Triton puts shared memory, see csrc_free_ops/tiles/hopper/warpgroup.py.
TRITON_VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))


@lru_cache
def is_supported_triton() -> bool:
    """Return whether this Triton is one of TRITON_VERSIONS."""
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) in TRITON_VERSIONS


def why_not_this_triton(gpu: Gpu) -> str:
    """Return why Hopper kernels do not run under this version of Triton, or nothing.

    The self-test tries a version once that is not one of TRITON_VERSIONS.
    """
    return "" if is_supported_triton() else self_test.why_not(gpu)


def what_holds(gpu: Gpu) -> str:
    """Return the line of `vk info` about the Hopper path; nothing is tried."""
    if gpu.backend != "cuda" or gpu.arch != 90:
        return f"{gpu.name} is no Hopper GPU"
    if is_supported_triton():
        return "yes"
    result = self_test.cached_result(gpu)
    if result is None:
        return f"not yet tried with triton {triton.__version__}; the first eager call tries it"
    if result.holds:
        return f"yes, triton {triton.__version__} passed its self-test on {result.date}"
    return f"the Hopper path {result.fault} with triton {triton.__version__} on {result.date}: {result.why}"


def why_no_hopper(gpu: Gpu, dtype: torch.dtype) -> str:
    """Return why there are no Hopper kernels for this GPU and dtype, or nothing.

    `why_not_this_triton` comes last of all, because it may run the self-test.
    """
    if gpu.backend != "cuda" or gpu.arch != 90:
        return f"{gpu.name} is no Hopper GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return "the Hopper path takes fp16 and bf16"
    return ""


def programs(index: int) -> int:
    """Return the number of multiprocessors, each of which runs one program of a persistent kernel."""
    return _multiprocessors(index) if torch.cuda.is_available() else gpu().multiprocessors


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def to_keep(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Keep the memory that `make` allocates on this stream from call to call.

    Another thread allocates, because a capture on this thread would put the memory into its graph's pool, which keeps
    nothing. So it is where `torch.compile` warms its graphs up.
    """
    stream = torch.cuda.current_stream(device)

    def make_on_stream() -> Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(make_on_stream).result()


_of_thread = threading.local()


def _begin_context() -> None:
    """Give this thread the current device's context, as a launch does, but descriptors are filled before that.

    A thread of autograd has none until it first calls CUDA, which may be here.
    """
    if not hasattr(_of_thread, "has_context") and torch.cuda.is_initialized():
        # Any CUDA call creates the context. This one does not synchronise and is allowed during graph capture.
        torch.cuda.is_current_stream_capturing()
        _of_thread.has_context = True


class Described(tuple[TensorDescriptor, ...]):
    """Descriptors, and the addresses of what they describe."""

    addresses: tuple[int, ...]


class Descriptors:
    """Descriptors of the tensors of a plan, each by a function that makes it: all but the addresses is the plan's.

    Making and checking one takes longer than a launch, so descriptors are remembered by address. They do not keep a
    tensor alive.
    """

    def __init__(self, *describe: Callable[[Tensor], TensorDescriptor]) -> None:
        self._describe = describe
        self._fields: tuple[dict[str, Any], ...] = ()
        self._made: dict[tuple[int, ...], Described] = {}

    def __call__(self, *tensors: Tensor) -> Described:
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        made = self._made.get(addresses)
        if made is None:
            if len(self._made) >= MOST_DESCRIBED:
                self._made.clear()
            made = self._made[addresses] = self._describe_all(tensors)
            made.addresses = addresses
        return made

    def _describe_all(self, tensors: tuple[Tensor, ...]) -> Described:
        _begin_context()
        if not self._fields:
            self._fields = tuple(vars(make(tensor)) for tensor, make in zip(tensors, self._describe, strict=True))
            self._fields = tuple({**fields, "base": None} for fields in self._fields)
        descriptors = []
        for tensor, fields in zip(tensors, self._fields, strict=True):
            descriptor = object.__new__(TensorDescriptor)
            vars(descriptor).update(fields, base=Address(tensor))
            descriptors.append(descriptor)
        return Described(descriptors)
