"""A test of Hopper kernels under a Triton version that is not in `hopper.TRITON_VERSIONS`, run once.

A subprocess runs small cases of the kernels against the portable path (`torch_ops._tools.self_test`), so a kernel that
crashes or hangs does not stop the caller. The result is kept on disk for each GPU, Triton version and state of our
sources. A failure that says nothing about the kernels, such as a GPU without free memory, counts for the process alone.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
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
# Every case compiles its kernels.
SECONDS = 600
# Set in the self-test process, so that it takes the Hopper path.
TRIES = "VK_TRIES_KERNELS"
# The exit code of a self-test that found a kernel wrong, and what the line with its reason begins with.
WRONG = 3
REASON = "self-test: "

_log = logging.getLogger(__name__)


class SelfTestResult(NamedTuple):
    """Result of a self-test: pass or fail, reason, date, and whether it says something about the kernels."""

    holds: bool
    why: str
    date: str
    is_final: bool = True

    @property
    def fault(self) -> str:
        """The failure in words, before the version of Triton."""
        return "failed its self-test" if self.is_final else "could not be tested"


def result_file(gpu: Gpu) -> Path | None:
    """Return the result file; None if the user has no folder."""
    key = f"{gpu.name}-{triton.__version__}-{source_hash()}"
    try:
        return user_folder() / "self_test" / f"{re.sub('[^A-Za-z0-9.-]', '_', key)}.json"
    except RuntimeError:
        return None


_known: dict[str, SelfTestResult] = {}


def _key(gpu: Gpu) -> str:
    return f"{gpu.name} {triton.__version__} {source_hash()}"


def cached_result(gpu: Gpu) -> SelfTestResult | None:
    """Return the result of this process or of an earlier one, if any."""
    key, file = _key(gpu), result_file(gpu)
    if key not in _known and file is not None:
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            result = SelfTestResult(**json.loads(file.read_text()))
            if [type(field) for field in result] == [bool, str, str, bool]:
                _known[key] = result
    return _known.get(key)


def why_not(gpu: Gpu) -> str:
    """Return why Hopper kernels do not run under this Triton version, or nothing.

    The first eager call that could take one runs the self-test. Traces and captures never do: without a result they
    take the portable path.
    """
    if os.environ.get(TRIES) == "1":
        return ""
    result, is_eager = cached_result(gpu), current_mode() is Mode.EAGER
    if result is None:
        if not is_eager or torch.cuda.is_current_stream_capturing():
            return f"the Hopper path was not yet tried with triton {triton.__version__}"
        result = _try_once(gpu)
        if not result.holds:
            file = result_file(gpu)
            again = f"; delete {file} to try again" if file is not None and os.path.exists(file) else ""
            warnings.warn(
                f"vk: the Hopper path {result.fault} with triton {triton.__version__} on {gpu.name}, so the portable "
                f"path runs{' in this process' * (not result.is_final)}: {result.why}{again}",
                stacklevel=2,
            )
    # Calls before, in traces and captures, took the portable path.
    settings.take_self_test(result.holds, is_eager)
    return "" if result.holds else f"the Hopper path {result.fault} with triton {triton.__version__}"


def _try_once(gpu: Gpu) -> SelfTestResult:
    """Run the self-test in one process at a time. One that waited reads the result, or takes no Hopper kernels."""
    file = result_file(gpu)
    with _locked(file) as waited:
        result = cached_result(gpu)
        if result is None and waited:
            # Each would wait for the one before it.
            why = "the self-test of another process gave no result"
            result = _known[_key(gpu)] = SelfTestResult(False, why, _now(), is_final=False)
        if result is None:
            _log.info("vk tries its kernels for Hopper GPUs with triton %s", triton.__version__)
            holds, why, is_final = _run()
            result = SelfTestResult(holds, why, _now(), is_final)
            _known[_key(gpu)] = result
            if is_final and file is not None:
                _write(file, json.dumps(result._asdict()))
    return result


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _write(file: Path, text: str) -> None:
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(file: Path | None) -> Iterator[bool]:
    """Lock the result file, and say whether that took a wait. Without a folder or locks, each process runs the test."""
    try:
        if file is None:
            raise OSError
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.with_suffix(".lock").open("w")
    except OSError:
        yield False
        return
    with lock:
        waited = False
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield waited
        finally:
            # A process forked meanwhile would keep it locked.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def _run() -> tuple[bool, str, bool]:
    """Run the self-test process; return pass or fail, the reason, and whether it says something about the kernels."""
    paths = [os.path.abspath(path) for path in sys.path if path]
    if str(PACKAGES) not in paths:
        paths.append(str(PACKAGES))
    # The user's launch rows are not part of the result's key.
    ours = {TRIES: "1", "VK_PATH": "auto", "VK_ROWS": "", "PYTHONPATH": os.pathsep.join(paths)}
    environment = {**os.environ, **ours}
    index = torch.cuda.current_device()
    command = [sys.executable, "-m", "torch_ops._tools.self_test", str(index), triton.__version__]
    try:
        # Python looks into the current folder first; an empty one holds no other packages.
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=SECONDS, cwd=empty
            )
    except subprocess.TimeoutExpired:
        return False, f"the self-test did not end in {SECONDS} s", False
    except OSError as error:
        return False, f"the self-test could not start: {error}", False
    if done.returncode == 0:
        return True, "", True
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    # Python itself may write after the reason.
    reasons = [line.removeprefix(REASON) for line in lines if line.startswith(REASON)] or lines
    why = reasons[-1][:300] if reasons else f"the self-test ended with code {done.returncode}"
    return False, why, done.returncode == WRONG
