"""Mistakes of a user give one line that says what to do instead, and exit code 2."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import torch_ops
from tests.command.verify import STREET, refused

pytestmark = pytest.mark.no_interpret


def bad_images(directory: Path) -> dict[str, tuple[Path, str]]:
    text, cut, line = (directory / name for name in ("text.png", "cut.png", "line.png"))
    text.write_text("not an image")
    cut.write_bytes(STREET.read_bytes()[:3000])
    Image.new("RGB", (1, 500)).save(line)
    return {
        "missing": (directory / "none.png", "does not exist; give the path of an image file"),
        "text": (text, "is not an image that Pillow can read; give a PNG"),
        "cut": (cut, "cannot be decoded (image file is truncated); give an intact image"),
        "directory": (directory, "is a directory; give the images in it"),
        "line": (line, "(1 x 500 pixels) cannot be encoded: absolute aspect ratio"),
    }


@pytest.mark.parametrize("case", ["missing", "text", "cut", "directory", "line"])
def test_bad_images(case: str, tmp_path: Path) -> None:
    path, message = bad_images(tmp_path)[case]
    # a good one first: nothing of it may be printed
    said = refused("encode", STREET, path)
    assert str(path) in said and message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tower", "XL"], "unknown tower 'XL'; choose one of S, M, L"),
        (["--tower", ""], "unknown tower ''"),
        (["--tower", "S", "--model", "x"], "--tower and --model exclude each other"),
        (["--dtype", "int8"], "unknown dtype 'int8'; choose one of float32, bfloat16, float16"),
        (["--device", "tpu"], "unknown device 'tpu'; give cpu, cuda or cuda:N"),
        (["--device", "meta"], "unknown device 'meta'"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there: PyTorch finds "),
        (["--repeat", "0"], "'--repeat'"),
        (["--repeat", "many"], "'--repeat'"),
        (["--frobnicate"], "No such option: --frobnicate"),
        (["--model", "nowhere"], "nowhere is not a directory; give a local Transformers checkp"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    assert message in refused("encode", STREET, *arguments)


def test_missing_arguments() -> None:
    assert "Missing argument" in refused("encode")
    assert "No such command 'encoed'" in refused("encoed")


def test_cuda_asked_for_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refused("encode", STREET, "--device", "cuda")
    assert "device 'cuda' is not there: PyTorch finds no GPU; give --device cpu" in said


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "holds no config.json"),
        ("{", "is not valid JSON"),
        ('{"model_type": "llama"}', 'config.json: model_type is "llama", expected one with a vision tower: qwen2_vl, '),
        ('{"model_type": "qwen3_vl"}', "has no vision tower: its config.json holds no vision_conf"),
        ('{"model_type": "qwen3_vl", "vision_config": {}}', "holds neither model.safetensors nor"),
    ],
)
def test_bad_checkpoints(tmp_path: Path, config: str | None, message: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert message in refused("encode", STREET, "--model", tmp_path)


def test_a_tower_whose_head_dimension_the_op_does_not_take(tmp_path: Path) -> None:
    config = Qwen3VLVisionConfig(depth=1, hidden_size=60, num_heads=5, intermediate_size=8, out_hidden_size=8)
    Qwen3VLVisionModel(config).save_pretrained(tmp_path)
    said = refused("encode", STREET, "--model", tmp_path, "--device", "cpu")
    assert "vk::window_attn: the head dimension of the tower is 12, expected a multiple of 8 from 8 to 256" in said


def test_transformers_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers `vk encode` says which extra to install; importing says so too."""
    spec = importlib.util.find_spec("torch_ops.models.qwen_vl")
    assert spec is not None and spec.loader is not None
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'vk-ops\[transformers\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    monkeypatch.delitem(sys.modules, "torch_ops.models.qwen_vl")
    monkeypatch.delattr(torch_ops.models, "qwen_vl")
    assert "pip install 'vk-ops[transformers]'" in refused("encode", STREET)


def test_chart_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_ops.bench.show.chart", None)
    results = Path(__file__).parents[2] / "docs" / "results" / "h200_window_attn.json"
    said = refused("bench", "chart", results, "out.svg")
    assert "vk bench chart needs matplotlib: pip install 'vk-ops[bench]'" in said
