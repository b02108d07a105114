"""Graphs that an accelerated encoder captures by itself; without a GPU, what stands in for them."""

import contextlib
import copy
import dataclasses
import functools
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers import GenerationConfig

import torch_ops
from compile_tests.models import draw_pixels, named_outputs, tiny_tower
from tests.models.verify import tiny_model
from torch_ops.integrations.transformers import accelerate, register_encoders, restore, unregister_encoders
from torch_ops.models import GraphCache, Padding, QwenVisionEncoder, _recording, from_transformers, graph_cache
from torch_ops.models._recording import Recording
from torch_ops.models.graph_cache import bucket_of
from torch_ops.testing import check

pytestmark = pytest.mark.no_interpret

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE, OTHER = torch.tensor([[1, 12, 16]]), torch.tensor([[1, 20, 30]])
SEVERAL = torch.tensor([[1, 6, 8], [3, 4, 4], [1, 2, 2]])


@pytest.fixture(autouse=True)
def graphs_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, the stand-in for graphs is captured too. It repeats the modules as they are now."""
    monkeypatch.setattr(graph_cache, "DEVICES", ("cuda", "cpu"))
    repeated = _recording._repeated

    def frozen(encode: Any) -> Any:
        encoder = encode.func.__self__
        # A capture runs the modules.
        encode()
        kept = {id(tensor): tensor for tensor in (*encoder.parameters(), *encoder.buffers())}
        return repeated(functools.partial(copy.deepcopy(encoder, kept).encode_packed, *encode.args))

    monkeypatch.setattr(_recording, "_repeated", frozen)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that were captured, in patches."""
    made: list[int] = []
    record = Recording.__init__

    def counted(self: Recording, encoder: Any, statics: Any, budget: Padding) -> None:
        made.append(budget.rows or 0)
        record(self, encoder, statics, budget)

    monkeypatch.setattr(Recording, "__init__", counted)
    return made


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def dtype() -> torch.dtype:
    return torch.float16 if DEVICE == "cuda" else torch.float32


def accelerated(model_type: str = "qwen3_vl_vision", **options: Any) -> Any:
    return accelerate(tiny_tower(model_type, dtype()).to(DEVICE), **options)


def cache_of(encoder: Any) -> GraphCache:
    assert isinstance(encoder.graphs, GraphCache)
    return encoder.graphs


def pixels_of(encoder: Any, grid: Tensor, seed: int = 0) -> Tensor:
    return draw_pixels(encoder, grid, dtype(), seed).to(DEVICE)


def on_host(output: Any) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in named_outputs(output).items()}


def eagerly(encoder: Any, pixels: Tensor, grid: Tensor) -> Any:
    """The eager call, which the cache hears nothing of."""
    held, encoder.graphs = encoder.graphs, None
    try:
        return QwenVisionEncoder.forward(encoder, pixels, grid)
    finally:
        encoder.graphs = held


def call(encoder: Any, grid: Tensor = ONE, seed: int = 0, times: int = 1) -> Any:
    """Call it, compare the last result with the eager one by the rule, and return it."""
    pixels = pixels_of(encoder, grid, seed)
    for _ in range(times):
        output = encoder(pixels, grid_thw=grid.to(DEVICE))
    exact = copy.deepcopy(encoder).double().cpu()
    truth = eagerly(exact, pixels.double().cpu(), grid)
    check(on_host(output), on_host(eagerly(encoder, pixels, grid)), named_outputs(truth))
    return output


def replays(encoder: Any, grid: Tensor = ONE, seed: int = 0) -> bool:
    call(encoder, grid, seed)
    return not cache_of(encoder).why_eager


def held(encoder: Any, grid: Tensor = ONE) -> GraphCache:
    """Call the encoder until it replays a graph for this grid."""
    call(encoder, grid, times=3)
    assert not cache_of(encoder).why_eager and cache_of(encoder).captured
    return cache_of(encoder)


@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_vl_vision", "qwen3_5_vision"))
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_a_size_is_captured_when_it_comes_again(model_type: str, mode: Any) -> None:
    encoder = accelerated(model_type)
    cache = cache_of(encoder)
    with mode():
        call(encoder, SEVERAL)
        assert (cache.captured, cache.why_eager) == ((), "the size was met 1 of 2 times")
        call(encoder, SEVERAL, seed=1)
        (budget,) = cache.captured
        assert (budget.rows, budget.images, budget.segments) == (100, 3, 5) and cache.why_eager == ""
        before = cache._replays[budget]
        call(encoder, SEVERAL, seed=2)
        assert cache._replays[budget] == before + 1 and cache.captured == (budget,)
    # The mode of the capture does not matter.
    assert replays(encoder, SEVERAL)


