"""An op's benchmark: cases, implementations, the reference, the cost of a call."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError

import torch_ops
from torch_ops.bench.measure.results import BASELINE, OURS, VK
from torch_ops.bench.measure.timing import Work, on_timing_stream, peak_bytes


class Case(Protocol):
    """Named shapes and options, from `torch_ops.testing.cases`."""

    @property
    def name(self) -> str: ...


CaseT = TypeVar("CaseT", bound=Case)


def split(wanted: Iterable[str]) -> list[str]:
    """The items of repeated options, each of which may hold several, separated by commas."""
    return [text.strip() for item in wanted for text in item.split(",") if text.strip()]


def find_named(
    cases: Sequence[CaseT], wanted: Sequence[str], parse: Callable[[str], CaseT | None] = lambda text: None,
    notation: str = "",
) -> tuple[CaseT, ...]:  # fmt: skip
    """Cases by name, by a pattern of names or by what `parse` reads; ValueError names the choices and the notation."""
    found: dict[str, CaseT] = {}
    for text in split(wanted):
        matching = [case for case in cases if fnmatch.fnmatchcase(case.name, text)]
        if not matching and (parsed := parse(text)) is not None:
            matching = [parsed]
        if not matching:
            names = ", ".join(case.name for case in cases)
            raise ValueError(f"no case is called {text!r}; give some of {names}{notation}")
        found |= {case.name: case for case in matching}
    return tuple(found.values())


def select(
    cases: Sequence[Any], wanted: Sequence[str], device: torch.device,
    parse: Callable[[str], Any] = lambda text: None, notation: str = "",
) -> tuple[Any, ...]:  # fmt: skip
    """Cases that `--shapes` names, or those of the device's tag where it names none."""
    tag = "bench" if device.type == "cuda" else "smoke"
    return find_named(cases, wanted, parse, notation) if wanted else tuple(c for c in cases if tag in c.tags)


# The direction of both passes as one piece of work.
BOTH = "forward + backward"


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """A result as a tuple, of one tensor or of several."""
    return result if isinstance(result, tuple) else (result,)


