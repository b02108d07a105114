"""A contest on one row: first the gate, then the wall time of every contender's call, in turns, everything twice."""

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_ops
from torch_ops.bench.encoder.contenders import ASSEMBLED, OURS, UNCAPTURED, WARM_UP_CALLS, Bound, EncoderContender
from torch_ops.bench.encoder.rows import Scene, count_flops, draw_directions, outcome, step, truths
from torch_ops.bench.measure.contest import MOST_COMPILED
from torch_ops.bench.measure.machine import dtype_name
from torch_ops.bench.measure.results import FAILED, OK, UNAVAILABLE, WRONG, EncoderRow, Timed
from torch_ops.bench.measure.room import one_line
from torch_ops.bench.measure.timing import Timer, Work, interleave, warm_up
from torch_ops.models._capture import pool_bytes
from torch_ops.testing import Report as GateReport
from torch_ops.testing import compare

PASSES = 2
# A sample is the median of so many calls, or of as many as take this long.
MOST_CALLS, SAMPLE_MS = 10, 30.0
# The first look at a contender is at most so many calls.
LOOK_CALLS = 5
# A peer that is wrong, or takes so many times the best of its group at the first look, has one round in each pass.
HOPELESS = 1.3
# Where a call takes so long, so many rounds are enough.
SLOW_MS, SLOW_ROUNDS = 50.0, 3
WARM_UP_SECONDS = 1.0
# Of what breaks the rule; a training step has hundreds of gradients.
SHOWN = 3


@dataclass
class Entry:
    """A contender on the way through its contest."""

    contender: EncoderContender
    status: str = OK
    note: str = ""
    gate: tuple[GateReport, ...] = ()
    bound: Bound | None = None
    work: Work | None = None
    peak: int | None = None

    def fail(self, error: Exception, device: torch.device) -> None:
        self.status, self.note, self.work, self.bound = FAILED, one_line(error), None, None
        # Raises where the device is lost, and with it whatever would come next.
        synchronize(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def many_compiled() -> Iterator[None]:
    """A block is one function to PyTorch, which else would stop compiling it anew after a few rows."""
    with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED, accumulated_recompile_limit=MOST_COMPILED):
        yield


def contest_row(
    scene: Scene, contenders: Sequence[EncoderContender], rounds: int, say: Callable[[str], None]
) -> EncoderRow:
    """One row; what fails or is wrong is marked, and no reason to stop."""
    return time_row(scene, prepare_row(scene, contenders, say), rounds, say)


def prepare_row(scene: Scene, contenders: Sequence[EncoderContender], say: Callable[[str], None]) -> list[Entry]:
    """All of a row but its times: results, and memory."""
    with _as_called(scene):
        entries = _judged(scene, contenders, say)
        _weigh(scene, entries)
    return entries


def time_row(scene: Scene, entries: Sequence[Entry], rounds: int, say: Callable[[str], None]) -> EncoderRow:
    with _as_called(scene):
        figures = _timed(scene, entries, rounds, say)
    groups: dict[str, list[Timed]] = {OURS: [], UNCAPTURED: [], ASSEMBLED: []}
    for entry in entries:
        name = entry.contender.name
        kind = "wall" if name in figures else ""
        timed = Timed(name, entry.status, entry.note, figures.get(name, ()), kind, entry.peak, entry.gate)
        groups[entry.contender.group].append(timed)
    return EncoderRow(
        row=scene.row.name,
        shape=scene.row.shape,
        direction=scene.row.direction,
        dtype=dtype_name(scene.dtype),
        path=path_of(scene),
        flops=count_flops(scene),
        ours=tuple(groups[OURS]),
        uncaptured=tuple(groups[UNCAPTURED]),
        assembled=tuple(groups[ASSEMBLED]),
        ready={entry.contender.name: entry.contender.ready for entry in entries},
    )


@contextlib.contextmanager
def _as_called(scene: Scene) -> Iterator[None]:
    with many_compiled(), contextlib.nullcontext() if scene.row.training else torch.no_grad():
        yield


def _judged(scene: Scene, contenders: Sequence[EncoderContender], say: Callable[[str], None]) -> list[Entry]:
    start = time.perf_counter()
    reference, eager = truths(scene)
    synchronize(scene.device)
    say(f"  reference in fp64: {time.perf_counter() - start:.1f} s")
    directions = draw_directions(scene) if scene.row.training else []
    entries = []
    for contender in contenders:
        entry = Entry(contender)
        entries.append(entry)
        reason = contender.refuses(scene)
        if not reason and scene.row.training and not contender.trains:
            reason = "is for inference"
        if reason:
            entry.status, entry.note = UNAVAILABLE, reason
            continue
        start = time.perf_counter()
        try:
            entry.bound = contender.bind(scene)
            results = outcome(scene, scene.session.tower, entry.bound.encode)
            _judge(entry, results, reference, eager)
            del results
            entry.work = _work(scene, entry.bound, directions)
        except Exception as error:
            entry.fail(error, scene.device)
        say(f"  {contender.name}: {entry.status}, ready after {time.perf_counter() - start:.1f} s {entry.note[:120]}")
    return entries


