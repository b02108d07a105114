"""Pixels of image files are those of Transformers' processor on the same file, whatever Pillow opens."""

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL
import pytest
import torch
import transformers
from PIL import Image, ImageOps, ImageSequence

from tests.command.verify import draw_mode, stored
from torch_ops.command.inputs import read_frames, read_images
from torch_ops.models.qwen_vl import image_processor, open_frames, open_image, preprocess

pytestmark = [pytest.mark.no_interpret, pytest.mark.filterwarnings("ignore::DeprecationWarning:PIL")]

MODES = (
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "I;16",
    "F",
)
ORIENTATION = 0x0112
composites = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="Transformers before 5.23 drops transparency",
)


def transparent() -> Iterator[tuple[str, Image.Image, dict[str, Any]]]:
    """Images whose transparency is an entry beside their pixels, and how they are stored."""
    yield "PNG", draw_mode("P"), {"transparency": bytes(range(0, 250, 2))}
    yield "PNG", draw_mode("P"), {"transparency": draw_mode("P").getpixel((0, 0))}
    yield "GIF", draw_mode("P"), {"transparency": draw_mode("P").getpixel((3, 0))}
    yield "PNG", draw_mode("RGB"), {"transparency": draw_mode("RGB").getpixel((2, 1))}
    yield "PNG", draw_mode("L"), {"transparency": draw_mode("L").getpixel((2, 1))}
    yield "PNG", draw_mode("1"), {"transparency": 0}
    yield "PNG", draw_mode("I;16"), {"transparency": draw_mode("I;16").getpixel((0, 0))}


def files() -> Iterator[tuple[str, bytes]]:
    """Modes in formats, with all orientations of the formats that store one."""
    Image.init()
    # Icons of a Mac are written in a dozen sizes, which takes a second.
    for kind, mode in itertools.product(sorted((Image.SAVE.keys() & Image.OPEN.keys()) - {"ICNS"}), MODES):
        if found := stored(draw_mode(mode), kind):
            yield f"{mode} {kind}", found
    for number, (kind, image, options) in enumerate(transparent()):
        found = stored(image, kind, **options)
        assert found is not None
        yield f"{image.mode} {kind} {number}", found
    for kind, mode, turn in itertools.product(("PNG", "WEBP", "TIFF", "JPEG"), ("RGBA", "RGB", "P"), range(10)):
        exif = Image.Exif()
        exif[ORIENTATION] = turn
        if found := stored(draw_mode(mode), kind, exif=exif):
            yield f"{mode} {kind} turned {turn}", found


@pytest.fixture(scope="module")
def small() -> Any:
    """A processor that enlarges little, and so is quick."""
    processor = image_processor()
    processor.size["shortest_edge"] = 32 * 32
    return processor


def test_pixels_are_those_of_transformers(tmp_path: Path, small: Any) -> None:
    path, seen = tmp_path / "image", set()
    for name, content in files():
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about palettes
            with Image.open(path) as image:
                seen.add((image.mode, image.format))
                theirs = small(images=ImageOps.exif_transpose(image), return_tensors="pt")
            opened = open_image(path)
            assert opened.mode == "RGB", name
            pixels, grid = preprocess([opened], small)
            assert torch.equal(grid, theirs["image_grid_thw"]), name
            assert torch.equal(pixels, theirs["pixel_values"]), name
            assert next(open_frames(path)).tobytes() == opened.tobytes(), name
    assert {mode for mode, _ in seen} >= {"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "LAB", "I", "I;16", "F"}
    assert len({kind for _, kind in seen}) > 10


@composites
def test_transparency_lies_on_white(tmp_path: Path) -> None:
    for number, image in enumerate(
        (
            Image.new("RGBA", (32, 32), (0, 0, 0, 0)),
            Image.new("LA", (32, 32), (0, 0)),
            Image.new("RGBA", (32, 32), (0, 0, 0, 0)).quantize(2),
        )
    ):
        for kind in ("png", "webp", "tiff") if image.mode == "RGBA" else ("png",):
            path = tmp_path / f"{number}.{kind}"
            image.save(path)
            assert open_image(path).getextrema() == ((255, 255),) * 3
            for read in (read_images, read_frames):
                assert read([path], None, lambda _: lambda done, total: None).pixel_values.unique().tolist() == [1.0]
    half = Image.new("RGBA", (32, 32), (0, 0, 0, 127))
    half.save(tmp_path / "half.png")
    assert open_image(tmp_path / "half.png").getpixel((0, 0)) == (128, 128, 128)


def animations() -> Iterator[tuple[str, dict[str, Any], list[Image.Image]]]:
    """Frames that cover a part, replace or restore what is below, and show it through."""
    for mode, disposal in itertools.product(("P", "RGBA", "L"), range(4)):
        yield "GIF", {"disposal": disposal, "transparency": 3}, [draw_mode(mode, seed) for seed in range(4)]
    for mode, disposal, blend in itertools.product(("RGBA", "RGB"), range(3), range(2)):
        yield "PNG", {"disposal": disposal, "blend": blend}, [draw_mode(mode, seed) for seed in range(4)]
    for mode in ("RGBA", "RGB"):
        yield "WEBP", {"lossless": True, "background": (9, 9, 9, 9)}, [draw_mode(mode, seed) for seed in range(3)]
    # Pillow before 13 keeps the palette of one page of a TIFF for the next, which has none, and cannot read it.
    left_out = ("La", "RGBa", "HSV", *(("P", "PA") if int(PIL.__version__.split(".")[0]) < 13 else ()))
    modes = [mode for mode in MODES if mode not in left_out]
    yield "TIFF", {}, [draw_mode(mode, 1, (12 + place, 9)) for place, mode in enumerate(modes)]


def test_frames_are_those_of_transformers(tmp_path: Path, small: Any) -> None:
    for number, (kind, options, drawn) in enumerate(animations()):
        path = tmp_path / f"{number}.{kind.lower()}"
        if kind in ("GIF", "PNG"):  # a hole that shows the frame before
            for place, frame in enumerate(drawn[1:]):
                frame.paste(drawn[0].getpixel((place, place)), (0, 0, 4 + place, 5))
        drawn[0].save(path, save_all=True, append_images=drawn[1:], **options)
        with Image.open(path) as image:
            theirs = [small(images=frame.copy(), return_tensors="pt") for frame in ImageSequence.Iterator(image)]
        ours = [preprocess([frame], small)[0] for frame in open_frames(path)]
        assert len(ours) == len(theirs) > 1, path
        for place, pixels in enumerate(ours):
            assert torch.equal(pixels, theirs[place]["pixel_values"]), (kind, options, place)
