"""Encoders: ours, what a user of Transformers can run (a), and the strongest put together by hand (b)."""

import gc
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_ops
from torch_ops.bench.encoder.accelerated import accelerated, first_calls, forget, on_new_grid
from torch_ops.bench.encoder.peers import ATTENTION_IMPLS, ATTENTIONS, Assembly, twin
from torch_ops.bench.encoder.rows import (
    Features,
    Row,
    Scene,
    Session,
    check_of,
    count_flops,
    draw_directions,
    features_of,
    find_rows,
    make_scene,
    outcome,
    step,
    transformers_metadata,
)
from torch_ops.bench.measure.opbench import Cost, Impl, OpBench, find_named, runs_anywhere, split
from torch_ops.bench.measure.results import ASSEMBLED, OURS, UNCAPTURED, VK_DEFAULT, FirstCalls
from torch_ops.bench.measure.timing import Work
from torch_ops.models import EncoderGraphs
from torch_ops.models._capture import own_stream, pool_bytes
from torch_ops.models.vision_metadata import filled_sizes
from torch_ops.testing.cases import WindowAttnCase

GROUPS = OURS, UNCAPTURED, ASSEMBLED
WARM_UP_CALLS = 3
# Tables of a batch's grid that are made before the call.
NO_TABLES = "nothing"
OUR_TABLES = "segments and rotary tables"
THEIR_TABLES = "segments, position ids, indices and weights of the interpolation"
ALL_TABLES = "segments, rotary tables and interpolated position embeddings"


@dataclass(frozen=True)
class Bound:
    """An implementation on a scene.

    Its memory beyond a call's is that of `held` and of the CUDA graphs' memory pool, `pool`. An encoder that captures
    by itself has both in `graphs`, and `first_calls` measures its first calls. Where `pooled`, memory lies in pools
    that keep all rows so far, and is not known.
    """

    encode: Callable[[], Features]
    pool: tuple[int, ...] | None = None
    held: tuple[Tensor, ...] = ()
    pooled: bool = False
    graphs: Any = None
    first_calls: Callable[[], FirstCalls] | None = None


@dataclass(frozen=True)
class EncoderCall:
    """A bound implementation as the runner calls it."""

    scene: Scene
    bound: Bound

    def results(self, backward: bool) -> dict[str, Tensor]:
        return outcome(self.scene, self.scene.session.tower, self.bound.encode)

    def work(self, direction: str, device: torch.device) -> Work:
        if not self.scene.row.training:
            return torch.no_grad()(self.bound.encode)
        parameters, directions = list(self.scene.session.tower.parameters()), draw_directions(self.scene)
        return lambda: step(self.bound.encode, parameters, directions)

    def peak_bytes(self, work: Work, device: torch.device) -> int | None:
        """Weights, the input, and beyond them what a call asks for; of a graph also its pool and what it holds."""
        if device.type != "cuda" or self.bound.pooled:
            return None
        parameters = list(self.scene.session.tower.parameters())
        for call in (work, lambda: None):
            call()
            gc.collect()
            for parameter in parameters:
                parameter.grad = None
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = work()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del result
        return sum(each.nbytes for each in (*parameters, self.scene.pixels)) + peak + held_bytes(self.bound)

    def extras(self, device: torch.device) -> dict[str, Any]:
        return {} if self.bound.first_calls is None else {"first_calls": self.bound.first_calls()}


def held_bytes(bound: Bound) -> int:
    held, pool = bound.held, bound.pool
    if bound.graphs is not None:
        held, pool = (*held, *bound.graphs.static_tensors), bound.graphs.pool
    total = sum(tensor.nbytes for tensor in held)
    return total if pool is None else total + pool_bytes(pool)


def encoder_impl(
    name: str, group: str, about: str, bind: Callable[[Scene], Bound],
    refuses: Callable[[Row, torch.dtype, torch.device], str] = runs_anywhere, trains: bool = True,
    ready: str = OUR_TABLES,
) -> Impl:  # fmt: skip
    """`ready` says in words what of the grid is made before the call, or remembered from the call before."""

    def bind_once(row: Row, scene: Scene) -> EncoderCall:
        if name not in scene.calls:
            with torch.set_grad_enabled(row.training):
                scene.calls[name] = EncoderCall(scene, bind(scene))
        return scene.calls[name]

    directions = ("forward", "training step") if trains else ("forward",)
    return Impl(name, bind_once, about, refuses, directions, group=group, ready=ready)


