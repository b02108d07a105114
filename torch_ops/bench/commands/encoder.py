"""`vk bench encoder`: the whole vision encoder next to its peers, forward and a training step, by wall time of a call.

Tower L of Qwen3-VL with random weights. Batches and contenders can be chosen, and `--side-by-side` gives each batch a
process of its own; what was measured is written row by row.
"""

import contextlib
import dataclasses
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import torch_ops
from torch_ops._core.device import out_of_memory
from torch_ops.bench.commands import options
from torch_ops.bench.encoder.beside import measure_beside
from torch_ops.bench.encoder.contenders import CONTENDERS, GROUPS, UNCAPTURED, EncoderContender, find_contenders
from torch_ops.bench.encoder.contest import PASSES, contest_row, many_compiled, path_of
from torch_ops.bench.encoder.peers import PEERS
from torch_ops.bench.encoder.rows import ROWS, SMOKE, Row, Scene, Session, find_rows, make_scene, make_tower
from torch_ops.bench.encoder.timeline import Lane, Timeline, record
from torch_ops.bench.measure.machine import device_name, dtype_name, measure_ceilings, provenance
from torch_ops.bench.measure.results import OK, UNAVAILABLE, EncoderRow, Provenance, Report, read_report
from torch_ops.bench.measure.room import find_named, one_line
from torch_ops.bench.show.tables import markdown, print_tables

RowNames = Annotated[
    list[str] | None,
    typer.Option("--rows", metavar="ROW", help=f"Of {', '.join(row.name for row in ROWS)}, or patterns of them."),
]
ContenderNames = Annotated[
    list[str] | None,
    typer.Option(
        "--contenders",
        metavar="NAME",
        help=f"Contenders by name or pattern, such as 'vk*,graph_*', or groups: {', '.join(GROUPS)}.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Keep the rows that --out holds of the same commit, machine, dtype and path, and of all contenders.",
    ),
]
SideBySide = Annotated[
    bool,
    typer.Option(
        "--side-by-side",
        help="Each row in a process of its own, all on one GPU: they prepare at the same time, which is most of the "
        "work, and are timed one at a time.",
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="A first look: one round in each pass, of ours and of what is assembled unless named."
    ),
]
Rounds = Annotated[
    int, typer.Option("--rounds", min=2, help="How often each contender is timed in each of two passes.")
]


def encoder(
    rows: RowNames = None,
    contenders: ContenderNames = None,
    rounds: Rounds = 6,
    quick: Quick = False,
    dtype: options.DtypeName = None,
    device: options.DeviceName = None,
    path: options.PathName = None,
    out: options.Out = None,
    resume: Resume = False,
    side_by_side: SideBySide = False,
    show_markdown: options.Markdown = False,
    commit: options.Commit = None,
) -> None:
    """Time the whole vision encoder next to Transformers' and to one put together by hand.

    Every contender's results, in training every gradient too, are held against an fp64 reference by the tolerance rule;
    what is wrong is marked and never counts as the best. Times are wall times of the user's call after warm-up, all
    contenders in turns in one process, everything twice.
    """
    where = options.find_device(device)
    kind = options.find_dtype(dtype, where)
    changes = options.find_path(path)
    with options.value_errors("--rows"):
        chosen = find_rows(rows or (), where)
    with options.value_errors("--contenders"):
        running = find_contenders(CONTENDERS, contenders) if contenders else CONTENDERS
    if quick:
        rounds = 1
        running = running if contenders else tuple(each for each in running if each.group != UNCAPTURED)
    options.check_output(out, "--out")
    if resume and out is None:
        raise options.bad("--resume", "it is of what --out holds; give one")
    origin = provenance(where, commit, _about(running))
    report = Report(origin)
    if resume and out is not None and out.is_file():
        with options.value_errors("--out"):
            report = _kept(read_report(out), origin)
    begin = time.perf_counter()
    with torch_ops.settings(**changes):
        report = _with_ceilings(report, where, kind)
        session = _session(where, kind)
        wanted = _lacking(report, session, chosen, running, rounds)
        if side_by_side:
            del session
            _emptied(where)
            measured = measure_beside(wanted, running, kind, where, rounds, changes)
        else:
            measured = _one_by_one(session, wanted, running, rounds)
        # What it began ends with it: where a report can't be written, its processes must not wait for a turn.
        with contextlib.closing(measured):
            report, failed = _gathered(report, measured, out)
    options.say(f"{time.perf_counter() - begin:.0f} s in all")
    if show_markdown:
        typer.echo(markdown(report), nl=False)
    else:
        print_tables(report)
    _exit_if_wrong(report.encoders, failed)


def timeline(
    out: Annotated[Path, typer.Option("--out", metavar="FILE.json", dir_okay=False, help="Where the kernels go.")],
    row: Annotated[str, typer.Option("--row", metavar="ROW", help="The batch.")] = "896",
    lanes: Annotated[str, typer.Option("--lanes", help="Two contenders or more, by name.")] = "hf_compiled,vk_graph",
    dtype: options.DtypeName = None,
    device: options.DeviceName = None,
    commit: options.Commit = None,
) -> None:
    """Record the kernels of one call of the encoder, ours and a peer's; vk bench chart draws them."""
    where = options.find_device(device)
    kind = options.find_dtype(dtype, where)
    with options.value_errors("--row"):
        (chosen,) = find_rows([row], where)
    with options.value_errors("--lanes"):
        running = {name: find_named(CONTENDERS, [name])[0] for name in lanes.split(",")}
    options.check_output(out, "--out")
    if where.type != "cuda":
        raise options.bad("--device", "a timeline needs a GPU")
    origin = provenance(where, commit, _about(tuple(running.values())))
    scene = make_scene(_session(where, kind), chosen)
    made = []
    with many_compiled(), torch.no_grad():
        for name, contender in running.items():
            options.say(f"recording {name}")
            if reason := contender.refuses(scene):
                raise options.bad("--lanes", f"{name} {reason}")
            made.append(Lane(name, contender.about, record(contender.bind(scene).encode)))
    Timeline(origin, chosen.name, tuple(made)).write(out)