def test_a_graph_of_the_very_size_computes_the_bits_of_an_eager_call() -> None:
    encoder = accelerated()
    held(encoder)
    pixels = pixels_of(encoder, ONE, seed=5)
    eager, replayed = eagerly(encoder, pixels, ONE), encoder(pixels, ONE)
    assert cache_of(encoder).why_eager == ""
    for name, tensor in named_outputs(replayed).items():
        assert torch.equal(tensor, named_outputs(eager)[name]), name


def test_a_graph_serves_every_batch_that_fits() -> None:
    """Where sizes of a bucket differ, the graph has the bucket's room."""
    encoder = accelerated()
    cache = cache_of(encoder)
    grids = [torch.tensor([[1, 2, side]]) for side in (258, 264, 286)]
    assert len({bucket_of(Padding(int(grid.prod()), 1, 1)) for grid in grids}) == 1
    assert [replays(encoder, grid) for grid in grids] == [False, True, True]
    assert cache.captured == (Padding(576, 1, 1),)
    # A smaller batch has a bucket of its own: there would be too much padding.
    assert not replays(encoder, ONE)


def test_a_graph_of_one_size_makes_way_for_one_with_room() -> None:
    encoder = accelerated()
    small, large = torch.tensor([[1, 2, 258]]), torch.tensor([[1, 2, 286]])
    assert held(encoder, small).captured == (Padding(516, 1, 1),)
    assert replays(encoder, large) and cache_of(encoder).captured == (Padding(576, 1, 1),)
    assert replays(encoder, small)


def test_buckets_bound_the_padding() -> None:
    for rows in range(4, 5000, 4):
        bucket = bucket_of(Padding(rows, 1, 1, 1))
        assert bucket.holds(Padding(rows, 1, 1, 1)) and bucket_of(bucket) == bucket
        assert bucket.rows is not None and bucket.rows - rows < bucket.rows / 9 + 4 and bucket.rows % 4 == 0
        assert (bucket.images, bucket.segments, bucket.windows) == (1, 1, 1)
    assert bucket_of(Padding(8, 3, 5, 9)) == Padding(8, 4, 8, 16)


