"""Who encodes: ours, what a user of Transformers can run (a), and the strongest put together by hand (b)."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ops.bench.encoder_peers import ATTENTIONS, PEERS, Assembly, twin
from torch_ops.bench.encoder_rows import Features, Scene, features_of, transformers_metadata
from torch_ops.models import EncoderGraphs
from torch_ops.models.vision_metadata import filled_sizes
from torch_ops.testing.cases import WindowAttnCase

OURS, UNCAPTURED, ASSEMBLED = "ours", "uncaptured", "assembled"
WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Bound:
    """A contender on a scene. Its memory beyond a call's is that of `held` and of the CUDA graphs' memory pool, `pool`.

    Where `pooled`, it lies in pools that keep all rows so far, and is not known.
    """

    encode: Callable[[], Features]
    pool: tuple[int, ...] | None = None
    held: tuple[Tensor, ...] = ()
    pooled: bool = False


@dataclass(frozen=True)
class EncoderContender:
    """`bind` makes its call on a scene; `refuses` says in words why it cannot run there, "" if it can."""

    name: str
    group: str
    about: str
    bind: Callable[[Scene], Bound]
    refuses: Callable[[Scene], str]
    trains: bool = True


def captured(encode: Callable[[Tensor], Features], pixels: Tensor, held: tuple[Tensor, ...] = ()) -> Bound:
    """One CUDA graph of a call on `pixels`, which each call copies in; its results stay in the graph's memory."""
    static = pixels.clone()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            encode(static)
        with torch.cuda.graph(graph, stream=stream):
            result = encode(static)
        _spoil(result)
    torch.cuda.current_stream().wait_stream(stream)

    def call() -> Features:
        static.copy_(pixels)
        graph.replay()
        return result

    return Bound(call, tuple(graph.pool()), (static, *held))


def _spoil(result: Features) -> None:
    """So that what no replay writes shows."""
    for feature in (result[0], result[1], *result[2]):
        feature.fill_(torch.nan)


# Ours.


def _bind_ours(scene: Scene) -> Bound:
    encoder = scene.session.encoder
    return Bound(lambda: features_of(encoder(scene.pixels, grid_thw=scene.grid)))


def _bind_ours_ready(scene: Scene) -> Bound:
    encoder, metadata = scene.session.encoder, scene.metadata()
    return Bound(lambda: features_of(encoder(scene.pixels, metadata=metadata)))


def _bind_ours_compiled(mode: str | None, scene: Scene) -> Bound:
    def compile_it() -> Any:
        return torch.compile(scene.session.encoder.encode_packed, fullgraph=True, dynamic=True, mode=mode)

    encode, metadata = scene.session.once(f"ours compiled, {mode}", compile_it), scene.metadata()
    return _stepped(lambda: encode(scene.pixels, metadata), mode)


def _stepped(encode: Callable[[], Features], mode: str | None) -> Bound:
    """Where a mode makes CUDA graphs it is told that the last call's results are no longer needed."""
    if mode is None:
        return Bound(encode)

    def call() -> Features:
        torch.compiler.cudagraph_mark_step_begin()
        return encode()

    return Bound(call, pooled=True)


def _bind_ours_graph(scene: Scene) -> Bound:
    encoder = scene.session.encoder
    # Room for the batch and no more: segments of nothing could change which kernels attention takes.
    budget = filled_sizes(scene.row.grid, encoder.sizes)
    graphs = EncoderGraphs(encoder, [budget], copy_outputs=False, fallback="refuse").warmup()

    def call() -> Features:
        return features_of(graphs(scene.pixels, scene.grid))

    with torch.no_grad():
        _spoil(call())
    return Bound(call, graphs.pool, graphs.static_tensors)


# Transformers as it is.


def _bind_plain(scene: Scene) -> Bound:
    tower, grid = scene.session.tower, scene.grid.to(scene.device)
    return Bound(lambda: features_of(tower(scene.pixels, grid_thw=grid)))


def _bind_ready(scene: Scene) -> Bound:
    tower, ready = scene.session.tower, transformers_metadata(scene, segments_on_host=True)
    return Bound(lambda: features_of(tower(scene.pixels, grid_thw=scene.grid, **ready)))


