"""Autocast of an op: floating arguments are cast to the type of the region, and the op is called without it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library


def install_autocast(library: Library, name: str, overload: Any, kept: frozenset[int]) -> None:
    """For `vk::<name>`; arguments at the places in `kept` stay fp32 where they are."""

    def make(device_type: str, key: torch._C.DispatchKey) -> Callable[..., Any]:
        def cast(*args: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            halves = torch.float16, torch.bfloat16
            castable = *halves, torch.float32
            args = tuple(
                arg.to(dtype)
                if isinstance(arg, Tensor) and arg.dtype in (halves if place in kept else castable)
                else arg
                for place, arg in enumerate(args)
            )
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return overload(*args)

        return cast

    for device_type, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
        library.impl(name, make(device_type, getattr(torch._C.DispatchKey, key)), key)