def test_the_least_recently_used_graph_goes() -> None:
    encoder = accelerated()
    cache = encoder.graphs = GraphCache(max_graphs=2)
    third = torch.tensor([[1, 30, 40]])
    for grid in (ONE, OTHER):
        call(encoder, grid, times=2)
    call(encoder, ONE)
    call(encoder, third, times=2)
    assert [each.rows for each in cache.captured] == [192, 1200]
    assert replays(encoder, ONE) and [each.rows for each in cache.captured] == [1200, 192]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs that fit one by one, but not together, and one that does not fit at all."""
    encoder = accelerated()
    held(encoder)
    small = cache_of(encoder).bytes
    assert small > 0
    monkeypatch.setattr(
        GraphCache, "bytes", property(lambda self: sum(each.rows for each in (*self.captured, *latest(self))))
    )

    def latest(cache: GraphCache) -> list[Padding]:
        assert cache._statics is not None
        return [each for each in cache._statics.recordings if each not in cache.captured]

    cache = encoder.graphs = GraphCache(max_bytes=700)
    call(encoder, ONE, times=3)
    call(encoder, OTHER, times=2)
    assert cache.captured == () and cache._admission.too_large is None, "both go, since memory is shared"
    call(encoder, OTHER, times=4)
    assert [each.rows for each in cache.captured] == [600]
    cache.clear()
    for _ in range(3):
        for grid in (ONE, OTHER):
            call(encoder, grid, times=8)
            # One graph at a time from now on, which is captured once in such a row.
            assert not cache.why_eager and len(cache.captured) == 1
    large = torch.tensor([[1, 30, 40]])
    cache.clear()
    call(encoder, large)
    with pytest.warns(UserWarning, match="a graph of 1200 patches takes more than max_bytes = 700"):
        call(encoder, large)
    call(encoder, large)
    assert cache.captured == () and cache.why_eager == "memory does not suffice for a graph of 1200 patches"
    assert not replays(encoder, large) and not replays(encoder, ONE) and replays(encoder, ONE)
    small = torch.tensor([[1, 4, 4]])
    call(encoder, small, times=3)
    assert [each.rows for each in cache.captured] == [192, 16], "one that was too large says nothing of several"


def replace(encoder: Any) -> None:
    layer = encoder.blocks[1].mlp.linear_fc1
    layer.weight = nn.Parameter(layer.weight.detach() * 1.5)


def replace_module(encoder: Any) -> None:
    encoder.blocks[0].attn.proj = copy.deepcopy(encoder.blocks[0].attn.proj)


def move(encoder: Any) -> None:
    layer = encoder.blocks[2].attn.qkv
    layer.weight.data = layer.weight.data * 0.5


def cast(encoder: Any) -> None:
    encoder.blocks[0].to(torch.float64).to(dtype())


@pytest.mark.parametrize("change", (replace, replace_module, move, cast))
def test_changed_weights_are_noticed(change: Callable[[Any], None]) -> None:
    encoder = accelerated()
    cache = held(encoder)
    change(encoder)
    assert not replays(encoder) and cache.captured == ()
    assert cache.why_eager == "weights, modules or settings changed since the capture"
    call(encoder, times=4)
    assert cache.captured and cache.why_eager == ""


def test_weights_changed_in_place_count_from_the_next_call_on() -> None:
    encoder = accelerated()
    held(encoder)
    encoder.load_state_dict({name: tensor * 0.9 for name, tensor in encoder.state_dict().items()})
    assert replays(encoder)


def test_graphs_that_never_pay_are_captured_less_and_less() -> None:
    encoder = accelerated()
    calls = []
    for _ in range(4):
        count = 1
        while not replays(encoder):
            count += 1
        calls.append(count)
        move(encoder)
    assert calls == [2, 5, 9, 17], "the call that finds the change, and twice as many as before"
    encoder.graphs.clear()
    call(encoder, times=7)
    move(encoder)
    assert [replays(encoder) for _ in range(3)] == [False, False, True]


def test_a_layer_that_changes_in_every_call_is_captured_less_and_less(captures: list[int]) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    encoder = accelerated()
    layer = encoder.blocks[0].attn.proj
    layer.__class__ = Counting
    layer.calls = 0
    pixels = pixels_of(encoder, ONE)
    for _ in range(70):
        encoder(pixels, ONE)
    assert len(captures) <= 6 and cache_of(encoder).captured == ()


def test_more_sizes_than_graphs_are_captured_less_and_less(captures: list[int]) -> None:
    encoder = accelerated()
    encoder.graphs = GraphCache(max_graphs=2)
    grids = [torch.tensor([[1, 2, side]]) for side in (2, 4, 8)]
    batches = [(pixels_of(encoder, grid), grid) for grid in grids]
    for _ in range(60):
        for batch in batches:
            encoder(*batch)
    assert len(captures) <= 14
    in_turn = cache_of(encoder)._admission.meetings
    # One that comes alone is captured at last. It pays, and then others are captured earlier again.
    for _ in range(80):
        encoder(*batches[0])
    assert cache_of(encoder).why_eager == "" and cache_of(encoder)._admission.meetings < in_turn


def test_objects_of_other_layers_are_looked_into() -> None:
    class Settings:
        scale = 1.0

    class Scaled(nn.Linear):
        settings: Settings

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.settings.scale

    encoder = accelerated()
    layer = encoder.blocks[0].attn.proj
    layer.__class__ = Scaled
    layer.settings = Settings()
    layer.settings.scale = 0.5
    held(encoder)
    layer.settings.scale = 2.0
    assert not replays(encoder)


def test_layers_with_too_many_attributes_stay_eager() -> None:
    encoder = accelerated()
    layer = encoder.blocks[0].attn.proj
    layer.__class__ = type("Large", (nn.Linear,), {})
    layer.table = [[0] * 10 for _ in range(2000)]
    call(encoder, times=3)
    assert "too many attributes" in cache_of(encoder).why_eager


class Adapter(nn.Module):
    """A layer with LoRA as PEFT holds it: switched, merged and disabled by attributes."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        options: Any = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, 4, bias=False, **options) for name in "ab"})
        self.lora_B = nn.ModuleDict({name: nn.Linear(4, base.out_features, bias=False, **options) for name in "ab"})
        self.scaling = {"a": 1.0, "b": 2.0}
        self._active_adapter: list[str] = ["a"]
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        if self._disable_adapters or self.merged_adapters:
            return result
        for name in self._active_adapter:
            result = result + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return result

    def merge(self) -> None:
        (name,) = self._active_adapter
        self.base_layer.weight.data += self.scaling[name] * (self.lora_B[name].weight @ self.lora_A[name].weight)
        self.merged_adapters.append(name)


