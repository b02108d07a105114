"""Eager calls of a signature that was seen before, without PyTorch's dispatcher.

A call of an op passes through the dispatcher twice, and all arguments are converted to C++ and back each time. That
takes longer than the launch. `Direct` remembers the signatures of calls. PyTorch's guards of compiled code compare
tensors with a remembered call in one step: sizes, strides, dtype, device, requires_grad and dispatch keys. The keys
tell of autocast, inference mode, transforms, subclasses and tracing. A call that modes, forward-mode differentiation
or a profiler watch goes to the dispatcher.
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
    has_tangents,
    is_profiling,
    tensor_guards,
)
from torch_ops.settings import settings

# Calls that one op remembers.
MOST_CALLS = 8


def is_watched() -> bool:
    """Return whether something must see a call of an op, besides what the dispatch keys of its tensors tell."""
    return bool(count_dispatch_modes() or has_function_modes() or has_tangents() or is_profiling() or settings.checked)


def allocator(made: Any) -> Callable[[], Any] | None:
    """Return what allocates outputs in the layouts of these, if each has memory of its own on a GPU."""
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
    """A remembered call: whether another one is of its signature, and what runs it.

    `record` runs it and records its gradient; None where no tensor requires one.
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
        values = self._pick_values(args)
        return (
            tuple(map(type, values)) == self._types
            and values == self._values
            and self._generation == settings.generation
            and self._check(*self._pick_tensors(args))
            and self._device == current_cuda_device()
        )


def _picker(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class Direct:
    """The calls of an op that are remembered, the last used first."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def find(self, args: tuple[Any, ...]) -> Call | None:
        calls = self._calls
        for place, call in enumerate(calls):
            try:
                if call.takes(args):
                    if place:
                        # Another thread may have changed the list; then nothing is lost but the order.
                        self._calls = [call, *(each for each in calls if each is not call)]
                    return call
            except (TypeError, RuntimeError):
                # A value has no truth, or something else than a tensor stands in its place: the check refuses it.
                continue
        return None

    def remember(
        self,
        args: tuple[Any, ...],
        prepared: Callable[..., Callable[..., Any] | None],
        recorded: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        """Remember a call on real tensors of the current GPU, if `prepared(*args)` finds what runs it.

        Calls under autocast are not remembered: what runs them takes other tensors, whose types are the region's.

        `recorded` makes a function that records its gradient of one that runs it.
        """
        if tensor_guards is None or not _are_plain(args) or has_functorch_transforms() or torch.jit.is_tracing():
            return
        if any(isinstance(each, Tensor) and torch.is_autocast_enabled(each.device.type) for each in args):
            return
        run = prepared(*args)
        if run is None:
            return
        wanted = recorded is not None and any([isinstance(each, Tensor) and each.requires_grad for each in args])
        record = recorded(run) if recorded is not None and wanted else None
        self._calls = [Call(args, run, record), *self._calls[: MOST_CALLS - 1]]


def _are_plain(args: tuple[Any, ...]) -> bool:
    tensors = [each for each in args if isinstance(each, Tensor)]
    return (
        bool(tensors)
        and all(
            type(each) in (Tensor, torch.nn.Parameter)
            and each.is_cuda
            and each.get_device() == current_cuda_device()
            and each.layout is torch.strided
            for each in tensors
        )
        and len({id(each) for each in tensors}) == len(tensors)
    )


__all__ = ["Call", "Direct", "allocator", "is_watched"]
