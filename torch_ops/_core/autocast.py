"""Autocast of an op: floating arguments are cast to the type of the region, and the op is called without it."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from torch_ops._core.torch_private import exclude_key


def install_autocast(
    library: Library,
    name: str,
    overload: Any,
    body: Callable[..., Any],
    keeps_dtype: tuple[str, ...],
    dtype_argument: str,
) -> None:
    """For `vk::<name>`, whose arguments are `body`'s: those in `keeps_dtype` stay fp32 where they are.

    `dtype_argument`, unless empty, names the one that says the type itself: where it is given, nothing is cast.
    """
    arguments = list(inspect.signature(body).parameters)
    kept = frozenset(map(arguments.index, keeps_dtype))
    says = arguments.index(dtype_argument) if dtype_argument else len(arguments)

    def make(device_type: str, key: str) -> Callable[..., Any]:
        def cast(*args: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            halves = torch.float16, torch.bfloat16
            castable = *halves, torch.float32
            if says >= len(args) or args[says] is None:
                args = tuple(
                    arg.to(dtype)
                    if isinstance(arg, Tensor) and arg.dtype in (halves if place in kept else castable)
                    else arg
                    for place, arg in enumerate(args)
                )
            with exclude_key(key):
                return overload(*args)

        return cast

    for device_type, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
        library.impl(name, make(device_type, key), key)
