"""Rows of the encoder's bench side by side: each in a process of its own, which prepare together and are timed in turn.

Most of a row's time goes into compiling its contenders, on one core. While one row is timed all others wait, whichever
GPU they are on: launches want the host to themselves.
"""

import contextlib
import fcntl
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

import torch_ops
from torch_ops.bench import options
from torch_ops.bench.encoder_contenders import CONTENDERS, EncoderContender
from torch_ops.bench.encoder_contest import prepare_row, time_row
from torch_ops.bench.encoder_rows import ROWS, SMOKE, Row, Session, make_scene, make_tower
from torch_ops.bench.results import EncoderRow
from torch_ops.bench.room import find_named, one_line


@dataclass(frozen=True)
class _Task:
    """What a process is told: names, since contenders hold functions."""

    row: str
    contenders: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    rounds: int
    changes: dict[str, Any]
    lock: Path


def measure_beside(
    rows: Sequence[Row], running: Sequence[EncoderContender], dtype: torch.dtype, devices: Sequence[torch.device],
    rounds: int, changes: dict[str, Any],
) -> Iterator[tuple[str, EncoderRow | Exception]]:  # fmt: skip
    """Each row's name and what was measured, or why it was not, as they finish; rows are dealt to `devices` in turn."""
    names, context = tuple(each.name for each in running), multiprocessing.get_context("spawn")
    processes: list[Any] = []
    under_way: dict[Any, tuple[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for place, row in enumerate(rows):
                device = devices[place % len(devices)]
                task = _Task(row.name, names, dtype, device, rounds, changes, Path(folder) / "turns")
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_report, args=(task, sender))
                process.start()
                processes.append(process)
                # Where the process holds the only one, its end is seen.
                sender.close()
                under_way[receiver] = (row.name, process)
            while under_way:
                for ready in connection.wait(list(under_way)):
                    name, process = under_way.pop(ready)
                    yield name, _received(ready, process)
        finally:
            # Those that are done have nothing left to do, and the others nobody to do it for.
            for process in processes:
                process.terminate()
                process.join()


def _received(receiver: Any, process: Any) -> EncoderRow | Exception:
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return RuntimeError(f"its process ended with {process.exitcode}")


def _report(task: _Task, sender: Any) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        found: EncoderRow | Exception = _measure(task)
    except Exception as error:
        # As words: not every exception can be sent.
        found = RuntimeError(one_line(error))
    sender.send(found)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _measure(task: _Task) -> EncoderRow:
    def say(line: str) -> None:
        options.say(f"{task.row}: {line.strip()}")

    if task.device.type == "cuda":
        torch.cuda.set_device(task.device)
    (row,) = find_named((*ROWS, *SMOKE), [task.row])
    running = find_named(CONTENDERS, task.contenders)
    with task.lock.open("w") as lock, torch_ops.settings(**task.changes):
        with _locked(lock, fcntl.LOCK_SH):
            scene = make_scene(Session(make_tower(task.device, task.dtype)), row)
            entries = prepare_row(scene, running, say)
            if task.device.type == "cuda":
                # What is free here is room for the others.
                torch.cuda.empty_cache()
        with _locked(lock, fcntl.LOCK_EX):
            return time_row(scene, entries, task.rounds, say)


@contextlib.contextmanager
def _locked(file: Any, kind: int) -> Iterator[None]:
    """The operating system's lock, which is let go of when the process ends, however it does."""
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
