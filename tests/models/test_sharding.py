"""Accelerated encoders in shards, offloaded and spread over devices, by FSDP and by Hugging Face's Accelerate."""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from compile_tests.models import FAMILIES, draw_pixels, named_outputs, tiny_tower
from tests.models import ranks, shards
from tests.models.shards import IMAGES, results, with_gradients
from tests.models.verify import MODELS, doubled, tiny_model
from torch_ops.integrations.transformers import accelerate, register_encoders, restore, unregister_encoders
from torch_ops.models import EncoderGraphs, QwenVisionEncoder, from_transformers, graph_cache, vision_metadata
from torch_ops.testing import check

hf = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")

pytestmark = pytest.mark.no_interpret

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Where offloaded weights are computed with.
RUNS = 0 if DEVICE == "cuda" else "cpu"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def graphs_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, what stands in for graphs is captured."""
    monkeypatch.setattr(graph_cache, "DEVICES", ("cuda", "cpu"))


@cache
@torch.enable_grad()
def expected(model_type: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Pixels, and what Transformers' tower makes of them in fp32 and fp64, with all gradients."""
    tower = tiny_tower(model_type).to(DEVICE)
    pixels, exact = draw_pixels(tower, IMAGES).to(DEVICE), doubled(tower)
    return pixels, with_gradients(tower, pixels), with_gradients(exact, pixels.double())


def check_results(model_type: str, actual: dict[str, Tensor]) -> None:
    _, *others = expected(model_type)
    check(actual, *({name: each[name] for name in actual} for each in others))


def accelerated(model_type: str) -> Any:
    return accelerate(tiny_tower(model_type).to(DEVICE))


# Names of classes


def whole_model(family: str) -> Any:
    model_class, config_class, sizes = MODELS[family]
    with torch.device("meta"):
        return model_class._from_config(config_class(**copy.deepcopy(sizes)))


def classes_found(model: Any, names: Any, version: int) -> set[type]:
    plugin = hf.FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", fsdp_version=version, transformer_cls_names_to_wrap=names
    )
    plugin.set_auto_wrap_policy(model)
    policy: Any = plugin.auto_wrap_policy
    return set(policy.keywords["transformer_layer_cls"])


@pytest.mark.parametrize("family", MODELS)
def test_policies_find_our_blocks(family: str) -> None:
    model = whole_model(family)
    (theirs,) = (each for each in model.modules() if hasattr(each, "blocks"))
    # A model of Qwen3-Omni also names parts that it was built without, and its tower, which ours needs not.
    names = set(model._no_split_modules) & {type(each).__name__ for each in model.modules()} - {type(theirs).__name__}
    wanted = names if "omni" in family else None
    found = {version: classes_found(model, wanted, version) for version in (1, 2)}
    accelerate(model)
    (encoder,) = (each for each in model.modules() if isinstance(each, QwenVisionEncoder))
    for version in (1, 2):
        classes = classes_found(model, wanted, version)
        assert {each.__name__ for each in classes} == {each.__name__ for each in found[version]} == names
        assert type(encoder.blocks[0]) in classes and type(theirs.blocks[0]) not in classes
        assert classes_found(encoder, None, version) == {type(encoder.blocks[0])}
    assert classes_found(restore(model), wanted, 1) == found[1] >= {type(theirs.blocks[0])}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_blocks_have_the_names_of_transformers_blocks(model_type: str) -> None:
    tower = tiny_tower(model_type)
    encoder = from_transformers(tower)
    for block in (encoder.blocks[0], pickle.loads(pickle.dumps(encoder.blocks[0]))):
        assert type(block).__name__ == type(tower.blocks[0]).__name__ and type(block) is type(encoder.blocks[1])


# FSDP


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this build of PyTorch has no gloo")
def test_shards_of_two_ranks(tmp_path: Path) -> None:
    ranks.start(2, "cpu", tmp_path, shards.BODIES)


@pytest.mark.gpu
def test_shards_on_a_gpu(one_rank: None) -> None:
    for body in shards.BODIES:
        body(DEVICE)