def _bind_compiled(mode: str | None, scene: Scene) -> Bound:
    def compile_it() -> Any:
        return torch.compile(scene.session.tower, dynamic=False, mode=mode)

    tower, ready = scene.session.once(f"compiled, {mode}", compile_it), transformers_metadata(scene)
    grid = scene.grid.to(scene.device)
    return _stepped(lambda: features_of(tower(scene.pixels, grid_thw=grid, **ready)), mode)


# Transformers with another attention, and the encoder put together of its blocks.


def _bind_twin(attention: str, compiled: bool, scene: Scene) -> Bound:
    made, ready = twin(scene.session, attention, compiled), transformers_metadata(scene)
    grid, runs = scene.grid.to(scene.device), scene.row.runs
    return Bound(lambda: features_of(made(scene.pixels, grid_thw=grid, runs=runs, **ready)))


def _bind_assembly(attention: str, scene: Scene) -> Bound:
    assembly = Assembly(scene, attention)
    return captured(assembly, scene.pixels, (assembly.positions, *assembly.block_inputs["position_embeddings"]))


# Who runs where.


def _anywhere(scene: Scene) -> str:
    return ""


def _needs_gpu(scene: Scene) -> str:
    return "" if scene.device.type == "cuda" else "needs a GPU"


def _needs_kernels(attention: str, scene: Scene) -> str:
    config, segments = scene.session.tower.config, scene.row.segments
    # cuDNN takes equal segments only: here each run of them is a call of its own.
    segments = segments[:1] if attention == "cudnn" else segments
    case = WindowAttnCase(
        "encoder", "its attention", segments, config.num_heads, config.hidden_size // config.num_heads
    )
    return PEERS[attention].refuses(case, scene.dtype, scene.device)


def _with(attention: str) -> tuple[EncoderContender, ...]:
    refuses = partial(_needs_kernels, attention)
    names = (f"hf_{attention}", f"hf_{attention}_blocks", f"graph_{attention}")
    return (
        EncoderContender(
            names[0], UNCAPTURED, f"Transformers' tower, eager, with {attention} and a linear patch embedding",
            partial(_bind_twin, attention, False), refuses,
        ),
        EncoderContender(
            names[1], UNCAPTURED, f"{names[0]}, its blocks compiled (dynamic=False)",
            partial(_bind_twin, attention, True), refuses,
        ),
        EncoderContender(
            names[2], ASSEMBLED,
            f"the blocks of {names[1]}, compiled mergers, a linear patch embedding, position embeddings and rotary "
            "tables made before the call, all under one CUDA graph",
            partial(_bind_assembly, attention), refuses, trains=False,
        ),
    )  # fmt: skip


_SDPA = "Transformers' tower with its sdpa attention"

CONTENDERS = (
    EncoderContender("vk", OURS, "our encoder, eager, of a grid on the CPU", _bind_ours, _anywhere),
    EncoderContender(
        "vk_ready", OURS, "our encoder, eager, of metadata made before the call", _bind_ours_ready, _anywhere
    ),
    EncoderContender(
        "vk_compiled", OURS, "torch.compile(encoder.encode_packed, fullgraph=True, dynamic=True)",
        partial(_bind_ours_compiled, None), _needs_gpu,
    ),
    EncoderContender(
        "vk_reduced", OURS, "vk_compiled with mode='reduce-overhead'",
        partial(_bind_ours_compiled, "reduce-overhead"), _needs_gpu, trains=False,
    ),
    EncoderContender(
        "vk_graph", OURS, "EncoderGraphs with a budget of just this batch, of a grid on the CPU", _bind_ours_graph,
        _anywhere, trains=False,
    ),
    EncoderContender("hf", UNCAPTURED, f"{_SDPA}, eager, of a grid on the device", _bind_plain, _anywhere),
    EncoderContender(
        "hf_ready", UNCAPTURED, f"{_SDPA}, eager, all its metadata made before the call, segments on the CPU",
        _bind_ready, _anywhere,
    ),
    EncoderContender(
        "hf_compiled", UNCAPTURED, f"torch.compile (dynamic=False) of {_SDPA}, metadata made before the call",
        partial(_bind_compiled, None), _needs_gpu,
    ),
    EncoderContender(
        "hf_reduced", UNCAPTURED, "hf_compiled with mode='reduce-overhead'",
        partial(_bind_compiled, "reduce-overhead"), _needs_gpu, trains=False,
    ),
    *itertools.chain.from_iterable(map(_with, ATTENTIONS)),
)  # fmt: skip