def switch(adapter: Adapter) -> None:
    adapter._active_adapter = ["b"]


def disable(adapter: Adapter) -> None:
    adapter._disable_adapters = True


def scale(adapter: Adapter) -> None:
    adapter.scaling["a"] = 3.0


@pytest.mark.parametrize("change", (switch, Adapter.merge, disable, scale))
def test_adapters_are_noticed(change: Callable[[Adapter], None]) -> None:
    encoder = accelerated()
    torch.manual_seed(0)
    adapter = encoder.blocks[1].mlp.linear_fc2 = Adapter(encoder.blocks[1].mlp.linear_fc2)
    held(encoder)
    change(adapter)
    assert not replays(encoder)
    call(encoder, times=4)
    assert cache_of(encoder).why_eager == ""


def test_another_class_of_a_module_is_noticed() -> None:
    encoder = accelerated()
    cache = held(encoder)
    layer = encoder.blocks[0].attn.proj
    layer.__class__ = type("Other", (nn.Linear,), {})
    call(encoder)
    assert cache.why_eager == "weights, modules or settings changed since the capture"


def test_another_module_in_the_memory_of_one_before_is_noticed() -> None:
    """Modules that were looked at are held, so that no other takes their identity."""
    encoder = accelerated()
    cache = held(encoder)
    before = weakref.ref(encoder.blocks[0].attn.proj)
    for _ in range(2):
        encoder.blocks[0].attn.proj = copy.deepcopy(encoder.blocks[0].attn.proj)
        gc.collect()
    assert before() is not None
    call(encoder)
    assert cache.why_eager == "weights, modules or settings changed since the capture"


def test_a_cache_serves_one_encoder() -> None:
    """A shallow copy has the cache of the original, as replicas of DataParallel have."""
    encoder, other = accelerated(), accelerated()
    other.graphs = held(encoder)
    call(other, times=3)
    assert cache_of(other).why_eager == "the graphs are those of another encoder"
    assert replays(encoder)
    cache_of(other).clear()
    call(other, times=3)
    assert cache_of(other).why_eager == "" and not replays(encoder)


def test_a_copy_that_captured_first_gives_the_cache_back() -> None:
    encoder = accelerated()
    twin = copy.copy(encoder)
    held(twin)
    del twin
    gc.collect()
    held(encoder)
    replica = encoder._replicate_for_data_parallel()
    replica(pixels_of(encoder, ONE), ONE)
    assert cache_of(encoder).why_eager == "the encoder is a replica of DataParallel"
    assert replays(encoder)


def test_training_mode_is_eager() -> None:
    encoder = accelerated()
    cache = held(encoder)
    encoder.train()
    assert not replays(encoder) and cache.why_eager == "the encoder is in training mode"
    encoder.eval()
    assert replays(encoder), "graphs are kept meanwhile"


def test_the_mode_of_a_layer_inside_is_noticed() -> None:
    encoder = accelerated()
    encoder.blocks[0].mlp.linear_fc1 = nn.Sequential(encoder.blocks[0].mlp.linear_fc1, nn.Dropout(0.5))
    held(encoder.eval())
    encoder.blocks[0].mlp.linear_fc1.train()
    encoder(pixels_of(encoder, ONE), ONE)
    assert cache_of(encoder).why_eager == "weights, modules or settings changed since the capture"


def test_hooks_run_in_every_call() -> None:
    encoder = accelerated()
    cache = held(encoder)
    seen: list[str] = []
    handle = encoder.blocks[1].register_forward_hook(lambda *args: seen.append("block"))
    for _ in range(3):
        encoder(pixels_of(encoder, ONE), ONE)
    assert len(seen) == 3 and cache.captured == ()
    call(encoder, times=5)
    assert cache.why_eager == "modules of the encoder have hooks"
    handle.remove()
    assert replays(encoder)


def test_hooks_of_the_encoder_itself_run_around_a_replay() -> None:
    encoder = accelerated()
    held(encoder)
    seen: list[str] = []
    encoder.register_forward_pre_hook(lambda *args: seen.append("before"))
    encoder.register_forward_hook(lambda *args: seen.append("after"))
    encoder(pixels_of(encoder, ONE), ONE)
    assert cache_of(encoder).why_eager == "" and seen == ["before", "after"]


