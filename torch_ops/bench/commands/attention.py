"""`vk bench attention`: dense attention of any shape next to its peers, iteration by iteration; a step of decoding."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import torch_ops
from torch_ops.bench.commands import attention_options as own
from torch_ops.bench.commands import options
from torch_ops.bench.commands.attention_suite import decoding, lengths_of, suite_rows, sweep
from torch_ops.bench.commands.contest import Run, contests, exit_if_wrong, show
from torch_ops.bench.commands.options import say
from torch_ops.bench.measure.contest import Terms
from torch_ops.bench.measure.results import Report
from torch_ops.bench.measure.room import Contender, Room
from torch_ops.bench.rooms.attention import OURS_AS_BF16, OURS_AS_FP16
from torch_ops.bench.rooms.dense_cases import dense_case
from torch_ops.bench.show.attention import attention_tables


def attention_command(rooms: Mapping[str, Room]) -> Callable[..., None]:
    """The command; rooms are looked up when it runs."""

    def command(
        batch: own.Batch = None,
        heads: own.Heads = None,
        kv_heads: own.KvHeads = None,
        seqlen: own.SeqLen = None,
        headdim: own.HeadDim = None,
        causal: own.Causal = False,
        dtype: options.DtypeName = None,
        backward: own.Backward = False,
        both: own.Both = False,
        warmup: own.WarmUp = 50,
        iters: own.Iters = 100,
        suite: own.Suite = False,
        decode: own.Decode = False,
        queries: own.Queries = None,
        tf32: own.Tf32 = False,
        no_warp_specialize: own.Portable = False,
        path: options.PathName = None,
        shapes: own.Shapes = None,
        peers: options.PeerNames = None,
        device: options.DeviceName = None,
        plot: own.Plot = None,
        out: own.Out = None,
        show_markdown: options.Markdown = False,
        commit: options.Commit = None,
    ) -> None:
        numbers = {
            "--batch": batch, "--heads": heads, "--kv-heads": kv_heads, "--seqlen": seqlen, "--headdim": headdim,
        }  # fmt: skip
        own.check_together(
            numbers, bool(shapes), suite, decode, queries, backward, both, causal, tf32, plot is not None
        )
        where = options.find_device(device)
        terms = Terms(
            options.find_dtype(dtype, where), where, backward or both or suite, iters, cold=False, forward=not backward,
            warm_up=warmup, tf32=tf32,
        )  # fmt: skip
        own.check_tf32(tf32, terms)
        changes = own.find_settings(path, no_warp_specialize)
        own.check_plot(plot)
        options.check_output(out, "--json")
        if plot is not None and out is not None and plot.resolve() == out.resolve():
            raise options.bad("--plot", f"--json is written to {str(plot)!r} too")
        room = rooms["attention_decode" if decode else "attention"]
        contenders = room.ours, *options.find_peers(room, peers or (), where)
        if suite:
            if where.type != "cuda":
                say("on a CPU every case of the suite is cut down")
            asked = suite_rows(terms, None if dtype is None else terms.dtype)
        elif decode or plot is not None or causal or any(number is not None for number in numbers.values()):
            asked = [(case, terms) for case in _cases(numbers, causal, decode, queries or 1, plot is not None)]
        else:
            with options.value_errors("--shapes"):
                asked = [(case, terms) for case in room.cases(shapes or (), where)]
        runs = [Run(room, case, contenders if peers else _of_type(contenders, each), each) for case, each in asked]
        with torch_ops.settings(**changes):
            report = contests(runs, terms, out, commit, "--shapes" if shapes else "--batch")
        show(report, show_markdown, attention_tables)
        if plot is not None:
            _draw(report, [case for case, _ in asked], plot)
        exit_if_wrong(report.measurements)

    peer_names = ", ".join(peer.name for peer in rooms["attention"].peers)
    command.__doc__ = f"""Time attention of [B, H, S, D] tensors next to the peers, {peer_names}.

    Of one shape (--batch, --heads, --kv-heads, --seqlen, --headdim, --causal), of the --suite, of cases by --shapes,
    written BATCHxHEADS[/KV_HEADS]xLENGTHxHEAD_DIM[c], or else of the room's own cases. First the gate: every contender
    is held against the fp64 reference by the tolerance rule; what is wrong is marked and never counts as the fastest.
    Then all are warmed by --warmup turns and timed in --iters turns, by device time. fp32 is computed in fp32, or with
    --tf32 as PyTorch then does; vk_as_fp16 is ours with compute_dtype=torch.float16, which rounds fp32 inputs to fp16,
    vk_as_bf16 the same with torch.bfloat16.
    """
    return command


def _of_type(contenders: tuple[Contender, ...], terms: Terms) -> tuple[Contender, ...]:
    """Without ours in a half type where inputs are of 16 bits anyway."""
    halves = OURS_AS_FP16, OURS_AS_BF16
    return tuple(one for one in contenders if one.name not in halves or terms.dtype is torch.float32)


def _cases(
    numbers: Mapping[str, int | None], causal: bool, decode: bool, queries: int, swept: bool
) -> Sequence[Any]:  # fmt: skip
    """Of one shape, or of a sweep up to its length."""
    batch, heads = numbers["--batch"] or own.BATCH, numbers["--heads"] or own.HEADS
    kv_heads, head_dim = numbers["--kv-heads"] or heads, own.HEAD_DIM
    if numbers["--headdim"] is not None:
        head_dim = numbers["--headdim"]
    length = numbers["--seqlen"] or own.LENGTH
    own.check_shape(heads, kv_heads, head_dim)
    own.check_length(queries, length)
    lengths = [each for each in sweep(length) if each >= queries] if swept else [length]
    if decode:
        return [decoding(batch, heads, kv_heads, each, head_dim, queries) for each in lengths]
    return [dense_case(batch, heads, kv_heads, each, head_dim, causal) for each in lengths]


def _draw(report: Report, cases: Sequence[Any], plot: Path) -> None:
    # Imported here: Matplotlib is not among what the library needs.
    from torch_ops.bench.show.attention_chart import draw_sweep

    draw_sweep(report, lengths_of(cases), plot)
    say(f"drawn into {plot}")
