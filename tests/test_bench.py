"""The benchmark application: the gate, the interleaving, the figures, the command."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from csrc_free_ops.configs import Gpu
from torch_ops import _attention, _attention_portable, _attention_short, cli
from torch_ops.bench import (
    attention_peers,
    contest,
    contest_command,
    documents,
    gate,
    machine,
    results,
    timing,
    window_attn,
)
from torch_ops.bench.app import ROOMS
from torch_ops.bench.attention_peers import REFERENCE, packed_call
from torch_ops.bench.contest import Terms
from torch_ops.bench.host import recorded_launches
from torch_ops.bench.packed_cases import find_cases, longest_within, notation, shorten
from torch_ops.bench.results import (
    FAILED,
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
from torch_ops.bench.room import Call, Contender
from torch_ops.bench.tables import markdown
from torch_ops.bench.window_attn import OURS, OURS_FREE, ROOM
from torch_ops.testing import Report as GateReport
from torch_ops.testing import references
from torch_ops.testing.cases import WINDOW_ATTN, cumulative, make_inputs

pytestmark = pytest.mark.no_interpret

ROOT = Path(__file__).resolve().parent.parent
TINY = "1x40x2x16"
CPU = torch.device("cpu")
TERMS = Terms(torch.float32, CPU, backward=True, rounds=2, cold=False)


@pytest.fixture(autouse=True)
def quick_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_ROUND_MS", 0.5)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def bench(*arguments: object) -> Any:
    arguments = ("bench", *arguments)
    if arguments[1] in ("window_attn", "profile", "host"):
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


# The gate.


def test_gate_passes_what_is_right() -> None:
    for one in measured(OURS, REFERENCE):
        assert one.ours.status == OK and one.peers[0].status == OK
        assert one.best_peer is one.peers[0]
        assert one.ratio is not None and one.ratio > 0
        names = ["out"] if one.direction == "forward" else ["dq", "dk", "dv"]
        assert [report.name.split()[0] for report in one.ours.gate] == names
        assert all(report.passed for report in one.ours.gate)


@pytest.mark.parametrize(
    "spoil",
    [lambda out: out * 1.01, lambda out: out + 0.01, lambda out: out.roll(1, 0)],
    ids=["scaled", "shifted", "rolled"],
)
def test_wrong_contender_is_never_best(spoil: Any) -> None:
    forward, _ = measured(OURS, spoiled("liar", spoil), REFERENCE)
    liar, reference = forward.peers
    assert liar.status == WRONG and "outside the rule" in liar.note
    assert len(liar.rounds_ms) == TERMS.rounds, "what is wrong is timed all the same"
    fast = dataclasses.replace(liar, rounds_ms=(1e-9, 1e-9))
    assert dataclasses.replace(forward, peers=(fast, reference)).best_peer is reference


def test_our_other_way_is_no_peer() -> None:
    forward, backward = measured(OURS, OURS_FREE, REFERENCE)
    assert [peer.name for peer in forward.peers] == ["reference"], "it is the same forward"
    free, reference = backward.peers
    assert free.status == OK and free.rounds_ms
    fast = dataclasses.replace(free, rounds_ms=(1e-9, 1e-9))
    backward = dataclasses.replace(backward, peers=(fast, reference))
    assert backward.best_peer is reference
    report = Report(golden_report().provenance, measurements=(forward, backward))
    assert f"{reference.ms / 1e-9:.2f} for vk_free |" in markdown(report)
    assert documents.summary(report).splitlines()[0].endswith("| reference | backward ms | vk_free | reference |")


def test_gate_finds_one_wrong_gradient() -> None:
    forward, backward = measured(OURS, wrong_dq(), REFERENCE)
    assert forward.peers[0].status == OK
    assert backward.peers[0].status == WRONG
    assert backward.peers[0].note.startswith("dq (") and "dk" not in backward.peers[0].note
    assert backward.best_peer is backward.peers[1]


def test_gate_finds_unwritten_output() -> None:
    forward, _ = measured(OURS, spoiled("lazy", lambda out: 0 * out + torch.empty_like(out)))
    assert forward.peers[0].status == WRONG


def test_gate_looks_at_the_case_itself() -> None:
    """A contender that is wrong only where it is long: the shortened case alone would miss it."""
    (case,) = find_cases(["300+1500x4/2x16c"])
    assert max(shorten(case, 2**22, 4).lengths) < 1500

    def spoil(out: Tensor) -> Tensor:
        return out * 1.1 if out.shape[0] >= 1500 else out

    trials = ROOM.trials(case, torch.float32, CPU, True)
    assert len(trials) == 2 and trials[1].case == case
    liar = gate.judge(spoiled("liar", spoil), case, trials, torch.float32, CPU, True)
    assert all(report.passed == ("key heads" not in report.name) for report in liar.reports[:5])
    for right in (OURS, REFERENCE):
        verdict = gate.judge(right, case, trials, torch.float32, CPU, True)
        assert verdict.status == OK, verdict.reports


def test_gate_ends_where_the_device_is_lost() -> None:
    """What came next would fail too, and be blamed for it."""
    (case,) = find_cases(["30x2x16"])
    trials = ROOM.trials(case, torch.float32, CPU, True)
    lost = mock.patch.object(torch.cuda, "synchronize", side_effect=RuntimeError("lost"))
    with lost, pytest.raises(RuntimeError, match="lost"):
        gate.judge(broken(), case, trials, torch.float32, torch.device("cuda"), True)


def test_gate_marks_what_fails_and_what_cannot_run() -> None:
    forward, backward = measured(OURS, broken(), attention_peers.CUDNN, attention_peers.FLASH4)
    for one in (forward, backward):
        assert [peer.status for peer in one.peers] == [FAILED, UNAVAILABLE, UNAVAILABLE]
        assert one.peers[0].note.endswith("RuntimeError: no kernel for this")
        assert [peer.note for peer in one.peers[1:]] == ["needs a GPU"] * 2
        assert one.best_peer is None and one.ratio is None


@pytest.mark.parametrize(
    ("shape", "cudnn", "flash2"),
    [
        ("1x40x2x16", "", ""),
        ("2x40x2x16c", "", ""),
        ("40+30x2x16", "equal segments", ""),
        ("cross", "equal segments", ""),
        ("window", "window_left", ""),
        ("softcap_causal", "softcap", "softcap"),
        ("padding", "equal segments", "unwritten"),
    ],
)
def test_peers_say_what_they_cannot_run(shape: str, cudnn: str, flash2: str) -> None:
    (case,) = find_cases([shape])
    device = torch.device("cuda")
    for peer, reason in ((attention_peers.CUDNN, cudnn), (attention_peers.FLASH2, flash2)):
        said = peer.refuses(case, torch.bfloat16, device)
        assert reason in said if reason else said == ""
        assert peer.refuses(case, torch.float32, device)


def test_cudnn_view_is_the_packed_maths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batched view of packed tensors, run by a backend that the CPU has."""
    monkeypatch.setattr(
        attention_peers,
        "sdpa_kernel",
        lambda backend: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    )
    peer = dataclasses.replace(attention_peers.CUDNN, refuses=lambda case, dtype, device: "")
    for shape in ("3x20x2x16", "2x20x4/2x16c"):
        for one in measured(OURS, peer, shape=shape):
            assert one.peers[0].status == OK, one.peers[0].note


