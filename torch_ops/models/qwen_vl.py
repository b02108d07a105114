"""Qwen-VL vision encoders: their module, towers and weights, image preprocessing, one packed call.

    encoder = from_transformers(build_tower("S"))             # or load_tower("path/to/checkpoint"), or a whole model
    pixel_values, grid_thw = preprocess([open_image("street.png")])
    output = encode(encoder, pixel_values, grid_thw)
    features = split_by_image(output, grid_thw)

A *token* of the tower is one patch of 16 x 16 pixels, two frames deep (14 x 14 in Qwen2-VL and Qwen2.5-VL). The
projector merges 2 x 2 tokens, so its output has a quarter as many rows.
"""

import importlib
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

try:
    from transformers import PreTrainedModel
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
except ImportError as error:
    raise ImportError(
        f"torch_ops.models.qwen_vl needs transformers 5.5.3 or newer ({error}): pip install 'vk-ops[transformers]'"
    ) from error

from torch_ops._core.registry import sent
from torch_ops._core.torch_private import ORIGINAL_MODULE
from torch_ops.models._checkpoint import read_tensors, vision_config, vision_places
from torch_ops.models._files import parsing
from torch_ops.models._images import image_processor, open_frames, open_image
from torch_ops.models._sharing import from_transformers, rotary_like
from torch_ops.models.families import FAMILIES, family_key, vision_config_of
from torch_ops.models.graphs import EncoderGraphs
from torch_ops.models.vision import QwenVisionEncoder, from_config
from torch_ops.models.vision_metadata import check_grid, vision_metadata

vision_utils: Any = None
with suppress(ImportError):
    vision_utils = importlib.import_module("transformers.vision_utils")
# Up to Transformers 5.12, towers compute some positions or segments themselves; with 5.5 all of them.
computes_ahead = hasattr(vision_utils, "get_vision_interpolation_indices_and_weights")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Tower:
    """Sizes of a vision tower; ``out_hidden_size`` is the projector's width in ``used_by``."""

    name: str
    hidden_size: int
    depth: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    deepstack_visual_indexes: tuple[int, ...]
    used_by: str

    def config(self) -> Qwen3VLVisionConfig:
        """The Transformers configuration of this tower."""
        return Qwen3VLVisionConfig(
            hidden_size=self.hidden_size,
            depth=self.depth,
            num_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            out_hidden_size=self.out_hidden_size,
            deepstack_visual_indexes=list(self.deepstack_visual_indexes),
        )


TOWERS = {
    tower.name: tower
    for tower in (
        Tower("S", 768, 12, 12, 3072, 1024, (), "Qwen3.5-0.8B"),
        Tower("M", 1024, 24, 16, 4096, 2048, (5, 11, 17), "Qwen3-VL-2B"),
        Tower("L", 1152, 27, 16, 4304, 4096, (8, 16, 24), "Qwen3-VL-8B"),
    )
}


@dataclass(frozen=True)
class ImageFeatures:
    """One image's rows of the packed output: tokens, merged tokens, merged tokens per tap."""

    last_hidden_state: torch.Tensor  # [t * h * w, hidden_size]
    pooler_output: torch.Tensor  # [t * h * w / 4, out_hidden_size]
    deepstack_features: tuple[torch.Tensor, ...]  # each [t * h * w / 4, out_hidden_size]


