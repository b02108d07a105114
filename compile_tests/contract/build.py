"""Kernels built ahead of time, up to the machine code, for any target."""

import dataclasses
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

from compile_tests import triton_alone
from compile_tests.contract.trace import SM90, KernelLaunch
from compile_tests.contract.variants import Demands, append

Point = TypeVar("Point")

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": SM90,
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# These multiply as sm_80 does, with less shared memory: a few builds that need most of it are enough for them.
ALIKE = ("sm_86", "sm_89", "sm_120")
APART = tuple(target for target in TARGETS if target not in ALIKE)


@dataclass(frozen=True)
class Build:
    """A kernel built ahead of time for one target; `spilled` is bytes of stack and local memory, or VGPRs on AMD."""

    launch: KernelLaunch
    target: GPUTarget
    shared: int
    spilled: int
    asm: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        blocks = {name: value for name, value in self.launch.arguments.items() if name.startswith("BLOCK")}
        return f"{self.launch.name} {blocks | self.launch.options}: {self.spilled} spilled, {self.shared} bytes shared"


def sampled(points: Iterable[Point]) -> list[Point]:
    """All of them, or a sixteenth, chosen by name, where VK_BUILDS is "some", as in `make test` and `make gpu-test`."""
    every = list(points)
    if os.environ.get("VK_BUILDS", "all") == "all":
        return every
    kept = set(sorted(map(str, every), key=lambda name: (zlib.crc32(name.encode()), name))[::16])
    return [point for point in every if str(point) in kept]


def build(
    launch: KernelLaunch, target: GPUTarget, most_spilled: int = 0, wgmma: Literal["", "some", "overlapping"] = ""
) -> Build:
    """The launch through Triton's own specialization and compiler, up to the machine code. Needs `fake_gpu(target)`.

    Where VK_RECORD_BUILDS names a file, the launch goes there instead, with what may spill and whether it multiplies by
    wgmma, and the test is skipped.
    """
    (built,) = build_all([(launch, Demands(most_spilled, wgmma))], target)
    return built


def build_all(launches: Iterable[tuple[KernelLaunch, Demands]], target: GPUTarget) -> tuple[Build, ...]:
    """`build` each of several launches."""
    file = os.environ.get("VK_RECORD_BUILDS")
    if file:
        append(Path(file), launches, target)
        pytest.skip("recorded")
    return tuple(build_now(launch, target) for launch, _ in launches)


def build_now(launch: KernelLaunch, target: GPUTarget) -> Build:
    """`build` what is no variant that ships."""
    args = [_stand_in(value) for value in launch.args]
    compiled = launch.kernel.warmup(*args, grid=launch.grid, **launch.kwargs)
    return Build(launch, target, compiled.metadata.shared, triton_alone.spilled(compiled.asm), compiled.asm)


def _stand_in(value: Any) -> Any:
    """For a tensor, one that Triton's compiler takes for it."""
    if isinstance(value, TensorDescriptor):
        return dataclasses.replace(value, base=MockTensor(value.base.dtype))
    return MockTensor(value.dtype) if isinstance(value, Tensor) else value


def sass(built: Build) -> str:
    """The machine code of a build for an NVIDIA GPU."""
    return triton_alone.cuobjdump(built.asm["cubin"], "-sass")


def registers(built: Build) -> int:
    """The registers of a thread, on an NVIDIA GPU."""
    return triton_alone.usage(built.asm["cubin"], "REG")
