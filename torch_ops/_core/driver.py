"""Launches through the CUDA driver with everything prepared but addresses.

Triton's launcher inspects every argument, calls its hooks and fills each TMA descriptor anew. This takes several times
as long as the launch itself. A `DriverLaunch` keeps the arguments of a compiled kernel in memory as cuLaunchKernelEx
reads them. A call writes the addresses of its tensors there, and TMA descriptors are remembered by address.

`DriverLaunch.of` compares its arguments with the parameters that the driver knows of the kernel. It gives None where
they differ, or where Triton's launcher would do more.
"""

import ctypes
import struct
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from triton import knobs

from torch_ops._core.torch_private import current_cuda_device, raw_cuda_stream

# Sets of addresses whose descriptors are kept; memory of a model in use has far fewer.
MOST_DESCRIBED = 512

# How scalars lie in memory, by Triton's names of types.
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_POINTER = struct.calcsize("P")
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
# Triton's numbers of element types in the driver's order (`CUtensorMapDataType`).
_ELEMENT_TYPES = {**{number: number for number in range(16)}, 8: 10, 9: 8, 10: 9}
_L2_PROMOTION_128B = 2
_PROGRAMMATIC_SERIALIZATION, _COOPERATIVE = 6, 2


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


@lru_cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        said = text.value.decode() if text.value else f"error {code}"
        raise RuntimeError(f"{what} failed with a CUDA error: {said}")


class Address:
    """The memory of a tensor, in the place of the tensor in a descriptor that must not keep it alive."""

    __slots__ = ("_address", "dtype")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self.dtype = tensor.data_ptr(), tensor.dtype

    def data_ptr(self) -> int:
        return self._address


class _OfThread(threading.local):
    arguments: "_Arguments | None" = None


class _Arguments:
    """One thread's memory of a launch."""

    def __init__(self, launch: "DriverLaunch") -> None:
        # Any CUDA call gives the thread its context. This one does not synchronise and is allowed during capture.
        torch.cuda.is_current_stream_capturing()
        self.values = ctypes.create_string_buffer(launch.image, len(launch.image))
        begin = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * len(launch.places))(*[begin + each for each in launch.places])
        self.places = memoryview(self.pointers).cast("B").cast("Q")
        self.attributes = (_Attribute * 2)()
        count = 0
        for kind, is_on in ((_PROGRAMMATIC_SERIALIZATION, launch.overlaps), (_COOPERATIVE, launch.cooperative)):
            if is_on:
                self.attributes[count].id, self.attributes[count].value = kind, 1
                count += 1
        self.config = _Config(
            launch.grid, (launch.threads, 1, 1), launch.shared, None, self.attributes if count else None, count
        )
        self.stream: int | None = None
        self.config_pointer = ctypes.byref(self.config)


