"""A contest: on each case, first the gate, then every contender in interleaved rounds."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from torch_ops.bench.measure.differences import differences
from torch_ops.bench.measure.gate import Verdict, judge
from torch_ops.bench.measure.machine import dtype_name
from torch_ops.bench.measure.results import FAILED, Measurement, Timed
from torch_ops.bench.measure.room import Call, Case, Contender, Room, Trial, one_line
from torch_ops.bench.measure.timing import (
    WARM_UP_SECONDS,
    Timer,
    Work,
    interleave,
    make_timer,
    on_timing_stream,
    peak_bytes,
    sets_to_outgrow_cache,
    warm_up,
    whole_cycles,
)

MOST_COMPILED = 1000
# To a nanosecond: no clock here has more.
DIGITS_OF_MS = 6


@dataclass(frozen=True)
class Terms:
    """What holds for a whole run; `cold` lets inputs leave the L2 cache between calls.

    With `warm_up`, contenders are warmed by so many untimed turns, a round is one iteration, and what they give is held
    against ours too. `tf32` is PyTorch's setting of fp32 products, left as it is unless set.
    """

    dtype: torch.dtype
    device: torch.device
    backward: bool
    rounds: int
    cold: bool
    forward: bool = True
    warm_up: int | None = None
    tf32: bool = False

    @property
    def directions(self) -> tuple[str, ...]:
        wanted = {"forward": self.forward, "backward": self.backward}
        return tuple(direction for direction, is_wanted in wanted.items() if is_wanted)

    @property
    def kind(self) -> str:
        """What is computed in."""
        return "tf32" if self.tf32 else dtype_name(self.dtype)

    def steps(self, contenders: int) -> int:
        """How often `contest` reports progress on one case, where all take part."""
        return contenders * (1 + whole_cycles(self.rounds, contenders) * len(self.directions))


def contest(
    room: Room,
    case: Case,
    contenders: Sequence[Contender],
    terms: Terms,
    on_step: Callable[[str], None] = lambda doing: None,
) -> list[Measurement]:
    """One measurement for each direction. The first contender is ours."""
    # A peer that is compiled for each case anew is one function to PyTorch, which else would stop after a few.
    with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED), tf32_products(terms.tf32):
        return _contest(room, case, contenders, terms, on_step)


def _contest(
    room: Room, case: Case, contenders: Sequence[Contender], terms: Terms, on_step: Callable[[str], None]
) -> list[Measurement]:
    trials = room.trials(case, terms.dtype, terms.device, terms.backward)
    verdicts = _verdicts(case, trials, contenders, terms, on_step)
    inputs = input_sets(room, case, terms, trials)
    del trials
    compared = terms.warm_up is not None
    to_ours = differences(case, inputs[0], contenders, verdicts, terms.backward) if compared else {}
    measurements = []
    # An op without gradients has no backward to measure.
    for direction in (direction for direction in terms.directions if direction in contenders[0].directions):
        timed = _time(case, inputs, contenders, verdicts, direction, terms, on_step)
        cost = room.cost(inputs[0], direction == "backward")
        measurements.append(
            Measurement(
                op=room.op,
                case=case.name,
                shape=room.shape(case),
                direction=direction,
                dtype=terms.kind,
                path=room.path(inputs[0]),
                cache="cold" if len(inputs) > 1 else "warm",
                flops=cost.flops,
                bytes_moved=cost.bytes_moved,
                ours=timed[0],
                peers=tuple(replace(each, to_ours=to_ours.get((each.name, direction))) for each in timed[1:]),
                warm_up=terms.warm_up,
            )
        )
    return measurements


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


def _verdicts(
    case: Case, trials: Sequence[Trial], contenders: Sequence[Contender], terms: Terms,
    on_step: Callable[[str], None],
) -> dict[str, Verdict]:  # fmt: skip
    verdicts = {}
    for contender in contenders:
        on_step(f"checking {contender.name}")
        verdicts[contender.name] = judge(contender, case, trials, terms.dtype, terms.device, terms.backward)
    return verdicts


def input_sets(room: Room, case: Case, terms: Terms, trials: Sequence[Trial]) -> list[object]:
    """Where a trial ran the case itself its inputs serve again: drawing large ones takes seconds."""
    drawn = [trial.inputs for trial in trials if trial.case == case]
    inputs = drawn[:1] or [room.inputs(case, terms.dtype, terms.device, 0)]
    if terms.cold:
        read = room.cost(inputs[0], False).bytes_moved
        for seed in range(1, sets_to_outgrow_cache(read, terms.device)):
            inputs.append(room.inputs(case, terms.dtype, terms.device, seed))
    return inputs


def _time(
    case: Case, inputs: list[object], contenders: Sequence[Contender],
    verdicts: dict[str, Verdict], direction: str, terms: Terms, on_step: Callable[[str], None],
) -> list[Timed]:  # fmt: skip
    timers: dict[str, Timer] = {}
    peaks: dict[str, int | None] = {}
    contenders = [contender for contender in contenders if direction in contender.directions]
    judged = {contender.name: verdicts[contender.name].of(direction) for contender in contenders}
    for contender in contenders:
        name = contender.name
        if not judged[name].can_run:
            continue
        try:
            calls = [contender.bind(case, each) for each in inputs]
            work = [bound_work(call, direction, terms.device) for call in calls]
            timers[name] = make_timer(work, terms.device, briefly=terms.warm_up is not None)
            peaks[name] = peak_bytes(work[0], terms.device)
        except Exception as error:
            timers.pop(name, None)
            judged[name] = Verdict(FAILED, one_line(error), judged[name].reports)
    if terms.warm_up is not None:
        for timer in (timer for _ in range(terms.warm_up) for timer in timers.values()):
            timer.sample()
    elif terms.device.type == "cuda":
        warm_up(timers.values(), WARM_UP_SECONDS)
    figures = interleave(timers, terms.rounds, lambda name: on_step(f"{direction}, timing {name}"))
    return [
        Timed(
            name=name,
            status=verdict.status,
            note=verdict.note,
            rounds_ms=tuple(round(ms, DIGITS_OF_MS) for ms in figures.get(name, ())),
            timer=timers[name].kind if name in timers else "",
            peak_bytes=peaks.get(name),
            gate=verdict.reports,
        )
        for name, verdict in judged.items()
    ]


def bound_work(call: Call, direction: str, device: torch.device) -> Work:
    if direction == "forward":
        return call.forward_alone
    with on_timing_stream(device):
        return call.backward_of(call.forward())
