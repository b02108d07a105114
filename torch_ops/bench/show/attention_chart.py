"""A sweep of lengths as a picture: speed against length, and against arithmetic intensity under the machine's roof."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from torch_ops.bench.measure.results import OK, Ceilings, Measurement, Report, Timed
from torch_ops.bench.show.chart import COLOURS

MARKERS = {"forward": "o", "backward": "^"}
STYLES = "-", "--"


def draw_sweep(report: Report, lengths: Mapping[str, int], path: Path) -> None:
    """`lengths` are those of the cases, by name. Hollow marks are of results that are wrong, or of another type."""
    directions = list(dict.fromkeys(one.direction for one in report.measurements))
    names = list(dict.fromkeys(timed.name for one in report.measurements for timed in _timed(one)))
    with matplotlib.rc_context({"svg.hashsalt": "vk", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(4.5 * (len(directions) + 1), 4.0), layout="constrained")
        *speeds, roof = figure.subplots(1, len(directions) + 1, squeeze=False)[0]
        for axis, direction in zip(speeds, directions, strict=True):
            panel = [one for one in report.measurements if one.direction == direction]
            _draw_speeds(axis, panel, names, lengths)
        _draw_roof(roof, report, names)
        handles = [Line2D([], [], label=name, **_style(names, name)) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False)
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def _timed(one: Measurement) -> list[Timed]:
    return [timed for timed in (one.ours, *one.peers) if timed.ms]


def _style(names: Sequence[str], name: str) -> dict[str, Any]:
    place = names.index(name)
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place // len(COLOURS) % len(STYLES)]}


def _draw_speeds(
    axis: Axes, panel: Sequence[Measurement], names: Sequence[str], lengths: Mapping[str, int]
) -> None:  # fmt: skip
    first = panel[0]
    decoding = first.op == "attention_decode"
    for name in names:
        points = [(one, timed) for one in panel for timed in _timed(one) if timed.name == name]
        if not points:
            continue
        where = [lengths[one.case] for one, _ in points]
        amounts = [one.bytes_moved if decoding else one.flops for one, _ in points]
        speeds = [amount / (timed.ms or 1) / 1e9 for amount, (_, timed) in zip(amounts, points, strict=True)]
        right = all(timed.status == OK for _, timed in points)
        axis.plot(
            where, speeds, marker=MARKERS[first.direction], markersize=4,
            fillstyle="full" if right else "none",
            **_style(names, name),
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("keys" if decoding else "length")
    axis.set_ylabel("TB/s" if decoding else "TFLOP/s")
    axis.set_title(f"{first.op}, {first.direction}, {first.dtype}")
    axis.spines[["top", "right"]].set_visible(False)


def _draw_roof(axis: Axes, report: Report, names: Sequence[str]) -> None:
    """Achieved TFLOP/s against FLOPs per byte that must be moved, under what a copy and a product reached here."""
    intensities = [one.flops / one.bytes_moved for one in report.measurements]
    ceilings = report.ceilings
    if ceilings is not None:
        ends = min(*intensities, ceilings.ridge) / 2, max(*intensities, ceilings.ridge) * 2
        corners = [ends[0], ceilings.ridge, ends[1]]
        axis.plot(corners, [_roof_at(ceilings, each) for each in corners], color="black", linewidth=1)
        says = (
            f"{ceilings.matmul_dtype} matmul {ceilings.matmul_tflops:.3g} TFLOP/s, copy {ceilings.copy_gb_s:.4g} GB/s"
        )
        axis.set_title(f"{report.provenance.device}: {says}", fontsize=7)
    for one, intensity in zip(report.measurements, intensities, strict=True):
        for timed in _timed(one):
            colour = COLOURS[names.index(timed.name) % len(COLOURS)]
            axis.plot(
                [intensity], [one.flops / (timed.ms or 1) / 1e9], marker=MARKERS[one.direction], markersize=4,
                color=colour, fillstyle="full" if timed.status == OK else "none", linestyle="",
            )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOP per byte moved")
    axis.set_ylabel("TFLOP/s")
    axis.spines[["top", "right"]].set_visible(False)


def _roof_at(ceilings: Ceilings, intensity: float) -> float:
    return min(ceilings.matmul_tflops, intensity * ceilings.copy_gb_s / 1e3)
