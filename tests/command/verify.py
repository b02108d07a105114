"""The vk command as the tests call it, and images for it."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from typer.testing import CliRunner

from torch_ops.command import app as cli

STREET = Path(__file__).parents[2] / "examples" / "street.png"
CPU = ["--device", "cpu", "--repeat", "1"]


def vk(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refused(*arguments: object, code: int = 2) -> str:
    """The one line that `vk` refuses these arguments with."""
    result = vk(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("vk: ") and result.stderr.endswith("\n")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def draw_image(width: int, height: int, seed: int = 0) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def draw_mode(mode: str, seed: int = 0, size: tuple[int, int] = (12, 10)) -> Image.Image:
    """Random values of all bits; in halves of an image that is transparent nothing shows."""
    generator = np.random.default_rng(seed)
    width, height = size
    if mode == "F":
        return Image.fromarray(generator.uniform(-50, 400, (height, width)).astype(np.float32))
    if mode in ("I", "I;16"):
        levels = generator.integers(0, 600, (height, width))
        return Image.fromarray(levels.astype(np.int32 if mode == "I" else np.uint16))
    raw = Image.new(mode, size).tobytes()
    return Image.frombytes(mode, size, generator.integers(0, 256, len(raw), dtype=np.uint8).tobytes())


def stored(image: Image.Image, kind: str, **options: Any) -> bytes | None:
    """The file of an image; None for a format that Pillow cannot write it in, or cannot open again."""
    file = io.BytesIO()
    try:
        image.save(file, kind, **options)
        with Image.open(io.BytesIO(file.getvalue())) as again:
            again.load()
    except Exception:  # a format's plugin may refuse a mode in any way
        return None
    return file.getvalue()
