"""Input of the encoder's benchmark: batches of images and videos, a tower, the reference, the cost of a call."""

import copy
import importlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torch_ops.bench.measure.opbench import Check, find_named
from torch_ops.models import VisionMetadata, from_transformers, vision_metadata

# (last_hidden_state, pooler_output, deepstack features) of any implementation.
Features = tuple[Tensor, Tensor, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Row:
    """A batch: (t, h, w) of each image or video in patches of 16 x 16 pixels, of a video two frames deep."""

    name: str
    grid: tuple[tuple[int, int, int], ...]
    training: bool = False

    @property
    def segments(self) -> tuple[int, ...]:
        """Patches of each frame: none sees another."""
        return tuple(h * w for t, h, w in self.grid for _ in range(t))

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(length, count) of each run of equal segments."""
        return tuple((length, len(list(same))) for length, same in itertools.groupby(self.segments))

    @property
    def shape(self) -> str:
        return "+".join(f"{count}x{length}" if count > 1 else str(length) for length, count in self.runs)

    @property
    def direction(self) -> str:
        return "training step" if self.training else "forward"


ROWS = (
    Row("448", ((1, 28, 28),)),
    Row("896", ((1, 56, 56),)),
    Row("1504x640", ((1, 94, 40),)),
    Row("8x896", ((1, 56, 56),) * 8),
    Row("video16x448", ((8, 28, 28),)),
    Row("mixed", ((1, 28, 28), (1, 42, 42), (1, 56, 56), (1, 84, 84))),
    Row("video64x448", ((32, 28, 28),)),
    Row("train_448", ((1, 28, 28),), training=True),
    Row("train_8x896", ((1, 56, 56),) * 8, training=True),
)
# So small that a CPU runs them.
SMOKE = (
    Row("tiny", ((1, 4, 6), (2, 4, 4))),
    Row("train_tiny", ((1, 4, 6), (2, 4, 4)), training=True),
)


def find_rows(wanted: Sequence[str], device: torch.device) -> tuple[Row, ...]:
    """Rows by names and patterns of names; all that fit the device where none are named."""
    return find_named((*ROWS, *SMOKE), wanted) if wanted else ROWS if device.type == "cuda" else SMOKE


def modeling() -> Any:
    """Transformers' module of the tower."""
    return importlib.import_module("transformers.models.qwen3_vl.modeling_qwen3_vl")


def make_tower(device: torch.device, dtype: torch.dtype) -> Any:
    """Tower L of Qwen3-VL with random weights; on the CPU one of two narrow layers."""
    from torch_ops.models.qwen_vl import build_tower

    if device.type == "cuda":
        return build_tower("L", dtype=dtype, device=device)
    sizes = {"hidden_size": 64, "depth": 2, "num_heads": 2, "intermediate_size": 112, "out_hidden_size": 40}
    config = modeling().Qwen3VLVisionConfig(**sizes, num_position_embeddings=64, deepstack_visual_indexes=[0])
    tower = modeling().Qwen3VLVisionModel._from_config(config)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(
                torch.randn_like(parameter), alpha=0.2 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            )
    tower = tower.to(device, dtype).eval()
    # Its frequencies stay in fp32 whatever the dtype.
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config)
    return tower


class Session:
    """The tower, our encoder on the very same parameters, and what is made once for all rows: twins, compiled code."""

    def __init__(self, tower: Any) -> None:
        self.tower = tower
        self.encoder = from_transformers(tower)
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def modules(self) -> Iterable[nn.Module]:
        return (self.tower, self.encoder, *(made for made in self._made.values() if isinstance(made, nn.Module)))


@dataclass(frozen=True)
class Scene:
    """One row on the session's tower: what all implementations are given."""

    session: Session
    row: Row
    pixels: Tensor
    grid: Tensor  # on the CPU
    calls: dict[str, Any] = field(default_factory=dict)  # by implementation, kept since compiling takes minutes

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    @property
    def dtype(self) -> torch.dtype:
        return self.pixels.dtype

    def metadata(self) -> VisionMetadata:
        return vision_metadata(self.grid, self.session.encoder.sizes, self.device)


def make_scene(session: Session, row: Row) -> Scene:
    weight = session.tower.patch_embed.proj.weight
    grid = torch.tensor(row.grid)
    generator = torch.Generator(weight.device).manual_seed(0)
    size = (sum(row.segments), weight[0].numel())
    pixels = torch.randn(size, generator=generator, device=weight.device).to(weight.dtype)
    for module in session.modules():
        module.train(row.training)
    return Scene(session, row, pixels, grid)


