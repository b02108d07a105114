"""`vk encode` on checkpoints of the families whose patches, windows or configurations are others than Qwen3-VL's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.models import named_outputs
from tests.command.verify import CPU, STREET, draw_image, refused, vk
from tests.models.verify import MODELS, check_differences, save_full_model
from torch_ops.command.inputs import frame_files
from torch_ops.models import from_transformers
from torch_ops.models.qwen_vl import encode, image_processor, load_tower, open_image, preprocess
from torch_ops.models.video import preprocess_video

pytestmark = pytest.mark.no_interpret

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# As the first checkpoints have it: bounds in pixels by names of their own. Qwen3-Omni's is also that of its audio.
_PUBLISHED: dict[str, Any] = {
    "min_pixels": 3136, "max_pixels": 12845056, "temporal_patch_size": 2, "merge_size": 2,
    "image_processor_type": "Qwen2VLImageProcessor",
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_PUBLISHED, **CLIP, "patch_size": 14, "processor_class": "Qwen2VLProcessor"},
    "qwen2_5_vl": {
        **_PUBLISHED, **CLIP, "patch_size": 14, "processor_class": "Qwen2_5_VLProcessor",
        "size": {"min_pixels": 3136, "max_pixels": 12845056},
    },
    "qwen3_omni_moe": {
        **_PUBLISHED, **HALVES, "patch_size": 16, "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128, "n_fft": 400, "padding_side": "right", "sampling_rate": 16000,
    },
}  # fmt: skip
# Patches down and across of the example (640 x 440 pixels), and of a frame (300 x 200).
GRIDS = {"qwen2_vl": ([32, 46], [14, 22]), "qwen2_5_vl": ([32, 46], [14, 22]), "qwen3_omni_moe": ([28, 40], [12, 18])}


@pytest.fixture(scope="module", params=PUBLISHED)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(family)
    save_full_model(directory, family)
    (directory / "preprocessor_config.json").write_text(json.dumps(PUBLISHED[family]))
    return directory


def report(*arguments: object) -> Any:
    result = vk("encode", *arguments, "--json", *CPU)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_images(family: str, model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.png"
    draw_image(300, 200).save(small)
    found = report(STREET, small, "--model", model, "--compare", "--graph")
    taps = "deepstack_visual_indexes" in load_tower(model).config.to_dict()
    for image, (down, across) in zip(found["images"], GRIDS[family], strict=True):
        tokens = down * across
        assert image["grid_thw"] == [1, down, across] and image["tokens"] == tokens
        assert image["last_hidden_state"] == [tokens, 32] and image["pooler_output"] == [tokens // 4, 24]
        assert image["deepstack_features"] == [[tokens // 4, 24]] * taps
    batch = preprocess([open_image(STREET), open_image(small)], image_processor(model))
    check_differences(found["compare"]["differences"], model, batch)
    check_differences(found["graph"]["differences"], model, batch)
    assert found["parameters"] == sum(each.numel() for each in load_tower(model).parameters())


def test_table(family: str, model: Path) -> None:
    result = vk("encode", STREET, "--model", model, "--compare", *CPU)
    assert result.exit_code == 0, result.output
    taps = family == "qwen3_omni_moe"
    assert ("1 deepstack 280 x 24" in result.stdout) == ("deepstack" in result.stdout) == taps


def test_frames_in_chunks(family: str, model: Path, tmp_path: Path) -> None:
    for number in range(5):
        draw_image(300, 200, number).save(tmp_path / f"frame{number}.png")
    down, across = GRIDS[family][1]
    found = report(tmp_path, "--frames", "--model", model, "--compare", "--chunk-tokens", down * across)
    (video,) = found["images"]
    assert found["frames"] == 5 and video["grid_thw"] == [3, down, across]
    batch = preprocess_video(map(open_image, frame_files(tmp_path)), image_processor(model))
    check_differences(found["compare"]["differences"], model, batch)


@torch.no_grad()
def test_features_are_those_of_the_whole_model(family: str, model: Path) -> None:
    """The weights and the configuration that were read are the model's own: in fp64 all digits but the last agree."""
    pixels, grid = preprocess([open_image(STREET), draw_image(300, 200)], image_processor(model))
    whole = MODELS[family][0].from_pretrained(model, dtype=torch.float64).eval()
    (visual,) = (module for name, module in whole.named_modules() if name.split(".")[-1] == "visual")
    # The frequencies of the rotation are fp32 in every dtype.
    visual.rotary_pos_emb = type(visual.rotary_pos_emb)(visual.config)
    theirs = named_outputs(visual(pixels.double(), grid_thw=grid))
    ours = named_outputs(encode(from_transformers(load_tower(model, torch.float64)), pixels.double(), grid))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, msg=lambda said, name=name: f"{name}: {said}")


def test_settings_without_a_preprocessor_config(family: str, tmp_path: Path) -> None:
    """They are those of the published checkpoints."""
    save_full_model(tmp_path, family)
    alone = image_processor(tmp_path).to_dict()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED[family]))
    published = image_processor(tmp_path).to_dict()
    assert {name: published[name] for name in alone} == alone
    assert alone["patch_size"] == PUBLISHED[family]["patch_size"]
    assert list(alone["image_mean"]) == PUBLISHED[family]["image_mean"]
    assert dict(alone["size"]) == {"shortest_edge": 3136, "longest_edge": 12845056}


def test_pixels_have_the_norm_of_the_checkpoint(family: str, model: Path) -> None:
    """One colour, which resizing leaves as it is."""
    settings, levels = PUBLISHED[family], torch.tensor([10, 128, 255])
    image = draw_image(40, 24)
    image.paste(tuple(levels.tolist()), (0, 0, *image.size))
    pixels, grid = preprocess([image], image_processor(model))
    mean, std = torch.tensor(settings["image_mean"]), torch.tensor(settings["image_std"])
    wanted = ((levels / 255 - mean) / std).repeat_interleave(2 * settings["patch_size"] ** 2)
    torch.testing.assert_close(pixels, wanted.expand(int(grid.prod()), -1))


def test_patches_of_another_size(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 12}')
    said = refused("encode", STREET, "--model", tmp_path, *CPU)
    assert "preprocessor_config.json has patch_size 12, and patch_size of the tower in " in said