def test_hooks_of_all_modules_are_seen() -> None:
    encoder = accelerated()
    held(encoder)
    seen: list[str] = []
    with contextlib.closing(_Removed(nn.modules.module.register_module_forward_hook(lambda *args: seen.append("x")))):
        encoder(pixels_of(encoder, ONE), ONE)
    assert len(seen) > len(encoder.blocks)


class _Removed:
    def __init__(self, handle: Any) -> None:
        self.close = handle.remove


def test_autocast_is_eager() -> None:
    encoder = accelerated()
    cache = held(encoder)
    with torch.autocast(DEVICE, torch.float16 if DEVICE == "cuda" else torch.bfloat16):
        encoder(pixels_of(encoder, ONE), ONE)
        assert cache.why_eager == "autocast is on"
    assert replays(encoder)


def test_numeric_flags_are_noticed() -> None:
    encoder = accelerated()
    held(encoder)
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction = not before
    try:
        assert not replays(encoder)
    finally:
        products.allow_bf16_reduced_precision_reduction = before
    torch.use_deterministic_algorithms(True)
    try:
        call(encoder, times=4)
        assert cache_of(encoder).captured
    finally:
        torch.use_deterministic_algorithms(False)
    assert not replays(encoder)


def test_settings_are_noticed() -> None:
    encoder = accelerated()
    cache = held(encoder)
    with torch_ops.settings(path="auto" if torch_ops.settings.path == "portable" else "portable"):
        assert not replays(encoder) and cache.captured == ()
    with torch_ops.settings(checked=True):
        assert not replays(encoder)
        assert cache.why_eager == "settings.checked is True, and checks wait for the device"


def test_threads_take_turns() -> None:
    encoder = accelerated()
    batches = [(pixels_of(encoder, grid, seed), grid) for seed in range(2) for grid in (ONE, SEVERAL)]
    expected = [eagerly(encoder, *batch).pooler_output for batch in batches]
    found: list[tuple[int, Tensor]] = []

    def repeat(index: int) -> None:
        stream = torch.cuda.stream(torch.cuda.Stream()) if DEVICE == "cuda" else contextlib.nullcontext()
        with torch.no_grad(), stream:
            found.extend((index, encoder(*batches[index]).pooler_output) for _ in range(6))

    torch.cuda.synchronize() if DEVICE == "cuda" else None
    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize() if DEVICE == "cuda" else None
    assert len(found) == 6 * len(batches) and len(cache_of(encoder).captured) == 2
    for index, output in found:
        torch.testing.assert_close(output, expected[index])


@pytest.mark.gpu
def test_a_call_on_another_stream_waits_for_the_one_before() -> None:
    encoder = accelerated()
    held(encoder)
    pixels = [pixels_of(encoder, ONE, seed) for seed in (1, 2)]
    expected = [eagerly(encoder, each, ONE).pooler_output for each in pixels]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        with torch.cuda.stream(stream):
            # Metadata is made for each stream, which may wait.
            encoder(pixels[0], ONE)
    torch.cuda.synchronize()
    found = []
    for stream, each in zip(streams, pixels, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**8)
            found.append(encoder(each, ONE).pooler_output)
    torch.cuda.synchronize()
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(found, expected, strict=True))


def test_out_of_memory_means_eager_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, record = accelerated(), Recording.__init__
    tried: list[int] = []

    def fail(*args: Any) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Recording, "__init__", fail)
    call(encoder)
    with pytest.warns(UserWarning, match="stays eager: no graph of 192 patches could be captured: memory does not"):
        call(encoder)
    count = len(tried)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(encoder, times=4)
        call(encoder, OTHER, times=3)
    assert len(tried) == count and cache_of(encoder).captured == ()
    monkeypatch.setattr(Recording, "__init__", record)
    small = torch.tensor([[1, 4, 4]])
    held(encoder, small)


