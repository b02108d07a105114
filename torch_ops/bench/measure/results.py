"""Results of a run, as frozen dataclasses and as JSON.

A document is one `Report`: `{"schema": 2, "provenance": ..., "ceilings": ..., "records": [...], "profiles": [...],
"host": [...]}`, a record a line. Times are milliseconds, host times microseconds, memory and traffic bytes, rates GB/s
(1e9) and TFLOP/s. Medians, ratios and rates are computed here and never stored.
"""

import dataclasses
import errno
import json
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ops.bench.measure.documents import parse, read_as
from torch_ops.testing import Report as ToleranceReport

SCHEMA = 2

OK, WRONG, FAILED, UNAVAILABLE, REFERENCE_POINT = "ok", "wrong", "failed", "unavailable", "reference point"
STATUSES = OK, WRONG, FAILED, UNAVAILABLE, REFERENCE_POINT
# Groups of implementations; the encoder parts its baselines into those that a user can run and those built by hand.
OURS, BASELINE, UNCAPTURED, ASSEMBLED = "ours", "baseline", "uncaptured", "assembled"
# `close` holds a difference to ours against this, as reports on attention kernels do with rtol=0.
ATOL = 2e-2
# Names of ours; with the second, sums are added in any order. The third is what a user of `accelerate(model)` calls.
VK, VK_FREE, VK_DEFAULT = "vk", "vk_free", "vk_default"


@dataclass(frozen=True)
class Provenance:
    """Machine, versions and command of a run; `baselines` describes each by name. `driver` is None on the CPU."""

    date: str
    commit: str
    command: str
    device: str
    driver: str | None
    versions: dict[str, str]
    baselines: dict[str, str]


