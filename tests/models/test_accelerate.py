"""The encoder of the library in the place of Transformers' own: same results, and the way back."""

import copy
import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.monkey_patching import get_patch_mapping, register_patch_mapping, unregister_patch_mapping

from compile_tests.models import FAMILIES, GRID, draw_pixels, named_outputs, tiny_tower, vision_config
from tests.models.verify import check_outputs, doubled
from tests.models.verify import tiny_model as tiny_qwen3
from torch_ops.integrations.transformers import (
    accelerate,
    register_encoders,
    restore,
    unregister_encoders,
    use_window_attn,
)
from torch_ops.models import QwenVisionEncoder, _layers, vision_metadata
from torch_ops.models._layers import LayerNorm, RMSNorm
from torch_ops.models.vision_block import VisionBlock
from torch_ops.testing import assert_close_to_reference, check, check_draws

pytestmark = pytest.mark.no_interpret

IMAGES, VIDEO = torch.tensor(GRID), torch.tensor([[2, 4, 6], [3, 2, 2]])
IMAGE, VIDEO_TOKEN, START = 5, 7, 6


def tiny_qwen2_5() -> Any:
    text = {
        "vocab_size": 64, "hidden_size": 40, "intermediate_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 3, 3]},
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        vision_config=vision_config("qwen2_5_vl_vision").to_dict(), text_config=text, image_token_id=IMAGE,
        vision_start_token_id=START, video_token_id=VIDEO_TOKEN,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration._from_config(config).eval()


WHOLE = {"qwen3_vl": tiny_qwen3, "qwen2_5_vl": tiny_qwen2_5}
whole = pytest.mark.parametrize("family", WHOLE)


def build(family: str = "qwen3_vl") -> Any:
    torch.manual_seed(0)
    return WHOLE[family]()


def inputs(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Images and videos in one prompt; Qwen3-VL has a mark before each frame of a video."""
    by_frame = "qwen3" in model.config.model_type
    tokens = [token for t, h, w in GRID for token in (START, *[IMAGE] * (t * h * w // 4))]
    for t, h, w in VIDEO.tolist():
        frames, each = (t, h * w // 4) if by_frame else (1, t * h * w // 4)
        tokens += [token for _ in range(frames) for token in (1, START, *[VIDEO_TOKEN] * each)]
    ids = torch.tensor([tokens])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": ((ids == IMAGE) + 2 * (ids == VIDEO_TOKEN)).int(),
        "pixel_values": draw_pixels(model.model.visual, IMAGES, dtype),
        "image_grid_thw": IMAGES,
        "pixel_values_videos": draw_pixels(model.model.visual, VIDEO, dtype, seed=1),
        "video_grid_thw": VIDEO,
    }


def gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    output.float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def results(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    logits = model(**inputs(model, dtype)).logits
    return {"logits": logits.detach(), **gradients(model, logits)}


def exact(model: Any) -> dict[str, Tensor]:
    """The reference: results in fp64 of what is still Transformers' own."""
    return results(doubled(model), torch.float64)


@whole
def test_whole_model_on_images_and_videos(family: str) -> None:
    model = build(family)
    truth = exact(model)
    eager = results(model)
    tower, keys = model.model.visual, list(model.state_dict())
    parameters = list(model.parameters())
    assert accelerate(model) is model
    encoder = model.model.visual
    assert isinstance(encoder, QwenVisionEncoder)
    assert accelerate(model).model.visual is encoder and use_window_attn(model).model.visual is encoder
    assert list(model.state_dict()) == keys
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    actual = results(model)
    assert actual.keys() == eager.keys() and sum(name.startswith("model.visual") for name in actual) > 20
    check(actual, eager, truth)
    for _ in range(2):
        assert restore(model) is model and model.model.visual is tower
    assert torch.equal(results(model)["logits"], eager["logits"])


@whole
def test_generate(family: str) -> None:
    model = build(family)
    arguments = inputs(model)
    expected = model.generate(**arguments, max_new_tokens=3, do_sample=False)
    assert torch.equal(accelerate(model).generate(**arguments, max_new_tokens=3, do_sample=False), expected)


def test_save_pretrained(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "theirs")
    accelerate(model).save_pretrained(tmp_path / "ours")
    assert (tmp_path / "theirs/config.json").read_text() == (tmp_path / "ours/config.json").read_text()
    loaded = type(model).from_pretrained(tmp_path / "ours")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    # As PEFT's, which look like what they hold.
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def test_wrappers_several_encoders_and_shared_ones() -> None:
    first, second = tiny_tower("qwen3_vl_vision"), tiny_tower("qwen2_vl_vision")
    model = nn.ModuleDict({"a": Wrapper(Wrapper(first)), "b": nn.ModuleList([second, first])})
    accelerate(model)
    ours: Any = model
    assert isinstance(ours["b"][0], QwenVisionEncoder) and ours["a"].module.module is ours["b"][1]
    assert isinstance(ours["b"][1], QwenVisionEncoder)
    restore(model)
    assert ours["a"].module.module is ours["b"][1] is first and ours["b"][0] is second


def test_the_encoder_itself() -> None:
    tower = tiny_tower("qwen3_vl_vision")
    encoder = accelerate(tower)
    assert isinstance(encoder, QwenVisionEncoder) and accelerate(encoder) is encoder
    assert restore(encoder) is tower


def test_window_attn_is_undone_too() -> None:
    model = build()
    former = model.model.visual.config._attn_implementation
    restore(accelerate(use_window_attn(model)))
    assert model.model.visual.config._attn_implementation == former


def test_deepcopy_keeps_its_own_way_back() -> None:
    model = accelerate(build())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.visual.merger.norm.weight.add_(1)
    restore(copied)
    assert copied.model.visual is not restore(model).model.visual
    weights = [each.model.visual.merger.norm.weight for each in (copied, model)]
    assert torch.equal(weights[0], weights[1] + 1)


def replace_by_state(model: Any) -> None:
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()}, assign=True)