def test_checkpoints_reach_blocks_inside_wrappers(one_rank: None) -> None:
    encoder = accelerated("qwen3_vl_vision").train()
    model_type, shard = shards.shardings(DEVICE)["FSDP 1"]
    sharded = shard(encoder)
    blocks = [each for each in encoder.modules() if type(each).__name__ == "Qwen3VLVisionBlock"]
    for enabled in (True, False):
        (encoder.gradient_checkpointing_enable if enabled else encoder.gradient_checkpointing_disable)()
        assert [each.gradient_checkpointing for each in blocks] == [enabled] * 3
        assert encoder.is_gradient_checkpointing is enabled
        check_results(model_type, results(sharded, expected(model_type)[0]))


def _fully_sharded(*names: str) -> Callable[[Any], Any]:
    def shard(model: Any) -> Any:
        for name in names:
            fully_shard(model[0].get_submodule(name), mesh=init_device_mesh(DEVICE, (1,)))
        return model

    return shard


def _first_fsdp(model: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=torch.device(DEVICE))


def _gathered(model: Any) -> Any:
    """FSDP leaves the outermost weights whole after a forward, until the next backward."""
    fully_shard(model[0], mesh=init_device_mesh(DEVICE, (1,)))
    model[0](expected("qwen3_vl_vision")[0], grid_thw=IMAGES)
    assert type(model[0].patch_embed.proj.weight) is nn.Parameter
    return model


def _parallel_without_hooks(model: Any) -> Any:
    from torch.distributed.tensor import Replicate, distribute_tensor

    norm = model[0].blocks[1].norm1
    spread = distribute_tensor(norm.weight.detach(), init_device_mesh(DEVICE, (1,)), [Replicate()])
    norm.weight = nn.Parameter(spread)
    return model


@pytest.mark.parametrize(
    ("shard", "place"),
    [
        (_fully_sharded("blocks.0"), r"blocks\.0\.norm1"),
        (_fully_sharded("blocks.1", ""), r"patch_embed\.proj"),
        (_fully_sharded("patch_embed.proj"), r"patch_embed\.proj"),
        (_first_fsdp, "the vision encoder"),
        (_gathered, r"patch_embed\.proj"),
        (_parallel_without_hooks, r"blocks\.1\.norm1"),
    ],
)
def test_what_is_sharded_is_refused_and_stays_whole(shard: Any, place: str, one_rank: None) -> None:
    for prepare, function, order in (
        (lambda tower: tower, accelerate, r"accelerate: {} is sharded, expected whole; accelerate the model first"),
        (accelerate, restore, r"restore: {} is sharded, expected whole; restore the model first, then shard it"),
    ):
        model = shard(nn.ModuleList([prepare(tiny_tower("qwen3_vl_vision").to(DEVICE))]))
        modules = list(model.modules())
        with pytest.raises(ValueError, match=f"^{order.format(place)}"):
            function(model)
        assert all(one is other for one, other in zip(model.modules(), modules, strict=True))
    if place == "the vision encoder":
        (encoder,) = (each for each in model.modules() if isinstance(each, QwenVisionEncoder))
        with pytest.raises(ValueError, match="EncoderGraphs: encoder is one that FSDP gathers, expected one whose"):
            EncoderGraphs(encoder, [512]).warmup()


def test_a_tower_that_fsdp_ignores_is_whole(one_rank: None) -> None:
    model = nn.Sequential(tiny_tower("qwen3_vl_vision").to(DEVICE), nn.Linear(2, 2, device=DEVICE))
    fully_shard(model, mesh=init_device_mesh(DEVICE, (1,)), ignored_params=set(model[0].parameters()))
    assert isinstance(accelerate(model)[0], QwenVisionEncoder)
    check_results("qwen3_vl_vision", results(model[0], expected("qwen3_vl_vision")[0]))


def test_tensor_parallel_layers_are_called(one_rank: None) -> None:
    """Their hooks are their own, before and after."""
    mesh = init_device_mesh(DEVICE, (1,))
    plan = {"mlp.linear_fc1": ColwiseParallel(), "mlp.linear_fc2": RowwiseParallel()}
    pixels, *_ = expected("qwen3_vl_vision")
    parallel = partial(parallelize, mesh=mesh, plan=plan)
    for first, then in ((accelerate, parallel), (parallel, accelerate)):
        encoder = then(first(tiny_tower("qwen3_vl_vision").to(DEVICE)))
        assert isinstance(encoder, QwenVisionEncoder)
        check_results("qwen3_vl_vision", results(encoder, pixels))