def captured(encode: Callable[[Tensor], Features], pixels: Tensor, held: tuple[Tensor, ...] = ()) -> Bound:
    """One CUDA graph of a call on `pixels`, which each call copies in; its results stay in the graph's memory."""
    static, graph, own = pixels.clone(), torch.cuda.CUDAGraph(), own_stream(pixels.device)
    with torch.no_grad():
        for _ in range(WARM_UP_CALLS):
            encode(static)
        with torch.cuda.graph(graph, pool=own.pool, stream=own.stream):
            result = encode(static)
        _spoil(result)

    def call() -> Features:
        static.copy_(pixels)
        graph.replay()
        return result

    return Bound(call, tuple(own.pool), (static, *held))


def _spoil(result: Features) -> None:
    """So that what no replay writes shows."""
    for feature in (result[0], result[1], *result[2]):
        feature.fill_(torch.nan)


# Ours.

# torch.compile takes a mode or options; reduce-overhead is `triton.cudagraphs`.
_WHOLE: dict[str, Any] = {"fullgraph": True, "dynamic": True}
OUR_COMPILERS: dict[str, dict[str, Any]] = {
    "vk_compiled_plain": {},
    "vk_compiled": {**_WHOLE, "options": {"size_asserts": False}},
    "vk_reduced": {**_WHOLE, "mode": "reduce-overhead"},
    "vk_reduced_frozen": {
        **_WHOLE,
        "options": {**torch._inductor.list_mode_options("reduce-overhead"), "freezing": True},
    },
}


def _bind_ours(scene: Scene) -> Bound:
    encoder = scene.session.encoder
    return Bound(on_new_grid(lambda: features_of(encoder(scene.pixels, grid_thw=scene.grid))))


def _bind_ours_ready(scene: Scene) -> Bound:
    encoder, metadata = scene.session.encoder, scene.metadata()
    held = tuple(tensor for _, tensor in metadata.tensors())
    return Bound(lambda: features_of(encoder(scene.pixels, metadata=metadata)), held=held)


def _bind_ours_compiled(name: str, scene: Scene) -> Bound:
    compiler = OUR_COMPILERS[name]

    def compile_it() -> Any:
        return torch.compile(scene.session.encoder.encode_packed, **compiler)

    encode, metadata = scene.session.once(f"ours compiled, {name}", compile_it), scene.metadata()
    held = tuple(tensor for _, tensor in metadata.tensors())
    bound = _stepped(
        lambda: encode(scene.pixels, metadata), "reduce-overhead" if "reduced" in name else None, held
    )  # fmt: skip
    if compiler.get("options", {}).get("freezing"):
        # Dynamo, which takes the weights for constants, looks at the configuration of the process.
        with torch.no_grad(), torch._inductor.config.patch(freezing=True):
            bound.encode()
    return bound


def _stepped(encode: Callable[[], Features], mode: str | None, held: tuple[Tensor, ...]) -> Bound:
    """Where a mode makes CUDA graphs it is told that the last call's results are no longer needed."""
    if mode is None:
        return Bound(encode, held=held)

    def call() -> Features:
        torch.compiler.cudagraph_mark_step_begin()
        return encode()

    return Bound(call, held=held, pooled=True)


def _bind_ours_graph(scene: Scene) -> Bound:
    encoder = scene.session.encoder
    # Room for the batch alone: empty segments could change which kernels attention takes.
    budget = filled_sizes(scene.row.grid, encoder.sizes)
    graphs = EncoderGraphs(encoder, [budget], copy_outputs=False, fallback="refuse").warmup()

    def call() -> Features:
        return features_of(graphs(scene.pixels, scene.grid))

    with torch.no_grad():
        _spoil(call())
    return Bound(call, graphs.pool, graphs.static_tensors)


def _bind_ours_graph_new(scene: Scene) -> Bound:
    bound = _bind_ours_graph(scene)
    return replace(bound, encode=on_new_grid(bound.encode))


def _bind_default(graphs: bool, scene: Scene) -> Bound:
    encoder, grid = accelerated(scene.session, graphs).visual, scene.grid.to(scene.device)
    own = getattr(encoder, "graphs", None)
    # Graphs of other batches would count as memory of this one.
    forget(own)

    def encode(pixels: Tensor) -> Features:
        return features_of(encoder(pixels, grid_thw=grid))

    call = partial(encode, scene.pixels)
    if scene.row.training:
        return Bound(call)
    for _ in range(WARM_UP_CALLS):
        # A replay that writes nothing shows, because the graph has never seen this batch's pixels.
        encode(torch.zeros_like(scene.pixels))
    if not graphs:
        return Bound(call, held=tuple(tensor for _, tensor in scene.metadata().tensors()))
    eager = _bind_default(False, scene).encode
    return Bound(call, graphs=own, first_calls=partial(first_calls, call, eager, own, scene.device))


