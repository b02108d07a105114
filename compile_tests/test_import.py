"""The import of the library costs little CPU time and leaves out packages that few calls need."""

import os
import subprocess
import sys
from typing import NamedTuple

import pytest

# CPU seconds above what comes before, on a core that imports torch in TORCH seconds. A core whose other half is busy
# takes longer for everything.
IMPORT, HELP, TORCH = 0.7, 0.6, 0.8
TRIES = 4

_PROCESS = """
import os, sys, time

marks = [time.process_time()]
import torch
marks.append(time.process_time())
import torch_ops
marks.append(time.process_time())
sys.argv, sys.stdout = ["vk", "--help"], open(os.devnull, "w")
try:
    from torch_ops.command.app import main
    main()
except SystemExit as end:
    assert not end.code, end.code
marks.append(time.process_time())
print(*(after - before for before, after in zip(marks, marks[1:])), file=sys.__stdout__)
"""


class Spent(NamedTuple):
    """CPU seconds of one process, step by step, so that a change of its core's speed meets all steps."""

    torch: float
    torch_ops: float
    help: float

    @classmethod
    def measured(cls) -> "Spent":
        done = subprocess.run(
            [sys.executable, "-c", _PROCESS],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "80"},
        )
        return cls(*map(float, done.stdout.split()))

    def at_full_speed(self, seconds: float) -> float:
        return seconds / max(1.0, self.torch / TORCH)


@pytest.fixture(scope="module")
def tries() -> list[Spent]:
    return [Spent.measured() for _ in range(TRIES)]


def test_import_takes_little_longer_than_torch_itself(tries: list[Spent]) -> None:
    assert min(spent.at_full_speed(spent.torch_ops) for spent in tries) <= IMPORT, tries


def test_help_takes_little_longer_than_the_import(tries: list[Spent]) -> None:
    assert min(spent.at_full_speed(spent.help) for spent in tries) <= HELP, tries


@pytest.mark.parametrize("heavy", ["torch._dynamo", "torch._inductor", "transformers", "matplotlib"])
def test_import_leaves_out_what_few_need(heavy: str) -> None:
    code = f"import sys, torch_ops; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
