"""Options that the benchmark's commands share, and what they stand for."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from torch_ops.bench.measure.results import check_replaceable
from torch_ops.bench.measure.room import Contender, Room
from torch_ops.settings import PATHS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shapes",
        metavar="CASE",
        help="Names of cases, patterns of names such as 'qwen3vl_*', or shapes "
        "SEGMENTSxLENGTHxHEADSxHEAD_DIM[c] such as 1x4096x16x72 (c: causal), of norms ROWSxWIDTH such as 4096x1152; "
        "repeated or separated by commas.",
    ),
]
Backward = Annotated[bool, typer.Option("--backward", help="The backward too, by itself.")]
DtypeName = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="|".join(DTYPES),
        help="Unless given, bfloat16 on a GPU and float32 on a CPU.",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda or cuda:N; cuda unless given, where there is one."),
]
PathName = Annotated[
    str | None,
    typer.Option("--path", metavar="|".join(PATHS), help="The path that ours takes."),
]
PeerNames = Annotated[
    list[str] | None,
    typer.Option("--peers", metavar="NAME", help="Peers by name; repeated or separated by commas."),
]
Rounds = Annotated[int, typer.Option("--rounds", min=2, help="How often each contender is timed, in turns, at least.")]
Cold = Annotated[
    bool,
    typer.Option("--cold", help="On a GPU, take turns with so many inputs that none is left in its L2 cache."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.json", dir_okay=False, help="Write everything measured as JSON."),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")]
Commit = Annotated[str | None, typer.Option("--commit", help="The commit to note; asked of git unless given.")]


def bad(option: str, message: str) -> typer.BadParameter:
    """What is wrong with an option, for one line."""
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


def find_path(name: str | None) -> dict[str, str]:
    """What to change in the settings."""
    if name is not None and name not in PATHS:
        raise bad("--path", f"unknown path {name!r}; give one of {', '.join(PATHS)}")
    if name == "hopper" and not torch.cuda.is_available():
        raise bad("--path", "its kernels want a Hopper GPU, and there is none")
    return {} if name is None else {"path": name}


def find_peers(room: Room, names: Sequence[str], device: torch.device) -> tuple[Contender, ...]:
    """The peers asked for, in the room's order; those of the device where none are named."""
    wanted = [name.strip() for item in names for name in item.split(",")]
    known = {peer.name: peer for peer in room.peers}
    for name in wanted:
        if name not in known:
            raise bad("--peers", f"unknown peer {name!r}; give some of {', '.join(known)}")
    chosen = wanted or room.default_peers(device)
    return tuple(peer for peer in room.peers if peer.name in chosen)


def check_output(path: Path | None, option: str) -> None:
    """Refuses before the work begins what could not be written after it."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise bad(option, f"there is no folder {str(path.parent)!r}; make it first")
    try:
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
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """`step(doing)`, called before each step, shows a bar on a terminal's stderr."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=total)
        done = itertools.count()

        def step(doing: str) -> None:
            bar.update(task, description=doing, completed=next(done))

        yield step


def say(line: str) -> None:
    """One line on stderr."""
    typer.echo(line, err=True)
