"""Stored results as a picture: TFLOP/s of every contender, case by case."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from torch_ops.bench.measure.results import OK, YARDSTICK, Measurement, Report, Timed

# Okabe and Ito's palette, which colour-blind readers can tell apart too.
COLOURS = ("#0072b2", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00")
BAR_INCHES = 0.16


def draw(report: Report, path: Path) -> None:
    """Writes a picture in the format of the path's ending; the same report gives the same SVG.

    Raises ValueError for a report without measurements and for an ending that Matplotlib does not know.
    """
    directions = list(dict.fromkeys(one.direction for one in report.measurements))
    if not directions:
        raise ValueError("there are no measurements to draw in it")
    names = list(dict.fromkeys(timed.name for one in report.measurements for timed in _contenders(one)))
    panels = [[one for one in report.measurements if one.direction == direction] for direction in directions]
    bars = max(map(len, panels)) * (len(names) + 1)
    with matplotlib.rc_context({"svg.hashsalt": "vk", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(5.0 * len(panels), 1.0 + BAR_INCHES * bars), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, panel, direction in zip(axes, panels, directions, strict=True):
            _draw_panel(axis, panel, names)
            axis.set_title(f"{panel[0].op}, {direction}, {panel[0].dtype}, {report.provenance.device}")
        axes[0].invert_yaxis()  # shared by all
        handles = [Patch(color=colour, label=name) for name, colour in zip(names, COLOURS, strict=False)]
        handles.append(Patch(fill=False, hatch="////", label="result is wrong"))
        if any(timed.status == YARDSTICK for one in report.measurements for timed in _contenders(one)):
            handles.append(Patch(fill=False, hatch="....", label="computes something else"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _contenders(one: Measurement) -> tuple[Timed, ...]:
    return (one.ours, *one.peers)


def _draw_panel(axis: Axes, panel: list[Measurement], names: list[str]) -> None:
    step = len(names) + 1
    for index, one in enumerate(panel):
        for timed in _contenders(one):
            if timed.ms is None:
                continue
            place = names.index(timed.name)
            speed = one.flops / timed.ms / 1e9
            hatch = {OK: None, YARDSTICK: "...."}.get(timed.status, "////")
            colour = COLOURS[place % len(COLOURS)]
            axis.barh(
                index * step + place, speed, color=colour if hatch is None else "none", edgecolor=colour, hatch=hatch
            )
            axis.text(speed, index * step + place, f" {speed:.0f}", va="center", fontsize=6)
    axis.set_yticks([index * step + (len(names) - 1) / 2 for index in range(len(panel))], [one.case for one in panel])
    axis.margins(y=0.01)
    axis.set_xlabel("TFLOP/s")
    axis.spines[["top", "right"]].set_visible(False)
