"""Launches written down, so that `triton_alone` can build them without PyTorch."""

import dataclasses
import fcntl
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from compile_tests.contract.trace import KernelLaunch
from csrc_free_ops.tiles.hopper.versions import PTXAS
from torch_ops._core.device import gpu


class Demands(NamedTuple):
    """What machine code must be like: what may spill, and whether it multiplies by wgmma, and waits for few of them."""

    most_spilled: int = 0
    wgmma: Literal["", "some", "overlapping"] = ""


def append(file: Path, launches: Iterable[tuple[KernelLaunch, Demands]], target: GPUTarget) -> None:
    """Each launch as a line of the file, to which other processes may write too. Needs `fake_gpu(target)`."""
    limit = gpu().shared_memory
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(_variant(*each, target, limit), sort_keys=True)}\n" for each in launches)
    with file.open("a") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        opened.write(lines)


def _variant(launch: KernelLaunch, demands: Demands, target: GPUTarget, limit: int) -> dict[str, Any]:
    function = launch.kernel.fn
    constants = {name: value for name, value in launch.arguments.items() if name.isupper()}
    return {
        "name": f"{target.backend}-{target.arch} {function.__name__} {constants | launch.options}",
        "kernel": f"{function.__module__}.{function.__name__}",
        "target": [target.backend, target.arch, target.warp_size],
        "args": list(map(write_argument, launch.args)),
        "kwargs": {name: write_argument(value) for name, value in launch.kwargs.items() if name not in PTXAS},
        "shared_memory": limit,
        **demands._asdict(),
    }


def write_argument(value: Any) -> Any:
    """An argument as JSON; `triton_alone.read_argument` reads it."""
    if isinstance(value, TensorDescriptor):
        layout = {field.name: getattr(value.layout, field.name) for field in dataclasses.fields(value.layout)}
        # What a layout's __post_init__ adds is none of its arguments.
        layout = {name: each for name, each in layout.items() if each not in (None, [], ())}
        return {
            "descriptor": {
                "dtype": _name(value.base.dtype), "shape": list(value.shape), "strides": list(value.strides),
                "block": list(value.block_shape), "layout": layout,
            }
        }  # fmt: skip
    if isinstance(value, Tensor):
        return {"pointer": _name(value.dtype)}
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, tuple):
        return {"tuple": list(map(write_argument, value))}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    assert value is None or isinstance(value, bool | int | float | str), f"{value!r} cannot be written down"
    return value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
