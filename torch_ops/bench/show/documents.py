"""Tables inside Markdown documents, made from stored results.

A document marks a table's place by a pair of comments, the first of which names the results, relative to the document:

    <!-- vk bench table --summary docs/results/h200_window_attn.json -->
    ...
    <!-- vk bench table end -->

`--if-measured` before the file's name leaves the place empty as long as there is no such file. `--images` instead of
`--summary` makes the table of single images, `--suite` those of `vk bench attention`.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch_ops.bench.measure.results import (
    OK,
    UNAVAILABLE,
    YARDSTICK,
    Measurement,
    Report,
    Timed,
    read_report,
    replace_text,
)
from torch_ops.bench.show.attention import overview
from torch_ops.bench.show.cells import NOTHING, Table, digits
from torch_ops.bench.show.encoder import encoder_summary
from torch_ops.bench.show.images import image_tables
from torch_ops.bench.show.tables import markdown, markdown_table, origin

_OPTIONS = r"(?:--(?P<kind>summary|suite|images) )?(?P<pending>--if-measured )?"
_BEGIN = rf"(?P<begin><!-- vk bench table {_OPTIONS}(?P<file>(?!end |--)\S+) -->\n)"
_MARK = re.compile(_BEGIN)
# Up to its own end: another table's would take what lies between.
_PLACE = re.compile(
    _BEGIN + r"(?P<table>(?:(?!<!-- vk bench table ).)*)(?P<end><!-- vk bench table end -->)", re.DOTALL
)


def summary(report: Report) -> str:
    """One row per case: our times, and every peer's time over ours, forward and backward; of encoders, the best."""
    if report.encoders:
        table = encoder_summary(report)
        lines = [markdown_table(table), "", *(f"- {note}" for note in (*table.notes, *origin(report, peers=False)))]
        return "\n".join(lines) + "\n"
    ops: dict[str, list[Measurement]] = {}
    for one in report.measurements:
        ops.setdefault(one.op, []).append(one)
    lines = []
    for op, measurements in ops.items():
        lines += [f"**{op}**", ""] if len(ops) > 1 else []
        lines += [markdown_table(_summary_of(measurements)), ""]
    notes = (
        "Under a peer's name: its time over ours, so that above 1 ours is faster. "
        "*wrong*: its result breaks the tolerance rule. -: it cannot run the case.",
        *_kinds(report.measurements),
        *yardsticks(report),
        *origin(report),
    )
    return "\n".join((*lines, *(f"- {note}" for note in notes))) + "\n"


def _kinds(measurements: Sequence[Measurement]) -> list[str]:
    """Of what dtype, with what in the cache and by which path: most cases, and by name all others."""
    cases: dict[str, dict[str, None]] = {}
    for one in measurements:
        cases.setdefault(f"{one.dtype}, {one.cache} cache, {one.path} path", {})[one.case] = None
    kinds = sorted(cases, key=lambda kind: -len(cases[kind]))
    others = (f"{', '.join(cases[kind])}: {kind}" for kind in kinds[1:])
    return ["; ".join((*kinds[:1], *others))] if kinds else []


def _summary_of(measurements: Sequence[Measurement]) -> Table:
    names: dict[str, dict[str, None]] = {}
    for one in measurements:
        names.setdefault(one.direction, {}).update(dict.fromkeys(peer.name for peer in one.peers))
    cases: dict[tuple[str, str], dict[str, Measurement]] = {}
    for one in measurements:
        cases.setdefault((one.case, one.shape), {})[one.direction] = one
    headers = ["case", "shape"]
    for direction, peers in names.items():
        headers += [f"{direction} ms", *peers]
    rows = []
    for (case, shape), found in cases.items():
        row = [case, shape]
        for direction, peers in names.items():
            row += _cells(found.get(direction), list(peers))
        rows.append(tuple(row))
    return Table("", tuple(headers), tuple(rows))


def images(report: Report) -> str:
    """Attention of single images, by their size."""
    parts = [f"{table.title}:\n\n{markdown_table(table)}" for table in image_tables(report)]
    notes = (
        "attention only, of one layer, forward: the rotary embedding of q and k, and attention; projections, MLPs and "
        "norms of an encoder are not in it, so that a whole encoder gains less",
        *origin(report),
    )
    return "\n\n".join((*parts, "\n".join(f"- {note}" for note in notes))) + "\n"


def yardsticks(report: Report) -> list[str]:
    """What each yardstick leaves out, where there are any."""
    notes = {
        f"*yardstick*: {peer.name} {peer.note}, so it is no peer to beat"
        for one in report.measurements
        for peer in one.peers
        if peer.status == YARDSTICK
    }
    return sorted(notes)


def _cells(one: Measurement | None, names: list[str]) -> list[str]:
    if one is None or one.ours.ms is None:
        return [NOTHING] * (1 + len(names))
    peers = {peer.name: peer for peer in one.peers}
    mark = "" if one.ours.status == OK else f" *{one.ours.status}*"
    return [f"{digits(one.ours.ms)}{mark}", *(_over_ours(peers.get(name), one.ours.ms) for name in names)]


def _over_ours(peer: Timed | None, ours: float) -> str:
    if peer is None or peer.status == UNAVAILABLE or peer.ms is None:
        return NOTHING
    return f"{peer.ms / ours:.2f}" if peer.status == OK else f"{peer.ms / ours:.2f} *{peer.status}*"


MAKERS: dict[str | None, Callable[[Report], str]] = {
    None: markdown,
    "summary": summary,
    "suite": partial(markdown, tables_of=overview),
    "images": images,
}


def refresh(document: Path) -> bool:
    """Makes the document's marked tables anew; returns whether it had any, and leaves an equal one untouched.

    Raises ValueError naming the results that are missing or are none, and the mark that has no end.
    """
    before = document.read_text()
    ended = {place.start() for place in _PLACE.finditer(before)}
    for mark in _MARK.finditer(before):
        if mark.start() not in ended:
            raise ValueError(f"the table of {mark['file']} has no end mark of its own")
    after, places = _PLACE.subn(lambda place: place["begin"] + _make(document.parent, place) + place["end"], before)
    if after != before:
        replace_text(document, after)
    return bool(places)


def _make(folder: Path, place: re.Match[str]) -> str:
    path = folder / place["file"]
    if not path.is_file():
        if place["pending"]:
            return ""
        raise ValueError(f"there are no results at {path}")
    return MAKERS[place["kind"]](read_report(path))
