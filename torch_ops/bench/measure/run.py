"""One case: first the correctness check, then every implementation in interleaved rounds."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_ops.bench.measure.check import Checked, check_impl
from torch_ops.bench.measure.machine import dtype_name
from torch_ops.bench.measure.opbench import Case, Check, Impl, OpBench, one_line
from torch_ops.bench.measure.results import FAILED, Record
from torch_ops.bench.measure.timing import (
    WARM_UP_SECONDS,
    Timer,
    interleave,
    make_timer,
    sets_to_outgrow_cache,
    warm_up,
    whole_cycles,
)

MOST_COMPILED = 1000
# No clock here resolves more than a nanosecond.
DIGITS_OF_MS = 6


@dataclass(frozen=True)
class Setup:
    """Settings of a whole run.

    Attributes:
        cold: inputs leave the L2 cache between calls.
        warm_up: implementations are warmed by so many untimed turns, a round is one iteration, and results are held
            against ours too.
        tf32: PyTorch's setting of fp32 products, left as it is unless set.
        wall: wall time of a call on a GPU too.
    """

    dtype: torch.dtype
    device: torch.device
    directions: tuple[str, ...] = ("forward",)
    rounds: int = 4
    cold: bool = False
    warm_up: int | None = None
    tf32: bool = False
    wall: bool = False

    @property
    def backward(self) -> bool:
        return self.directions != ("forward",)

    @property
    def kind(self) -> str:
        """The type of the arithmetic."""
        return "tf32" if self.tf32 else dtype_name(self.dtype)

    def steps(self, count: int) -> int:
        """How often `run_case` reports progress on one case, where so many implementations all take part."""
        return count * (1 + whole_cycles(self.rounds, count) * len(self.directions))


def run_case(
    bench: OpBench, case: Case, impls: Sequence[Impl], setup: Setup, on_step: Callable[[str], None] = lambda doing: None
) -> list[Record]:
    """A record for each direction and implementation, the first of which is ours."""
    # A baseline that is compiled for each case anew is one function to PyTorch, which would stop after a few.
    limits = {"recompile_limit": MOST_COMPILED, "accumulated_recompile_limit": MOST_COMPILED}
    with torch._dynamo.config.patch(limits), tf32_products(setup.tf32):
        checks = bench.checks(case, setup.dtype, setup.device, setup.backward)
        checked = _checked(case, checks, impls, setup, on_step)
        inputs = input_sets(bench, case, setup, checks)
        del checks
        # An op without gradients has no backward to measure.
        directions = [each for each in setup.directions if each in impls[0].directions]
        return [one for each in directions for one in _timed(bench, case, inputs, checked, each, setup, on_step)]


@contextlib.contextmanager
def tf32_products(on: bool) -> Iterator[None]:
    """PyTorch's products, and ours, in tf32 where `on`."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if not on or before == "tf32":
        yield
        return
    # Sets the newer name too; where only that is set, what still asks for this one raises.
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = before


# An implementation, what the check found, and by direction its difference to ours.
_Entry = tuple[Impl, Checked, dict[str, float | None]]


def _checked(
    case: Case, checks: Sequence[Check], impls: Sequence[Impl], setup: Setup, on_step: Callable[[str], None]
) -> list[_Entry]:
    entries: list[_Entry] = []
    ours = Checked(FAILED)
    for impl in impls:
        on_step(f"checking {impl.name}")
        found = check_impl(impl, case, checks, setup.dtype, setup.device, setup.backward)
        differences = {}
        if impl is impls[0]:
            ours = found
        elif setup.warm_up is not None:
            differences = {direction: found.difference(ours, direction) for direction in setup.directions}
        entries.append((impl, replace(found, results=()), differences))
    return entries


def input_sets(bench: OpBench, case: Case, setup: Setup, checks: Sequence[Check]) -> list[object]:
    """Where a check ran the case itself its inputs serve again: drawing large ones takes seconds."""
    drawn = [check.inputs for check in checks if check.case == case]
    inputs = drawn[:1] or [bench.inputs(case, setup.dtype, setup.device, 0)]
    if setup.cold:
        read = bench.cost(inputs[0], False).bytes_moved
        for seed in range(1, sets_to_outgrow_cache(read, setup.device)):
            inputs.append(bench.inputs(case, setup.dtype, setup.device, seed))
    return inputs


def _timed(
    bench: OpBench, case: Case, inputs: list[object], entries: Sequence[_Entry], direction: str, setup: Setup,
    on_step: Callable[[str], None],
) -> list[Record]:  # fmt: skip
    timers: dict[str, Timer] = {}
    peaks: dict[str, int | None] = {}
    extras: dict[str, dict[str, Any]] = {}
    entries = [entry for entry in entries if direction in entry[0].directions]
    checked = {impl.name: found.of(direction) for impl, found, _ in entries}
    for impl, *_ in entries:
        if not checked[impl.name].can_run:
            continue
        try:
            calls = [impl.bind(case, each) for each in inputs]
            extras[impl.name] = calls[0].extras(setup.device)
            work = [call.work(direction, setup.device) for call in calls]
            timers[impl.name] = make_timer(work, setup.device, setup.warm_up is not None, setup.wall)
            peaks[impl.name] = calls[0].peak_bytes(work[0], setup.device)
        except Exception as error:
            timers.pop(impl.name, None)
            checked[impl.name] = Checked(FAILED, one_line(error), checked[impl.name].reports)
    if setup.warm_up is not None:
        for timer in (timer for _ in range(setup.warm_up) for timer in timers.values()):
            timer.sample()
    elif setup.device.type == "cuda":
        warm_up(timers.values(), WARM_UP_SECONDS)
    figures = interleave(timers, setup.rounds, lambda name: on_step(f"{direction}, timing {name}"))
    cost = bench.cost_of(inputs[0], direction)
    shared: dict[str, Any] = {
        "op": bench.op, "case": case.name, "shape": bench.shape(case), "direction": direction, "dtype": setup.kind,
        "path": bench.path(inputs[0]), "cache": "cold" if len(inputs) > 1 else "warm", "flops": cost.flops,
        "bytes_moved": cost.bytes_moved, "warm_up": setup.warm_up,
    }  # fmt: skip
    return [
        Record(
            **shared,
            name=impl.name,
            group=impl.group,
            status=checked[impl.name].status,
            note=checked[impl.name].note,
            rounds_ms=tuple(round(ms, DIGITS_OF_MS) for ms in figures.get(impl.name, ())),
            timer=timers[impl.name].kind if impl.name in timers else "",
            peak_bytes=peaks.get(impl.name),
            to_ours=differences.get(direction),
            ready=impl.ready,
            **extras.get(impl.name, {}),
            reports=checked[impl.name].reports,
        )  # fmt: skip
        for impl, _, differences in entries
    ]
