"""`vk bench handover`: which calls PyTorch's own attention kernels compute faster, as rows for `torch_ops.compat`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import torch

import torch_ops
from csrc_free_ops.configs.handover import hand_over_document, hand_over_file
from torch_ops.bench.commands import options
from torch_ops.bench.commands.options import bad, flag, say
from torch_ops.bench.commands.run import exit_if_wrong
from torch_ops.bench.measure.handover import (
    IMPLS,
    build_kernels,
    handover_bench,
    handover_cases,
    in_words,
    provenance_of,
    rows_of,
)
from torch_ops.bench.measure.machine import dtype_name, provenance
from torch_ops.bench.measure.opbench import split
from torch_ops.bench.measure.results import Report, read_report, replace_text
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.testing.cases import DenseCase

HALVES = "bfloat16", "float16"


def handover(
    head_dims: Annotated[
        list[str] | None, flag("--head-dims", "Head dims: 64,128 or 16:256:8 (default: 16:256:8).", metavar="DIM")
    ] = None,
    lengths: Annotated[
        list[str] | None, flag("--lengths", "Rows of queries and keys (default: 512,2048,8192).", metavar="ROWS")
    ] = None,
    dtype: Annotated[
        list[str] | None, flag("--dtype", "Types of the inputs (default: both).", metavar="|".join(HALVES))
    ] = None,
    heads: Annotated[int, flag("--heads", "Heads.", min=1)] = 16,
    tokens: Annotated[int, flag("--tokens", "Rows of a batch, of one sequence at least.", min=1)] = 8192,
    rounds: Annotated[int, flag("--rounds", "Timed turns of every implementation, at least.", min=2)] = 8,
    jobs: Annotated[int, flag("--jobs", "Processes that build our kernels first, 0 for none.", min=0)] = 8,
    device: options.DeviceName = None,
    rows_file: Annotated[Path | None, options.file("--rows-out", "File of hand-over rows (default: none).")] = None,
    out: options.Out = None,
    commit: options.Commit = None,
) -> None:
    """Time PyTorch's cuDNN and flash kernels next to dense attention of ours, forward and backward, causal and not.

    A row enters where a kernel takes 3 % less time at a length and at all longer ones, and passes the tolerance rule.
    Rows of direction "training" compare forward and backward together with ours in any order of sums. The rows of a GPU
    belong into csrc_free_ops/configs/. Files are written after every case, and a run that was broken off goes on from
    what --out holds. Remove that file to measure again.
    """
    where = options.find_device(device)
    with options.value_errors("--head-dims"):
        dims = _numbers(head_dims or ["16:256:8"])
    if not all(8 <= dim <= 256 and dim % 8 == 0 for dim in dims):
        raise bad("--head-dims", f"{dims} are no multiples of 8 from 8 to 256")
    with options.value_errors("--lengths"):
        rows_of_cases = _numbers(lengths or ["512,2048,8192"])
    names = split(dtype or HALVES)
    if unknown := [name for name in names if name not in HALVES]:
        raise bad("--dtype", f"{', '.join(unknown)}: PyTorch's kernels take {' and '.join(HALVES)} alone")
    for path, option in ((out, "--out"), (rows_file, "--rows-out")):
        options.check_output(path, option)
    dtypes = [options.find_dtype(name, where) for name in names]
    cases = handover_cases(dims, rows_of_cases, heads, tokens)
    report = Report(provenance(where, commit, {impl.name: impl.about for impl in IMPLS[1:]}))
    if out is not None and out.exists():
        report = _resumed(out, report)
    done = {(one.case, one.dtype) for one in report.records}
    left = [(each, case) for each in dtypes for case in cases if (case.name, dtype_name(each)) not in done]
    say(f"{len(dtypes) * len(cases)} cases, {len(left)} left; rows are for {hand_over_file(report.provenance.device)}")
    with torch_ops.settings(path="auto", hand_over=False):
        if jobs and where.type == "cuda" and left:
            build_kernels([case for _, case in left], list({each: None for each, _ in left}), jobs)
        report = _measure(left, report, rounds, where, out, rows_file, rows_of_cases)
    found = rows_of(report.records, rows_of_cases)
    say(f"{len(found)} rows" + (f" in {rows_file}" if rows_file else "; --rows-out writes them"))
    exit_if_wrong(report)


def _measure(
    left: list[tuple[torch.dtype, DenseCase]], report: Report, rounds: int, where: torch.device, out: Path | None,
    rows_file: Path | None, lengths: list[int],
) -> Report:  # fmt: skip
    bench = handover_bench()
    for index, (dtype, case) in enumerate(left, 1):
        # Three turns before the timed ones; a sample is one replay, so that a case takes half a second.
        setup = Setup(dtype, where, ("forward", "backward"), rounds, warm_up=3)
        records = run_case(bench, case, IMPLS, setup)
        if where.type == "cuda":
            torch.cuda.empty_cache()
        report = dataclasses.replace(report, records=(*report.records, *records))
        say(f"{index}/{len(left)} {dtype_name(dtype)} {bench.shape(case)}: {in_words(records)}")
        if out is not None:
            report.write(out)
        if rows_file is not None:
            origin = provenance_of(report.provenance)
            replace_text(rows_file, hand_over_document(rows_of(report.records, lengths), origin))
    return report


def _resumed(out: Path, report: Report) -> Report:
    with options.file_errors(out):
        before = read_report(out)
    for name in ("device", "versions"):
        there, here = getattr(before.provenance, name), getattr(report.provenance, name)
        if there != here:
            raise bad("--out", f"{str(out)!r} was measured with {name} {there}, and this is {here}; give another file")
    return before


def _numbers(texts: list[str]) -> list[int]:
    """Return the numbers of texts such as "64,128" or "16:256:8"; ValueError names another one."""
    found: dict[int, None] = {}
    for text in split(texts):
        parts = [int(part) for part in text.split(":")]
        if len(parts) not in (1, 3) or min(parts) < 1:
            raise ValueError(f"{text!r} is neither a number nor FIRST:LAST:STEP")
        found |= dict.fromkeys(range(parts[0], parts[1] + 1, parts[2]) if len(parts) == 3 else parts)
    return list(found)
