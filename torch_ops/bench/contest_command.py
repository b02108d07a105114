"""The commands that time ops next to their peers: `vk bench <op>`, and `vk bench <family>` for several at once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

import torch_ops
from torch_ops._device import out_of_memory
from torch_ops.bench import options
from torch_ops.bench.contest import Terms, contest
from torch_ops.bench.machine import dtype_name, measure_ceilings, provenance
from torch_ops.bench.options import say
from torch_ops.bench.results import OK, WRONG, Measurement, Report
from torch_ops.bench.room import Contender, Room
from torch_ops.bench.tables import markdown, print_tables

# A room with what is to be run in it: cases, ours, the peers.
Entry = tuple[Room, tuple[Any, ...], tuple[Contender, ...]]


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
        entries: list[Entry] = []
        for room in (rooms[op] for op in ops):
            rivals = options.find_peers(room, peers or (), where)
            with options.value_errors("--shapes"):
                entries.append((room, room.cases(shapes or (), where), (room.ours, *rivals)))
        changes = options.find_path(path)
        options.check_output(out, "--out")
        with torch_ops.settings(**changes):
            report = _contests(entries, terms, out, commit)
        show(report, show_markdown)
        _exit_if_wrong(report.measurements)

    peer_names = ", ".join(dict.fromkeys(peer.name for op in ops for peer in rooms[op].peers))
    what = rooms[name].ours.about() if name in rooms else ", ".join(ops)
    command.__doc__ = f"""Time {what} next to the peers, {peer_names}.

    First the gate: on each case every contender is held against the fp64 reference by the tolerance
    rule, forward and, with --backward, every gradient; what is wrong is marked and never counts as
    the best peer. Then every contender is timed in every round, in balanced order. Peak memory is
    what one call asks for, its results included.
    """
    return command


def show(report: Report, as_markdown: bool) -> None:
    if as_markdown:
        typer.echo(markdown(report), nl=False)
    else:
        print_tables(report)


def _about(entries: Sequence[Entry]) -> dict[str, str]:
    """Each peer by name; what it is in one room and in another, where that differs."""
    found: dict[str, dict[str, None]] = {}
    for _, _, (_, *rivals) in entries:
        for rival in rivals:
            found.setdefault(rival.name, {})[rival.about()] = None
    return {name: "; ".join(abouts) for name, abouts in found.items()}


def _contests(entries: Sequence[Entry], terms: Terms, out: Path | None, commit: str | None) -> Report:
    report = Report(provenance(terms.device, commit, _about(entries)))
    say(f"measuring the copy and {dtype_name(terms.dtype)} matmul rates of {report.provenance.device}")
    report = dataclasses.replace(report, ceilings=measure_ceilings(terms.device, terms.dtype))
    steps = sum(len(cases) * terms.steps(len(contenders)) for _, cases, contenders in entries)
    with options.progress(steps) as step:
        for room, case, contenders in ((room, case, running) for room, cases, running in entries for case in cases):
            say(f"{room.op} {case.name} {room.shape(case)}")

            def on_step(doing: str, name: str = case.name) -> None:
                step(f"{name}: {doing}")

            try:
                measured = contest(room, case, contenders, terms, on_step)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                message = f"{case.name} does not fit into the memory of {report.provenance.device}"
                raise options.bad("--shapes", message) from error
            report = dataclasses.replace(report, measurements=(*report.measurements, *measured))
            if out is not None:
                report.write(out)
    return report


def _exit_if_wrong(measurements: tuple[Measurement, ...]) -> None:
    bad = [one for one in measurements if one.ours.status != OK]
    for one in bad:
        what = "is wrong" if one.ours.status == WRONG else one.ours.status
        say(f"vk: {one.op} {what} on {one.case}, {one.direction}: {one.ours.note}")
    if bad:
        raise typer.Exit(1)
