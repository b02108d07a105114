"""What the bench rooms of the ops on image grids share: calls of cases by name, peers, host time.

Peers are the eager form and what torch.compile makes of it. What Transformers does for its Qwen-VL encoders reads the
grid back to the host, which is part of its time.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_ops.bench.measure import results
from torch_ops.bench.measure.room import Call, Contender, Cost, HostCall, Room, Trial, TunedKernel, find_named, one_line
from torch_ops.testing.cases import GridCase, GridInputs, grid_cases, make_grid_inputs

PROFILED = "qwen3vl_8x896"


@dataclass(frozen=True)
class GridCall:
    """A case with the options of one op, such as the mode and order of a merge."""

    name: str
    case: GridCase
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallInputs(GridInputs):
    """Inputs that know what they were drawn for."""

    call: GridCall


@dataclass(frozen=True)
class Eager:
    """The eager form of an op. `source` is the distribution that it needs, if any, for `about` to name."""

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

    def about(self) -> str:
        if not self.source:
            return f"{self.what}, torch {torch.__version__}"
        try:
            return f"{self.what}, {self.source} {importlib.metadata.version(self.source)}"
        except importlib.metadata.PackageNotFoundError:
            return self.what


def vision_utils() -> ModuleType:
    """What Transformers' vision encoders share."""
    return importlib.import_module("transformers.vision_utils")


def _draw(call: GridCall, dtype: torch.dtype, device: torch.device, seed: int) -> CallInputs:
    return CallInputs(**vars(make_grid_inputs(call.case, dtype, device, seed)), call=call)


def make_room(
    function: Callable[..., Any], reference: Callable[[torch.dtype], Callable[..., Any]], eager: Eager,
    arguments: Callable[[CallInputs], tuple[Any, ...]], cost: Callable[[CallInputs, bool], Cost],
    kernels: tuple[str, ...], jits: tuple[Any, ...], *, leaf: str = "",
    dout: Callable[[CallInputs], Tensor] = lambda inputs: inputs.dout, outputs: tuple[str, ...] = ("out",),
    options: Sequence[tuple[str, ...]] = ((),),
    rows: Callable[[CallInputs], tuple[torch.dtype, int]] = lambda inputs: (inputs.x.dtype, inputs.x.shape[1]),
) -> Room:  # fmt: skip
    """The room of the op whose public function this is.

    `reference(dtype)` is the same maths, of tensors of that dtype. `leaf` names what is differentiated, the first of
    the `arguments`; without one there is no backward. `rows` are those that launches are for: their dtype and width.
    """
    op = function.__name__
    directions = ("forward", "backward") if leaf else ("forward",)

    def bind(function: Callable[..., Any], inputs: CallInputs) -> Call:
        args = arguments(inputs)
        leaves = {}
        if leaf:
            leaves = {leaf: args[0].detach().requires_grad_()}
            args = (leaves[leaf], *args[1:])
        return Call(lambda: function(*args), leaves, dout(inputs), outputs=outputs)

    def truth(inputs: CallInputs, dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
        drawn = {name: getattr(inputs, name).to(dtype) for name in ("x", "table", "dout")}
        return bind(reference(dtype), replace(inputs, **drawn)).results(backward)

    def with_options(cases: Sequence[GridCase]) -> tuple[GridCall, ...]:
        return tuple(GridCall("_".join((case.name, *chosen)), case, chosen) for case in cases for chosen in options)

    def find(wanted: Sequence[str], device: torch.device) -> tuple[GridCall, ...]:
        if wanted:
            return find_named(with_options((*grid_cases("bench"), *grid_cases("smoke"))), wanted)
        return with_options(grid_cases("bench" if device.type == "cuda" else "smoke"))

    def profiled(wanted: Sequence[str], device: torch.device) -> tuple[GridCall, ...]:
        named = [PROFILED + "*"] if device.type == "cuda" else []
        return find(wanted or named, device)[: None if wanted else 1]

    def trials(call: GridCall, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Trial]:
        inputs = _draw(call, dtype, device, 1)
        truths = (truth(inputs, kind, backward) for kind in (torch.float64, rows(inputs)[0]))
        return [Trial(call.name, call, inputs, lambda name, tensor: tensor, *truths)]

    def host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
        args = arguments(_draw(with_options(grid_cases("smoke"))[0], dtype, device, 0))
        number = torch.ones(16, device=device)
        return [
            HostCall("ATen add", lambda: torch.add(number, number)),
            HostCall("raw Triton launch", None, raw=True, note="not taken"),
            HostCall(f"torch.ops.vk.{op}", lambda: getattr(torch.ops.vk, op)(*args)),
            HostCall(f"torch_ops.{op}", lambda: function(*args)),
        ]

    def tuned(call: GridCall, inputs: CallInputs) -> list[TunedKernel]:
        dtype, width = rows(inputs)
        name_of_dtype = str(dtype).removeprefix("torch.")
        return [
            TunedKernel(name, name.endswith("bwd"), name_of_dtype, width, False, inputs.total)
            for name in (kernels if inputs.x.is_cuda else ())
        ]

    def contender(name: str, run: Callable[..., Any], about: Callable[[], str]) -> Contender:
        return Contender(name, lambda call, inputs: bind(run, inputs), eager.refuses, about, directions)

    return Room(
        op=op,
        cases=find,
        profiled=profiled,
        shape=lambda call: f"{len(call.case.grids)} images, {call.case.total} patches x {call.case.width}",
        inputs=_draw,
        trials=trials,
        cost=cost,
        path=lambda inputs: "portable" if inputs.x.is_cuda else "reference",
        ours=Contender(
            results.OURS,
            lambda call, inputs: bind(function, inputs),
            lambda call, dtype, device: "",
            lambda: f"vk::{op}",
            directions,
        ),
        peers=(
            contender("eager", eager.function, eager.about),
            contender("compiled", torch.compile(eager.function), lambda: f"torch.compile of {eager.about()}"),
        ),
        default_peers=lambda device: ("eager", "compiled") if device.type == "cuda" else ("eager",),
        host_calls=host_calls,
        kernels=tuned,
        jits=jits,
    )