@pytest.mark.parametrize(
    ("shape", "flash2", "flash4"),
    [
        ("12+30x4/2x16c", (30, 30, None, (-1, 0), True), (30, 30)),
        ("3x20x4/2x16", (20, 20, None, (-1, -1), True), ((3, 20, 4, 16), (3, 20, 2, 16))),
    ],
)
def test_flash_peers_are_called_as_documented(
    shape: str, flash2: tuple[Any, ...], flash4: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        seen["flash2"] = (max_q, max_k, scale, window_size, enable_gqa)
        return references.window_attn(q, k, v, cu_q, cu_k, causal=window_size == (-1, 0))[0]

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        seen["flash4"] = (max_seqlen_q, max_seqlen_k)
        return references.window_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal)

    def flash_attn_func(q, k, v, *, causal):
        seen["flash4"] = q.shape, k.shape
        batch, length = q.shape[:2]
        packed = (tensor.flatten(0, 1) for tensor in (q, k, v))
        out, lse = references.window_attn(*packed, cumulative((length,) * batch, q.device), causal=causal)
        return out.unflatten(0, (batch, length)), lse

    interface = {function.__name__: function for function in (flash_attn_func, flash_attn_varlen_func)}
    monkeypatch.setattr(attention_peers, "_varlen_attn", lambda: varlen_attn)
    monkeypatch.setattr(attention_peers, "_flash4", interface.__getitem__)
    peers = [
        dataclasses.replace(peer, refuses=lambda case, dtype, device: "")
        for peer in (attention_peers.FLASH2, attention_peers.FLASH4)
    ]
    for one in measured(OURS, *peers, shape=shape):
        assert [peer.status for peer in one.peers] == [OK, OK], one.peers
    assert seen == {"flash2": flash2, "flash4": flash4}


