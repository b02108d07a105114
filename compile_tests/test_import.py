"""The import of the library costs little CPU time and leaves out packages that few calls need."""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

# CPU seconds above what comes before, on a core that imports torch in TORCH seconds. A core whose other half is busy
# takes longer for everything.
IMPORT, HELP, TORCH = 0.7, 0.6, 0.8
TRIES = 4
HEAVY = ["torch._dynamo", "torch._inductor", "transformers", "matplotlib"]

_PROCESS = """
import json, os, sys, time

marks = [time.process_time()]
import torch
marks.append(time.process_time())
import torch_ops
marks.append(time.process_time())
loaded = [name for name in sys.argv[1:] if name in sys.modules]
sys.argv, sys.stdout = ["vk", "--help"], open(os.devnull, "w")
try:
    from torch_ops.command.app import main
    main()
except SystemExit as end:
    assert not end.code, end.code
marks.append(time.process_time())
print(json.dumps([*(after - before for before, after in zip(marks, marks[1:])), loaded]), file=sys.__stdout__)
"""


class Spent(NamedTuple):
    """CPU seconds of one process, step by step, so that a change of its core's speed meets all steps.

    loaded: the heavy packages that the import of the library has brought.
    """

    torch: float
    torch_ops: float
    help: float
    loaded: list[str]

    @classmethod
    def measured(cls) -> "Spent":
        done = subprocess.run(
            [sys.executable, "-c", _PROCESS, *HEAVY],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "80"},
        )
        return cls(*json.loads(done.stdout))

    def at_full_speed(self, seconds: float) -> float:
        return seconds / max(1.0, self.torch / TORCH)


def shortest_import(tries: list[Spent]) -> float:
    return min(spent.at_full_speed(spent.torch_ops) for spent in tries)


def shortest_help(tries: list[Spent]) -> float:
    return min(spent.at_full_speed(spent.help) for spent in tries)


@pytest.fixture(scope="module")
def tries() -> list[Spent]:
    """At most TRIES processes; no more are started once both steps were short enough."""
    tried = [Spent.measured()]
    while len(tried) < TRIES and not (shortest_import(tried) <= IMPORT and shortest_help(tried) <= HELP):
        tried.append(Spent.measured())
    return tried


def test_import_takes_little_longer_than_torch_itself(tries: list[Spent]) -> None:
    assert shortest_import(tries) <= IMPORT, tries


def test_help_takes_little_longer_than_the_import(tries: list[Spent]) -> None:
    assert shortest_help(tries) <= HELP, tries


@pytest.mark.parametrize("heavy", HEAVY)
def test_import_leaves_out_what_few_need(heavy: str, tries: list[Spent]) -> None:
    assert heavy not in tries[0].loaded