@dataclass(frozen=True)
class Ceilings:
    """Rates that this machine reached in the same run; a copy's bytes are read and written ones."""

    copy_gb_s: float
    matmul_tflops: float
    matmul_dtype: str

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic, not memory, sets the floor."""
        return self.matmul_tflops * 1e3 / self.copy_gb_s


@dataclass(frozen=True)
class FirstCalls:
    """Times of the first two calls of a size, and of eager calls beside them: of a new grid and of a known grid.

    The second call warms up and captures a CUDA graph.
    """

    eager_new_ms: float
    eager_ms: float
    first_ms: float
    second_ms: float


@dataclass(frozen=True)
class Record:
    """One implementation on one case in one direction ("forward", "backward", "training step").

    Attributes:
        path: the path that ours took.
        status: "ok"; "wrong" where the correctness check refused it (it is timed all the same); "failed" where it
            raised; "unavailable" where it cannot run the case here; "reference point" where it computes something else
            on purpose. `note` says why, or what.
        rounds_ms: one median for each interleaved round; the time of one iteration where `warm_up` is given.
        timer: "graph", "events" or "wall".
        peak_bytes: device memory that one call asks for, results included, beyond what was there before it; for an
            encoder also weights, input and the memory pool of a CUDA graph.
        cache: "warm", or "cold" where each call met inputs that the L2 cache no longer held.
        warm_up: untimed turns before rounds of one iteration each; None where rounds are medians.
        to_ours: largest difference to ours on the checked inputs; None where it was not taken or is not finite.
        ready: what of an encoder's grid is made before the call.
        first_calls: of an encoder that captures CUDA graphs by itself; None elsewhere.
        syncs: synchronisations of a warm call of the encoder; None where they cannot be counted.
        tokens: ids that a whole model generated.
        reports: measurements of the tolerance rule, tensor by tensor; of many tensors the worst.
    """

    op: str
    case: str
    shape: str
    direction: str
    dtype: str
    path: str
    name: str
    group: str
    status: str
    note: str = ""
    rounds_ms: tuple[float, ...] = ()
    timer: str = ""
    peak_bytes: int | None = None
    flops: int = 0
    bytes_moved: int = 0
    cache: str = "warm"
    warm_up: int | None = None
    to_ours: float | None = None
    ready: str = ""
    first_calls: FirstCalls | None = None
    syncs: int | None = None
    tokens: tuple[int, ...] = ()
    reports: tuple[ToleranceReport, ...] = ()

    @property
    def ms(self) -> float | None:
        return statistics.median(self.rounds_ms) if self.rounds_ms else None

    @property
    def mean_ms(self) -> float | None:
        return statistics.fmean(self.rounds_ms) if self.rounds_ms else None

    @property
    def halves_ms(self) -> tuple[float, ...]:
        """The medians of the first and of the second half of all rounds."""
        half = len(self.rounds_ms) // 2
        return tuple(statistics.median(part) for part in (self.rounds_ms[:half], self.rounds_ms[half:]) if part)

    @property
    def tflops(self) -> float | None:
        return self.flops / self.ms / 1e9 if self.ms else None

    @property
    def gb_s(self) -> float | None:
        return self.bytes_moved / self.ms / 1e6 if self.ms else None

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes_moved

    def floor_ms(self, ceilings: Ceilings) -> float:
        """The larger of the two times at the measured ceilings, below which no version runs."""
        moving = self.bytes_moved / ceilings.copy_gb_s / 1e6
        return max(moving, self.flops / ceilings.matmul_tflops / 1e9)


@dataclass(frozen=True)
class Group:
    """Records of one case, ours first."""

    records: tuple[Record, ...]

    @property
    def ours(self) -> Record:
        return self.records[0]

    @property
    def baselines(self) -> tuple[Record, ...]:
        return self.records[1:]

    def best(self, *groups: str) -> Record | None:
        """The fastest correct record of these groups, of all but ours unless groups are given."""
        right = [one for one in self.records if one.status == OK and one.rounds_ms]
        chosen = [one for one in right if (one.group in groups if groups else one.group != OURS)]
        return min(chosen, key=lambda one: one.ms or 0.0, default=None)

    @property
    def ratios(self) -> tuple[float, float, float] | None:
        """Time of the best correct baseline over ours, and the smallest and largest of a single round.

        None without a correct baseline or where ours is not correct.
        """
        best = self.best()
        if self.ours.status != OK or best is None or not best.ms or not self.ours.ms:
            return None
        rounds = [theirs / ours for theirs, ours in zip(best.rounds_ms, self.ours.rounds_ms, strict=True)]
        return best.ms / self.ours.ms, min(rounds), max(rounds)


def grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, Group]:
    """Groups by what `key` takes from a record, in order of appearance."""
    found: dict[Any, list[Record]] = {}
    for one in records:
        found.setdefault(key(one), []).append(one)
    return {value: Group(tuple(members)) for value, members in found.items()}


@dataclass(frozen=True)
class HostTime:
    """Host time of one kind of call, the least over all repetitions; None where it cannot be made.

    `raw` marks the launch that the others are compared with, `most_us` says what the call may take.
    """

    op: str
    name: str
    microseconds: float | None
    raw: bool = False
    most_us: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Everything of one run; a profile is a record of ours."""

    provenance: Provenance
    ceilings: Ceilings | None = None
    records: tuple[Record, ...] = ()
    profiles: tuple[Record, ...] = ()
    host: tuple[HostTime, ...] = ()

    def to_json(self) -> str:
        parts = [f'"schema": {SCHEMA}']
        for name, value in dataclasses.asdict(self).items():
            lines = [json.dumps(each, allow_nan=False) for each in value] if isinstance(value, tuple) else []
            text = "[\n" + ",\n".join(lines) + "\n]" if lines else json.dumps(value, allow_nan=False)
            parts.append(f'"{name}": {text}')
        return "{" + ",\n".join(parts) + "}\n"

    @staticmethod
    def from_json(text: str) -> "Report":
        """Reads what `to_json` wrote; ValueError says what is wrong with anything else."""
        document = parse(text)
        schema = document.pop("schema", None) if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"schema is {schema}, expected {SCHEMA}; give a file that --out wrote")
        report = read_as(Report, document, f"schema {SCHEMA}")
        for one in (*report.records, *report.profiles):
            if one.status not in STATUSES:
                raise ValueError(f"status of {one.name} is {one.status!r}, expected one of {', '.join(STATUSES)}")
        if report.ceilings is not None and min(report.ceilings.copy_gb_s, report.ceilings.matmul_tflops) <= 0:
            raise ValueError("ceilings are not above 0")
        return report

    def write(self, path: Path) -> None:
        replace_text(path, self.to_json())


def read_report(path: Path) -> Report:
    """Raises ValueError for a file that --out did not write."""
    try:
        return Report.from_json(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a JSON file that --out wrote: {error}") from error


def replace_text(path: Path, text: str) -> None:
    """Replaces the file at `path`, or the one that it links to, at once: whatever happens, a whole one lies there.

    Anything else, such as a device, is written to.
    """
    path, partial = path.resolve(), _partial(path)
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def check_replaceable(path: Path) -> None:
    """Raises the OSError that `replace_text` would."""
    if path.is_file() or not path.exists():
        _partial(path).touch(exist_ok=False)
        _partial(path).unlink()


def _partial(path: Path) -> Path:
    try:
        path = path.resolve()
    except RuntimeError as error:  # before Python 3.13, of links that lead to each other
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
    return path.with_name(f"{path.name}.{os.getpid()}.partial")