def transformers_metadata(scene: Scene, segments_on_host: bool = False) -> dict[str, Any]:
    """All that Transformers' vision models take ready-made. Segments that they read back had better stay here."""
    from transformers import vision_utils

    tower, grid = scene.session.tower, scene.grid
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    cu_seqlens = vision_utils.get_vision_cu_seqlens(grid)
    return {
        "cu_seqlens": cu_seqlens if segments_on_host else cu_seqlens.to(scene.device),
        "position_ids": vision_utils.get_vision_position_ids(grid, tower.spatial_merge_size).to(scene.device),
        "interp_indices": indices.to(scene.device),
        "interp_weights": weights.to(scene.device),
        "max_seqlen": max(scene.row.segments),
    }


def features_of(output: Any) -> Features:
    """The features of Transformers' output."""
    return output.last_hidden_state, output.pooler_output, tuple(output.deepstack_features)


def named_features(features: Features) -> dict[str, Tensor]:
    last, pooled, taps = features
    return {
        "last_hidden_state": last, "pooler_output": pooled,
        **{f"taps[{index}]": tap for index, tap in enumerate(taps)},
    }  # fmt: skip


def linear_patches(patch_embed: Any, pixels: Tensor) -> Tensor:
    """The convolution over patches, which do not overlap, as the product that it is."""
    weight = patch_embed.proj.weight
    return functional.linear(pixels.to(weight.dtype), weight.flatten(1), patch_embed.proj.bias)


def step(encode: Callable[[], Features], parameters: Sequence[nn.Parameter], directions: Sequence[Tensor]) -> Features:
    """Forward, a scalar loss of pooler_output and the deepstack features, backward; no optimizer.

    The loss is linear, so that gradients are as large as the tolerance rule wants them.
    """
    for parameter in parameters:
        parameter.grad = None
    features = encode()
    wide = torch.promote_types(directions[0].dtype, torch.float32)
    losses = [
        (feature * direction).sum(dtype=wide)
        for feature, direction in zip((features[1], *features[2]), directions, strict=True)
    ]
    torch.stack(losses).sum().backward()
    return features


def draw_directions(scene: Scene) -> list[Tensor]:
    """The gradients of what enters the loss."""
    config = scene.session.tower.config
    size = (scene.pixels.shape[0] // config.spatial_merge_size**2, config.out_hidden_size)
    generator = torch.Generator(scene.device).manual_seed(1)
    count = 1 + len(config.deepstack_visual_indexes)
    draw = (torch.randn(size, generator=generator, device=scene.device) for _ in range(count))
    return [each.to(scene.dtype) for each in draw]


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Takes them away."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"d {name}"] = parameter.grad
            parameter.grad = None
    return found


def outcome(scene: Scene, tower: Any, encode: Callable[[], Features]) -> dict[str, Tensor]:
    """Features and, in training, the gradient of every parameter of `tower`, by name."""
    if not scene.row.training:
        with torch.no_grad():
            return named_features(encode())
    dtype = next(tower.parameters()).dtype
    features = step(encode, list(tower.parameters()), [each.to(dtype) for each in draw_directions(scene)])
    return {**{name: each.detach() for name, each in named_features(features).items()}, **gradients_of(tower)}


def check_of(scene: Scene) -> Check:
    """Transformers' tower in fp64, and as it is. In training fp64 keeps only what enters a block."""
    exact = copy.deepcopy(scene.session.tower).double().train(scene.row.training)
    exact.patch_embed.forward = lambda pixels: linear_patches(exact.patch_embed, pixels)
    for block in exact.blocks if scene.row.training else ():
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    ready = transformers_metadata(scene, segments_on_host=True)
    pixels = scene.pixels.double()
    reference = outcome(scene, exact, lambda: features_of(exact(pixels, grid_thw=scene.grid, **ready)))
    # A cycle would keep the tower and its memory.
    del exact.patch_embed.forward
    tower = scene.session.tower
    eager = outcome(scene, tower, lambda: features_of(tower(scene.pixels, grid_thw=scene.grid, **ready)))
    return Check(scene.row.shape, scene.row, scene, reference, eager)


def count_flops(scene: Scene) -> int:
    """FLOPs of all products; a training step makes two more for each of a linear layer, two and a half for
    attention's."""
    config, row = scene.session.tower.config, scene.row
    width, patches = config.hidden_size, scene.pixels.shape[0]
    block = 2 * width * (4 * width + 2 * config.intermediate_size)
    merged = width * config.spatial_merge_size**2
    merger = 2 * merged * (merged + config.out_hidden_size)
    mergers = 1 + len(config.deepstack_visual_indexes)
    linear = patches * (config.depth * block + 2 * scene.pixels.shape[1] * width)
    linear += patches // config.spatial_merge_size**2 * mergers * merger
    attention = config.depth * 4 * width * sum(length**2 for length in row.segments)
    return int(3 * linear + 3.5 * attention) if row.training else linear + attention
