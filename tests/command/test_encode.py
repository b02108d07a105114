"""Towers, their weights, preprocessing, and the packed call: torch_ops.models.qwen_vl."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from tests.command.verify import draw_image
from tests.models.verify import assert_same_weights, tensors
from torch_ops.integrations.transformers import use_window_attn
from torch_ops.models import qwen_vl
from torch_ops.models.qwen_vl import (
    TOWERS,
    Tower,
    build_tower,
    encode,
    from_transformers,
    image_processor,
    open_image,
    preprocess,
    split_by_image,
)
from torch_ops.testing.tolerance import assert_close_to_reference, check

pytestmark = pytest.mark.no_interpret

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(TOWERS, "tiny", Tower("tiny", 48, 3, 2, 80, 40, (0, 1), "tests"))
    return "tiny"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "head_dim", "taps"), [("S", 64, 0), ("M", 64, 3), ("L", 72, 3)])
def test_tower_sizes(name: str, head_dim: int, taps: int) -> None:
    config = TOWERS[name].config()
    assert config.hidden_size == head_dim * config.num_heads
    assert config.model_type == "qwen3_vl_vision"
    assert len(config.deepstack_visual_indexes) == taps
    assert all(index < config.depth for index in config.deepstack_visual_indexes)


def test_unknown_tower() -> None:
    with pytest.raises(ValueError, match="unknown tower 'XL'; choose one of S, M, L"):
        build_tower("XL")


def test_weights_depend_on_the_seed_alone(tiny: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_tower(tiny, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert_same_weights(first, build_tower(tiny, seed=3))
    other = build_tower(tiny, seed=4)
    for name, parameter in first.named_parameters():
        assert not torch.equal(parameter, other.get_parameter(name)), name
    assert not first.training
    assert all(parameter.requires_grad for parameter in first.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_casts_weights_and_spares_rotary_frequencies(tiny: str, dtype: torch.dtype) -> None:
    full, half = build_tower(tiny), build_tower(tiny, dtype=dtype)
    for name, parameter in full.named_parameters():
        assert torch.equal(parameter.to(dtype), half.get_parameter(name)), name
    assert half.rotary_pos_emb.inv_freq.dtype == torch.float32
    assert torch.equal(half.rotary_pos_emb.inv_freq, full.rotary_pos_emb.inv_freq)


def test_progress_counts_tensors(tiny: str) -> None:
    seen: list[tuple[int, int]] = []
    tower = build_tower(tiny, progress=lambda done, total: seen.append((done, total)))
    total = len(list(tower.parameters()))
    assert seen == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize("name", ["tiny", "S"])
@torch.no_grad()
def test_patched_tower_agrees_on_images(name: str, tiny: str) -> None:
    pixel_values, grid = preprocess([draw_image(256, 256, 1), draw_image(100, 210, 2)])
    assert grid.tolist() == [[1, 16, 16], [1, 24, 12]]
    reference = tensors(encode(build_tower(name, dtype=torch.float64), pixel_values.double(), grid))
    tower = build_tower(name)
    eager = tensors(encode(tower, pixel_values, grid))
    actual = tensors(encode(use_window_attn(tower), pixel_values, grid))
    check(actual, eager, reference)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["S", "L"])
@torch.no_grad()
def test_patched_tower_agrees_on_a_gpu(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOWERS, name, replace(TOWERS[name], depth=3, deepstack_visual_indexes=(1,)))
    tower = build_tower(name, dtype=dtype, device="cuda")
    exact = build_tower(name, dtype=dtype, device="cuda").double()
    pixel_values, grid = preprocess([draw_image(512, 384, 1), draw_image(100, 210, 2)])
    pixel_values = pixel_values.to("cuda", dtype)
    reference = tensors(encode(exact, pixel_values.double(), grid))
    eager = tensors(encode(tower, pixel_values, grid))
    use_window_attn(tower)
    encode(tower, pixel_values, grid)  # builds the kernels
    torch.cuda.set_sync_debug_mode("error")  # from here on a wait for the device raises
    try:
        output = encode(tower, pixel_values, grid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(tensors(output), eager, reference)


@torch.no_grad()
def test_encode_is_the_plain_call(tiny: str) -> None:
    """Work that encode does ahead changes no result, for images and for videos."""
    tower = use_window_attn(build_tower(tiny))
    grid = torch.tensor([[1, 4, 6], [3, 6, 4], [1, 2, 2]])
    rows = int(grid.prod(dim=1).sum())
    pixel_values = torch.randn(rows, 1536, generator=torch.Generator().manual_seed(0))
    plain = tensors(tower(pixel_values, grid_thw=grid))
    for name, value in tensors(encode(tower, pixel_values, grid)).items():
        assert torch.equal(value, plain[name])


@torch.no_grad()
def test_packed_images_do_not_see_each_other(tiny: str) -> None:
    images = [draw_image(256, 256, 1), draw_image(352, 224, 2), draw_image(224, 320, 3)]
    exact = build_tower(tiny, dtype=torch.float64)
    tower = use_window_attn(build_tower(tiny))
    pixel_values, grid = preprocess(images)
    together = split_by_image(encode(tower, pixel_values, grid), grid)
    for image, features in zip(images, together, strict=True):
        alone, own_grid = preprocess([image])
        eager = tensors(encode(tower, alone, own_grid))
        reference = tensors(encode(exact, alone.double(), own_grid))
        check(tensors(features), eager, reference)


def test_split_by_image(tiny: str) -> None:
    grid = torch.tensor([[1, 4, 6], [3, 6, 4], [1, 2, 2]])
    rows = int(grid.prod(dim=1).sum())

    class Output:
        last_hidden_state = torch.arange(rows)[:, None]
        pooler_output = torch.arange(rows // 4)[:, None]
        deepstack_features = [pooler_output + 1000]

    parts = split_by_image(Output, grid)
    for name, whole in tensors(Output).items():
        assert torch.equal(torch.cat([tensors(part)[name] for part in parts]), whole)
    assert [part.last_hidden_state.shape[0] for part in parts] == [24, 72, 4]
    assert [part.deepstack_features[0].shape[0] for part in parts] == [6, 18, 1]


@pytest.mark.parametrize("grid", (torch.zeros(0, 3, dtype=torch.int64), torch.tensor([[0, 2, 2], [0, 4, 2]])))
def test_split_by_image_of_no_patches(tiny: str, grid: torch.Tensor) -> None:
    encoder = from_transformers(build_tower(tiny))
    parts = split_by_image(encoder(torch.zeros(0, 1536), grid), grid)
    assert len(parts) == len(grid)
    for part in parts:
        assert {name: tensor.shape[0] for name, tensor in tensors(part).items()} == dict.fromkeys(tensors(part), 0)


def normalised(levels: Any, dtype: torch.dtype) -> torch.Tensor:
    return (torch.as_tensor(levels).to(dtype) * (1 / 255) - 0.5) / 0.5


def test_preprocess_cuts_patches_in_merge_block_order() -> None:
    image = draw_image(320, 256)  # needs no resizing
    pixel_values, grid = preprocess([image])
    assert grid.tolist() == [[1, 16, 20]]
    assert pixel_values.dtype == torch.float32
    pixels = torch.tensor(list(image.tobytes())).reshape(256, 320, 3)
    patches = []
    for block_row in range(8):
        for block_column in range(10):
            for cell in range(4):
                top = 16 * (2 * block_row + cell // 2)
                left = 16 * (2 * block_column + cell % 2)
                patch = pixels[top : top + 16, left : left + 16].permute(2, 0, 1)
                patches.append(torch.stack([patch, patch], dim=1).flatten())  # both frames
    levels = torch.stack(patches)
    eager, reference = normalised(levels, torch.float32), normalised(levels, torch.float64)
    assert_close_to_reference(pixel_values, eager, reference)


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (3, 100), (640, 440)])
def test_preprocess_sizes(size: tuple[int, int]) -> None:
    colour = (10, 128, 255)
    pixel_values, grid = preprocess([Image.new("RGB", size, colour)])
    assert grid[0, 1:].remainder(2).sum() == 0
    assert pixel_values.shape == (int(grid.prod()), 1536)
    levels = torch.tensor(colour).repeat_interleave(512).expand(pixel_values.shape)
    eager, reference = normalised(levels, torch.float32), normalised(levels, torch.float64)
    assert_close_to_reference(pixel_values, eager, reference)


def test_preprocess_refuses() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        preprocess([])
    with pytest.raises(ValueError, match="images.1. has 0 x 3 pixels"):
        preprocess([Image.new("RGB", (32, 32)), Image.new("RGB", (0, 3))])
    with pytest.raises(ValueError, match="aspect ratio must be smaller than 200"):
        preprocess([Image.new("RGB", (1, 300))])


def test_image_processor_follows_the_checkpoint(tmp_path: Path) -> None:
    default = image_processor()
    assert image_processor(tmp_path).to_dict() == default.to_dict()
    qwen_vl.Qwen2VLImageProcessorPil(
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64},
    ).save_pretrained(tmp_path)
    image = draw_image(256, 256)
    assert preprocess([image], default)[1].tolist() == [[1, 16, 16]]
    assert preprocess([image], image_processor(tmp_path))[1].tolist() == [[1, 4, 4]]


def test_open_image_is_upright_rgb(tmp_path: Path) -> None:
    upright = draw_image(40, 24)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees to look at it
    stored = upright.transpose(Image.Transpose.ROTATE_90)
    stored.save(tmp_path / "turned.png", exif=exif)
    assert open_image(tmp_path / "turned.png").tobytes() == upright.tobytes()


def test_open_image_refuses(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing.png does not exist"):
        open_image(tmp_path / "nothing.png")
    with pytest.raises(IsADirectoryError, match="is a directory"):
        open_image(tmp_path)
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(ValueError, match="text.png is not an image"):
        open_image(tmp_path / "text.png")
    (tmp_path / "cut.png").write_bytes((EXAMPLES / "street.png").read_bytes()[:3000])
    with pytest.raises(ValueError, match="cut.png cannot be decoded"):
        open_image(tmp_path / "cut.png")


def test_street_is_what_its_script_draws() -> None:
    drawn, stored = example("draw_street").draw_street(), open_image(EXAMPLES / "street.png")
    assert drawn.size == stored.size == (640, 440)
    assert drawn.tobytes() == stored.tobytes()
    assert (EXAMPLES / "street.png").stat().st_size < 60_000


def test_example_script(capsys: pytest.CaptureFixture[str]) -> None:
    example("encode_images").main([str(EXAMPLES / "street.png")])
    line = capsys.readouterr().out
    assert "street.png: 1120 tokens of 768 -> 280 for the language model, 1024" in line
