"""Hopper kernels under a version of Triton that nobody has measured: tried once for all.

A process of its own runs small cases of every kernel family against the portable path (`torch_ops._tools.self_test`),
so that a kernel that fails, hangs or writes where it should not harms nobody. The result lies on disk for each GPU,
version of Triton and state of our sources.
"""

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from csrc_free_ops.configs.rows import Gpu
from torch_ops._core.registry import Mode, current_mode
from torch_ops.settings import settings, source_hash, user_folder

PACKAGES = Path(__file__).resolve().parents[2]
# Kernels are compiled anew, a few seconds each.
SECONDS = 600
# Set in the process that tries kernels, which takes them.
TRIES = "VK_TRIES_KERNELS"


class SelfTestResult(NamedTuple):
    """Whether kernels hold, why not, and when that was found."""

    holds: bool
    why: str
    date: str


def _file(gpu: Gpu) -> Path:
    """Where the result lies."""
    key = f"{gpu.name}-{triton.__version__}-{source_hash()}"
    return user_folder() / "self_test" / f"{re.sub('[^A-Za-z0-9.-]', '_', key)}.json"


_known: dict[Path, SelfTestResult] = {}


def cached_result(gpu: Gpu) -> SelfTestResult | None:
    """The result of this process or of an earlier one, if any."""
    file = _file(gpu)
    if file not in _known:
        try:
            _known[file] = SelfTestResult(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            return None
    return _known[file]


def why_not(gpu: Gpu) -> str:
    """Why this GPU's kernels for Hopper do not run under this version of Triton, or nothing.

    The first eager call tries them. Neither a trace nor a capture does: they take the portable path until then.
    """
    if os.environ.get(TRIES) == "1":
        return ""
    result = cached_result(gpu)
    if result is None:
        if current_mode() is not Mode.EAGER or torch.cuda.is_current_stream_capturing():
            return f"the Hopper path was not yet tried with triton {triton.__version__}"
        result = _try_once(gpu)
        # Plans of calls within captures took the portable path.
        settings.forget_plans()
        if not result.holds:
            warnings.warn(
                f"vk: kernels for Hopper GPUs fail with triton {triton.__version__} on {gpu.name}, so the portable "
                f"path runs: {result.why}",
                stacklevel=2,
            )
    return "" if result.holds else f"the Hopper path failed its self-test with triton {triton.__version__}"


def _try_once(gpu: Gpu) -> SelfTestResult:
    """One process at a time tries, and those that waited read its result."""
    file = _file(gpu)
    with _locked(file):
        result = cached_result(gpu)
        if result is None:
            holds, why = _run()
            result = _known[file] = SelfTestResult(holds, why, datetime.now(timezone.utc).isoformat(timespec="seconds"))
            with contextlib.suppress(OSError):
                partial = file.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(result._asdict()))
                partial.replace(file)
    return result


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Without a folder that may be written to, each process tries for itself."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.with_suffix(".lock").open("w")
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run() -> tuple[bool, str]:
    """Whether the kernels hold in a process of their own, and its last words where they do not."""
    environment = {**os.environ, TRIES: "1", "VK_PATH": "auto"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGES), *sys.path)))
    command = [sys.executable, "-m", "torch_ops._tools.self_test", str(torch.cuda.current_device())]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"the self-test did not end in {SECONDS} s"
    except OSError as error:
        return False, f"the self-test could not start: {error}"
    if done.returncode == 0:
        return True, ""
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return False, (last[0].strip() if last else f"the self-test ended with code {done.returncode}")[:300]
