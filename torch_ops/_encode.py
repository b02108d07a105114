"""``vk encode``: image files through a Qwen3-VL vision encoder, timed and compared."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from torch_ops._checks import check_head_dim
from torch_ops._device import out_of_memory
from torch_ops._encode_report import Run, comparison, figures, print_report

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Advance = Callable[[int, int], None]
Step = Callable[[str], Advance]


class InputError(Exception):
    """What the user can put right, said in one line; ``exit_code`` is the command's."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def format_message(self) -> str:
        """The line, by the name that Typer's own errors have for it."""
        return str(self)


def encode(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Image files: PNG, JPEG, WebP, ...")],
    tower: Annotated[
        str | None,
        typer.Option(metavar="S|M|L", help="A tower with random weights; S unless given."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A local Qwen3-VL checkpoint; only its vision weights are read."),
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
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Timed calls, after one that warms up.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Encode images with a Qwen3-VL vision encoder that is built from the ops of this library.

    All images go through the encoder in one packed call, as a serving engine batches them. Grid,
    tokens and output shapes are each image's own; the time is the median of the packed call, from
    pixels on the device to features on the device, and an image's time is its share by tokens. A
    token is a patch of 16 x 16 pixels.
    """
    with _input_errors():
        from torch_ops.models import qwen_vl

        if tower is not None and model is not None:
            raise ValueError("--tower and --model exclude each other: give one of them")
        name = "S" if tower is None else tower
        if name not in qwen_vl.TOWERS:
            raise ValueError(f"unknown tower {tower!r}; choose one of {', '.join(qwen_vl.TOWERS)}")
        where = _device(device)
        kind = _dtype(dtype, where)

    with _progress() as step:
        pixel_values, grid, sizes = _read_images(images, model, step)
        advance = step("loading the vision tower" if model else "building the tower")
        try:
            with _input_errors():
                if model is not None:
                    encoder = qwen_vl.load_tower(model, kind, where, advance)
                else:
                    encoder = qwen_vl.build_tower(name, seed, kind, where, advance)
                config = encoder.config
                check_head_dim("vk::window_attn", "the tower", config.hidden_size // config.num_heads)
                _check_patches(config, pixel_values)
            pixels = pixel_values.to(where, kind)
            runs = _run(encoder, pixels, grid, compile_, compare, repeat, step)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise InputError(
                f"{where} has not enough memory for {pixel_values.shape[0]} tokens in one call; "
                f"give fewer or smaller images",
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
        **figures(runs[0], images, sizes, grid),
        "compare": comparison(*runs) if compare else None,
    }
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_report(report)


@contextmanager
def _input_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise InputError(str(error)) from error


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


def _read_images(
    paths: list[Path], model: Path | None, step: Step
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    from torch_ops.models.qwen_vl import image_processor, open_image, preprocess

    advance = step("reading images")
    batches, sizes = [], []
    with _input_errors():
        processor = image_processor(model)
    for done, path in enumerate(paths, start=1):
        with _input_errors():
            image = open_image(path)
        try:
            batches.append(preprocess([image], processor))
        except ValueError as error:
            width, height = image.size
            raise InputError(f"{path} ({width} x {height} pixels) cannot be encoded: {error}; crop it first") from error
        sizes.append(image.size)
        advance(done, len(paths))
    pixel_values, grids = zip(*batches, strict=True)
    return torch.cat(pixel_values), torch.cat(grids), sizes


def _check_patches(config: Any, pixel_values: torch.Tensor) -> None:
    wanted = config.in_channels * config.temporal_patch_size * config.patch_size**2
    if pixel_values.shape[1] != wanted:
        raise ValueError(
            f"the checkpoint's image processor makes patches of {pixel_values.shape[1]} values and "
            f"its tower takes {wanted}: preprocessor_config.json and config.json do not match"
        )


def _run(
    encoder: Any,
    pixel_values: torch.Tensor,
    grid: torch.Tensor,
    compiled: bool,
    compare: bool,
    repeat: int,
    step: Step,
) -> list[Run]:
    """The run of our encoder on the tower's weights and, if asked for, the tower's own."""
    from torch_ops.models.qwen_vl import from_transformers

    ours = from_transformers(encoder)
    step("compiling and encoding" if compiled else "encoding")
    try:
        call = torch.compile(ours, fullgraph=True) if compiled else ours
        runs = [_timed("vk's encoder", call, pixel_values, grid, repeat)]
    except Exception as error:
        if not compiled or out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"torch.compile failed: {reason}; leave out --compile", 1) from error
    if not runs[0].output.last_hidden_state.isfinite().all():
        raise InputError(
            f"the features are not finite in {str(pixel_values.dtype).removeprefix('torch.')}; give another --dtype",
            exit_code=1,
        )
    if compare:
        step("encoding with Transformers' own encoder")
        runs.append(_timed(encoder.config._attn_implementation, encoder, pixel_values, grid, repeat))
    return runs


@torch.inference_mode()
def _timed(attention: str, tower: Any, pixel_values: torch.Tensor, grid: torch.Tensor, repeat: int) -> Run:
    from torch_ops.models.qwen_vl import encode as encode_packed

    seconds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        output = encode_packed(tower, pixel_values, grid)
        if pixel_values.is_cuda:
            torch.cuda.synchronize(pixel_values.device)
        seconds.append(time.perf_counter() - start)
    return Run(attention, output, statistics.median(seconds[1:]), seconds[0])
