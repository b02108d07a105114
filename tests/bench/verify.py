"""Shared by the tests of the benchmark: the command, implementations that are wrong, and a report of known figures."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from torch_ops.bench.app import BENCHES, FAMILIES
from torch_ops.bench.measure.opbench import Call, Impl
from torch_ops.bench.measure.results import (
    BASELINE,
    OK,
    UNAVAILABLE,
    WRONG,
    Ceilings,
    Group,
    HostTime,
    Provenance,
    Record,
    Report,
    grouped,
)
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.bench.peers.packed import packed_call
from torch_ops.bench.rooms.packed_cases import find_cases
from torch_ops.bench.rooms.window_attn import BENCH, OURS
from torch_ops.command import app as cli
from torch_ops.testing import Report as ToleranceReport
from torch_ops.testing import references

ROOT = Path(__file__).resolve().parents[2]
TINY = "1x40x2x16"
CPU = torch.device("cpu")
BOTH = "forward", "backward"
SETUP = Setup(torch.float32, CPU, BOTH, rounds=2)


def bench(*arguments: object) -> Any:
    arguments = ("bench", *arguments)
    if arguments[1] in (*BENCHES, *FAMILIES, "profile", "host"):
        arguments = (*arguments, "--device", "cpu")
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    result = bench(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = result.stderr
    assert line.startswith("vk: ") and line.count("\n") == 1
    return str(line)


def bench_lines(target: str) -> list[list[str]]:
    """Arguments of each `vk bench` that a target of the Makefile runs."""
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    # Without the arguments of a make that runs these tests.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "ARGS"}
    made = subprocess.run(
        ["make", "-n", target], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True, env=environment
    ).stdout
    lines = (line.partition(" -m torch_ops.bench ") for line in made.splitlines())
    return [shlex.split(rest) for _, is_bench, rest in lines if is_bench]


def anywhere(*impls: Impl) -> list[Impl]:
    """These implementations, which refuse nothing."""
    return [replace(impl, refuses=lambda case, dtype, device: "") for impl in impls]


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, None]:
    heads_first = (each.transpose(1, 2) for each in (q, k, v))
    return references.attention(*heads_first, causal=causal)[0].transpose(1, 2).contiguous(), None


def _flash_attn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
    return references.window_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal)


# The reference in the place of FlashAttention-4's package.
FLASH4 = SimpleNamespace(flash_attn_func=_flash_attn, flash_attn_varlen_func=_flash_attn_varlen)


def spoiled(name: str, spoil: Any) -> Impl:
    """The reference, whose result `spoil` changes."""

    def bind(case: Any, inputs: Any) -> Call:
        return packed_call(inputs, lambda q, k, v: spoil(inputs.call(references.window_attn, q=q, k=k, v=v)[0]))

    return Impl(name, bind)


def wrong_dq() -> Impl:
    """Ours, with another gradient of q, as a baseline's was seen to be."""

    def bind(case: Any, inputs: Any) -> Call:
        call = OURS.bind(case, inputs)
        call.inputs["q"].register_hook(lambda dq: torch.full_like(dq, 0.1))
        return call

    return Impl("wrong_dq", bind)


def broken() -> Impl:
    def fail(case: Any, inputs: Any) -> Call:
        raise RuntimeError("no kernel\nfor this")

    return Impl("broken", fail)


def measured(*impls: Impl, shape: str = TINY) -> list[Group]:
    (case,) = find_cases([shape], CPU)
    return by_case(run_case(BENCH, case, impls, SETUP))


def by_case(records: Iterable[Record]) -> list[Group]:
    """A group for each case, direction, dtype and path of an op."""
    key = attrgetter("op", "case", "shape", "direction", "dtype", "path", "cache")
    return list(grouped(records, key).values())


def golden_report() -> Report:
    rule = ToleranceReport("dq (1x40x2x72)", 1.3, 0.02, 0.4, 0.01)
    what = {"op": "window_attn", "dtype": "bfloat16", "path": "portable"}
    backward = {**what, "direction": "backward", "flops": 42 * 10**9, "bytes_moved": 1}
    one, two, bad = (
        {**backward, "case": case, "shape": shape}
        for case, shape in (("one", "1x40x2x72"), ("two", "40+8x2x72"), ("bad", "1x8x2x72"))
    )
    ours = {"name": "vk", "group": "ours", "rounds_ms": (0.25, 0.2, 0.21), "timer": "graph"}
    slow = {"group": BASELINE, "status": OK, "rounds_ms": (0.42, 0.44, 0.41), "timer": "graph", "peak_bytes": 2**22}
    fast = {
        "name": "flash4", "group": BASELINE, "status": WRONG, "note": str(rule), "rounds_ms": (0.1, 0.1, 0.1),
        "timer": "graph", "peak_bytes": 2**21, "reports": (rule,),
    }  # fmt: skip
    records = (
        Record(**one, **ours, status=OK, peak_bytes=3 * 2**20),
        Record(**one, name="cudnn", **slow),
        Record(**one, **fast),
        Record(**two, **ours, status=OK, peak_bytes=3 * 2**20),
        Record(**two, name="cudnn", group=BASELINE, status=UNAVAILABLE, note="takes batches of equal segments only"),
        Record(**two, name="flash4", **{**slow, "timer": "events"}),
        Record(**bad, **ours, status=WRONG, note="off", peak_bytes=2**20),
        Record(**bad, name="cudnn", **slow),
        Record(**bad, **fast),
    )
    profile = Record(
        case="one", shape="1x40x2x72", direction="forward", name="vk", group="ours", status=OK, timer="graph",
        flops=4 * 10**9, bytes_moved=10**8, rounds_ms=(0.05, 0.04, 0.05), **what,
    )  # fmt: skip
    host = (
        HostTime("window_attn", "raw", 10.0, raw=True),
        HostTime("window_attn", "op", 17.5, most_us=20.0),
        HostTime("window_attn", "launcher", None, note="not here"),
    )
    origin = Provenance(
        date="2030-01-02T03:04:05+00:00", commit="abc", command="vk bench window_attn",
        device="NVIDIA H200", driver="580.1", versions={"torch": "2.11.0", "triton": "3.6.0"},
        baselines={"cudnn": "cuDNN 9", "flash4": "FlashAttention-4"},
    )  # fmt: skip
    return Report(origin, Ceilings(4000.0, 800.0, "bfloat16"), records, (profile,), host)
