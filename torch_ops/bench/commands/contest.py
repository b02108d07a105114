"""The commands that time ops next to their peers: `vk bench <op>`, and `vk bench <family>` for several at once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import torch_ops
from torch_ops._core.device import out_of_memory
from torch_ops.bench.commands import options
from torch_ops.bench.commands.options import say
from torch_ops.bench.measure.contest import Terms, contest
from torch_ops.bench.measure.machine import dtype_name, measure_ceilings, provenance
from torch_ops.bench.measure.results import OK, WRONG, Measurement, Report
from torch_ops.bench.measure.room import Contender, Room
from torch_ops.bench.show.cells import Table
from torch_ops.bench.show.tables import markdown, print_tables, tables


@dataclass(frozen=True)
class Run:
    """One case of a room: who takes part, ours first, and on what terms."""

    room: Room
    case: Any
    contenders: tuple[Contender, ...]
    terms: Terms


def contest_command(rooms: Mapping[str, Room], name: str, ops: Sequence[str]) -> Callable[..., None]:
    """The command of these ops, whose rooms are looked up when it runs."""

    def command(
        shapes: options.Shapes = None,
        backward: options.Backward = False,
        dtype: options.DtypeName = None,
        device: options.DeviceName = None,
        path: options.PathName = None,
        peers: options.PeerNames = None,
        rounds: options.Rounds = 4,
        cold: options.Cold = False,
        out: options.Out = None,
        show_markdown: options.Markdown = False,
        commit: options.Commit = None,
    ) -> None:
        where = options.find_device(device)
        terms = Terms(options.find_dtype(dtype, where), where, backward, rounds, cold)
        runs: list[Run] = []
        for room in (rooms[op] for op in ops):
            contenders = room.ours, *options.find_peers(room, peers or (), where)
            with options.value_errors("--shapes"):
                runs += (Run(room, case, contenders, terms) for case in room.cases(shapes or (), where))
        changes = options.find_path(path)
        options.check_output(out, "--out")
        with torch_ops.settings(**changes):
            report = contests(runs, terms, out, commit)
        show(report, show_markdown)
        exit_if_wrong(report.measurements)

    peer_names = ", ".join(dict.fromkeys(peer.name for op in ops for peer in rooms[op].peers))
    what = rooms[name].ours.about() if name in rooms else ", ".join(ops)
    command.__doc__ = f"""Time {what} next to the peers, {peer_names}.

    First the gate: on each case every contender is held against the fp64 reference by the tolerance
    rule, forward and, with --backward, every gradient; what is wrong is marked and never counts as
    the best peer. Then every contender is timed in every round, in balanced order. Peak memory is
    what one call asks for, its results included.
    """
    return command


def show(report: Report, as_markdown: bool, tables_of: Callable[[Report], list[Table]] = tables) -> None:
    if as_markdown:
        typer.echo(markdown(report, tables_of), nl=False)
    else:
        print_tables(report, tables_of)


def _about(runs: Sequence[Run]) -> dict[str, str]:
    """Each peer by name; what it is in one room and in another, where that differs."""
    found: dict[str, dict[str, None]] = {}
    for rival in (rival for run in runs for rival in run.contenders[1:]):
        found.setdefault(rival.name, {})[rival.about()] = None
    return {name: "; ".join(abouts) for name, abouts in found.items()}


def contests(
    runs: Sequence[Run], terms: Terms, out: Path | None, commit: str | None, option: str = "--shapes"
) -> Report:
    """All runs, written to `out` after each; `terms` are those of the ceilings, `option` is what asked for cases."""
    report = Report(provenance(terms.device, commit, _about(runs)))
    say(f"measuring the copy and {dtype_name(terms.dtype)} matmul rates of {report.provenance.device}")
    report = dataclasses.replace(report, ceilings=measure_ceilings(terms.device, terms.dtype))
    steps = sum(run.terms.steps(len(run.contenders)) for run in runs)
    with options.progress(steps) as step:
        for room, case, contenders, own_terms in (vars(run).values() for run in runs):
            say(f"{room.op} {case.name} {room.shape(case)}" + f" {own_terms.kind}" * (own_terms.kind != terms.kind))

            def on_step(doing: str, name: str = case.name) -> None:
                step(f"{name}: {doing}")

            try:
                measured = contest(room, case, contenders, own_terms, on_step)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                message = f"{case.name} does not fit into the memory of {report.provenance.device}"
                raise options.bad(option, message) from error
            report = dataclasses.replace(report, measurements=(*report.measurements, *measured))
            if out is not None:
                report.write(out)
    return report


def exit_if_wrong(measurements: tuple[Measurement, ...]) -> None:
    bad = [one for one in measurements if one.ours.status != OK]
    for one in bad:
        what = "is wrong" if one.ours.status == WRONG else one.ours.status
        say(f"vk: {one.op} {what} on {one.case}, {one.direction}: {one.ours.note}")
    if bad:
        raise typer.Exit(1)
