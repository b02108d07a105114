"""Whatever a file holds and however it is called, `vk` ends in one line that names it and exit code 2."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.command.verify import CPU, STREET, draw_image, draw_mode, refused, stored, vk
from torch_ops._core.files import check_stored
from torch_ops.command.inputs import InputError, frame_files, read_frames, read_images
from torch_ops.models.qwen_vl import image_processor, load_tower, open_image

pytestmark = [pytest.mark.no_interpret, pytest.mark.filterwarnings("ignore:::PIL")]

ROOT = Path(__file__).parents[2]
JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2.5, 1e308, 10**30, float("nan"), "", "x", [], [0, 1], [None], {}, {"a": 1},
)  # fmt: skip
fuzz = settings(max_examples=120, deadline=None, derandomize=True, database=None)


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change, with all settings of its processor."""
    directory = tmp_path / "model"
    shutil.copytree(checkpoint, directory)
    (directory / "preprocessor_config.json").write_text(image_processor().to_json_string())
    return directory


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("config.json", {"num_heads": 0}, "num_heads is 0, expected a whole number from 1"),
        ("config.json", {"num_heads": 3}, "hidden_size is 32, expected a multiple of num_heads, 3"),
        ("config.json", {"hidden_act": "foo"}, 'hidden_act is "foo", expected one of gelu, '),
        ("config.json", {"model_type": ["qwen3_vl"]}, "model_type is a list, expected one with a vision tower"),
        ("config.json", {"depth": 10**12}, "depth is 1000000000000, expected"),
        ("config.json", {"in_channels": 4}, "in_channels is 4, expected 3, since images are RGB"),
        ("config.json", {"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta is 0, expected a number"),
        ("preprocessor_config.json", {"merge_size": 0}, "merge_size is 0, expected"),
        ("preprocessor_config.json", {"patch_size": None}, "patch_size is null, expected"),
        ("preprocessor_config.json", {"rescale_factor": "x"}, 'rescale_factor is "x", expected a number above 0'),
        ("preprocessor_config.json", {"image_std": [0.5, 0.0, 0.5]}, "image_std is a list, expected a list of 3"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 9}}, "size has one of shortest_edge and longest_edge"),
        ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, "expected Qwen2VLImageProcessor"),
    ],
)
def test_values_of_settings(name: str, values: dict[str, Any], said: str, model: Path) -> None:
    changed(model / name, **values)
    line = refused("encode", STREET, "--model", model, *CPU)
    assert str(model / name) in line and said in line


@pytest.mark.parametrize(
    ("key", "tower", "values"),
    [("merge_size", "spatial_merge_size", (1, 3, 4, 8)), ("patch_size", "patch_size", (8, 14)),
     ("temporal_patch_size", "temporal_patch_size", (1, 3))],
)  # fmt: skip
def test_settings_of_another_tower(key: str, tower: str, values: tuple[int, ...], model: Path) -> None:
    for value in values:
        changed(model / "preprocessor_config.json", **{key: value})
        line = refused("encode", STREET, "--model", model, *CPU)
        wanted = 16 if key == "patch_size" else 2
        assert f"preprocessor_config.json has {key} {value}, and {tower} of the tower in " in line
        assert f"config.json is {wanted}; take both files from one checkpoint" in line
    (model / "preprocessor_config.json").unlink()
    changed(model / "config.json", patch_size=14)
    said = "without a preprocessor_config.json the processor has patch_size 16, and patch_size of the tower in "
    assert said in refused("encode", STREET, "--model", model, *CPU)


def one_line(file: Path, call: Callable[[], object]) -> bool:
    """Whether it passes; otherwise its ValueError names the file on one line."""
    try:
        call()
    except (ValueError, OSError) as error:
        assert str(file) in str(error) and "\n" not in str(error), error
        return False
    return True


def test_any_value_of_any_key(model: Path) -> None:
    """Where a value passes, a tower is built of it, or its tensors are of other shapes."""
    for name, read in (("config.json", load_tower), ("preprocessor_config.json", image_processor)):
        file = model / name
        kept = json.loads(file.read_text())
        for key in (*kept, "min_pixels", "max_pixels", "rope_theta", "preprocess", "forward", "__class__"):
            passed = []
            for value in JUNK:
                file.write_text(json.dumps({**kept, key: value}))
                passed.append(one_line(model, lambda read=read: read(model)))
            read_at_all = key in kept and key not in ("dtype", "architectures", "transformers_version")
            assert not all(passed) or not read_at_all, f"{key} of {name} may hold anything"
        file.write_text(json.dumps(kept))
        assert one_line(file, lambda read=read: read(model))


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "model.safetensors.index.json"])
def test_files_that_are_no_json_object(name: str, model: Path) -> None:
    file = model / name
    if name.startswith("model"):
        (model / "model.safetensors").unlink()
    contents = (b"", b"\xff\xfe", b"\xef\xbb\xbf{}", b"{", b"[]", b"null", b"[" * 99999, b'{"depth": ' + b"1" * 5000)
    for content in contents:
        file.write_bytes(content)
        assert not one_line(file, lambda: (image_processor(model), load_tower(model))), content
    file.unlink()
    file.mkdir()
    assert "cannot be read: Is a directory" in refused("encode", STREET, "--model", model, *CPU)


