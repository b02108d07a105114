"""`vk bench`: ops next to their baselines, against the machine's ceilings, and their host time."""

import dataclasses
import importlib
from pathlib import Path
from typing import Annotated

import typer

import torch_ops
from csrc_free_ops.configs.candidates import CANDIDATES
from torch_ops._core.files import check_stored
from torch_ops.bench.commands import options
from torch_ops.bench.commands.attention import attention_command
from torch_ops.bench.commands.encoder import encoder, timeline
from torch_ops.bench.commands.generate import generate
from torch_ops.bench.commands.handover import handover
from torch_ops.bench.commands.options import flag, say
from torch_ops.bench.commands.run import run_command, show
from torch_ops.bench.commands.versions import versions_command
from torch_ops.bench.encoder.timeline import read_timeline
from torch_ops.bench.measure import tune as tuning
from torch_ops.bench.measure.host import host_times
from torch_ops.bench.measure.machine import measure_ceilings, provenance
from torch_ops.bench.measure.opbench import OpBench, split
from torch_ops.bench.measure.profile import profile_case
from torch_ops.bench.measure.results import Report, read_report
from torch_ops.bench.measure.run import Setup
from torch_ops.bench.show.tables import markdown
from torch_ops.command.errors import OneLineErrors, on_lines
from torch_ops.settings import default_rows

_MODULES = (
    "window_attn", "attention", "attention_decode", "segment_attention", "rope_window_attn", "vision_attention",
    "norms", "qkv_rope", "mlp", "patch_merger", "rotary_table", "pos_embed_interpolate", "spatial_merge",
    "kv_cache_append",
)  # fmt: skip
_FOUND = [importlib.import_module(f"torch_ops.bench.rooms.{name}") for name in _MODULES]
BENCHES: dict[str, OpBench] = {
    each.op: each for found in _FOUND for each in (vars(found).get("BENCHES") or (found.BENCH,))
}
# Ops that are also measured one after the other, into one document.
FAMILIES = {
    "norms": ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"),
    "grids": ("rotary_table", "pos_embed_interpolate", "spatial_merge"),
}

app = typer.Typer(
    cls=OneLineErrors, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_show_locals=False
)

OpName = Annotated[str, typer.Argument(metavar="OP", help=f"Op: {', '.join(BENCHES)}.")]


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Time ops next to their baselines, profile them, and make tables of the results.

    Tables go to stdout, progress to stderr. The exit code is 1 where ours broke the tolerance rule.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# Dense attention has a command of its own, which knows shapes by flags.
app.command("attention")(attention_command(BENCHES))
for _op in (op for op in BENCHES if op != "attention"):
    app.command(_op)(run_command(BENCHES, _op, (_op,)))
for _family, _ops in FAMILIES.items():
    app.command(_family)(run_command(BENCHES, _family, _ops))

app.command("encoder")(encoder)
app.command("generate")(generate)
app.command("timeline")(timeline)
app.command("handover")(handover)
app.command("versions")(versions_command(BENCHES))


