"""The commands that time ops next to their baselines: `vk bench <op>`, and `vk bench <family>` for several at once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer

import torch_ops
from torch_ops._core.device import out_of_memory
from torch_ops.bench.commands import options
from torch_ops.bench.commands.options import say
from torch_ops.bench.measure.machine import dtype_name, measure_ceilings, provenance
from torch_ops.bench.measure.opbench import Impl, OpBench
from torch_ops.bench.measure.results import FAILED, OURS, UNAVAILABLE, VK, WRONG, Provenance, Record, Report
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.bench.show.tables import markdown, print_tables


@dataclass(frozen=True)
class Run:
    """One case of an op: its implementations, ours first, and the setup."""

    bench: OpBench
    case: Any
    impls: tuple[Impl, ...]
    setup: Setup


@dataclass(frozen=True)
class Output:
    """Where results go, and the option to name where a case does not fit into memory."""

    out: Path | None
    commit: str | None
    asked_by: str = "--shapes"


def run_command(benches: Mapping[str, OpBench], name: str, ops: Sequence[str]) -> Callable[..., None]:
    """The command of these ops, whose benchmarks are looked up when it runs."""

    def command(
        shapes: options.Shapes = None,
        backward: options.Backward = False,
        dtype: options.DtypeName = None,
        device: options.DeviceName = None,
        path: options.PathName = None,
        peers: options.BaselineNames = None,
        rounds: options.Rounds = 4,
        cold: options.Cold = False,
        out: options.Out = None,
        show_markdown: options.Markdown = False,
        commit: options.Commit = None,
    ) -> None:
        where = options.find_device(device)
        setup = Setup(options.find_dtype(dtype, where), where, options.passes(backward), rounds, cold)
        runs: list[Run] = []
        for bench in (benches[op] for op in ops):
            impls = bench.ours, *options.find_baselines(bench, peers or (), where)
            own = dataclasses.replace(setup, directions=bench.timed) if backward else setup
            with options.value_errors("--shapes"):
                runs += (Run(bench, case, impls, own) for case in bench.cases(shapes or (), where))
        changes = options.find_path(path)
        options.check_output(out, "--out")
        with torch_ops.settings(**changes):
            report = run_all(runs, setup, Output(out, commit))
        show(report, show_markdown)
        exit_if_wrong(report)

    names = ", ".join(dict.fromkeys(baseline.name for op in ops for baseline in benches[op].baselines))
    what = benches[name].ours.about if name in benches else ", ".join(ops)
    command.__doc__ = f"""Time {what} next to the baselines, {names}.

    The correctness check comes first: on each case every implementation is held against the fp64 reference by the
    tolerance rule, forward and, with --backward, every gradient. What is wrong is marked and never counts as the best
    baseline. Then every implementation is timed in every round, in balanced order. Peak memory is what one call asks
    for, its results included. Nothing is autotuned at run time, because a search would hold up the first call and
    could end differently each time; launches come from rows that `vk bench tune` measured, or from a rule.
    """
    return command


def show(report: Report, as_markdown: bool, kind: str = "") -> None:
    if as_markdown:
        typer.echo(markdown(report, kind), nl=False)
    else:
        print_tables(report, kind)


def about(runs: Sequence[Run]) -> dict[str, str]:
    """Each baseline by name; what it is for one op and for another, where that differs."""
    found: dict[str, dict[str, None]] = {}
    for each in (each for run in runs for each in run.impls[1:]):
        found.setdefault(each.name, {})[each.about] = None
    return {name: "; ".join(abouts) for name, abouts in found.items()}


def with_ceilings(origin: Provenance, setup: Setup) -> Report:
    say(f"measuring the copy and {dtype_name(setup.dtype)} matmul rates of {origin.device}")
    return Report(origin, measure_ceilings(setup.device, setup.dtype))


def run_all(runs: Sequence[Run], setup: Setup, output: Output, report: Report | None = None) -> Report:
    """All runs, written after each; records of `report` stay, but for those of the cases that run again."""
    if report is None:
        report = with_ceilings(provenance(setup.device, output.commit, about(runs)), setup)
    steps = sum(run.setup.steps(len(run.impls)) for run in runs)
    with options.progress(steps) as step:
        for bench, case, impls, own in (vars(run).values() for run in runs):
            say(f"{bench.op} {case.name} {bench.shape(case)}" + f" {own.kind}" * (own.kind != setup.kind))

            def on_step(doing: str, name: str = case.name) -> None:
                step(f"{name}: {doing}")

            try:
                records = run_case(bench, case, impls, own, on_step)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                message = f"{case.name} does not fit into the memory of {report.provenance.device}; give a smaller case"
                raise options.bad(output.asked_by, message) from error
            again = {_key(one) for one in records}
            kept = (one for one in report.records if _key(one) not in again)
            report = dataclasses.replace(report, records=(*kept, *records))
            if output.out is not None:
                report.write(output.out)
            if setup.device.type == "cuda":
                torch.cuda.empty_cache()
    return report


def _key(one: Record) -> tuple[str, ...]:
    # When an encoder's batch runs again with another dtype or path, its former records go.
    return (one.op, one.case, one.direction) if one.op == "encoder" else (one.op, one.case, one.direction, one.dtype)


def exit_if_wrong(report: Report) -> None:
    bad = [one for one in report.records if one.group == OURS and one.status in (WRONG, FAILED)]
    bad += [one for one in report.records if one.name == VK and one.status == UNAVAILABLE]
    for one in bad:
        what = "is wrong" if one.status == WRONG else one.status
        say(f"vk: {one.op} {what} on {one.case}, {one.direction}, {one.name}: {one.note}")
    if bad:
        raise typer.Exit(1)
