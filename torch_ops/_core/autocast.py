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
    reads_any: tuple[str, ...],
    dtype_argument: str,
) -> None:
    """For `vk::<name>`, whose arguments are `body`'s: those in `keeps_dtype` stay fp32 where they are.

    Those in `reads_any` keep any dtype. `dtype_argument`, unless empty, names the one that says the type itself: where
    it is given, nothing is cast.
    """
    arguments = list(inspect.signature(body).parameters)
    halves = torch.float16, torch.bfloat16
    castable: dict[int, tuple[torch.dtype, ...]] = dict.fromkeys(range(len(arguments)), (*halves, torch.float32))
    castable.update(dict.fromkeys(map(arguments.index, keeps_dtype), halves))
    castable.update(dict.fromkeys(map(arguments.index, reads_any), ()))
    says = arguments.index(dtype_argument) if dtype_argument else len(arguments)

    def make(device_type: str, key: str) -> Callable[..., Any]:
        def cast(*args: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            if says >= len(args) or args[says] is None:
                args = tuple(
                    arg.to(dtype) if isinstance(arg, Tensor) and arg.dtype in castable[place] else arg
                    for place, arg in enumerate(args)
                )
            with exclude_key(key):
                return overload(*args)

        return cast

    for device_type, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
        library.impl(name, make(device_type, key), key)