# Transformers as it is.


def _bind_plain(scene: Scene) -> Bound:
    tower, grid = scene.session.tower, scene.grid.to(scene.device)
    return Bound(lambda: features_of(tower(scene.pixels, grid_thw=grid)))


def _bind_ready(scene: Scene) -> Bound:
    tower, ready = scene.session.tower, transformers_metadata(scene, segments_on_host=True)
    encode = partial(tower, scene.pixels, grid_thw=scene.grid, **ready)
    return Bound(lambda: features_of(encode()), held=_there(scene, ready.values()))


def _there(scene: Scene, values: Iterable[Any]) -> tuple[Tensor, ...]:
    """The tensors on the scene's device."""
    return tuple(value for value in values if isinstance(value, Tensor) and value.device == scene.device)


def _bind_compiled(mode: str | None, segments_on_host: bool, scene: Scene) -> Bound:
    """Each layer of sdpa attention reads its segments back, which waits where they are on the device."""

    def compile_it() -> Any:
        return torch.compile(scene.session.tower, dynamic=False, mode=mode)

    tower, ready = scene.session.once(f"compiled, {mode}", compile_it), transformers_metadata(scene, segments_on_host)
    encode = partial(tower, scene.pixels, grid_thw=scene.grid.to(scene.device), **ready)
    return _stepped(lambda: features_of(encode()), mode, _there(scene, ready.values()))


# Transformers with another attention, and the encoder put together of its blocks.


def _bind_twin(attention: str, compiled: bool, scene: Scene) -> Bound:
    made, ready = twin(scene.session, attention, compiled), transformers_metadata(scene)
    encode = partial(made, scene.pixels, grid_thw=scene.grid.to(scene.device), runs=scene.row.runs, **ready)
    return Bound(lambda: features_of(encode()), held=_there(scene, ready.values()))


def _bind_assembly(attention: str, scene: Scene) -> Bound:
    assembly = Assembly(scene, attention)
    inputs = assembly.block_inputs
    held = (assembly.positions, inputs["cu_seqlens"], *inputs["position_embeddings"])
    return captured(assembly, scene.pixels, held)


# Where each runs.


def _needs_gpu(row: Row, dtype: torch.dtype, device: torch.device) -> str:
    return "" if device.type == "cuda" else "needs a GPU"


def _needs_kernels(attention: str, row: Row, dtype: torch.dtype, device: torch.device) -> str:
    # cuDNN takes equal segments only: here each run of them is a call of its own.
    segments = row.segments[:1] if attention == "cudnn" else row.segments
    return ATTENTION_IMPLS[attention].refuses(
        WindowAttnCase("encoder", "its attention", segments, 16, 72), dtype, device
    )


def _with(attention: str) -> tuple[Impl, ...]:
    refuses = partial(_needs_kernels, attention)
    names = (f"hf_{attention}", f"hf_{attention}_blocks", f"graph_{attention}")
    return (
        encoder_impl(
            names[0], UNCAPTURED, f"Transformers' tower, eager, with {attention} and a linear patch embedding",
            partial(_bind_twin, attention, False), refuses, ready=THEIR_TABLES,
        ),
        encoder_impl(
            names[1], UNCAPTURED, f"{names[0]}, its blocks compiled (dynamic=False)",
            partial(_bind_twin, attention, True), refuses, ready=THEIR_TABLES,
        ),
        encoder_impl(
            names[2], ASSEMBLED,
            f"the blocks of {names[1]}, compiled mergers, a linear patch embedding, position embeddings and rotary "
            "tables made before the call, all under one CUDA graph",
            partial(_bind_assembly, attention), refuses, trains=False, ready=ALL_TABLES,
        ),
    )  # fmt: skip


_SDPA = "Transformers' tower with its sdpa attention"

