"""``vk encode``: image files, or the frames of a video, through a Qwen-VL vision encoder, timed and compared."""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from torch_ops._core.checks import check_head_dim
from torch_ops._core.device import out_of_memory
from torch_ops.command.inputs import Advance, InputError, Inputs, Step, input_errors, read_frames, read_images
from torch_ops.command.report import Run, comparison, figures, print_report, replayed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def encode(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Image files: PNG, JPEG, WebP, ...")],
    frames: Annotated[
        bool,
        typer.Option(
            "--frames",
            help="They are the frames of one video, in this order; also a folder, a pattern or an animation.",
        ),
    ] = False,
    tower: Annotated[
        str | None,
        typer.Option(metavar="S|M|L", help="A tower with random weights; S unless given."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A local Qwen-VL checkpoint; only its vision weights are read."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; cuda unless given, where there is one.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="|".join(DTYPES), help="Unless given, bfloat16 on a GPU and float32 on a CPU."),
    ] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Run the encoder under torch.compile.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run Transformers' own encoder too, and print the largest difference: "
            "absolute, and relative to the largest value of its output.",
        ),
    ] = False,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph", help="Time replays of a CUDA graph too; on a CPU, which has none, the call on static tensors."
        ),
    ] = False,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="At most N tokens at once, cut between frames, for long videos."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Timed calls, after one that warms up.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Encode images with a Qwen-VL vision encoder that is built from the ops of this library.

    The checkpoint may be one of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3-Omni or Qwen3.5.

    All images go through the encoder in one packed call, as a serving engine batches them. Grid,
    tokens and output shapes are each image's own; the time is the median of the packed call, from
    pixels on the device to features on the device, and an image's time is its share by tokens. A
    token is a patch of 16 x 16 pixels (14 x 14 of Qwen2-VL and Qwen2.5-VL), of two frames of a video.
    """
    with input_errors():
        from torch_ops.models import qwen_vl
        from torch_ops.models.families import FAMILIES, family_key

        if tower is not None and model is not None:
            raise ValueError("--tower and --model exclude each other: give one of them")
        name = "S" if tower is None else tower
        if name not in qwen_vl.TOWERS:
            raise ValueError(f"unknown tower {tower!r}; choose one of {', '.join(qwen_vl.TOWERS)}")
        if graph and compile_:
            raise ValueError("--graph and --compile exclude each other: give one of them")
        if chunk_tokens is not None and (graph or compile_):
            raise ValueError("--chunk-tokens is for plain calls: leave out --graph and --compile")
        where = _device(device)
        kind = _dtype(dtype, where)

    with _progress() as step:
        inputs = (read_frames if frames else read_images)(images, model, step)
        advance = step("loading the vision tower" if model else "building the tower")
        try:
            with input_errors():
                if model is not None:
                    encoder = qwen_vl.load_tower(model, kind, where, advance)
                else:
                    encoder = qwen_vl.build_tower(name, seed, kind, where, advance)
                config = encoder.config
                check_head_dim("vk::window_attn", "the tower", FAMILIES[family_key(config)].sizes(config).head_dim)
                ours = qwen_vl.from_transformers(encoder)
            runs = _run(
                ours, encoder, inputs, repeat, step,
                compiled=compile_, compare=compare, graph=graph, chunk_tokens=chunk_tokens,
            )  # fmt: skip
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise InputError(
                f"{where} has not enough memory for {inputs.pixel_values.shape[0]} tokens in one call; "
                f"give fewer or smaller images, or --chunk-tokens",
                exit_code=1,
            ) from error

    report = {
        "tower": None if model else name,
        "seed": None if model else seed,
        "model": str(model) if model else None,
        "parameters": sum(parameter.numel() for parameter in encoder.parameters()),
        "device": str(where),
        "device_name": torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU",
        "dtype": str(kind).removeprefix("torch."),
        "compiled": compile_,
        "repeat": repeat,
        "frames": inputs.frames,
        "chunk_tokens": chunk_tokens,
        **figures(runs["plain"], inputs),
        "graph": replayed(runs["graph"], runs["plain"]) if graph else None,
        "compare": comparison(runs["plain"], runs["theirs"]) if compare else None,
    }
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_report(report)


@contextmanager
def _progress() -> Iterator[Step]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def step(description: str) -> Advance:
            for finished in progress.task_ids:
                progress.remove_task(finished)
            task = progress.add_task(description, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield step


def _device(name: str | None) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}; give cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"PyTorch finds {count} GPUs" if count else "PyTorch finds no GPU"
        raise ValueError(f"device {name!r} is not there: {found}; give --device cpu")
    return device


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _run(
    ours: Any,
    encoder: Any,
    inputs: Inputs,
    repeat: int,
    step: Step,
    *,
    compiled: bool,
    compare: bool,
    graph: bool,
    chunk_tokens: int | None,
) -> dict[str, Run]:
    """The plain run of our encoder on the tower's weights and, if asked for, replays of it and the tower's own."""
    from torch_ops.models.graphs import EncoderGraphs
    from torch_ops.models.vision_metadata import filled_sizes, images_of

    pixels = inputs.pixel_values.to(ours.device, ours.dtype)
    step("compiling and encoding" if compiled else "encoding")
    try:
        call = torch.compile(ours, fullgraph=True) if compiled else ours
        runs = {"plain": _timed("vk's encoder", call, pixels, inputs.grid, repeat, chunk_tokens)}
    except Exception as error:
        if not compiled or out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"torch.compile failed: {reason}; leave out --compile", 1) from error
    if not runs["plain"].output.last_hidden_state.isfinite().all():
        raise InputError(
            f"the features are not finite in {str(pixels.dtype).removeprefix('torch.')}; give another --dtype",
            exit_code=1,
        )
    if graph:
        step("capturing and replaying" if pixels.is_cuda else "encoding over static tensors")
        budget = filled_sizes(images_of("vk encode", inputs.grid, ours.sizes.merge_size), ours.sizes)
        runner = EncoderGraphs(ours, [budget], fallback="refuse", copy_outputs=False)
        runs["graph"] = _timed("a CUDA graph", runner, pixels, inputs.grid, repeat)
    if compare:
        step("encoding with Transformers' own encoder")
        runs["theirs"] = _timed(encoder.config._attn_implementation, encoder, pixels, inputs.grid, repeat)
    return runs


@torch.inference_mode()
def _timed(
    attention: str,
    tower: Any,
    pixel_values: torch.Tensor,
    grid: torch.Tensor,
    repeat: int,
    chunk_tokens: int | None = None,
) -> Run:
    from torch_ops.models.qwen_vl import encode as encode_packed

    seconds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        output = encode_packed(tower, pixel_values, grid, chunk_tokens)
        if pixel_values.is_cuda:
            torch.cuda.synchronize(pixel_values.device)
        seconds.append(time.perf_counter() - start)
    return Run(attention, output, statistics.median(seconds[1:]), seconds[0])
