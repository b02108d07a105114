"""Rows of the encoder's bench side by side: in processes that prepare together and are timed in turn."""

import dataclasses
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests import encoder_bench
from tests.encoder_bench import BY_NAME, CPU, TINY
from torch_ops import cli
from torch_ops.bench import encoder_beside
from torch_ops.bench.encoder_beside import measure_beside
from torch_ops.bench.results import OK, Report

pytestmark = pytest.mark.no_interpret
quick = encoder_bench.quick


def test_rows_prepare_together_and_are_timed_one_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    together, timed, most = threading.Barrier(3), [0], [0]

    def prepare_row(scene: Any, running: Any, say: Any) -> list[Any]:
        # Nobody is through before all are here.
        together.wait(timeout=30)
        return []

    def time_row(scene: Any, entries: Any, rounds: int, say: Any) -> Any:
        timed[0] += 1
        most[0] = max(most[0], timed[0])
        time.sleep(0.02)
        timed[0] -= 1
        return rounds

    monkeypatch.setattr(encoder_beside, "prepare_row", prepare_row)
    monkeypatch.setattr(encoder_beside, "time_row", time_row)
    task = encoder_beside._Task("tiny", ("vk",), torch.float32, CPU, 2, {}, tmp_path / "turns")
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(encoder_beside._measure, [task] * 3)) == [2, 2, 2]
    assert most == [1] and timed == [0]


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
    def interrupt(receivers: Any) -> Any:
        assert multiprocessing.active_children()
        raise KeyboardInterrupt

    monkeypatch.setattr(encoder_beside.connection, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(measure_beside([TINY], [BY_NAME["vk"]], torch.float32, [CPU], 2, {}))
    assert not multiprocessing.active_children()


def test_a_process_ends_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """However that ends."""
    gone, ended, sent = threading.Event(), threading.Event(), []
    monkeypatch.setattr(encoder_beside.multiprocessing, "parent_process", lambda: SimpleNamespace(join=gone.wait))
    monkeypatch.setattr(encoder_beside.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(encoder_beside, "_measure", lambda task: task)
    task: Any = "what is measured"
    encoder_beside._report(task, SimpleNamespace(send=sent.append))
    assert sent == [task] and not ended.is_set()
    gone.set()
    assert ended.wait(timeout=30)


def test_a_row_that_fails_takes_no_other_with_it() -> None:
    nobody = dataclasses.replace(BY_NAME["vk"], name="nobody")
    ((name, failed),) = measure_beside([TINY], [nobody], torch.float32, [CPU], 2, {})
    assert (
        name == "tiny" and isinstance(failed, RuntimeError) and "ValueError" in str(failed) and "nobody" in str(failed)
    )