IMPLS = (
    encoder_impl(
        "vk", OURS, "our encoder, eager, of a grid on the CPU whose metadata is not remembered", _bind_ours,
        ready=NO_TABLES,
    ),
    encoder_impl(
        "vk_ready", OURS, "our encoder, eager, of metadata made before the call", _bind_ours_ready
    ),
    encoder_impl(
        "vk_compiled_plain", OURS, "torch.compile(encoder.encode_packed)",
        partial(_bind_ours_compiled, "vk_compiled_plain"), _needs_gpu,
    ),
    encoder_impl(
        "vk_compiled", OURS,
        "torch.compile(encoder.encode_packed, fullgraph=True, dynamic=True, options={'size_asserts': False}), which "
        "does not check sizes in the compiled code that its guards have checked",
        partial(_bind_ours_compiled, "vk_compiled"), _needs_gpu,
    ),
    encoder_impl(
        "vk_reduced", OURS,
        "torch.compile(encoder.encode_packed, fullgraph=True, dynamic=True, mode='reduce-overhead')",
        partial(_bind_ours_compiled, "vk_reduced"), _needs_gpu, trains=False,
    ),
    encoder_impl(
        "vk_reduced_frozen", OURS,
        "vk_reduced with torch._inductor.config.freezing: weights are constants of what is compiled",
        partial(_bind_ours_compiled, "vk_reduced_frozen"), _needs_gpu, trains=False,
    ),
    encoder_impl(
        "vk_graph", OURS, "EncoderGraphs with a budget of just this batch, of a grid on the CPU", _bind_ours_graph,
        trains=False,
    ),
    encoder_impl(
        "vk_graph_new", OURS, "vk_graph of a grid whose metadata is not remembered", _bind_ours_graph_new,
        trains=False, ready=NO_TABLES,
    ),
    encoder_impl(
        VK_DEFAULT, OURS,
        "accelerate(model), and the model's call of its encoder: third and later calls of a size, grid on the device",
        partial(_bind_default, True),
    ),
    encoder_impl(
        "vk_default_eager", OURS, "vk_default with accelerate(model, graphs=False)", partial(_bind_default, False)
    ),
    encoder_impl(
        "hf", UNCAPTURED, f"{_SDPA}, eager, of a grid on the device", _bind_plain, ready=NO_TABLES
    ),
    encoder_impl(
        "hf_ready", UNCAPTURED, f"{_SDPA}, eager, all its metadata made before the call, segments on the CPU",
        _bind_ready, ready=THEIR_TABLES,
    ),
    encoder_impl(
        "hf_compiled", UNCAPTURED,
        f"torch.compile (dynamic=False) of {_SDPA}, metadata made before the call, segments on the CPU",
        partial(_bind_compiled, None, True), _needs_gpu, ready=THEIR_TABLES,
    ),
    encoder_impl(
        "hf_reduced", UNCAPTURED, "hf_compiled with mode='reduce-overhead', segments on the device",
        partial(_bind_compiled, "reduce-overhead", False), _needs_gpu, trains=False, ready=THEIR_TABLES,
    ),
    encoder_impl(
        "hf_reduced_host", UNCAPTURED, "hf_compiled with mode='reduce-overhead'",
        partial(_bind_compiled, "reduce-overhead", True), _needs_gpu, trains=False, ready=THEIR_TABLES,
    ),
    *itertools.chain.from_iterable(map(_with, ATTENTIONS)),
)  # fmt: skip


def find_impls(wanted: Sequence[str]) -> tuple[Impl, ...]:
    """Implementations by names, patterns of names and groups, separated by commas; ValueError names them all."""
    texts = split(wanted)
    named = find_named(IMPLS, [text for text in texts if text not in GROUPS])
    return tuple(each for each in IMPLS if each.group in texts or each in named)


def path_of(scene: Scene) -> str:
    """The path of attention in our encoder."""
    config, metadata = scene.session.tower.config, scene.metadata()
    heads = config.num_heads
    q, k, v = scene.pixels.new_empty((3, len(scene.pixels), heads, config.hidden_size // heads)).unbind()
    return str(torch_ops.explain(torch_ops.window_attn, q, k, v, metadata.cu_seqlens)["path"])


def encoder_bench(session: Session) -> OpBench:
    return OpBench(
        op="encoder", cases=find_rows, shape=lambda row: row.shape,
        inputs=lambda row, dtype, device, seed: make_scene(session, row),
        checks=lambda row, dtype, device, backward: [check_of(make_scene(session, row))],
        cost=lambda scene, backward: Cost(count_flops(scene), 0), path=path_of, ours=IMPLS[0], baselines=IMPLS[1:],
    )  # fmt: skip