def parallelize(tower: Any, mesh: Any, plan: Any) -> Any:
    for block in tower.blocks:
        parallelize_module(block, mesh, plan)
    return tower


# Offloading and device maps


def test_what_is_offloaded_is_refused_and_stays_whole() -> None:
    for prepare, function, then in (
        (lambda tower: tower, accelerate, "accelerate the model first, then offload"),
        (accelerate, restore, r"remove Accelerate's hooks first \(remove_hook_from_submodules\)"),
    ):
        model = nn.ModuleList([prepare(tiny_tower("qwen3_vl_vision").to(DEVICE))])
        hf.cpu_offload(model[0], execution_device=RUNS)
        message = rf"^{function.__name__}: patch_embed\.proj is offloaded, expected on a device; {then}$"
        with pytest.raises(ValueError, match=message):
            function(model)
        hooks.remove_hook_from_submodules(model)
        function(model)
        check_results("qwen3_vl_vision", results(model[0], expected("qwen3_vl_vision")[0]))
    encoder = accelerated("qwen3_vl_vision")
    hf.dispatch_model(encoder, {"": RUNS}, force_hooks=True)
    with pytest.raises(ValueError, match="^restore: the vision encoder is a module with a hook, expected one without"):
        restore(encoder)
    with pytest.raises(ValueError, match="EncoderGraphs: encoder is on meta, expected on a device; call an offl"):
        EncoderGraphs(hf.cpu_offload(accelerated("qwen3_vl_vision"), execution_device=RUNS), [512]).warmup()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_metadata_goes_where_offloaded_weights_go(model_type: str) -> None:
    """Here the device that computes is meta, since no other is sure to be there."""
    encoder = accelerate(tiny_tower(model_type))
    pixels = draw_pixels(encoder, IMAGES)
    state = dict(encoder.state_dict())
    hooks.attach_align_device_hook(encoder, execution_device="meta", offload=True, weights_map=state)
    for named in ({}, {"chunk_tokens": 100}, {"metadata": vision_metadata(IMAGES, encoder.sizes)}):
        grid = None if "metadata" in named else IMAGES
        outputs = named_outputs(encoder(pixels, grid, **named))
        assert {each.device.type for each in outputs.values()} == {"meta"}
        assert outputs["last_hidden_state"].shape[0] == pixels.shape[0]


def _blocks_apart(tower: Any, folder: Path) -> Any:
    """Names as a file of settings has them, of Transformers' classes."""
    classes = [type(tower.blocks[0]).__name__, "Sequential"]
    return hf.cpu_offload(tower, execution_device=RUNS, preload_module_classes=classes)


def _spread(tower: Any, folder: Path) -> Any:
    places = {name: ("disk", "cpu", RUNS)[i % 3] for i, name in enumerate(_parts(tower))}
    return hf.dispatch_model(tower, places, main_device=RUNS, offload_dir=folder)


def _parts(tower: Any) -> list[str]:
    """Modules that hold all weights, blocks one by one."""
    return [
        *(f"blocks.{layer}" for layer in range(len(tower.blocks))),
        *(name for name, child in tower.named_children() if name != "blocks" and [*child.parameters()]),
    ]


OFFLOADINGS: dict[str, Callable[[Any, Path], Any]] = {
    "layers": lambda tower, _: hf.cpu_offload(tower, execution_device=RUNS),
    "blocks": _blocks_apart,
    "whole": lambda tower, _: hf.cpu_offload(
        tower, execution_device=RUNS, preload_module_classes=[type(tower).__name__]
    ),
    "disk": lambda tower, folder: hf.disk_offload(tower, folder, execution_device=RUNS),
    "spread": _spread,
    "at once": lambda tower, _: hf.cpu_offload_with_hook(tower, execution_device=torch.device(DEVICE))[0],
}


def graphs_of(encoder: Any, model_type: str) -> Any:
    with torch.no_grad():
        for _ in range(3):
            encoder(expected(model_type)[0], grid_thw=IMAGES)
    assert encoder.graphs.captured and not encoder.graphs.why_eager
    return encoder.graphs


