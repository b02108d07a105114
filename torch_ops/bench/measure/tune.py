"""`vk bench tune`: the fastest launch of each kernel on this GPU, as rows that `configs.pick` reads.

A point is one kernel in one call. Its candidates pass the correctness check, are timed once, and the best of them in
rounds of balanced order. Results are written after every point. Points that the file holds are not measured again, so
that a broken-off run goes on.
"""

import contextlib
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import torch_ops
from csrc_free_ops.configs.candidates import CANDIDATES
from csrc_free_ops.configs.rows import ATEN, Config, TunedConfig, as_document, read_rows
from torch_ops._core.registry import INTERPRET
from torch_ops.bench.measure.check import check_impl
from torch_ops.bench.measure.documents import read_as
from torch_ops.bench.measure.opbench import Check, OpBench, TunedKernel, one_line
from torch_ops.bench.measure.results import OK, Provenance, replace_text
from torch_ops.bench.measure.run import Setup, input_sets
from torch_ops.bench.measure.timing import Timer, interleave, make_timer

# Candidates within CLOSE times the fastest go to the final rounds, at most FINALISTS, the fastest first.
CLOSE, FINALISTS = 1.15, 6
# Each by itself: what path "auto" takes is for the figures to decide.
TUNED_PATHS = ("hopper", "portable")


@dataclass(frozen=True)
class Point:
    """One kernel in one call, reached by one setting of the path."""

    path: str
    case: str
    kernel: TunedKernel
    cold: bool = False

    @property
    def key(self) -> str:
        weight = f" {self.kernel.n}x{self.kernel.k}" if self.kernel.n else ""
        return f"{self.kernel.name} {self.kernel.dtype} {self.case}{weight}" + " cold" * self.cold


@dataclass(frozen=True)
class Tried:
    """A candidate: what it took in the final rounds, or in its first measurement, or why it cannot be had."""

    launch: Config
    ms: tuple[float, ...] = ()
    note: str = ""

    @property
    def best_ms(self) -> float:
        return statistics.median(self.ms) if self.ms else math.inf


@dataclass(frozen=True)
class Measured:
    """A point as the file holds it: its candidates, and when and at which commit they were measured."""

    kernel: TunedKernel
    tried: tuple[Tried, ...]
    date: str = ""
    commit: str = ""

    @staticmethod
    def of(entry: dict[str, Any]) -> "Measured":
        tried = tuple(
            Tried(
                Config.of(one["launch"]) if "path" in one["launch"] else read_as(Config, one["launch"], "launch"),
                read_as(tuple[float, ...], one.get("ms", []), "ms"),
                read_as(str, one.get("note", ""), "note"),
            )
            for one in entry["tried"]
        )
        date, commit = (read_as(str, entry.get(name, ""), name) for name in ("date", "commit"))
        return Measured(read_as(TunedKernel, entry["kernel"], "kernel"), tried, date, commit)

    def entry(self) -> dict[str, Any]:
        tried = [
            {"launch": one.launch.entry()} | {key: value for key in ("ms", "note") if (value := getattr(one, key))}
            for one in self.tried
        ]
        return {**dataclasses.asdict(self), "tried": tried}