@pytest.mark.parametrize("link", ["nowhere", "to itself"])
def test_links_that_lead_nowhere(link: str, model: Path) -> None:
    """A snapshot of the hub is made of links. Settings that were not fetched are not those of the family."""
    for name in ("processor_config.json", "preprocessor_config.json", "model.safetensors", "config.json"):
        file, kept = model / name, model / "kept"
        if file.exists():
            file.rename(kept)
        file.symlink_to("gone" if link == "nowhere" else name)
        line = refused("encode", STREET, "--model", model, *CPU)
        assert f"{file} cannot be read: {'No such file' if link == 'nowhere' else 'Too many levels'}" in line
        file.unlink()
        if kept.exists():
            kept.rename(file)


def test_parts_of_a_processor_config(model: Path) -> None:
    whole = model / "processor_config.json"
    for content, said in (("[]", "holds a list"), ('{"image_processor": 1}', "image_processor is 1, expected a JSON")):
        whole.write_text(content)
        assert f"{whole}" in (line := refused("encode", STREET, "--model", model, *CPU)) and said in line
    whole.write_text('{"image_processor": {"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 2048}}}')
    assert image_processor(model).size["longest_edge"] == 2048


def test_shards_lie_in_the_checkpoint(model: Path) -> None:
    (model / "model.safetensors").rename(model.parent / "outside.safetensors")
    index = model / "model.safetensors.index.json"
    for file in ("../outside.safetensors", str(model.parent / "outside.safetensors"), "", "..", 5, "weights.bin"):
        index.write_text(json.dumps({"weight_map": {"patch_embed.proj.weight": file}}))
        line = refused("encode", STREET, "--model", model, *CPU)
        assert f"{index}: weight_map.patch_embed.proj.weight is " in line and "a safetensors file in its folder" in line


def broken(content: bytes, draws: st.DataObject, reach: int) -> bytes:
    """A file cut somewhere, or with some other bytes among its first ones."""
    if draws.draw(st.booleans()):
        return content[: draws.draw(st.integers(0, len(content) - 1))]
    changed = bytearray(content)
    for _ in range(draws.draw(st.integers(1, 8))):
        changed[draws.draw(st.integers(0, min(reach, len(content)) - 1))] = draws.draw(st.integers(0, 255))
    return bytes(changed)


