"""Host time of a call: what Python and PyTorch take before the device has its work."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from torch_ops._core.plan import Bound
from torch_ops.bench.measure.opbench import HostCall
from torch_ops.bench.measure.results import HostTime
from torch_ops.bench.measure.timing import synchronize

# Fewer calls than a stream's queue holds, so that no call waits for the device.
CALLS = 100
REPETITIONS = 30
# On the CPU a call computes its result as well.
CPU_CALLS, CPU_REPETITIONS = 10, 3


class Launches(list[tuple[Bound, tuple[Any, ...]]]):
    """Launches as a call made them: each bound kernel with its descriptors and tensors."""

    def replay(self) -> None:
        """Launch all of them through Triton, which inspects every argument."""
        for bound, arguments in self:
            bound.launch_anew(*arguments)


@contextlib.contextmanager
def recorded_launches() -> Iterator[Launches]:
    """Collect what is launched within."""
    launches = Launches()
    launch = Bound.__call__

    def record(self: Bound, *tensors: Any, descriptors: tuple[Any, ...] = ()) -> None:
        launches.append((self, (*descriptors, *tensors)))
        launch(self, *tensors, descriptors=descriptors)

    with mock.patch.object(Bound, "__call__", record):
        yield launches


def raw_launch(name: str, call: Callable[[], object], path: str) -> HostCall:
    """The launches that `call` makes on this path; none on the reference's."""
    if path == "reference":
        return HostCall(name, None, raw=True, note="there is none on this device")
    with recorded_launches() as launches:
        call()
    return HostCall(name, launches.replay, raw=True)


def host_times(op: str, calls: Sequence[HostCall], device: torch.device) -> tuple[HostTime, ...]:
    """The least over rounds of all calls; what has no call here is listed without a time."""
    on_gpu = device.type == "cuda"
    number = torch.ones(16, device=device)
    calls = (HostCall("ATen add", lambda: torch.add(number, number)), *calls)
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
            synchronize(device)
            if turn:  # the first turn builds kernels and fills caches
                least[index] = min(least[index], elapsed / per_turn * 1e6)
    return tuple(
        HostTime(op, entry.name, None if entry.call is None else us, entry.raw, entry.most_us, entry.note)
        for entry, us in zip(calls, least, strict=True)
    )
