"""`vk bench generate`: `generate()` of a whole model for one image, end to end."""

from typing import Annotated, Any

import torch
import typer

import torch_ops
from torch_ops.bench.commands import options
from torch_ops.bench.commands.options import flag
from torch_ops.bench.commands.run import Output, Run, exit_if_wrong, run_all, show, with_ceilings
from torch_ops.bench.encoder.generation import ALL, FIRST, IMPLS, build_model, find_pictures, generate_bench
from torch_ops.bench.encoder.rows import make_tower
from torch_ops.bench.measure.machine import provenance
from torch_ops.bench.measure.run import Setup

# On a GPU, on a CPU.
IMAGES = {"cuda": ["448", "896"], "cpu": ["64", "96"]}

Images = Annotated[
    list[str] | None,
    flag("--images", "Images by SIDE or HEIGHTxWIDTH in pixels (default: 448,896; on a CPU 64,96).", metavar="IMAGE"),
]
TowerName = Annotated[str | None, flag("--tower", "Vision tower: S, M or L (default: L; on a CPU two narrow layers).")]
Layers = Annotated[int, flag("--layers", "Layers of the language model.", min=1)]
NewTokens = Annotated[int, flag("--max-new-tokens", "Tokens to generate.", min=1)]


def generate(
    images: Images = None,
    tower: TowerName = None,
    layers: Layers = 4,
    new_tokens: NewTokens = 8,
    rounds: options.Rounds = 6,
    dtype: options.DtypeName = None,
    device: options.DeviceName = None,
    path: options.PathName = None,
    out: options.Out = None,
    show_markdown: options.Markdown = False,
    commit: options.Commit = None,
) -> None:
    """Time generate() of a whole model for one image: Transformers as it is, and after accelerate(model).

    The model is a Qwen3-VL with random weights and a language model of few layers. Times are wall times of the user's
    call after warm-up, up to the first token and to all tokens, all in turns in one process. The first token's logits
    are held against an fp64 reference by the tolerance rule.
    """
    where = options.find_device(device)
    setup = Setup(options.find_dtype(dtype, where), where, (FIRST, ALL), rounds, wall=True)
    changes = options.find_path(path)
    with options.value_errors("--images"):
        pictures = find_pictures(images or IMAGES[where.type], new_tokens)
    options.check_output(out, "--out")
    bench = generate_bench(build_model(_tower(tower, where, setup.dtype), layers), pictures)
    with torch_ops.settings(**changes):
        report = with_ceilings(provenance(where, commit, {impl.name: impl.about for impl in IMPLS}), setup)
        runs = [Run(bench, picture, IMPLS, setup) for picture in pictures]
        report = run_all(runs, setup, Output(out, commit, "--images"), report)
    show(report, show_markdown)
    exit_if_wrong(report)


def _tower(name: str | None, device: torch.device, dtype: torch.dtype) -> Any:
    try:
        from torch_ops.models.qwen_vl import TOWERS, build_tower
    except ImportError as error:
        message = f"vk bench generate needs transformers: pip install 'vk-ops[transformers]' ({error})"
        raise typer.BadParameter(message) from error
    if name is None:
        return make_tower(device, dtype)
    if name not in TOWERS:
        raise options.bad("--tower", f"unknown tower {name!r}; give one of {', '.join(TOWERS)}")
    return build_tower(name, dtype=dtype, device=device)
