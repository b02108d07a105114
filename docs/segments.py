"""Draws docs/segments.svg, two documents on two ranks of zigzag: python docs/segments.py docs/segments.svg"""

import sys

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torch_ops.segments import Segments, zigzag

# So that equal drawings are equal files.
matplotlib.rcParams["svg.hashsalt"] = "vk"

COLORS = ("#9fb8c8", "#d98b5f"), ("#8fb58a", "#e8c07d")
SEEN, OWN = "#d9d9d9", "#7f7f7f"
LENGTHS, RANKS = (8, 6), 2
GAP = 1
ROWS = ("tokens", "rank 0", "rank 1", "gathered k, v", "segment 0", "segment 1", "segment 2", "segment 3")
PLACES = {name: len(ROWS) - index - 0.4 * (index > 3) for index, name in enumerate(ROWS)}


def box(axes: Axes, row: str, begin: float, width: float, text: str, color: str) -> None:
    axes.barh(PLACES[row], width, left=begin, height=0.66, color=color, edgecolor="white")
    axes.text(begin + width / 2, PLACES[row], text, ha="center", va="center", fontsize=7)


def below(axes: Axes, row: str, at: float, text: object) -> None:
    axes.text(at, PLACES[row] - 0.36, str(text), ha="center", va="top", fontsize=6)


def main(path: str) -> None:
    figure = Figure(figsize=(11, 4.4))
    axes = figure.subplots()
    ranks = [Segments._make(each.tolist() for each in zigzag(LENGTHS, rank, RANKS)) for rank in range(RANKS)]
    bounds, rows = ranks[0].key_bounds, ranks[0].key_rows
    starts = [sum(LENGTHS[:document]) + GAP * document for document in range(len(LENGTHS))]
    chunks = 2 * RANKS
    for document, start in enumerate(starts):
        for chunk in range(chunks):
            first, end = bounds[document][chunk : chunk + 2]
            name, color = f"{document}.{chunk}", COLORS[document][chunk >= RANKS]
            box(axes, "tokens", start + first, end - first, name, color)
            below(axes, "tokens", start + first, first)
            row, owner = rows[document][chunk], min(chunk, chunks - 1 - chunk)
            box(axes, f"rank {owner}", row - owner * rows_of(ranks[0]), end - first, name, color)
            box(axes, "gathered k, v", row, end - first, name, color)
            below(axes, "gathered k, v", row, row)
        below(axes, "tokens", start + LENGTHS[document], LENGTHS[document])
    own = ranks[1]
    for segment, (document, limit) in enumerate(zip(own.key_sequence, own.key_limit, strict=True)):
        queries = own.cu_seqlens_q[segment + 1] - own.cu_seqlens_q[segment]
        start, name = starts[document], f"segment {segment}"
        box(axes, name, start, limit - queries, "sees", SEEN)
        box(axes, name, start + limit - queries, queries, "q", OWN)
    text = (
        f"key_bounds = {bounds[0]},\n             {bounds[1]}\nkey_rows   = {rows[0]},\n             {rows[1]}\n\n"
        f"rank 1:\ncu_seqlens_q = {own.cu_seqlens_q}\nkey_sequence = {own.key_sequence}\nkey_limit    = {own.key_limit}"
    )
    axes.text(16.6, 5.2, text, fontsize=8, family="monospace", va="center")
    axes.set_yticks([PLACES[name] for name in ROWS], ROWS, fontsize=8)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.set_xlim(0, 25)
    axes.set_xlabel("d.c is chunk c of document d; segments are those of rank 1, drawn below the tokens", fontsize=8)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def rows_of(segments: Segments) -> int:
    """How many rows a rank has."""
    return int(segments.cu_seqlens_q[-1])


if __name__ == "__main__":
    main(sys.argv[1])
