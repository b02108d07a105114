"""Tables of a report, for a terminal and as Markdown; both show the same cells."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from torch_ops.bench.measure.results import (
    FAILED,
    OK,
    OURS_FREE,
    UNAVAILABLE,
    WRONG,
    YARDSTICK,
    Ceilings,
    HostTime,
    Measurement,
    Profile,
    Report,
    Timed,
)
from torch_ops.bench.show.cells import NOTHING, Table, digits
from torch_ops.bench.show.encoder import encoder_tables

_VERBS = {
    UNAVAILABLE: "cannot run",
    FAILED: "failed on",
    WRONG: "is wrong on",
    YARDSTICK: "is a yardstick, not a peer, on",
}


def tables(report: Report) -> list[Table]:
    """Measurements by op, direction and dtype, encoders, then profiles, then host times."""
    made: list[Table] = encoder_tables(report)
    kinds: dict[tuple[str, ...], list[Measurement]] = {}
    for one in report.measurements:
        key = (one.op, one.direction, one.dtype, one.path, one.cache)
        kinds.setdefault(key, []).append(one)
    made += map(_measurement_table, kinds.values())
    if report.profiles and report.ceilings is not None:
        made.append(_profile_table(report.profiles, report.ceilings))
    for op, times in itertools.groupby(report.host, lambda time: time.op):
        made.append(_host_table(op, list(times)))
    return made


def markdown(report: Report, tables_of: Callable[[Report], list[Table]] = tables) -> str:
    """What goes into documents: every table, its notes, and where the figures come from."""
    parts = []
    for table in tables_of(report):
        lines = [f"### {table.title}", "", markdown_table(table)]
        lines += ["", *(f"- {note}" for note in table.notes)] if table.notes else []
        parts.append("\n".join(lines))
    parts.append("\n".join(f"- {line}" for line in origin(report)))
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """Its rows alone."""
    return "\n".join(map(_row, (table.headers, ["---"] * len(table.headers), *table.rows)))


def print_tables(report: Report, tables_of: Callable[[Report], list[Table]] = tables) -> None:
    """The same on stdout, for reading."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)  # a log or a pipe: rather long lines than folded cells
    for table in tables_of(report):
        shown = RichTable(
            *(escape(header) for header in table.headers),
            title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        )  # fmt: skip
        for column in shown.columns:
            column.overflow = "fold"
        for column in shown.columns[1:]:
            column.justify = "right"
        for row in table.rows:
            shown.add_row(*map(escape, row))
        console.print(shown)
        _print_lines(console, table.notes)
        console.print()
    _print_lines(console, origin(report))


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def origin(report: Report, peers: bool = True) -> list[str]:
    """Machine, versions, peers if wanted, date, commit and command."""
    source = report.provenance
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    driver = f", driver {source.driver}" if source.driver else ""
    lines = [f"{source.device}{driver}; {versions}"]
    if peers:
        lines += [f"{name}: {about}" for name, about in source.peers.items()]
    if report.ceilings is not None:
        lines.append(
            f"measured in this run: memory {digits(report.ceilings.copy_gb_s)} GB/s, "
            f"{report.ceilings.matmul_dtype} matmul "
            f"{digits(report.ceilings.matmul_tflops)} TFLOP/s"
        )
    return [*lines, f"{source.date}, commit {source.commit}: `{source.command}`"]


def _measurement_table(measurements: Sequence[Measurement]) -> Table:
    first = measurements[0]
    names = list(dict.fromkeys(peer.name for one in measurements for peer in one.peers))
    rows = []
    for one in measurements:
        peers = {peer.name: peer for peer in one.peers}
        rows.append(
            (
                one.case,
                one.shape,
                _time(one.ours),
                *(_time(peers[name]) if name in peers else NOTHING for name in names),
                _ratio(one),
                digits(one.tflops),
                f"{_mib(one.ours)} / {_mib(one.best_peer)}",
            )
        )
    title = f"{first.op}, {first.direction}, {first.dtype}, {first.path} path, {first.cache} cache"
    headers = ("case", "shape", "ours ms", *(f"{name} ms" for name in names))
    headers += ("best correct peer / ours", "TFLOP/s", "peak MiB, ours / best peer")
    return Table(title, headers, tuple(rows), tuple(_notes(measurements)))


