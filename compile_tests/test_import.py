"""What every process that uses the library pays before its first call."""

import os
import resource
import subprocess
import sys

import pytest

# CPU seconds above what comes before, on a core that imports torch in TORCH seconds. A core whose other half is busy
# takes longer for everything.
IMPORT, HELP, TORCH = 0.7, 0.6, 1.0
TRIES = 4


def _cpu_seconds(code: str) -> float:
    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "80"}
    )
    return spent() - before


def _least(code: str) -> float:
    return min(_cpu_seconds(code) for _ in range(TRIES))


@pytest.fixture(scope="module")
def imported() -> float:
    return _least("import torch_ops")


@pytest.fixture(scope="module")
def torch_alone() -> float:
    return _least("import torch")


def test_import_takes_little_longer_than_torch_itself(imported: float, torch_alone: float) -> None:
    """The least of some tries, because other processes make all of them longer."""
    above = imported - torch_alone
    assert above <= IMPORT * max(1.0, torch_alone / TORCH), f"{above:.2f} s of CPU above import torch"


def test_help_takes_little_longer_than_the_import(imported: float, torch_alone: float) -> None:
    above = _least("import sys; sys.argv = ['vk', '--help']\nfrom torch_ops.command.app import main\nmain()") - imported
    assert above <= HELP * max(1.0, torch_alone / TORCH), f"{above:.2f} s of CPU above import torch_ops"


@pytest.mark.parametrize("heavy", ["torch._dynamo", "torch._inductor", "transformers", "matplotlib"])
def test_import_leaves_out_what_few_need(heavy: str) -> None:
    code = f"import sys, torch_ops; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