def build_tower(
    name: str = "S",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Build the tower S, M or L of Qwen3-VL with seeded random weights, in eval mode.

    The weights depend on ``seed`` alone, not on the device or PyTorch's global random state. They keep activations at
    unit scale and attention far from uniform, as in a trained tower. ``progress`` is called with (tensors done, tensors
    in all). Raises ValueError for an unknown name.
    """
    if name not in TOWERS:
        raise ValueError(f"unknown tower {name!r}; choose one of {', '.join(TOWERS)}")
    tower = _empty_tower(TOWERS[name].config())
    parameters = list(tower.named_parameters())
    state = {}
    for done, (key, parameter) in enumerate(parameters, start=1):
        state[key] = _seeded(key, parameter, seed, TOWERS[name].depth).to(device, dtype)
        if progress is not None:
            progress(done, len(parameters))
    return _filled_tower(tower, state, device)


def load_tower(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Load the vision tower of a local Transformers checkpoint, in eval mode.

    Families are Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3-Omni (or its thinker alone) and Qwen3.5, and their MoE models.
    Reads ``config.json`` and, from ``model.safetensors`` or its shards, only the tensors under ``model.visual.``,
    ``visual.`` or ``thinker.visual.``. The language model is never loaded.

    Raises FileNotFoundError for a missing file. Raises ValueError for a checkpoint without such a tower, and for
    missing, unexpected or misshapen tensors, which it names.
    """
    directory = Path(directory)
    config = vision_config(directory)
    with parsing(directory / "config.json"):
        tower = _empty_tower(config)
    shapes = {key: parameter.shape for key, parameter in tower.named_parameters()}
    state: dict[str, torch.Tensor] = {}
    for key, tensor in read_tensors(directory, vision_places(directory), shapes):
        state[key] = tensor.to(device, dtype)
        if progress is not None:
            progress(len(state), len(shapes))
    return _filled_tower(tower, state, device)


def preprocess(
    images: Sequence[Image.Image], processor: Qwen2VLImageProcessorPil | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Resize, normalise and cut images into patches as Transformers does, with the settings of ``processor``.

    Returns ``pixel_values`` fp32 ``[T, 1536]`` and ``grid_thw`` int64 ``[n, 3]``, in patches, all images packed in
    order. Patches of 14 x 14 pixels give ``[T, 1176]``. Raises ValueError for an empty list, for an image without
    pixels and for one more than 200 times as long as it is wide.
    """
    if not images:
        raise ValueError("images must hold at least one image")
    for index, image in enumerate(images):
        if 0 in image.size:
            raise ValueError(f"images[{index}] has {image.width} x {image.height} pixels, expected at least 1 x 1")
    batch = (processor or image_processor())(images=list(images), return_tensors="pt")
    return batch["pixel_values"], batch["image_grid_thw"]


def encode(tower: Any, pixel_values: torch.Tensor, grid_thw: torch.Tensor, chunk_tokens: int | None = None) -> Any:
    """Run one packed call of ``tower`` on all images.

    ``tower`` is our encoder or Transformers', compiled or not, or `EncoderGraphs`. ``pixel_values`` (``[T, 1536]`` for
    Qwen3-VL) lies on its device. Keep ``grid_thw`` int64 ``[n, 3]`` on the CPU: positions and segment boundaries are
    then computed there and sent. The call does not wait for the device and compiles without graph breaks.
    (Transformers' sdpa attention reads the boundaries back in each layer. Before Transformers 5.15,
    towers also read the grid back.) ``chunk_tokens`` is for our encoder alone.

    Returns Transformers' output with ``last_hidden_state`` ``[T, hidden_size]``, ``pooler_output`` ``[T / 4,
    out_hidden_size]`` and, if the tower has taps, ``deepstack_features``.
    """
    check_grid("encode", grid_thw)
    grid = grid_thw.cpu()
    if isinstance(tower, EncoderGraphs):
        return tower(pixel_values, grid, chunk_tokens=chunk_tokens)
    if isinstance(getattr(tower, ORIGINAL_MODULE, tower), QwenVisionEncoder):
        if chunk_tokens is not None:
            return tower(pixel_values, grid, chunk_tokens=chunk_tokens)
        return tower(pixel_values, metadata=vision_metadata(grid, tower.sizes, pixel_values.device))
    if chunk_tokens is not None:
        raise ValueError(f"chunk_tokens is for torch_ops' encoder, got {type(tower).__name__}")
    device = pixel_values.device
    if not computes_ahead:
        return tower(pixel_values, grid_thw=sent(grid, device))
    tensors, longest = _precomputed(tower, grid)
    return tower(pixel_values, grid_thw=grid, **longest, **{key: sent(each, device) for key, each in tensors.items()})


def _precomputed(tower: Any, grid: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Tensors that Transformers' ``tower`` would compute from the grid, and the length of its longest segment."""
    config = vision_config_of(tower.config)
    family, merge = FAMILIES[family_key(config)], config.spatial_merge_size
    tensors = {
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        "position_ids": vision_utils.get_vision_position_ids(grid, merge),
    }
    longest = {"max_seqlen": int((grid[:, 1] * grid[:, 2]).max())}
    if family.learned_positions:
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        tensors |= {"interp_indices": indices, "interp_weights": weights}
    if family.windows:
        index, borders = vision_utils.get_vision_window_index(grid, merge, config.window_size, config.patch_size)
        tensors |= {"window_index": index, "cu_window_seqlens": borders}
        longest["max_window_seqlen"] = int(borders.diff().max())
    return tensors, longest


def split_by_image(output: Any, grid_thw: torch.Tensor) -> list[ImageFeatures]:
    """Return each image's rows of the output of ``encode``, as views; ``grid_thw`` is int64 ``[n, 3]``."""
    check_grid("split_by_image", grid_thw)
    tokens = grid_thw.prod(dim=1).tolist()
    # For a batch without patches any number will do.
    merge = output.last_hidden_state.shape[0] // max(1, output.pooler_output.shape[0]) or 1
    merged = [count // merge for count in tokens]
    taps = [tap.split(merged) for tap in getattr(output, "deepstack_features", None) or ()]
    rows = zip(output.last_hidden_state.split(tokens), output.pooler_output.split(merged), strict=True)
    return [ImageFeatures(hidden, pooled, tuple(tap[i] for tap in taps)) for i, (hidden, pooled) in enumerate(rows)]


def _empty_tower(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return FAMILIES[family_key(config)].tower_class()._from_config(config)


def _filled_tower(
    tower: PreTrainedModel, state: dict[str, torch.Tensor], device: torch.device | str
) -> PreTrainedModel:
    tower.load_state_dict(state, assign=True)
    # The rotary frequencies are not in any checkpoint, and must stay fp32 whatever the dtype.
    with torch.device("cpu"):
        tower.rotary_pos_emb = rotary_like(tower.rotary_pos_emb).to(device)
    return tower.eval()


def _seeded(name: str, like: nn.Parameter, seed: int, depth: int) -> torch.Tensor:
    # A generator per tensor: the values do not depend on the order of a model's parameters.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    values = torch.randn(like.shape, generator=generator, device="cpu", dtype=torch.float32)
    if name.endswith("bias"):
        return values.mul_(0.02)
    if like.dim() == 1:
        return values.mul_(0.1).add_(1.0)
    if name == "pos_embed.weight":
        return values.mul_(0.5)
    scale = like[0].numel() ** -0.5
    if name.endswith(("attn.proj.weight", "mlp.linear_fc2.weight")):
        scale *= (2 * depth) ** -0.5  # the residual stream adds up 2 * depth of these
    return values.mul_(scale)


__all__ = [
    "TOWERS",
    "ImageFeatures",
    "QwenVisionEncoder",
    "Tower",
    "build_tower",
    "encode",
    "from_config",
    "from_transformers",
    "image_processor",
    "load_tower",
    "open_frames",
    "open_image",
    "preprocess",
    "split_by_image",
    "vision_metadata",
]
