"""The report of ``vk encode``: its figures as plain values, and the tables that show them."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_ops.command.errors import on_one_line
from torch_ops.command.inputs import Inputs

# Columns of a terminal. In fewer, tables lose their words.
NARROWEST = 20


@dataclass(frozen=True)
class Run:
    """One encoder's output on all images, and the wall time of its packed call in seconds."""

    attention: str
    output: Any
    seconds: float
    warmup_seconds: float


def figures(run: Run, inputs: Inputs) -> dict[str, Any]:
    """Values of each image and of the packed call."""
    from torch_ops.models.qwen_vl import split_by_image

    grid = inputs.grid
    total = int(grid.prod(dim=1).sum())
    images = []
    features = split_by_image(run.output, grid)
    for name, size, thw, own in zip(inputs.names, inputs.sizes, grid.tolist(), features, strict=True):
        tokens = own.last_hidden_state.shape[0]
        images.append(
            {
                "file": name,
                "size": list(size),
                "grid_thw": thw,
                "tokens": tokens,
                "last_hidden_state": list(own.last_hidden_state.shape),
                "pooler_output": list(own.pooler_output.shape),
                "deepstack_features": [list(tap.shape) for tap in own.deepstack_features],
                "seconds_share": run.seconds * tokens / total,
            }
        )
    return {
        "attention": run.attention,
        "images": images,
        "tokens": total,
        "seconds": run.seconds,
        "warmup_seconds": run.warmup_seconds,
        "tokens_per_second": total / run.seconds,
    }


def comparison(ours: Run, theirs: Run) -> dict[str, Any]:
    """The largest difference of each output, absolute and over the largest value of ``theirs``."""

    def tensors(output: Any) -> dict[str, torch.Tensor]:
        taps = getattr(output, "deepstack_features", None) or ()
        return {
            "last_hidden_state": output.last_hidden_state,
            "pooler_output": output.pooler_output,
            **{f"deepstack_features[{i}]": tap for i, tap in enumerate(taps)},
        }

    differences = {}
    reference = tensors(theirs.output)
    for name, tensor in tensors(ours.output).items():
        largest = (tensor.double() - reference[name].double()).abs().max().item()
        scale = reference[name].abs().max().item()
        differences[name] = {"absolute": largest, "relative": largest / scale if scale else largest}
    return {
        "attention": theirs.attention,
        "seconds": theirs.seconds,
        # On the CPU both are ATen's attention, and what their times differ by is noise.
        "speedup": theirs.seconds / ours.seconds if ours.output.last_hidden_state.is_cuda else None,
        "differences": differences,
    }


def replayed(run: Run, plain: Run) -> dict[str, Any]:
    """Time of replays of one batch, and the largest difference of their output from the plain call's."""
    versus = comparison(run, plain)
    return {
        "captured": run.output.last_hidden_state.is_cuda,
        "seconds": run.seconds,
        "warmup_seconds": run.warmup_seconds,
        "speedup": versus["speedup"],
        "differences": versus["differences"],
    }


def stdout_console(width: int) -> Console:
    """Return stdout in the width of its terminal, and in `width` for a log or a pipe, whose lines do not fold."""
    console = Console()
    return console if console.is_terminal and console.width >= NARROWEST else Console(width=width)


def as_it_is(text: object) -> Text:
    """Text that may hold a name: Rich would read markup, links and emoji in a string."""
    return Text(on_one_line(text))


def lines_as_they_are(text: str) -> Text:
    return Text("\n").join(map(as_it_is, text.split("\n")))


def print_report(report: dict[str, Any]) -> None:
    """The report of ``vk encode`` as a table and a few lines on stdout."""
    console = stdout_console(110)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("image", overflow="fold")
    table.add_column("grid (t, h, w)", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("outputs", no_wrap=True)
    table.add_column("time share" if len(report["images"]) > 1 else "time", justify="right")
    table.add_column("tokens/s", justify="right")
    for image in report["images"]:
        shapes = [("hidden", image["last_hidden_state"]), ("pooled", image["pooler_output"])]
        outputs = [f"{name} {_shape(shape)}" for name, shape in shapes]
        if taps := image["deepstack_features"]:
            outputs.append(f"{len(taps)} deepstack {_shape(taps[0])}")
        table.add_row(
            as_it_is(image["file"]),
            ", ".join(map(str, image["grid_thw"])),
            str(image["tokens"]),
            "\n".join(outputs),
            _seconds(image["seconds_share"]),
            f"{report['tokens_per_second']:.0f}",
        )
    console.print(table)
    console.print()
    count = len(report["images"])
    what = (
        f"{count} image{'s' * (count > 1)}"
        if report["frames"] is None
        else f"a video of {report['frames']} frame{'s' * (report['frames'] > 1)}"
    )
    chunk = report["chunk_tokens"]
    how = "in one packed call" if chunk is None else f"in chunks of at most {chunk}, or of a frame"
    source = report["model"] or f"tower {report['tower']}, random weights of seed {report['seed']}"
    lines = [
        f"{what}, {report['tokens']} tokens {how}: "
        f"{_seconds(report['seconds'])}, {report['tokens_per_second']:.0f} tokens/s "
        f"(median of {report['repeat']}, warm-up {_seconds(report['warmup_seconds'])})",
        f"{source}; {report['parameters'] / 1e6:.1f} M parameters, {report['dtype']} on "
        f"{report['device_name']}{', compiled' * report['compiled']}; {report['attention']}"
        f"{' as ATen computes it on the CPU' * (report['device'] == 'cpu')}",
    ]
    if report["graph"] is not None:
        lines.append(_replays(report["graph"]))
    for line in lines:
        console.print(as_it_is(line), soft_wrap=True)
    if report["compare"] is not None:
        console.print()
        _print_comparison(console, report["compare"])


def _replays(graph: dict[str, Any]) -> str:
    largest = max(difference["relative"] for difference in graph["differences"].values())
    time = f"{_seconds(graph['seconds'])} (first call {_seconds(graph['warmup_seconds'])})"
    if not graph["captured"]:
        return f"no CUDA graph on a CPU; the same call over the runner's static tensors: {time}"
    return (
        f"replayed as a CUDA graph: {time}, {graph['speedup']:.2f} x as fast; "
        f"largest difference from the plain call {largest:.2e} of the largest value"
    )


def _print_comparison(console: Console, compare: dict[str, Any]) -> None:
    title = f"largest difference from Transformers' encoder ({compare['attention']})"
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(title)
    table.add_column("absolute", justify="right")
    table.add_column("relative", justify="right")
    for name, difference in compare["differences"].items():
        row = (f"{difference[key]:.2e}" for key in ("absolute", "relative"))
        table.add_row(as_it_is(name), *row)
    console.print(table)
    console.print()
    console.print(
        f"Transformers: {_seconds(compare['seconds'])}, "
        + (f"{compare['speedup']:.2f} x the time" if compare["speedup"] else "by the same attention of ATen"),
        soft_wrap=True,
        highlight=False,
    )


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape))


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"