class _Maps:
    """TMA descriptors in memory, each a CUtensorMap."""

    def __init__(self, descriptors: Sequence[Any], metas: Sequence[Any]) -> None:
        self._memory = ctypes.create_string_buffer(_MAP_BYTES * len(descriptors) + _MAP_ALIGNMENT)
        begin = -(-ctypes.addressof(self._memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self.pointers = [begin + _MAP_BYTES * place for place in range(len(descriptors))]
        for pointer, descriptor, meta in zip(self.pointers, descriptors, metas, strict=True):
            _encode(pointer, descriptor, meta)


class DriverLaunch:
    """A compiled kernel with all of its arguments but addresses."""

    def __init__(
        self, compiled: Any, grid: Sequence[int], image: bytes, places: list[int], maps: list[tuple[int, Any]],
        tensors: int,
    ) -> None:  # fmt: skip
        """`image` holds all values, addresses first; `places` says where each parameter lies in it.

        `maps` names the parameters that are TMA descriptors, and Triton's metadata of each.
        """
        metadata = compiled.metadata
        self.image, self.places = image, places
        self.grid, self.threads, self.shared = tuple(grid), 32 * metadata.num_warps, metadata.shared
        self.overlaps, self.cooperative = bool(metadata.launch_pdl), bool(metadata.launch_cooperative_grid)
        self._function = ctypes.c_void_p(compiled.function)
        # The module of the function lives as long as this does.
        self._compiled = compiled
        self._count, self._pack = tensors, struct.Struct(f"{tensors}Q").pack_into
        self._device = current_cuda_device()
        self._maps = maps
        self._described: dict[tuple[int, ...], _Maps] = {}
        self._of_thread = _OfThread()
        self._launch = _driver().cuLaunchKernelEx

    @staticmethod
    def of(
        compiled: Any, grid: Sequence[int], descriptors: Sequence[Any], tensors: Sequence[Any], rest: Sequence[Any]
    ) -> "DriverLaunch | None":
        """Prepare a launch of `compiled` on arguments of these kinds, or return None where Triton is to launch."""
        try:
            return _prepared(compiled, grid, descriptors, tensors, rest)
        except (AttributeError, KeyError, OSError, TypeError, struct.error):
            # Another Triton or driver, which holds something elsewhere.
            return None

    def __call__(self, descriptors: Sequence[Any], addresses: list[int]) -> bool:
        """Launch, or return False where Triton's launcher has hooks to call or the arguments are others."""
        runtime = knobs.runtime
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or len(addresses) != self._count:
            return False
        arguments = self._of_thread.arguments
        if arguments is None:
            arguments = self._of_thread.arguments = _Arguments(self)
        self._pack(arguments.values, 0, *addresses)
        if self._maps:
            places = arguments.places
            # Another thread may forget the descriptors meanwhile, so their memory is held here.
            memory = self._memory_of(descriptors)
            for (place, _), pointer in zip(self._maps, memory.pointers, strict=True):
                places[place] = pointer
        stream = raw_cuda_stream(self._device)
        if stream != arguments.stream:
            arguments.stream = arguments.config.stream = stream
        code = self._launch(arguments.config_pointer, self._function, arguments.pointers, None)
        if code:
            _check(code, f"the launch of {self._compiled.name}")
        return True

    def _memory_of(self, descriptors: Sequence[Any]) -> "_Maps":
        key = getattr(descriptors, "addresses", None)
        if key is None:
            key = tuple([each.base.data_ptr() for each in descriptors if each is not None])
        found = self._described.get(key)
        if found is None:
            if len(self._described) >= MOST_DESCRIBED:
                self._described.clear()
            there = [each for each in descriptors if each is not None]
            found = self._described[key] = _Maps(there, [meta for _, meta in self._maps])
        return found


def _prepared(
    compiled: Any, grid: Sequence[int], descriptors: Sequence[Any], tensors: Sequence[Any], rest: Sequence[Any]
) -> DriverLaunch | None:
    metadata = compiled.metadata
    plain = (
        metadata.target.backend == "cuda"
        and metadata.num_ctas == 1
        and not metadata.global_scratch_size
        and not metadata.profile_scratch_size
        and not getattr(metadata, "instrumentation_mode", "")
        and hasattr(knobs.runtime.launch_enter_hook, "calls")
        and hasattr(knobs.runtime.launch_exit_hook, "calls")
        and all(grid)
    )
    if not plain:
        return None
    arguments = (*descriptors, *tensors, *rest)
    types = [compiled.src.signature[name] for name in compiled.src.fn.arg_names]
    count = sum(each is not None for each in tensors)
    # Addresses come first, so that one call writes them all.
    image = bytearray(_POINTER * count)
    places: list[int] = []
    sizes: list[int] = []
    maps: list[tuple[int, Any]] = []
    metas = list(metadata.tensordesc_meta or ())
    pointers = 0

    def add(form: str, value: Any) -> None:
        size = struct.calcsize(form)
        image.extend(bytes(-len(image) % size))
        places.append(len(image))
        sizes.append(size)
        image.extend(struct.pack(form, value))

    for kind, argument in zip(types, arguments, strict=True):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            meta = metas[len(maps)]
            if meta["fp4_padded"] or meta.get("is_im2col") or getattr(argument, "round_f32_to_tf32", False):
                return None
            maps.append((len(places), meta))
            places.append(0)
            sizes.append(_MAP_BYTES)
            for size in argument.shape:
                add("i", size)
            for stride in argument.strides:
                add("q", stride)
        elif kind.startswith("*"):
            if argument is None:
                return None
            places.append(_POINTER * pointers)
            sizes.append(_POINTER)
            pointers += 1
        else:
            add(_FORMATS[kind], argument)
    # Scratch memory of the whole grid and of a profiler.
    for _ in range(2):
        add("Q", 0)
    if pointers != count or len(metas) != len(maps) or sizes != _parameters_of(compiled.function):
        return None
    return DriverLaunch(compiled, grid, bytes(image), places, maps, count)


def _parameters_of(function: int) -> list[int]:
    """The sizes of a kernel's parameters, as the driver knows them."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    found: list[int] = []
    while not _driver().cuFuncGetParamInfo(
        ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
    ):
        found.append(size.value)
    return found


def _encode(pointer: int, descriptor: Any, meta: Any) -> None:
    """Fill a CUtensorMap, as Triton's launcher does."""
    rank, element = len(descriptor.shape), meta["elem_size"]

    def array(kind: Any, values: Iterable[int]) -> Any:
        values = list(values)
        return (kind * max(1, len(values)))(*values)

    # The innermost dimension comes first, and its stride is left out.
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(pointer), ctypes.c_int(_ELEMENT_TYPES[meta["elem_type"]]), ctypes.c_uint(rank),
            ctypes.c_void_p(descriptor.base.data_ptr()), array(ctypes.c_uint64, reversed(descriptor.shape)),
            array(ctypes.c_uint64, [element * each for each in reversed(descriptor.strides[:-1])]),
            array(ctypes.c_uint32, reversed(meta["block_size"])), array(ctypes.c_uint32, [1] * rank), ctypes.c_int(0),
            ctypes.c_int(meta["swizzle"]), ctypes.c_int(_L2_PROMOTION_128B), ctypes.c_int(descriptor.padding == "nan"),
        ),
        "cuTensorMapEncodeTiled",
    )  # fmt: skip


__all__ = ["MOST_DESCRIBED", "Address", "DriverLaunch"]
