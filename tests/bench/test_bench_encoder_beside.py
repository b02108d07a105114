"""Rows of the encoder's bench side by side: in processes that prepare together and are timed in turn."""

import dataclasses
import multiprocessing
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.bench import encoder_bench
from tests.bench.encoder_bench import BY_NAME, CPU, TINY
from torch_ops.bench.encoder import beside as encoder_beside
from torch_ops.bench.encoder.beside import measure_beside
from torch_ops.bench.measure.results import OK, Report
from torch_ops.command import app as cli

pytestmark = pytest.mark.no_interpret
quick = encoder_bench.quick


def log_instead(task: Any, pipe: Any) -> None:
    """A process's part: it is slow to prepare, to measure, and to end."""
    with Path(task.changes["log"]).open("a", buffering=1) as log:
        time.sleep(0.1)
        log.write("prepared\n")
        pipe.send(None)
        pipe.recv()
        log.write(f"{task.row} begins\n")
        time.sleep(0.1)
        pipe.send(task.row)
        time.sleep(0.3)
        log.write(f"{task.row} is gone\n")


def test_rows_prepare_together_and_are_timed_one_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encoder_beside, "_report", log_instead)
    rows = [dataclasses.replace(TINY, name=name) for name in "abc"]
    changes = {"log": str(tmp_path / "log")}
    found = list(measure_beside(rows, [BY_NAME["vk"]], torch.float32, CPU, 2, changes))
    assert sorted(found) == [("a", "a"), ("b", "b"), ("c", "c")]
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:3] == ["prepared"] * 3
    assert lines[3:] == [line for name, _ in found for line in (f"{name} begins", f"{name} is gone")]


def end_early(task: Any, pipe: Any) -> None:
    if task.row in "bd":
        pipe.send(None)
    if task.row == "b":
        pipe.recv()
    if task.row != "c":
        os._exit(3)
    log_instead(task, pipe)


def test_a_process_that_ends_early_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While it prepares, is timed, or waits for that."""
    monkeypatch.setattr(encoder_beside, "_report", end_early)
    rows = [dataclasses.replace(TINY, name=name) for name in "abcd"]
    changes = {"log": str(tmp_path / "log")}
    found = dict(measure_beside(rows, [BY_NAME["vk"]], torch.float32, CPU, 2, changes))
    assert found.pop("c") == "c"
    assert {name: str(why) for name, why in found.items()} == dict.fromkeys("abd", "its process ended with 3")


def stay(task: Any, pipe: Any) -> None:
    """A process that is done and does not end."""
    pipe.send(None)
    pipe.recv()
    pipe.send(task.row)
    time.sleep(600)


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_beside, "_report", stay)
    monkeypatch.setattr(encoder_beside, "_SECONDS_TO_END", 0.1)
    rows = [dataclasses.replace(TINY, name=name) for name in "ab"]
    found = list(measure_beside(rows, [BY_NAME["vk"]], torch.float32, CPU, 2, {}))
    assert sorted(found) == [("a", "a"), ("b", "b")]
    assert not multiprocessing.active_children()


def test_a_report_that_cannot_be_written_ends_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two rows: the other waits for a turn that does not come."""

    def refuse(report: Any, path: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Report, "write", refuse)
    options = ("--device", "cpu", "--commit", "abc", "--contenders", "vk", "--rounds", "2")
    out = ("--out", str(tmp_path / "run.json"))
    result = CliRunner().invoke(cli.app, ["bench", "encoder", *options, *out, "--side-by-side"])
    assert isinstance(result.exception, OSError)
    assert not multiprocessing.active_children()


def test_command_gathers_what_processes_measure(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    options = ("--device", "cpu", "--commit", "abc", "--contenders", "vk,hf", "--rounds", "2", "--out", str(out))
    result = CliRunner().invoke(cli.app, ["bench", "encoder", *options, "--side-by-side"])
    assert result.exit_code == 0, result.output
    report = Report.from_json(out.read_text())
    assert [row.row for row in report.encoders] == ["tiny", "train_tiny"]
    for row in report.encoders:
        assert [(timed.name, timed.status) for timed in row.everyone] == [("vk", OK), ("hf", OK)]
        assert all(timed.ms is not None for timed in row.everyone)
    kept = CliRunner().invoke(cli.app, ["bench", "encoder", *options, "--side-by-side", "--resume"])
    assert kept.exit_code == 0 and "tiny: kept" in kept.stderr and "train_tiny: kept" in kept.stderr


def test_processes_end_with_a_command_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(pipe: Any, process: Any) -> Any:
        assert multiprocessing.active_children()
        raise KeyboardInterrupt

    monkeypatch.setattr(encoder_beside, "_received", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(measure_beside([TINY], [BY_NAME["vk"]], torch.float32, CPU, 2, {}))
    assert not multiprocessing.active_children()


def test_a_process_ends_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """However that ends."""
    gone, ended, sent = threading.Event(), threading.Event(), []
    monkeypatch.setattr(encoder_beside.multiprocessing, "parent_process", lambda: SimpleNamespace(join=gone.wait))
    monkeypatch.setattr(encoder_beside.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(encoder_beside, "_measure", lambda task, wait_for_turn: task)
    task: Any = "what is measured"
    encoder_beside._report(task, SimpleNamespace(send=sent.append))
    assert sent == [task] and not ended.is_set()
    gone.set()
    assert ended.wait(timeout=30)


def test_a_row_that_fails_takes_no_other_with_it() -> None:
    nobody = dataclasses.replace(BY_NAME["vk"], name="nobody")
    ((name, failed),) = measure_beside([TINY], [nobody], torch.float32, CPU, 2, {})
    assert (
        name == "tiny" and isinstance(failed, RuntimeError) and "ValueError" in str(failed) and "nobody" in str(failed)
    )
