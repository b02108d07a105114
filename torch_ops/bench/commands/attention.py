"""`vk bench attention`: dense attention by the flags of a report on an attention kernel, which write `--shapes`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

import torch_ops
from torch_ops.bench.commands import options
from torch_ops.bench.commands.options import bad, flag, say
from torch_ops.bench.commands.run import Output, Run, exit_if_wrong, run_all, show
from torch_ops.bench.measure.opbench import Impl, OpBench, split
from torch_ops.bench.measure.run import Setup
from torch_ops.bench.rooms.attention import OURS_AS_BF16, OURS_AS_FP16
from torch_ops.bench.rooms.dense_cases import shorten_dense
from torch_ops.testing.cases import decode_cases, dense_cases

# Sizes of a shape that is given in part.
BATCH, HEADS, LENGTH, HEAD_DIM = 1, 8, 1024, 64
# On a CPU a case of the suite keeps so many entries of score matrices.
CPU_ENTRIES = 2**19
ENDINGS = ".png", ".svg", ".pdf"

Number = int | None
Shapes = Annotated[
    list[str] | None,
    flag("--shapes", "Cases by name, by a pattern such as 'b8h32*', or as BATCHxHEADS[/KV_HEADS]xLENGTHxHEAD_DIM[c] "
         f"such as 2x8/4x1024x128c (c: causal); {options.CASES}", metavar="CASE"),
]  # fmt: skip
Plot = Annotated[
    Path | None, options.file("--plot", "Picture of speeds by length, up to --seqlen, and of a roofline.", kind="png")
]


def attention_command(benches: Mapping[str, OpBench]) -> Callable[..., None]:
    """The command; benchmarks are looked up when it runs."""

    def command(
        batch: Annotated[Number, flag("--batch", f"Sequences (default: {BATCH}).", min=1)] = None,
        heads: Annotated[Number, flag("--heads", f"Query heads (default: {HEADS}).", min=1)] = None,
        kv_heads: Annotated[Number, flag("--kv-heads", "Key heads, a divisor (default: --heads).", min=1)] = None,
        seqlen: Annotated[Number, flag("--seqlen", f"Tokens, or cached keys (default: {LENGTH}).", min=1)] = None,
        headdim: Annotated[Number, flag("--headdim", f"Multiple of 8 up to 256 (default: {HEAD_DIM}).")] = None,
        causal: Annotated[bool, flag("--causal", "Causal order.")] = False,
        dtype: options.DtypeName = None,
        backward: Annotated[bool, flag("--backward", "The backward alone.")] = False,
        both: Annotated[bool, flag("--both", "Forward and backward, each by itself.")] = False,
        warmup: Annotated[int, flag("--warmup", "Untimed turns of every implementation.", min=0)] = 50,
        iters: Annotated[int, flag("--iters", "Timed turns, at least.", min=1)] = 100,
        suite: Annotated[bool, flag("--suite", "A report's shapes in all types, then a step of decoding.")] = False,
        decode: Annotated[bool, flag("--decode", "attention_decode on full caches of --seqlen keys.")] = False,
        queries: Annotated[Number, flag("--queries", "New tokens with --decode, 1 to 16 (default: 1).")] = None,
        tf32: Annotated[bool, flag("--tf32", "tf32 for fp32 products, PyTorch's and ours.")] = False,
        no_warp_specialize: Annotated[bool, flag("--no-warp-specialize", "As --path portable.")] = False,
        path: options.PathName = None,
        shapes: Shapes = None,
        peers: options.BaselineNames = None,
        device: options.DeviceName = None,
        plot: Plot = None,
        out: Annotated[Path | None, options.file("--json", "--out", "File of all results.")] = None,
        show_markdown: options.Markdown = False,
        commit: options.Commit = None,
    ) -> None:  # fmt: skip
        where = options.find_device(device)
        kind = options.find_dtype(dtype, where)
        numbers = {"--batch": batch, "--heads": heads, "--kv-heads": kv_heads, "--seqlen": seqlen, "--headdim": headdim}
        flags = {"--causal": causal, "--decode": decode, "--plot": plot is not None}
        given = [name for name, number in numbers.items() if number is not None]
        given += [name for name, on in flags.items() if on]
        for option, refused, message in (
            ("--suite", suite and (given or shapes or tf32), f"it has shapes and types of its own; leave out "
             f"{', '.join((*given, *['--shapes'] * bool(shapes), *['--tf32'] * tf32))}"),
            ("--shapes", shapes and given, f"it says what shapes there are; leave out {', '.join(given)}"),
            ("--backward", backward and both, "it is the backward alone, and --both is both passes; give one of them"),
            ("--decode", decode and (backward or both), "decoding has no backward; leave --backward and --both out"),
            ("--queries", queries is not None and not decode, "it goes with --decode; give both"),
            ("--tf32", tf32 and kind is not torch.float32, "it is for fp32; give --dtype float32"),
            ("--tf32", tf32 and where.type != "cuda", "a CPU has no tf32; leave it out"),
            ("--no-warp-specialize", no_warp_specialize and path not in (None, "portable"),
             f"it is --path portable, and --path {path} is given; leave one out"),
            ("--plot", plot and out and plot.resolve() == out.resolve(), "--json goes there too; give another file"),
        ):  # fmt: skip
            if refused:
                raise bad(option, message)
        changes = options.find_path("portable" if no_warp_specialize else path)
        _check_plot(plot)
        options.check_output(out, "--json")
        directions = ("backward",) if backward else options.passes(both or suite)
        setup = Setup(kind, where, directions, iters, warm_up=warmup, tf32=tf32)
        bench = benches["attention_decode" if decode else "attention"]
        asked_by = "--batch ... --headdim" if given else "--shapes"
        if given:
            written = f"{batch or BATCH}x{heads or HEADS}" + (f"/{kv_heads}" if kv_heads else "")
            longest, width = seqlen or LENGTH, HEAD_DIM if headdim is None else headdim
            keys = sweep(longest, queries or 1) if plot else [longest]
            tokens = [f"{queries or 1}/{length}" if decode else str(length) for length in keys]
            shapes = [f"{written}x{each}x{width}" + "c" * (causal and not decode) for each in tokens]
        with options.value_errors(asked_by):
            asked = _suite(benches, setup, dtype is not None) if suite else [
                (bench, case, setup) for case in bench.cases(shapes or (), where)
            ]  # fmt: skip
        runs = [Run(each, case, _impls(each, own, split(peers or ()), suite), own) for each, case, own in asked]
        with torch_ops.settings(**changes):
            report = run_all(runs, setup, Output(out, commit, asked_by))
        show(report, show_markdown, "passes")
        if plot is not None:
            # Imported here: Matplotlib is not among what the library needs.
            chart = importlib.import_module("torch_ops.bench.show.chart")
            lengths = {each.case.name: getattr(each.case, "capacity", 0) or each.case.length for each in runs}
            chart.draw_sweep(report, lengths, plot)
            say(f"drawn into {plot}")
        exit_if_wrong(report)

    names = ", ".join(baseline.name for baseline in benches["attention"].baselines)
    command.__doc__ = f"""Time attention of [B, H, S, D] tensors next to the baselines, {names}.

    Cases are one shape (--batch, --heads, --kv-heads, --seqlen, --headdim, --causal), the --suite, --shapes, or the
    op's own. The correctness check comes first: every implementation is held against the fp64 reference by the
    tolerance rule; what is wrong is marked and never counts as the fastest. `allclose` compares with ours at a fixed
    atol of 0.02: False beside "within" means that both are as exact as the dtype allows, and that results are so
    large, or sums so long, that two roundings of them differ by more. All are warmed by --warmup turns and timed in
    --iters turns, by device time. Nothing is autotuned at run time, because a search would hold up the first call and
    could end differently each time. fp32 is computed in fp32, or with --tf32 as PyTorch then does; vk_as_fp16 is ours
    with compute_dtype=torch.float16, which rounds fp32 inputs to fp16, vk_as_bf16 the same with torch.bfloat16.
    """
    return command


def sweep(longest: int, shortest: int = 1) -> list[int]:
    """Powers of two up to a length, and the length itself."""
    first = max(128 if longest > 256 else 16, shortest)
    powers = [2**power for power in range(longest.bit_length()) if first <= 2**power < longest]
    return [*powers, longest]


def _suite(benches: Mapping[str, OpBench], setup: Setup, one_type: bool) -> list[tuple[OpBench, Any, Setup]]:
    """Cases with the tag "suite" in every type, or in the one that was asked for; then a step of decoding."""
    on_gpu = setup.device.type == "cuda"
    if not on_gpu:
        say("on a CPU every case of the suite is cut down")
    kinds = [setup.dtype] if one_type else [torch.float32, torch.float16, torch.bfloat16]
    setups = [replace(setup, dtype=kind, tf32=on) for kind in kinds for on in (False, on_gpu and kind is torch.float32)]
    setups = list(dict.fromkeys(setups))
    dense = [case if on_gpu else shorten_dense(case, CPU_ENTRIES) for case in dense_cases("suite")]
    steps = decode_cases("suite") if on_gpu else decode_cases("smoke")[:1]
    return [(benches["attention"], case, each) for case in dense for each in setups] + [
        (benches["attention_decode"], case, each) for case in steps for each in setups if not each.tf32
    ]


def _impls(bench: OpBench, setup: Setup, named: list[str], suite: bool) -> tuple[Impl, ...]:
    """Ours and the baselines, without ours in a half type where inputs are of 16 bits anyway, unless it was named."""
    known = {baseline.name for baseline in bench.baselines}
    chosen = options.find_baselines(bench, [each for each in named if each in known or not suite], setup.device)
    halves = () if named or setup.dtype is torch.float32 else (OURS_AS_FP16, OURS_AS_BF16)
    return bench.ours, *(one for one in chosen if one.name not in halves)


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix not in ENDINGS:
        raise bad("--plot", f"{str(plot)!r} is no picture; give a file that ends in {', '.join(ENDINGS)}")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise bad("--plot", f"it needs matplotlib: pip install 'vk-ops[bench]' ({error})") from error
    options.check_output(plot, "--plot")
