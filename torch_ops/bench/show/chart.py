"""Charts of records: speeds case by case, speeds by length under the machine's roof, and kernels on a time axis.

The same results give the same SVG. A path with an ending that Matplotlib does not know is a ValueError, and so are
results without anything to draw.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from torch_ops.bench.encoder.timeline import KINDS, NEAR, ZOOMED_LAYERS, Timeline, bars
from torch_ops.bench.measure.results import OK, REFERENCE_POINT, Record, Report, grouped
from torch_ops.bench.show.pivot import digits

# Okabe and Ito's palette, which colour-blind readers can tell apart too.
COLOURS = ("#0072b2", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00")
GAP = "#e4e4e4"
BAR_INCHES, LANE = 0.16, 0.7
HATCHES = {OK: None, REFERENCE_POINT: "...."}
WRONG_HATCH = "////"
MARKERS = {"forward": "o", "backward": "^"}


@contextlib.contextmanager
def _figure(path: Path, size: tuple[float, float], shape: tuple[int, int], **shared: Any) -> Iterator[tuple[Any, Any]]:
    with matplotlib.rc_context({"svg.hashsalt": "vk", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(*shape, squeeze=False, **shared).flatten()
        for axis in figure.axes:
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def draw(report: Report, path: Path) -> None:
    """Bars: TFLOP/s of every implementation, case by case."""
    panels = grouped(report.records, attrgetter("direction"))
    if not panels:
        raise ValueError("there are no measurements to draw in it")
    names = list(dict.fromkeys(one.name for one in report.records))
    cases = [list(grouped(panel.records, attrgetter("case")).values()) for panel in panels.values()]
    size = 5.0 * len(panels), 1.0 + BAR_INCHES * max(map(len, cases)) * (len(names) + 1)
    with _figure(path, size, (1, len(panels)), sharey=True) as (figure, axes):
        for axis, groups in zip(axes, cases, strict=True):
            first = groups[0].ours
            for index, group in enumerate(groups):
                _bars(axis, group.records, index * (len(names) + 1), names)
            middles = [index * (len(names) + 1) + (len(names) - 1) / 2 for index in range(len(groups))]
            axis.set_yticks(middles, [group.ours.case for group in groups])
            axis.margins(y=0.01)
            axis.set_xlabel("TFLOP/s")
            axis.set_title(f"{first.op}, {first.direction}, {first.dtype}, {report.provenance.device}")
        axes[0].invert_yaxis()  # shared by all
        handles = [Patch(color=colour, label=name) for name, colour in zip(names, COLOURS, strict=False)]
        handles.append(Patch(fill=False, hatch=WRONG_HATCH, label="result is wrong"))
        if any(one.status == REFERENCE_POINT for one in report.records):
            handles.append(Patch(fill=False, hatch=HATCHES[REFERENCE_POINT], label="computes something else"))
        _legend(figure, handles)


def _bars(axis: Axes, records: Sequence[Record], start: int, names: Sequence[str]) -> None:
    for one in (one for one in records if one.tflops is not None):
        place, speed, hatch = names.index(one.name), one.tflops or 0.0, HATCHES.get(one.status, WRONG_HATCH)
        colour = COLOURS[place % len(COLOURS)]
        axis.barh(start + place, speed, color=colour if hatch is None else "none", edgecolor=colour, hatch=hatch)
        axis.text(speed, start + place, f" {speed:.0f}", va="center", fontsize=6)


def draw_sweep(report: Report, lengths: Mapping[str, int], path: Path) -> None:
    """Lines: speed by length, by case, and against arithmetic intensity under the machine's roof.

    Hollow marks are results that are wrong, or of another type.
    """
    timed = [one for one in report.records if one.ms]
    panels, names = grouped(timed, attrgetter("direction")), list(dict.fromkeys(one.name for one in timed))
    styles: dict[str, dict[str, Any]] = {
        name: {"color": COLOURS[place % len(COLOURS)], "linestyle": "-" if place < len(COLOURS) else "--"}
        for place, name in enumerate(names)
    }
    with _figure(path, (4.5 * (len(panels) + 1), 4.0), (1, len(panels) + 1)) as (figure, axes):
        *speeds, roof = axes
        for axis, panel in zip(speeds, panels.values(), strict=True):
            first, decoding = panel.ours, panel.ours.op == "attention_decode"
            for name, line in grouped(panel.records, attrgetter("name")).items():
                figures = [(one.gb_s or 0.0) / 1e3 if decoding else one.tflops for one in line.records]
                marks = _marks(first.direction, all(one.status == OK for one in line.records))
                axis.plot([lengths[one.case] for one in line.records], figures, **marks, **styles[name])
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_xlabel("keys" if decoding else "length")
            axis.set_ylabel("TB/s" if decoding else "TFLOP/s")
            axis.set_title(f"{first.op}, {first.direction}, {first.dtype}")
        if (ceilings := report.ceilings) is not None:
            around = [ceilings.ridge, *(one.intensity for one in timed)]
            ends = [min(around) / 2, ceilings.ridge, max(around) * 2]
            heights = [min(ceilings.matmul_tflops, each * ceilings.copy_gb_s / 1e3) for each in ends]
            roof.plot(ends, heights, color="black", linewidth=1)
            rates = f"matmul {ceilings.matmul_tflops:.3g} TFLOP/s, copy {ceilings.copy_gb_s:.4g} GB/s"
            roof.set_title(f"{report.provenance.device}: {ceilings.matmul_dtype} {rates}", fontsize=7)
        for one in timed:
            style = {**styles[one.name], "linestyle": ""}
            roof.plot([one.intensity], [one.tflops], **_marks(one.direction, one.status == OK), **style)
        roof.set(xscale="log", yscale="log", xlabel="FLOP per byte moved", ylabel="TFLOP/s")
        _legend(figure, [Line2D([], [], label=name, **styles[name]) for name in names])


def _marks(direction: str, right: bool) -> dict[str, Any]:
    return {"marker": MARKERS[direction], "markersize": 4, "fillstyle": "full" if right else "none"}


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Lanes: the kernels of one call of each implementation, the whole call above, its first layers below."""
    lanes = timeline.lanes
    if not any(lane.kernels for lane in lanes):
        raise ValueError("there are no kernels to draw in it")
    ends = max(lane.end for lane in lanes), max(lane.end_of_layers(ZOOMED_LAYERS) for lane in lanes)
    with _figure(path, (9.0, 1.4 + 0.9 * len(lanes)), (2, 1)) as (figure, axes):
        for axis, end in zip(axes, ends, strict=True):
            for place, lane in enumerate(lanes):
                shown = [kernel.cut(end) for kernel in lane.kernels if kernel.start < end]
                spans = {"gap": [(0.0, min(lane.end, end))], **bars(shown, end * NEAR)}
                for (kind, runs), colour in zip(spans.items(), (GAP, *COLOURS), strict=False):
                    scaled = [(start / 1e3, duration / 1e3) for start, duration in runs]
                    axis.broken_barh(scaled, (place - LANE / 2, LANE), color=colour, linewidth=0, gid=kind)
            axis.set_yticks(range(len(lanes)), [lane.words(digits(lane.end / 1e3)) for lane in lanes])
            axis.invert_yaxis()
            axis.set_xlim(0, end / 1e3)
            axis.spines["left"].set_visible(False)
        axes[0].set_title(f"one call of the encoder, {timeline.row}, {timeline.provenance.device}")
        axes[1].set(title=f"its first {ZOOMED_LAYERS} layers", xlabel="milliseconds")
        kinds = zip((*KINDS, "gap"), (*COLOURS[: len(KINDS)], GAP), strict=True)
        _legend(figure, [Patch(color=colour, label=kind) for kind, colour in kinds])
