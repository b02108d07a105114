"""`vk bench encoder`: the whole vision encoder next to its peers, forward and a training step, by wall time of a call.

Tower L of Qwen3-VL with random weights. Batches and contenders can be chosen, so that a run can be spread over GPUs;
what was measured is written row by row.
"""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import torch_ops
from torch_ops._device import out_of_memory
from torch_ops.bench import options
from torch_ops.bench.encoder_contenders import CONTENDERS, GROUPS, UNCAPTURED, EncoderContender, find_contenders
from torch_ops.bench.encoder_contest import PASSES, contest_row, many_compiled, path_of
from torch_ops.bench.encoder_peers import PEERS
from torch_ops.bench.encoder_rows import ROWS, Row, Scene, Session, find_rows, make_scene, make_tower
from torch_ops.bench.machine import dtype_name, measure_ceilings, provenance
from torch_ops.bench.results import OK, UNAVAILABLE, EncoderRow, Provenance, Report, read_report
from torch_ops.bench.room import find_named
from torch_ops.bench.tables import markdown, print_tables
from torch_ops.bench.timeline import Lane, Timeline, record

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
    origin = provenance(where, commit, _about(running))
    report = Report(origin)
    if resume and out is not None and out.is_file():
        with options.value_errors("--out"):
            report = _kept(read_report(out), origin)
    with torch_ops.settings(**changes):
        report = _measure(report, chosen, running, kind, where, rounds, out)
    if show_markdown:
        typer.echo(markdown(report), nl=False)
    else:
        print_tables(report)
    _exit_if_wrong(report.encoders)


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


def _measure(
    report: Report, rows: tuple[Row, ...], running: tuple[EncoderContender, ...], dtype: torch.dtype,
    device: torch.device, rounds: int, out: Path | None,
) -> Report:  # fmt: skip
    begin = time.perf_counter()
    if report.ceilings is None or report.ceilings.matmul_dtype != dtype_name(dtype):
        options.say(f"measuring the copy and {dtype_name(dtype)} matmul rates of {report.provenance.device}")
        report = dataclasses.replace(report, ceilings=measure_ceilings(device, dtype))
    session = _session(device, dtype)
    for row in rows:
        there = [each for each in report.encoders if each.row == row.name]
        if there and _is_whole(there[0], make_scene(session, row), running, rounds):
            options.say(f"{row.name}: kept")
            continue
        if there:
            options.say(
                f"{row.name}: measured anew, what is there is of another dtype, path, contenders or a quick look"
            )
        options.say(f"{row.name}, {row.direction}, {row.shape}; {time.perf_counter() - begin:.0f} s so far")
        measured = _row(session, row, running, rounds, report.provenance.device)
        others = (each for each in report.encoders if each.row != row.name)
        report = dataclasses.replace(report, encoders=_in_order((*others, measured)))
        if out is not None:
            report.write(out)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    options.say(f"{time.perf_counter() - begin:.0f} s in all")
    return report


def _is_whole(there: EncoderRow, scene: Scene, running: tuple[EncoderContender, ...], rounds: int) -> bool:
    """Whether a stored row is what would be measured now."""
    same = (there.shape, there.dtype, there.path) == (scene.row.shape, dtype_name(scene.dtype), path_of(scene))
    samples = max((len(timed.rounds_ms) for timed in there.everyone), default=0)
    # After a quick look each has one sample in each pass.
    enough = samples >= PASSES * min(rounds, 2)
    return same and enough and {each.name for each in running} <= {timed.name for timed in there.everyone}


def _session(device: torch.device, dtype: torch.dtype) -> Session:
    try:
        return Session(make_tower(device, dtype))
    except ImportError as error:
        message = f"vk bench encoder needs transformers: pip install 'vk-ops[transformers]' ({error})"
        raise typer.BadParameter(message) from error


def _row(session: Session, row: Row, running: tuple[EncoderContender, ...], rounds: int, device: str) -> EncoderRow:
    try:
        return contest_row(make_scene(session, row), running, rounds, options.say)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise options.bad("--rows", f"{row.name} does not fit into the memory of {device}") from error


def _in_order(measured: tuple[EncoderRow, ...]) -> tuple[EncoderRow, ...]:
    """As in ROWS, whichever was measured first."""
    places: dict[str, Any] = {row.name: place for place, row in enumerate(ROWS)}
    return tuple(sorted(measured, key=lambda each: places.get(each.row, len(places))))


def _exit_if_wrong(rows: tuple[EncoderRow, ...]) -> None:
    bad = [(row, timed) for row in rows for timed in row.ours if timed.status not in (OK, UNAVAILABLE)]
    for row, timed in bad:
        options.say(f"vk: {timed.name} is {timed.status} on {row.row}: {timed.note}")
    if bad:
        raise typer.Exit(1)
