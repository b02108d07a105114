"""A stored timeline as a picture: a lane for each contender, the whole call above, its first layers below."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from torch_ops.bench.encoder.timeline import KINDS, NEAR, ZOOMED_LAYERS, Kernel, Timeline, bars
from torch_ops.bench.show.cells import digits
from torch_ops.bench.show.chart import COLOURS

GAP = "#e4e4e4"
HEIGHT = 0.7


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Writes a picture in the format of the path's ending; the same timeline gives the same SVG.

    Raises ValueError for a timeline without kernels and for an ending that Matplotlib does not know.
    """
    if not any(lane.kernels for lane in timeline.lanes):
        raise ValueError("there are no kernels to draw in it")
    whole = max(lane.end for lane in timeline.lanes)
    part = max(lane.end_of_layers(ZOOMED_LAYERS) for lane in timeline.lanes)
    with matplotlib.rc_context({"svg.hashsalt": "vk", "svg.fonttype": "none", "font.size": 8, "path.simplify": True}):
        figure = Figure(figsize=(9.0, 1.4 + 0.9 * len(timeline.lanes)), layout="constrained")
        above, below = figure.subplots(2, 1)
        _draw(above, timeline, whole)
        _draw(below, timeline, part)
        above.set_title(f"one call of the encoder, {timeline.row}, {timeline.provenance.device}")
        below.set_title(f"its first {ZOOMED_LAYERS} layers")
        below.set_xlabel("milliseconds")
        handles = [Patch(color=colour, label=kind) for kind, colour in zip(KINDS, COLOURS, strict=False)]
        handles.append(Patch(color=GAP, label="gap"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(axis: Axes, timeline: Timeline, end: float) -> None:
    """All lanes up to `end` microseconds."""
    for place, lane in enumerate(timeline.lanes):
        axis.broken_barh([(0.0, min(lane.end, end) / 1e3)], (place - HEIGHT / 2, HEIGHT), color=GAP, linewidth=0)
        shown = [_cut(kernel, end) for kernel in lane.kernels if kernel.start < end]
        for (kind, spans), colour in zip(bars(shown, end * NEAR).items(), COLOURS, strict=False):
            scaled = [(start / 1e3, duration / 1e3) for start, duration in spans]
            if scaled:
                axis.broken_barh(scaled, (place - HEIGHT / 2, HEIGHT), color=colour, linewidth=0, gid=kind)
    axis.set_yticks(
        range(len(timeline.lanes)),
        [
            f"{lane.name}\n{digits(lane.end / 1e3)} ms, {len(lane.kernels)} kernels\nbusy {lane.busy / lane.end:.0%}"
            if lane.kernels
            else lane.name
            for lane in timeline.lanes
        ],
    )
    axis.invert_yaxis()
    axis.set_xlim(0, end / 1e3)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _cut(kernel: Kernel, end: float) -> Kernel:
    return kernel if kernel.end <= end else Kernel(kernel.name, kernel.start, end - kernel.start, kernel.kind)
