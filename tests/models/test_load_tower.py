"""The vision tower of a checkpoint: read whole, read alone, or refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from tests.models.verify import MODELS, assert_same_weights, save_full_model, tensors
from torch_ops.models.qwen_vl import TOWERS, Tower, build_tower, encode, load_tower

pytestmark = pytest.mark.no_interpret


def draw(columns: int = 1536) -> tuple[torch.Tensor, torch.Tensor]:
    grid = torch.tensor([[1, 6, 8], [2, 4, 4]])
    rows = int(grid.prod(dim=1).sum())
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)), grid


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("shard_size", ["10GB", "100KB"])
@torch.no_grad()
def test_load_tower(tmp_path: Path, family: str, shard_size: str) -> None:
    visual = save_full_model(tmp_path, family, max_shard_size=shard_size)
    sharded = (tmp_path / "model.safetensors.index.json").is_file()
    assert sharded == (shard_size == "100KB")
    tower = load_tower(tmp_path)
    assert type(tower) is type(visual)
    assert_same_weights(tower, visual)
    pixel_values, grid = draw(tower.patch_embed.proj.weight[0].numel())
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


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
@pytest.mark.parametrize(
    ("family", "published"),
    [
        (
            "qwen2_vl",
            {
                "depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "in_chans": 3, "hidden_size": 24,
                "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
            },
        ),
        (
            "qwen2_5_vl",
            {
                "model_type": "qwen2_5_vl", "depth": 2, "hidden_act": "silu", "hidden_size": 32,
                "intermediate_size": 48, "num_heads": 2, "in_chans": 3, "out_hidden_size": 24, "patch_size": 14,
                "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1],
                "tokens_per_second": 2, "temporal_patch_size": 2,
            },
        ),
    ],
)  # fmt: skip
def test_load_tower_as_published(tmp_path: Path, family: str, published: dict[str, Any], prefix: str) -> None:
    """The first checkpoints have the language model's sizes next to the vision configuration."""
    visual = save_full_model(tmp_path, family)
    rewrite(tmp_path, lambda state: {re.sub(r"^(model\.)?visual\.", prefix, k): v for k, v in state.items()})
    text = {name: value for name, value in MODELS[family][2]["text_config"].items() if name != "rope_parameters"}
    scaling = {"type": "mrope", "mrope_section": [2, 2, 2]}
    config = {"model_type": family, **text, "rope_theta": 1e6, "rope_scaling": scaling, "vision_config": published}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tower = load_tower(tmp_path)
    assert type(tower) is type(visual)
    assert_same_weights(tower, visual)
    ours, theirs = tower.config.to_dict(), visual.config.to_dict()
    assert {name: ours[name] for name in theirs if name in MODELS[family][2]["vision_config"]} == {
        name: theirs[name] for name in theirs if name in MODELS[family][2]["vision_config"]
    }


@pytest.mark.parametrize("family", MODELS)
def test_load_tower_of_any_family_saved_on_its_own(tmp_path: Path, family: str) -> None:
    visual = save_full_model(tmp_path / "whole", family)
    visual.save_pretrained(tmp_path / "alone")
    assert_same_weights(load_tower(tmp_path / "alone"), visual)


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
        (lambda state: {**state, BIAS: torch.ones(5)}, r"of shape \(5,\), expected .* of shape \(96,\)"),
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
        ({"config.json": "[]"}, ValueError, "holds a list, expected a JSON object"),
        (
            {"config.json": '{"model_type": "llama"}'},
            ValueError,
            'model_type is "llama", expected one with a vision tower: qwen2_vl, qwen2_5_vl, qwen3_vl',
        ),
        ({"config.json": '{"model_type": "qwen2_5_omni"}'}, ValueError, 'model_type is "qwen2_5_omni"'),
        ({"config.json": '{"model_type": "qwen3_vl"}'}, ValueError, "holds no vision_config"),
        ({"config.json": '{"model_type": "qwen3_omni_moe"}'}, ValueError, "holds no vision_config"),
        (
            {"config.json": '{"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {}}}'},
            ValueError,
            "holds no vision_config",
        ),
        (
            {"config.json": '{"model_type": "qwen3_vl", "vision_config": {"depth": "two"}}'},
            ValueError,
            r'config.json: vision_config.depth is "two", expected a whole number from 1 to 1024',
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