def _notes(measurements: Sequence[Measurement]) -> list[str]:
    ratios = [one.ratio for one in measurements if one.ratio is not None]
    notes = []
    if len(ratios) > 1:
        mean = statistics.geometric_mean(ratios)
        notes.append(f"geometric mean of {len(ratios)} ratios: {mean:.2f}, least {min(ratios):.2f}")
    rounds = {len(one.ours.rounds_ms) for one in measurements if one.ours.rounds_ms}
    if rounds:
        count = "..".join(str(number) for number in sorted({min(rounds), max(rounds)}))
        notes.append(f"times: median (min..max) of {count} interleaved rounds, {timers_in_words(measurements)}")
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for one in measurements:
        for timed in (one.ours, *one.peers):
            if timed.status != OK:
                key = (timed.name, timed.status, timed.note)
                reasons.setdefault(key, []).append(one.case)
    for (name, status, note), cases in sorted(reasons.items()):
        verb = _VERBS[status]
        whole = len(cases) == len(measurements) > 1
        every = "any of these" if status == UNAVAILABLE else "all of these"
        where = every if whole else ", ".join(cases)
        notes.append(f"{name} {verb} {where}: {note}")
    return notes


def timers_in_words(measurements: Sequence[Measurement]) -> str:
    words = {"graph": "CUDA graph replays", "events": "between events", "wall": "wall time"}
    used: dict[str, list[str]] = {}
    for one in measurements:
        for timed in (one.ours, *one.peers):
            if timed.timer:
                used.setdefault(timed.timer, []).append(f"{timed.name} on {one.case}")
    if len(used) == 1:
        return words[next(iter(used))]
    usual = max(used, key=lambda kind: len(used[kind]))
    others = (f"{words[kind]} for {', '.join(who)}" for kind, who in used.items() if kind != usual)
    return f"{words[usual]}, but {', '.join(others)}"


def _time(timed: Timed) -> str:
    if timed.ms is None:
        return NOTHING if timed.status == UNAVAILABLE else timed.status
    low, high = min(timed.rounds_ms), max(timed.rounds_ms)
    mark = f" {timed.status}" if timed.status in (WRONG, YARDSTICK) else ""
    return f"{digits(timed.ms, 4)} ({digits(low, 4)}..{digits(high, 4)}){mark}"


def _ratio(one: Measurement) -> str:
    if one.ours.status != OK:
        return f"ours is {one.ours.status}"
    if one.ratio is None or one.ratio_range is None or one.best_peer is None:
        return NOTHING
    low, high = one.ratio_range
    ratio = f"{one.ratio:.2f} ({low:.2f}..{high:.2f}) {one.best_peer.name}"
    free = next((peer.ms for peer in one.peers if peer.name == OURS_FREE and peer.status == OK), None)
    return f"{ratio}, {one.best_peer.ms / free:.2f} for {OURS_FREE}" if free and one.best_peer.ms else ratio


def _mib(timed: Timed | None) -> str:
    if timed is None or timed.peak_bytes is None:
        return NOTHING
    return f"{timed.peak_bytes / 2**20:.1f}"


def _profile_table(profiles: Sequence[Profile], ceilings: Ceilings) -> Table:
    headers = (
        "call", "shape", "ms", "MB moved", "GB/s", "of copy", "TFLOP/s", "of matmul",
        "FLOP/byte", "bound", "floor ms", "time / floor",
    )  # fmt: skip
    rows = tuple(
        (
            f"{one.op} {one.direction}, {one.case}, {one.dtype}, {one.path} path",
            one.shape,
            digits(one.ms, 4),
            digits(one.bytes_moved / 1e6),
            digits(one.gb_s),
            f"{one.gb_s / ceilings.copy_gb_s:.1%}",
            digits(one.tflops),
            f"{one.tflops / ceilings.matmul_tflops:.1%}",
            digits(one.intensity),
            one.bound(ceilings),
            digits(one.floor_ms(ceilings), 4),
            digits(one.ms / one.floor_ms(ceilings)),
        )
        for one in profiles
    )
    notes = (
        "bytes moved: each input read once, each output written once",
        f"compute-bound above {digits(ceilings.ridge)} FLOP/byte, memory-bound below",
    )
    return Table("against the ceilings of this machine", headers, rows, notes)


def _host_table(op: str, times: Sequence[HostTime]) -> Table:
    raw = next((time.microseconds for time in times if time.raw), None)
    rows = []
    for time in times:
        share = time.microseconds / raw if time.microseconds is not None and raw else None
        target = "" if time.target is None or not raw else f"at most {time.target:.1f}"
        rows.append((time.name, digits(time.microseconds), digits(share), target))
    notes = dict.fromkeys(f"{time.name}: {time.note}" for time in times if time.note)
    headers = ("call", "host microseconds", "/ raw launch", "target")
    return Table(f"{op}, host time per call", headers, tuple(rows), tuple(notes))