# Shapes.


def test_find_cases() -> None:
    names = [case.name for case in find_cases(["qwen25vl_*", "1x64x2x16c,image"])]
    assert names == [
        "qwen25vl_4096", "qwen25vl_9216", "qwen25vl_16x1024", "qwen25vl_4x4096",
        "qwen25vl_windows", "qwen25vl_ragged", "1x64x2x16c", "image",
    ]  # fmt: skip
    (case,) = find_cases(["8x2048x32/8x128c"])
    assert case.lengths == (2048,) * 8 and (case.num_heads, case.num_k_heads) == (32, 8)
    assert case.head_dim == 128 and case.options == {"causal": True}
    assert find_cases(["3*64+12x2x16"])[0].lengths == (64, 64, 64, 12)
    assert find_cases(["4096x16x72"])[0].lengths == (4096,)


def test_notation_reads_back() -> None:
    for case in WINDOW_ATTN:
        text = notation(case)
        if case.k_lengths is None and case.lengths and min(case.lengths) and "of" not in text:
            (again,) = find_cases([text])
            assert (again.lengths, again.num_heads, again.head_dim) == (
                case.lengths, case.num_heads, case.head_dim,
            )  # fmt: skip


def test_shorter_cases_keep_what_matters() -> None:
    for case in WINDOW_ATTN:
        if not case.lengths:
            continue
        short = shorten(case, 2**18, case.num_heads)
        entries = attention_peers.score_entries(short)
        assert entries <= 2**19
        assert (short.num_heads, short.head_dim, short.options) == (
            case.num_heads, case.head_dim, case.options,
        )  # fmt: skip
        assert short.uniform or not case.uniform
        if len(short.lengths) == len(case.lengths):
            assert all((n - m) % 128 == 0 for n, m in zip(case.lengths, short.lengths, strict=True))
    (mixed,) = find_cases(["qwen3vl_l_mixed"])
    assert shorten(mixed, 2**40, 16) == mixed
    assert max(longest_within(mixed, 2**22).lengths) <= 2**11
    assert longest_within(mixed, 2**30) == mixed


