"""Eager calls of a signature that was seen before, without PyTorch's dispatcher.

A call of an op passes through the dispatcher twice, and all arguments are converted to C++ and back each time. That
takes longer than the launch. `Direct` remembers a signature when it comes a second time. PyTorch's guards of compiled
code compare tensors with a remembered call in one step: sizes, strides, dtype, device, requires_grad and dispatch keys.
The keys tell of autocast, inference mode, transforms, subclasses and tracing. A call that modes, forward-mode
differentiation or a profiler watch goes to the dispatcher. An `ExecutionTraceObserver` sees no remembered call.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from torch_ops._core.torch_private import (
    count_dispatch_modes,
    current_cuda_device,
    empty_strided_cuda,
    has_function_modes,
    has_functorch_transforms,
    has_plain_keys,
    has_tangents,
    is_profiling,
    tensor_guards,
)
from torch_ops.settings import settings

# Most calls that an op remembers, and most of them with one shape of the first tensor.
MOST_CALLS, MOST_OF_A_SHAPE = 1024, 8
# Calls that a full memory turns away before it begins anew.
MOST_TURNED_AWAY = 4 * MOST_CALLS
_PLAIN = (Tensor, torch.nn.Parameter)


def is_watched() -> bool:
    """Return whether a mode, forward-mode differentiation, a profiler or checked mode must see calls of this thread."""
    return bool(count_dispatch_modes() or has_function_modes() or has_tangents() or is_profiling() or settings.checked)


def allocator(made: Any) -> Callable[[], Any] | None:
    """Return a function that allocates outputs of these layouts; None unless each has memory of its own on a GPU."""
    outputs = made if isinstance(made, tuple) else (made,)
    memory = [each.untyped_storage() for each in outputs]
    own = len({each.data_ptr() for each in memory if each.nbytes()}) == sum(each.nbytes() > 0 for each in memory)
    whole = all(each.nbytes() == one.nbytes for each, one in zip(memory, outputs, strict=True))
    if empty_strided_cuda is None or not (own and whole and all(each.is_cuda for each in outputs)):
        return None
    empty, layouts = empty_strided_cuda, [(tuple(each.shape), each.stride(), each.dtype) for each in outputs]
    if not isinstance(made, tuple):
        return lambda: empty(*layouts[0])
    return lambda: tuple([empty(*layout) for layout in layouts])


class Call:
    """A remembered call: `takes` compares another call with it, and `run` runs one.

    `record` also records the gradient. It is None if no tensor of the call requires one.
    """

    __slots__ = (
        "_check", "_count", "_device", "_generation", "_pick_tensors", "_pick_values", "_types", "_values", "record",
        "run",
    )  # fmt: skip

    def __init__(self, args: tuple[Any, ...], run: Callable[..., Any], record: Callable[..., Any] | None) -> None:
        places = [place for place, each in enumerate(args) if isinstance(each, Tensor)]
        others = [place for place in range(len(args)) if place not in places]
        self._pick_tensors, self._pick_values = _picker(places), _picker(others)
        self._values, self._count = self._pick_values(args), len(args)
        # PyTorch refuses 1.0 for an integer, which is equal to 1.
        self._types = tuple(map(type, self._values))
        assert tensor_guards is not None
        self._check = tensor_guards(*self._pick_tensors(args)).check
        self._generation, self._device = settings.generation, current_cuda_device()
        self.run, self.record = run, record

    def takes(self, args: tuple[Any, ...]) -> bool:
        if len(args) != self._count:
            return False
        values, tensors = self._pick_values(args), self._pick_tensors(args)
        return (
            tuple(map(type, values)) == self._types
            and values == self._values
            and self._generation == settings.generation
            and _may_be_compared(tensors)
            and self._check(*tensors)
            and self._device == current_cuda_device()
        )


def _may_be_compared(tensors: tuple[Any, ...]) -> bool:
    """Return whether PyTorch's guards may see these: they abort the process on a nested tensor of strided layout."""
    for each in tensors:
        # A subclass may forbid that its attributes are read.
        if type(each) not in _PLAIN or each.is_nested:
            return False
    return True


def _picker(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class Direct:
    """The calls of an op that are remembered, by the shape of their first tensor, and then the last used first."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._calls: dict[Any, list[Call]] = {}
        self._count = self._turned_away = 0

    def find(self, args: tuple[Any, ...]) -> Call | None:
        try:
            shape = _shape_of(args)
            calls = self._calls.get(shape, ())
        except (TypeError, RuntimeError):
            # A shape that has no hash or is not known: that of a nested tensor.
            return None
        for place, call in enumerate(calls):
            try:
                if call.takes(args):
                    if place:
                        # Another thread may have changed the list; then nothing is lost but the order.
                        self._calls[shape] = [call, *(each for each in calls if each is not call)]
                    return call
            except (TypeError, RuntimeError):
                # A value has no truth: the check refuses it.
                continue
        return None

    def remember(
        self,
        args: tuple[Any, ...],
        prepared: Callable[..., Callable[..., Any] | None],
        recorded: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        """Remember a call on real tensors of the current GPU, if `prepared(*args)` returns a function that runs it.

        Calls under autocast are not remembered: the function would get tensors that were not cast.

        `recorded` turns the function into one that also records the gradient.
        """
        if self._count >= MOST_CALLS and not self._begun_anew():
            return
        if tensor_guards is None or not _are_plain(args) or has_functorch_transforms() or torch.jit.is_tracing():
            return
        if any(isinstance(each, Tensor) and torch.is_autocast_enabled(each.device.type) for each in args):
            return
        run = prepared(*args)
        if run is None:
            return
        wanted = recorded is not None and any([isinstance(each, Tensor) and each.requires_grad for each in args])
        record = recorded(run) if recorded is not None and wanted else None
        shape = _shape_of(args)
        before = self._calls.get(shape, [])
        after = self._calls[shape] = [Call(args, run, record), *before][:MOST_OF_A_SHAPE]
        self._count += len(after) - len(before)

    def _begun_anew(self) -> bool:
        """Make room, though rarely: if there are more signatures than places, replacing costs more than it saves."""
        self._turned_away += 1
        if self._turned_away <= MOST_TURNED_AWAY:
            return False
        self._begin()
        return True


def _shape_of(args: tuple[Any, ...]) -> Any:
    return getattr(args[0], "shape", None) if args else None


def _are_plain(args: tuple[Any, ...]) -> bool:
    tensors = [each for each in args if isinstance(each, Tensor)]
    return (
        bool(tensors)
        and all(
            type(each) in _PLAIN
            and each.is_cuda
            and each.get_device() == current_cuda_device()
            and each.layout is torch.strided
            and has_plain_keys(each)
            for each in tensors
        )
        and len({id(each) for each in tensors}) == len(tensors)
    )


__all__ = ["Call", "Direct", "allocator", "is_watched"]