@dataclass
class Journal:
    """Measurements so far, by the key of their point; `write` makes rows of them, before `others` that were there."""

    provenance: dict[str, str]
    points: dict[str, Measured]
    others: tuple[TunedConfig, ...] = ()

    @staticmethod
    def open(path: Path, provenance: dict[str, str]) -> "Journal":
        """The journal that lies there, or an empty one. ValueError where another GPU or Triton made it."""
        if not path.exists():
            return Journal(provenance, {})
        rows = read_rows(path)
        document = json.loads(path.read_text())
        made_by = document["provenance"]
        for name in ("gpu", "triton", "torch"):
            if made_by.get(name) != provenance[name]:
                there = f"{name} {made_by.get(name)}, and this is {provenance[name]}"
                raise ValueError(f"{path} was measured with {there}; give another file")
        try:
            points = {key: Measured.of(entry) for key, entry in document.get("points", {}).items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            message = f"{path} holds no measured points: {type(error).__name__}: {error}; give another file"
            raise ValueError(message) from error
        plain = [dataclasses.replace(row, source="", gpu="") for row in rows]
        own = rows_of(points.values())
        return Journal(provenance, points, tuple(row for row in plain if row not in own))

    def write(self, path: Path) -> None:
        """All of it or nothing: a run may be stopped at any time. Points that another run has written there since
        stay."""
        if path.exists():
            self.points = {**Journal.open(path, self.provenance).points, **self.points}
        document = as_document([*rows_of(self.points.values()), *self.others], self.provenance)
        document["points"] = {key: measured.entry() for key, measured in self.points.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(document, indent=1) + "\n")


def rows_of(points: Iterable[Measured]) -> list[TunedConfig]:
    """A row for each range of lengths with a launch of its own; between two measured lengths their geometric mean.

    Kernels of small segments have none beyond their block: longer segments would take other kernels.
    """
    won = [(each.kernel, min(each.tried, key=lambda one: one.best_ms)) for each in points if any_timed(each.tried)]

    def family(item: tuple[TunedKernel, Tried]) -> tuple[Any, ...]:
        kernel = item[0]
        return kernel.name, kernel.dtype, kernel.head_dim, kernel.masked, kernel.n or 0, kernel.k or 0

    rows: list[TunedConfig] = []
    for (name, dtype, head_dim, masked, n, k), members in groupby(sorted(won, key=family), family):
        bound: dict[str, Any] = {"n": n, "k": k} if n else {"masked": masked}
        by_length: dict[int, Tried] = {}
        # If several calls have one length, the longest call decides.
        for kernel, best in sorted(members, key=lambda item: item[1].best_ms):
            by_length[kernel.length] = best
        lengths = sorted(by_length)
        # A row reaches up to the next, and at least to its own length.
        ends = [max(a + 1, math.isqrt(a * b)) for a, b in zip(lengths, lengths[1:], strict=False)]
        begin = 0
        for length, end in zip(lengths, [*ends, None], strict=True):
            launch = by_length[length].launch
            following = launch == (by_length[lengths[lengths.index(length) + 1]].launch if end else None)
            if following:
                continue
            reach = end
            if name.endswith("_small_segments"):
                reach = min(end or launch.block_m + 1, launch.block_m + 1)
            rows.append(TunedConfig(name, dtype, head_dim, launch, min_length=begin, max_length=reach, **bound))
            begin = end or 0
    return rows


def any_timed(tried: Sequence[Tried]) -> bool:
    return any(one.ms for one in tried)


def find_points(
    bench: OpBench, cases: Sequence[Any], paths: Sequence[str], kernels: Sequence[str], setup: Setup
) -> list[tuple[Point, Any]]:
    """Every kernel that these calls take on these paths, once; `kernels` are the wanted ones, all where it is empty.

    Rows of the user's do not count. ValueError where none is left, which says what there is.
    """
    unknown = [name for name in kernels if name not in CANDIDATES]
    if unknown:
        raise ValueError(f"no kernel {unknown[0]!r} has candidates; give some of {', '.join(CANDIDATES)}")
    found: dict[str, tuple[Point, Any]] = {}
    launched: dict[str, None] = {}
    for path in paths:
        with torch_ops.settings(path=path, rows=""):
            for case in cases:
                for kernel in bench.kernels(case, bench.inputs(case, setup.dtype, setup.device, 0)):
                    launched[kernel.name] = None
                    wanted = not kernels or kernel.name in kernels
                    if wanted and kernel.name in CANDIDATES and (setup.backward or not kernel.backward):
                        point = Point(path, case.name, kernel, setup.cold)
                        found.setdefault(point.key, (point, case))
    if not found:
        all_of_them = ", ".join(launched) or "no kernel that has candidates"
        raise ValueError(f"nothing is left to tune: on {setup.device} these calls launch {all_of_them}")
    return list(found.values())


def search(bench: OpBench, point: Point, case: Any, setup: Setup, on_step: Callable[[str], None]) -> list[Tried]:
    """Every candidate of the point's kernel, the fastest first."""
    backward = point.kernel.backward
    checks = bench.checks(case, setup.dtype, setup.device, backward)
    inputs = input_sets(bench, case, setup, checks)
    timers: dict[Config, Timer] = {}
    tried: dict[Config, Tried] = {}
    for launch in CANDIDATES[point.kernel.name]:
        on_step(f"{point.key}: {_words(launch)}")
        with _forced(point, launch), _fresh_builds(point.kernel.name) as builds:
            timer = _make(bench, point, launch, case, inputs, checks, setup)
            if isinstance(timer, Timer) and any(getattr(build, "n_spills", 0) for build in builds()):
                timer = "spills registers"
            if isinstance(timer, Timer) and timer.kind != "graph":
                timer = _forcing(timer, point, launch)
        if isinstance(timer, str):
            tried[launch] = Tried(launch, note=timer)
        else:
            timers[launch] = timer
            tried[launch] = Tried(launch, (timer.sample(),))
    in_order = sorted(timers, key=lambda launch: tried[launch].best_ms)
    close = [one for one in in_order if tried[one].best_ms <= CLOSE * tried[in_order[0]].best_ms][:FINALISTS]
    finals = interleave({str(index): timers[launch] for index, launch in enumerate(close)}, setup.rounds)
    for index, launch in enumerate(close):
        tried[launch] = Tried(launch, finals[str(index)])
    # First measurements stand behind the finals, whatever luck they had.
    return [tried[one] for one in sorted(close, key=lambda one: tried[one].best_ms)] + [
        dataclasses.replace(one, ms=(), note=one.note or f"{one.best_ms:.4f} ms at first")
        for launch, one in tried.items()
        if launch not in close
    ]


def in_words(tried: Sequence[Tried]) -> str:
    """The fastest candidate, and how many were as they should be."""
    timed = [one for one in tried if one.ms]
    if not timed:
        return f"none of {len(tried)} candidates can be had; {tried[0].note}"
    return f"{_words(timed[0].launch)}, {timed[0].best_ms:.4f} ms, of {len(tried)} candidates"


def _words(launch: Config) -> str:
    if launch == ATEN:
        return "PyTorch's own product"
    tile = " x ".join(map(str, (*launch.tile, *([launch.block_k] if launch.block_k else []))))
    return f"{tile}, {launch.num_warps} warps, {launch.num_stages} stages"


@contextlib.contextmanager
def _forced(point: Point, launch: Config) -> Iterator[None]:
    """Within, the point's kernel takes this launch, by the same rows that a user would give."""
    kernel = point.kernel
    rows = [TunedConfig(kernel.name, kernel.dtype, kernel.head_dim, launch, n=kernel.n, k=kernel.k)]
    document = as_document(rows, {"gpu": "any", "triton": "any", "date": "now"})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        file.write_text(json.dumps(document))
        with torch_ops.settings(path=point.path, rows=str(file)):
            yield


def _forcing(timer: Timer, point: Point, launch: Config) -> Timer:
    """A timer that calls the op anew each time, where a captured graph would hold its launch."""

    def sample() -> float:
        with _forced(point, launch):
            return timer.sample()

    return dataclasses.replace(timer, sample=sample)


# Captured graphs run builds that nothing else may hold any more.
_builds_in_graphs: list[Any] = []


@contextlib.contextmanager
def _fresh_builds(kernel: str) -> Iterator[Callable[[], list[Any]]]:
    """Start this kernel without builds in memory; yield a function that lists the builds made since."""
    modules = (module for name, module in sys.modules.items() if name.startswith("csrc_free_ops"))
    jits = (jit for module in modules if (jit := vars(module).get(f"_{kernel}_kernel")) is not None)
    # A kernel stands in several modules where one imports it; the interpreter's have no builds.
    named = list({id(jit): jit for jit in jits if hasattr(jit, "device_caches")}.values())
    kept = [dict(jit.device_caches) for jit in named]
    for jit in named:
        jit.device_caches.clear()
    try:
        yield lambda: [build for jit in named for caches in jit.device_caches.values() for build in caches[0].values()]
    finally:
        for jit, before in zip(named, kept, strict=True):
            _builds_in_graphs.append(dict(jit.device_caches))
            jit.device_caches.clear()
            jit.device_caches.update(before)


def _make(
    bench: OpBench, point: Point, launch: Config, case: Any, inputs: Sequence[Any], checks: Sequence[Check],
    setup: Setup,
) -> Timer | str:  # fmt: skip
    """A timer of ours as it is now, or why there is none."""
    backward = point.kernel.backward
    direction = "backward" if backward else "forward"
    try:
        if launch == ATEN and point.path == "portable":
            return "is not on the portable path"
        if point.kernel.name not in {kernel.name for kernel in bench.kernels(case, inputs[0])}:
            return "calls of this length do not take it then"
        checked = check_impl(bench.ours, case, checks, setup.dtype, setup.device, backward).of(direction)
        if checked.status != OK:
            return checked.note or checked.status
        work = [bench.ours.bind(case, each).work(direction, setup.device) for each in inputs]
        return make_timer(work, setup.device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # No fault of the candidate's, or one that spoils whatever comes after it.
        raise
    except Exception as error:
        # Compilers raise exceptions of many types at a launch that cannot be built.
        return one_line(error)


def provenance_of(origin: Provenance) -> dict[str, str]:
    """The part of the origin that rows carry; under the interpreter, the GPU is "interpreter"."""
    versions = {name: origin.versions[name] for name in ("torch", "triton")}
    made = {name: getattr(origin, name) for name in ("date", "command", "commit")}
    return {"gpu": "interpreter" if INTERPRET else origin.device, **versions, **made}
