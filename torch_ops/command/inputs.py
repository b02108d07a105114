"""The inputs of ``vk encode``: image files, or the frames of a video, as pixels and their grid."""

import glob
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

Advance = Callable[[int, int], None]
Step = Callable[[str], Advance]


class InputError(Exception):
    """An error that the user can fix, in one line; ``exit_code`` is the command's."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def format_message(self) -> str:
        """The line, by the name that Typer's own errors have for it."""
        return str(self)


@contextmanager
def input_errors() -> Iterator[None]:
    """Show an error of the user's files or options as one line, without the warnings of Pillow that lead up to it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, OSError, ImportError) as error:
        raise InputError(str(error)) from error


@dataclass
class _Current:
    """The image that is being processed."""

    path: Path
    size: tuple[int, int] = (0, 0)


@contextmanager
def _encodable(image: _Current) -> Iterator[None]:
    """Blame an image for whatever the processor raises: its sizes fit no array, or no memory."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        width, height = image.size
        # Transformers refuses images that are longer.
        fix = "; crop it first" if max(width, height) > 200 * min(width, height) else ""
        said = f"{image.path} ({width} x {height} pixels) cannot be encoded: {' '.join(str(error).split())}{fix}"
        raise InputError(said) from error


@dataclass(frozen=True)
class Inputs:
    """Pixels of all images, or of one video; a name, a size in pixels and a row of the grid for each."""

    pixel_values: torch.Tensor
    grid: torch.Tensor
    names: list[str]
    sizes: list[tuple[int, int]]
    frames: int | None = None  # of a video


def read_images(paths: list[Path], model: Path | None, step: Step) -> Inputs:
    from torch_ops.models.qwen_vl import image_processor, open_image, preprocess

    advance = step("reading images")
    batches, sizes = [], []
    with input_errors():
        processor = image_processor(model)
    for done, path in enumerate(paths, start=1):
        with input_errors():
            image = open_image(path)
        with _encodable(_Current(path, image.size)):
            batches.append(preprocess([image], processor))
        sizes.append(image.size)
        advance(done, len(paths))
    pixel_values, grids = zip(*batches, strict=True)
    return Inputs(torch.cat(pixel_values), torch.cat(grids), [str(path) for path in paths], sizes)


def read_frames(paths: list[Path], model: Path | None, step: Step) -> Inputs:
    """One video of these files and of those in folders and patterns, in this order; of an animation all frames."""
    from torch_ops.models.qwen_vl import image_processor, open_frames
    from torch_ops.models.video import preprocess_video

    advance = step("reading frames")
    with input_errors():
        files = [file for path in paths for file in frame_files(path)]
        processor = image_processor(model)
    current, count = _Current(files[0]), 0

    def frames() -> Iterator[Image.Image]:
        nonlocal count
        for done, current.path in enumerate(files):
            advance(done, len(files))
            with input_errors():
                for image in open_frames(current.path):
                    current.size, count = image.size, count + 1
                    yield image

    with _encodable(current):
        pixel_values, grid = preprocess_video(frames(), processor)
    name = str(files[0]) if len(files) == 1 else f"{files[0]} .. {files[-1].name}"
    return Inputs(pixel_values, grid, [name], [current.size], count)


def frame_files(path: Path) -> list[Path]:
    """The file itself; the images, by their suffix, of a folder or a pattern, both in the order of their names.

    Numbers count by their value: frame2 comes before frame10. Raises ValueError where there is no image.
    """
    if path.is_dir():
        files = [file for file in path.iterdir() if not file.name.startswith(".")]
        missing = "holds no image file; give a folder of frames, PNG, JPEG or WebP"
    elif glob.has_magic(str(path)) and not path.exists():
        files = [Path(name) for name in glob.glob(str(path), recursive=True)]
        missing = "matches no image file; give the files, a folder or a pattern of frames"
    else:
        return [path]
    kinds = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    if not (files := [file for file in files if file.suffix.lower() in kinds and file.is_file()]):
        raise ValueError(f"{path} {missing}")
    return sorted(files, key=_by_numbers)


def _by_numbers(file: Path) -> tuple[Any, ...]:
    parts = re.split(r"([0-9]+)", str(file))
    return *((int(part) if place % 2 else 0, part) for place, part in enumerate(parts)), str(file)
