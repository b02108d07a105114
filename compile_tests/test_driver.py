"""Launches through the CUDA driver: what it is given is what the build of a kernel takes.

Builds are real and for a Hopper GPU; a stand-in for the driver reads memory as the driver does.
"""

import ctypes
import dataclasses
import re
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

from compile_tests.attention import hopper_launches
from compile_tests.contract.trace import SM90, KernelLaunch, fake_gpu
from compile_tests.kernels import NORMS, WINDOW_ATTN
from csrc_free_ops.configs.rows import Config
from torch_ops._core import driver
from torch_ops._core.driver import MOST_DESCRIBED, DriverLaunch

pytestmark = pytest.mark.no_interpret
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PROGRAMMATIC_SERIALIZATION = 6
# The address of a kernel's first tensor.
FIRST = 2**46
ROWS = {name: Config(128, 128, 8, 2) for name in ("attention_fwd_hopper", "attention_bwd_hopper")}


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that were given the context of the device."""
    threads: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: threads.append(threading.get_ident()))
    monkeypatch.setattr(driver, "current_cuda_device", lambda: 0)
    monkeypatch.setattr(driver, "raw_cuda_stream", lambda index: 12)
    return threads


@dataclass
class Driver:
    """Keeps what each launch would give a kernel, and what descriptors are made of."""

    parameters: list[int]
    answer: int = 0
    launches: list[dict[str, Any]] = field(default_factory=list)
    encoded: dict[int, dict[str, Any]] = field(default_factory=dict)

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:  # noqa: N802
        config = config._obj
        self.launches.append({
            "grid": list(config.grid), "block": list(config.block), "shared": config.shared,
            "function": function.value, "stream": config.stream,
            "attributes": [(each.id, each.value) for each in config.attributes[: config.count]],
            "values": [ctypes.string_at(at, size) for at, size in zip(pointers, self.parameters, strict=True)],
            "places": list(pointers),
        })  # fmt: skip
        return self.answer

    def cuTensorMapEncodeTiled(  # noqa: N802
        self, pointer: Any, element: Any, rank: Any, base: Any, shape: Any, strides: Any, block: Any, *rest: Any
    ) -> int:
        self.encoded[pointer.value] = {
            "base": base.value, "shape": list(shape), "strides": list(strides)[: rank.value - 1], "block": list(block)
        }  # fmt: skip
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"invalid device context"
        return 0


def parameters_of(ptx: str) -> list[int]:
    """The bytes of each parameter that the entry of a kernel declares."""
    (entry,) = re.findall(r"\.visible \.entry \w+\(([^)]*)\)", ptx)
    arrays = re.findall(r"\.param (?:\.align \d+ )?\.([bfu])(\d+) [^,\[]*?\w+_param_\d+(?:\[(\d+)\])?", entry)
    plain = re.findall(r"\.param[^,]*", entry)
    assert len(arrays) == len(plain), entry
    return [int(bits) // 8 * int(count or 1) for _, bits, count in arrays]


@triton.jit
def _kernel(out_ptr, absent_ptr, x_ptr, rows, stride, scale, doubled, flag: tl.constexpr, early: tl.constexpr):
    """One argument of each kind; `rows` of 1 and addresses that are multiples of 16 become part of the code."""
    value = tl.load(x_ptr + stride) * scale * rows
    if doubled:
        value *= 2
    if absent_ptr is not None:
        value += tl.load(absent_ptr)
    tl.store(out_ptr, value)


def small_launch(rows: int = 7, stride: int = 2**40 + 3, scale: float = 0.1, doubled: bool = True) -> KernelLaunch:
    tensors = MockTensor(torch.float32), None, MockTensor(torch.bfloat16)
    constants = {"flag": True, "early": None, "num_warps": 2}
    return KernelLaunch(_kernel, (5, 3, 2), (*tensors, rows, stride, scale, doubled), constants)


LAUNCHES: dict[str, Callable[[], KernelLaunch]] = {
    "small": small_launch,
    "norm": lambda: NORMS["layer_norm"].launch("_norm_fwd_kernel"),
    "portable": lambda: WINDOW_ATTN.launch("_attention_fwd_kernel"),
    "hopper": lambda: hopper_launches(ROWS, 128)["_attention_fwd_hopper_kernel"],
    "hopper_dense": lambda: hopper_launches(ROWS, 128, batch=2, cut="qk")["_attention_bwd_hopper_kernel"],
}


class Prepared:
    """The build of a kernel, and the launch of it that was prepared as the first call of a `Bound` does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launch: KernelLaunch, **metadata: Any) -> None:
        with fake_gpu(SM90):
            args = [stand_in(value) for value in launch.args]
            built = launch.kernel.warmup(*args, grid=launch.grid, **launch.kwargs)
        self.driver = Driver(parameters_of(built.asm["ptx"]))
        monkeypatch.setattr(driver, "_driver", lambda: self.driver)
        monkeypatch.setattr(driver, "_parameters_of", lambda function: self.driver.parameters)
        self.descriptors = tuple(each for each in args if isinstance(each, TensorDescriptor))
        others = args[len(self.descriptors) :]
        self.tensors = [each for each in others if each is None or isinstance(each, MockTensor)]
        constants = [launch.arguments[name] for name in launch.kernel.arg_names[len(args) :]]
        self.metadata = {**built.metadata._asdict(), **metadata}
        self.compiled = SimpleNamespace(
            metadata=SimpleNamespace(**self.metadata), src=built.src, function=77, name=launch.name
        )
        self.addresses = [FIRST + 16 * place for place, each in enumerate(self.tensors) if each is not None]
        self.rest = (*others[len(self.tensors) :], *constants)
        self.launch = DriverLaunch.of(self.compiled, (5, 3, 2), self.descriptors, self.tensors, self.rest)

    def __call__(self, first: int = 4096) -> dict[str, Any]:
        """Launch with descriptors of memory that begins there, and return what the driver was given."""
        assert self.launch is not None
        assert self.launch(described(self.descriptors, first), self.addresses)
        return self.driver.launches[-1]


