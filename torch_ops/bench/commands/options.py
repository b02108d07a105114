"""Options that the benchmark's commands share, and what they stand for."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from torch_ops.bench.measure.opbench import Impl, OpBench, split
from torch_ops.bench.measure.results import check_replaceable
from torch_ops.settings import PATHS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def flag(*names: str, **rest: Any) -> Any:
    """An option of typer's; the last name's text is its help."""
    *declared, text = names
    return typer.Option(*declared, help=text, **rest)


def file(*names: str, kind: str = "json") -> Any:
    return flag(*names, metavar=f"FILE.{kind}", dir_okay=False)


CASES = "repeated or separated by commas (default: the op's own cases)."
Shapes = Annotated[
    list[str] | None,
    flag("--shapes", "Cases by name, by a pattern such as 'qwen3vl_*', or by shape: SEGMENTSxLENGTHxHEADSxHEAD_DIM[c] "
         f"such as 1x4096x16x72 (c: causal), for norms ROWSxWIDTH such as 4096x1152; {CASES}", metavar="CASE"),
]  # fmt: skip
Backward = Annotated[bool, flag("--backward", "Forward and backward, each by itself.")]
DtypeName = Annotated[
    str | None,
    flag("--dtype", "Type of the inputs (default: bfloat16, on a CPU float32).", metavar="|".join(DTYPES)),
]
DeviceName = Annotated[str | None, flag("--device", "Device: cpu, cuda or cuda:N (default: cuda, without a GPU cpu).")]
PathName = Annotated[str | None, flag("--path", "Path of ours (default: the settings').", metavar="|".join(PATHS))]
BaselineNames = Annotated[
    list[str] | None,
    flag("--peers", "Baselines by name; repeated or separated by commas (default: the device's).", metavar="NAME"),
]
Rounds = Annotated[int, flag("--rounds", "Timed turns of every implementation, at least.", min=2)]
Cold = Annotated[bool, flag("--cold", "So many inputs in turns that none is left in a GPU's L2 cache.")]
Out = Annotated[Path | None, file("--out", "File of all results.")]
Markdown = Annotated[bool, flag("--markdown", "Tables as Markdown.")]
Commit = Annotated[str | None, flag("--commit", "Commit hash to record (default: the current one).")]


def bad(option: str, message: str) -> typer.BadParameter:
    """An error about an option, for one line."""
    return typer.BadParameter(f"{message}.", param_hint=f"'{option}'")


def find_device(name: str | None) -> torch.device:
    """The device, made current; a GPU carries its index."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if count else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise bad("--device", f"unknown device {name!r}; give cpu, cuda or cuda:N")
    if (device.index or 0) >= count:
        raise bad("--device", f"{name!r} is not there, PyTorch finds {count} GPUs; give cpu")
    torch.cuda.set_device(device.index or 0)
    return torch.device("cuda", torch.cuda.current_device())


def find_dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise bad("--dtype", f"unknown dtype {name!r}; give one of {', '.join(DTYPES)}")
    return DTYPES[name]


def passes(backward: bool) -> tuple[str, ...]:
    return ("forward", "backward") if backward else ("forward",)


def find_path(name: str | None) -> dict[str, str]:
    """Changes of the settings."""
    if name is not None and name not in PATHS:
        raise bad("--path", f"unknown path {name!r}; give one of {', '.join(PATHS)}")
    if name == "hopper" and not torch.cuda.is_available():
        raise bad("--path", "its kernels want a Hopper GPU, and there is none")
    return {} if name is None else {"path": name}


def find_baselines(bench: OpBench, names: Sequence[str], device: torch.device) -> tuple[Impl, ...]:
    """The baselines asked for, in the benchmark's order; the device's usual ones where none are named."""
    wanted = split(names)
    known = {baseline.name: baseline for baseline in bench.baselines}
    for name in wanted:
        if name not in known:
            raise bad("--peers", f"unknown baseline {name!r}; give some of {', '.join(known)}")
    chosen = wanted or bench.usual[device.type]
    return tuple(baseline for baseline in bench.baselines if baseline.name in chosen)


def check_output(path: Path | None, option: str) -> None:
    """Refuses before the work begins what could not be written after it."""
    if path is None:
        return
    try:
        if not path.absolute().parent.is_dir():
            raise bad(option, f"there is no folder {str(path.parent)!r}; make it first")
        check_replaceable(path)
    except OSError as error:
        raise bad(option, f"{str(path)!r} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def value_errors(option: str) -> Iterator[None]:
    """Shows a ValueError as what is wrong with an option."""
    try:
        yield
    except ValueError as error:
        raise bad(option, str(error)) from error


@contextlib.contextmanager
def file_errors(file: Path) -> Iterator[None]:
    """Shows whatever fails while a file of results is read and drawn as what is wrong with it.

    Any figure may stand in a file: zeros and lists of other lengths fail where ratios are computed.
    """
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise bad(str(file), f"{kind}{' '.join(said.split())}") from error


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """`step(doing)`, called before each step, shows a bar on a terminal's stderr."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        done = itertools.count()

        def step(doing: str) -> None:
            bar.update(task, description=doing, completed=next(done))

        yield step


def say(line: str) -> None:
    """One line on stderr."""
    typer.echo(line, err=True)
