"""Host time of a call: what Python and PyTorch take before the device has its work."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from torch_ops.bench.measure.results import HostTime
from torch_ops.bench.measure.room import HostCall

# Fewer calls than a stream's queue holds, so that no call waits for the device.
CALLS = 100
REPETITIONS = 30
# On the CPU a call computes its result as well.
CPU_CALLS, CPU_REPETITIONS = 10, 3


class Launches(list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]]):
    """Launches as their launcher made them: kernel, grid, arguments, keyword arguments."""

    def replay(self) -> None:
        for kernel, grid, args, options in self:
            kernel[grid](*args, **options)


@contextlib.contextmanager
def recorded_launches(launchers: Sequence[ModuleType]) -> Iterator[Launches]:
    """Collects what these launchers launch within; all of them launch by the same `wrap_triton`."""
    launches = Launches()
    modules: Sequence[Any] = launchers
    wrap = modules[0].wrap_triton

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def launch(*args: Any, **options: Any) -> Any:
                launches.append((self.kernel, grid, args, options))
                return wrap(self.kernel)[grid](*args, **options)

            return launch

    for launcher in modules:
        launcher.wrap_triton = Recorder
    try:
        yield launches
    finally:
        for launcher in modules:
            launcher.wrap_triton = wrap


def host_times(op: str, calls: Sequence[HostCall], device: torch.device) -> tuple[HostTime, ...]:
    """The least over rounds of all calls; what has no call here is listed without a time."""
    on_gpu = device.type == "cuda"
    per_turn, turns = (CALLS, REPETITIONS) if on_gpu else (CPU_CALLS, CPU_REPETITIONS)
    least = [math.inf] * len(calls)
    for turn in range(turns + 1):
        for index, entry in enumerate(calls):
            if entry.call is None:
                continue
            start = time.perf_counter()
            for _ in range(per_turn):
                entry.call()
            elapsed = time.perf_counter() - start
            if on_gpu:
                torch.cuda.synchronize(device)
            if turn:  # the first turn builds kernels and fills caches
                least[index] = min(least[index], elapsed / per_turn * 1e6)
    return tuple(
        HostTime(
            op=op,
            name=entry.name,
            microseconds=None if entry.call is None else microseconds,
            raw=entry.raw,
            target=entry.target,
            note=entry.note,
        )
        for entry, microseconds in zip(calls, least, strict=True)
    )
