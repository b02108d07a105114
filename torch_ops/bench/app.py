"""`vk bench`: ops next to their peers, against the machine's ceilings, and their host time."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

import torch_ops
from csrc_free_ops.configs.candidates import CANDIDATES
from torch_ops.bench.commands import options
from torch_ops.bench.commands.attention import attention_command
from torch_ops.bench.commands.contest import contest_command, show
from torch_ops.bench.commands.encoder import encoder, timeline
from torch_ops.bench.commands.options import say
from torch_ops.bench.encoder.timeline import read_timeline
from torch_ops.bench.measure.contest import Terms
from torch_ops.bench.measure.host import host_times
from torch_ops.bench.measure.machine import measure_ceilings, provenance
from torch_ops.bench.measure.profile import profile_case
from torch_ops.bench.measure.results import Report, read_report
from torch_ops.bench.measure.room import Room
from torch_ops.bench.measure.tune import (
    TUNED_PATHS,
    Journal,
    Measured,
    any_timed,
    find_points,
    in_words,
    provenance_of,
    search,
)
from torch_ops.bench.rooms import (
    attention,
    attention_decode,
    kv_cache_append,
    mlp,
    norms,
    patch_merger,
    pos_embed_interpolate,
    qkv_rope,
    rope_window_attn,
    rotary_table,
    spatial_merge,
    vision_attention,
    window_attn,
)
from torch_ops.bench.show import documents
from torch_ops.settings import default_rows

ROOMS: dict[str, Room] = {
    room.op: room
    for room in (
        window_attn.ROOM,
        attention.ROOM,
        attention_decode.ROOM,
        rope_window_attn.ROOM,
        vision_attention.ROOM,
        *norms.ROOMS,
        qkv_rope.ROOM,
        mlp.ROOM,
        patch_merger.ROOM,
        rotary_table.ROOM,
        pos_embed_interpolate.ROOM,
        spatial_merge.ROOM,
        kv_cache_append.ROOM,
    )
}

# Rooms that are also measured one after the other, into one document.
FAMILIES: dict[str, tuple[str, ...]] = {
    "norms": tuple(room.op for room in norms.ROOMS),
    "grids": tuple(room.op for room in (rotary_table.ROOM, pos_embed_interpolate.ROOM, spatial_merge.ROOM)),
}

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_show_locals=False)

OpName = Annotated[str, typer.Argument(metavar="OP", help=f"One of {', '.join(ROOMS)}.")]


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Time ops next to their peers, profile them, and make tables of what was measured.

    Tables go to stdout, progress to stderr. The exit code is 1 where ours broke the tolerance rule.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# Dense attention has a command of its own, which knows shapes by numbers.
app.command("attention")(attention_command(ROOMS))
for _op in (op for op in ROOMS if op != "attention"):
    app.command(_op)(contest_command(ROOMS, _op, (_op,)))
for _family, _ops in FAMILIES.items():
    app.command(_family)(contest_command(ROOMS, _family, _ops))

app.command("encoder")(encoder)
app.command("timeline")(timeline)


@app.command()
def tune(
    op: OpName,
    shapes: options.Shapes = None,
    backward: options.Backward = False,
    dtype: options.DtypeName = None,
    device: options.DeviceName = None,
    path: options.PathName = None,
    kernels: Annotated[
        list[str] | None,
        typer.Option("--kernels", metavar="NAME", help="Kernels by name; repeated or separated by commas."),
    ] = None,
    rounds: options.Rounds = 4,
    cold: options.Cold = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="ROWS.json", dir_okay=False, help="Unless given, the user's rows, used from then on."
        ),
    ] = None,
    commit: options.Commit = None,
) -> None:
    """Find the fastest launch of each kernel here, and write rows that calls then take.

    Every candidate is held against the fp64 reference first; one that spills registers is out. A run that was
    broken off goes on from what its file holds. Rows reach from one measured length half-way to the next, so give
    short and long shapes. Without --path every path of this GPU is tuned.
    """
    room = _room_of(op)
    where = options.find_device(device)
    terms = Terms(options.find_dtype(dtype, where), where, backward, rounds, cold)
    if path is not None:
        options.find_path(path)
    with options.value_errors("--shapes"):
        cases = room.cases(shapes or (), where)
    rows = out or default_rows()
    with options.value_errors("--out"):
        journal = Journal.open(rows, provenance_of(provenance(where, commit, {})))
    wanted = [name.strip() for item in kernels or () for name in item.split(",") if name.strip()]
    # Where nobody named kernels it is the device that launches none.
    with options.value_errors("--kernels" if wanted else "--device"):
        points = find_points(room, cases, TUNED_PATHS if path is None else (path,), wanted, terms)
    left = [(point, case) for point, case in points if point.key not in journal.points]
    try:
        journal.write(rows)
    except OSError as error:
        raise options.bad("--out", f"{str(rows)!r} cannot be written: {error.strerror}") from error
    say(f"{len(points)} points, {len(points) - len(left)} of them in {rows} already")
    with options.progress(sum(len(CANDIDATES[point.kernel.name]) for point, _ in left)) as step:
        for point, case in left:
            tried = search(room, point, case, terms, step)
            say(f"{point.key}: {in_words(tried)}")
            if any_timed(tried):
                origin = journal.provenance
                journal.points[point.key] = Measured(point.kernel, tuple(tried), origin["date"], origin["commit"])
                journal.write(rows)
    say(f"rows are in {rows}" + ("" if out else "; processes that start from now on take them"))


@app.command()
def profile(
    op: OpName,
    shapes: options.Shapes = None,
    backward: options.Backward = False,
    dtype: options.DtypeName = None,
    device: options.DeviceName = None,
    path: options.PathName = None,
    rounds: options.Rounds = 3,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE.json",
            dir_okay=False,
            help="Export a Chrome trace; of several calls, each to a file with its name in it.",
        ),
    ] = None,
    out: options.Out = None,
    show_markdown: options.Markdown = False,
    commit: options.Commit = None,
) -> None:
    """Profile an op: the profiler's table, bytes and FLOPs, memory- or compute-bound.

    Bytes moved count each input read once and each output written once. A call is memory-bound
    where its FLOPs per byte are fewer than the measured matmul rate over the measured copy rate.
    """
    room = _room_of(op)
    where = options.find_device(device)
    terms = Terms(options.find_dtype(dtype, where), where, backward, rounds, cold=False)
    changes = options.find_path(path)
    with options.value_errors("--shapes"):
        cases = room.profiled(shapes or (), where)
    options.check_output(out, "--out")
    options.check_output(trace, "--trace")
    calls = [(case, direction) for case in cases for direction in terms.directions if direction in room.ours.directions]
    report = Report(
        provenance(where, commit, {}),
        measure_ceilings(where, terms.dtype),
    )
    with torch_ops.settings(**changes):
        for case, direction in calls:
            title = f"{room.op} {direction}, {case.name}, {room.shape(case)}"
            say(title)
            target = trace
            if trace is not None and len(calls) > 1:
                target = trace.with_name(f"{trace.stem}.{case.name}.{direction}{trace.suffix}")

            def show_table(table: str, title: str = title) -> None:
                if not show_markdown:
                    typer.echo(f"{title}\n{table}")

            profiled = profile_case(room, case, direction, terms, target, show_table)
            report = dataclasses.replace(report, profiles=(*report.profiles, profiled))
    if out is not None:
        report.write(out)
    show(report, show_markdown)


@app.command()
def host(
    ops: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OP]...", help=f"Of {', '.join((*ROOMS, *FAMILIES))}; window_attn unless given."),
    ] = None,
    dtype: options.DtypeName = None,
    device: options.DeviceName = None,
    path: options.PathName = None,
    out: options.Out = None,
    show_markdown: options.Markdown = False,
    commit: options.Commit = None,
) -> None:
    """Host time of a call on a small case, next to a raw launch of the same kernel.

    The least over repetitions. On a CPU a call computes its result too, and there is no raw launch.
    """
    rooms = [_room_of(op) for name in ops or ["window_attn"] for op in FAMILIES.get(name, (name,))]
    where = options.find_device(device)
    kind = options.find_dtype(dtype, where)
    changes = options.find_path(path)
    options.check_output(out, "--out")
    report = Report(provenance(where, commit, {}))
    with torch_ops.settings(**changes):
        for room in rooms:
            say(f"host time of {room.op}")
            times = host_times(room.op, room.host_calls(kind, where), where)
            report = dataclasses.replace(report, host=(*report.host, *times))
            if out is not None:
                report.write(out)
    show(report, show_markdown)


@app.command()
def table(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", exists=True, dir_okay=False, help="JSON from --out; with --into, documents."),
    ],
    short: Annotated[bool, typer.Option("--summary", help="One row per case, every peer's time over ours.")] = False,
    suite: Annotated[bool, typer.Option("--suite", help="One row per case of vk bench attention.")] = False,
    images: Annotated[bool, typer.Option("--images", help="Attention of single images, by their size.")] = False,
    into: Annotated[bool, typer.Option("--into", help="Make the tables anew that these Markdown files mark.")] = False,
) -> None:
    """Make Markdown tables again from stored JSON.

    A document marks a table by `<!-- vk bench table [--summary|--suite|--images] [--if-measured] RESULTS.json -->` and
    `<!-- vk bench table end -->`.
    """
    make = documents.MAKERS["images" if images else "summary" if short else "suite" if suite else None]
    for index, file in enumerate(files):
        with options.value_errors(str(file)):
            if into:
                if not documents.refresh(file):
                    raise ValueError("it marks no table: see vk bench table --help")
                continue
            text = make(read_report(file))
        typer.echo("\n" * bool(index) + text, nl=False)


@app.command()
def chart(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS.json", exists=True, dir_okay=False, help="JSON from --out.")
    ],
    picture: Annotated[Path, typer.Argument(metavar="PICTURE", dir_okay=False, help="Where to, such as out.svg.")],
) -> None:
    """Draw stored results, in SVG, PNG or PDF: TFLOP/s of every contender, case by case; of a timeline its kernels."""
    try:
        from torch_ops.bench.encoder.timeline_chart import draw_timeline
        from torch_ops.bench.show.chart import draw
    except ImportError as error:
        message = f"vk bench chart needs matplotlib: pip install 'vk-ops[bench]' ({error})"
        raise typer.BadParameter(message) from error
    options.check_output(picture, "PICTURE")
    with options.value_errors(str(results)):
        kernels = read_timeline(results.read_text())
        if kernels is not None:
            draw_timeline(kernels, picture)
        else:
            draw(read_report(results), picture)


def _room_of(op: str) -> Room:
    if op not in ROOMS:
        raise typer.BadParameter(f"no op {op!r} has a bench room; give one of {', '.join(ROOMS)}", param_hint="'OP'")
    return ROOMS[op]
