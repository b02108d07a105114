"""`vk bench tune`: the fastest launch of each kernel on this GPU, as rows that `configs.pick` reads.

A point is one kernel in one call. Its candidates are judged by the gate, timed once, and the best of them in rounds of
balanced order. What was measured is written after every point, and points that the file holds already are not
measured again: a run that was broken off goes on where it was.
"""

import contextlib
import dataclasses
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch_ops
from csrc_free_ops.candidates import CANDIDATES
from csrc_free_ops.configs import Launch, Row, as_document
from torch_ops.bench.contest import Terms, bound_work, input_sets
from torch_ops.bench.gate import judge
from torch_ops.bench.results import OK, Provenance
from torch_ops.bench.room import Room, Trial, TunedKernel, one_line
from torch_ops.bench.timing import Timer, interleave, make_timer

# Of the candidates those go to the final rounds that are within so much of the fastest, the fastest first.
CLOSE, FINALISTS = 1.15, 6
# Each by itself: what path "auto" takes is for the figures to decide.
TUNED_PATHS = ("hopper", "portable")


@dataclass(frozen=True)
class Point:
    """One kernel in one call, reached by one setting of the path."""

    path: str
    shape: str
    kernel: TunedKernel

    @property
    def key(self) -> str:
        return f"{self.kernel.name} {self.kernel.dtype} {self.shape}"


@dataclass(frozen=True)
class Tried:
    """A candidate: what it took in the final rounds, or in its single trial, or why it cannot be had."""

    launch: Launch
    ms: tuple[float, ...] = ()
    note: str = ""

    @property
    def best_ms(self) -> float:
        return statistics.median(self.ms) if self.ms else math.inf


