"""Tables of a report, for a terminal and as Markdown: one pivot of records, with a key for each kind of table."""

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from torch_ops.bench.measure.results import (
    ATOL,
    FAILED,
    OK,
    OURS,
    REFERENCE_POINT,
    UNAVAILABLE,
    VK_FREE,
    WRONG,
    Group,
    HostTime,
    Record,
    Report,
    grouped,
)
from torch_ops.bench.show.encoder import ENCODER, ENCODER_ROW
from torch_ops.bench.show.generate import GENERATE
from torch_ops.bench.show.pivot import NOTHING, OF_CASE, Key, Row, Table, digits, marked, mib, pivot, share
from torch_ops.command.report import as_it_is, lines_as_they_are

ALLCLOSE = f"allclose, atol {ATOL:g}"
VERBS = {
    UNAVAILABLE: "cannot run", FAILED: "failed on", WRONG: "is wrong on",
    REFERENCE_POINT: "is a reference point, not a baseline, on",
}  # fmt: skip
RULE = {OK: "within", WRONG: "outside", FAILED: "failed", REFERENCE_POINT: "not checked"}
# How much of a reference point's speed ours is to reach.
TARGETS = {"sdpa_alone": 0.9}
# PyTorch's own attention, the first that is correct: FlashAttention-2 takes no fp32.
TORCH = "flash2", "efficient", "math", "reference"
# Images: by tokens the side of a patch and of the image in pixels. Qwen2-VL has patches of 14 pixels, Qwen3-VL of 16.
SIDES = {(pixels // patch) ** 2: (patch, pixels) for patch in (14, 16) for pixels in (448, 672, 896, 1344)}


def tables(report: Report, kind: str = "") -> list[Table]:
    """Tables of a kind: all figures unless one is given, else "summary", "suite", "images" or "passes"."""
    encoders = [one for one in report.records if one.op == "encoder"]
    models = [one for one in report.records if one.op == "generate"]
    ops = _ops(report)
    if kind == "summary":
        return pivot(encoders, ENCODER, report) + pivot(models, GENERATE, report) + pivot(ops, SUMMARY, report)
    if kind == "images":
        shapes = {one: re.fullmatch(r"1x(\d+)x\d+x\d+", one.shape) for one in ops if one.direction == "forward"}
        found = {one: int(shape[1]) for one, shape in shapes.items() if shape and int(shape[1]) in SIDES}
        if not found:
            raise ValueError("it holds no forward of an image of 448, 672, 896 or 1344 pixels; give other results")
        return pivot(sorted(found, key=lambda one: SIDES[found[one]]), IMAGES, report)
    if kind:
        several = len({(one.case, one.dtype) for one in ops}) > 1
        return (pivot(ops, PASS, report) if kind == "passes" else []) + (
            pivot(ops, SUITE, report) if several or kind == "suite" else []
        )
    made = [table for key in (ENCODER, ENCODER_ROW) for table in pivot(encoders, key, report)]
    made += pivot(models, GENERATE, report) + pivot(ops, FIGURES, report) + pivot(report.profiles, PROFILE, report)
    return made + [_host_table(op, list(times)) for op, times in groupby(report.host, lambda time: time.op)]


def _ops(report: Report) -> list[Record]:
    return [one for one in report.records if one.op not in ("encoder", "generate")]


def markdown(report: Report, kind: str = "") -> str:
    """Tables, their notes, and where the figures come from, for a document."""
    short, parts = kind in ("summary", "images"), []
    made = tables(report, kind)
    for table in made:
        title = (
            [] if kind == "summary" and len(made) == 1 else [f"**{table.title}**" if short else f"### {table.title}"]
        )
        lines = map(_row, (table.headers, ["---"] * len(table.headers), *table.rows))
        parts += [*title, "\n".join(lines), "\n".join(f"- {note}" for note in table.notes)]
    parts.append("\n".join(f"- {line}" for line in (*_closing(report, kind), *origin(report, kind != "summary"))))
    return "\n\n".join(filter(None, parts)) + "\n"


def print_tables(report: Report, kind: str = "") -> None:
    """The same on stdout, for reading."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)  # a log or a pipe: rather long lines than folded cells
    for table in tables(report, kind):
        shown = RichTable(title=as_it_is(table.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for place, header in enumerate(table.headers):
            shown.add_column(as_it_is(header), overflow="fold", justify="right" if place else "left")
        for row in table.rows:
            shown.add_row(*map(lines_as_they_are, row))
        console.print(shown)
        _print_lines(console, (*table.notes, ""))
    _print_lines(console, (*_closing(report, kind), *origin(report)))


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(as_it_is(line), soft_wrap=True)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def origin(report: Report, with_baselines: bool = True) -> list[str]:
    """Machine, versions, baselines if wanted or few, date, commit and command."""
    source = report.provenance
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    lines = [f"{source.device}{f', driver {source.driver}' if source.driver else ''}; {versions}"]
    if with_baselines or _ops(report) == list(report.records):
        lines += [f"{name}: {about}" for name, about in source.baselines.items()]
    if (ceilings := report.ceilings) is not None:
        lines.append(
            f"measured in this run: memory {digits(ceilings.copy_gb_s)} GB/s, "
            f"{ceilings.matmul_dtype} matmul {digits(ceilings.matmul_tflops)} TFLOP/s"
        )
    return [*lines, f"{source.date}, commit {source.commit}: `{source.command}`"]


def _closing(report: Report, kind: str) -> list[str]:
    """Notes on all tables of a kind."""
    ops = _ops(report)
    if kind == "images":
        return [
            "attention only, of one layer, forward: the rotary embedding of q and k, and attention; projections, MLPs "
            "and norms of an encoder are not in it, so that a whole encoder gains less"
        ]
    if kind != "summary" or not ops:
        return []
    points = {f"{_marks_of(one)}: {one.name} {one.note}" for one in ops if one.status == REFERENCE_POINT}
    return [
        "Under a baseline's name: its time over ours, so that above 1 ours is faster. "
        "*wrong*: its result breaks the tolerance rule. -: it cannot run the case.",
        _kinds(ops),
        *(f"{point}, so it is no baseline to beat" for point in sorted(points)),
    ]


def _marks_of(one: Record) -> str:
    target = TARGETS.get(one.name)
    return f"*{REFERENCE_POINT}*" if target is None else f"*reaches {target:g}*, *below {target:g}*"


def _kinds(records: Sequence[Record]) -> str:
    """Dtype, cache and path of most cases, and by name of all others."""
    cases: dict[str, dict[str, None]] = {}
    for one in records:
        cases.setdefault(f"{one.dtype}, {one.cache} cache, {one.path} path", {})[one.case] = None
    first, *others = sorted(cases, key=lambda kind: -len(cases[kind]))
    return "; ".join((first, *(f"{', '.join(cases[kind])}: {kind}" for kind in others)))


# Cells.


def _time(one: Record) -> str:
    if one.ms is None:
        return NOTHING if one.status == UNAVAILABLE else one.status
    low, high = min(one.rounds_ms), max(one.rounds_ms)
    mark = f" {one.status}" if one.status in (WRONG, REFERENCE_POINT) else ""
    return f"{digits(one.ms, 4)} ({digits(low, 4)}..{digits(high, 4)}){mark}"


def torch_baseline(group: Group) -> Record | None:
    """PyTorch's own attention, where it is correct."""
    right = {one.name: one for one in group.baselines if one.status == OK and one.ms}
    return next((right[name] for name in TORCH if name in right), None)


def faster_by(ours: Record, other: Record | None) -> str:
    """A baseline's median over ours; nothing where ours is not correct."""
    if other is None or not other.ms or not ours.ms or ours.status not in (OK, REFERENCE_POINT):
        return NOTHING
    return f"{other.ms / ours.ms:.2f}x"


def _difference(one: Record | None) -> tuple[str, str]:
    """The largest one to ours, and whether `allclose` holds."""
    if one is None or one.to_ours is None:
        return NOTHING, NOTHING
    return digits(one.to_ours, 2), str(one.to_ours <= ATOL)


# Tables of figures: a row for each case, every round's spread.


def _figures(group: Group, report: Report) -> Iterator[Row]:
    ours, best, ratio = group.ours, group.best(), NOTHING
    if ours.status != OK:
        ratio = f"ours is {ours.status}"
    elif (ratios := group.ratios) is not None and best is not None and best.ms:
        ratio = f"{ratios[0]:.2f} ({ratios[1]:.2f}..{ratios[2]:.2f}) {best.name}"
        free = next((one.ms for one in group.baselines if one.name == VK_FREE and one.status == OK), None)
        ratio += f", {best.ms / free:.2f} for {VK_FREE}" if free else ""
    yield {
        "case": ours.case, "shape": ours.shape, "ours ms": _time(ours),
        **{f"{one.name} ms": _time(one) for one in group.baselines},
        "best correct baseline / ours": ratio, "TFLOP/s": digits(ours.tflops),
        "peak MiB, ours / best baseline": f"{mib(ours)} / {mib(best)}",
    }  # fmt: skip


def _notes(records: Sequence[Record]) -> Iterator[str]:
    """How far ours is ahead, how all were timed, and which are out and why."""
    groups = list(grouped(records, attrgetter("case", "shape", "dtype")).values())
    ratios = [group.ratios[0] for group in groups if group.ratios is not None]
    if len(ratios) > 1:
        mean = statistics.geometric_mean(ratios)
        yield f"geometric mean of {len(ratios)} ratios: {mean:.2f}, least {min(ratios):.2f}"
    rounds = {len(group.ours.rounds_ms) for group in groups if group.ours.rounds_ms}
    if rounds:
        count = "..".join(str(number) for number in sorted({min(rounds), max(rounds)}))
        warm = groups[0].ours.warm_up
        kind = "interleaved rounds" if warm is None else f"interleaved iterations after {warm} untimed ones of each"
        yield f"times: median (min..max) of {count} {kind}, {timers_in_words(records)}"
    out = grouped((one for one in records if one.status != OK), attrgetter("name", "status", "note"))
    for (name, status, note), group in sorted(out.items()):
        cases = dict.fromkeys(one.case for one in group.records)
        every = "any of these" if status == UNAVAILABLE else "all of these"
        whole = len(group.records) == len(groups) > 1
        yield f"{name} {VERBS[status]} {every if whole else ', '.join(cases)}: {note}"


def timers_in_words(records: Sequence[Record]) -> str:
    words = {"graph": "CUDA graph replays", "events": "between events", "wall": "wall time"}
    used = grouped((one for one in records if one.timer), attrgetter("timer"))
    usual, *others = sorted(used, key=lambda kind: -len(used[kind].records))
    named = (
        f"{words[kind]} for {', '.join(f'{one.name} on {one.case}' for one in used[kind].records)}" for kind in others
    )
    return ", but ".join(filter(None, (words[usual], ", ".join(named))))


FIGURES = Key(
    attrgetter("op", "direction", "dtype", "path", "cache"), attrgetter("case", "shape"), _figures,
    lambda one: f"{one.op}, {one.direction}, {one.dtype}, {one.path} path, {one.cache} cache", _notes,
)  # fmt: skip


# A summary: a row for each case, every baseline's time over ours.


def _summary(group: Group, report: Report) -> Iterator[Row]:
    row: Row = {"case": group.ours.case, "shape": group.ours.shape}
    for direction, part in grouped(group.records, attrgetter("direction")).items():
        ours = part.ours
        row[direction, f"{direction} ms"] = NOTHING if ours.ms is None else marked(digits(ours.ms), ours)
        for one in part.baselines:
            row[direction, one.name] = _over_ours(one, ours)
    yield row


def _over_ours(one: Record, ours: Record) -> str:
    """A time over ours, marked where it is not to beat: whether ours reaches its target, or its status."""
    if not one.ms or not ours.ms:
        return NOTHING
    over, target = one.ms / ours.ms, TARGETS.get(one.name)
    if target is None or one.status != REFERENCE_POINT or ours.status != OK:
        return marked(f"{over:.2f}", one)
    return f"{over:.2f} *{'reaches' if over >= target else 'below'} {target:g}*"


SUMMARY = Key(attrgetter("op"), attrgetter("case", "shape"), _summary, lambda one: one.op)


def _image(group: Group, report: Report) -> Iterator[Row]:
    ours, tokens = group.ours, int(group.ours.shape.split("x")[1])
    other = next((one for one in group.baselines if one.name == "eager_flash2"), None)
    side, right = SIDES[tokens][1], other is not None and other.status == ours.status == OK
    yield {
        "image size": f"{side}x{side}", "tokens": f"{tokens:,}",
        "Flash+RoPE, ms": NOTHING if other is None else marked(digits(other.ms), other),
        "ours, ms": marked(digits(ours.ms), ours), "speedup": faster_by(ours, other) if right else NOTHING,
    }  # fmt: skip


def _patch(one: Record) -> int:
    return SIDES[int(one.shape.split("x")[1])][0]


IMAGES = Key(
    _patch, attrgetter("case", "shape"), _image, lambda one: f"Patches of {_patch(one)} x {_patch(one)} pixels"
)


# Attention: a table for each pass of a case, and one of all cases.


def _pass(group: Group, report: Report) -> Iterator[Row]:
    ceilings = report.ceilings
    for one in (one for one in group.records if one.status != UNAVAILABLE):
        row: Row = {
            "implementation": one.name, "mean ms": digits(one.mean_ms, 4), "median ms": digits(one.ms, 4),
            "TFLOP/s": digits(one.tflops),
        }  # fmt: skip
        if one.op == "attention_decode":
            row["TB/s"] = digits(None if one.gb_s is None else one.gb_s / 1e3)
            row["of a copy"] = share(one.gb_s, None if ceilings is None else ceilings.copy_gb_s)
        row["its time / ours"] = NOTHING if one is group.ours else faster_by(group.ours, one)
        row["max abs difference to ours"], row[ALLCLOSE] = _difference(one)
        yield row | {"tolerance rule": RULE[one.status]}


def _pass_notes(records: Sequence[Record]) -> Iterator[str]:
    labels = dict.fromkeys(report.name.partition(" (")[2].removesuffix(")") for report in records[0].reports)
    if labels:
        yield f"tolerance rule: against fp64, on {' and '.join(labels)}"
    yield from _notes(records)


def _suite(group: Group, report: Report) -> Iterator[Row]:
    own, best = torch_baseline(group), group.best()
    for one in group.records:
        if one is group.ours or one.status == REFERENCE_POINT and one.group == OURS:
            difference, close = _difference(own if one is group.ours else one)
            yield {
                "shape": one.shape, "type": one.dtype if one is group.ours else f"{one.dtype}, {one.name}",
                "ours ms, mean / median": _both(one), "PyTorch ms, mean / median": _named(own),
                "PyTorch / ours": faster_by(one, own), "best correct baseline ms": _named(best),
                "best / ours": faster_by(one, best), "max abs difference": difference, ALLCLOSE: close,
                "tolerance rule": RULE[one.status],
            }  # fmt: skip


def _both(one: Record) -> str:
    return NOTHING if one.ms is None else f"{digits(one.mean_ms)} / {digits(one.ms)}"


def _named(one: Record | None) -> str:
    return NOTHING if one is None else f"{_both(one)} {one.name}"


def _suite_notes(records: Sequence[Record]) -> Iterator[str]:
    yield (
        "PyTorch is the first that can run of its FlashAttention-2, memory-efficient and plain attention; the "
        "difference is between ours and that"
    )
    yield from _notes(records)


PASS = Key(
    OF_CASE, OF_CASE, _pass, lambda one: f"{one.op}, {one.direction}, {one.shape}, {one.dtype}, {one.path} path",
    _pass_notes,
)  # fmt: skip
SUITE = Key(
    attrgetter("op", "direction"), attrgetter("case", "shape", "dtype"), _suite,
    lambda one: f"{one.op}, {one.direction}", _suite_notes,
)  # fmt: skip


# One call against the ceilings of the machine, and host time.


def _profile(group: Group, report: Report) -> Iterator[Row]:
    one, ceilings = group.ours, report.ceilings
    if ceilings is not None and one.ms:
        floor = one.floor_ms(ceilings)
        yield {
            "call": f"{one.op} {one.direction}, {one.case}, {one.dtype}, {one.path} path", "shape": one.shape,
            "ms": digits(one.ms, 4), "MB moved": digits(one.bytes_moved / 1e6), "GB/s": digits(one.gb_s),
            "of copy": share(one.gb_s, ceilings.copy_gb_s, 1), "TFLOP/s": digits(one.tflops),
            "of matmul": share(one.tflops, ceilings.matmul_tflops, 1), "FLOP/byte": digits(one.intensity),
            "bound": "memory" if one.intensity < ceilings.ridge else "compute", "floor ms": digits(floor, 4),
            "time / floor": digits(one.ms / floor),
        }  # fmt: skip


PROFILE = Key(
    lambda one: None, lambda one: one, _profile,
    lambda one: "against the ceilings of this machine",
    lambda records: (
        "bytes moved: each input read once, each output written once",
        "compute-bound where FLOP/byte exceeds the measured matmul rate over the measured copy rate, else memory-bound",
    ),
)  # fmt: skip


def _host_table(op: str, times: Sequence[HostTime]) -> Table:
    raw = next((time.microseconds for time in times if time.raw), None)
    rows = []
    for time in times:
        share = time.microseconds / raw if time.microseconds is not None and raw else None
        most = "" if time.most_us is None else f"{time.most_us:g}"
        rows.append((time.name, digits(time.microseconds), digits(share), most))
    notes = dict.fromkeys(f"{time.name}: {time.note}" for time in times if time.note)
    headers = ("call", "host microseconds", "/ raw launch", "at most")
    return Table(f"{op}, host time per call", headers, tuple(rows), tuple(notes))
