"""The table of single images: attention with its rotary embedding, next to a rotation in eager PyTorch, as Transformers
has it, and FlashAttention-2 after it."""

import re

from torch_ops.bench.measure.results import OK, Measurement, Report, Timed
from torch_ops.bench.show.cells import NOTHING, Table, digits

BASELINE = "eager_flash2"
# Sides of images in pixels, and of patches: Qwen3-VL's have 16 pixels, those of Qwen2-VL and Qwen2.5-VL 14.
PIXELS = (448, 672, 896, 1344)
PATCHES = (14, 16)
HEADERS = ("image size", "tokens", "Flash+RoPE, ms", "ours, ms", "speedup")
_ONE_SEGMENT = re.compile(r"1x(\d+)x\d+x\d+")


def image_tables(report: Report) -> list[Table]:
    """One for each size of patches, of the forwards whose single segment is an image of PIXELS; ValueError if none."""
    found: dict[int, Measurement] = {}
    for one in report.measurements:
        shape = _ONE_SEGMENT.fullmatch(one.shape)
        if shape and one.direction == "forward":
            found[int(shape[1])] = one
    made = []
    for patch in PATCHES:
        sides = {(pixels // patch) ** 2: pixels for pixels in PIXELS}
        rows = tuple(_row(pixels, found[tokens], tokens) for tokens, pixels in sides.items() if tokens in found)
        if rows:
            made.append(Table(f"Patches of {patch} x {patch} pixels", HEADERS, rows))
    if not made:
        raise ValueError("it holds no forward of an image of " + ", ".join(f"{side} pixels" for side in PIXELS))
    return made


def _row(pixels: int, one: Measurement, tokens: int) -> tuple[str, ...]:
    baseline = next((peer for peer in one.peers if peer.name == BASELINE), None)
    speedup = NOTHING
    if baseline is not None and baseline.ms and one.ours.ms and baseline.status == one.ours.status == OK:
        speedup = f"{baseline.ms / one.ours.ms:.2f}x"
    return f"{pixels}x{pixels}", f"{tokens:,}", _ms(baseline), _ms(one.ours), speedup


def _ms(timed: Timed | None) -> str:
    if timed is None or timed.ms is None:
        return NOTHING
    return digits(timed.ms) if timed.status == OK else f"{digits(timed.ms)} *{timed.status}*"