@dataclass
class Journal:
    """What was measured so far, by the key of its point; `write` makes rows of it."""

    provenance: dict[str, str]
    points: dict[str, tuple[TunedKernel, list[Tried]]]

    @staticmethod
    def open(path: Path, provenance: dict[str, str]) -> "Journal":
        """The journal that lies there, or an empty one. ValueError where another GPU or Triton made it."""
        if not path.exists():
            return Journal(provenance, {})
        document = json.loads(path.read_text())
        made_by = document.get("provenance", {})
        for name in ("gpu", "triton", "torch"):
            if made_by.get(name) != provenance[name]:
                there = f"{name} {made_by.get(name)}, and this is {provenance[name]}"
                raise ValueError(f"{path} was measured with {there}; give another file")
        points = {}
        for key, entry in document.get("points", {}).items():
            tried = [
                Tried(Launch(**one["launch"]), tuple(one.get("ms", ())), one.get("note", "")) for one in entry["tried"]
            ]
            points[key] = TunedKernel(**entry["kernel"]), tried
        return Journal(provenance, points)

    def write(self, path: Path) -> None:
        """All of it or nothing: a run may be stopped at any time."""
        document = as_document(rows_of(self.points.values()), self.provenance)
        document["points"] = {
            key: {"kernel": dataclasses.asdict(kernel), "tried": [_entry(one) for one in tried]}
            for key, (kernel, tried) in self.points.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(beside, path)


def _entry(tried: Tried) -> dict[str, Any]:
    entry = dataclasses.asdict(tried)
    return {key: value for key, value in entry.items() if value}


def rows_of(points: Iterable[tuple[TunedKernel, list[Tried]]]) -> list[Row]:
    """A row for each range of lengths with a launch of its own; between two measured lengths their geometric mean."""
    won = [(kernel, min(tried, key=lambda one: one.best_ms)) for kernel, tried in points if _any_timed(tried)]

    def family(item: tuple[TunedKernel, Tried]) -> tuple[Any, ...]:
        return item[0].name, item[0].dtype, item[0].head_dim, item[0].masked

    rows: list[Row] = []
    for (name, dtype, head_dim, masked), members in groupby(sorted(won, key=family), family):
        by_length: dict[int, Tried] = {}
        # Of one length in several calls, the call that takes longest speaks.
        for kernel, best in sorted(members, key=lambda item: item[1].best_ms):
            by_length[kernel.length] = best
        lengths = sorted(by_length)
        begins = [0, *(math.isqrt(a * b) for a, b in zip(lengths, lengths[1:], strict=False))]
        for begin, length in zip(begins, lengths, strict=True):
            launch = by_length[length].launch
            if rows and begin and rows[-1].launch == launch:
                continue
            if begin:
                rows[-1] = dataclasses.replace(rows[-1], max_length=begin)
            rows.append(Row(name, dtype, head_dim, launch, masked=masked, min_length=begin))
    return rows


def _any_timed(tried: Sequence[Tried]) -> bool:
    return any(one.ms for one in tried)


def find_points(
    room: Room, cases: Sequence[Any], paths: Sequence[str], kernels: Sequence[str], terms: Terms
) -> list[tuple[Point, Any]]:
    """Every kernel that these calls take on these paths, once; `kernels` are the wanted ones, all where it is empty."""
    unknown = [name for name in kernels if name not in CANDIDATES]
    if unknown:
        raise ValueError(f"no kernel {unknown[0]!r} has candidates; give some of {', '.join(CANDIDATES)}")
    found: dict[str, tuple[Point, Any]] = {}
    for path in paths:
        with torch_ops.settings(path=path):
            for case in cases:
                for kernel in room.kernels(case, room.inputs(case, terms.dtype, terms.device, 0)):
                    wanted = not kernels or kernel.name in kernels
                    if wanted and kernel.name in CANDIDATES and (terms.backward or not kernel.backward):
                        point = Point(path, room.shape(case), kernel)
                        found.setdefault(point.key, (point, case))
    return list(found.values())


def search(room: Room, point: Point, case: Any, terms: Terms, on_step: Callable[[str], None]) -> list[Tried]:
    """Every candidate of the point's kernel, the fastest first."""
    backward = point.kernel.backward
    trials = room.trials(case, terms.dtype, terms.device, backward)
    inputs = input_sets(room, case, terms, trials)
    timers: dict[Launch, Timer] = {}
    tried: dict[Launch, Tried] = {}
    for launch in CANDIDATES[point.kernel.name]:
        on_step(f"{point.key}: {_words(launch)}")
        with _forced(point, launch), _fresh_builds(room.jits) as builds:
            timer = _make(room, point, case, inputs, trials, terms)
            if isinstance(timer, Timer) and any(getattr(build, "n_spills", 0) for build in builds()):
                timer = "spills registers"
        if isinstance(timer, str):
            tried[launch] = Tried(launch, note=timer)
        else:
            timers[launch] = timer
            tried[launch] = Tried(launch, (timer.sample(),))
    in_order = sorted(timers, key=lambda launch: tried[launch].best_ms)
    close = [one for one in in_order if tried[one].best_ms <= CLOSE * tried[in_order[0]].best_ms][:FINALISTS]
    finals = interleave({str(index): timers[launch] for index, launch in enumerate(close)}, terms.rounds)
    for index, launch in enumerate(close):
        tried[launch] = Tried(launch, finals[str(index)])
    # Single trials stand behind the finals, whatever luck they had.
    return [tried[one] for one in sorted(close, key=lambda one: tried[one].best_ms)] + [
        dataclasses.replace(one, ms=(), note=one.note or f"{one.best_ms:.4f} ms in its trial")
        for launch, one in tried.items()
        if launch not in close
    ]


def in_words(tried: Sequence[Tried]) -> str:
    """The fastest candidate, and how many were as they should be."""
    timed = [one for one in tried if one.ms]
    if not timed:
        return f"none of {len(tried)} candidates can be had; {tried[0].note}"
    return f"{_words(timed[0].launch)}, {timed[0].best_ms:.4f} ms, of {len(tried)} candidates"


def _words(launch: Launch) -> str:
    return f"{launch.block_m} x {launch.block_n}, {launch.num_warps} warps, {launch.num_stages} stages"


@contextlib.contextmanager
def _forced(point: Point, launch: Launch) -> Iterator[None]:
    """Within, the point's kernel takes this launch, by the same rows that a user would give."""
    kernel = point.kernel
    rows = [Row(kernel.name, kernel.dtype, kernel.head_dim, launch)]
    document = as_document(rows, {"gpu": "any", "triton": "any", "date": "now"})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        file.write_text(json.dumps(document))
        with torch_ops.settings(path=point.path, rows=str(file)):
            yield


@contextlib.contextmanager
def _fresh_builds(jits: Sequence[Any]) -> Iterator[Callable[[], list[Any]]]:
    """Within, the kernels begin without builds in memory; yields what lists those made since."""
    kept = [(jit, dict(jit.device_caches)) for jit in jits if hasattr(jit, "device_caches")]
    for jit, _ in kept:
        jit.device_caches.clear()
    yield lambda: [build for jit, _ in kept for caches in jit.device_caches.values() for build in caches[0].values()]
    # Captured graphs hold builds of either kind.
    for jit, before in kept:
        before |= jit.device_caches
        jit.device_caches.update(before)


def _make(
    room: Room, point: Point, case: Any, inputs: Sequence[Any], trials: Sequence[Trial], terms: Terms
) -> Timer | str:
    """A timer of ours as it is now, or why there is none."""
    backward = point.kernel.backward
    direction = "backward" if backward else "forward"
    try:
        if point.kernel.name not in {kernel.name for kernel in room.kernels(case, inputs[0])}:
            return "calls of this length do not take it then"
        verdict = judge(room.ours, case, trials, terms.dtype, terms.device, backward).of(direction)
        if verdict.status != OK:
            return verdict.note or verdict.status
        work = [bound_work(room.ours.bind(case, each), direction, terms.device) for each in inputs]
        return make_timer(work, terms.device)
    except Exception as error:
        return one_line(error)


def provenance_of(origin: Provenance) -> dict[str, str]:
    """What rows carry of it."""
    return {
        "gpu": origin.device, "torch": origin.versions["torch"], "triton": origin.versions["triton"],
        "date": origin.date, "command": origin.command, "commit": origin.commit,
    }  # fmt: skip
