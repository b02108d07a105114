"""The vision part of a local Transformers checkpoint, read without loading anything else."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from torch_ops.models.families import FAMILIES, vision_config_of

# The models that hold a tower of one of the FAMILIES; Qwen3-Omni's thinker is also saved without the rest.
LOADABLE = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_5",
    "qwen3_5_moe",
)  # fmt: skip

# Where the vision tensors of a checkpoint live; the last one is a tower saved on its own.
_PREFIXES = ("model.visual.", "visual.", "thinker.visual.", "")

# Parameter name -> (file, name in that file).
Places = dict[str, tuple[Path, str]]


def vision_config(directory: Path) -> PretrainedConfig:
    """The configuration of the vision tower in ``directory``.

    Raises FileNotFoundError where ``config.json`` is missing, ValueError where it belongs to a
    model without a vision tower of the `FAMILIES`.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory; give a local Transformers checkpoint directory")
    values = _json(directory / "config.json")
    model_type = values.pop("model_type", None)
    alone = model_type in FAMILIES
    if not alone and model_type not in LOADABLE:
        raise ValueError(
            f"{directory} has no Qwen-VL vision tower: its model_type is {model_type!r}, "
            f"supported are {', '.join(LOADABLE)}"
        )
    holder = values.get("thinker_config") if model_type == "qwen3_omni_moe" else values
    vision = holder.get("vision_config") if isinstance(holder, dict) else None
    if not alone and not isinstance(vision, dict):
        raise ValueError(
            f"{directory} has no vision tower: its config.json holds no vision_config; "
            f"give the whole checkpoint, not its language model"
        )
    if isinstance(vision, dict) and vision.get("model_type") == model_type:
        # The first checkpoints call the tower by the name of the model, which not every Transformers puts right.
        del vision["model_type"]
    try:
        config = AutoConfig.for_model(str(model_type), **values)
    except Exception as error:  # the strict configuration classes raise their own kinds
        raise ValueError(f"{directory / 'config.json'} is not usable: {error}") from error
    return vision_config_of(config)


def vision_places(directory: Path) -> Places:
    """Return where each tensor of the vision tower in ``directory`` is stored.

    Raises FileNotFoundError if there is no safetensors file or a needed shard is missing. Raises ValueError if a file
    is damaged or no tensor belongs to a vision tower.
    """
    files = _stored(directory)
    for prefix in _PREFIXES:
        if f"{prefix}patch_embed.proj.weight" in files:
            places = {
                name.removeprefix(prefix): (file, name) for name, file in files.items() if name.startswith(prefix)
            }
            break
    else:
        raise ValueError(
            f"{directory} has no vision tower: no tensor is named model.visual.*, visual.* or thinker.visual.*; "
            f"give the whole checkpoint, not its language model"
        )
    for file in sorted({file for file, _ in places.values()}):
        if not file.is_file():
            raise FileNotFoundError(f"{directory} lacks {file.name}, which holds vision tensors")
    return places


def read_tensors(
    directory: Path, places: Places, shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the tensors named in ``shapes``, one at a time, on the CPU, file by file.

    Raises ValueError, before anything is read, where ``places`` and ``shapes`` differ in names, and
    for a tensor of another shape or of no floating-point dtype.
    """
    for what, names in (
        ("lacks", shapes.keys() - places.keys()),
        ("also holds", places.keys() - shapes.keys()),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"{directory} does not match its config.json: its vision tower {what} "
                f"{', '.join(sorted(names)[:3])}{more}"
            )
    for file in sorted({file for file, _ in places.values()}):
        try:
            with safe_open(file, framework="pt") as stored:
                for key, (where, name) in places.items():
                    if where == file:
                        yield key, _checked(file, name, stored.get_tensor(name), shapes[key])
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}") from error


def _checked(file: Path, name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if tensor.shape != shape or not tensor.is_floating_point():
        raise ValueError(
            f"{file}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
            f"expected a floating-point tensor of shape {tuple(shape)}"
        )
    return tensor


def _stored(directory: Path) -> dict[str, Path]:
    single = directory / "model.safetensors"
    if single.is_file():
        try:
            with safe_open(single, framework="pt") as stored:
                return dict.fromkeys(stored.keys(), single)
        except SafetensorError as error:
            raise ValueError(f"{single} is damaged: {error}") from error
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        raise FileNotFoundError(
            f"{directory} holds neither model.safetensors nor model.safetensors.index.json; "
            f"other weight formats are not read"
        )
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} holds no weight_map")
    return {name: directory / str(file) for name, file in weight_map.items()}


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} holds no {file.name}; give a local Transformers checkpoint directory")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}, expected a JSON object")
    return values