def _about(running: tuple[EncoderContender, ...]) -> dict[str, str]:
    named = {contender.name: contender.about for contender in running}
    kernels = {name: peer.about() for name, peer in PEERS.items() if any(name in each for each in named)}
    return {**named, **kernels}


def _kept(report: Report, origin: Provenance) -> Report:
    """What another run has measured, if it was one of this code and machine."""
    for name in ("commit", "device", "versions"):
        theirs, ours = getattr(report.provenance, name), getattr(origin, name)
        if theirs != ours:
            raise ValueError(f"it holds rows of another {name}, {theirs}, where this run has {ours}")
    about = {**report.provenance.peers, **origin.peers}
    return dataclasses.replace(report, provenance=dataclasses.replace(report.provenance, peers=about))


def _with_ceilings(report: Report, device: torch.device, dtype: torch.dtype) -> Report:
    if report.ceilings is not None and report.ceilings.matmul_dtype == dtype_name(dtype):
        return report
    options.say(f"measuring the copy and {dtype_name(dtype)} matmul rates of {report.provenance.device}")
    return dataclasses.replace(report, ceilings=measure_ceilings(device, dtype))


def _lacking(
    report: Report, session: Session, rows: tuple[Row, ...], running: tuple[EncoderContender, ...], rounds: int
) -> list[Row]:
    """The rows that are still to be measured."""
    wanted = []
    for row in rows:
        there = [each for each in report.encoders if each.row == row.name]
        if there and _is_whole(there[0], make_scene(session, row), running, rounds):
            options.say(f"{row.name}: kept")
            continue
        if there:
            options.say(
                f"{row.name}: measured anew, what is there is of another dtype, path, contenders or a quick look"
            )
        wanted.append(row)
    return wanted


def _one_by_one(
    session: Session, rows: Iterable[Row], running: tuple[EncoderContender, ...], rounds: int
) -> Generator[tuple[str, EncoderRow | Exception]]:
    begin = time.perf_counter()
    for row in rows:
        options.say(f"{row.name}, {row.direction}, {row.shape}; {time.perf_counter() - begin:.0f} s so far")
        yield row.name, _row(session, row, running, rounds)
        _emptied(session.tower.device)


def _emptied(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _gathered(
    report: Report, measured: Iterable[tuple[str, EncoderRow | Exception]], out: Path | None
) -> tuple[Report, list[str]]:
    """Written as it comes; and the rows that failed."""
    failed = []
    for name, row in measured:
        if isinstance(row, Exception):
            options.say(f"vk: {name} failed: {one_line(row)}")
            failed.append(name)
            continue
        others = (each for each in report.encoders if each.row != name)
        report = dataclasses.replace(report, encoders=_in_order((*others, row)))
        if out is not None:
            report.write(out)
    return report, failed


def _is_whole(there: EncoderRow, scene: Scene, running: tuple[EncoderContender, ...], rounds: int) -> bool:
    """Whether a stored row is what would be measured now."""
    same = (there.shape, there.dtype, there.path) == (scene.row.shape, dtype_name(scene.dtype), path_of(scene))
    samples = max((len(timed.rounds_ms) for timed in there.everyone), default=0)
    # After a quick look each has one sample in each pass.
    enough = samples >= PASSES * min(rounds, 2)
    return same and enough and {each.name for each in running} <= {timed.name for timed in there.everyone}


def _session(device: torch.device, dtype: torch.dtype) -> Session:
    if device.type != "cuda":
        options.say("on the CPU the tower is not L, but has two narrow layers")
    try:
        return Session(make_tower(device, dtype))
    except ImportError as error:
        message = f"vk bench encoder needs transformers: pip install 'vk-ops[transformers]' ({error})"
        raise typer.BadParameter(message) from error


def _row(session: Session, row: Row, running: tuple[EncoderContender, ...], rounds: int) -> EncoderRow:
    try:
        return contest_row(make_scene(session, row), running, rounds, options.say)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        name = device_name(session.tower.device)
        raise options.bad("--rows", f"{row.name} does not fit into the memory of {name}") from error


def _in_order(measured: tuple[EncoderRow, ...]) -> tuple[EncoderRow, ...]:
    """As they are listed, whichever was measured first."""
    places: dict[str, Any] = {row.name: place for place, row in enumerate((*ROWS, *SMOKE))}
    return tuple(sorted(measured, key=lambda each: places.get(each.row, len(places))))


def _exit_if_wrong(rows: tuple[EncoderRow, ...], failed: list[str]) -> None:
    bad = [(row, timed) for row in rows for timed in row.ours if timed.status not in (OK, UNAVAILABLE)]
    for row, timed in bad:
        options.say(f"vk: {timed.name} is {timed.status} on {row.row}: {timed.note}")
    if bad or failed:
        raise typer.Exit(1)
