"""Where a call's time goes: PyTorch's profiler, and the call against the machine's ceilings."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from torch_ops.bench.measure.opbench import Case, OpBench
from torch_ops.bench.measure.results import OK, Record
from torch_ops.bench.measure.run import Setup
from torch_ops.bench.measure.timing import Work, make_timer, synchronize

WARM_UP_CALLS = 3
PROFILED_CALLS = 10
ROWS = 20


def profile_case(
    bench: OpBench, case: Case, direction: str, setup: Setup, trace: Path | None, show: Callable[[str], None]
) -> Record:
    """Profiles ours on one case, `show`s the profiler's table, and times the call by itself."""
    inputs = bench.inputs(case, setup.dtype, setup.device, 0)
    work = bench.ours.bind(case, inputs).work(direction, setup.device)
    show(_profiler_table(work, setup.device, trace))
    timer = make_timer([work], setup.device)
    cost = bench.cost(inputs, direction == "backward")
    return Record(
        op=bench.op, case=case.name, shape=bench.shape(case), direction=direction, dtype=setup.kind,
        path=bench.path(inputs), name=bench.ours.name, group=bench.ours.group, status=OK, timer=timer.kind,
        flops=cost.flops, bytes_moved=cost.bytes_moved,
        rounds_ms=tuple(timer.sample() for _ in range(setup.rounds)),
    )  # fmt: skip


def _profiler_table(work: Work, device: torch.device, trace: Path | None) -> str:
    on_gpu = device.type == "cuda"
    for _ in range(WARM_UP_CALLS):
        work()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch_profile(activities=activities, record_shapes=True, with_flops=True) as profiler:
        for _ in range(PROFILED_CALLS):
            work()
        synchronize(device)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    averages = profiler.key_averages(group_by_input_shape=True)
    sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return averages.table(sort_by=sort_by, row_limit=ROWS, max_name_column_width=45, max_shapes_column_width=50)
