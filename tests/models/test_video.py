"""Videos: frames as patches of two, each pair a segment of its own, chunks of them, and `vk encode --frames`."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from compile_tests.models import draw_pixels, named_outputs, tiny_tower
from tests.command.verify import CPU, STREET, draw_image, refused, vk
from tests.models.verify import check_differences
from torch_ops.command.inputs import frame_files
from torch_ops.models import from_transformers, vision_metadata
from torch_ops.models.qwen_vl import image_processor, open_frames, open_image, preprocess
from torch_ops.models.video import preprocess_video
from torch_ops.models.vision_metadata import _cached_metadata

pytestmark = pytest.mark.no_interpret


@pytest.mark.parametrize("count", (1, 2, 5))
def test_patches_are_those_of_transformers(count: int) -> None:
    """Resizing and norming are those of an image; how Transformers' video processor cuts the result is compared."""
    frames = [draw_image(256, 320, seed) for seed in range(count)]  # needs no resizing
    pixel_values, grid = preprocess_video(iter(frames))
    normed = [
        (torch.tensor(list(frame.tobytes())).reshape(320, 256, 3).permute(2, 0, 1) / 127.5) - 1 for frame in frames
    ]
    expected, *sizes = Qwen3VLVideoProcessor.patchify(
        None, videos=torch.stack(normed)[None], patch_size=16, merge_size=2, temporal_patch_size=2
    )
    assert grid.tolist() == [sizes] == [[(count + 1) // 2, 20, 16]]
    torch.testing.assert_close(pixel_values, expected[0])
    if count == 2:
        # Not by chance: a frame is not the other.
        assert not torch.allclose(pixel_values, preprocess(frames[:1])[0])
    if count == 1:
        assert torch.equal(pixel_values, preprocess(frames)[0])


def test_other_depths_of_a_patch() -> None:
    processor = image_processor()
    processor.temporal_patch_size = 3
    frames = [draw_image(256, 256, seed) for seed in range(4)]
    pixel_values, grid = preprocess_video(frames, processor)
    assert grid.tolist() == [[2, 16, 16]]
    alone = [preprocess([frame])[0].view(256, 3, 2, 256)[:, :, 0] for frame in frames]
    patches = pixel_values.view(2, 256, 3, 3, 256)
    for place, frame in enumerate((0, 1, 2, 3, 3, 3)):
        assert torch.equal(patches[place // 3, :, :, place % 3], alone[frame])


def test_frames_that_are_refused() -> None:
    with pytest.raises(ValueError, match="frames must hold at least one image"):
        preprocess_video([])
    with pytest.raises(ValueError, match="of one size: 64 x 32 pixels after 32 x 64"):
        preprocess_video([draw_image(32, 64), draw_image(32, 64), draw_image(64, 32)])


@pytest.mark.parametrize("frames", (16, 64))
@pytest.mark.parametrize("model_type", ("qwen2_5_vl_vision", "qwen3_vl_vision"))
@torch.no_grad()
def test_pairs_of_frames_are_segments_of_their_own(model_type: str, frames: int) -> None:
    encoder = from_transformers(tiny_tower(model_type, torch.float64))
    pairs, rows = frames // 2, 8 * 10
    grid = torch.tensor([[pairs, 8, 10]])
    pixels = draw_pixels(encoder, grid, torch.float64)
    assert vision_metadata(grid, encoder.sizes).cu_seqlens.tolist() == [rows * i for i in range(pairs + 1)]
    video = encoder(pixels, grid)
    for pair in (0, 1, pairs - 1):
        alone = encoder(pixels[pair * rows : (pair + 1) * rows], torch.tensor([[1, 8, 10]]))
        for name, ours in named_outputs(video).items():
            wanted = named_outputs(alone)[name]
            torch.testing.assert_close(ours[pair * len(wanted) : (pair + 1) * len(wanted)], wanted)
    # Another last pair leaves all others as they were.
    pixels[-rows:] *= -1
    changed = named_outputs(encoder(pixels, grid))
    for name, ours in named_outputs(video).items():
        before = len(ours) - len(ours) // pairs
        torch.testing.assert_close(changed[name][:before], ours[:before])
        assert (changed[name][before:] - ours[before:]).abs().max() > 0.1


@pytest.mark.parametrize("chunk_tokens", (1, 200, 4096))
@torch.no_grad()
def test_chunks_of_a_long_video(chunk_tokens: int) -> None:
    encoder = from_transformers(tiny_tower("qwen3_vl_vision", torch.float64))
    grid = torch.tensor([[32, 6, 8]])
    pixels = draw_pixels(encoder, grid, torch.float64)
    whole, chunks = (named_outputs(encoder(pixels, grid, chunk_tokens=most)) for most in (None, chunk_tokens))
    for name, tensor in whole.items():
        torch.testing.assert_close(chunks[name], tensor)


class Living(TorchDispatchMode):
    """Counts the bytes of storages that operators return, as long as they live; nothing is remembered within."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def _freed(self, storage: int, size: int) -> None:
        self._known.remove(storage)
        self.bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            storage = result.untyped_storage() if isinstance(result, Tensor) else None
            if storage is not None and storage._cdata not in self._known | given:
                self._known.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return results


def peak_on_a_cpu(encoder: Any, *args: Any, **options: Any) -> tuple[int, dict[str, Tensor]]:
    """Bytes of tensors, and the features."""
    with Living() as living:
        features = named_outputs(encoder(*args, **options))
    return living.peak, features


def peak_on_a_gpu(encoder: Any, *args: Any, **options: Any) -> tuple[int, dict[str, Tensor]]:
    """The requested bytes; the allocator's blocks are larger by up to 1 MB."""
    encoder(*args, **options)
    _cached_metadata.cache_clear()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    features = named_outputs(encoder(*args, **options))
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, features


@pytest.mark.parametrize("where", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
@torch.no_grad()
def test_memory_of_chunks_does_not_grow_with_the_video(where: str) -> None:
    encoder = from_transformers(tiny_tower("qwen3_vl_vision", torch.bfloat16, patch_size=16)).to(where)

    def peak(frames: int, chunk_tokens: int | None) -> tuple[int, int]:
        """Beyond the pixels, and what the features take of it."""
        grid = torch.tensor([[frames // 2, 16, 16]])
        pixels = draw_pixels(encoder, grid, torch.bfloat16).to(where)
        measure = peak_on_a_gpu if where == "cuda" else peak_on_a_cpu
        most, features = measure(encoder, pixels, grid, chunk_tokens=chunk_tokens)
        return most, sum(tensor.nbytes for tensor in features.values())

    (short, few), (long, many), (whole, _) = peak(16, 1024), peak(64, 1024), peak(64, None)
    assert long - short == many - few, "it grows by the features alone"
    assert whole > 1.5 * long


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Nine frames, named so that they are out of order as text, beside what is no frame."""
    folder = tmp_path / "clip"
    folder.mkdir()
    for number in range(3, 12):
        draw_image(300, 200, number).save(folder / f"frame{number}.png")
    (folder / "notes.txt").write_text("no frame")
    (folder / ".hidden.png").write_text("no frame")
    return folder


def test_files_of_frames(clip: Path, tmp_path: Path) -> None:
    names = [f"frame{number}.png" for number in range(3, 12)]
    assert [file.name for file in frame_files(clip)] == names
    assert [file.name for file in frame_files(clip / "frame*.png")] == names
    assert [file.name for file in frame_files(clip / "**")] == names
    assert [file.name for file in frame_files(clip / "frame[45].png")] == names[1:3]
    # Files that are named are taken as they are, whatever they are called.
    odd = tmp_path / "odd[1].png"
    odd.write_text("")
    assert frame_files(odd) == [odd] and frame_files(clip / "notes.txt") == [clip / "notes.txt"]


def animate(path: Path, frames: int, **options: Any) -> list[Image.Image]:
    first, *others = [draw_image(300, 200, number) for number in range(frames)]
    first.save(path, save_all=True, append_images=others, **options)
    return [first, *others]


@pytest.mark.parametrize("suffix", ("png", "tiff", "webp"))
def test_frames_of_an_animation(tmp_path: Path, suffix: str) -> None:
    options = {"lossless": True} if suffix == "webp" else {}
    drawn = animate(tmp_path / f"anim.{suffix}", 4, **options)
    read = list(open_frames(tmp_path / f"anim.{suffix}"))
    assert [frame.tobytes() for frame in read] == [frame.tobytes() for frame in drawn]
    assert open_image(tmp_path / f"anim.{suffix}").tobytes() == drawn[0].tobytes()


def test_a_picture_before_an_animation_is_no_frame(tmp_path: Path) -> None:
    drawn = animate(tmp_path / "anim.png", 3, default_image=True)
    assert [frame.tobytes() for frame in open_frames(tmp_path / "anim.png")] == [each.tobytes() for each in drawn[1:]]


def test_other_views_of_a_photo_are_no_frames(tmp_path: Path) -> None:
    animate(tmp_path / "photo.mpo", 2, format="MPO")
    with Image.open(tmp_path / "photo.mpo") as image:
        assert getattr(image, "n_frames", 1) == 2
    assert len(list(open_frames(tmp_path / "photo.mpo"))) == 1


def test_frames_that_cannot_be_read(tmp_path: Path) -> None:
    animate(tmp_path / "anim.png", 4)
    whole = (tmp_path / "anim.png").read_bytes()
    (tmp_path / "anim.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"anim\.png cannot be decoded"):
        list(open_frames(tmp_path / "anim.png"))


def report(*arguments: object) -> Any:
    result = vk("encode", *arguments, "--json", *CPU)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def video_of(files: list[Path]) -> tuple[Tensor, Tensor]:
    return preprocess_video(map(open_image, files))


def test_encode_frames(clip: Path, checkpoint: Path) -> None:
    from_folder = report(clip, "--frames", "--model", checkpoint, "--compare")
    (video,) = from_folder["images"]
    assert from_folder["frames"] == 9 and from_folder["tokens"] == 5 * 14 * 20
    assert video["file"] == f"{clip / 'frame3.png'} .. frame11.png"
    assert (video["size"], video["grid_thw"]) == ([300, 200], [5, 14, 20])
    assert video["pooler_output"] == [350, 24] and video["deepstack_features"] == [[350, 24]]
    files = sorted(clip.glob("frame*.png"), key=lambda file: int(file.stem.removeprefix("frame")))
    check_differences(from_folder["compare"]["differences"], checkpoint, video_of(files))
    assert report(*files, "--frames", "--model", checkpoint)["images"][0]["grid_thw"] == [5, 14, 20]
    assert len(report(*files, "--model", checkpoint)["images"]) == 9


def test_encode_frames_of_an_animation(tmp_path: Path, checkpoint: Path) -> None:
    animate(tmp_path / "anim.gif", 5)
    found = report(tmp_path / "anim.gif", "--frames", "--model", checkpoint)
    assert found["frames"] == 5 and found["images"][0]["grid_thw"] == [3, 14, 20]
    animate(tmp_path / "still.gif", 1)
    result = vk("encode", tmp_path / "still.gif", "--frames", "--model", checkpoint, *CPU)
    assert "a video of 1 frame, 280 tokens" in result.stdout


def test_encode_frames_in_chunks(clip: Path, checkpoint: Path) -> None:
    arguments = ("encode", clip, "--frames", "--model", checkpoint, "--compare", "--chunk-tokens", 600, *CPU)
    result = vk(*arguments)
    assert result.exit_code == 0, result.output
    assert "a video of 9 frames, 1400 tokens in chunks of at most 600, or of a frame: " in result.stdout
    chunked = json.loads(vk(*arguments, "--json").stdout)
    assert chunked["chunk_tokens"] == 600
    check_differences(chunked["compare"]["differences"], checkpoint, video_of(frame_files(clip)))


def test_encode_graph_on_a_cpu(checkpoint: Path, clip: Path) -> None:
    """There the call over the runner's static tensors is timed, and said to be no graph."""
    arguments = ("encode", STREET, clip / "frame3.png", "--model", checkpoint, "--graph", *CPU)
    graph = json.loads(vk(*arguments, "--json").stdout)["graph"]
    assert (graph["captured"], graph["speedup"]) == (False, None)
    assert graph["seconds"] > 0 and graph["warmup_seconds"] > 0
    assert graph["differences"].keys() == {"last_hidden_state", "pooler_output", "deepstack_features[0]"}
    check_differences(
        graph["differences"], checkpoint, preprocess([open_image(STREET), open_image(clip / "frame3.png")])
    )
    said = vk(*arguments).stdout
    assert "no CUDA graph on a CPU; the same call over the runner's static tensors: " in said
    assert report(STREET, "--model", checkpoint)["graph"] is None


@pytest.mark.gpu
def test_encode_graph_on_a_gpu(checkpoint: Path, clip: Path) -> None:
    result = vk("encode", clip, "--frames", "--model", checkpoint, "--graph", "--device", "cuda", "--json")
    assert result.exit_code == 0, result.output
    graph = json.loads(result.stdout)["graph"]
    assert graph["captured"] is True and graph["speedup"] > 0
    check_differences(graph["differences"], checkpoint, video_of(frame_files(clip)), "cuda", torch.bfloat16)


def test_frames_that_vk_encode_refuses(clip: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    draw_image(200, 300).save(clip / "frame7.png")
    for paths, said in (
        ([empty], f"{empty} holds no image file; give a folder of frames"),
        ([empty / "*.png"], f"{empty}/*.png matches no image file; give the files, a folder or a pattern"),
        ([clip], "frame7.png (200 x 300 pixels) cannot be encoded: frames of a video must be of one size: 200 x 300"),
        ([clip / "frame3.png", clip / "none.png"], "none.png does not exist"),
        ([clip / "notes.txt"], "notes.txt is not an image"),
    ):
        assert said in refused("encode", *paths, "--frames", *CPU)
    Image.new("RGB", (1, 500)).save(empty / "line.png")
    assert "line.png (1 x 500 pixels) cannot be encoded: absolute aspect" in refused("encode", empty, "--frames")
    assert "is a directory; give the images in it one by one" in refused("encode", clip)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--graph", "--compile"], "--graph and --compile exclude each other"),
        (["--chunk-tokens", "64", "--compile"], "--chunk-tokens is for plain calls: leave out --graph and --compile"),
        (["--chunk-tokens", "64", "--graph"], "--chunk-tokens is for plain calls"),
        (["--chunk-tokens", "0"], "'--chunk-tokens'"),
    ],
)
def test_options_that_exclude_each_other(options: list[str], message: str) -> None:
    assert message in refused("encode", STREET, *options)