# Timing.


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_orders_are_balanced(count: int) -> None:
    orders = timing.balanced_orders(count)
    for place in range(count):
        assert Counter(order[place] for order in orders) == dict.fromkeys(range(count), len(orders) // count)
    follows = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(follows) == count * (count - 1) and len(set(follows.values())) <= 1


def test_every_contender_is_timed_in_every_round() -> None:
    taken: list[str] = []

    def timer(name: str) -> timing.Timer:
        def sample() -> float:
            taken.append(name)
            return float(taken.count(name))

        return timing.Timer("wall", sample)

    figures = timing.interleave({name: timer(name) for name in "ab"}, 3)
    assert "".join(taken) == "abbaabba" and figures == {"a": (1, 2, 3, 4), "b": (1, 2, 3, 4)}
    assert timing.interleave({}, 3) == {}


@pytest.mark.parametrize(
    ("rounds", "count", "whole"), [(2, 3, 2), (6, 3, 6), (7, 3, 12), (10, 4, 12), (10, 5, 10), (11, 5, 20), (3, 1, 4)]
)
def test_a_cycle_of_orders_is_ended(rounds: int, count: int, whole: int) -> None:
    """Each runs as often after every other, but where there are fewer rounds than orders."""
    assert timing.whole_cycles(rounds, count) == whole


def test_wall_timer_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: on a busy machine one call may take a whole round."""
    milliseconds = itertools.count()
    monkeypatch.setattr(timing, "CPU_ROUND_MS", 9.5)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(milliseconds) / 1e3)
    seen: list[int] = []
    timer = timing.make_timer([lambda: seen.append(0), lambda: seen.append(1)], CPU)
    assert timer.kind == "wall"
    assert timer.sample() == pytest.approx(1)
    assert seen == [0, *[0, 1] * 5]


# Figures.


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


def test_ratios() -> None:
    one, two, bad = golden_report().measurements
    assert one.ours.ms == 0.21
    assert one.best_peer is one.peers[0], "the fastest is wrong"
    assert one.ratio == pytest.approx(0.42 / 0.21)
    assert one.ratio_range == pytest.approx((0.42 / 0.25, 0.44 / 0.2))
    assert one.tflops == pytest.approx(200)
    assert two.best_peer is two.peers[1]
    assert bad.ratio is None and bad.ratio_range is None, "no speed-up is reported of what is wrong"


def test_bound_and_floor() -> None:
    report = golden_report()
    assert report.ceilings is not None and report.ceilings.ridge == pytest.approx(200)
    (profile,) = report.profiles
    assert profile.intensity == pytest.approx(40)
    assert profile.bound(report.ceilings) == "memory"
    assert profile.floor_ms(report.ceilings) == pytest.approx(0.025)
    assert profile.gb_s == pytest.approx(2000) and profile.tflops == pytest.approx(80)
    busy = dataclasses.replace(profile, flops=400 * 10**9)
    assert busy.bound(report.ceilings) == "compute"
    assert busy.floor_ms(report.ceilings) == pytest.approx(0.5)


def test_json_round_trip(tmp_path: Path) -> None:
    report = golden_report()
    report.write(tmp_path / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    text = (tmp_path / "run.json").read_text()
    assert Report.from_json(text) == report
    document = json.loads(text)
    assert document["schema"] == 1
    assert list(document) == [
        "schema", "provenance", "ceilings", "measurements", "profiles", "host", "encoders",
    ]  # fmt: skip
    for other in ({**document, "schema": 2}, {}, [1], {**document, "host": [{"name": 1}]}):
        with pytest.raises(ValueError, match="schema 1"):
            Report.from_json(json.dumps(other))


class TestMarkdown(expecttest.TestCase):
    maxDiff = None

    def test_golden(self) -> None:
        self.assertExpectedInline(
            markdown(golden_report()),
            """\
### window_attn, backward, bfloat16, portable path, warm cache

| case | shape | ours ms | cudnn ms | flash4 ms | best correct peer / ours | TFLOP/s | peak MiB, ours / best peer |
| --- | --- | --- | --- | --- | --- | --- | --- |
| one | 1x40x2x72 | 0.2100 (0.2000..0.2500) | 0.4200 (0.4100..0.4400) | 0.1000 (0.1000..0.1000) wrong | 2.00 (1.68..2.20) cudnn | 200 | 3.0 / 4.0 |
| two | 40+8x2x72 | 0.2100 (0.2000..0.2500) | - | 0.4200 (0.4100..0.4400) | 2.00 (1.68..2.20) flash4 | 200 | 3.0 / 4.0 |
| bad | 1x8x2x72 | 0.2100 (0.2000..0.2500) wrong | 0.4200 (0.4100..0.4400) | 0.1000 (0.1000..0.1000) wrong | ours is wrong | 200 | 1.0 / 4.0 |

- geometric mean of 2 ratios: 2.00, least 2.00
- times: median (min..max) of 3 interleaved rounds, CUDA graph replays, but between events for flash4 on two
- cudnn cannot run two: takes batches of equal segments only
- flash4 is wrong on one, bad: dq (1x40x2x72): outside the rule; max 1.3 of 0.02 allowed, rms 0.4 of 0.01 allowed
- vk is wrong on bad: off

### against the ceilings of this machine

| call | shape | ms | MB moved | GB/s | of copy | TFLOP/s | of matmul | FLOP/byte | bound | floor ms | time / floor |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| window_attn forward, one, bfloat16, portable path | 1x40x2x72 | 0.05000 | 100 | 2000 | 50.0% | 80.0 | 10.0% | 40.0 | memory | 0.02500 | 2.00 |

- bytes moved: each input read once, each output written once
- compute-bound above 200 FLOP/byte, memory-bound below

### window_attn, host time per call

| call | host microseconds | / raw launch | target |
| --- | --- | --- | --- |
| raw | 10.0 | 1.00 |  |
| op | 17.5 | 1.75 | at most 1.8 |
| launcher | - | - |  |

- launcher: not here

- NVIDIA H200, driver 580.1; torch 2.11.0, triton 3.6.0
- cudnn: cuDNN 9
- flash4: FlashAttention-4
- measured in this run: copy 4000 GB/s, bfloat16 matmul 800 TFLOP/s
- 2030-01-02T03:04:05+00:00, commit abc: `vk bench window_attn`
""",  # noqa: E501
        )


def test_commit_is_that_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.provenance(CPU, "abc", {}).commit == "abc"
    answers = {"rev-parse": str(machine.PACKAGE.parent), "describe": "1234-dirty"}
    monkeypatch.setattr(machine, "_output", lambda command: answers[command[3]])
    assert machine.provenance(CPU, None, {}).commit == "1234-dirty"
    answers["rev-parse"] = "/somewhere/else"
    assert machine.provenance(CPU, None, {}).commit == "unknown"


# The raw launch that host times are compared with.


@pytest.mark.parametrize("length", [40, 100], ids=["short", "long"])
def test_recorded_launches_repeat_the_launcher(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: made.append((grid, args, options))

    made: list[Any] = []
    (case,) = find_cases([f"1x{length}x2x16"])
    inputs = make_inputs(case, torch.float16)
    monkeypatch.setattr(_attention_portable, "_attention_fwd_kernel", Kernel())
    monkeypatch.setattr(_attention_short, "_attention_fwd_short_kernel", Kernel())
    monkeypatch.setattr(_attention_short, "_attention_fwd_rest_kernel", Kernel())
    for launcher in (_attention, _attention_portable, _attention_short):
        monkeypatch.setattr(launcher, "gpu", lambda: Gpu("stub", "cuda", 80, 232448))
    monkeypatch.setattr(window_attn, "packed_path", lambda inputs: "portable")
    launch, launcher, why = window_attn._raw_calls(inputs)
    assert launch is not None and launcher is not None and why == ""
    launcher()
    launch()
    launches = 2 if length <= 64 else 1
    recorded, by_launcher, by_launch = (made[begin : begin + launches] for begin in range(0, len(made), launches))
    assert recorded == by_launcher == by_launch
    assert recorded[0][0][-1] == case.num_heads and recorded[0][1][0] is inputs.q
    wrap = _attention_portable.wrap_triton
    with recorded_launches((_attention_portable, _attention_short)):
        assert _attention_portable.wrap_triton is not wrap
    assert _attention_portable.wrap_triton is wrap


# The command.


def test_a_case_too_large_for_the_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def contest_without_memory(*_: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(contest_command, "contest", contest_without_memory)
    result = bench("window_attn", "--shapes", TINY, "--device", "cpu")
    assert result.exit_code == 2 and result.stdout == ""
    assert f"{TINY} does not fit into the memory of CPU" in result.stderr.splitlines()[-1]


def test_contest_command(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    result = bench(
        "window_attn", "--shapes", f"{TINY},image", "--shapes", "causal", "--backward",
        "--rounds", 2, "--out", out, "--markdown", "--commit", "abc", "--dtype", "bfloat16",
        "--path", "portable",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = Report.from_json(out.read_text())
    assert [(one.case, one.direction) for one in report.measurements] == [
        (case, direction) for case in (TINY, "image", "causal") for direction in ("forward", "backward")
    ]
    for one in report.measurements:
        assert one.dtype == "bfloat16" and one.ratio is not None and one.flops > 0
        assert len(one.ours.rounds_ms) == 2 and one.ours.timer == "wall"
    assert report.provenance.commit == "abc"
    assert report.ceilings is not None and report.ceilings.copy_gb_s > 0
    assert result.stdout == markdown(report)
    table = bench("table", out, out)
    assert table.stdout == f"{markdown(report)}\n{markdown(report)}"


MARKED = "# Title\n\n<!-- vk bench table {}run.json -->\nold\n<!-- vk bench table end -->\n\nRest.\n"


@pytest.mark.parametrize("summary", [False, True])
def test_tables_in_documents_are_made_anew(tmp_path: Path, summary: bool) -> None:
    (tmp_path / "run.json").write_text(golden_report().to_json())
    document = tmp_path / "page.md"
    document.write_text(MARKED.format("--summary " * summary))
    assert bench("table", "--into", document).exit_code == 0
    text = document.read_text()
    made = bench("table", *["--summary"] * summary, tmp_path / "run.json").stdout
    assert made in text and "old" not in text and text.startswith("# Title\n") and text.endswith("\n\nRest.\n")
    assert bench("table", "--into", document).exit_code == 0 and document.read_text() == text


def test_documents_without_tables_or_results_are_refused(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(MARKED.format(""))
    assert "there are no results at" in refused("table", "--into", document)
    assert document.read_text() == MARKED.format("")
    document.write_text("no tables\n")
    assert "marks no table" in refused("table", "--into", document)


def test_a_table_without_an_end_takes_nothing_of_what_follows(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(golden_report().to_json())
    document = tmp_path / "page.md"
    text = "<!-- vk bench table other.json -->\n\nprose\n\n" + MARKED.format("")
    document.write_text(text)
    assert "the table of other.json has no end mark of its own" in refused("table", "--into", document)
    assert document.read_text() == text


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    link.symlink_to(file)
    results.replace_text(link, "after")
    assert link.is_symlink() and file.read_text() == "after"
    monkeypatch.setattr(results.os, "replace", mock.Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        results.replace_text(file, "lost")
    assert file.read_text() == "after" and {path.name for path in tmp_path.iterdir()} == {"file", "link"}
    results.replace_text(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()


def test_summary_sets_every_peer_against_ours() -> None:
    lines = documents.summary(golden_report()).splitlines()
    assert lines[0] == "| case | shape | backward ms | cudnn | flash4 |"
    assert lines[2:5] == [
        "| one | 1x40x2x72 | 0.210 | 2.00 | 0.48 *wrong* |",
        "| two | 40+8x2x72 | 0.210 | - | 2.00 |",
        "| bad | 1x8x2x72 | 0.210 *wrong* | 2.00 | 0.48 *wrong* |",
    ]


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md", "docs/encoder.md"])
def test_tables_of_this_repository_are_those_of_its_results(name: str, tmp_path: Path) -> None:
    page = ROOT / name
    copy = tmp_path / name
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    copy.write_text(page.read_text())
    assert documents.refresh(copy)
    assert copy.read_text() == page.read_text(), f"out of date: vk bench table --into {name}"


def test_chart_shows_every_contender_and_is_the_same_twice(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(golden_report().to_json())
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        assert bench("chart", tmp_path / "run.json", picture).exit_code == 0
    one, two = (picture.read_text() for picture in pictures)
    assert one == two
    for word in ("vk", "cudnn", "flash4", "result is wrong", "window_attn, backward, bfloat16, NVIDIA H200", "200"):
        assert f">{word}<" in one or f"> {word}<" in one, word
    (tmp_path / "host.json").write_text(dataclasses.replace(golden_report(), measurements=()).to_json())
    assert "no measurements" in refused("chart", tmp_path / "host.json", tmp_path / "three.svg")
    assert "Format 'word' is not supported" in refused("chart", tmp_path / "run.json", tmp_path / "three.word")


def test_commands_are_noted_without_where_results_go(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["/x/vk", "bench", "host", "--out", "/a/b.json", "--commit=abc", "--trace", "t", "--cold"]
    monkeypatch.setattr(sys, "argv", typed)
    assert machine._command_line() == "vk bench host --cold"


def test_plain_tables_show_the_same_cells() -> None:
    result = bench("window_attn", "--shapes", TINY, "--peers", "cudnn,reference")
    assert result.exit_code == 0, result.output
    assert "best correct peer / ours" in result.stdout and TINY in result.stdout
    assert f"cudnn cannot run {TINY}: needs a GPU" in result.stdout
    assert TINY in result.stderr


@pytest.mark.parametrize("liar", [spoiled("vk", lambda out: out * 1.01), broken()])
def test_wrong_ours_exits_1(liar: Contender, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ROOMS, "window_attn", dataclasses.replace(ROOM, ours=liar))
    out = tmp_path / "run.json"
    result = bench("window_attn", "--shapes", TINY, "--out", out)
    assert result.exit_code == 1, result.output
    assert "vk: window_attn" in result.stderr
    (one,) = Report.from_json(out.read_text()).measurements
    assert one.ours.status in (WRONG, FAILED) and one.ratio is None


def test_profile_command(tmp_path: Path) -> None:
    out, trace = tmp_path / "profile.json", tmp_path / "trace.json"
    result = bench("profile", "window_attn", "--shapes", TINY, "--backward", "--out", out, "--trace", trace)
    assert result.exit_code == 0, result.output
    assert "vk::window_attn" in result.stdout and "Input Shapes" in result.stdout
    report = Report.from_json(out.read_text())
    forward, backward = report.profiles
    item, tokens = 4, 40 * 2 * 16
    assert forward.bytes_moved == 4 * item * tokens + 4 * 40 * 2 + 8
    assert backward.bytes_moved == 8 * item * tokens + 4 * 40 * 2 + 8
    assert forward.flops == 4 * 40 * 40 * 16 * 2 and backward.flops == forward.flops * 5 // 2
    assert re.search(r"\b(memory|compute)\b", result.stdout)
    for direction in ("forward", "backward"):
        events = json.loads((tmp_path / f"trace.{TINY}.{direction}.json").read_text())
        assert any("window_attn" in event["name"] for event in events["traceEvents"])


def test_host_command(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    result = bench("host", "--out", out, "--markdown")
    assert result.exit_code == 0, result.output
    times = Report.from_json(out.read_text()).host
    assert [time.name for time in times if time.microseconds is None] == [
        "raw Triton launch of the forward kernel", "launcher, its plan made",
    ]  # fmt: skip
    assert all(time.microseconds > 0 for time in times if time.microseconds is not None)
    assert [time.target for time in times] == [None, None, None, 1.8, 1.8, 2.5, 2.5]


def test_refusals(tmp_path: Path) -> None:
    unknown = refused("window_attn", "--shapes", "qwen9")
    assert "'qwen9'" in unknown and "qwen3vl_l_4096" in unknown and "1x4096x16x72" in unknown
    assert "key heads" in refused("window_attn", "--shapes", "1x64x6/4x16")
    assert "multiple of 8" in refused("window_attn", "--shapes", "1x64x2x70")
    assert "bfloat16" in refused("window_attn", "--dtype", "int8")
    assert "flash2" in refused("window_attn", "--peers", "flash9")
    assert "portable" in refused("window_attn", "--path", "fast")
    assert "folder" in refused("window_attn", "--out", tmp_path / "none" / "run.json")
    assert "--rounds" in refused("window_attn", "--rounds", 1)
    assert "window_attn" in refused("profile", "conv")
    assert "No such command" in refused("conv")
    other = tmp_path / "other.json"
    other.write_text('{"schema": 7}')
    assert "schema 7" in refused("table", other)
    other.write_text("no JSON")
    assert str(other) in refused("table", other)


def test_module_is_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "torch_ops.bench", "--help"],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for command in ("window_attn", "profile", "host", "table"):
        assert command in run.stdout
    assert "vk bench" in run.stdout
