"""The vision tower of a checkpoint: read whole, read alone, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from torch_ops.models.qwen_vl import TOWERS, Tower, build_tower, encode, load_tower

pytestmark = pytest.mark.no_interpret

VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 24,
    "num_position_embeddings": 64,
}
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    grid = torch.tensor([[1, 6, 8], [2, 4, 4]])
    rows = int(grid.prod(dim=1).sum())
    return torch.randn(rows, 1536, generator=torch.Generator().manual_seed(1)), grid


def tensors(output: Any) -> dict[str, torch.Tensor]:
    taps = getattr(output, "deepstack_features", None) or ()
    return {
        "last_hidden_state": output.last_hidden_state,
        "pooler_output": output.pooler_output,
        **{f"deepstack_features[{i}]": tap for i, tap in enumerate(taps)},
    }


def assert_same_weights(left: PreTrainedModel, right: PreTrainedModel) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def save_full_model(directory: Path, family: str = "qwen3_vl", **options: Any) -> PreTrainedModel:
    """A tiny vision-language model, written to ``directory``; returns its vision tower."""
    sizes = {"vision_config": VISION, "text_config": TEXT}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if family == "qwen3_vl":
            sizes["vision_config"] = {**VISION, "deepstack_visual_indexes": [0]}
            model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**sizes))
        else:
            model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**sizes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    model.eval().save_pretrained(directory, **options)
    return model.model.visual


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("shard_size", ["10GB", "100KB"])
@torch.no_grad()
def test_load_tower(tmp_path: Path, family: str, shard_size: str) -> None:
    visual = save_full_model(tmp_path, family, max_shard_size=shard_size)
    sharded = (tmp_path / "model.safetensors.index.json").is_file()
    assert sharded == (shard_size == "100KB")
    tower = load_tower(tmp_path)
    assert_same_weights(tower, visual)
    pixel_values, grid = draw()
    loaded = tensors(encode(tower, pixel_values, grid))
    for name, value in tensors(visual(pixel_values, grid_thw=grid)).items():
        assert torch.equal(loaded[name], value)


@torch.no_grad()
def test_load_tower_in_bfloat16(tmp_path: Path) -> None:
    save_full_model(tmp_path)
    tower = load_tower(tmp_path, dtype=torch.bfloat16)
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    pixel_values, grid = draw()
    loaded = tensors(encode(tower, pixel_values.bfloat16(), grid))
    expected = model.model.visual(pixel_values.bfloat16(), grid_thw=grid)
    for name, value in tensors(expected).items():
        assert torch.equal(loaded[name], value)


def test_load_tower_reads_only_vision_shards(tmp_path: Path) -> None:
    visual = save_full_model(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if ".visual." in name}
    spare = set(index.values()) - needed
    assert spare
    for file in spare:
        (tmp_path / file).unlink()
    assert_same_weights(load_tower(tmp_path), visual)
    (tmp_path / min(needed)).unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {min(needed)}"):
        load_tower(tmp_path)


def rewrite(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_load_tower_older_names(tmp_path: Path) -> None:
    visual = save_full_model(tmp_path)
    rewrite(tmp_path, lambda state: {k.removeprefix("model."): v for k, v in state.items()})
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["model_type"] = "qwen3_vl"  # as the first checkpoints have it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same_weights(load_tower(tmp_path), visual)


def test_load_tower_saved_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOWERS, "tiny", Tower("tiny", 48, 3, 2, 80, 40, (0, 1), "tests"))
    tower = build_tower("tiny")
    tower.save_pretrained(tmp_path)
    assert_same_weights(load_tower(tmp_path), tower)


def without_vision(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if ".visual." not in name}


BIAS = "model.visual.blocks.1.attn.qkv.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_vision, "has no vision tower: no tensor is named model.visual"),
        (lambda state: {k: v for k, v in state.items() if k != BIAS}, "lacks blocks.1.attn.qkv.b"),
        (lambda state: {**state, "model.visual.extra": torch.ones(1)}, "also holds extra"),
        (lambda state: {**state, BIAS: torch.ones(5)}, r"shape \(96,\), got .* of shape \(5,\)"),
        (lambda state: {**state, BIAS: torch.ones(96).to(torch.int8)}, "floating-point tensor"),
    ],
    ids=["no vision tensors", "missing", "unexpected", "shape", "dtype"],
)
def test_load_tower_refuses_tensors(tmp_path: Path, change: Any, message: str) -> None:
    save_full_model(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_tower(tmp_path)


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({}, FileNotFoundError, "holds no config.json"),
        ({"config.json": "{"}, ValueError, "config.json is not valid JSON"),
        ({"config.json": "[]"}, ValueError, "must hold a JSON object, got a list"),
        (
            {"config.json": '{"model_type": "llama"}'},
            ValueError,
            "model_type is 'llama', sup",
        ),
        ({"config.json": '{"model_type": "qwen3_vl"}'}, ValueError, "holds no vision_config"),
        (
            {"config.json": '{"model_type": "qwen3_vl", "vision_config": {"depth": "two"}}'},
            ValueError,
            "is not usable",
        ),
        (
            {"config.json": '{"model_type": "qwen3_vl", "vision_config": {"depth": 1}}'},
            FileNotFoundError,
            "neither model.safetensors nor",
        ),
        (
            {
                "config.json": '{"model_type": "qwen3_vl", "vision_config": {"depth": 1}}',
                "model.safetensors": "not safetensors at all",
            },
            ValueError,
            "model.safetensors is damaged",
        ),
    ],
)
def test_load_tower_refuses_directories(
    tmp_path: Path, files: dict[str, str], kind: type[Exception], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(kind, match=message):
        load_tower(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        load_tower(tmp_path / "nowhere")
