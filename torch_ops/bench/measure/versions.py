"""Our own ops under several versions of Triton, in turns on one GPU.

A process for each version binds a case and answers with one figure at a time, so that all versions take part in the
same rounds (`timing.interleave`). The processes share the GPU, on which only one works at any time.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_ops
from torch_ops.bench.measure.opbench import Case, OpBench
from torch_ops.bench.measure.results import BASELINE, OK, OURS, Record
from torch_ops.bench.measure.run import DIGITS_OF_MS, Setup
from torch_ops.bench.measure.timing import WARM_UP_SECONDS, Timer, interleave, make_timer, warm_up

# This file's code with the folder's packages, which may be older than it.
SERVE = f"import runpy; runpy.run_path({__file__!r})['serve']()"
# Skips the check of torch and Triton versions. Eager calls do not use the part of torch 2.11 that fails.
ANY_TRITON = "VK_ANY_TRITON"


class Version:
    """Run a process that times our ops with the packages in `folder`, or with those of this process.

    `name` is its version of Triton, and the folder's name where a copy of this library is in there.
    """

    def __init__(self, folder: str) -> None:
        paths = [os.path.abspath(folder), *sys.path] if folder else sys.path
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), ANY_TRITON: "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            # Python looks into the current folder first, where another copy of our own packages may lie.
            cwd=folder or None,
        )  # fmt: skip
        self.folder = Path(folder).resolve() if folder else None
        try:
            self.name, *files = map(str, self.answer())
        except RuntimeError as error:
            raise ValueError(f"{folder or 'this version'}: {error}") from error
        if self.folder is not None:
            inside = [Path(file).is_relative_to(self.folder) for file in files]
            if not any(inside):
                self.close()
                raise ValueError(
                    f"{folder} holds neither triton nor torch_ops; give the folder that holds their folders"
                )
            if inside[1]:
                self.name += f" {self.folder.name}"

    def tell(self, question: Any) -> None:
        assert self._process.stdin is not None
        # A process that has ended is reported when it is asked for the answer.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a process that times ops ended with {self._process.wait()}; see what it says above")
        return json.loads(answer)

    def ask(self, question: Any) -> Any:
        self.tell(question)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def versions(folders: Sequence[str]) -> Iterator[list[Version]]:
    with contextlib.ExitStack() as stack:
        started = []
        for folder in folders:
            started.append(Version(folder))
            stack.callback(started[-1].close)
        names = [process.name for process in started]
        if len({*names}) < len(names):
            raise ValueError(f"the versions are {', '.join(names)}; give different ones")
        yield started


def time_versions(
    bench: OpBench, case: Case, direction: str, setup: Setup, processes: Sequence[Version]
) -> list[Record]:
    """Return a record for each version, the first of which is named as ours."""
    question = {
        "op": bench.op, "case": case.name, "direction": direction, "dtype": str(setup.dtype),
        "device": str(setup.device),
    }  # fmt: skip
    # Kernels are compiled side by side.
    for process in processes:
        process.tell(question)
    bound = [process.answer() for process in processes]
    timers = {process.name: Timer("graph", partial(process.ask, "sample")) for process in processes}
    warm_up(timers.values(), WARM_UP_SECONDS)
    figures = interleave(timers, setup.rounds)
    return [
        Record(
            bench.op, case.name, bench.shape(case), direction, setup.kind, about["path"], process.name,
            BASELINE if index else OURS, OK, timer=about["timer"], flops=about["flops"],
            rounds_ms=tuple(round(ms, DIGITS_OF_MS) for ms in figures[process.name]),
        )
        for index, (process, about) in enumerate(zip(processes, bound, strict=True))
    ]  # fmt: skip


@dataclass
class _Worker:
    timer: Timer | None = None

    def answer(self, question: Any) -> Any:
        from torch_ops.bench.app import BENCHES

        if question == "sample":
            assert self.timer is not None
            return self.timer.sample()
        self.timer = None
        torch.cuda.empty_cache()
        bench, device = BENCHES[question["op"]], torch.device(question["device"])
        dtype = getattr(torch, question["dtype"].removeprefix("torch."))
        (case,) = bench.cases([question["case"]], device)
        inputs = bench.inputs(case, dtype, device, 0)
        direction = question["direction"]
        self.timer = make_timer([bench.ours.bind(case, inputs).work(direction, device)], device)
        cost = bench.cost(inputs, direction == "backward")
        return {"path": bench.path(inputs), "timer": self.timer.kind, "flops": cost.flops}


def serve() -> None:
    """Answer the questions of another process, a line each."""
    import triton

    answers = os.fdopen(os.dup(1), "w")
    # Whatever else prints must not come between answers.
    os.dup2(2, 1)
    worker = _Worker()
    files = [str(Path(str(package.__file__)).resolve()) for package in (triton, torch_ops)]
    print(json.dumps([triton.__version__, *files]), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)
