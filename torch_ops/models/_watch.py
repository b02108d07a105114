"""The state of a module that a captured graph depends on, and whether it still is as it was found.

Every replay asks, so a module is walked once. Later its dictionaries are compared by functions that take no step in
Python for each entry.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torch_ops._core.torch_private import (
    FIELDS_OF_MODULES,
    HOOKS_OF_MODULES,
    MANAGED_BY_FSDP,
    addresses_equal,
    buffers_of,
    children_of,
    parameters_of,
    sdpa_priorities,
)
from torch_ops.models._layers import LAYERS, NORMS

# Levels of lists, dictionaries and objects that are compared by their entries, such as PEFT's scalings by adapter.
_DEPTH = 3
# Entries that are compared in every replay.
_MOST_ENTRIES = 16384
OFFLOADED = "Accelerate offloads"
_NOT_LOOKED_INTO = nn.Module, type, ModuleType, FunctionType, MethodType


class Weights:
    """The parameters and buffers of a module as they were found, and whether they still are where they were.

    `in_place` must be known before a replay: it says that the graphs read no memory that was given back. A tensor or
    module that was put aside keeps its memory, since both are held here. One that was moved, as by `module.to`, may
    not. `unchanged` may be asked while the device computes.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        children = [children_of(each) for each in modules]
        held = [tensors for each in modules for tensors in (parameters_of(each), buffers_of(each))]
        # Most dictionaries are empty, so their sizes are compared first.
        self._sized: list[dict[str, Any]] = [*children, *held]
        self._children = [each for each in children if each]
        # Those that hold None, such as a bias that is not there, are few.
        self._mixed = [each for each in held if any(tensor is None for tensor in each.values())]
        self._full = [each for each in held if each and all(tensor is not None for tensor in each.values())]
        self._found, self._rest = self.tensors(), self._look_at_the_rest()
        # A module in the place of one that is gone could have its identity. The outermost one may go.
        self._walked = modules[1:]
        self._addresses, self._places = list(map(_address, self._found)), list(range(len(self._found)))

    def tensors(self) -> list[Tensor]:
        return [*_all(self._full), *(tensor for tensor in _all(self._mixed) if tensor is not None)]

    def in_place(self) -> bool:
        if addresses_equal is not None:
            return addresses_equal(self._found, self._addresses, self._places)
        return list(map(_address, self._found)) == self._addresses

    def unchanged(self) -> bool:
        tensors = self.tensors()
        # A None was a tensor before.
        there = type(None) not in map(type, tensors)
        return there and list(map(_address, tensors)) == self._addresses and self._look_at_the_rest() == self._rest

    def _look_at_the_rest(self) -> object:
        tensors = self.tensors()
        kinds = list(map(_dtype, tensors)), list(map(_shape, tensors)), list(map(_strides, tensors))
        return list(map(len, self._sized)), list(map(id, _all(self._children))), kinds


class Behaviour:
    """The state of an encoder's modules besides tensors: hooks, replaced forwards, attributes of other layers.

    Adapters are switched, merged or disabled by plain attributes of their layers, and some layers ask for the training
    mode. The encoder's own modules depend on neither. Hooks and a forward that were put on the encoder itself run
    outside of its own forward.
    """

    def __init__(self, encoder: nn.Module) -> None:
        modules = list(encoder.modules())
        inner = [each for each in modules if each is not encoder]
        self._root, self._walked = weakref.ref(encoder), inner
        self._attributes = [vars(each) for each in inner]
        self._hooks = [getattr(each, name) for each in inner for name in HOOKS_OF_MODULES]
        foreign = [vars(each) for each in modules if not _is_own(each)]
        self._training = [each for each in foreign if "training" in each]
        self._foreign = [(each, tuple(name for name in each if name not in FIELDS_OF_MODULES)) for each in foreign]
        self._found = self._look()
        self._obstacle = obstacle_of(encoder)
        if not self._obstacle and _count(self._found) > _MOST_ENTRIES:
            self._obstacle = "layers of the encoder have too many attributes to compare in every call"

    def unchanged(self) -> bool:
        return self._look() == self._found

    def why_eager(self) -> str:
        """Return why a replay would not do what a call does, or nothing."""
        return self._obstacle or ("modules of the encoder have hooks" if any(self._hooks) else "")

    def _look(self) -> object:
        values = [tuple([_frozen(each.get(name), _DEPTH) for name in names]) for each, names in self._foreign]
        return (
            type(self._root()), list(map(type, self._walked)), list(map(len, self._attributes)),
            list(map(len, self._hooks)), list(map(_mode, self._training)), values,
        )  # fmt: skip


def numeric_flags() -> tuple[object, ...]:
    """Return PyTorch's flags that choose kernels or their precision."""
    products, attention = torch.backends.cuda.matmul, torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    return (
        products.fp32_precision,
        products.allow_fp16_accumulation,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        attention.preferred_blas_library(),
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
        sdpa_priorities(),
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
        cudnn.conv.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    )


def _is_own(module: nn.Module) -> bool:
    kind = type(module)
    plainly = (*LAYERS, *NORMS, nn.Module, nn.ModuleList, nn.Sequential, nn.GELU)
    return kind in plainly or kind.__module__.startswith("torch_ops.models.")


def who_moves_weights(module: nn.Module) -> str:
    """Say who brings a module its weights for each call, or nothing."""
    if getattr(module, MANAGED_BY_FSDP, False):
        return "FSDP gathers"
    hook = getattr(module, "_hf_hook", None)
    if any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,))):
        return OFFLOADED
    return ""


def obstacle_of(encoder: nn.Module) -> str:
    """Say which of an encoder's modules computes as no graph can, or nothing."""
    return next(filter(None, (_why_eager(each, each is encoder) for each in encoder.modules())), "")


def _why_eager(module: nn.Module, is_root: bool) -> str:
    if who := who_moves_weights(module):
        return f"{who} the weights of the encoder"
    kind = type(module).__name__
    if "forward" in vars(module) and not is_root:
        return f"a {kind} of the encoder has a forward of its own"
    for tensor in (*parameters_of(module).values(), *buffers_of(module).values()):
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer, type(None)):
            return f"a {kind} of the encoder holds a {type(tensor).__name__}"
    return ""


def _frozen(value: object, depth: int) -> object:
    """Return what a later look is compared with: numbers and text by value, other objects by identity and entries."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth and isinstance(value, dict):
        return tuple([(key, _frozen(each, depth - 1)) for key, each in value.items()])
    if depth and isinstance(value, list | tuple):
        return tuple([_frozen(each, depth - 1) for each in value])
    if depth and isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, Tensor):
        return _Same(value), value.data_ptr()
    if depth and hasattr(value, "__dict__") and not isinstance(value, _NOT_LOOKED_INTO):
        return _Same(value), _frozen(vars(value), depth)
    return _Same(value)


def _count(found: object) -> int:
    return 1 + sum(map(_count, found)) if isinstance(found, list | tuple) else 1


class _Same:
    """Equal to what holds the same object, which no other can replace in memory meanwhile."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value


def _all(dictionaries: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(_values, dictionaries))


_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values
_mode: Callable[[dict[str, Any]], bool] = itemgetter("training")
_address: Callable[[Tensor], int] = Tensor.data_ptr
_dtype: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_shape: Callable[[Tensor], torch.Size] = attrgetter("shape")
_strides: Callable[[Tensor], tuple[int, ...]] = Tensor.stride

__all__ = ["OFFLOADED", "Behaviour", "Weights", "numeric_flags", "obstacle_of", "who_moves_weights"]