@dataclass(frozen=True)
class Call:
    """An implementation bound to one set of inputs.

    Attributes:
        forward: runs it; the result, a tensor or several, stays in the implementation's own layout.
        inputs: what gradients are taken of, by name, in that layout.
        dout: the upstream gradient of each result, shaped as it is.
        to_op_layout: brings a result or a gradient to the layout of the op.
        outputs: names of the results; none begins with a d, as gradients do.
    """

    forward: Callable[[], Tensor | tuple[Tensor, ...]]
    inputs: dict[str, Tensor]
    dout: Tensor | tuple[Tensor, ...]
    to_op_layout: Callable[[Tensor], Tensor] = lambda tensor: tensor
    outputs: tuple[str, ...] = ("out",)

    def forward_alone(self) -> Tensor | tuple[Tensor, ...]:
        with torch.no_grad():
            return self.forward()

    def backward_of(self, result: Tensor | tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """The backward alone, repeatable; `result` came from `forward` with gradients on."""
        results, douts, inputs = tensors_of(result), tensors_of(self.dout), tuple(self.inputs.values())
        return lambda: torch.autograd.grad(results, inputs, douts, retain_graph=True, materialize_grads=True)

    def results(self, backward: bool) -> dict[str, Tensor]:
        """The results and, with `backward`, the gradient d<name> of each input, in the layout of the op."""
        backward = backward and bool(self.inputs)
        result = self.forward() if backward else self.forward_alone()
        named = dict(zip(self.outputs, (each.detach() for each in tensors_of(result)), strict=True))
        if backward:
            grads = zip(self.inputs, self.backward_of(result)(), strict=True)
            named |= {f"d{name}": grad for name, grad in grads}
        return {name: self.to_op_layout(tensor) for name, tensor in named.items()}

    def work(self, direction: str, device: torch.device) -> Work:
        """The work that is timed."""
        if direction == "forward":
            return self.forward_alone
        if direction == BOTH:
            return lambda: self.backward_of(self.forward())()
        with on_timing_stream(device):
            return self.backward_of(self.forward())

    def peak_bytes(self, work: Work, device: torch.device) -> int | None:
        return peak_bytes(work, device)

    def extras(self, device: torch.device) -> dict[str, Any]:
        """Further fields of the record, measured once before the rounds."""
        return {}


def runs_anywhere(case: Any, dtype: torch.dtype, device: torch.device) -> str:
    return ""


@dataclass(frozen=True)
class Impl:
    """An implementation: ours or a baseline.

    Attributes:
        bind: `bind(case, inputs)` makes its call.
        about: what it is, with its version.
        refuses: `refuses(case, dtype, device)`, in words why it cannot run there, "" if it can.
        directions: where it is timed.
        reference_point: what it leaves out, in words. It computes something else: it is timed beside the others, is
            not checked, and never counts as a baseline.
        group: see `results`; `ready`: see `Record`.
    """

    name: str
    bind: Callable[[Any, Any], Any]
    about: str = ""
    refuses: Callable[[Any, torch.dtype, torch.device], str] = runs_anywhere
    directions: tuple[str, ...] = ("forward", "backward")
    reference_point: str = ""
    group: str = BASELINE
    ready: str = ""


def ours(bind: Callable[[Any, Any], Any], about: str, **rest: Any) -> Impl:
    return Impl(VK, bind, about, group=OURS, **rest)


def one_line(error: Exception) -> str:
    """An exception's message, short enough for a table's footnote.

    Triton's compiler quotes a kernel before it says what is wrong, and wraps errors of functions that a kernel calls.
    """
    while isinstance(error, CompilationError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = isinstance(error, CompilationError) and error.error_message
    message = " ".join(str(reason or error).split())
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__


@dataclass(frozen=True)
class Check:
    """One comparison with the truth.

    Attributes:
        label: which shapes, in a word or two.
        case, inputs: what the implementation runs.
        reference, eager: the same maths in fp64 and in the dtype of the run.
        look: takes from a result, by its name, what `reference` and `eager` hold.
        again: the check with other numbers, by a seed from 1 on. With few numbers eager's largest error can be small by
            luck; more of them are then checked together.
    """

    label: str
    case: Any
    inputs: Any
    reference: dict[str, Tensor]
    eager: dict[str, Tensor]
    look: Callable[[str, Tensor], Tensor] = field(default=lambda name, tensor: tensor, kw_only=True)
    again: Callable[[int], "Check"] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Cost:
    """FLOPs of a call and the bytes it must move: inputs read once, outputs written once."""

    flops: int
    bytes_moved: int


# Microseconds that the host may take for an eager call of one kernel; of packed attention or an MLP; with gradients.
ONE_KERNEL_US, LAYER_US, GRADIENTS_SHARE = 12.0, 20.0, 1.5


@dataclass(frozen=True)
class HostCall:
    """One kind of call whose host time is taken; see `results.HostTime`."""

    name: str
    call: Callable[[], object] | None
    raw: bool = False
    most_us: float | None = None
    note: str = ""


def op_calls(
    op: str, bind: Callable[[Any, Tensor], Callable[[], object]], x: Tensor, gradients: bool = True,
    most_us: float | None = None,
) -> list[HostCall]:  # fmt: skip
    """The operator and the public function, which `bind(function, x)` makes calls of, without and with gradients."""
    functions = (f"torch.ops.vk.{op}", getattr(torch.ops.vk, op)), (f"torch_ops.{op}", getattr(torch_ops, op))
    leaf = x.detach().clone().requires_grad_(gradients)
    kinds = [("", x), (" with gradients", leaf)][: 1 + gradients]
    # Users call the function. Code that goes by the operator passes the dispatcher besides.
    return [
        HostCall(name + kind, bind(function, each), most_us=most_us_of(most_us, kind) if place else None)
        for kind, each in kinds
        for place, (name, function) in enumerate(functions)
    ]


def most_us_of(most_us: float | None, kind: str = "") -> float | None:
    """Return what a call of this kind may take, of what one without gradients may."""
    return most_us and most_us * (GRADIENTS_SHARE if kind else 1.0)


@dataclass(frozen=True)
class TunedKernel:
    """One kernel in one call: what the row of its launch is bound to. `masked` is causal or by a window.

    A product has no head dimension, but a weight n x k; its length is how many rows it is multiplied with.
    """

    name: str
    backward: bool
    dtype: str
    head_dim: int
    masked: bool
    length: int
    n: int | None = None
    k: int | None = None


@dataclass(frozen=True)
class OpBench:
    """The benchmark of one op.

    Attributes:
        op: the op's name.
        cases: `cases(wanted, device)`, from what `--shapes` holds to cases; the device's own where it is empty.
        profiled: the case that `profile` takes on a GPU unless told otherwise; on a CPU it is the first one.
        shape: a case in the notation of `--shapes`.
        inputs: `inputs(case, dtype, device, seed)`, fresh random tensors.
        checks: `checks(case, dtype, device, backward)`, what an implementation must get right.
        cost: `cost(inputs, backward)`.
        path: `path(inputs)`, the path that the op takes there.
        ours, baselines: the implementations; baselines in the order of the table's columns.
        usual: names of the baselines that run unless others are named, by the device's type.
        timed: the directions of `--backward`.
        host_calls: `host_calls(dtype, device)`.
        kernels: `kernels(case, inputs)`, those whose launches rows choose, on the path in force.
    """

    op: str
    cases: Callable[[Sequence[str], torch.device], tuple[Any, ...]]
    shape: Callable[[Any], str]
    inputs: Callable[[Any, torch.dtype, torch.device, int], Any]
    checks: Callable[[Any, torch.dtype, torch.device, bool], list[Check]]
    cost: Callable[[Any, bool], Cost]
    path: Callable[[Any], str]
    ours: Impl
    baselines: tuple[Impl, ...]
    usual: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    profiled: str = ""
    timed: tuple[str, ...] = ("forward", "backward")
    host_calls: Callable[[torch.dtype, torch.device], list[HostCall]] = lambda dtype, device: []
    kernels: Callable[[Any, Any], list[TunedKernel]] = lambda case, inputs: []

    def cost_of(self, inputs: Any, direction: str) -> Cost:
        if direction != BOTH:
            return self.cost(inputs, direction == "backward")
        forward, backward = self.cost(inputs, False), self.cost(inputs, True)
        return Cost(forward.flops + backward.flops, forward.bytes_moved + backward.bytes_moved)

    def profiled_cases(self, wanted: Sequence[str], device: torch.device) -> tuple[Any, ...]:
        if wanted:
            return self.cases(wanted, device)
        return self.cases([self.profiled] if device.type == "cuda" else (), device)[:1]