@given(st.data())
@settings(fuzz, max_examples=40)
def test_damaged_safetensors(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, draws: st.DataObject) -> None:
    directory = tmp_path_factory.getbasetemp() / "damaged"
    directory.mkdir(exist_ok=True)
    shutil.copy(checkpoint / "config.json", directory)
    content = (checkpoint / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    (directory / "model.safetensors").write_bytes(broken(content, draws, header))
    one_line(directory, lambda: load_tower(directory))


@cache
def pictures() -> tuple[bytes, ...]:
    """Files of all formats, and animations."""

    def found() -> Iterator[bytes | None]:
        Image.init()
        for kind, mode in itertools.product(sorted((Image.SAVE.keys() & Image.OPEN.keys()) - {"ICNS"}), ("RGBA", "P")):
            yield stored(draw_mode(mode), kind) or stored(draw_mode("L"), kind)
        for kind in ("GIF", "PNG", "WEBP", "TIFF", "AVIF"):
            if kind in Image.SAVE_ALL:
                yield stored(
                    draw_mode("RGB"), kind, save_all=True, append_images=[draw_mode("RGB", seed) for seed in (1, 2)]
                )

    files = tuple(filter(None, found()))
    assert len(files) > 30, "Pillow writes more formats than that"
    return files


def step(_: str) -> Callable[[int, int], None]:
    return lambda done, total: None


@given(st.data())
@fuzz
def test_damaged_images(tmp_path_factory: pytest.TempPathFactory, draws: st.DataObject) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.img"
    file.write_bytes(broken(draws.draw(st.sampled_from(pictures())), draws, draws.draw(st.sampled_from((64, 10**6)))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
        for read in (read_images, read_frames):
            try:
                read([file], None, step)
            except InputError as error:
                assert str(file) in str(error) and "\n" not in str(error)


def test_pipes_and_devices_are_no_files(model: Path, tmp_path: Path) -> None:
    """To open a pipe waits for a writer, and a link to `/dev/zero` never ends."""
    names = ("config.json", "processor_config.json", "preprocessor_config.json", "model.safetensors")
    for file in (tmp_path / "image.png", *(model / name for name in names), model / "model.safetensors.index.json"):
        kept = file.read_bytes() if file.exists() else None
        file.unlink(missing_ok=True)
        file.symlink_to("/dev/null")
        image = file if file.suffix == ".png" else STREET
        for options in ([], ["--frames"]):
            line = refused("encode", image, "--model", model, *options, *CPU)
            assert line == f"vk: {file} is a pipe or a device; give a file\n"
        file.unlink()
        # Without weights the index is read.
        if kept is not None and file.suffix == ".json":
            file.write_bytes(kept)
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is a pipe or a device; give a file"):
        check_stored(pipe)


def test_animations_that_are_cut(tmp_path: Path) -> None:
    frames = [draw_image(64, 48, seed) for seed in range(5)]
    for kind, share in itertools.product(("gif", "tiff"), (0.25, 0.5)):
        file = tmp_path / f"cut{share}.{kind}"
        frames[0].save(file, save_all=True, append_images=frames[1:])
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])
        line = refused("encode", file, "--frames", *CPU)
        assert f"{file} cannot be decoded (" in line and line.endswith("; give an intact image\n")


def test_each_error_has_its_own_advice(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (1, 500)).save(tmp_path / "line.png")
    assert refused("encode", tmp_path / "line.png", *CPU).endswith("; crop it first\n")
    changed(model / "preprocessor_config.json", do_resize=False)
    Image.new("RGB", (40, 30)).save(tmp_path / "small.png")
    line = refused("encode", tmp_path / "small.png", "--model", model, *CPU)
    assert "small.png (40 x 30 pixels) cannot be encoded: cannot reshape array" in line and "crop" not in line
    assert "cannot be read: file name too long" in refused("encode", tmp_path / ("x" * 300), *CPU)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    line = refused("encode", tmp_path / "small.png", *CPU)
    assert "small.png has too many pixels (" in line and line.endswith("; give a smaller image\n")


NAMES = {
    "a[/b].png": "a[/b].png",
    "photos [final]/x  y.png": "photos [final]/x  y.png",
    ":smile: \\[b].png": ":smile: \\[b].png",
    "new\nline.png": "new\\nline.png",
    "red\x1b[31m\u202e.png": "red\\x1b[31m\\u202e.png",
    os.fsdecode(b"\xff\xfe.png"): "\\udcff\\udcfe.png",
    "é 日本.png": "é 日本.png",
}


def test_names_appear_as_they_are(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    for name, shown in NAMES.items():
        file = Path(name)
        file.parent.mkdir(exist_ok=True)
        file.write_text("no image")
        assert f"vk: {shown} is not an image" in refused("encode", name, *CPU)
        assert f"vk: {shown} is not an image" in refused("encode", name, "--frames", *CPU)
        draw_image(64, 48).save(file, "PNG")
    model = Path("model [b]:smile:")
    model.symlink_to(checkpoint)
    result = vk("encode", *NAMES, "--model", model, "--compare", *CPU)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for shown in NAMES.values():
        assert any(line.startswith(f"{shown}  ") for line in lines), shown
    assert any(line.startswith(f"{model}; ") for line in lines)
    found = json.loads(vk("encode", *NAMES, "--model", model, "--json", *CPU).stdout)
    assert [each["file"] for each in found["images"]] == list(NAMES)


def test_digits_that_are_no_numbers_order_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("²1.png", "²10.png", "²2.png"):
        Path(name).touch()
    assert [file.name for file in frame_files(Path("*.png"))] == ["²1.png", "²2.png", "²10.png"]


def test_an_image_of_one_frame_has_no_seek(tmp_path: Path) -> None:
    content = stored(draw_mode("F"), "SPIDER")
    assert content is not None
    (tmp_path / "x.spi").write_bytes(content)
    assert read_frames([tmp_path / "x.spi"], None, step).frames == 1
    assert open_image(tmp_path / "x.spi").size == (12, 10)


def test_a_variable_that_is_refused() -> None:
    """The console script catches it, since every import of `torch_ops` raises."""
    assert 'vk = "vk_command:main"' in (ROOT / "pyproject.toml").read_text()
    command = [sys.executable, str(ROOT / "vk_command.py"), "--help"]
    environment = {**os.environ, "VK_PATH": "odd", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "vk: VK_PATH is 'odd', expected one of auto, hopper, portable\n"
