"""This machine: what it is called, and what it reaches in this very run."""

import platform
import shlex
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch
import triton

import torch_ops
from torch_ops.bench.measure.results import Ceilings, Provenance
from torch_ops.bench.measure.timing import Work, make_timer

PACKAGE = Path(torch_ops.__file__).resolve().parent


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure the rates of a copy and of a matrix product, both large for the device, on random data. The copy is the
    driver's or a kernel that negates, whichever is faster."""
    return Ceilings(_copy_gb_s(device), _matmul_tflops(device, dtype), dtype_name(dtype))


def provenance(device: torch.device, commit: str | None, baselines: dict[str, str]) -> Provenance:
    """The origin that every result carries; `baselines` describes each baseline that was asked for."""
    versions = {
        "vk": torch_ops.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if device.type == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return Provenance(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit or _checked_out_commit() or "unknown", command=_command_line(), device=device_name(device),
        driver=_driver() if device.type == "cuda" else None, versions=versions, baselines=baselines,
    )  # fmt: skip


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy_gb_s(device: torch.device) -> float:
    source = torch.randn(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    # The driver's copy is the slower of these on an H200: 2.7 TB/s of 4.2.
    ways: tuple[Work, ...] = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * source.nbytes / min(_best_of_two(way, device) for way in ways) / 1e6


def _matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_of_two(lambda: left @ right, device) / 1e9


def _best_of_two(work: Work, device: torch.device) -> float:
    """Milliseconds."""
    timer = make_timer([work], device)
    return min(timer.sample() for _ in range(2))


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = _output(query)
    return answer.splitlines()[0].strip() if answer else None


def _checked_out_commit() -> str | None:
    """The commit this package was checked out at, "-dirty" where files were changed since."""
    git = ["git", "-C", str(PACKAGE)]
    # Installed into another project's environment, the package lies inside that project's tree.
    if _output([*git, "rev-parse", "--show-toplevel"]) != str(PACKAGE.parent):
        return None
    return _output([*git, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"])


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _command_line() -> str:
    """The command as it was typed, without output files and the commit."""
    program, *arguments = sys.argv
    name = Path(program).name
    launcher = ["python", "-m", "torch_ops.bench"] if name == "__main__.py" else [name]
    kept, rest = [], iter(arguments)
    for argument in rest:
        option, equals, _ = argument.partition("=")
        if option not in ("--out", "--json", "--plot", "--trace", "--rows-out", "--commit"):
            kept.append(argument)
        elif not equals:
            next(rest, None)
    return shlex.join([*launcher, *kept])