def test_a_size_that_cannot_be_captured_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = accelerated()
    cache, record = cache_of(encoder), Recording.__init__

    def fail(self: Recording, encoder: Any, statics: Any, budget: Padding) -> None:
        if budget.rows == 192:
            raise RuntimeError("not permitted")
        record(self, encoder, statics, budget)

    monkeypatch.setattr(Recording, "__init__", fail)
    call(encoder)
    with pytest.warns(UserWarning, match="could be captured: not permitted$"):
        call(encoder)
    call(encoder, OTHER, times=5)
    assert cache.why_eager == "" and [each.rows for each in cache.captured] == [600]
    call(encoder, times=5)
    assert cache.why_eager == "no graph of 192 patches could be captured: not permitted"
    assert replays(encoder, OTHER)


def test_garbage_is_collected_again_after_the_last_of_several_captures() -> None:
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(_recording._no_collection)
    second.enter_context(_recording._no_collection)
    first.close()
    assert not gc.isenabled()
    second.close()
    assert gc.isenabled()


def test_no_garbage_is_collected_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finalizers may wait for the device."""
    encoder, seen, record = accelerated(), [], Recording.__init__
    monkeypatch.setattr(Recording, "__init__", lambda *args: (seen.append(gc.isenabled()), record(*args))[1])
    held(encoder)
    assert seen == [False] and gc.isenabled()


def test_what_cannot_be_captured_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a layer that reads a value back."""
    encoder = accelerated()
    monkeypatch.setattr(Recording, "__init__", lambda *args: (_ for _ in ()).throw(RuntimeError("not permitted\nmore")))
    call(encoder)
    with pytest.warns(UserWarning, match="could be captured: not permitted$"):
        call(encoder)
    assert cache_of(encoder).why_eager == "no graph of 192 patches could be captured: not permitted"


@pytest.mark.gpu
def test_a_layer_that_reads_a_value_back_is_eager() -> None:
    class Reading(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.0 if float(x.sum()) > 0 else 1.0)

    encoder = accelerated()
    layer = encoder.blocks[0].attn.proj
    layer.__class__ = Reading
    call(encoder)
    with pytest.warns(UserWarning, match="the vision encoder stays eager"):
        call(encoder)
    call(encoder, times=3)
    assert cache_of(encoder).captured == ()
    layer.__class__ = nn.Linear
    cache_of(encoder).clear()
    held(encoder)


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("clone", (copy.deepcopy, by_pickle))
def test_copies_and_pickles_hold_no_graphs(clone: Callable[[Any], Any]) -> None:
    encoder = accelerated()
    encoder.graphs = GraphCache(max_graphs=3, copy_outputs=False)
    held(encoder)
    twin = clone(encoder)
    assert cache_of(twin).captured == () and len(cache_of(encoder).captured) == 1
    assert (cache_of(twin).max_graphs, cache_of(twin).copy_outputs) == (3, False)
    for parameter in twin.parameters():
        parameter.mul_(1.25)
    held(twin)
    assert replays(encoder)


@pytest.mark.parametrize(
    "change", (lambda each: each.to(torch.float64), lambda each: each.cpu(), lambda each: each.float()),
    ids=("dtype", "device", "float"),
)  # fmt: skip
def test_moving_and_casting_drop_graphs(change: Callable[[Any], Any]) -> None:
    model = nn.ModuleList([accelerated()])
    cache = held(model[0])
    change(model)
    assert cache.captured == () and cache.static_tensors == () and cache.pool is None


def test_no_state_dict_knows_of_graphs() -> None:
    encoder = accelerated()
    names = list(encoder.state_dict())
    held(encoder)
    assert list(encoder.state_dict()) == names == list(tiny_tower("qwen3_vl_vision").state_dict())


def test_graphs_can_be_turned_off() -> None:
    encoder = accelerated(graphs=False)
    assert encoder.graphs is None
    pixels = pixels_of(encoder, ONE)
    for _ in range(3):
        encoder(pixels, ONE)
    assert encoder.graphs is None
    assert accelerate(encoder).graphs is not None and accelerate(encoder, graphs=False).graphs is None
    # The encoder itself has none unless it is asked for them.
    assert from_transformers(tiny_tower("qwen3_vl_vision")).graphs is None


def test_what_is_held_is_shown() -> None:
    encoder = accelerated()
    assert repr(encoder.graphs) == "GraphCache(max_graphs=8, max_bytes=1073741824, held: none)"
    cache = held(encoder)
    assert repr(cache).endswith("held: 192 patches, 1 images, 1 frames)")
    assert cache.captured == (Padding(192, 1, 1),) and len(cache.static_tensors) == 5
    assert cache.bytes >= sum(each.nbytes for each in cache.static_tensors)
    assert (cache.pool is None) == (DEVICE == "cpu")
    cache.clear()
    assert cache.captured == () and cache.bytes == 0