def replace_by_cast(model: Any) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.bfloat16()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs(model)).logits.square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("change", (replace_by_state, replace_by_cast, nn.Module.half, train))
def test_what_changed_in_between_is_carried_back(change: Any) -> None:
    model = accelerate(build())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(model)
    changed = dict(model.named_parameters())
    dtype = model.model.visual.dtype
    ours = model(**inputs(model, dtype)).logits
    restore(model)
    assert not isinstance(model.model.visual, QwenVisionEncoder)
    moved = 0
    for name, parameter in model.named_parameters():
        assert parameter is changed[name], name
        moved += parameter.dtype != before[name].dtype or not torch.equal(parameter, before[name])
    assert moved > 30
    eager, truth = model(**inputs(model, dtype)).logits, doubled(model)(**inputs(model, torch.float64)).logits
    assert_close_to_reference(ours, eager, truth, "logits")


@whole
def test_a_model_that_was_on_no_device_yet(family: str) -> None:
    model = build(family)
    expected = model(**inputs(model)).logits
    state = model.model.visual.state_dict()
    with torch.device("meta"):
        tower = type(model.model.visual)(model.config.vision_config)
    encoder = accelerate(tower.eval())
    encoder.load_state_dict(state, assign=True)
    model.model.visual = restore(encoder)
    assert model.model.visual is tower
    torch.testing.assert_close(model(**inputs(model)).logits, expected)


def test_mode_frozen_parameters_and_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    tower = model.model.visual
    tower.blocks[0].requires_grad_(False)
    eager, truth = results(model), exact(model)
    accelerate(model)
    assert not any(p.requires_grad for p in model.model.visual.blocks[0].parameters())
    model.train()
    runs: list[VisionBlock] = []
    step = VisionBlock.step
    monkeypatch.setattr(VisionBlock, "step", lambda self, *args: runs.append(self) or step(self, *args))
    for enabled in (False, True, False):
        (model.gradient_checkpointing_enable if enabled else model.gradient_checkpointing_disable)()
        assert model.model.visual.is_gradient_checkpointing is enabled
        runs.clear()
        check(results(model), eager, truth)
        assert len(runs) == (12 if enabled else 6), "two calls of three blocks"
    model.gradient_checkpointing_enable()
    restore(model)
    assert model.model.visual.training and tower.blocks[1].gradient_checkpointing
    check(results(model), eager, truth)
    encoder = accelerate(model).model.visual
    assert encoder.is_gradient_checkpointing and encoder.training
    runs.clear()
    check(results(model), eager, truth)
    assert len(runs) == 12
    model.gradient_checkpointing_disable()
    model.eval()
    restore(model)
    assert not (tower.blocks[1].gradient_checkpointing or tower.training)


@pytest.mark.parametrize("enable", (("before", "inside"), ("before",), ("inside",)))
@pytest.mark.parametrize("frozen", ("all but attention", "the first block too"))
@whole
def test_reentrant_checkpoints_of_a_frozen_model_have_gradients(
    family: str, frozen: str, enable: tuple[str, ...]
) -> None:
    model = build(family)
    model.requires_grad_(False)
    for block in model.model.visual.blocks[frozen == "the first block too" :]:
        block.attn.qkv.weight.requires_grad_(True)
    eager, truth = results(model), exact(model)
    model.train()

    def checkpointed() -> None:
        model.gradient_checkpointing_enable({"use_reentrant": True})

    if "before" in enable:
        checkpointed()
    accelerate(model)
    if "inside" in enable:
        checkpointed()
    actual = results(model)
    assert actual.keys() == eager.keys() and len(actual) == (4 if frozen == "all but attention" else 3)
    check(actual, eager, truth)
    restore(model)
    # Transformers' own towers take their part in this in Qwen2-VL and Qwen2.5-VL alone.
    if family == "qwen2_5_vl":
        check(results(model), eager, truth)


