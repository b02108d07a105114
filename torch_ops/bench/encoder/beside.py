"""Rows of the encoder's bench side by side: each in a process of its own, which prepare together and are timed in turn.

Most of a row's time goes into compiling its contenders, on one core. A row is timed while nothing else runs: launches
want the host to themselves. So the first is told to begin when all are prepared, and the next when the process before
it is gone, since what that held of the device is freed by the driver that others launch through. All are on one GPU: on
a machine of two H200, eager calls of as many launches took the host 14 ms on the first and 30 on the second.
"""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch

import torch_ops
from torch_ops.bench.commands import options
from torch_ops.bench.encoder.contenders import CONTENDERS, EncoderContender
from torch_ops.bench.encoder.contest import prepare_row, time_row
from torch_ops.bench.encoder.rows import ROWS, SMOKE, Row, Session, make_scene, make_tower
from torch_ops.bench.measure.results import EncoderRow
from torch_ops.bench.measure.room import find_named, one_line

_SECONDS_TO_END = 60


@dataclass(frozen=True)
class _Task:
    """What a process is told: names, since contenders hold functions."""

    row: str
    contenders: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    rounds: int
    changes: dict[str, Any]


def measure_beside(
    rows: Sequence[Row], running: Sequence[EncoderContender], dtype: torch.dtype, device: torch.device,
    rounds: int, changes: dict[str, Any],
) -> Generator[tuple[str, EncoderRow | Exception]]:  # fmt: skip
    """Each row's name and what was measured, or why it was not, as they finish."""
    names, context = tuple(each.name for each in running), multiprocessing.get_context("spawn")
    processes: list[Any] = []
    preparing: dict[Any, tuple[str, Any]] = {}
    prepared: list[tuple[Any, str, Any]] = []
    try:
        for row in rows:
            task = _Task(row.name, names, dtype, device, rounds, changes)
            ours, theirs = context.Pipe()
            process = context.Process(target=_report, args=(task, theirs))
            process.start()
            processes.append(process)
            # Where the process holds the only one, its end is seen.
            theirs.close()
            preparing[ours] = (row.name, process)
        while preparing:
            for pipe in connection.wait(list(preparing)):
                name, process = preparing.pop(pipe)
                if (failed := _received(pipe, process)) is None:
                    prepared.append((pipe, name, process))
                else:
                    _end(process)
                    yield name, failed
        for pipe, name, process in prepared:
            found = _timed(pipe, process)
            _end(process)
            yield name, found
    finally:
        # Those that are done have nothing left to do, and the others nobody to do it for.
        for process in processes:
            process.terminate()
            process.join()


def _end(process: Any) -> None:
    """What was measured is here; a process that hangs at its end holds up no other."""
    process.join(_SECONDS_TO_END)
    process.kill()
    process.join()


def _timed(pipe: Any, process: Any) -> Any:
    # It may have ended while it waited.
    with contextlib.suppress(OSError):
        pipe.send(None)
    return _received(pipe, process)


def _received(pipe: Any, process: Any) -> Any:
    """None of a row that is prepared, else what was measured or why it was not."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        process.join()
        return RuntimeError(f"its process ended with {process.exitcode}")


def _report(task: _Task, pipe: Any) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()

    def wait_for_turn() -> None:
        pipe.send(None)
        pipe.recv()

    try:
        found: EncoderRow | Exception = _measure(task, wait_for_turn)
    except Exception as error:
        # As words: not every exception can be sent.
        found = RuntimeError(one_line(error))
    pipe.send(found)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _measure(task: _Task, wait_for_turn: Callable[[], None]) -> EncoderRow:
    def say(line: str) -> None:
        options.say(f"{task.row}: {line.strip()}")

    if task.device.type == "cuda":
        torch.cuda.set_device(task.device)
    (row,) = find_named((*ROWS, *SMOKE), [task.row])
    running = find_named(CONTENDERS, task.contenders)
    with torch_ops.settings(**task.changes):
        scene = make_scene(Session(make_tower(task.device, task.dtype)), row)
        entries = prepare_row(scene, running, say)
        if task.device.type == "cuda":
            # What is free here is room for the others.
            torch.cuda.empty_cache()
        wait_for_turn()
        return time_row(scene, entries, task.rounds, say)
