"""`vk bench encoder`: the whole vision encoder next to its baselines, by wall time of a call; `vk bench timeline`.

Tower L of Qwen3-VL with random weights, forward and a training step. Results are written batch by batch.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import torch
import typer

import torch_ops
from torch_ops.bench.commands import options
from torch_ops.bench.commands.options import flag
from torch_ops.bench.commands.run import Output, Run, exit_if_wrong, run_all, show, with_ceilings
from torch_ops.bench.encoder.impls import GROUPS, IMPLS, UNCAPTURED, encoder_bench, find_impls
from torch_ops.bench.encoder.peers import ATTENTION_IMPLS
from torch_ops.bench.encoder.rows import ROWS, Session, find_rows, make_scene, make_tower
from torch_ops.bench.encoder.timeline import Lane, Timeline, record
from torch_ops.bench.measure.machine import dtype_name, provenance
from torch_ops.bench.measure.opbench import Impl, find_named
from torch_ops.bench.measure.results import Provenance, Report, read_report
from torch_ops.bench.measure.run import MOST_COMPILED, Setup

RowNames = Annotated[
    list[str] | None, flag("--rows", f"Batches of {', '.join(row.name for row in ROWS)} (default: all).", metavar="ROW")
]
ImplNames = Annotated[
    list[str] | None,
    flag("--contenders", "Implementations by name or pattern, such as 'vk*,graph_*', or groups: "
         f"{', '.join(GROUPS)} (default: all).", metavar="NAME"),
]  # fmt: skip
Resume = Annotated[bool, flag("--resume", "Only what --out does not hold yet of this commit, machine, dtype and path.")]
Quick = Annotated[
    bool, flag("--quick", "Two rounds, of ours and of what is assembled unless --contenders names others.")
]
Rounds = Annotated[int, flag("--rounds", "Timed turns in each half, at least.", min=2)]


def encoder(
    rows: RowNames = None,
    names: ImplNames = None,
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

    Every implementation's results, in training every gradient too, are held against an fp64 reference by the tolerance
    rule. Wrong ones are marked and never count as the best. Times are wall times of the user's call after warm-up, all
    in turns in one process. Tables show the first and the second half of the turns apart.
    """
    where = options.find_device(device)
    setup = Setup(options.find_dtype(dtype, where), where, rounds=2 if quick else 2 * rounds, wall=True)
    changes = options.find_path(path)
    with options.value_errors("--rows"):
        chosen = find_rows(rows or (), where)
    with options.value_errors("--contenders"):
        impls = find_impls(names) if names else tuple(one for one in IMPLS if not quick or one.group != UNCAPTURED)
    options.check_output(out, "--out")
    if resume and out is None:
        raise options.bad("--resume", "it needs a file to read; give --out")
    bench = encoder_bench(_session(where, setup.dtype))
    runs = []
    for row in chosen:
        able = tuple(each for each in impls if row.direction in each.directions)
        if not able:
            options.say(f"{row.name}: skipped, since no implementation of --contenders trains")
            continue
        runs.append(Run(bench, row, able, dataclasses.replace(setup, directions=(row.direction,))))
    with torch_ops.settings(**changes):
        origin = provenance(where, commit, _about(impls))
        if resume and out is not None and out.is_file():
            with options.file_errors(out):
                report = _kept(read_report(out), origin)
            runs = [run for run in runs if not _is_done(report, run)]
        else:
            report = with_ceilings(origin, setup)
        report = run_all(runs, setup, Output(out, commit, "--rows"), report)
    show(report, show_markdown)
    exit_if_wrong(report)


def timeline(
    out: Annotated[Path, options.file("--out", "File of the kernels.")],
    row: Annotated[str, flag("--row", "Batch.", metavar="ROW")] = "896",
    lanes: Annotated[str, flag("--lanes", "Implementations by name.")] = "hf_compiled,vk_graph",
    dtype: options.DtypeName = None,
    device: options.DeviceName = None,
    commit: options.Commit = None,
) -> None:
    """Record the kernels of one call of the encoder, ours and a baseline's; vk bench chart draws them."""
    where = options.find_device(device)
    kind = options.find_dtype(dtype, where)
    with options.value_errors("--row"):
        (chosen,) = find_rows([row], where)
    with options.value_errors("--lanes"):
        impls = find_named(IMPLS, [lanes])
    options.check_output(out, "--out")
    if where.type != "cuda":
        raise options.bad("--device", "a timeline needs a GPU; give cuda")
    scene = make_scene(_session(where, kind), chosen)
    made = []
    with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED), torch.no_grad():
        for impl in impls:
            options.say(f"recording {impl.name}")
            if reason := impl.refuses(chosen, kind, where):
                raise options.bad("--lanes", f"{impl.name} {reason}; give another")
            made.append(Lane(impl.name, impl.about, record(impl.bind(chosen, scene).work("forward", where))))
    Timeline(provenance(where, commit, _about(impls)), chosen.name, tuple(made)).write(out)


def _about(impls: tuple[Impl, ...]) -> dict[str, str]:
    return {impl.name: impl.about for impl in impls} | _kernels(impls)


def _kernels(impls: tuple[Impl, ...]) -> dict[str, str]:
    named = ATTENTION_IMPLS.items()
    return {name: kernels.about for name, kernels in named if any(name in each.name for each in impls)}


def _kept(report: Report, origin: Provenance) -> Report:
    """The records of another run, if it was one of this code and machine."""
    for name in ("commit", "device", "versions"):
        theirs, ours = getattr(report.provenance, name), getattr(origin, name)
        if theirs != ours:
            raise ValueError(f"it holds rows of another {name}, {theirs}, where this run has {ours}; give another file")
    about = {**report.provenance.baselines, **origin.baselines}
    return dataclasses.replace(report, provenance=dataclasses.replace(report.provenance, baselines=about))


def _is_done(report: Report, run: Run) -> bool:
    """Whether the report holds what would be measured now."""
    there = [one for one in report.records if (one.case, one.direction) == (run.case.name, run.case.direction)]
    kind = dtype_name(run.setup.dtype), run.bench.path(run.bench.inputs(run.case, run.setup.dtype, run.setup.device, 0))
    same = all((one.dtype, one.path) == kind for one in there)
    enough = max((len(one.rounds_ms) for one in there), default=0) >= min(run.setup.rounds, 4)
    done = bool(there) and same and enough and {each.name for each in run.impls} <= {one.name for one in there}
    if there:
        options.say(f"{run.case.name}: " + ("kept" if done else "measured anew"))
    return done


def _session(device: torch.device, dtype: torch.dtype) -> Session:
    if device.type != "cuda":
        options.say("on the CPU the tower is not L, but has two narrow layers")
    try:
        return Session(make_tower(device, dtype))
    except ImportError as error:
        message = f"vk bench encoder needs transformers: pip install 'vk-ops[transformers]' ({error})"
        raise typer.BadParameter(message) from error