def test_checkpoints_ask_for_no_gradient_that_is_not_wanted() -> None:
    encoder = accelerate(tiny_tower("qwen2_5_vl_vision")).train().requires_grad_(False)
    block, seen = encoder.blocks[0], []
    block.norm1.register_forward_hook(lambda _, args, __: seen.append(args[0].requires_grad))
    # A reentrant checkpoint computes without gradients first, and with those of its inputs in the backward.
    for reentrant, trained, wanted in (
        (True, False, [False]),
        (False, True, [False, False]),
        (True, True, [True, True]),
    ):
        encoder.gradient_checkpointing_enable({"use_reentrant": reentrant})
        block.requires_grad_(trained)
        seen.clear()
        output = encoder(draw_pixels(encoder, IMAGES), IMAGES).pooler_output
        assert output.requires_grad is trained
        if trained:
            output.sum().backward()
        assert seen == wanted
    with torch.no_grad():
        assert not encoder(draw_pixels(encoder, IMAGES), IMAGES).pooler_output.requires_grad


@whole
def test_output_attentions_are_the_texts(family: str) -> None:
    model = build(family)
    model.set_attn_implementation({"text_config": "eager"})
    expected = model(**inputs(model), output_attentions=True).attentions
    actual = accelerate(model)(**inputs(model), output_attentions=True).attentions
    assert len(actual) == len(expected) == 1 and actual[0].shape == expected[0].shape
    torch.testing.assert_close(actual, expected)
    output = model.model.visual(draw_pixels(model.model.visual, IMAGES), IMAGES, output_attentions=True)
    assert output.attentions is None


def test_autocast() -> None:
    model = build()
    truth = exact(model)
    with torch.autocast("cpu", torch.bfloat16):
        eager, actual = results(model), results(accelerate(model))
    check(actual, eager, truth)


class LoRA(nn.Module):
    """x W^T + b + (x A^T) B^T, as adapters do it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(base.in_features)
        self.base = base
        self.down = nn.Parameter((0.1 * torch.randn(4, base.in_features, generator=generator)).to(base.weight))
        self.up = nn.Parameter((0.1 * torch.randn(base.out_features, 4, generator=generator)).to(base.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.mT @ self.up.mT


class LoRALinear(nn.Linear):
    """The same as a subclass of nn.Linear, with the layer's parameters under their own names."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        adapter = LoRA(base)
        self.weight, self.bias, self.down, self.up = base.weight, base.bias, adapter.down, adapter.up

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + x @ self.down.mT @ self.up.mT