def test_outputs_are_the_callers_own_unless_asked_otherwise() -> None:
    encoder = accelerated()
    held(encoder)
    kept = encoder(pixels_of(encoder, ONE, 1), ONE)
    before = on_host(kept)
    encoder(pixels_of(encoder, ONE, 2), ONE)
    for name, tensor in named_outputs(kept).items():
        assert torch.equal(tensor.cpu(), before[name])
        tensor.add_(1)
    call(encoder, seed=1)
    encoder.graphs.copy_outputs = False
    view = encoder(pixels_of(encoder, ONE, 1), ONE).pooler_output
    assert view.data_ptr() == encoder(pixels_of(encoder, ONE, 2), ONE).pooler_output.data_ptr()


def test_called_with_everything_that_an_eager_call_takes() -> None:
    encoder = accelerated()
    cache = held(encoder)
    pixels = pixels_of(encoder, ONE)
    expected = encoder(pixels, ONE)
    as_tuple = encoder(pixels, ONE, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[1], expected.pooler_output) and not cache.why_eager
    metadata = torch_ops.models.vision_metadata(ONE, encoder.sizes, DEVICE)
    count = cache._replays[cache.captured[0]]
    assert torch.equal(encoder(pixels, metadata=metadata)[1], expected[1])
    assert torch.equal(encoder(pixels, grid_thw=ONE, output_attentions=False)[1], expected[1])
    assert cache._replays[cache.captured[0]] == count + 2
    # These are no replays.
    assert len(encoder(pixels, ONE, output_hidden_states=True).hidden_states) == len(encoder.blocks) + 1
    assert cache.why_eager == "output_hidden_states is given"
    encoder(pixels, ONE, chunk_tokens=64)
    assert cache.why_eager == "chunk_tokens is given"
    with pytest.raises(ValueError, match="chunk_tokens is 0, expected 1 or more"):
        encoder(pixels, ONE, chunk_tokens=0)
    encoder(pixels, ONE, cu_seqlens=metadata.cu_seqlens)
    assert cache.why_eager == "tensors of Transformers' helpers are given"
    encoder(pixels, metadata=metadata.clone())
    assert cache.why_eager == "metadata has tensors that do not follow from its images"
    assert cache._replays[cache.captured[0]] == count + 2
    with pytest.raises(ValueError, match="pixel_values has 191, expected 192 rows"):
        encoder(pixels[1:], ONE)
    empty = torch.zeros((0, 3), dtype=torch.int64)
    assert encoder(pixels[:0], empty).pooler_output.shape[0] == 0 and cache.why_eager == "the batch is empty"


def test_metadata_with_other_tensors_than_those_of_its_images_counts() -> None:
    encoder = accelerated()
    cache = held(encoder)
    pixels = pixels_of(encoder, ONE)
    metadata = torch_ops.models.vision_metadata(ONE, encoder.sizes, DEVICE)
    copied = copy.deepcopy(metadata)
    copied.cos.copy_(metadata.cos.flip(0))
    for changed in (dataclasses.replace(metadata, cos=metadata.cos.flip(0)), copied, by_pickle(copied)):
        output = encoder(pixels, metadata=changed)
        assert cache.why_eager == "metadata has tensors that do not follow from its images"
        expected = encoder.encode_packed(pixels, changed)
        assert torch.equal(output.pooler_output, expected[1])
        assert not torch.allclose(output.pooler_output, eagerly(encoder, pixels, ONE).pooler_output)


def test_gradients_are_eager() -> None:
    encoder = accelerated()
    cache = held(encoder)
    with torch.enable_grad():
        encoder(pixels_of(encoder, ONE), ONE).pooler_output.float().sum().backward()
    assert "gradients are enabled" in cache.why_eager
    assert encoder.merger.linear_fc2.weight.grad is not None
    assert replays(encoder)


def test_a_compiled_encoder_is_not_replayed() -> None:
    encoder = accelerated()
    cache = held(encoder)
    pixels = pixels_of(encoder, ONE)
    metadata = torch_ops.models.vision_metadata(ONE, encoder.sizes, DEVICE)
    count = cache._replays[cache.captured[0]]
    compiled = torch.compile(lambda pixels: encoder(pixels, metadata=metadata).pooler_output, backend="eager")
    torch.testing.assert_close(compiled(pixels), eagerly(encoder, pixels, ONE).pooler_output)
    assert cache._replays[cache.captured[0]] == count


