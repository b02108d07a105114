"""The kernels of an op, as calls on fake CUDA tensors show them: traced, recorded, built."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.virtualized import V
from torch._library.triton import get_triton_kernels_for_op
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests.contract.build import TARGETS, Build, build_all
from compile_tests.contract.trace import (
    SM90,
    KernelLaunch,
    Trace,
    fake_gpu,
    record_launches,
    symbolic_size,
    trace_kernels,
)
from compile_tests.contract.variants import Demands
from torch_ops._core.registry import OPS

Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
# Kernels in order, with the tensors that torch must take each to write.
Writes = list[tuple[str, set[str]]]
SHORTER = {"triton_kernel_wrapper_functional": "KERNEL"}


@dataclass(frozen=True)
class Point:
    """A variant on one target, with some of its sizes changed."""

    target: str
    variant: str
    changes: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, target: str, variant: str, **changes: Any) -> "Point":
        return cls(target, variant, tuple(changes.items()))

    def __str__(self) -> str:
        return "-".join((self.target, self.variant, *(f"{name}_{value}" for name, value in self.changes)))


def positional(overload: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """The call with all its arguments by position, up to the last that is given."""
    schema = overload._schema.arguments
    given = {**dict(zip((argument.name for argument in schema), args, strict=False)), **options}
    last = max(place for place, argument in enumerate(schema) if argument.name in given)
    return tuple(given.get(argument.name, argument.default_value) for argument in schema[: last + 1])


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of an op and of its backward, if it has one.

    calls: makes the arguments of each op, on CUDA tensors of the fake mode in force, from the options of a variant.
    writes: by op and name of a variant, the kernels that a graph must hold.
    symbolic: variants, and sizes that a graph may not specialize on; with `multiple`, it guards on multiples of that.
    settled: sizes that kernels have as constants; a graph specializes on them.
    graphs: by op and variant, the call targets of a graph.
    others: by op, kernels that no variant launches.
    opaque: by op, the kernels beside the one opaque launch of the Hopper path; None without such a path.
    points: what is built ahead of time, but for kernels that are not in `built`, where there is such a set.
    may_spill: bytes that kernels of a point may spill, by the point's name; without an entry nothing spills.
    products: the path of the function by which PyTorch makes products; recorded launches leave it out.
    """

    ops: tuple[str, ...]
    calls: Callable[..., Calls]
    variants: dict[str, dict[str, Any]]
    writes: Callable[[str, str], Writes]
    symbolic: tuple[tuple[str, dict[str, int]], ...]
    graphs: dict[tuple[str, str], str]
    settled: dict[str, int] = field(default_factory=dict)
    multiple: int = 0
    others: dict[str, set[str]] = field(default_factory=dict)
    opaque: dict[str, Writes] | None = None
    points: tuple[Point, ...] = ()
    built: frozenset[str] = frozenset()
    may_spill: dict[str, int] = field(default_factory=dict)
    products: str = ""

    @property
    def functions(self) -> dict[str, JITFunction]:
        """The kernels in the ops' graphs, by name. torch finds more in their sources: those of opaque launches."""
        return {
            kernel.fn.__name__: kernel
            for op in self.ops
            for kernel in get_triton_kernels_for_op(f"vk::{op}")
            if kernel.fn.__name__ in self.used(op)
        }

    def used(self, op: str) -> set[str]:
        return self.others.get(op, set()) | {name for variant in self.variants for name, _ in self.writes(op, variant)}

    def trace(
        self, op: str, sizes: dict[str, int] | None = None, gpu: str = "no-such-gpu", path: str = "portable",
        packaged: bool = False, target: GPUTarget = SM90, **variant: Any,
    ) -> tuple[Trace, frozenset[str], ShapeEnv]:  # fmt: skip
        """The trace of a call, the inputs that its schema says it writes to, and the guards. `sizes` are symbols."""
        overload = OPS[op].overload
        with fake_gpu(target, gpu, path) as mode, V.set_aot_compilation(packaged):
            with mode:
                symbols = {name: symbolic_size(mode, name, hint) for name, hint in (sizes or {}).items()}
                args = positional(overload, *self.calls(**{**variant, **symbols})[op])
                # A trace knows only the symbols of its tensors.
                known = [torch.empty(symbol, device="cuda") for symbol in symbols.values()]
            trace = trace_kernels(lambda *given: overload(*given[len(known) :]), (*known, *args))
        tensors = [id(arg) for arg in (*known, *args) if isinstance(arg, Tensor)]
        schema = overload._schema.arguments
        written = [arg for arg, each in zip(args, schema, strict=False) if each.alias_info and each.alias_info.is_write]
        return trace, frozenset(f"arg{tensors.index(id(arg))}_1" for arg in written), mode.shape_env

    def launches(
        self, target: GPUTarget = SM90, gpu: str = "no-such-gpu", path: str = "portable", **variant: Any
    ) -> dict[str, list[KernelLaunch]]:
        """The launches of each op's body on such a GPU, in order."""
        found = {}
        with fake_gpu(target, gpu, path) as mode, mode:
            calls = self.calls(**variant)
            for op in self.ops:
                args, options = calls[op]
                products = mock.patch(self.products) if self.products else contextlib.nullcontext()
                with products, record_launches() as launches:
                    OPS[op].body(*args, **options)
                found[op] = launches
        return found

    def launch(self, name: str, target: GPUTarget = SM90, **variant: Any) -> KernelLaunch:
        """The first launch of a kernel."""
        launches = self.launches(target, **variant).values()
        return next(launch for each in launches for launch in each if launch.name == name)

    def builds(self, target: str, variant: str, **changes: Any) -> tuple[Build, ...]:
        return _builds(self, Point.of(target, variant, **changes))


@cache
def _builds(kernels: Kernels, point: Point) -> tuple[Build, ...]:
    target = TARGETS[point.target]
    launches = kernels.launches(target, **{**kernels.variants[point.variant], **dict(point.changes)})
    with fake_gpu(target):
        return build_all(
            (
                (launch, Demands(kernels.may_spill.get(str(point), 0)))
                for each in launches.values()
                for launch in each
                if not kernels.built or launch.name in kernels.built
            ),
            target,
        )


def shortened(targets: str) -> str:
    """Call targets on one line."""
    names = (SHORTER.get(name, name.removeprefix("aten.").removesuffix(".default")) for name in targets.splitlines())
    return " ".join(names)