def stand_in(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return dataclasses.replace(value, base=MockTensor(value.base.dtype))
    return MockTensor(value.dtype) if isinstance(value, Tensor) else value


def described(descriptors: tuple[TensorDescriptor, ...], first: int) -> tuple[Any, ...]:
    """The same descriptors at addresses that are made up."""
    fields = ("shape", "strides", "block_shape", "layout", "padding")
    return tuple(
        SimpleNamespace(
            base=SimpleNamespace(data_ptr=lambda place=place: first + 4096 * place),
            **{name: getattr(each, name) for name in fields},
        )
        for place, each in enumerate(descriptors)
    )


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_gets_the_parameters_that_its_build_declares(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Prepared(monkeypatch, LAUNCHES[name]())
    assert prepared.launch is not None, "sizes of parameters differ from those of the build, so Triton would launch"
    given = prepared()
    assert given["grid"] == [5, 3, 2] and given["function"] == 77 and given["stream"] == 12
    assert given["block"] == [32 * prepared.metadata["num_warps"], 1, 1]
    assert given["shared"] == prepared.metadata["shared"]
    assert given["attributes"] == [(PROGRAMMATIC_SERIALIZATION, 1)] * bool(prepared.metadata["launch_pdl"])
    numbers = [int.from_bytes(value, "little") for value in given["values"] if len(value) == 8]
    assert [number for number in numbers if number in prepared.addresses] == prepared.addresses
    assert numbers[-2:] == [0, 0], "scratch memory"


def test_scalars_lie_as_their_types_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants of the code and absent tensors take no place."""
    given = Prepared(monkeypatch, small_launch(rows=7, stride=2**40 + 3, scale=0.1, doubled=True))()
    scalars = [struct.pack("i", 7), struct.pack("q", 2**40 + 3), struct.pack("f", 0.1), b"\1"]
    assert given["values"] == [struct.pack("q", FIRST), struct.pack("q", FIRST + 32), *scalars, bytes(8), bytes(8)]
    constant = Prepared(monkeypatch, small_launch(rows=1))()
    assert constant["values"] == given["values"][:2] + given["values"][3:]


@pytest.mark.parametrize("name", ["hopper", "hopper_dense"])
def test_descriptors_are_encoded_once_for_each_address(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Prepared(monkeypatch, LAUNCHES[name]())
    first = prepared()
    maps = [place for place, value in enumerate(first["values"]) if len(value) == 128]
    made = [prepared.driver.encoded[first["places"][place]] for place in maps]
    assert len(made) == len(prepared.descriptors)
    for place, (one, descriptor) in enumerate(zip(made, prepared.descriptors, strict=True)):
        size = descriptor.base.dtype.itemsize
        assert one["base"] == 4096 * (1 + place)
        assert one["shape"] == list(descriptor.shape)[::-1]
        assert one["strides"] == [size * stride for stride in descriptor.strides[-2::-1]]
        assert one["block"][0] * size == descriptor.layout.swizzle_byte_width
    assert all(first["places"][place] % 64 == 0 for place in maps)
    again, other = prepared(), prepared(first=2**20)
    assert [again["places"][place] for place in maps] == [first["places"][place] for place in maps]
    assert len(prepared.driver.encoded) == 2 * len(maps)
    assert prepared.driver.encoded[other["places"][maps[0]]]["base"] == 2**20


def test_descriptors_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Prepared(monkeypatch, LAUNCHES["hopper"]())
    for number in range(MOST_DESCRIBED + 2):
        prepared(first=2**20 * (1 + number))
    assert prepared.launch is not None and len(prepared.launch._described) == 2


def test_threads_launch_from_memory_of_their_own(contexts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread gets the context of the device first, also one that the system gives the name of one that ended."""
    prepared = Prepared(monkeypatch, LAUNCHES["small"]())
    prepared()
    for count in range(2, 6):
        thread = threading.Thread(target=prepared)
        thread.start()
        thread.join()
        assert len(contexts) == count
    prepared()
    assert len(contexts) == 5
    places = [tuple(each["places"]) for each in prepared.driver.launches]
    assert places[0] == places[-1] and places[0] not in places[1:-1]


REFUSED: dict[str, Any] = {
    "num_ctas": 2, "global_scratch_size": 64, "profile_scratch_size": 64, "instrumentation_mode": "fpsan",
    "target": GPUTarget("hip", "gfx942", 64), "tensordesc_meta": ({},),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_triton_launches_what_takes_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Prepared(monkeypatch, small_launch()).launch is not None
    assert Prepared(monkeypatch, small_launch(), **{name: REFUSED[name]}).launch is None


def test_triton_launches_where_the_driver_knows_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Prepared(monkeypatch, small_launch())
    monkeypatch.setattr(driver, "_parameters_of", lambda function: [*prepared.driver.parameters, 8])
    compiled = prepared.compiled
    assert DriverLaunch.of(compiled, (1, 1, 1), (), prepared.tensors, prepared.rest) is None


def test_hooks_of_launches_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proton, Triton's profiler, adds some."""
    prepared = Prepared(monkeypatch, small_launch())
    assert prepared.launch is not None
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        assert not prepared.launch((), prepared.addresses)
    finally:
        hook.remove(print)
    assert prepared.launch((), prepared.addresses) and len(prepared.driver.launches) == 1


def test_a_failed_launch_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Prepared(monkeypatch, small_launch())
    prepared.driver.answer = 201
    with pytest.raises(RuntimeError, match="the launch of _kernel failed with a CUDA error: invalid device context"):
        prepared()
