"""Arguments that PyTorch's dispatcher would take for others, or for which it would find no implementation."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from torch_ops._core.checks import check_all_dense, check_int
from torch_ops._core.torch_private import NestedTensor

# Places and names of arguments.
Places = tuple[tuple[int, str], ...]


def integers_of(body: Callable[..., Any]) -> Places:
    """The arguments that are integers."""
    parameters = inspect.signature(body, eval_str=True).parameters.values()
    return tuple((place, each.name) for place, each in enumerate(parameters) if each.annotation in (int, int | None))


def with_integers(op: str, integers: Places, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with Python's integers for NumPy's. PyTorch would take True and np.float32(1.5) for 1."""
    for place, argument in integers:
        if place < len(args):
            value = args[place]
            if type(value) is not int and value is not None:
                args = (*args[:place], check_int(op, argument, value), *args[place + 1 :])
    return args


def refuse_nested_tensors(library: Library, name: str, body: Callable[..., Any], overload: Any) -> None:
    """Let `vk::<name>` refuse nested tensors by the name of their argument.

    Jagged ones are a subclass, strided ones have dispatch keys of their own. Other subclasses stand for dense tensors.
    """
    parameters = list(inspect.signature(body).parameters)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        check_all_dense(name, itertools.chain(zip(parameters, args, strict=False), kwargs.items()))
        return NotImplemented

    def refuse_jagged(cls: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return refuse(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(overload, NestedTensor, refuse_jagged, lib=library)
    for key in ("NestedTensorCPU", "NestedTensorCUDA", "NestedTensorMeta"):
        library.impl(name, refuse, key)
