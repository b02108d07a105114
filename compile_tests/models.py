"""Small towers of every family, real in head dimension and layout, and batches for them."""

from typing import Any

import torch
from torch import Tensor, nn

from torch_ops.models._sharing import rotary_like
from torch_ops.models.families import FAMILIES

HEADS = 2
# Head dimensions are those of the families: 72 and 64 for Qwen3's, 80 for the older ones.
_COMMON = {"num_heads": HEADS, "depth": 3, "patch_size": 4}
_SIZES: dict[str, dict[str, Any]] = {
    "qwen2_vl_vision": {"embed_dim": 80 * HEADS, "mlp_ratio": 2, "hidden_size": 40},
    "qwen2_5_vl_vision": {
        "hidden_size": 80 * HEADS, "intermediate_size": 108, "out_hidden_size": 40, "fullatt_block_indexes": [1],
        "window_size": 32,
    },
}  # fmt: skip
_QWEN3 = {"hidden_size": 72 * HEADS, "intermediate_size": 108, "out_hidden_size": 40, "num_position_embeddings": 64}

# Images of one and several windows, some cut at an edge, a video, the smallest image.
GRID = ((1, 6, 8), (3, 4, 4), (1, 2, 2), (1, 10, 18))


def vision_config(model_type: str, **changes: Any) -> Any:
    family = FAMILIES[model_type]
    values = {**_COMMON, **_SIZES.get(model_type, _QWEN3)}
    if model_type.startswith("qwen3_5"):
        values["hidden_size"] = 64 * HEADS
    if family.taps:
        values["deepstack_visual_indexes"] = [0, 2]
    return vision_class(model_type).config_class(**{**values, **changes})


def vision_class(model_type: str) -> Any:
    return FAMILIES[model_type].tower_class()


def tiny_tower(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Transformers' own, with random weights that keep activations near unit scale and norms apart from identity."""
    return cast(_drawn(vision_class(model_type)._from_config(vision_config(model_type, **changes))), dtype)


def full_tower(model_type: str, sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    """A configuration with Transformers' own sizes, except those given."""
    tower_class = vision_class(model_type)
    return cast(_drawn(tower_class._from_config(tower_class.config_class(**sizes))), dtype)


def cast(tower: Any, dtype: torch.dtype) -> Any:
    """All but the frequencies of the rotation, which Transformers keeps in fp32 where it loads a model."""
    tower.to(dtype)
    rotary = tower.rotary_pos_emb
    with torch.device(tower.patch_embed.proj.weight.device):
        tower.rotary_pos_emb = rotary_like(rotary)
    return tower


def _drawn(tower: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in tower.parameters():
            values = torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter.device)
            scale = 0.1 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            parameter.copy_(values * scale + (parameter if parameter.dim() == 1 else 0))
    return tower.eval()


def draw_pixels(tower: nn.Module, grid: Tensor, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    columns = tower.patch_embed.proj.weight[0].numel()
    rows = int(grid.prod(dim=1).sum())
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)).to(dtype)


def named_outputs(output: Any) -> dict[str, Tensor]:
    """The tensors of an output of Transformers' kind, by name."""
    named = {}
    for name, value in output.items():
        if isinstance(value, Tensor):
            named[name] = value
        else:
            named.update({f"{name}[{index}]": each for index, each in enumerate(value)})
    return named
