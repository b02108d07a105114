"""Small cases of Hopper kernels against the portable path: `python -m torch_ops._tools.self_test GPU TRITON`.

`torch_ops._core.self_test` runs it once under a Triton version that is not in `hopper.TRITON_VERSIONS`. The exit code
is 0 if all cases agree. It is WRONG if a case disagrees, or if Hopper kernels raise or crash. Other codes say nothing
about the kernels.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from torch_ops._core.device import out_of_memory
from torch_ops._core.self_test import REASON, WRONG
from torch_ops.attention import attention
from torch_ops.mlp import mlp
from torch_ops.qkv_rope import qkv_rope
from torch_ops.settings import settings
from torch_ops.window_attn import window_attn

# Both paths round to bf16 and add in another order. A wrong tile is off by a whole in its own block of rows.
MOST_RELATIVE_ERROR = 4e-2
BLOCK_ROWS = 64
# Side by side, since most of the time goes into compilation. Each takes about 1 GB of GPU memory.
PROCESSES = 4
# Exit codes of a process whose kernels or compiler broke it.
CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}


class Case(NamedTuple):
    """A call; `tensors` come first among its arguments and get gradients."""

    name: str
    op: Callable[..., Tensor | tuple[Tensor, ...]]
    tensors: tuple[Tensor, ...]
    options: dict[str, object]


def cases(device: torch.device) -> Iterator[Case]:
    """All kernels for Hopper GPUs: attention's head dimensions, masks and groups, epilogues of products."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(device, dtype)

    boundaries = torch.tensor([0, 300, 300, 1000], dtype=torch.int32, device=device)
    for head_dim, causal in ((64, False), (72, True), (80, False), (128, True)):
        packed = draw(1000, 4, head_dim), draw(1000, 2, head_dim), draw(1000, 2, head_dim)
        options = {"cu_seqlens": boundaries, "causal": causal}
        yield Case(f"window_attn, head dimension {head_dim}", window_attn, packed, options)
        options = {**options, "window_left": 70}
        yield Case(f"window_attn in windows, head dimension {head_dim}", window_attn, packed, options)
    for head_dim in (96, 128):
        dense = tuple(draw(2, 4, 400, head_dim) for _ in range(3))
        yield Case(f"attention, head dimension {head_dim}", attention, dense, {"window_left": 100})
    few = draw(1, 4, 500, 64), draw(1, 2, 500, 64), draw(1, 2, 500, 64)
    yield Case("attention with few tiles", attention, few, {"causal": True})
    yield Case("attention with sinks", attention, few, {"sinks": draw(4, dtype=torch.float32)})
    single = tuple(draw(2, 4, 300, 64, dtype=torch.float32) for _ in range(3))
    yield Case("attention of fp32 inputs", attention, single, {"compute_dtype": torch.bfloat16, "causal": True})
    many = tuple(draw(8, 32, 300, 64, dtype=torch.float32) for _ in range(3))
    yield Case("attention in fp32", attention, many, {})
    x, w2 = draw(600, 1152), draw(1152, 4304)
    for activation, inner in (("gelu_tanh", 4304), ("gelu", 4304), ("swiglu", 8608)):
        weights = draw(inner, 1152) * 0.03, draw(inner), w2 * 0.03, draw(1152)
        yield Case(f"mlp with {activation}", mlp, (x, *weights), {"activation": activation})
    angles = draw(600, 72, dtype=torch.float32)
    projected = x, draw(3 * 16 * 72, 1152) * 0.03, draw(3 * 16 * 72)
    yield Case("qkv_rope", qkv_rope, projected, {"cos": angles.cos(), "sin": angles.sin(), "num_heads": 16})


def results(case: Case, path: str) -> list[Tensor]:
    """Return the outputs of a case on a path, then the gradients of their weighted sum."""
    with settings(path=path):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in case.tensors]
        found = case.op(*leaves, **case.options)
        outputs = list(found) if isinstance(found, tuple) else [found]
        douts = [torch.linspace(-1, 1, each.numel(), device=each.device).view_as(each).to(each) for each in outputs]
        return [*(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, douts)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest error of a block of rows, in the Frobenius norm; infinite if a number is not finite.

    A block counts for at least a tenth of an average one.
    """
    found, expected = (each.double().reshape(-1, each.shape[-1]) for each in (found, expected))
    average = expected.norm() * (BLOCK_ROWS / max(len(expected), BLOCK_ROWS)) ** 0.5
    worst = 0.0
    for block, right in zip(found.split(BLOCK_ROWS), expected.split(BLOCK_ROWS), strict=True):
        error = ((block - right).norm() / torch.maximum(right.norm(), average / 10).clamp_min(1e-30)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def fault(case: Case) -> str:
    """Return how the Hopper path fails a case, or nothing.

    Errors that say nothing about its kernels are raised: those of the portable path, of memory and of files.
    """
    expected = results(case, "portable")
    try:
        worst = max(map(relative_error, results(case, "hopper"), expected))
    except Exception as error:
        if out_of_memory(error) or isinstance(error, OSError):
            raise
        return f"{case.name}: {type(error).__name__}: {error}"
    return f"{case.name}: relative error {worst:.1e}" if worst > MOST_RELATIVE_ERROR else ""


def end_with_parent() -> None:
    """End this process when its parent does: a kernel may hang."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def try_share(index: int, share: int, answers: Connection) -> None:
    """Send the name of each case of a share before it runs, and its fault after it."""
    end_with_parent()
    torch.cuda.set_device(index)
    for case in islice(cases(torch.device("cuda", index)), share, None, PROCESSES):
        answers.send(case.name)
        answers.send(fault(case))


def outcome(answers: Connection, process: BaseProcess) -> str:
    """Return the first fault that a process reports, or nothing; end if the process says nothing about the kernels."""
    name = ""
    with contextlib.suppress(EOFError):
        while True:
            name = answers.recv()
            if found := answers.recv():
                return str(found)
    process.join()
    if process.exitcode in CRASHES:
        return f"{name}: the process ended with code {process.exitcode}"
    if process.exitcode:
        # Its own last words stand above.
        sys.exit(1)
    return ""


def main() -> None:
    index, version = int(sys.argv[1]), sys.argv[2]
    if triton.__version__ != version:
        sys.exit(f"the self-test of triton {version} found triton {triton.__version__}")
    spawn = multiprocessing.get_context("spawn")
    started: list[tuple[Connection, BaseProcess]] = []
    for share in range(PROCESSES):
        here, there = spawn.Pipe(duplex=False)
        started.append((here, spawn.Process(target=try_share, args=(index, share, there), daemon=True)))
        started[-1][1].start()
        there.close()
    for answers, process in started:
        if found := outcome(answers, process):
            print(REASON + " ".join(found.split()), file=sys.stderr)
            sys.exit(WRONG)


if __name__ == "__main__":
    main()
