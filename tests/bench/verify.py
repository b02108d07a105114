"""What the tests of the benchmark share: the command, contenders that are wrong, and a report of known figures."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner

from torch_ops.bench.measure import contest
from torch_ops.bench.measure.contest import Terms
from torch_ops.bench.measure.results import (
    OK,
    UNAVAILABLE,
    WRONG,
    Ceilings,
    HostTime,
    Measurement,
    Profile,
    Provenance,
    Report,
    Timed,
)
from torch_ops.bench.measure.room import Call, Contender
from torch_ops.bench.peers.packed import packed_call
from torch_ops.bench.rooms.packed_cases import find_cases
from torch_ops.bench.rooms.window_attn import ROOM
from torch_ops.command import app as cli
from torch_ops.testing import Report as GateReport
from torch_ops.testing import references

TINY = "1x40x2x16"
CPU = torch.device("cpu")
TERMS = Terms(torch.float32, CPU, backward=True, rounds=2, cold=False)


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


def spoiled(name: str, spoil: Any) -> Contender:
    """The reference, with its output put through `spoil`."""

    def bind(case: Any, inputs: Any) -> Call:
        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return spoil(inputs.call(references.window_attn, q=q, k=k, v=v)[0])

        return packed_call(inputs, forward)

    return Contender(name, bind, lambda case, dtype, device: "", lambda: "spoiled")


class _WrongQueryGradient(torch.autograd.Function):
    """out as it is; of the gradients only that of q is off, as a peer's has been seen to be."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, Tensor]:
        return torch.full_like(dout, 0.1), None, None, dout


def wrong_dq() -> Contender:
    def bind(case: Any, inputs: Any) -> Call:
        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = inputs.call(references.window_attn, q=q, k=k, v=v)[0]
            return _WrongQueryGradient.apply(q, k, v, out)

        return packed_call(inputs, forward)

    return Contender("wrong_dq", bind, lambda case, dtype, device: "", lambda: "wrong dq")


def broken() -> Contender:
    def bind(case: Any, inputs: Any) -> Call:
        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise RuntimeError("no kernel\nfor this")

        return packed_call(inputs, forward)

    return Contender("broken", bind, lambda case, dtype, device: "", lambda: "broken")


def measured(*contenders: Contender, shape: str = TINY) -> list[Measurement]:
    (case,) = find_cases([shape])
    return contest.contest(ROOM, case, contenders, TERMS)


def golden_report() -> Report:
    rule = GateReport("dq (1x40x2x72)", 1.3, 0.02, 0.4, 0.01)
    ours = Timed("vk", OK, rounds_ms=(0.25, 0.2, 0.21), timer="graph", peak_bytes=3 * 2**20)
    fast = Timed("flash4", WRONG, str(rule), (0.1, 0.1, 0.1), "graph", 2**21, (rule,))
    slow = Timed("cudnn", OK, rounds_ms=(0.42, 0.44, 0.41), timer="graph", peak_bytes=2**22)
    absent = Timed("cudnn", UNAVAILABLE, "takes batches of equal segments only")
    events = dataclasses.replace(slow, name="flash4", timer="events")
    what = {"op": "window_attn", "dtype": "bfloat16", "path": "portable"}
    rest = {**what, "direction": "backward", "cache": "warm", "flops": 42 * 10**9, "bytes_moved": 1}
    wrong = Timed("vk", WRONG, "off", (0.25, 0.2, 0.21), "graph", 2**20)
    one = Measurement(case="one", shape="1x40x2x72", ours=ours, peers=(slow, fast), **rest)
    two = Measurement(case="two", shape="40+8x2x72", ours=ours, peers=(absent, events), **rest)
    bad = Measurement(case="bad", shape="1x8x2x72", ours=wrong, peers=(slow, fast), **rest)
    profile = Profile(
        case="one", shape="1x40x2x72", direction="forward", timer="graph", flops=4 * 10**9,
        bytes_moved=10**8, rounds_ms=(0.05, 0.04, 0.05), **what,
    )  # fmt: skip
    host = (
        HostTime("window_attn", "raw", 10.0, raw=True),
        HostTime("window_attn", "op", 17.5, target=1.8),
        HostTime("window_attn", "launcher", None, note="not here"),
    )
    origin = Provenance(
        date="2030-01-02T03:04:05+00:00", commit="abc", command="vk bench window_attn",
        device="NVIDIA H200", driver="580.1", versions={"torch": "2.11.0", "triton": "3.6.0"},
        peers={"cudnn": "cuDNN 9", "flash4": "FlashAttention-4"},
    )  # fmt: skip
    return Report(origin, Ceilings(4000.0, 800.0, "bfloat16"), (one, two, bad), (profile,), host)
