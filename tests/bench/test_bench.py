"""The command `vk bench`."""

import dataclasses
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.verify import TINY, bench, broken, by_case, refused, spoiled
from torch_ops.bench.app import BENCHES
from torch_ops.bench.commands import run as run_command
from torch_ops.bench.measure.opbench import Impl
from torch_ops.bench.measure.results import FAILED, WRONG, Report, read_report
from torch_ops.bench.show.tables import markdown

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]


def test_a_case_too_large_for_the_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(run_command, "run_case", without_memory)
    result = bench("window_attn", "--shapes", TINY, "--device", "cpu")
    assert result.exit_code == 2 and result.stdout == ""
    assert f"{TINY} does not fit into the memory of CPU" in result.stderr.splitlines()[-1]


def test_run_command(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    result = bench(
        "window_attn", "--shapes", f"{TINY},image", "--shapes", "causal", "--backward",
        "--rounds", 2, "--out", out, "--markdown", "--commit", "abc", "--dtype", "bfloat16",
        "--path", "portable",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = Report.from_json(out.read_text())
    groups = by_case(report.records)
    assert [(one.ours.case, one.ours.direction) for one in groups] == [
        (case, direction) for case in (TINY, "image", "causal") for direction in ("forward", "backward")
    ]
    for one in groups:
        assert one.ours.dtype == "bfloat16" and one.ratios is not None and one.ours.flops > 0
        assert len(one.ours.rounds_ms) == 2 and one.ours.timer == "wall"
    assert report.provenance.commit == "abc"
    assert report.ceilings is not None and report.ceilings.copy_gb_s > 0
    assert result.stdout == markdown(report)
    table = bench("table", out, out)
    assert table.stdout == f"{markdown(report)}\n{markdown(report)}"


def test_plain_tables_show_the_same_cells() -> None:
    result = bench("window_attn", "--shapes", TINY, "--peers", "cudnn,reference")
    assert result.exit_code == 0, result.output
    assert "best correct baseline / ours" in result.stdout and TINY in result.stdout
    assert f"cudnn cannot run {TINY}: needs a GPU" in result.stdout
    assert TINY in result.stderr


@pytest.mark.parametrize(
    ("op", "liar"),
    [("window_attn", spoiled("vk", lambda out: out * 1.01)), ("window_attn", broken()), ("attention", broken())],
)
def test_wrong_ours_exits_1(op: str, liar: Impl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = dataclasses.replace(BENCHES[op], ours=dataclasses.replace(liar, group="ours"))
    monkeypatch.setitem(BENCHES, op, wrong)
    out = tmp_path / "run.json"
    result = bench(op, "--shapes", TINY, "--out", out)
    assert result.exit_code == 1, result.output
    assert f"vk: {op}" in result.stderr
    (one,) = by_case(Report.from_json(out.read_text()).records)
    assert one.ours.status in (WRONG, FAILED) and one.ratios is None


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
    assert [time.name for time in times if time.microseconds is None] == ["raw Triton launch of the forward kernel"]
    assert all(time.microseconds > 0 for time in times if time.microseconds is not None)
    assert [time.most_us for time in times] == [None, None, None, 20.0, None, 30.0]


@pytest.mark.parametrize(
    ("op", "shape", "baselines", "said"),
    [
        ("attention", "1x2x24x16", {"math"}, "torch_ops.attention with gradients"),
        ("rope_window_attn", "image", {"reference"}, "torch_ops.rope_window_attn with gradients"),
        ("vision_attention", "turned", {"sdpa_alone", "eager"}, "VisionAttention with gradients"),
        ("add_rms_norm", "30x64", {"eager", "copy"}, "torch_ops.add_rms_norm with gradients"),
    ],
)
def test_commands_know_every_kind_of_op(op: str, shape: str, baselines: set[str], said: str, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    assert bench(op, "--shapes", shape, "--peers", ",".join(baselines), "--out", out).exit_code == 0
    assert {one.name for one in read_report(out).records} == {"vk", *baselines}
    host = bench("host", op, "--markdown")
    assert host.exit_code == 0 and said in host.stdout and f"### {op}, host time per call" in host.stdout, host.output
    profiled = bench("profile", op, "--shapes", shape, "--backward")
    assert profiled.exit_code == 0 and "vk::" in profiled.stdout, profiled.output


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
    assert "schema is 7, expected 2" in refused("table", other)
    other.write_text("no JSON")
    assert str(other) in refused("table", other)


def test_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["torch_ops.bench", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torch_ops.bench", run_name="__main__", alter_sys=True)
    assert not ended.value.code
    said = capsys.readouterr().out
    for command in ("window_attn", "profile", "host", "table"):
        assert command in said
    assert "vk bench" in said
