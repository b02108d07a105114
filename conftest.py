"""Shares of tests/ and compile_tests/, and two guards against a run that proves nothing."""

from __future__ import annotations

import argparse
import os
import re
import zlib

import pytest

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count:
        raise argparse.ArgumentTypeError(f"wanted I/N with 1 <= I <= N, such as 1/4; got {text!r}")
    return index, count


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vk")
    group.addoption("--shard", type=_shard, metavar="I/N", help="run the I-th of N equal shares")
    group.addoption("--require-gpu", action="store_true", help="refuse to start without a GPU")
    group.addoption("--require-run", action="store_true", help="fail unless some test passed")


def pytest_configure(config: pytest.Config) -> None:
    if WORKER:
        _begin_with_own_gpu()
    if config.getoption("require_gpu") and _gpu() is None:
        raise pytest.UsageError("--require-gpu: torch sees no GPU on this machine")
    if _gpu() is None or WORKER or config.getoption("shard") is not None:
        _one_thread()


def pytest_report_header(config: pytest.Config) -> str:
    import torch
    import triton

    interpreted = " in the interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    return f"vk: torch {torch.__version__}, triton {triton.__version__}{interpreted}, {_gpu() or 'no GPU'}"


# Last, so that the shares are equal after -k and -m have chosen.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard = config.getoption("shard")
    if shard is not None:
        _keep_shard(config, items, *shard)
    if WORKER and _gpu() is not None:
        _spread_large(items)


def _keep_shard(config: pytest.Config, items: list[pytest.Item], index: int, count: int) -> None:
    # A hash spreads slow neighbours over the shards and does not depend on the order of collection.
    ranked = sorted((zlib.crc32(item.nodeid.encode()), item.nodeid) for item in items)
    mine = {nodeid for _, nodeid in ranked[index - 1 :: count]}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
    items[:] = [item for item in items if item.nodeid in mine]


def _spread_large(items: list[pytest.Item]) -> None:
    """Neighbours begin at one worker, and so on one GPU, where large tests take turns: among the others, evenly."""
    large = [item for item in items if item.get_closest_marker("large") is not None]
    others = [item for item in items if item.get_closest_marker("large") is None]
    for index, item in enumerate(large):
        others.insert(index + index * (len(items) - len(large)) // len(large), item)
    items[:] = others


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # A worker of pytest-xdist may have been left without tests.
    if exitstatus != pytest.ExitCode.OK or WORKER or not session.config.getoption("require_run"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not reporter.getreports("passed"):
        reporter.write_line("\n--require-run: every test was skipped", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def _begin_with_own_gpu() -> None:
    """Before CUDA is asked for: pytest-xdist's workers take turns at which of the machine's GPUs is their first."""
    import torch

    count = torch.cuda.device_count()
    if count > 1:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        turn = int(WORKER.removeprefix("gw")) % count
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[turn:] + gpus[:turn])


def _one_thread() -> None:
    """Tensors are small here and other processes want the other cores: threads would wait for each other, and spin."""
    import torch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
