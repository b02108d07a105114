"""Where a call of an encoder spends its time on the device: its kernels on one time axis, as data and as a picture.

`record` takes them from the profiler, which slows the host's launches a little: gaps of what waits for the host are
somewhat shorter without it.
"""

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from torch_ops.bench.measure.documents import parse, read_as
from torch_ops.bench.measure.results import Provenance, replace_text

SCHEMA = "vk timeline 1"
KINDS = ("attention", "matmul", "norm", "elementwise", "copy")
_PATTERNS = (
    ("copy", r"memcpy|memset"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("norm", r"norm"),
    # Inductor's fused kernels bear the names of the products around them; its templates are products.
    ("matmul", r"^triton_tem"),
    ("elementwise", r"^triton_"),
    ("matmul", r"gemm|cutlass|nvjet|xmma|cublas|splitk|conv"),
)
MOST_LETTERS = 80
# Categories of a trace that ran on the device.
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# The picture's lower half shows so many layers.
ZOOMED_LAYERS = 2
# Neighbours of one kind this near to each other, in shares of the axis, are one bar.
NEAR = 1 / 4000


@dataclass(frozen=True)
class Kernel:
    """Microseconds, from the first of the call."""

    name: str
    start: float
    duration: float
    kind: str

    @property
    def end(self) -> float:
        return self.start + self.duration

    def cut(self, end: float) -> "Kernel":
        """The part before `end`."""
        return replace(self, duration=min(self.duration, end - self.start))


@dataclass(frozen=True)
class Lane:
    """One call of one implementation."""

    name: str
    about: str
    kernels: tuple[Kernel, ...]

    @property
    def end(self) -> float:
        return max((kernel.end for kernel in self.kernels), default=0.0)

    @property
    def busy(self) -> float:
        """Microseconds in which any kernel runs."""
        total = reached = 0.0
        for kernel in self.kernels:
            total += max(0.0, kernel.end - max(kernel.start, reached))
            reached = max(reached, kernel.end)
        return total

    def end_of_layers(self, count: int) -> float:
        """When the attention of the layer after so many begins, of a call with one attention kernel to a layer."""
        starts = [kernel.start for kernel in self.kernels if kernel.kind == "attention"]
        return starts[count] if len(starts) > count else self.end

    def words(self, milliseconds: str) -> str:
        share = f"\n{milliseconds} ms, {len(self.kernels)} kernels\nbusy {self.busy / self.end:.0%}"
        return self.name + (share if self.kernels else "")


@dataclass(frozen=True)
class Timeline:
    provenance: Provenance
    row: str
    lanes: tuple[Lane, ...]

    def to_json(self) -> str:
        """A kernel to a line: the place of its name among all names, start, duration, kind."""
        names = sorted({kernel.name for lane in self.lanes for kernel in lane.kernels})
        places = {name: place for place, name in enumerate(names)}
        lanes = [
            {
                "name": lane.name,
                "about": lane.about,
                "kernels": [[places[each.name], each.start, each.duration, each.kind] for each in lane.kernels],
            }
            for lane in self.lanes
        ]
        document = {"schema": SCHEMA, "provenance": dataclasses.asdict(self.provenance), "row": self.row}
        text = json.dumps({**document, "names": names, "lanes": lanes}, allow_nan=False)
        return text.replace("], [", "],\n[").replace('"kernels": ', '\n"kernels": ') + "\n"

    def write(self, path: Path) -> None:
        replace_text(path, self.to_json())


def read_timeline(text: str) -> Timeline | None:
    """Read what `to_json` wrote; None for other JSON, ValueError where it is no JSON."""
    document = parse(text)
    if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
        return None
    stored = read_as(_Stored, document, SCHEMA)
    lanes = tuple(
        Lane(lane.name, lane.about, tuple(_kernel(row, stored.names) for row in lane.kernels)) for lane in stored.lanes
    )
    return Timeline(stored.provenance, stored.row, lanes)


@dataclass(frozen=True)
class _StoredLane:
    name: str
    about: str
    kernels: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class _Stored:
    """A document of `to_json`."""

    provenance: Provenance
    row: str
    names: tuple[str, ...]
    lanes: tuple[_StoredLane, ...]


def _kernel(row: tuple[Any, ...], names: tuple[str, ...]) -> Kernel:
    if len(row) != 4 or type(row[0]) is not int or not 0 <= row[0] < len(names) or row[3] not in KINDS:
        raise ValueError(f"a row of kernels is {str(row)[:60]}, expected the place of a name, start, duration and kind")
    start, duration = (read_as(float, each, "a kernel's time") for each in row[1:3])
    return Kernel(names[row[0]], start, duration, row[3])


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, lowered)), "elementwise")


def kernels_of(trace: dict[str, Any]) -> tuple[Kernel, ...]:
    """The kernels of a Chrome trace of the profiler, in the order of their starts."""
    events = [event for event in trace["traceEvents"] if event.get("cat") in DEVICE and "dur" in event]
    events.sort(key=lambda event: event["ts"])
    origin = events[0]["ts"] if events else 0.0
    return tuple(
        Kernel(_short(event["name"]), round(event["ts"] - origin, 3), round(event["dur"], 3), kind_of(event["name"]))
        for event in events
    )


def _short(name: str) -> str:
    return name.removeprefix("void ")[:MOST_LETTERS]


def record(call: Callable[[], object], calls_before: int = 3) -> tuple[Kernel, ...]:
    """The kernels of one warm call; the first of two profiles pays for setting the profiler up."""
    for _ in range(calls_before):
        call()
    for _ in range(2):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text()))


def bars(kernels: Sequence[Kernel], near: float) -> dict[str, list[tuple[float, float]]]:
    """(start, duration) of each kind's runs of kernels that follow each other without a visible gap."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    last = ""
    for kernel in kernels:
        runs = found[kernel.kind]
        if kernel.kind == last and kernel.start - sum(runs[-1]) <= near:
            runs[-1] = (runs[-1][0], max(kernel.end, sum(runs[-1])) - runs[-1][0])
        else:
            runs.append((kernel.start, kernel.duration))
        last = kernel.kind
    return found


__all__ = ["KINDS", "Kernel", "Lane", "Timeline", "bars", "kernels_of", "kind_of", "read_timeline", "record"]
