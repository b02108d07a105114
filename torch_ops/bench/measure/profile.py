"""Where a call's time goes: PyTorch's profiler, and the call against the machine's ceilings."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from torch_ops.bench.measure.contest import Terms, bound_work
from torch_ops.bench.measure.machine import dtype_name
from torch_ops.bench.measure.results import Profile
from torch_ops.bench.measure.room import Case, Room
from torch_ops.bench.measure.timing import Work, make_timer

WARM_UP_CALLS = 3
PROFILED_CALLS = 10
ROWS = 20


def profile_case(
    room: Room, case: Case, direction: str, terms: Terms, trace: Path | None,
    show: Callable[[str], None],
) -> Profile:  # fmt: skip
    """Profiles ours on one case, `show`s the profiler's table, and times the call by itself."""
    inputs = room.inputs(case, terms.dtype, terms.device, 0)
    work = bound_work(room.ours.bind(case, inputs), direction, terms.device)
    show(_profiler_table(work, terms.device, trace))
    timer = make_timer([work], terms.device)
    cost = room.cost(inputs, direction == "backward")
    return Profile(
        op=room.op,
        case=case.name,
        shape=room.shape(case),
        direction=direction,
        dtype=dtype_name(terms.dtype),
        path=room.path(inputs),
        timer=timer.kind,
        flops=cost.flops,
        bytes_moved=cost.bytes_moved,
        rounds_ms=tuple(timer.sample() for _ in range(terms.rounds)),
    )


def _profiler_table(work: Work, device: torch.device, trace: Path | None) -> str:
    on_gpu = device.type == "cuda"
    for _ in range(WARM_UP_CALLS):
        work()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch_profile(activities=activities, record_shapes=True, with_flops=True) as profiler:
        for _ in range(PROFILED_CALLS):
            work()
        if on_gpu:
            torch.cuda.synchronize(device)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    averages = profiler.key_averages(group_by_input_shape=True)
    sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return averages.table(sort_by=sort_by, row_limit=ROWS, max_name_column_width=45, max_shapes_column_width=50)
