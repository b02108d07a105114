"""What the bench room of an op provides: cases, contenders, what is right, what a call costs."""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor


class Case(Protocol):
    """Named shapes and options, from `torch_ops.testing.cases`."""

    @property
    def name(self) -> str: ...


CaseT = TypeVar("CaseT", bound=Case)


def named(cases: Iterable[CaseT], text: str) -> tuple[CaseT, ...]:
    """Those of the cases that `text` names, by name or by a pattern such as 'qwen3vl_*'."""
    return tuple(case for case in cases if fnmatch.fnmatchcase(case.name, text))


def find_named(cases: Sequence[CaseT], wanted: Sequence[str]) -> tuple[CaseT, ...]:
    """Cases by names and patterns of names, separated by commas; ValueError names the choices."""
    found: dict[str, CaseT] = {}
    for text in (text.strip() for item in wanted for text in item.split(",")):
        matching = named(cases, text)
        if not matching:
            raise ValueError(f"no case is called {text!r}; give some of {', '.join(case.name for case in cases)}")
        found |= {case.name: case for case in matching}
    return tuple(found.values())


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """A result as a tuple, of one tensor or of several."""
    return result if isinstance(result, tuple) else (result,)


@dataclass(frozen=True)
class Call:
    """A contender bound to one set of inputs.

    Attributes:
        forward: runs it; the result, a tensor or several, stays in the contender's own layout.
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


@dataclass(frozen=True)
class Contender:
    """Ours or a peer.

    `refuses(case, dtype, device)` says in words why it cannot run there, "" if it can.
    `bind(case, inputs)` makes its call. `about()` says what it is, with its version.
    In `directions` it is timed. A `yardstick`, of which it says in words what it leaves out, computes something else:
    it is timed next to the others, and neither judged nor a peer to beat.
    """

    name: str
    bind: Callable[[Any, Any], Call]
    refuses: Callable[[Any, torch.dtype, torch.device], str]
    about: Callable[[], str]
    directions: tuple[str, ...] = ("forward", "backward")
    yardstick: str = ""


def one_line(error: Exception) -> str:
    """What an exception says, short enough for a table's footnote."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__


@dataclass(frozen=True)
class Trial:
    """One comparison with the truth.

    Attributes:
        label: which shapes, in a word or two.
        case, inputs: what the contender runs.
        look: takes from a result, by its name, what `reference` and `eager` hold.
        reference, eager: the same maths in fp64 and in the dtype of the run.
        again: the same with other numbers, by a seed from 1 on. Of few numbers the largest error of eager may be small
            by luck; more of them are then judged together.
    """

    label: str
    case: Any
    inputs: Any
    look: Callable[[str, Tensor], Tensor]
    reference: dict[str, Tensor]
    eager: dict[str, Tensor]
    again: Callable[[int], "Trial"] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Cost:
    """FLOPs of a call and the bytes it must move: inputs read once, outputs written once."""

    flops: int
    bytes_moved: int


@dataclass(frozen=True)
class HostCall:
    """One kind of call whose host time is taken; see `results.HostTime`."""

    name: str
    call: Callable[[], object] | None
    raw: bool = False
    target: float | None = None
    note: str = ""


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
class Room:
    """An op's bench room.

    Attributes:
        op: the op's name.
        cases: from what `--shapes` holds to cases; the defaults of the device where it is empty.
        profiled: the same for `profile`, whose default is a single case.
        shape: a case in the notation of `--shapes`.
        inputs: `inputs(case, dtype, device, seed)`, fresh random tensors.
        trials: `trials(case, dtype, device, backward)`, what a contender must get right.
        cost: `cost(inputs, backward)`.
        path: `path(inputs)`, the path that the op takes there.
        ours, peers: the contenders; peers in the order of the table's columns.
        default_peers: names of the peers on a device.
        host_calls: `host_calls(dtype, device)`.
        kernels: `kernels(case, inputs)`, those whose launches rows choose, on the path in force.
        jits: the op's kernels.
    """

    op: str
    cases: Callable[[Sequence[str], torch.device], tuple[Any, ...]]
    profiled: Callable[[Sequence[str], torch.device], tuple[Any, ...]]
    shape: Callable[[Any], str]
    inputs: Callable[[Any, torch.dtype, torch.device, int], Any]
    trials: Callable[[Any, torch.dtype, torch.device, bool], list[Trial]]
    cost: Callable[[Any, bool], Cost]
    path: Callable[[Any], str]
    ours: Contender
    peers: tuple[Contender, ...]
    default_peers: Callable[[torch.device], tuple[str, ...]]
    host_calls: Callable[[torch.dtype, torch.device], list[HostCall]]
    kernels: Callable[[Any, Any], list[TunedKernel]]
    jits: tuple[Any, ...]
