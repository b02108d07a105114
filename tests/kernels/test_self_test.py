"""Versions of Triton that are new to the library are tried once; kernels that fail then do not run."""

import contextlib
import faulthandler
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_tests.contract.trace import fake_gpu
from csrc_free_ops.configs.rows import Gpu
from torch_ops import explain, settings
from torch_ops._attention import hopper_backward, hopper_dkdv
from torch_ops._core import hopper, self_test
from torch_ops._gemm import hopper as gemm_hopper
from torch_ops._tools import self_test as cases

H100 = Gpu("h100", "cuda", 90, 232448, 132)


@pytest.fixture(autouse=True)
def unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_test, "_known", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(hopper, "is_supported_triton", lambda: False)
    monkeypatch.setattr(settings, "_self_test", "")
    yield
    # Later tests have the key of a supported version again.
    settings._self_test = ""
    settings._key_artefacts()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Lets tries end so; a number for each is in the list."""

    def end(holds: bool, why: str = "", is_final: bool = True) -> list[int]:
        runs: list[int] = []

        def run() -> tuple[bool, str, bool]:
            runs.append(len(runs))
            return holds, why, is_final

        monkeypatch.setattr(self_test, "_run", run)
        return runs

    return end


def _why() -> str:
    return hopper.why_not_this_triton(H100)


def test_kernels_that_hold_are_taken_from_then_on(tried: Callable[..., list[int]]) -> None:
    runs = tried(True)
    before = settings.generation
    assert _why() == _why() == ""
    # Plans made before, by calls that did not try, are made anew.
    assert runs == [0] and settings.generation == before + 1
    assert torch.compiler.config.cache_key_tag.endswith(":holds")


def test_kernels_that_fail_are_left_with_one_warning(tried: Callable[..., list[int]]) -> None:
    runs = tried(False, "window_attn: relative error 1.0")
    with pytest.warns(
        UserWarning, match="failed its self-test with triton .* on h100, so the portable path runs: window_attn: rel"
    ):
        assert "failed its self-test" in _why()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "failed its self-test" in _why()
    assert runs == [0]


def test_other_processes_read_the_result(
    tried: Callable[..., list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tried(True)
    assert _why() == ""
    (file,) = (tmp_path / "vk" / "self_test").glob("*.json")
    assert json.loads(file.read_text())["holds"] is True
    monkeypatch.setattr(self_test, "_known", {})
    assert _why() == "" and runs == [0]


@pytest.mark.parametrize("what", ["card", "triton", "sources"])
def test_another_gpu_triton_or_source_is_tried_anew(
    what: str, tried: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tried(True)
    assert _why() == ""
    if what == "triton":
        monkeypatch.setattr(self_test.triton, "__version__", "9.9.9")
    if what == "sources":
        monkeypatch.setattr(self_test, "source_hash", lambda: "changed")
    other = Gpu("h200", "cuda", 90, 232448, 132) if what == "card" else H100
    assert hopper.why_not_this_triton(other) == "" and runs == [0, 1]


def test_nothing_is_tried_in_traces_and_captures(
    tried: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tried(True)
    with FakeTensorMode():
        assert "not yet tried" in _why()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert "not yet tried" in _why()
    assert runs == [] and _why() == "" and runs == [0]
    with FakeTensorMode():
        assert _why() == ""


def test_info_says_what_holds_and_tries_nothing(tried: Callable[..., list[int]]) -> None:
    runs = tried(False, "mlp: relative error 1.0")
    assert "not yet tried" in hopper.what_holds(H100) and runs == []
    with pytest.warns(UserWarning):
        _why()
    assert hopper.what_holds(H100).endswith("mlp: relative error 1.0")
    assert hopper.what_holds(Gpu("l4", "cuda", 89, 101376)) == "l4 is no Hopper GPU"


def test_a_broken_or_read_only_folder_harms_nobody(
    tried: Callable[..., list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vk").write_text("no folder")
    runs = tried(True)
    assert _why() == _why() == "" and runs == [0]


def test_what_says_nothing_about_kernels_counts_for_the_process_alone(
    tried: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tried(False, "no memory", is_final=False)
    with pytest.warns(UserWarning, match="could not be tested .* runs in this process: no memory$"):
        _why()
    assert "could not be tested" in _why() and "could not be tested" in hopper.what_holds(H100) and runs == [0]
    monkeypatch.setattr(self_test, "_known", {})
    tried(True)
    assert _why() == ""


def test_processes_that_waited_do_not_run_it_again(
    tried: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first result is of its process alone, the others would take turns at it."""
    runs = tried(False, "no memory", is_final=False)
    file = self_test.result_file(H100)
    file.parent.mkdir(parents=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        release = threading.Timer(0.5, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        release.start()
        with pytest.warns(UserWarning, match="in this process: the self-test of another process gave no result$"):
            _why()
        release.join()
    assert runs == [] and not file.exists()


def test_a_folder_that_cannot_be_named_harms_nobody(
    tried: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/" + "a" * 300)
    tried(False, "mlp: relative error 1.0")
    with pytest.warns(UserWarning, match="mlp: relative error 1.0$"):
        _why()


def test_no_home_and_no_locks_harm_nobody(tried: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise OSError("no locks here")

    monkeypatch.setattr(self_test.fcntl, "flock", fail)
    runs = tried(True)
    assert _why() == "" and runs == [0]
    monkeypatch.setattr(self_test, "_known", {})
    monkeypatch.setattr(self_test, "result_file", lambda gpu: None)
    assert _why() == "" and "yes" in hopper.what_holds(H100) and runs == [0, 1]


@pytest.mark.parametrize("text", ["{", "null", "[" * 100000, '{"holds": "no", "why": "", "date": ""}'], ids=range(4))
def test_a_result_that_cannot_be_read_is_made_anew(text: str, tried: Callable[..., list[int]], tmp_path: Path) -> None:
    file = self_test.result_file(H100)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert tried(True) == [] and _why() == ""
    assert json.loads(file.read_text())["holds"] is True


def test_the_process_that_tries_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(self_test.TRIES, "1")
    assert _why() == ""


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (subprocess.CompletedProcess([], 0, "", ""), ""),
        (subprocess.CompletedProcess([], self_test.WRONG, "", "mlp: relative error 1.0\n"), "mlp: relative error 1.0"),
        (
            subprocess.CompletedProcess([], self_test.WRONG, "", f"{self_test.REASON}mlp: error 1.0\n# clear hooks\n"),
            "mlp: error 1.0",
        ),
        (subprocess.CompletedProcess([], 1, "", "torch.OutOfMemoryError: no memory\n"), "no memory"),
        (subprocess.CompletedProcess([], -6, "", ""), "ended with code -6"),
        (subprocess.TimeoutExpired([], 1), "did not end"),
        (OSError("no such file"), "could not start: no such file"),
    ],
)
def test_whatever_becomes_of_the_process_is_a_result(end: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> Any:
        assert command[1:3] == ["-m", "torch_ops._tools.self_test"] and command[-1] == self_test.triton.__version__
        environment = options["env"]
        assert environment[self_test.TRIES] == "1" and not list(Path(options["cwd"]).iterdir())
        # In the order in which this process looks for packages, so that it finds the same Triton.
        paths = environment["PYTHONPATH"].split(os.pathsep)
        searched = [os.path.abspath(path) for path in sys.path if path]
        assert searched == paths[: len(searched)] and environment["VK_ROWS"] == ""
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(self_test.subprocess, "run", run)
    holds, said, is_final = self_test._run()
    assert holds == (why == "") and why in said
    # A result about the process alone is not kept.
    assert is_final == (not isinstance(end, Exception) and end.returncode in (0, self_test.WRONG))


def test_wrong_results_and_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, on tensors that a CPU computes."""
    x = torch.randn(4, 8)

    class Wrong(torch.autograd.Function):
        """Twice x, or on the Hopper path more, or with another gradient."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, out: float, gradient: float) -> torch.Tensor:
            ctx.gradient = gradient if settings.path == "hopper" else 2.0
            return x * (out if settings.path == "hopper" else 2.0)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0] * ctx.gradient, None, None

    def fault(out: float, gradient: float) -> str:
        return cases.fault(cases.Case("twice", lambda x: Wrong.apply(x, out, gradient), (x,), {}))

    assert fault(2.0, 2.0) == ""
    for wrong in ((2.1, 2.0), (2.0, 2.1), (float("nan"), 2.0), (2.0, float("inf"))):
        assert fault(*wrong).startswith("twice: relative error")


def test_every_case_is_one_that_the_ops_take() -> None:
    """Small enough for a CPU, on which both paths are the reference."""
    found = list(cases.cases(torch.device("cpu")))
    assert len(found) >= 10
    for case in found:
        assert cases.fault(case) == ""


def test_cases_reach_every_kernel_for_hopper_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(self_test.TRIES, "1")
    reached = set()
    launchers = hopper_backward, hopper_dkdv, gemm_hopper
    with contextlib.ExitStack() as stack:
        for module in launchers:
            stack.enter_context(mock.patch.object(module, "programs", lambda index: 132))
        stack.enter_context(stack.enter_context(fake_gpu(name="h200", path="hopper")))
        for case in cases.cases(torch.device("cuda", 0)):
            # Their gradient is ATen's, which needs a CUDA build for it.
            if "sinks" not in case.options:
                report = explain(case.op, *case.tensors, **case.options)
                reached |= {name.partition(" ")[0] for name in report["kernels"] if "hopper" in name}
    assert reached == {
        "attention_fwd_hopper", "attention_bwd_hopper", "attention_bwd_small_hopper", "attention_fwd_fp32_hopper",
        "attention_bwd_fp32_dkdv_hopper", "gemm_hopper", "gemm_hopper_gradient",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "error", "is_final"),
    [
        ("hopper", RuntimeError("PassManager::run failed"), True),
        ("hopper", torch.AcceleratorError("an illegal memory access"), True),
        ("portable", RuntimeError("PassManager::run failed"), False),
        ("hopper", torch.OutOfMemoryError("no memory"), False),
        ("hopper", RuntimeError("Triton Error [CUDA]: out of memory"), False),
        ("hopper", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), False),
        ("hopper", OSError(28, "No space left on device"), False),
    ],
    ids=str,
)
def test_errors_of_hopper_kernels_alone_are_faults(path: str, error: Exception, is_final: bool) -> None:
    def op(x: torch.Tensor) -> torch.Tensor:
        if settings.path == path:
            raise error
        return x * 2

    case = cases.Case("twice", op, (torch.randn(4, 8),), {})
    if is_final:
        assert cases.fault(case) == f"twice: {type(error).__name__}: {error}"
    else:
        with pytest.raises(type(error)):
            cases.fault(case)