def _judge(entry: Entry, results: dict[str, Tensor], reference: dict[str, Tensor], eager: dict[str, Tensor]) -> None:
    """By the tolerance rule; of the reports the worst are kept."""
    if missing := reference.keys() - results.keys():
        entry.status, entry.note = WRONG, f"nothing for {', '.join(sorted(missing)[:SHOWN])}"
        return
    reports = [compare(results[name], eager[name], reference[name], name) for name in reference]
    broken = [report for report in reports if not report.passed]
    shown = sorted(
        broken or reports, key=lambda report: report.rms_error / max(report.rms_allowed, 1e-30), reverse=True
    )
    entry.gate = tuple(shown[:SHOWN])
    if broken:
        entry.status = WRONG
        entry.note = f"{len(broken)} of {len(reports)} tensors: " + "; ".join(map(str, entry.gate))


def _work(scene: Scene, bound: Bound, directions: Sequence[Tensor]) -> Work:
    if not scene.row.training:
        return bound.encode
    parameters = list(scene.session.tower.parameters())
    return lambda: step(bound.encode, parameters, directions)


def _timed(
    scene: Scene, entries: Sequence[Entry], rounds: int, say: Callable[[str], None]
) -> dict[str, tuple[float, ...]]:
    """Of each that may be the best `rounds` samples in each pass, in the balanced orders of `interleave`; else one."""
    device, looks, timers = scene.device, {}, {}
    for entry in entries:
        if entry.work is None or entry.bound is None:
            continue
        name = entry.contender.name
        try:
            looks[name] = _look(entry.work, device, entry.bound.pooled)
        except Exception as error:
            entry.fail(error, device)
            continue
        timers[name] = _timer(entry.work, device, _calls(looks[name], MOST_CALLS))
    chosen = may_win(entries, looks)
    likely = {name: timer for name, timer in timers.items() if name in chosen}
    others = {name: timer for name, timer in timers.items() if name not in chosen}
    if any(looks[name] > SLOW_MS for name in likely):
        rounds = min(rounds, SLOW_ROUNDS)
    if device.type == "cuda":
        warm_up(timers.values(), WARM_UP_SECONDS)
    start = time.perf_counter()
    found = [interleave(likely, rounds) | interleave(others, 1) for _ in range(PASSES)]
    say(f"  timed in {time.perf_counter() - start:.1f} s, {len(likely)} of {len(timers)} in {rounds} rounds")
    return {name: sum((each[name] for each in found), ()) for name in timers}


def may_win(entries: Sequence[Entry], looks: dict[str, float]) -> set[str]:
    """Ours, and the peers that the first look leaves a chance to be the best of their group."""
    seen = [(entry, looks[entry.contender.name]) for entry in entries if entry.contender.name in looks]
    best: dict[str, float] = {}
    for entry, look in seen:
        if entry.status == OK:
            best[entry.contender.group] = min(look, best.get(entry.contender.group, math.inf))
    return {
        entry.contender.name
        for entry, look in seen
        if entry.contender.group == OURS or entry.status == OK and look <= HOPELESS * best[entry.contender.group]
    }


def _look(work: Work, device: torch.device, pooled: bool) -> float:
    # The first calls record graphs.
    for _ in range(WARM_UP_CALLS if pooled else 0):
        work()
    return wall_ms(work, device, _calls(wall_ms(work, device, 1), LOOK_CALLS))


def _calls(estimate: float, most: int) -> int:
    return max(1, min(most, math.ceil(SAMPLE_MS / max(estimate, 1e-3))))


def _timer(work: Work, device: torch.device, calls: int) -> Timer:
    return Timer("wall", lambda: wall_ms(work, device, calls))


def wall_ms(work: Work, device: torch.device, calls: int) -> float:
    """The median over calls, each from a device at rest until it is again."""
    times = []
    for _ in range(calls):
        synchronize(device)
        start = time.perf_counter()
        result = work()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
        del result
    return statistics.median(times)


def _weigh(scene: Scene, entries: Sequence[Entry]) -> None:
    if scene.device.type != "cuda":
        return
    # What lives by now would be looked through for garbage again for every contender, a third of a second each time.
    gc.collect()
    gc.freeze()
    try:
        for entry in entries:
            if entry.work is not None:
                try:
                    entry.peak = _peak_bytes(scene, entry)
                except Exception as error:
                    entry.fail(error, scene.device)
    finally:
        gc.unfreeze()


def _peak_bytes(scene: Scene, entry: Entry) -> int | None:
    """Weights, the input, and beyond them what a call asks for; of a graph also its pool and what it holds."""
    bound, work = entry.bound, entry.work
    if bound is None or work is None or bound.pooled:
        return None
    tower = scene.session.tower
    for parameter in tower.parameters():
        parameter.grad = None
    work()
    gc.collect()
    for parameter in tower.parameters():
        parameter.grad = None
    synchronize(scene.device)
    before = torch.cuda.memory_allocated(scene.device)
    torch.cuda.reset_peak_memory_stats(scene.device)
    result = work()
    synchronize(scene.device)
    peak = torch.cuda.max_memory_allocated(scene.device) - before
    del result
    weights = sum(parameter.nbytes for parameter in tower.parameters())
    return weights + scene.pixels.nbytes + peak + _held_bytes(bound)


def _held_bytes(bound: Bound) -> int:
    held = sum(tensor.nbytes for tensor in bound.held)
    return held if bound.pool is None else held + pool_bytes(bound.pool)


def path_of(scene: Scene) -> str:
    """Of ours, in attention."""
    config, metadata = scene.session.tower.config, scene.metadata()
    heads = config.num_heads
    q, k, v = scene.pixels.new_empty((3, len(scene.pixels), heads, config.hidden_size // heads)).unbind()
    return str(torch_ops.explain(torch_ops.window_attn, q, k, v, metadata.cu_seqlens)["path"])
