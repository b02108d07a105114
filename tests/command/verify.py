"""The vk command as the tests call it, and images for it."""

from pathlib import Path
from typing import Any

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