def _right(answers: Any) -> None:
    answers.send("first")
    answers.send("")


def _wrong(answers: Any) -> None:
    _right(answers)
    answers.send("second")
    answers.send("second: relative error 1.0")


def _crash(answers: Any) -> None:
    _right(answers)
    answers.send("second")
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def _end_early(answers: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(answers: Any) -> None:
    raise RuntimeError("no memory")


@pytest.mark.parametrize(
    ("share", "found", "code"),
    [
        (_right, "", None), (_wrong, "second: relative error 1.0", None), (_raise, "", 1), (_end_early, "", 1),
        (_crash, "second: the process ended with code -11", None),
    ],
)  # fmt: skip
def test_what_a_process_ends_with_is_told_apart(share: Any, found: str, code: int | None) -> None:
    """A killed process, as one that lacks memory, says nothing about the kernels."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=share, args=(there,))
    process.start()
    there.close()
    if code is None:
        assert cases.outcome(here, process) == found
    else:
        with pytest.raises(SystemExit) as ended:
            cases.outcome(here, process)
        assert ended.value.code == code


def test_shares_hold_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "end_with_parent", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(cases, "fault", lambda case: "")
    listed = cases.cases
    monkeypatch.setattr(cases, "cases", lambda device: listed(torch.device("meta")))
    sent: list[str] = []
    for share in range(cases.PROCESSES):
        cases.try_share(0, share, mock.Mock(send=sent.append))
    assert sorted(filter(None, sent)) == sorted(case.name for case in listed(torch.device("meta")))


HANGS = """
import multiprocessing, os, time
from torch_ops._tools.self_test import end_with_parent

def hang():
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(120)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=hang)
    process.start()
    process.join()
"""


def test_processes_that_hang_end_with_the_one_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, tmp_path / "hangs.py"], stdout=subprocess.PIPE, env=environment) as killed:
        assert killed.stdout is not None
        assert int(killed.stdout.readline()) != killed.pid
        killed.kill()
        begun = time.monotonic()
        # The pipe ends once nobody has it open.
        assert killed.stdout.read() == b"" and time.monotonic() - begun < 60


@pytest.mark.gpu
def test_kernels_pass_on_a_hopper_gpu(device: str) -> None:
    if device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    assert self_test._run() == (True, "", True)
