"""Shared by all numerical tests: where they run, and what may not leak between runs."""

import contextlib
import fcntl
import gc
import importlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A stale entry would return the result of code that has since changed.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import pytest
import torch
from hypothesis import settings

import torch_ops

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
if INTERPRET:
    from tests.testing.interpreter import without_checks_of_int32, without_repetition

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if "no_interpret" in item.keywords and INTERPRET:
            item.add_marker(pytest.mark.skip(reason="not under the interpreter"))


@pytest.fixture
def matmul() -> Iterator[Any]:
    """Where PyTorch keeps its settings of tf32: the old one, then the new, are put back as a process finds them.

    Set by the new one alone they would contradict each other, and the old one could not be read.
    """
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.fixture
def device() -> str:
    """Where tests run: the GPU where there is one, else the CPU (the kernels themselves under the interpreter)."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    with without_repetition() if INTERPRET else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _checks_of_int32(request: pytest.FixtureRequest) -> Iterator[None]:
    """The interpreter checks arithmetic where inputs are drawn from everything, and where they are wild."""
    wanted = hasattr(request.function, "hypothesis") or "wild" in request.node.name
    with without_checks_of_int32() if INTERPRET and not wanted else contextlib.nullcontext():
        yield


# GPU memory for a test marked `large`, and for all others beside them. Fourteen workers that shared a GPU took 41 and
# 26 GiB.
LARGE_BYTES = 42 * 2**30
OTHERS_BYTES = 28 * 2**30


@pytest.fixture(autouse=True)
def _in_turns(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU runs only as many large tests at once as fit into its memory; the memory is given back afterwards."""
    if not torch.cuda.is_available() or request.node.get_closest_marker("large") is None:
        yield
        return
    gpu = torch.cuda.get_device_properties(0)
    with contextlib.ExitStack() as stack:
        _take_turn(stack, f"{gpu.uuid}-{os.getuid()}", max(1, (gpu.total_memory - OTHERS_BYTES) // LARGE_BYTES))
        yield
        gc.collect()
        torch.cuda.empty_cache()


def _take_turn(stack: contextlib.ExitStack, name: str, turns: int) -> None:
    for turn in itertools.cycle(range(turns)):
        file = stack.enter_context(Path(tempfile.gettempdir(), f"vk-large-{name}-{turn}").open("w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            time.sleep(0.1)
        else:
            # A process that was forked meanwhile has the file open too.
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
            return


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def shipped_rows_alone() -> Iterator[None]:
    """A developer's own launch rows must not decide what is tested."""
    with torch_ops.settings(rows=""):
        yield


@pytest.fixture
def quick_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds as short as they can be, and tables as they are without a terminal."""
    monkeypatch.setattr("torch_ops.bench.measure.timing.CPU_ROUND_MS", 0.5)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a Qwen3-VL tower that is small enough to run many times."""
    vision = importlib.import_module("transformers.models.qwen3_vl")
    directory = tmp_path_factory.mktemp("checkpoint")
    config = vision.Qwen3VLVisionConfig(
        depth=2,
        hidden_size=32,
        num_heads=2,
        intermediate_size=48,
        out_hidden_size=24,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vision.Qwen3VLVisionModel(config).save_pretrained(directory)
    return directory
