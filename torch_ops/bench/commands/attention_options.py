"""What `vk bench attention` may be asked for, and what it refuses, by the option that is wrong."""

import importlib
from pathlib import Path
from typing import Annotated

import torch
import typer

from torch_ops.bench.commands import options
from torch_ops.bench.measure.contest import Terms

# What a shape has where it is given in part.
BATCH, HEADS, LENGTH, HEAD_DIM = 1, 8, 1024, 64

Batch = Annotated[int | None, typer.Option("--batch", min=1, help=f"Sequences; unless given, {BATCH}.")]
Heads = Annotated[int | None, typer.Option("--heads", min=1, help=f"Query heads; unless given, {HEADS}.")]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", min=1, help="Key heads, a divisor; unless given, --heads.")]
SeqLen = Annotated[
    int | None,
    typer.Option("--seqlen", min=1, help=f"Length of a sequence, or of a cache; unless given, {LENGTH}."),
]
HeadDim = Annotated[int | None, typer.Option("--headdim", help=f"A multiple of 8 up to 256; unless given, {HEAD_DIM}.")]
Causal = Annotated[bool, typer.Option("--causal", help="A query sees keys up to its own position.")]
Backward = Annotated[bool, typer.Option("--backward", help="The backward alone.")]
Both = Annotated[bool, typer.Option("--both", help="Forward and backward, each by itself.")]
WarmUp = Annotated[int, typer.Option("--warmup", min=0, help="Untimed turns of every contender.")]
Iters = Annotated[
    int,
    typer.Option("--iters", min=1, help="Timed turns; a few more where that ends the cycle of balanced orders."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shapes", metavar="CASE",
        help="Names of cases, patterns of names such as 'b8h32*', or shapes BATCHxHEADS[/KV_HEADS]xLENGTHxHEAD_DIM[c] "
        "such as 2x8/4x1024x128c (c: causal); repeated or separated by commas.",
    ),
]  # fmt: skip
Suite = Annotated[
    bool,
    typer.Option(
        "--suite",
        help="Shapes and types of a report on an attention kernel, both passes; with --dtype, of that type alone.",
    ),
]
Tf32 = Annotated[bool, typer.Option("--tf32", help="Set PyTorch's fp32 products, and ours, to tf32.")]
Portable = Annotated[
    bool, typer.Option("--no-warp-specialize", help="Ours on stock Triton's kernels, as --path portable.")
]
Decode = Annotated[bool, typer.Option("--decode", help="attention_decode, causal, on full caches of --seqlen keys.")]
Queries = Annotated[int | None, typer.Option("--queries", help="With --decode, new tokens of a sequence, 1 to 16.")]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE.png", dir_okay=False,
        help="Sweep lengths 2^k up to --seqlen, and draw speeds and a roofline; needs matplotlib.",
    ),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option("--json", "--out", metavar="FILE.json", dir_okay=False, help="Write everything measured as JSON."),
]

ENDINGS = ".png", ".svg", ".pdf"


def check_shape(heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise options.bad("--kv-heads", f"{heads} query heads cannot share {kv_heads} key heads; give a divisor")
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise options.bad("--headdim", f"it is {head_dim}; give a multiple of 8 from 8 to 256")


def check_together(
    numbers: dict[str, int | None], shapes: bool, suite: bool, decode: bool, queries: int | None, backward: bool,
    both: bool, causal: bool, tf32: bool, plot: bool,
) -> None:  # fmt: skip
    """Refuses options of which one would be ignored; `numbers` are those of a shape, by option."""
    given = [option for option, number in numbers.items() if number is not None] + ["--causal"] * causal
    if shapes and suite:
        raise options.bad("--suite", "it has shapes of its own; leave --shapes out")
    for option, is_on in (("--shapes", shapes), ("--suite", suite)):
        if is_on and (given or decode or plot):
            others = ", ".join((*given, *["--decode"] * decode, *["--plot"] * plot))
            raise options.bad(option, f"it says what shapes there are; leave out {others}")
    if suite and tf32:
        raise options.bad("--suite", "it has rows in tf32 of its own; leave --tf32 out")
    if backward and both:
        raise options.bad("--backward", "it is the backward alone, and --both is both passes; give one of them")
    if decode and (backward or both):
        raise options.bad("--decode", "decoding has no backward; leave --backward and --both out")
    if queries is not None and not decode:
        raise options.bad("--queries", "it goes with --decode")
    if queries is not None and not 1 <= queries <= 16:
        raise options.bad("--queries", f"it is {queries}; give 1 to 16")


def check_length(queries: int, length: int) -> None:
    if queries > length:
        raise options.bad("--queries", f"{queries} new tokens are among the keys, of which --seqlen {length} has fewer")


def check_tf32(tf32: bool, terms: Terms) -> None:
    if tf32 and terms.dtype is not torch.float32:
        raise options.bad("--tf32", "it is for --dtype float32")
    if tf32 and terms.device.type != "cuda":
        raise options.bad("--tf32", "a CPU has no tf32")


def find_settings(path: str | None, portable: bool) -> dict[str, str]:
    """What to change in the settings."""
    if portable and path not in (None, "portable"):
        raise options.bad("--no-warp-specialize", f"it is --path portable, and --path {path} is given")
    return options.find_path("portable" if portable else path)


def check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix not in ENDINGS:
        raise options.bad("--plot", f"{str(plot)!r} is no picture; give one that ends in {', '.join(ENDINGS)}")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise options.bad("--plot", f"it needs matplotlib: pip install 'vk-ops[bench]' ({error})") from error
    options.check_output(plot, "--plot")
