"""Arguments that PyTorch's dispatcher would take for others, or for which it would find no implementation."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.library import Library

from torch_ops._core.checks import check_all_dense, check_int, check_number
from torch_ops._core.torch_private import NestedTensor

# Place and name of each argument that is a number, and whether it is an integer.
Numbers = tuple[tuple[int, str, bool], ...]

_numbers: dict[str, Numbers] = {}


def keep_numbers(op: str, body: Callable[..., Any]) -> Numbers:
    """Find the arguments that are integers or real numbers, for `numbers_of`."""
    whole = {int: True, int | None: True, float: False, float | None: False}
    parameters = enumerate(inspect.signature(body, eval_str=True).parameters.items())
    kinds = [(place, name, whole.get(parameter.annotation)) for place, (name, parameter) in parameters]
    _numbers[op] = tuple((place, name, kind) for place, name, kind in kinds if kind is not None)
    return _numbers[op]


# Read as attributes, each number would have guards, which a compiled function asks before each call.
@torch.compiler.assume_constant_result
def numbers_of(op: str) -> Numbers:
    return _numbers[op]


def with_numbers(op: str, numbers: Numbers, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with Python's numbers for NumPy's. PyTorch would take True and np.float32(1.5) for 1."""
    for place, argument, whole in numbers:
        if place < len(args):
            value = args[place]
            plain = isinstance(value, int if whole else float) and not isinstance(value, (bool, np.generic))
            if not plain and value is not None:
                checked = check_int(op, argument, value) if whole else check_number(op, argument, value)
                args = (*args[:place], checked, *args[place + 1 :])
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
