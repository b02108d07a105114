"""What the tests of the benchmark share: the command, implementations that are wrong, and a report of known figures."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner

from torch_ops.bench.measure.opbench import Call, Impl
from torch_ops.bench.measure.results import (
    BASELINE,
    OK,
    OURS,
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
from torch_ops.bench.rooms.window_attn import BENCH
from torch_ops.command import app as cli
from torch_ops.testing import Report as ToleranceReport
from torch_ops.testing import references

TINY = "1x40x2x16"
CPU = torch.device("cpu")
BOTH = "forward", "backward"
SETUP = Setup(torch.float32, CPU, BOTH, rounds=2)


def bench(*arguments: object) -> Any:
    arguments = ("bench", *arguments)
    if arguments[1] in ("window_attn", "attention", "profile", "host"):
        arguments = (*arguments, "--device", "cpu")
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    result = bench(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = result.stderr
    assert line.startswith("vk: ") and line.count("\n") == 1
    return str(line)


def stand_in(name: str, forward: Any) -> Impl:
    """The reference, of which `forward(q, k, v, out)` makes something else."""

    def bind(case: Any, inputs: Any) -> Call:
        return packed_call(
            inputs, lambda q, k, v: forward(q, k, v, inputs.call(references.window_attn, q=q, k=k, v=v)[0])
        )

    return Impl(name, bind)


def spoiled(name: str, spoil: Any) -> Impl:
    return stand_in(name, lambda q, k, v, out: spoil(out))


class _WrongQueryGradient(torch.autograd.Function):
    """out as it is; of the gradients only that of q is off, as a baseline's has been seen to be."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, Tensor]:
        return torch.full_like(dout, 0.1), None, None, dout


def wrong_dq() -> Impl:
    return stand_in("wrong_dq", _WrongQueryGradient.apply)


def broken() -> Impl:
    def fail(*_: Any) -> Tensor:
        raise RuntimeError("no kernel\nfor this")

    return stand_in("broken", fail)


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
    ours = {"name": "vk", "group": OURS, "rounds_ms": (0.25, 0.2, 0.21), "timer": "graph"}
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
        case="one", shape="1x40x2x72", direction="forward", name="vk", group=OURS, status=OK, timer="graph",
        flops=4 * 10**9, bytes_moved=10**8, rounds_ms=(0.05, 0.04, 0.05), **what,
    )  # fmt: skip
    host = (
        HostTime("window_attn", "raw", 10.0, raw=True),
        HostTime("window_attn", "op", 17.5, target=1.8),
        HostTime("window_attn", "launcher", None, note="not here"),
    )
    origin = Provenance(
        date="2030-01-02T03:04:05+00:00", commit="abc", command="vk bench window_attn",
        device="NVIDIA H200", driver="580.1", versions={"torch": "2.11.0", "triton": "3.6.0"},
        baselines={"cudnn": "cuDNN 9", "flash4": "FlashAttention-4"},
    )  # fmt: skip
    return Report(origin, Ceilings(4000.0, 800.0, "bfloat16"), records, (profile,), host)
