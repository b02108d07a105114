"""What a run measured, as frozen dataclasses and as JSON.

A document is one `Report`: `{"schema": 1, "provenance": ..., "ceilings": ...,
"measurements": [...], "profiles": [...], "host": [...], "encoders": [...]}`. Times are milliseconds, host times
microseconds, memory and traffic bytes, rates GB/s (1e9) and TFLOP/s. What is derived from a figure
(medians, ratios, rates) is computed here and never stored.
"""

import dataclasses
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ops.testing import Report as GateReport

SCHEMA = 1

OK = "ok"
WRONG = "wrong"
FAILED = "failed"
UNAVAILABLE = "unavailable"
YARDSTICK = "yardstick"

# Contenders of these names are ours, and no peers to beat: the second, where the order of sums is free.
OURS, OURS_FREE = "vk", "vk_free"


@dataclass(frozen=True)
class Provenance:
    """What was measured on what; `peers` says what each of them is. `driver` is None on the CPU."""

    date: str
    commit: str
    command: str
    device: str
    driver: str | None
    versions: dict[str, str]
    peers: dict[str, str]


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached in the same run; a copy's bytes are those read and written."""

    copy_gb_s: float
    matmul_tflops: float
    matmul_dtype: str

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic, not memory, sets the floor."""
        return self.matmul_tflops * 1e3 / self.copy_gb_s


@dataclass(frozen=True)
class Difference:
    """All results or gradients of a contender against ours: the largest difference, None where one is not finite, and
    whether allclose(atol, rtol=0) holds."""

    max_abs: float | None
    close: bool
    atol: float


@dataclass(frozen=True)
class Timed:
    """One contender in one measurement.

    Attributes:
        status: "ok"; "wrong" where the gate refused it (it is timed all the same); "failed" where
            it raised; "unavailable" where it cannot run the case here; "yardstick" where it computes something else
            on purpose. `note` says why, or what.
        rounds_ms: one median for each interleaved round; one iteration's time where `Measurement.warm_up` is given.
        timer: "graph", "events" or "wall".
        peak_bytes: device memory that one call asks for, its results included, beyond what was there before it.
        gate: what the tolerance rule measured, tensor by tensor.
        to_ours: how far from ours it is, where that was asked for.
    """

    name: str
    status: str
    note: str = ""
    rounds_ms: tuple[float, ...] = ()
    timer: str = ""
    peak_bytes: int | None = None
    gate: tuple[GateReport, ...] = ()
    to_ours: Difference | None = None

    @property
    def ms(self) -> float | None:
        return statistics.median(self.rounds_ms) if self.rounds_ms else None

    @property
    def mean_ms(self) -> float | None:
        return statistics.fmean(self.rounds_ms) if self.rounds_ms else None


@dataclass(frozen=True)
class Measurement:
    """Ours and its peers on one case in one direction ("forward", "backward").

    `path` is the path that ours took; `cache` is "warm", or "cold" where each call met inputs that
    the L2 cache no longer held. `warm_up` is how many untimed turns came before rounds of one iteration each, None
    where rounds are medians.
    """

    op: str
    case: str
    shape: str
    direction: str
    dtype: str
    path: str
    cache: str
    flops: int
    bytes_moved: int
    ours: Timed
    peers: tuple[Timed, ...]
    warm_up: int | None = None

    @property
    def best_peer(self) -> Timed | None:
        """The fastest peer that is right."""
        right = [peer for peer in self.peers if peer.status == OK and peer.rounds_ms and peer.name != OURS_FREE]
        return min(right, key=lambda peer: statistics.median(peer.rounds_ms), default=None)

    @property
    def ratio(self) -> float | None:
        """Best correct peer's time over ours; None without such a peer or where ours is not right."""
        best = self.best_peer
        if self.ours.status != OK or best is None or not best.ms or not self.ours.ms:
            return None
        return best.ms / self.ours.ms

    @property
    def ratio_range(self) -> tuple[float, float] | None:
        """The smallest and largest ratio of a single round."""
        if self.ratio is None or self.best_peer is None:
            return None
        pairs = zip(self.best_peer.rounds_ms, self.ours.rounds_ms, strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        return min(ratios), max(ratios)

    @property
    def tflops(self) -> float | None:
        return self.flops / self.ours.ms / 1e9 if self.ours.ms else None


@dataclass(frozen=True)
class Profile:
    """One call of ours against the machine's ceilings.

    `bytes_moved` counts each input read once and each output written once; `rounds_ms` as in
    `Timed`.
    """

    op: str
    case: str
    shape: str
    direction: str
    dtype: str
    path: str
    timer: str
    flops: int
    bytes_moved: int
    rounds_ms: tuple[float, ...]

    @property
    def ms(self) -> float:
        return statistics.median(self.rounds_ms)

    @property
    def gb_s(self) -> float:
        return self.bytes_moved / self.ms / 1e6

    @property
    def tflops(self) -> float:
        return self.flops / self.ms / 1e9

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes_moved

    def bound(self, ceilings: Ceilings) -> str:
        """Which ceiling sets the floor: "memory" or "compute"."""
        return "memory" if self.intensity < ceilings.ridge else "compute"

    def floor_ms(self, ceilings: Ceilings) -> float:
        """No version runs much faster: the larger of the two times at the measured ceilings."""
        moving = self.bytes_moved / ceilings.copy_gb_s / 1e6
        return max(moving, self.flops / ceilings.matmul_tflops / 1e9)


@dataclass(frozen=True)
class HostTime:
    """Host time of one kind of call, the least over all repetitions; None where it cannot be made.

    `raw` marks the launch that the others are compared with, `target` is the most they may take of
    it.
    """

    op: str
    name: str
    microseconds: float | None
    raw: bool = False
    target: float | None = None
    note: str = ""


@dataclass(frozen=True)
class EncoderRow:
    """All contenders on one batch through a whole encoder, forward or a training step.

    Wall times of the user's call; of `rounds_ms` the second half is a second pass over everything. `uncaptured` are the
    peers that a user of the model can run, `assembled` those put together by hand under a CUDA graph. Their
    `peak_bytes` hold the weights and the input too, and of a CUDA graph its whole pool. `ready` says by name what of
    the batch's grid each has before the call.
    """

    row: str
    shape: str
    direction: str
    dtype: str
    path: str
    flops: int
    ours: tuple[Timed, ...]
    uncaptured: tuple[Timed, ...]
    assembled: tuple[Timed, ...]
    ready: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def everyone(self) -> tuple[Timed, ...]:
        return (*self.ours, *self.uncaptured, *self.assembled)


@dataclass(frozen=True)
class Report:
    """Everything of one run."""

    provenance: Provenance
    ceilings: Ceilings | None = None
    measurements: tuple[Measurement, ...] = ()
    profiles: tuple[Profile, ...] = ()
    host: tuple[HostTime, ...] = ()
    encoders: tuple[EncoderRow, ...] = ()

    def to_json(self) -> str:
        document = {"schema": SCHEMA, **dataclasses.asdict(self)}
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> "Report":
        """Reads what `to_json` wrote; ValueError says what is wrong with anything else."""
        document = json.loads(text)
        schema = document.pop("schema", None) if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"wanted a vk bench document of schema {SCHEMA}, got schema {schema}")
        try:
            return Report(
                provenance=Provenance(**document["provenance"]),
                ceilings=Ceilings(**document["ceilings"]) if document["ceilings"] else None,
                measurements=tuple(map(_measurement, document["measurements"])),
                profiles=tuple(_profile(entry) for entry in document["profiles"]),
                host=tuple(HostTime(**entry) for entry in document["host"]),
                encoders=tuple(map(_encoder_row, document.get("encoders", ()))),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a vk bench document of schema {SCHEMA}: {error}") from error

    def write(self, path: Path) -> None:
        replace_text(path, self.to_json())


def replace_text(path: Path, text: str) -> None:
    """Replaces the file at `path`, or the one that it links to, at once: whatever happens, a whole one lies there.

    What is no file, such as a device, is written to.
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
    path = path.resolve()
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def read_report(path: Path) -> Report:
    """Raises ValueError for a file that --out did not write."""
    try:
        return Report.from_json(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a JSON file that --out wrote: {error}") from error


def _timed(entry: dict[str, Any]) -> Timed:
    gate = tuple(GateReport(**report) for report in entry["gate"])
    far = entry.get("to_ours")
    to_ours = None if far is None else Difference(**far)
    return Timed(**{**entry, "rounds_ms": tuple(entry["rounds_ms"]), "gate": gate, "to_ours": to_ours})


def _measurement(entry: dict[str, Any]) -> Measurement:
    peers = tuple(map(_timed, entry["peers"]))
    return Measurement(**{**entry, "ours": _timed(entry["ours"]), "peers": peers})


def _profile(entry: dict[str, Any]) -> Profile:
    return Profile(**{**entry, "rounds_ms": tuple(entry["rounds_ms"])})


def _encoder_row(entry: dict[str, Any]) -> EncoderRow:
    groups = {name: tuple(map(_timed, entry[name])) for name in ("ours", "uncaptured", "assembled")}
    return EncoderRow(**{**entry, **groups})