def adapt(tower: nn.Module, names: tuple[str, ...], adapter: type[nn.Module] = LoRA) -> Any:
    for name, module in list(tower.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if type(module) is nn.Linear and name.endswith(names):
            setattr(tower.get_submodule(owner), leaf, adapter(module))
    return tower


def run(tower: Any, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    outputs = named_outputs(tower(draw_pixels(tower, IMAGES, dtype, seed), grid_thw=IMAGES))
    found = gradients(tower, torch.cat([output.flatten() for output in outputs.values()]))
    return {**{name: output.detach() for name, output in outputs.items()}, **found}


ADAPTED = {
    "attention": ("qkv", "attn.proj"),
    "second layers": ("fc2", "down_proj", "mlp.2"),
    "all": ("qkv", "proj", "fc1", "fc2", "gate_proj", "up_proj", "down_proj", "mlp.0", "mlp.2"),
}


@pytest.mark.parametrize("names", ADAPTED.values(), ids=ADAPTED)
@pytest.mark.parametrize("model_type", ("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision"))
def test_adapters_are_called(model_type: str, names: tuple[str, ...]) -> None:
    tower = adapt(tiny_tower(model_type), names)
    truth = run(doubled(tower), torch.float64)
    eager = run(tower, torch.float32)
    encoder = accelerate(tower)
    assert encoder.state_dict().keys() == tower.state_dict().keys()
    actual = run(encoder, torch.float32)
    assert sum(name.endswith((".up", ".down")) for name in actual) >= 2 * 3
    check(actual, eager, truth)


def test_adapters_that_are_linear_layers_under_autocast() -> None:
    def draw(seed: int) -> Any:
        tower = adapt(tiny_tower("qwen3_vl_vision"), ADAPTED["all"], LoRALinear)
        truth = run(doubled(tower), torch.float64, seed)
        with torch.autocast("cpu", torch.bfloat16):
            eager = run(tower, torch.float32, seed)
            return run(accelerate(tower), torch.float32, seed), eager, truth

    check_draws(draw)


def test_adapters_put_in_or_taken_out_afterwards() -> None:
    tower = adapt(tiny_tower("qwen3_vl_vision"), ("qkv", "fc1"))
    encoder = accelerate(tower)
    encoder.blocks[0].attn.qkv = encoder.blocks[0].attn.qkv.base
    adapt(encoder, ("fc2",))
    actual = run(encoder, torch.float32)
    assert restore(encoder) is tower
    assert type(tower.blocks[0].attn.qkv) is nn.Linear and isinstance(tower.blocks[1].mlp.linear_fc2, LoRA)
    check(actual, run(tower, torch.float32), run(doubled(tower), torch.float64))


def test_replaced_forwards_and_hooks_of_layers_are_seen() -> None:
    tower = tiny_tower("qwen3_vl_vision")
    pixels = draw_pixels(tower, IMAGES)
    eager, truth = (
        module(pixels.to(module.dtype), grid_thw=IMAGES).pooler_output for module in (tower, doubled(tower))
    )
    encoder = accelerate(tower)
    seen = []
    for name in encoder.layer_names:
        encoder.get_submodule(name).register_forward_hook(lambda module, *rest: seen.append(module))
    assert_close_to_reference(encoder(pixels, IMAGES).pooler_output, eager, truth)
    assert len(seen) == len(encoder.layer_names) == 1 + 1 + 3 * (4 + 2) + 3 * (2 + 1)
    layer = encoder.blocks[0].attn.qkv
    layer._forward_hooks.clear()
    layer.forward = lambda x: nn.functional.linear(x, 2 * layer.weight, layer.bias)
    assert (encoder(pixels, IMAGES).pooler_output - eager).abs().max() > 1e-3


class Forward(nn.Module):
    """A module with nothing but a forward."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_vl_vision"))
def test_replaced_norms_and_hooks_of_norms_are_seen(model_type: str) -> None:
    tower = tiny_tower(model_type)
    eager, truth = run(tower, torch.float32), run(doubled(tower), torch.float64)
    encoder = accelerate(tower)
    names = [name for name, module in encoder.named_modules() if type(module) in (LayerNorm, RMSNorm)]
    seen = []
    for name in names:
        encoder.get_submodule(name).register_forward_hook(lambda module, *rest: seen.append(module))
    hooked = run(encoder, torch.float32)
    check(hooked, eager, truth)
    assert len(seen) == len(names) == len(set(seen)) >= 3 * 2 + 1
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(encoder.get_submodule(owner), leaf, Forward(encoder.get_submodule(name)))
    seen.clear()
    replaced = run(encoder, torch.float32)
    assert len(seen) == len(names)
    check(dict(zip(hooked, replaced.values(), strict=True)), eager, truth)


def _as_subclass(norm: nn.Module) -> None:
    forward = type(norm).forward
    norm.__class__ = type("Tripled", (type(norm),), {"forward": lambda self, x: 3 * forward(self, x)})


def _by_forward(norm: nn.Module) -> None:
    # A bound method, which a copy of the module binds to the copy.
    norm.forward = MethodType(lambda self, x: 3 * type(self).forward(self, x), norm)


def _by_hook(norm: nn.Module) -> None:
    norm.register_forward_hook(lambda module, args, output: 3 * output)


@pytest.mark.parametrize("triple", [_as_subclass, _by_forward, _by_hook])
@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_vl_vision"))
def test_norms_that_do_something_else_are_called_and_come_back(
    model_type: str, triple: Callable[[nn.Module], None]
) -> None:
    tower = tiny_tower(model_type)
    plain = run(tower, torch.float32)
    norms = [name for name in QwenVisionEncoder(tower.config).layer_names if "norm" in name or "ln_q" in name]
    assert len(norms) >= 3 * 2 + 1
    found = {name: tower.get_submodule(name) for name in norms}
    for norm in found.values():
        triple(norm)
    eager, truth = run(tower, torch.float32), run(doubled(tower), torch.float64)
    assert (eager["pooler_output"] - plain["pooler_output"]).abs().max() > 0.1
    encoder = accelerate(tower)
    check(run(encoder, torch.float32), eager, truth)
    assert restore(encoder) is tower
    assert all(tower.get_submodule(name) is norm for name, norm in found.items())


def test_a_norm_put_in_afterwards_goes_to_the_restored_tower() -> None:
    tower = tiny_tower("qwen3_vl_vision")
    encoder = accelerate(tower)
    encoder.blocks[1].norm1 = put_in = nn.LayerNorm(encoder.config.hidden_size, eps=0.5)
    _by_hook(encoder.blocks[1].norm2)
    prune.l1_unstructured(encoder.blocks[0].norm2, "weight", 0.5)
    encoder.blocks[0].attn.proj.bias = None
    for _ in range(2):
        expected = run(encoder, torch.float32)
        assert restore(encoder) is tower and tower.blocks[1].norm1 is put_in
        assert tower.blocks[0].attn.proj.bias is None
        eager = run(tower, torch.float32)
        # In place, since what is pruned can't be copied once it has gradients.
        truth = run(tower.double(), torch.float64)
        tower.float()
        check(expected, eager, truth)
        encoder.blocks[0].attn.proj.bias = nn.Parameter(torch.zeros(encoder.config.hidden_size))
        assert restore(encoder) is tower
        encoder = accelerate(tower)
        encoder.blocks[0].attn.proj.bias = None


def test_a_wrapped_norm_may_be_unwrapped_afterwards() -> None:
    tower = tiny_tower("qwen3_vl_vision")
    eager, truth = run(tower, torch.float32), run(doubled(tower), torch.float64)
    encoder = accelerate(tower)
    encoder.blocks[1].norm1 = Forward(encoder.blocks[1].norm1)
    encoder = accelerate(restore(encoder))
    encoder.blocks[1].norm1 = encoder.blocks[1].norm1.norm
    assert restore(encoder) is tower and tower.state_dict().keys() == tiny_tower("qwen3_vl_vision").state_dict().keys()
    check(run(tower, torch.float32), eager, truth)


def test_layers_keep_a_mode_of_their_own() -> None:
    tower = adapt(tiny_tower("qwen3_vl_vision"), ("qkv",)).train()
    resting = tower.blocks[1].attn.qkv.eval()
    encoder = accelerate(tower)
    assert encoder.training and encoder.blocks[0].attn.qkv.training and not resting.training
    assert restore(encoder) is tower and tower.training and not resting.training
    restore(accelerate(tower).eval())
    assert not any(module.training for module in tower.modules())


def test_modules_keep_a_mode_of_their_own() -> None:
    tower = tiny_tower("qwen3_vl_vision").train()
    tower.blocks[0].eval()
    encoder = accelerate(tower)
    assert encoder.training and encoder.blocks[1].training
    assert not any(module.training for module in encoder.blocks[0].modules())
    encoder.blocks[2].mlp.eval()
    assert restore(encoder) is tower
    for name, module in tower.named_modules():
        assert module.training is not name.startswith(("blocks.0", "blocks.2.mlp")), name


def test_buffers_of_modules_that_both_have_are_kept() -> None:
    tower = tiny_tower("qwen3_vl_vision")
    tower.register_buffer("scale", torch.ones(3))
    tower.blocks[0].attn.register_buffer("passing", torch.ones(3), persistent=False)
    keys = tower.state_dict().keys()
    encoder = accelerate(tower)
    assert encoder.state_dict().keys() == keys
    assert encoder.scale is tower.scale and encoder.blocks[0].attn.passing is tower.blocks[0].attn.passing
    encoder.register_buffer("added", torch.zeros(2))
    restored = restore(encoder)
    assert restored.state_dict().keys() == keys | {"added"} and "passing" in dict(
        restored.blocks[0].attn.named_buffers()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda encoder: encoder.blocks.pop(2), r"blocks\.2 is none, expected Qwen3VLVisionBlock, as it was made"),
        (lambda encoder: delattr(encoder.blocks[0], "norm1"), r"blocks\.0\.norm1.* expected LayerNorm, as it was made"),
        (lambda encoder: setattr(encoder.blocks, "1", nn.Identity()), r"blocks\.1 is Identity, expected Qwen3VLV"),
        (
            lambda encoder: setattr(encoder.merger, "extra", nn.Identity()),
            r"merger\.extra is Identity, expected no mod",
        ),
        (lambda encoder: setattr(encoder, "extra", nn.Linear(2, 2)), "extra is Linear, expected no module"),
        (lambda encoder: setattr(encoder.config, "depth", 2), r"blocks\.2 is Qwen3VLVisionBlock, expected no module"),
        (
            lambda encoder: (setattr(encoder.config, "depth", 2), encoder.blocks.pop(2)),
            r"blocks\.2 is none, expected Qwen3VLVisionBlock, as the tower has it",
        ),
    ],
)
def test_a_structure_that_transformers_has_no_place_for_is_not_restored(
    change: Callable[[Any], None], message: str
) -> None:
    model = accelerate(nn.ModuleList([tiny_tower("qwen3_vl_vision")]))
    change(encoder := model[0])
    with pytest.raises(ValueError, match=f"^restore: {message}"):
        restore(model)
    assert model[0] is encoder


def test_what_computes_the_same_is_no_other_forward() -> None:
    tower = tiny_tower("qwen3_vl_vision")
    eager, truth = run(tower, torch.float32), run(doubled(tower), torch.float64)
    tower.blocks[1].__class__ = type("Block", (type(tower.blocks[1]),), {})
    for module in tower.modules():
        module.forward = module.forward
    tower.blocks = nn.Sequential(*tower.blocks)
    check(run(accelerate(tower), torch.float32), eager, truth)


def test_a_block_that_stands_twice() -> None:
    tower = tiny_tower("qwen3_vl_vision")
    tower.blocks = nn.ModuleList([tower.blocks[0], tower.blocks[0], tower.blocks[2]])
    eager, truth = run(tower, torch.float32), run(doubled(tower), torch.float64)
    check(run(accelerate(tower), torch.float32), eager, truth)


def _other_forward(module: nn.Module) -> None:
    module.__class__ = type("Other", (type(module),), {"forward": lambda self, *args, **kwargs: None})


def _hooked(module: nn.Module) -> None:
    """Patched first, and then given a hook by Accelerate."""
    module._hf_hook, module._old_forward = SimpleNamespace(offload=False), lambda *args, **kwargs: None
    module.forward = module._old_forward


def _copied(module: nn.Module) -> type:
    return type(type(module).__name__, (nn.Module,), {"__module__": "elsewhere"})


def _other_rotation(rotary: nn.Module) -> None:
    # Transformers 5.5 has no scaling, and keeps the base instead of a configuration.
    setattr(rotary, "attention_scaling" if hasattr(rotary, "attention_scaling") else "theta", 2.0)


ANOTHER = r" is another, expected that of \w+ \(compile it afterwards"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tower: _other_forward(tower.blocks[1]), r"blocks\.1\.forward" + ANOTHER),
        (lambda tower: _other_forward(tower), "forward" + ANOTHER),
        (lambda tower: _other_forward(tower.rotary_pos_emb), r"rotary_pos_emb\.forward" + ANOTHER),
        (lambda tower: _by_forward(tower.blocks[0]), r"blocks\.0\.forward" + ANOTHER),
        (lambda tower: tower.blocks[1].compile(), r"blocks\.1\.forward" + ANOTHER),
        (lambda tower: _by_forward(tower.rotary_pos_emb), r"rotary_pos_emb\.forward" + ANOTHER),
        (lambda tower: _hooked(tower.blocks[1]), r"blocks\.1\.forward" + ANOTHER),
        (lambda tower: setattr(tower, "__class__", _copied(tower)), r"the vision encoder is .* of elsewhere, "),
        (lambda tower: setattr(tower.blocks[1].attn, "num_heads", 1), r"blocks\.1\.attn\.num_heads is 1, expected 2, "),
        (lambda tower: setattr(tower, "spatial_merge_size", 1), r"spatial_merge_size is 1, expected 2, by the config"),
        (lambda tower: _other_rotation(tower.rotary_pos_emb), r".*(_scaling is 2\.0, expected 1|theta is 2\.0, ex)"),
        (lambda tower: tower.rotary_pos_emb.inv_freq.mul_(0.99), r"rotary_pos_emb\.inv_freq is different, expected"),
        (lambda tower: tower.blocks.pop(2), r"blocks\.2 is none, expected \w+Block, by the config"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model_type", FAMILIES)
def test_modules_of_which_nothing_would_count_are_refused(
    model_type: str, change: Callable[[Any], None], message: str
) -> None:
    model = nn.ModuleList([tiny_tower(model_type)])
    change(model[0])
    with pytest.raises(ValueError, match=f"^from_transformers: {message}"):
        accelerate(model)
    assert not isinstance(model[0], QwenVisionEncoder)


@pytest.mark.parametrize(
    ("model_type", "name", "value"),
    [
        ("qwen2_5_vl_vision", "fullatt_block_indexes", [0, 1, 2]),
        ("qwen2_5_vl_vision", "window_size", 64),
        ("qwen3_vl_vision", "deepstack_visual_indexes", [1, 2]),
        ("qwen3_vl_vision", "interpolation_align_corners", False),
        ("qwen3_vl_vision", "interpolation_mode", "bicubic"),
        ("qwen3_vl_vision", "num_grid_per_side", 4),
    ],
)
def test_settings_of_a_tower_that_are_not_its_configs_are_refused(model_type: str, name: str, value: Any) -> None:
    tower = tiny_tower(model_type)
    if name.startswith("interpolation") and not hasattr(tower, name):
        pytest.skip(f"towers of transformers {transformers.__version__} have no {name}")
    wanted = getattr(tower, name)
    setattr(tower, name, value)
    with pytest.raises(ValueError) as refusal:
        accelerate(tower)
    assert str(refusal.value) == f"from_transformers: {name} is {value}, expected {wanted}, by the config"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("model_type", FAMILIES)
def test_frequencies_that_were_cast_or_moved_are_the_configs(model_type: str, dtype: torch.dtype, device: str) -> None:
    with torch.device(device):
        accelerate(tiny_tower(model_type).to(device, dtype))
    accelerate(tiny_tower(model_type).to(dtype).float())


@pytest.mark.parametrize(
    ("model_type", "op"), [("qwen2_5_vl_vision", "add_rms_norm"), ("qwen3_vl_vision", "add_layer_norm")]
)
def test_norms_as_they_are_made_sum_too(model_type: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, calls = accelerate(tiny_tower(model_type)), []
    summing = getattr(_layers, op)
    monkeypatch.setattr(_layers, op, lambda *args: calls.append(args) or summing(*args))
    pixels = draw_pixels(encoder, IMAGES)
    encoder(pixels, IMAGES)
    whole = 3 * 2 if encoder.pos_embed is not None else 3 * 2 - 1
    assert len(calls) == whole
    encoder.blocks[1].norm2.register_forward_hook(lambda *rest: None)
    calls.clear()
    encoder(pixels, IMAGES)
    assert len(calls) == whole - 1


@pytest.mark.parametrize("families", ("qwen3_vl_vision", "qwen3_omni_moe_vision_encoder"))
def test_replaced_forwards_and_hooks_of_positions_are_seen(families: str) -> None:
    tower = tiny_tower(families)
    tower.pos_embed.register_forward_hook(lambda module, args, output: 2 * output)
    truth, eager = run(doubled(tower), torch.float64), run(tower, torch.float32)
    encoder = accelerate(tower)
    check(run(encoder, torch.float32), eager, truth)
    tower.pos_embed._forward_hooks.clear()
    weight = tower.pos_embed.weight
    tower.pos_embed.forward = lambda indices: 2 * weight[indices]
    check(run(encoder, torch.float32), eager, truth)


class Quantised(Tensor):
    """A weight in eight bits, as torchao holds it: what the layer computes is its own, and nothing else is known."""

    @staticmethod
    def __new__(cls, weight: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight: Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.rounded = (weight / self.scale).round().to(torch.int8)

    def full(self) -> Tensor:
        return self.rounded.to(self.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            return function(args[0], args[1].full(), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].full())
        raise NotImplementedError(f"{function} of a quantised weight")


@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_vl_vision"))
def test_quantised_weights_of_plain_layers(model_type: str) -> None:
    tower = tiny_tower(model_type).requires_grad_(False)
    exact = doubled(tower)
    for name, module in tower.named_modules():
        if type(module) is nn.Linear:
            weight = Quantised(module.weight)
            module.weight = nn.Parameter(weight, requires_grad=False)
            with torch.no_grad():
                exact.get_submodule(name).weight.copy_(weight.full())
    pixels = draw_pixels(tower, IMAGES)
    eager, truth = tower(pixels, grid_thw=IMAGES), exact(pixels.double(), grid_thw=IMAGES)
    encoder = accelerate(tower)
    check_outputs(encoder(pixels, IMAGES), eager, truth)
    assert type(encoder.blocks[0].attn.qkv.weight) is Quantised
    assert restore(encoder) is tower and type(tower.blocks[0].attn.qkv.weight) is Quantised


class Elsewhere:
    """As the hook by which Accelerate runs a module on its own device, here in its own scale."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return (args[0] / 4, *args[1:]), {**kwargs, "grid_thw": kwargs["grid_thw"].long()}

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        output.pooler_output = -output.pooler_output
        return output

    def put_on(self, module: Any) -> None:
        module._hf_hook, inner = self, module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.pre_forward(module, *args, **kwargs)
            return self.post_forward(module, inner(*args, **kwargs))

        module.forward = forward


def test_hook_of_a_device_map_is_carried_over() -> None:
    tower = tiny_tower("qwen3_vl_vision").requires_grad_(False)
    exact = doubled(tower)
    for module in (tower, exact):
        Elsewhere().put_on(module)
    pixels = draw_pixels(tower, IMAGES)
    grid = {"grid_thw": IMAGES.int()}
    eager, truth = tower(pixels, **grid), exact(pixels.double(), **grid)
    model = nn.ModuleList([tower])
    for each in (accelerate(model)[0], copy.deepcopy(model)[0]):
        assert isinstance(each, QwenVisionEncoder)
        check_outputs(each(pixels, **grid), eager, truth)
    assert torch.equal(restore(model)[0](pixels, **grid).pooler_output, eager.pooler_output)


def test_hooks_of_a_device_map_inside_are_no_other_forwards() -> None:
    tower = tiny_tower("qwen3_vl_vision")
    eager, truth = run(tower, torch.float32), run(doubled(tower), torch.float64)
    for module in tower.modules():
        module._hf_hook = SimpleNamespace(offload=False)
        module._old_forward = module.forward
        module.forward = MethodType(lambda self, *args, **kwargs: self._old_forward(*args, **kwargs), module)
    del tower._hf_hook, tower.forward
    check(run(accelerate(tower), torch.float32), eager, truth)


def test_encoders_that_are_spread_or_offloaded_are_refused() -> None:
    model = nn.ModuleList([tiny_tower("qwen3_vl_vision"), tiny_tower("qwen2_vl_vision")])
    model[1].blocks[2].to("meta")
    with pytest.raises(ValueError, match="vision encoder is on cpu, meta, expected on one device; name it"):
        accelerate(model)
    model[1] = tiny_tower("qwen3_5_vision")
    for hook in (SimpleNamespace(offload=True), SimpleNamespace(hooks=(SimpleNamespace(offload=True),))):
        model[1].blocks[2].norm1._hf_hook = hook
        with pytest.raises(ValueError, match=r"blocks\.2\.norm1 is offloaded, expected on a device"):
            accelerate(model)
    assert not any(isinstance(module, QwenVisionEncoder) for module in model)
    model[1].blocks[2].norm1._hf_hook = SimpleNamespace(offload=False)
    assert isinstance(accelerate(model)[1], QwenVisionEncoder)


def test_compiles_with_adapters() -> None:
    tower = adapt(tiny_tower("qwen3_vl_vision"), ("qkv", "fc1"))
    pixels = draw_pixels(tower, IMAGES)
    eager, truth = tower(pixels, grid_thw=IMAGES), doubled(tower)(pixels.double(), grid_thw=IMAGES)
    encoder = accelerate(tower)
    metadata = vision_metadata(IMAGES, encoder.sizes)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    check_outputs(compiled(pixels, metadata=metadata), eager, truth)


def test_refusals_leave_the_model_whole() -> None:
    for function in (accelerate, restore):
        with pytest.raises(TypeError, match="model is Linear, expected a .*vision encoder"):
            function(nn.Linear(2, 2))
    odd = tiny_tower("qwen3_vl_vision")
    odd.blocks[1].norm1.adapter = nn.Parameter(torch.zeros(1))
    model = nn.ModuleList([tiny_tower("qwen3_vl_vision"), odd])
    with pytest.raises(ValueError, match=r"also holds blocks\.1\.norm1\.adapter"):
        accelerate(model)
    compiled = nn.ModuleList([tiny_tower("qwen3_vl_vision"), torch.compile(tiny_tower("qwen3_vl_vision"))])
    with pytest.raises(TypeError, match="encoder is OptimizedModule, expected an uncompiled module"):
        accelerate(compiled)
    assert not any(isinstance(module, QwenVisionEncoder) for each in (model, compiled) for module in each.modules())


@pytest.fixture
def registered() -> Iterator[None]:
    # Up to 5.17, Transformers patches only where torchvision is installed.
    old = Version(transformers.__version__) < Version("5.18") and importlib.util.find_spec("torchvision") is None
    if old:
        with pytest.raises(ImportError, match=f"transformers {transformers.__version__} cannot build other classes"):
            register_encoders()
        assert not get_patch_mapping()
        pytest.skip(f"transformers {transformers.__version__} cannot patch without torchvision")
    register_encoders()
    yield
    unregister_encoders()


@whole
def test_from_pretrained_builds_ours(family: str, tmp_path: Path, registered: None) -> None:
    unregister_encoders()
    model = build(family)
    model.save_pretrained(tmp_path)
    register_encoders()
    register_encoders()
    loaded = type(model).from_pretrained(tmp_path)
    assert isinstance(loaded.model.visual, QwenVisionEncoder)
    check(results(loaded), results(model), exact(model))
    assert restore(loaded).model.visual is loaded.model.visual
    halved = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert isinstance(halved.model.visual, QwenVisionEncoder)
    assert {parameter.dtype for parameter in halved.parameters()} == {torch.bfloat16}
    assert list(halved.state_dict()) == list(model.state_dict())
    unregister_encoders()
    unregister_encoders()
    assert type(type(model).from_pretrained(tmp_path).model.visual) is type(model.model.visual)


@whole
def test_from_config_builds_ours_with_transformers_initial_weights(family: str, registered: None) -> None:
    unregister_encoders()
    theirs = dict(build(family).named_parameters())
    register_encoders()
    model = build(family)
    assert isinstance(model.model.visual, QwenVisionEncoder)
    # Device maps and FSDP's policies look for these classes.
    names = {type(module).__name__ for module in model.modules()}
    assert type(model.model.visual.blocks[0]).__name__ in set(model._no_split_modules) <= names
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        torch.testing.assert_close(parameter.std(), theirs[name].std(), rtol=0.3, atol=1e-6)
    torch.manual_seed(1)
    logits = model(**inputs(model)).logits
    logits.sum().backward()
    assert logits.isfinite().all()


def test_another_librarys_patch_is_left_alone(registered: None) -> None:
    unregister_encoders()
    name = "^Qwen3VLVisionModel$"
    register_patch_mapping({name: nn.Identity})
    try:
        with pytest.raises(ValueError, match="already has a patch mapping"):
            register_encoders()
        unregister_encoders()
        assert get_patch_mapping() == {name: nn.Identity}
    finally:
        unregister_patch_mapping([name])


def test_a_transformers_without_patch_mapping_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.monkey_patching", None)
    monkeypatch.delattr(transformers, "monkey_patching", raising=False)
    with pytest.raises(ImportError, match=f"transformers.monkey_patching.*{transformers.__version__}"):
        register_encoders()


def test_example_of_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "finetune_tower.py"
    runpy.run_path(str(example), run_name="__main__")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert len(losses) > 3 and losses[-1] < 0.5 * losses[0]
