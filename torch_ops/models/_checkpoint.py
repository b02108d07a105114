"""The vision part of a local Transformers checkpoint, read without loading anything else."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from torch_ops._core.files import check_stored
from torch_ops.models._files import (
    NUMBER,
    POSITIVE,
    check_values,
    is_there,
    listed,
    one_of,
    parsing,
    read_json,
    reason,
    refuse_value,
    whole,
)
from torch_ops.models.families import ACTIVATIONS, FAMILIES

# The models that hold a tower, and its key in FAMILIES; Qwen3-Omni's thinker is also saved without the rest.
LOADABLE = {
    "qwen2_vl": "qwen2_vl_vision",
    "qwen2_5_vl": "qwen2_5_vl_vision",
    "qwen3_vl": "qwen3_vl_vision",
    "qwen3_vl_moe": "qwen3_vl_moe_vision",
    "qwen3_omni_moe": "qwen3_omni_moe_vision_encoder",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_vision_encoder",
    "qwen3_5": "qwen3_5_vision",
    "qwen3_5_moe": "qwen3_5_moe_vision",
}

# Numbers that a tower is built from. Transformers checks their types alone, and builds 2^40 layers if asked to.
_LAYERS = whole(1, 1024)
_INDEXES = listed(whole(0, 1023))
_RULES = {
    "depth": _LAYERS, "num_hidden_layers": _LAYERS, "num_heads": _LAYERS, "num_attention_heads": _LAYERS,
    "hidden_size": whole(1), "embed_dim": whole(1), "intermediate_size": whole(1), "out_hidden_size": whole(1),
    "mlp_ratio": POSITIVE, "hidden_act": one_of(*ACTIVATIONS), "in_channels": whole(1, 1024),
    "patch_size": whole(1, 1024), "spatial_merge_size": whole(1, 64), "temporal_patch_size": whole(1, 64),
    "num_position_embeddings": whole(1), "window_size": whole(1), "fullatt_block_indexes": _INDEXES,
    "deepstack_visual_indexes": _INDEXES, "tokens_per_second": NUMBER, "initializer_range": NUMBER,
    "rope_theta": POSITIVE, "rope_type": one_of("axial", "default"),
}  # fmt: skip

# Where the vision tensors of a checkpoint live; the last one is a tower saved on its own.
_PREFIXES = ("model.visual.", "visual.", "thinker.visual.", "")

# Parameter name -> (file, name in that file).
Places = dict[str, tuple[Path, str]]


def vision_config(directory: Path) -> PretrainedConfig:
    """The configuration of the vision tower in ``directory``.

    Raises FileNotFoundError where ``config.json`` is missing. Raises ValueError for a model without a vision tower of
    the `FAMILIES` and for values that no tower has; the message names file and key.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory; give a local Transformers checkpoint directory")
    file = directory / "config.json"
    if not is_there(file):
        raise FileNotFoundError(f"{directory} holds no {file.name}; give a local Transformers checkpoint directory")
    values = read_json(file)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in (*FAMILIES, *LOADABLE):
        refuse_value(file, "model_type", model_type, f"one with a vision tower: {', '.join(LOADABLE)}")
    if model_type in FAMILIES:
        return _tower_config(file, model_type, values, "")
    within = ["thinker_config"] * (model_type == "qwen3_omni_moe") + ["vision_config"]
    inner: Any = values
    for key in within:
        inner = inner.get(key) if isinstance(inner, dict) else None
    if not isinstance(inner, dict):
        raise ValueError(
            f"{directory} has no vision tower: its config.json holds no {within[-1]}; "
            f"give the whole checkpoint, not its language model"
        )
    return _tower_config(file, LOADABLE[model_type], inner, f"{'.'.join(within)}.")


def _tower_config(file: Path, key: str, values: dict[str, Any], within: str) -> PretrainedConfig:
    """The configuration of a tower from its JSON object, of which ``within`` is the path in the file.

    Only the fields that its class declares are taken. Any other key would become an attribute, even a method's.
    """
    family = FAMILIES[key]
    kind = family.tower_class().config_class
    check_values(file, values, _RULES, within)
    known = (*kind.__annotations__, *kind.attribute_map, "rope_theta")
    own = {name: value for name, value in values.items() if name in known}
    if (rope := own.pop("rope_parameters", None)) is not None:
        if not isinstance(rope, dict):
            refuse_value(file, f"{within}rope_parameters", rope, "an object")
        check_values(file, rope, _RULES, f"{within}rope_parameters.")
        own["rope_parameters"] = {name: rope[name] for name in ("rope_theta", "rope_type") if name in rope}
    with parsing(file):
        config = kind(**own)
    if (width := getattr(config, family.width)) % config.num_heads:
        refuse_value(file, f"{within}{family.width}", width, f"a multiple of num_heads, {config.num_heads}")
    with parsing(file):
        family.activation(config)
        family.sizes(config)
    return config


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
        with _stored_in(file) as stored:
            for key, (where, name) in places.items():
                if where == file:
                    with parsing(file, "is damaged"):
                        tensor = stored.get_tensor(name)
                    yield key, _checked(file, name, tensor, shapes[key])


@contextmanager
def _stored_in(file: Path) -> Iterator[Any]:
    """The tensors of a safetensors file, none of them read yet."""
    try:
        check_stored(file)
    except OSError as error:
        raise OSError(f"{file} cannot be read: {reason(error)}") from error
    with parsing(file, "is damaged"):
        stored = safe_open(file, framework="pt")
    with stored:
        yield stored


def _checked(file: Path, name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if tensor.shape != shape or not tensor.is_floating_point():
        raise ValueError(
            f"{file}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
            f"expected a floating-point tensor of shape {tuple(shape)}"
        )
    return tensor


def _stored(directory: Path) -> dict[str, Path]:
    single = directory / "model.safetensors"
    if is_there(single):
        with _stored_in(single) as stored:
            return dict.fromkeys(stored.keys(), single)
    index = directory / "model.safetensors.index.json"
    if not is_there(index):
        raise FileNotFoundError(
            f"{directory} holds neither model.safetensors nor model.safetensors.index.json; "
            f"other weight formats are not read"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        refuse_value(index, "weight_map", weight_map, "an object of tensors and the files that hold them")
    for name, file in weight_map.items():
        # Another folder's file is no part of the checkpoint.
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]{1,240}\.safetensors", file):
            refuse_value(index, f"weight_map.{name}", file, "the name of a safetensors file in its folder")
    return {name: directory / file for name, file in weight_map.items()}
