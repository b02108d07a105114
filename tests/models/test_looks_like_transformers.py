"""An accelerated encoder looks to other libraries as Transformers' does: trainers, optimizers, hooks, PEFT."""

import copy
import functools
import gc
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import PreTrainedModel, Trainer
from transformers.modeling_layers import GradientCheckpointingLayer

from compile_tests.models import FAMILIES, draw_pixels, named_outputs, tiny_tower
from tests.models.verify import KINDS, check_outputs, doubled, tiny_model
from torch_ops.integrations.transformers import accelerate, restore
from torch_ops.models import EncoderGraphs, QwenVisionEncoder, from_config, from_transformers, graph_cache, qwen_vl
from torch_ops.models._constants import Constant
from torch_ops.testing import check

pytestmark = pytest.mark.no_interpret

# Images of several windows and segments, and one image.
IMAGES, ONE = torch.tensor([[1, 4, 6], [2, 2, 2], [1, 10, 2]]), torch.tensor([[1, 4, 4]])


@functools.lru_cache
def _built(model_type: str, dtype: torch.dtype) -> Any:
    return tiny_tower(model_type, dtype)


def tower_of(model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(_built(model_type, dtype))


def run(tower: Any, pixels: Tensor, grid: Tensor = IMAGES) -> dict[str, Tensor]:
    """Outputs and gradients of parameters."""
    tower.zero_grad()
    outputs = named_outputs(tower(pixels.to(tower.dtype), grid_thw=grid))
    torch.cat([output.flatten() for output in outputs.values()]).float().square().mean().backward()
    found = {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}
    return {**{name: output.detach() for name, output in outputs.items()}, **found}


def decayed(model: nn.Module) -> list[str]:
    """The names that Trainer gives to the decayed group of its optimizer."""
    trainer: Any = None
    return Trainer.get_decay_parameter_names(trainer, model)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_order_and_groups_of_parameters(model_type: str) -> None:
    model = nn.ModuleDict({"visual": tower_of(model_type)})
    names, keys, wanted = [name for name, _ in model.named_parameters()], list(model.state_dict()), decayed(model)
    assert len(wanted) < len(names)
    accelerate(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys and decayed(model) == wanted
    made = nn.ModuleDict({"visual": from_config(_built(model_type, torch.float32).config)})
    assert [name for name, _ in made.named_parameters()] == names and decayed(made) == wanted
    restore(model)
    assert list(model.state_dict()) == keys and decayed(model) == wanted


def put_last(held: nn.Module, name: str) -> None:
    value = getattr(held, name)
    delattr(held, name)
    setattr(held, name, value)


@hypothesis_settings(max_examples=12)
@given(st.sampled_from(KINDS), st.lists(st.integers(0, 999), min_size=1, max_size=5))
def test_any_order_of_parameters_is_kept(model_type: str, draws: list[int]) -> None:
    """Pruning, weight norm and other parametrizations put a weight behind its bias where they are made permanent."""
    model = nn.ModuleDict({"visual": tower_of(model_type)})
    prune.l1_unstructured(model["visual"].blocks[0].attn.qkv, "weight", 0.5)
    prune.remove(model["visual"].blocks[0].attn.qkv, "weight")
    holders = [
        (module, name)
        for module in model["visual"].modules()
        if not isinstance(module, nn.ModuleList | nn.Sequential)
        for name in [*dict(module.named_parameters(recurse=False)), *dict(module.named_children())]
    ]
    for draw in draws:
        put_last(*holders[draw % len(holders)])
    names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
    accelerate(model)
    assert [name for name, _ in model.named_parameters()] == names and list(model.state_dict()) == keys
    put_last(model["visual"].blocks[1].attn.proj, "weight")
    names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
    restore(model)
    assert [name for name, _ in model.named_parameters()] == names and list(model.state_dict()) == keys


@hypothesis_settings(max_examples=12)
@given(st.sampled_from(KINDS), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_any_layer_may_do_without_a_bias(model_type: str, draws: list[int]) -> None:
    towers: list[Any] = [tower_of(model_type).requires_grad_(False) for _ in range(3)]
    after = accelerate(towers[2])
    named = [name for name, _ in towers[0].named_parameters() if name.endswith(".bias")]
    # One op would take both biases of a gate and its up layer.
    gate = {"blocks.1.mlp.gate_proj.bias"}
    chosen = {named[draw % len(named)] for draw in draws} | gate.intersection(named)
    for tower in (*towers[:2], after):
        for name in chosen:
            tower.get_submodule(name.rpartition(".")[0]).bias = None
    pixels = draw_pixels(towers[0], IMAGES)
    eager, truth = towers[0](pixels, grid_thw=IMAGES), doubled(towers[0])(pixels.double(), grid_thw=IMAGES)
    for encoder in (after, accelerate(towers[1])):
        check_outputs(encoder(pixels, IMAGES), eager, truth)
    check_outputs(restore(after)(pixels, grid_thw=IMAGES), eager, truth)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_modules_are_of_the_classes_that_others_look_for(model_type: str) -> None:
    kinds = (nn.LayerNorm, nn.RMSNorm, nn.Linear, nn.Conv3d, nn.Embedding, nn.ModuleList, GradientCheckpointingLayer)
    tower = tower_of(model_type)
    found = {name: [isinstance(module, kind) for kind in kinds] for name, module in tower.named_modules()}
    encoder = accelerate(tower)
    for name, module in encoder.named_modules():
        assert [isinstance(module, kind) for kind in kinds] == found[name], name
    for name, module in tower.named_modules():
        for eps in ("eps", "variance_epsilon"):
            if hasattr(module, eps) and name in encoder.layer_names:
                assert getattr(encoder.get_submodule(name), eps) == getattr(module, eps)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_settings_of_modules_are_told_and_no_other_ones_taken(model_type: str) -> None:
    """All numbers of Transformers' modules: what is set on ours afterwards would count for nothing."""
    tower, places = tower_of(model_type), dict(accelerate(tower_of(model_type)).named_modules())
    told = 0
    for name, module in tower.named_modules():
        ours = places.get(name)
        if ours is None or isinstance(module, GradientCheckpointingLayer | nn.Linear | nn.Conv3d | nn.Embedding):
            continue
        for key, value in vars(module).items():
            if isinstance(value, int | float | list) and isinstance(getattr(type(ours), key, None), Constant):
                assert getattr(ours, key) == value, (name, key)
                setattr(ours, key, value)
                with pytest.raises(ValueError, match=f"{key} is .*, expected .*, by the config; put another module"):
                    setattr(ours, key, [] if isinstance(value, list) else value + 1)
                told += 1
        for key, _ in module.named_children():
            if key not in dict(ours.named_children()) and not isinstance(module, nn.ModuleList | nn.Sequential):
                assert not hasattr(ours, key)
                with pytest.raises(ValueError, match=f"{key} is ReLU, expected what the config says; put another"):
                    setattr(ours, key, nn.ReLU())
                told += 1
    assert told >= 20


def test_an_eps_that_would_not_count_is_refused() -> None:
    for model_type, name, kind in (
        ("qwen3_vl_vision", "eps", "Layer"),
        ("qwen2_5_vl_vision", "variance_epsilon", "RMS"),
    ):
        norm = from_transformers(tower_of(model_type)).blocks[0].norm1
        setattr(norm, name, 1e-6)
        with pytest.raises(ValueError, match=f"^{kind}Norm: eps is 1e-05, expected 1e-06, which .*; put another norm"):
            setattr(norm, name, 1e-5)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named, decay = dict(model.named_parameters()), decayed(model)
    groups = [[p for name, p in named.items() if (name in decay) is chosen] for chosen in (True, False)]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-2
    )


@pytest.mark.parametrize("begin, resume", [(lambda model: model, accelerate), (accelerate, lambda model: model)])
@pytest.mark.parametrize("model_type", KINDS)
def test_the_state_of_an_optimizer_is_loaded_for_the_other_encoder(
    model_type: str, begin: Callable[[Any], Any], resume: Callable[[Any], Any]
) -> None:
    """It is stored by position."""
    first: Any = begin(nn.ModuleDict({"visual": tower_of(model_type)}))
    optimizer = optimizer_of(first)
    run(first["visual"], draw_pixels(first["visual"], ONE), ONE)
    optimizer.step()
    second: Any = resume(nn.ModuleDict({"visual": tower_of(model_type)}))
    other = optimizer_of(second)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    decays = [{id(p): group["weight_decay"] for group in each.param_groups for p in group["params"]}
              for each in (optimizer, other)]  # fmt: skip
    theirs = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        assert torch.equal(other.state[theirs[name]]["exp_avg"], optimizer.state[parameter]["exp_avg"]), name
        assert decays[1][id(theirs[name])] == decays[0][id(parameter)], name
    other.step()


def test_trainer_resumes_a_run_that_began_without_us(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs Accelerate")
    from transformers import TrainingArguments

    def trained(model: Any, folder: str, **options: Any) -> dict[str, Tensor]:
        vision, tokens = model.model.visual, [[6, 5, 5, 5, 5, 1]]
        ids = torch.tensor(tokens)
        sample = {
            "input_ids": ids, "labels": ids, "mm_token_type_ids": (ids == 5).int(),
            "pixel_values": draw_pixels(vision, ONE, torch.float64), "image_grid_thw": ONE,
        }  # fmt: skip
        arguments = TrainingArguments(
            str(tmp_path / folder), max_steps=2, save_steps=1, learning_rate=1e-2, weight_decay=0.1, report_to=[],
            use_cpu=True, remove_unused_columns=False, per_device_train_batch_size=1, disable_tqdm=True,
        )  # fmt: skip
        dataset: Any = [sample, sample]
        Trainer(model, arguments, train_dataset=dataset, data_collator=lambda batch: batch[0]).train(**options)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    torch.manual_seed(0)
    model = tiny_model().double()
    model_before, resumed = copy.deepcopy(model), accelerate(copy.deepcopy(model))
    expected = trained(model, "theirs")
    actual = trained(resumed, "ours", resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-1"))
    before = dict(model_before.named_parameters())
    for name, tensor in expected.items():
        # The bias of keys has no gradient but for rounding, which AdamW makes as large as any other.
        if not name.endswith("attn.qkv.bias"):
            moved = (tensor - before[name]).norm()
            assert (actual[name] - tensor).norm() <= 1e-2 * moved, name


@pytest.mark.parametrize("when", ("before", "after"))
def test_every_second_block_is_checkpointed(when: str) -> None:
    if "every_n_layers" not in inspect.signature(PreTrainedModel._set_gradient_checkpointing).parameters:
        pytest.skip("this version of Transformers checkpoints all layers")
    torch.manual_seed(0)
    model: Any = tiny_model()
    if when == "after":
        accelerate(model)
    # The former name is that up to Transformers 5.17.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(every_n_layers=2)
    accelerate(model)
    encoder = model.model.visual
    assert [block.gradient_checkpointing for block in encoder.blocks] == [True, False, True]
    # The text's only layer is the fourth.
    assert not model.model.language_model.layers[0].gradient_checkpointing
    restore(model)
    assert [block.gradient_checkpointing for block in model.model.visual.blocks] == [True, False, True]


def test_an_encoder_checkpoints_every_second_block_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = accelerate(tower_of("qwen3_vl_vision")).train()
    pixels, runs = draw_pixels(encoder, IMAGES), []
    expected = run(encoder, pixels)
    block_class = type(encoder.blocks[0])
    original = block_class.step
    monkeypatch.setattr(block_class, "step", lambda self, *args: runs.append(self) or original(self, *args))
    encoder.activation_checkpointing_enable(every_n_layers=2)
    assert encoder.is_activation_checkpointing and encoder.is_gradient_checkpointing
    for name, tensor in run(encoder, pixels).items():
        torch.testing.assert_close(tensor, expected[name], msg=name)
    assert [runs.count(block) for block in encoder.blocks] == [2, 1, 2]
    encoder.activation_checkpointing_disable()
    assert not encoder.is_activation_checkpointing
    with pytest.raises(ValueError, match="every_n_layers is 0, expected 1 or more"):
        encoder.activation_checkpointing_enable(every_n_layers=0)


Event = tuple[Any, ...]


def shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return tuple(map(shapes, value)) if isinstance(value, tuple) else type(value).__name__


def attach(name: str, module: nn.Module, kind: str, events: list[Event]) -> Any:
    """A hook that records what it is given, and changes what a hook of its kind may change."""
    # A look-up of positions is by other indices, or by all.
    seen = (lambda value: None) if name == "pos_embed" else shapes

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = [seen(kwargs.get(each)) for each in ("cu_seqlens", "position_embeddings")]
        events.append((name, kind, seen(args), *given))
        scaled = args if name == "pos_embed" else (1.25 * args[0], *args[1:])
        return scaled, kwargs

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        events.append((name, kind, seen(args), seen(output)))
        return 0.75 * output if isinstance(output, Tensor) else None

    def backward(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
        events.append((name, kind, seen(grad_outputs)))

    def saving(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        events.append((name, kind, prefix))

    register: dict[str, Callable[[], Any]] = {
        "before": lambda: module.register_forward_pre_hook(before, with_kwargs=True),
        "after": lambda: module.register_forward_hook(after),
        "backward": lambda: module.register_full_backward_hook(backward),
        "saving": lambda: module.register_state_dict_post_hook(saving),
    }
    return register[kind]()


# One of each, and what lies inside of what one op computes.
HOOKED = (
    "", "patch_embed", "pos_embed", "blocks.1", "blocks.0.attn", "blocks.2.mlp", "blocks.2.norm1", "blocks.0.norm2",
    "blocks.1.attn.qkv", "merger", "deepstack_merger_list.1", "merger_list.0",
)  # fmt: skip


@hypothesis_settings(max_examples=10)
@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.sampled_from(HOOKED), st.sampled_from(("before", "after", "backward", "saving"))), min_size=1,
             max_size=4, unique=True),
)  # fmt: skip
def test_hooks_are_called_as_before(model_type: str, places: list[tuple[str, str]]) -> None:
    tower = tower_of(model_type)
    names = dict(tower.named_modules())
    events: list[Event] = []
    places = [(name, kind) for name, kind in places if name in names and (name or kind != "backward")]
    handles = [attach(name, names[name], kind, events) for name, kind in places]
    pixels = draw_pixels(tower, IMAGES)

    def seen(module: Any) -> tuple[dict[str, Tensor], list[Event]]:
        events.clear()
        found = run(module, pixels)
        module.state_dict()
        return found, sorted(map(repr, events))

    truth, _ = seen(doubled(tower))
    eager, expected = seen(tower)
    assert len(expected) >= len(places)
    encoder = accelerate(tower)
    actual, called = seen(encoder)
    assert called == expected
    check(actual, eager, truth)
    # The tower that comes back has the hooks too.
    restored, again = seen(restore(encoder))
    assert again == expected
    check(restored, eager, truth)
    encoder = copy.deepcopy(accelerate(tower))
    for handle in handles:
        handle.remove()
    assert not events or seen(accelerate(tower))[1] == []
    assert seen(encoder)[1] == expected, "a copy has hooks of its own"


@pytest.mark.parametrize("model_type", KINDS)
def test_hooks_that_nobody_would_call_are_refused_or_their_module_is_kept(model_type: str) -> None:
    model: Any = nn.ModuleDict({"visual": tower_of(model_type)})
    tower, seen = model["visual"], []
    tower.rotary_pos_emb.register_forward_hook(lambda *rest: None)
    with pytest.raises(ValueError, match=r"^from_transformers: rotary_pos_emb is hooked, expected without hooks; "):
        accelerate(model)
    assert model["visual"] is tower
    tower.rotary_pos_emb._forward_hooks.clear()
    activations = [module for name, module in tower.named_modules() if "act" in name.rpartition(".")[2]]
    activations += [module for module in tower.modules() if isinstance(module, nn.GELU)]
    if model_type == "qwen2_5_vl_vision":
        activations.append(tower.merger.mlp)
    for module in activations:
        module.register_forward_hook(lambda module, *rest: seen.append(module))
    pixels = draw_pixels(tower, IMAGES)
    eager, truth = tower(pixels, grid_thw=IMAGES), doubled(tower)(pixels.double(), grid_thw=IMAGES)
    expected, _ = seen[: len(seen) // 2], seen.clear()
    output = accelerate(model)["visual"](pixels, IMAGES)
    assert sorted(map(id, seen)) == sorted(map(id, expected)) and len(seen) > 3
    check_outputs(output, eager, truth)


def test_hooks_of_transformers_itself_do_not_stop_pairs_and_come_back() -> None:
    """It sets some to record hidden states, and to let gradients enter; the encoder does both without hooks."""
    checkpointed = tower_of("qwen2_5_vl_vision")
    checkpointed.enable_input_require_grads()
    assert checkpointed.patch_embed._forward_hooks and not accelerate(checkpointed).patch_embed._forward_hooks
    tower = tower_of("qwen3_vl_vision")
    pixels = draw_pixels(tower, IMAGES)
    expected = tower(pixels, grid_thw=IMAGES, output_hidden_states=True).hidden_states
    encoder = accelerate(tower)
    assert not any(module._forward_hooks for module in encoder.modules())
    assert len(encoder(pixels, IMAGES, output_hidden_states=True).hidden_states) == len(expected)
    seen: list[nn.Module] = []
    encoder.blocks[1].register_forward_hook(lambda module, *rest: seen.append(module))
    encoder.merger.register_forward_hook(lambda module, *rest: seen.append(module))
    again = restore(encoder)(pixels, grid_thw=IMAGES, output_hidden_states=True).hidden_states
    assert seen == [tower.blocks[1], tower.merger]
    for mine, theirs in zip(again, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("way", (from_transformers, accelerate, lambda tower: restore(accelerate(tower)), restore))
def test_hooks_of_loading_outlive_their_modules(way: Callable[[Any], Any]) -> None:
    """PyTorch gives them the module on which they were registered, and refuses to call them without it."""
    first, seen = tower_of("qwen3_vl_vision"), []
    first = accelerate(first) if way is restore else first
    places, keys = (first, first.blocks[0].mlp), list(first.state_dict())
    for module in places:
        module.register_load_state_dict_pre_hook(lambda module, *rest: seen.append(type(module)))
    kinds, other = list(map(type, places)), way(first)
    del first, module, places
    gc.collect()
    other = copy.deepcopy(other)
    other.load_state_dict(other.state_dict())
    assert seen == kinds and list(other.state_dict()) == keys


@pytest.fixture
def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "DEVICES", ("cuda", "cpu"))


@pytest.mark.parametrize("name", ("blocks.1", "merger", "patch_embed", "blocks.0.attn", ""))
def test_hooks_are_called_with_automatic_graphs_on(name: str, graphs_on_the_cpu: None) -> None:
    tower, events = tower_of("qwen3_vl_vision"), []
    attach(name, tower.get_submodule(name), "after", events)
    pixels = draw_pixels(tower, IMAGES)
    with torch.no_grad():
        eager, truth = tower(pixels, grid_thw=IMAGES), doubled(tower)(pixels.double(), grid_thw=IMAGES)
        encoder = accelerate(tower)
        events.clear()
        for _ in range(4):
            check_outputs(encoder(pixels, IMAGES), eager, truth)
    assert len(events) == 4
    assert encoder.graphs.why_eager == ("modules of the encoder have hooks" if name else "")
    assert bool(encoder.graphs.captured) == (not name)


@pytest.mark.parametrize("model_type", KINDS)
def test_hooks_of_all_modules_see_and_change_blocks_and_layers(model_type: str) -> None:
    tower, seen = tower_of(model_type), []
    pixels = draw_pixels(tower, IMAGES)

    def note(module: nn.Module, args: Any, output: Any) -> Any:
        is_norm = type(module).__name__.endswith("Norm")
        if isinstance(module, GradientCheckpointingLayer | nn.Linear | nn.Conv3d) or is_norm:
            seen.append((is_norm or type(module).__name__, shapes(args), shapes(output)))
            return 0.75 * output
        return 0.75 * output if isinstance(module, nn.Embedding) else None

    accelerated = accelerate(copy.deepcopy(tower))
    plainly = accelerated(pixels, IMAGES).last_hidden_state
    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        eager, expected = tower(pixels, grid_thw=IMAGES), [*seen]
        truth = doubled(tower)(pixels.double(), grid_thw=IMAGES)
        made_meanwhile = accelerate(tower)
        for encoder in (accelerated, made_meanwhile):
            seen.clear()
            check_outputs(encoder(pixels, IMAGES), eager, truth)
            # A merger of a tap comes after the next block.
            assert sorted(map(str, seen)) == sorted(map(str, expected))
    finally:
        handle.remove()
    assert torch.equal(made_meanwhile(pixels, IMAGES).last_hidden_state, plainly)


class Experts(nn.Module):
    """Two MLPs of Transformers, as a user may put them in the place of one."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([mlp, copy.deepcopy(mlp)])

    def forward(self, x: Tensor) -> Tensor:
        return 0.75 * self.experts[0](x) + 0.5 * self.experts[1](x)


def _tripled(module: Any) -> None:
    forward = type(module).forward
    module.__class__ = type("Tripled", (type(module),), {"forward": lambda self, x: 3 * forward(self, x)})


@pytest.mark.parametrize("model_type", KINDS)
def test_modules_that_do_something_else_are_called(model_type: str, graphs_on_the_cpu: None) -> None:
    tower = tower_of(model_type)
    tower.blocks[0].mlp = Experts(tower.blocks[0].mlp)
    _tripled(tower.blocks[1].mlp)
    last = tower.blocks[2].mlp
    setattr(last, "act_fn" if hasattr(last, "act_fn") else "act", nn.ReLU())
    next(module for module in tower.merger.modules() if isinstance(module, nn.GELU)).approximate = "tanh"
    _tripled(tower.patch_embed)
    if taps := FAMILIES[model_type].taps:
        tower.get_submodule(taps)[1] = nn.Sequential(tower.get_submodule(taps)[1], nn.Tanh())
    pixels = draw_pixels(tower, IMAGES)
    plain = _built(model_type, torch.float32)(pixels, grid_thw=IMAGES)
    eager, truth = run(tower, pixels), run(doubled(tower), pixels)
    assert (plain.pooler_output - eager["pooler_output"]).abs().max() > 0.1
    modules = list(tower.modules())
    encoder = accelerate(tower)
    check(run(encoder, pixels), eager, truth)
    with torch.no_grad():
        for _ in range(3):
            output = encoder(pixels, IMAGES)
    assert encoder.graphs.captured and not encoder.graphs.why_eager
    assert torch.equal(output.pooler_output, QwenVisionEncoder.forward(encoder, pixels, IMAGES).pooler_output)
    assert restore(encoder) is tower and list(tower.modules()) == modules
    check(run(tower, pixels), eager, truth)


@pytest.mark.parametrize("when", ("before", "after"))
def test_forwards_of_instances_are_called(when: str, graphs_on_the_cpu: None) -> None:
    tower = tower_of("qwen3_vl_vision").requires_grad_(False)
    pixels = draw_pixels(tower, IMAGES)

    def change(each: Any) -> Any:
        for module in (each.blocks[0].mlp, each.merger, each.patch_embed):
            # A bound method, which a copy of the module binds to the copy.
            module.forward = MethodType(lambda self, x: 3 * type(self).forward(self, x), module)
        return each

    changed = change(copy.deepcopy(tower))
    eager, truth = changed(pixels, grid_thw=IMAGES), doubled(changed)(pixels.double(), grid_thw=IMAGES)
    encoder = accelerate(changed) if when == "before" else change(accelerate(tower))
    with torch.no_grad():
        for _ in range(3):
            check_outputs(encoder(pixels, IMAGES), eager, truth)
    assert "has a forward of its own" in encoder.graphs.why_eager
    check_outputs(restore(encoder)(pixels, grid_thw=IMAGES), eager, truth)


@torch.no_grad()
def test_no_forward_of_an_instance_is_lost_on_the_way_back() -> None:
    """Wherever one is put afterwards, the restored tower computes it too, or it is refused by name."""
    names = [name for name, _ in accelerate(tower_of("qwen2_5_vl_vision")).named_modules()]
    pixels, refused = draw_pixels(tower_of("qwen2_5_vl_vision"), ONE), []
    for name in names:
        if name.startswith(("blocks.1", "blocks.2")):
            continue
        encoder = accelerate(tower_of("qwen2_5_vl_vision"))
        plain, module = encoder(pixels, ONE).pooler_output, encoder.get_submodule(name)
        if isinstance(module, nn.ModuleList):
            continue
        module.forward = functools.partial(_scaled, module.forward)
        changed = encoder(pixels, ONE).pooler_output
        assert (changed - plain).abs().max() > 1e-3, name
        try:
            output = restore(encoder)(pixels, grid_thw=ONE).pooler_output
        except ValueError as error:
            place = f"{name}.forward".lstrip(".")
            assert str(error).startswith(f"restore: {place} is another, expected that of {type(module).__name__}; undo")
            refused.append(name)
        else:
            torch.testing.assert_close(output, changed)
    assert refused == ["", "blocks.0", "blocks.0.attn", "merger.mlp", "merger.mlp.1"]


@torch.no_grad()
def test_forwards_that_accelerate_leaves_behind_replace_nothing(graphs_on_the_cpu: None) -> None:
    """Without its hooks, a module has the forward of its class as an attribute."""
    hooks = pytest.importorskip("accelerate.hooks", reason="the test needs Accelerate")
    model: Any = nn.ModuleDict({"visual": tower_of("qwen2_5_vl_vision")})
    pixels, kinds = draw_pixels(model["visual"], ONE), list(map(type, model.modules()))
    for change in (accelerate, restore, accelerate, accelerate):
        for module in model["visual"].modules():
            hooks.add_hook_to_module(module, hooks.ModelHook())
        hooks.remove_hook_from_submodules(model)
        assert "forward" in vars(model["visual"].blocks[0].norm1)
        change(model)
        if change is restore:
            assert list(map(type, model.modules())) == kinds
    encoder = model["visual"]
    for _ in range(3):
        encoder(pixels, ONE)
    assert encoder.graphs.captured and not encoder.graphs.why_eager


def _scaled(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    for key in ["pooler_output"] if isinstance(output, dict) else []:
        output[key] = 1.5 * output[key]
    return 1.5 * output if isinstance(output, Tensor) else output


def test_a_patch_embedding_without_its_layer_is_refused() -> None:
    tower = tower_of("qwen3_vl_vision")
    tower.patch_embed = nn.Sequential(tower.patch_embed)
    with pytest.raises(ValueError, match=r"^from_transformers: patch_embed is Sequential, expected \w+, by the config"):
        accelerate(tower)


@pytest.mark.parametrize("order", ("PEFT first", "ours first"))
def test_modules_to_save(order: str) -> None:
    peft = pytest.importorskip("peft", reason="the test needs PEFT")
    options = peft.LoraConfig(
        target_modules=["qkv", "q_proj"], modules_to_save=["merger", "patch_embed", "norm1"], init_lora_weights=False
    )
    torch.manual_seed(0)
    model = tiny_model()
    pixels = draw_pixels(model.model.visual, IMAGES)
    theirs = peft.get_peft_model(copy.deepcopy(model), options)
    ours = copy.deepcopy(theirs) if order == "PEFT first" else peft.get_peft_model(accelerate(model), options)
    accelerate(ours)
    assert [(name, p.requires_grad) for name, p in ours.named_parameters()] == [
        (name, p.requires_grad) for name, p in theirs.named_parameters()
    ]
    ours.load_state_dict(theirs.state_dict())

    def vision(model: Any) -> Any:
        return model.base_model.model.model.visual

    eager, truth = run(vision(theirs), pixels), run(vision(doubled(theirs)), pixels)
    assert isinstance(vision(ours), QwenVisionEncoder)
    check(run(vision(ours), pixels), eager, truth)
    restore(ours)
    assert not isinstance(vision(ours), QwenVisionEncoder)
    check(run(vision(ours), pixels), eager, truth)


@pytest.mark.parametrize("name", ("attn", "blocks.0", "visual"))
def test_modules_to_save_of_what_is_computed_differently(name: str) -> None:
    """PEFT's copies of blocks and attention are refused, with the order that works; copies of a tower are replaced."""
    peft = pytest.importorskip("peft", reason="the test needs PEFT")
    options = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[name])
    torch.manual_seed(0)
    model = tiny_model()
    pixels = draw_pixels(model.model.visual, IMAGES)
    eager, truth = run(model.model.visual, pixels), run(doubled(model.model.visual), pixels)
    wrapped = peft.get_peft_model(copy.deepcopy(model), options)
    if name == "visual":
        accelerate(wrapped)
    else:
        with pytest.raises(ValueError, match="is ModulesToSaveWrapper, .*; accelerate the model first, then replace"):
            accelerate(wrapped)
        wrapped = peft.get_peft_model(accelerate(model), options)
    output = wrapped.base_model.model.model.visual(pixels, grid_thw=IMAGES)
    check({"pooled": output.pooler_output}, {"pooled": eager["pooler_output"]}, {"pooled": truth["pooler_output"]})


def cast(tower: Any, names: tuple[str, ...], dtype: torch.dtype) -> Any:
    for name in names:
        tower.get_submodule(name).to(dtype)
    return tower


# Parts in another dtype, which Transformers computes too: the result of an RMSNorm has the wider dtype.
PARTS = (
    ("merger",), ("blocks", "merger"), ("patch_embed",), ("blocks.1.norm1", "blocks.0.norm2"), ("merger.ln_q",),
    ("blocks.1",), ("pos_embed",), ("merger.norm",),
)  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtypes", [(half, torch.float32) for half in HALVES] + [(torch.float32, HALVES[0])], ids=str)
@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_vl_vision"))
def test_parts_in_another_dtype(model_type: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Whatever Transformers computes is computed, in its dtypes."""
    computed = []
    for names in PARTS:
        tower = _built(model_type, torch.float32)
        if any(name not in dict(tower.named_modules()) for name in names):
            continue
        # Up to Transformers 5.12, positions do not follow the dtype of the patches.
        if model_type == "qwen3_vl_vision" and names == ("patch_embed",) and not qwen_vl.computes_ahead:
            continue
        tower = cast(tower_of(model_type, dtypes[0]), names, dtypes[1]).requires_grad_(False)
        pixels = draw_pixels(tower, ONE)
        try:
            eager = tower(pixels, grid_thw=ONE)
        except RuntimeError:
            continue
        output = accelerate(tower)(pixels, ONE)
        computed.append(names)
        found, wanted = named_outputs(output), named_outputs(eager)
        assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in wanted.items()}
        check_outputs(output, eager, doubled(tower)(pixels.double(), grid_thw=ONE))
    if model_type == "qwen2_5_vl_vision":
        assert len(computed) == (2 if dtypes[1] is torch.float32 else 3), computed


def test_norms_in_fp32_under_autocast_keep_rows_narrow() -> None:
    tower = cast(tower_of("qwen2_5_vl_vision", torch.bfloat16), ("blocks.0.norm1", "merger"), torch.float32)
    pixels = draw_pixels(tower, ONE)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        eager, truth = tower(pixels, grid_thw=ONE), doubled(tower)
        output = accelerate(tower)(pixels, ONE)
    check_outputs(output, eager, truth(pixels.double(), grid_thw=ONE))
    assert output.pooler_output.dtype is eager.pooler_output.dtype


@pytest.mark.parametrize("shape", ((1, -1), (4, -1), (2, 2, -1), "patches"), ids=str)
def test_pixels_as_collators_make_them(shape: Any, graphs_on_the_cpu: None) -> None:
    tower = tower_of("qwen3_vl_vision").requires_grad_(False)
    pixels = draw_pixels(tower, IMAGES)
    columns = tuple(tower.patch_embed.proj.weight.shape[1:]) if shape == "patches" else (pixels.shape[1],)
    given = pixels.view(*((-1,) if shape == "patches" else shape), *columns)
    eager, truth = tower(given, grid_thw=IMAGES), doubled(tower)(given.double(), grid_thw=IMAGES)
    encoder = accelerate(tower)
    runner = EncoderGraphs(from_transformers(tower), (64,))
    with torch.no_grad():
        for call in (encoder, encoder, encoder, runner):
            check_outputs(call(given, IMAGES), eager, truth)
        assert encoder.graphs.captured and not encoder.graphs.why_eager
        check_outputs(encoder(given, IMAGES, chunk_tokens=32), eager, truth)
        packed = encoder.encode_packed(given, qwen_vl.vision_metadata(IMAGES, encoder.sizes))
        check_outputs(encoder.output_of(*packed), eager, truth)
        for wrong in (pixels.flatten(), pixels[None, 1:], pixels[:, None, :-1]):
            with pytest.raises(ValueError, match="pixel_values"):
                encoder(wrong, IMAGES)


def test_lengths_of_a_packed_text_are_not_the_towers(graphs_on_the_cpu: None) -> None:
    torch.manual_seed(0)
    model: Any = tiny_model().requires_grad_(False)
    ids = torch.tensor([[6, 5, 5, 5, 5, 1, 2, 3]])
    arguments: dict[str, Any] = {
        "input_ids": ids, "mm_token_type_ids": (ids == 5).int(), "image_grid_thw": ONE,
        "pixel_values": draw_pixels(model.model.visual, ONE),
    }  # fmt: skip
    text = torch.tensor([0, 6, 8], dtype=torch.int32)
    packed = {"cu_seq_lens_q": text, "cu_seq_lens_k": text, "max_length_q": 6, "max_length_k": 6, "seq_idx": text}
    eager, truth = model(**arguments, **packed).logits, doubled(model)
    accelerate(model)
    encoder = model.model.visual
    for _ in range(3):
        logits = model(**arguments, **packed).logits
    assert encoder.graphs.captured == () and "gradients are enabled" in encoder.graphs.why_eager
    with torch.no_grad():
        for _ in range(3):
            replayed = model(**arguments, **packed).logits
    assert encoder.graphs.captured and not encoder.graphs.why_eager
    arguments["pixel_values"] = arguments["pixel_values"].double()
    exact = truth(**arguments).logits
    for actual in (logits, replayed):
        check({"logits": actual}, {"logits": eager}, {"logits": exact})


def _through_torch_save(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", (copy.deepcopy, copy.copy, _through_torch_save))
def test_copies_work_and_know_the_way_back(copied: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model: Any = accelerate(tiny_model())
    model.tie_weights()
    model.resize_token_embeddings(80, mean_resizing=False)
    pixels = draw_pixels(model.model.visual, IMAGES)
    other = copied(model)
    assert torch.equal(other.model.visual(pixels, IMAGES)[1], model.model.visual(pixels, IMAGES)[1])
    block = other.get_submodule("model.visual.blocks.1")
    assert isinstance(block, GradientCheckpointingLayer) and isinstance(block.norm1, nn.LayerNorm)
    assert list(restore(other).state_dict()) == list(model.state_dict())