@pytest.mark.gpu
def test_a_capture_of_the_caller_holds_the_eager_kernels() -> None:
    encoder = accelerated()
    held(encoder)
    pixels, metadata = pixels_of(encoder, ONE), torch_ops.models.vision_metadata(ONE, encoder.sizes, DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = encoder(pixels, metadata=metadata).pooler_output
    assert cache_of(encoder).why_eager == "the stream is being captured"
    graph.replay()
    assert torch.equal(static, eagerly(encoder, pixels, ONE).pooler_output)


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_fsdp_stays_eager(one_rank: None) -> None:
    encoder = accelerated()
    with torch.enable_grad():
        fully_shard(encoder)
    for _ in range(4):
        encoder(pixels_of(encoder, ONE), ONE)
    assert cache_of(encoder).captured == () and "FSDP" in cache_of(encoder).why_eager


def test_tensor_parallel_stays_eager(one_rank: None) -> None:
    mesh = init_device_mesh(DEVICE, (1,))
    encoder = accelerated()
    layer = encoder.blocks[0].mlp.linear_fc1
    spread = distribute_tensor(layer.weight.detach(), mesh, [Replicate()])
    layer.weight = nn.Parameter(spread)
    layer.__class__ = _Gathering
    for _ in range(4):
        encoder(pixels_of(encoder, ONE), ONE)
    assert cache_of(encoder).captured == ()
    assert cache_of(encoder).why_eager == "a _Gathering of the encoder holds a DTensor"


class _Gathering(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return nn.functional.linear(x, weight.full_tensor(), self.bias)


def test_offloading_stays_eager() -> None:
    """As by Accelerate's hooks, which replace forwards of modules inside."""
    encoder = accelerated()
    block = encoder.blocks[1]
    original = block.forward

    def loaded(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    block.forward = loaded
    for _ in range(4):
        encoder(pixels_of(encoder, ONE), ONE)
    assert cache_of(encoder).captured == ()
    assert cache_of(encoder).why_eager == "a Qwen3VLVisionBlock of the encoder has a forward of its own"


def test_a_grid_on_the_device_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = accelerated()
    pixels, grid = pixels_of(encoder, ONE), ONE.to(DEVICE)
    read: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (read.append(id(self)), tolist(self))[1])
    for _ in range(4):
        encoder(pixels, grid_thw=grid)
        assert read.count(id(grid)) == 1
        read.clear()


@pytest.mark.gpu
def test_an_encoder_waits_once_for_a_grid_on_the_device() -> None:
    encoder = accelerated()
    pixels, grid = pixels_of(encoder, ONE), ONE.to(DEVICE)
    for _ in range(3):
        encoder(pixels, grid_thw=grid)
    for graphs in (encoder.graphs, None):
        encoder.graphs = graphs
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                encoder(pixels, grid_thw=grid)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sum("synchronizing" in str(each.message) for each in caught) == 1


def test_whole_models_generate_the_same_tokens() -> None:
    model = tiny_model().to(DEVICE)
    tokens = torch.tensor([[6, *[5] * 48, 9]], device=DEVICE)
    named = {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "image_grid_thw": ONE.to(DEVICE),
        "pixel_values": draw_pixels(model.model.visual, ONE).to(DEVICE), "mm_token_type_ids": (tokens == 5).int(),
    }  # fmt: skip
    options = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=63)
    expected = model.generate(**named, generation_config=options)
    accelerate(model)
    for _ in range(4):
        assert torch.equal(model.generate(**named, generation_config=options), expected)
    assert cache_of(model.model.visual).captured == (Padding(192, 1, 1),)
    restore(model)
    assert not hasattr(model.model.visual, "graphs")


def test_encoders_that_transformers_builds_have_graphs() -> None:
    try:
        register_encoders()
    except ImportError as error:
        pytest.skip(str(error))
    try:
        model = tiny_model()
    finally:
        unregister_encoders()
    assert isinstance(model.model.visual.graphs, GraphCache)


def test_bad_options_are_refused() -> None:
    for options, message in (
        ({"max_graphs": 0}, "max_graphs is 0, expected 1 or more"),
        ({"max_bytes": 2.5}, "max_bytes"),
        ({"max_bytes": -1}, "max_bytes is -1, expected 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            GraphCache(**options)  # type: ignore[arg-type]
