"""`vk bench tune`: what becomes a row, what is refused, and that a broken-off run goes on."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import torch_ops
from csrc_free_ops.configs.candidates import CANDIDATES
from csrc_free_ops.configs.rows import Config, TunedConfig, as_document, read_rows
from tests.verify import INTERPRET
from torch_ops._attention.choose import choose
from torch_ops._attention.options import AttentionOptions
from torch_ops.bench.app import app
from torch_ops.bench.measure import tune
from torch_ops.bench.measure.opbench import TunedKernel
from torch_ops.bench.measure.timing import Timer
from torch_ops.bench.measure.tune import Journal, Measured, Tried, rows_of
from torch_ops.command import app as cli

SMALL, TALL = Config(64, 64, 4, 2), Config(128, 64, 4, 2)
PROVENANCE = {"gpu": "X", "torch": "2", "triton": "3", "date": "now", "command": "vk", "commit": "c"}


def _kernel(length: int, masked: bool = False, name: str = "attention_fwd") -> TunedKernel:
    return TunedKernel(name, False, "bfloat16", 72, masked, length)


def _point(length: int, best: Config, **kernel: Any) -> Measured:
    other = TALL if best == SMALL else SMALL
    tried = Tried(other, (2.0, 2.1)), Tried(best, (1.0, 1.1)), Tried(other, note="spills")
    return Measured(_kernel(length, **kernel), tried, "now", "c")


def test_rows_reach_half_way_to_the_next_length() -> None:
    rows = rows_of([_point(4096, TALL), _point(64, SMALL), _point(1024, SMALL), _point(64, TALL, masked=True)])
    assert rows == [
        TunedConfig("attention_fwd", "bfloat16", 72, SMALL, masked=False, min_length=0, max_length=2048),
        TunedConfig("attention_fwd", "bfloat16", 72, TALL, masked=False, min_length=2048),
        TunedConfig("attention_fwd", "bfloat16", 72, TALL, masked=True),
    ]


def test_rows_take_the_longest_call_of_a_length_and_reach_their_own_length() -> None:
    slow = Measured(_kernel(64), (Tried(TALL, (9.0,)), Tried(SMALL, (10.0,))))
    failed = Measured(_kernel(32), (Tried(SMALL, note="wrong"),))
    rows = rows_of([slow, _point(64, SMALL), _point(63, SMALL), failed])
    assert [(row.launch, row.min_length, row.max_length) for row in rows] == [(SMALL, 0, 64), (TALL, 64, None)]


def test_rows_of_small_segments_end_with_their_block() -> None:
    """Beyond it other kernels take the call, unless a launch of a larger block is there."""
    narrow, wide = Config(32, 32, 4, 1), Config(64, 64, 4, 1)
    points = [
        Measured(_kernel(length, name="attention_fwd_small_segments"), (Tried(launch, (1.0,)),))
        for length, launch in ((24, narrow), (64, wide))
    ]
    assert [(row.min_length, row.max_length) for row in rows_of(points)] == [(0, 33), (39, 65)]
    assert [row.max_length for row in rows_of(points[:1])] == [33]


def test_the_journal_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "rows.json"
    journal = Journal(PROVENANCE, {"a": _point(64, SMALL)})
    journal.write(file)
    assert Journal.open(file, PROVENANCE) == journal
    assert [row.launch for row in read_rows(file)] == [SMALL]
    assert [each.name for each in file.parent.iterdir()] == ["rows.json"]


def test_two_runs_on_one_file_keep_each_others_points(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    one, other = (Journal.open(file, PROVENANCE) for _ in range(2))
    for name, journal, length in (("a", one, 64), ("b", other, 4096)):
        journal.points[name] = _point(length, SMALL)
        journal.write(file)
    assert set(Journal.open(file, PROVENANCE).points) == {"a", "b"}


def test_rows_that_others_wrote_stay(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    theirs = TunedConfig("attention_bwd_dq", "bfloat16", 72, SMALL)
    file.write_text(json.dumps(as_document([theirs], PROVENANCE)))
    journal = Journal.open(file, PROVENANCE)
    journal.points["a"] = _point(64, SMALL)
    for _ in range(2):
        journal.write(file)
        journal = Journal.open(file, PROVENANCE)
    assert [row.kernel for row in read_rows(file)] == ["attention_fwd", "attention_bwd_dq"]


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"provenance": null, "rows": []}', '{"provenance": %s, "rows": [], "points": [1]}',
     '{"provenance": %s, "rows": [], "points": {"a": {"kernel": {}}}}',
     '{"provenance": %s, "rows": [{"kernel": "k", "dtype": "d", "head_dim": 8, "launch": {"speed": 1}}]}'],
)  # fmt: skip
def test_a_file_of_something_else_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(text.replace("%s", json.dumps(PROVENANCE)))
    before = file.read_text()
    with pytest.raises(ValueError, match="rows.json holds no"):
        Journal.open(file, PROVENANCE)
    assert file.read_text() == before


def test_a_file_of_another_gpu_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    Journal({**PROVENANCE, "gpu": "Y"}, {}).write(file)
    before = file.read_text()
    with pytest.raises(ValueError, match="was measured with gpu Y, and this is X; give another file"):
        Journal.open(file, PROVENANCE)
    assert file.read_text() == before


def test_every_candidate_is_there_once() -> None:
    for name, launches in CANDIDATES.items():
        assert len(set(launches)) == len(launches), name
    # The lists of the reports that the project started from.
    forward = {(each.block_m, each.block_n, each.num_warps) for each in CANDIDATES["attention_fwd"]}
    assert {(128, 64, 4), (128, 128, 8), (64, 64, 4), (64, 32, 4), (32, 32, 4)} <= forward


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (("--kernels", "fast"), "no kernel 'fast' has candidates; give some of attention_fwd"),
        (("--path", "fast"), "unknown path 'fast'; give one of auto, hopper, portable"),
        (("--device", "cpu"), "'--device': nothing is left to tune: on cpu these calls launch no kernel that has"),
    ],
)
def test_refuses_in_one_line(argument: tuple[str, str], message: str, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as stopped:
        cli.app(["bench", "tune", "window_attn", "--device", "cpu", "--out", str(file), *argument])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not file.exists()


def test_builds_of_the_kernel_that_spill_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = (SimpleNamespace(device_caches={0: ({"before": object()},)}) for _ in range(2))
    before, build = dict(own.device_caches), SimpleNamespace(n_spills=3)
    for name in ("csrc_free_ops.fast", "csrc_free_ops.importer"):
        module = SimpleNamespace(_fast_kernel=own, _fast_rest_kernel=other)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "csrc_free_ops.interpreted", SimpleNamespace(_fast_kernel=object()))
    with tune._fresh_builds("fast") as builds:
        assert builds() == []
        own.device_caches[0] = ({"now": build},)
        other.device_caches[0][0]["now"] = build
        assert [build.n_spills for build in builds()] == [3]
    assert own.device_caches == before


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Config, ...]]:
    """Two candidates for each kernel."""
    candidates = {
        "attention_fwd": (Config(32, 16, 4, 1), Config(16, 32, 4, 1)),
        "attention_fwd_small_segments": (Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
    }
    for module in (tune, __import__("torch_ops.bench.app", fromlist=["app"])):
        monkeypatch.setattr(module, "CANDIDATES", candidates)
    return candidates


@pytest.mark.interpret
@pytest.mark.skipif(not INTERPRET, reason="its candidates are the interpreter's")
def test_measures_writes_and_goes_on(tmp_path: Path, few: dict[str, tuple[Config, ...]]) -> None:
    file = tmp_path / "rows.json"
    arguments = ["tune", "window_attn", "--device", "cpu", "--dtype", "float16", "--rounds", "2", "--out", str(file)]
    first = CliRunner().invoke(app, [*arguments, "--shapes", "1x40x1x16"])
    assert first.exit_code == 0 and "1 points, 0 of them" in first.output
    before = json.loads(file.read_text())["points"]
    second = CliRunner().invoke(app, [*arguments, "--shapes", "1x40x1x16,2x10x1x16"])
    assert second.exit_code == 0 and "2 points, 1 of them" in second.output
    after = json.loads(file.read_text())["points"]
    assert set(after) == {"attention_fwd float16 1x40x1x16", "attention_fwd_small_segments float16 2x10x1x16"}
    assert after | before == after
    winner = Config(**after["attention_fwd float16 1x40x1x16"]["tried"][0]["launch"])
    with torch_ops.settings(rows=str(file)):
        launch, source = choose("attention_fwd", torch.empty(40, 1, 16, dtype=torch.float16), AttentionOptions(1.0), 40)
    assert launch == winner and source.startswith("rows.json: interpreter")


@pytest.mark.interpret
@pytest.mark.skipif(not INTERPRET, reason="its candidates are the interpreter's")
def test_what_is_timed_is_the_candidate(tmp_path: Path, few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the finals too, which come when no candidate is in force any more."""
    timed: list[Config] = []

    def make_timer(work: Any, device: Any) -> Timer:
        def note() -> float:
            q = torch.empty(40, 1, 16, dtype=torch.float16)
            timed.append(choose("attention_fwd", q, AttentionOptions(1.0), 40)[0])
            return float(len(timed) < 2) + 1.0

        return Timer("wall", note, work)

    monkeypatch.setattr(tune, "make_timer", make_timer)
    monkeypatch.setattr(tune, "CLOSE", 10.0)
    arguments = ["--device", "cpu", "--dtype", "float16", "--rounds", "2", "--shapes", "1x40x1x16"]
    result = CliRunner().invoke(app, ["tune", "window_attn", *arguments, "--out", str(tmp_path / "rows.json")])
    assert result.exit_code == 0, result.output
    one, two = few["attention_fwd"]
    assert timed[:2] == [one, two] and sorted(map(repr, timed[2:])) == sorted(map(repr, [one, two, one, two]))


@pytest.mark.gpu
def test_tunes_on_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: launches[:2] for name, launches in CANDIDATES.items()}
    for module in (tune, __import__("torch_ops.bench.app", fromlist=["app"])):
        monkeypatch.setattr(module, "CANDIDATES", few)
    file = tmp_path / "rows.json"
    arguments = ["--shapes", "2x64x2x72,2x300x2x72", "--backward", "--rounds", "2", "--out", str(file)]
    result = CliRunner().invoke(app, ["tune", "window_attn", *arguments])
    assert result.exit_code == 0, result.output
    assert {"attention_fwd", "attention_bwd_dq", "attention_bwd_dkdv"} <= {row.kernel for row in read_rows(file)}
