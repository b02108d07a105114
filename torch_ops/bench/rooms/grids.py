"""Shared by the benchmarks of the ops on image grids: calls of cases by name, baselines, host time.

Baselines are the eager form and what torch.compile makes of it. Transformers' code for Qwen-VL encoders reads the grid
back to the host, which is part of its time.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_ops.bench.measure.opbench import (
    ONE_KERNEL_US,
    Call,
    Check,
    Cost,
    HostCall,
    Impl,
    OpBench,
    TunedKernel,
    one_line,
    op_calls,
    select,
)
from torch_ops.bench.measure.results import OURS, VK
from torch_ops.testing.cases import GridCase, GridInputs, grid_cases, make_grid_inputs


@dataclass(frozen=True)
class GridCall:
    """A case with the options of one op, such as the mode and order of a merge."""

    name: str
    case: GridCase
    options: tuple[str, ...] = ()

    @property
    def tags(self) -> frozenset[str]:
        return self.case.tags


@dataclass(frozen=True)
class CallInputs(GridInputs):
    """Inputs that know what they were drawn for."""

    call: GridCall


@dataclass(frozen=True)
class Eager:
    """The eager form of an op. `source` is the distribution that it needs, if any; `about` names it."""

    function: Callable[..., Any]
    what: str
    source: str = ""

    def refuses(self, call: GridCall, dtype: torch.dtype, device: torch.device) -> str:
        try:
            if self.source:
                vision_utils()
        except Exception as error:
            return one_line(error)
        return ""

    @property
    def about(self) -> str:
        if not self.source:
            return f"{self.what}, torch {torch.__version__}"
        try:
            return f"{self.what}, {self.source} {importlib.metadata.version(self.source)}"
        except importlib.metadata.PackageNotFoundError:
            return self.what


def vision_utils() -> ModuleType:
    """The module that Transformers' vision encoders share."""
    return importlib.import_module("transformers.vision_utils")


def _draw(call: GridCall, dtype: torch.dtype, device: torch.device, seed: int) -> CallInputs:
    return CallInputs(**vars(make_grid_inputs(call.case, dtype, device, seed)), call=call)


@dataclass(frozen=True)
class GridOp:
    """An op on image grids.

    Attributes:
        function: its public function.
        reference: `reference(dtype)`, the same maths on tensors of that dtype.
        kernels: names of the kernels that rows tune.
        leaf: the name of the first of the `arguments`, which is differentiated; without one there is no backward.
        rows: what launches are for: their dtype and width.
    """

    function: Callable[..., Any]
    reference: Callable[[torch.dtype], Callable[..., Any]]
    eager: Eager
    arguments: Callable[[CallInputs], tuple[Any, ...]]
    cost: Callable[[CallInputs, bool], Cost]
    kernels: tuple[str, ...]
    leaf: str = ""
    dout: Callable[[CallInputs], Tensor] = lambda inputs: inputs.dout
    outputs: tuple[str, ...] = ("out",)
    options: Sequence[tuple[str, ...]] = ((),)
    rows: Callable[[CallInputs], tuple[torch.dtype, int]] = lambda inputs: (inputs.x.dtype, inputs.x.shape[1])

    def bind(self, function: Callable[..., Any], inputs: CallInputs) -> Call:
        args, leaves = self.arguments(inputs), {}
        if self.leaf:
            leaves = {self.leaf: args[0].detach().requires_grad_()}
            args = (leaves[self.leaf], *args[1:])
        return Call(lambda: function(*args), leaves, self.dout(inputs), outputs=self.outputs)

    def truth(self, inputs: CallInputs, dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
        drawn = {name: getattr(inputs, name).to(dtype) for name in ("x", "table", "dout")}
        return self.bind(self.reference(dtype), replace(inputs, **drawn)).results(backward)

    def with_options(self, cases: Sequence[GridCase]) -> tuple[GridCall, ...]:
        return tuple(
            GridCall("_".join((case.name, *chosen)), case, chosen) for case in cases for chosen in self.options
        )


def make_bench(of: GridOp) -> OpBench:
    op = of.function.__name__

    def find(wanted: Sequence[str], device: torch.device) -> tuple[GridCall, ...]:
        return select(of.with_options((*grid_cases("bench"), *grid_cases("smoke"))), wanted, device)

    def checks(call: GridCall, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Check]:
        inputs = _draw(call, dtype, device, 1)
        truths = (of.truth(inputs, kind, backward) for kind in (torch.float64, of.rows(inputs)[0]))
        return [Check(call.name, call, inputs, *truths)]

    def host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
        args = of.arguments(_draw(of.with_options(grid_cases("smoke"))[0], dtype, device, 0))
        return op_calls(
            op, lambda function, _: partial(function, *args), args[0], gradients=False, most_us=ONE_KERNEL_US
        )

    def tuned(call: GridCall, inputs: CallInputs) -> list[TunedKernel]:
        dtype, width = of.rows(inputs)
        name_of_dtype = str(dtype).removeprefix("torch.")
        return [
            TunedKernel(name, name.endswith("bwd"), name_of_dtype, width, False, inputs.total)
            for name in (of.kernels if inputs.x.is_cuda else ())
        ]

    def impl(name: str, run: Callable[..., Any], about: str, **rest: Any) -> Impl:
        directions = ("forward", "backward") if of.leaf else ("forward",)
        return Impl(name, lambda call, inputs: of.bind(run, inputs), about, directions=directions, **rest)

    return OpBench(
        op=op, cases=find, profiled="qwen3vl_8x896*",
        shape=lambda call: f"{len(call.case.grids)} images, {call.case.total} patches x {call.case.width}",
        inputs=_draw, checks=checks, cost=of.cost,
        path=lambda inputs: "portable" if inputs.x.is_cuda else "reference",
        ours=impl(VK, of.function, f"vk::{op}", group=OURS),
        baselines=(
            impl("eager", of.eager.function, of.eager.about, refuses=of.eager.refuses),
            impl(
                "compiled", torch.compile(of.eager.function), f"torch.compile of {of.eager.about}",
                refuses=of.eager.refuses,
            ),
        ),
        usual={"cuda": ("eager", "compiled"), "cpu": ("eager",)}, host_calls=host_calls, kernels=tuned,
    )  # fmt: skip
