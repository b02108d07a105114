"""Arguments that PyTorch's dispatcher would take for others, or for which it would find no implementation."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.library import Library

from torch_ops._core.checks import check_all_dense, check_bool, check_int, check_number, refuse
from torch_ops._core.torch_private import NestedTensor, assumed_constant, schema_of

# Place, name and type of each argument that is an integer, a real number or a bool.
Numbers = tuple[tuple[int, str, str], ...]

_numbers: dict[str, Numbers] = {}


def keep_numbers(op: str, body: Callable[..., Any]) -> Numbers:
    """Find the arguments that are integers, real numbers or bools, for `numbers_of`."""
    types = {int: "int", int | None: "int", float: "float", float | None: "float", bool: "bool"}
    parameters = enumerate(inspect.signature(body, eval_str=True).parameters.items())
    kinds = [(place, name, types.get(parameter.annotation, "")) for place, (name, parameter) in parameters]
    _numbers[op] = tuple((place, name, kind) for place, name, kind in kinds if kind)
    return _numbers[op]


# Read as attributes, each number would have guards, which a compiled function asks before each call.
@assumed_constant
def numbers_of(op: str) -> Numbers:
    return _numbers[op]


def with_numbers(op: str, numbers: Numbers, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with Python's numbers for NumPy's.

    PyTorch would take True and np.float32(1.5) for the integer 1, and 64, None or a tensor for a bool.
    """
    for place, argument, kind in numbers:
        if place >= len(args):
            continue
        value = args[place]
        if kind == "bool":
            if isinstance(value, bool):
                continue
            checked: Any = check_bool(op, argument, value)
        elif value is None:
            continue
        elif kind == "int":
            if isinstance(value, int) and not isinstance(value, bool):
                continue
            checked = check_int(op, argument, value)
        else:
            if isinstance(value, float) and not isinstance(value, np.generic):
                continue
            checked = check_number(op, argument, value)
        args = (*args[:place], checked, *args[place + 1 :])
    return args


def refuse_negated_tensors(library: Library, name: str, written: tuple[str, ...], overload: Any) -> None:
    """Let `vk::<name>` refuse to write to views that PyTorch negates as it reads, by the name of their argument.

    PyTorch would write to a copy and then fail an assertion of its own. Tensors that are read come as copies.
    """
    parameters = [argument.name for argument in schema_of(overload).arguments]

    def resolve(*args: Any) -> Any:
        for argument, value in zip(parameters, args, strict=False):
            if argument in written and value.is_neg():
                refuse(name, argument, "a tensor with memory of its own (resolve_neg())", "a negated view")
        return overload(*(value.resolve_neg() if isinstance(value, torch.Tensor) else value for value in args))

    library.impl(name, resolve, "Negative")


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