@pytest.mark.parametrize("offloading", OFFLOADINGS)
@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_vl_vision"))
def test_offloaded_encoders_compute_the_same(
    model_type: str, offloading: str, graphs_everywhere: None, tmp_path: Path
) -> None:
    pixels, *_ = expected(model_type)
    encoder = accelerated(model_type)
    graphs = graphs_of(encoder, model_type)
    encoder = OFFLOADINGS[offloading](encoder, tmp_path)
    with torch.no_grad():
        for _ in range(3):
            outputs = named_outputs(encoder(pixels, grid_thw=IMAGES))
            check_results(model_type, outputs)
            # Weights that are brought whole lie where they were, on the CPU.
            assert graphs.why_eager or offloading in ("whole", "at once")
    check_results(model_type, results(encoder, pixels))


@settings(max_examples=8, deadline=None)
@given(data=st.data(), model_type=st.sampled_from(list(FAMILIES)))
def test_any_device_map(data: Any, model_type: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each part goes anywhere, whole or in parts, and its weights are brought for it or for what is inside."""
    encoder = accelerated(model_type)
    places: dict[str, Any] = {}
    left = _parts(encoder)
    while left:
        name = left.pop()
        module = encoder.get_submodule(name)
        inside = [f"{name}.{child}" for child, each in module.named_children() if [*each.parameters()]]
        if inside and not [*module.parameters(recurse=False)] and data.draw(st.booleans(), f"{name} in parts"):
            left += inside
        else:
            places[name] = data.draw(st.sampled_from(("disk", "cpu", RUNS)), name)
    called = {type(each).__name__ for each in encoder.modules() if not isinstance(each, nn.ModuleList)}
    whole = data.draw(st.lists(st.sampled_from(sorted(called)), max_size=2), "loaded whole")
    folder = tmp_path_factory.mktemp("weights")
    hf.dispatch_model(encoder, places, RUNS, offload_dir=folder, preload_module_classes=whole, force_hooks=True)
    check_results(model_type, results(encoder, expected(model_type)[0]))


@pytest.mark.parametrize("name", ("layers", "embeddings apart, offloaded", "FSDP 1", "FSDP 1, flat"))
def test_graphs_end_where_weights_are_sharded(name: str, one_rank: None, graphs_everywhere: None) -> None:
    encoder = accelerated("qwen3_vl_vision")
    graphs = graphs_of(encoder, "qwen3_vl_vision")
    model_type, shard = shards.shardings(DEVICE)[name]
    assert model_type == "qwen3_vl_vision"
    sharded = shard(encoder)
    with torch.no_grad():
        for _ in range(4):
            outputs = named_outputs(sharded(expected("qwen3_vl_vision")[0], grid_thw=IMAGES))
            check_results("qwen3_vl_vision", outputs)
    assert not graphs.captured and graphs.why_eager


def logits(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    images = [token for t, h, w in IMAGES.tolist() for token in (6, *[5] * (t * h * w // 4))]
    tokens = torch.tensor([images], device=DEVICE)
    with torch.no_grad():
        output = model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), mm_token_type_ids=(tokens == 5).int(),
            pixel_values=expected("qwen3_vl_vision")[0].to(dtype), image_grid_thw=IMAGES.to(DEVICE),
        )  # fmt: skip
    return {"logits": output.logits}


def test_models_that_are_spread_or_loaded_in_parts(tmp_path: Path) -> None:
    model = tiny_model().to(DEVICE)
    theirs, truth = logits(model), logits(doubled(model), torch.float64)
    model.save_pretrained(tmp_path / "saved")
    accelerate(model)
    size = sum(each.nbytes for each in model.parameters())
    most = {RUNS: int(0.4 * size), "disk": 10 * size}
    places = hf.infer_auto_device_map(model, most, no_split_module_classes=model._no_split_modules)
    assert len({place for name, place in places.items() if "blocks" in name}) == 2
    hf.dispatch_model(model, places, RUNS, offload_dir=tmp_path / "spread")
    check(logits(model), theirs, truth)
    try:
        register_encoders()
    except ImportError as error:
        pytest.skip(str(error))
    try:
        places = {"model.visual": "disk", "model.language_model": "cpu", "lm_head": RUNS}
        loaded = type(model).from_pretrained(tmp_path / "saved", device_map=places, offload_folder=tmp_path / "loaded")
    finally:
        unregister_encoders()
    assert isinstance(loaded.model.visual, QwenVisionEncoder) and loaded.model.visual.device.type == "meta"
    check(logits(loaded), theirs, truth)
