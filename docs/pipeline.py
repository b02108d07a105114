"""Draws docs/pipeline.svg, the pipeline of the Hopper forward: python docs/pipeline.py docs/pipeline.svg"""

import sys

import matplotlib
from matplotlib.figure import Figure

# So that equal drawings are equal files.
matplotlib.rcParams["svg.hashsalt"] = "vk"

COLORS = {"load": "#9fb8c8", "qk": "#d98b5f", "pv": "#e8c07d", "softmax": "#8fb58a", "note": "#c9c9c9"}
# Widths in one unit; what matters is the order and what lies under what.
LOAD, QK, PV, SOFTMAX = 2.0, 2.0, 2.0, 5.0
STEPS = 4
ROWS = ("producer warp", "tensor cores, warpgroup 0", "softmax, warpgroup 0", "tensor cores, warpgroup 1",
        "softmax, warpgroup 1", "tensor cores, warpgroup 2", "softmax, warpgroup 2")  # fmt: skip


def main(path: str) -> None:
    figure = Figure(figsize=(11, 3.6))
    axes = figure.subplots()
    places = {name: len(ROWS) - index for index, name in enumerate(ROWS)}

    def box(row: str, begin: float, width: float, text: str, kind: str) -> None:
        axes.barh(places[row], width, left=begin, height=0.72, color=COLORS[kind], edgecolor="white")
        axes.text(begin + width / 2, places[row], text, ha="center", va="center", fontsize=7)

    box("producer warp", 0, LOAD / 2, "note", "note")
    for block in range(STEPS):
        begin = LOAD / 2 + block * 2 * LOAD if block < 2 else LOAD + QK + block * (QK + SOFTMAX) - 8
        box("producer warp", begin, LOAD, f"K{block}", "load")
        box("producer warp", begin + LOAD, LOAD, f"V{block}", "load")
    for group in range(3):
        at = LOAD * 1.5 + group * QK
        cores, exponents = f"tensor cores, warpgroup {group}", f"softmax, warpgroup {group}"
        for block in range(STEPS):
            box(cores, at, QK, f"q K{block}ᵀ", "qk")
            if block:
                box(cores, at + QK, PV, f"p{block - 1} V{block - 1}", "pv")
            box(exponents, at + QK, SOFTMAX, f"max, exp, sum {block}", "softmax")
            at += QK + SOFTMAX
    axes.set_yticks([places[name] for name in ROWS], ROWS, fontsize=8)
    axes.set_xticks([])
    axes.set_xlabel("time, not to scale", fontsize=8)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