@app.command()
def tune(
    op: OpName,
    shapes: options.Shapes = None,
    backward: options.Backward = False,
    dtype: options.DtypeName = None,
    device: options.DeviceName = None,
    path: options.PathName = None,
    kernels: Annotated[
        list[str] | None, flag("--kernels", "Kernels by name, separated by commas (default: all).", metavar="NAME")
    ] = None,
    rounds: options.Rounds = 4,
    cold: options.Cold = False,
    out: Annotated[Path | None, options.file("--out", "File of rows (default: the user's, used from then on).")] = None,
    commit: options.Commit = None,
) -> None:
    """Find the fastest launch of each kernel here, and write rows that calls then take.

    Every candidate is held against the fp64 reference first; one that spills registers is out. A run that was
    broken off goes on from what its file holds. Rows reach from one measured length half-way to the next, so give
    short and long shapes. Without --path every path of this GPU is tuned. Ops never search at run time: a search would
    hold up the first call and could end differently each time.
    """
    bench = _bench_of(op)
    where = options.find_device(device)
    setup = Setup(options.find_dtype(dtype, where), where, options.passes(backward), rounds, cold)
    if path is not None:
        options.find_path(path)
    with options.value_errors("--shapes"):
        cases = bench.cases(shapes or (), where)
    rows = out or default_rows()
    with options.value_errors("--out"):
        journal = tuning.Journal.open(rows, tuning.provenance_of(provenance(where, commit, {})))
    wanted = split(kernels or ())
    # Where nobody named kernels it is the device that launches none.
    with options.value_errors("--kernels" if wanted else "--device"):
        points = tuning.find_points(bench, cases, tuning.TUNED_PATHS if path is None else (path,), wanted, setup)
    left = [(point, case) for point, case in points if point.key not in journal.points]
    try:
        journal.write(rows)
    except OSError as error:
        raise options.bad("--out", f"{str(rows)!r} cannot be written: {error.strerror}") from error
    say(f"{len(points)} points, {len(points) - len(left)} of them in {rows} already")
    with options.progress(sum(len(CANDIDATES[point.kernel.name]) for point, _ in left)) as step:
        for point, case in left:
            tried = tuning.search(bench, point, case, setup, step)
            say(f"{point.key}: {tuning.in_words(tried)}")
            if tuning.any_timed(tried):
                origin = journal.provenance
                journal.points[point.key] = tuning.Measured(
                    point.kernel, tuple(tried), origin["date"], origin["commit"]
                )
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
    trace: Annotated[Path | None, options.file("--trace", "File of a Chrome trace, one for each call.")] = None,
    out: options.Out = None,
    show_markdown: options.Markdown = False,
    commit: options.Commit = None,
) -> None:
    """Profile an op: the profiler's table, bytes and FLOPs, memory- or compute-bound.

    Bytes moved count each input read once and each output written once. A call is memory-bound where its FLOPs per
    byte are fewer than the measured matmul rate over the measured copy rate. The copy rate of this run replaces the
    data sheet's 3350 GB/s, which kernels do not reach. Cards and drivers differ besides.
    """
    bench = _bench_of(op)
    where = options.find_device(device)
    setup = Setup(options.find_dtype(dtype, where), where, options.passes(backward), rounds)
    changes = options.find_path(path)
    with options.value_errors("--shapes"):
        cases = bench.profiled_cases(shapes or (), where)
    options.check_output(out, "--out")
    options.check_output(trace, "--trace")
    directions = [each for each in setup.directions if each in bench.ours.directions]
    calls = [(case, direction) for case in cases for direction in directions]
    report = Report(provenance(where, commit, {}), measure_ceilings(where, setup.dtype))
    with torch_ops.settings(**changes):
        for case, direction in calls:
            title = f"{bench.op} {direction}, {case.name}, {bench.shape(case)}"
            say(title)
            target = trace
            if trace is not None and len(calls) > 1:
                target = trace.with_name(f"{trace.stem}.{case.name}.{direction}{trace.suffix}")

            def show_table(table: str, title: str = title) -> None:
                if not show_markdown:
                    typer.echo(f"{title}\n{table}")

            profiled = profile_case(bench, case, direction, setup, target, show_table)
            report = dataclasses.replace(report, profiles=(*report.profiles, profiled))
    if out is not None:
        report.write(out)
    show(report, show_markdown)


@app.command()
def host(
    ops: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OP]...", help=f"Ops: {', '.join((*BENCHES, *FAMILIES))} (default: window_attn)."),
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
    benches = [_bench_of(op) for name in ops or ["window_attn"] for op in FAMILIES.get(name, (name,))]
    where = options.find_device(device)
    kind = options.find_dtype(dtype, where)
    changes = options.find_path(path)
    options.check_output(out, "--out")
    report = Report(provenance(where, commit, {}))
    with torch_ops.settings(**changes):
        for bench in benches:
            say(f"host time of {bench.op}")
            times = host_times(bench.op, bench.host_calls(kind, where), where)
            report = dataclasses.replace(report, host=(*report.host, *times))
            if out is not None:
                report.write(out)
    show(report, show_markdown)


@app.command()
def table(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", exists=True, dir_okay=False, help="Files that --out wrote."),
    ],
    short: Annotated[bool, typer.Option("--summary", help="A row per case, every baseline's time over ours.")] = False,
    suite: Annotated[bool, typer.Option("--suite", help="A row per case of vk bench attention.")] = False,
    images: Annotated[bool, typer.Option("--images", help="Attention of single images, by their size.")] = False,
) -> None:
    """Make Markdown tables again from stored results."""
    kind = "images" if images else "summary" if short else "suite" if suite else ""
    for index, file in enumerate(files):
        with options.file_errors(file):
            check_stored(file)
            text = markdown(read_report(file), kind)
        typer.echo("\n" * bool(index) + on_lines(text), nl=False)


@app.command()
def chart(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS.json", exists=True, dir_okay=False, help="File that --out wrote.")
    ],
    picture: Annotated[Path, typer.Argument(metavar="PICTURE", dir_okay=False, help="Picture, such as out.svg.")],
) -> None:
    """Draw stored results, in SVG, PNG or PDF: TFLOP/s case by case, or the kernels of a timeline."""
    try:
        from torch_ops.bench.show.chart import draw, draw_timeline
    except ImportError as error:
        message = f"vk bench chart needs matplotlib: pip install 'vk-ops[bench]' ({error})"
        raise typer.BadParameter(message) from error
    options.check_output(picture, "PICTURE")
    with options.file_errors(results):
        check_stored(results)
        kernels = read_timeline(results.read_text())
        if kernels is not None:
            draw_timeline(kernels, picture)
        else:
            draw(read_report(results), picture)


def _bench_of(op: str) -> OpBench:
    if op not in BENCHES:
        raise typer.BadParameter(f"no op {op!r} has a benchmark; give one of {', '.join(BENCHES)}", param_hint="'OP'")
    return BENCHES[op]
