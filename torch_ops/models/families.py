"""The differences between the vision encoders of the Qwen-VL families.

Transformers has a class for each family; the encoder of `torch_ops.models.vision` is built from a row of `FAMILIES`.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_ops._core.checks import refuse
from torch_ops.models.vision_metadata import VisionSizes

# Transformers' names of activations, and those of `vk::mlp`.
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "silu"}

# The layers of an MLP in order, as parameters are called; of three the first two are gate and up.
_FC = ("linear_fc1", "linear_fc2")
_LN_Q = ("ln_q", "mlp.0", "mlp.2")


@dataclass(frozen=True)
class Family:
    """A row of differences, by the names that Transformers has for them."""

    module: str  # of transformers.models
    vision_class: str
    block_class: str
    mlp: tuple[str, ...] = _FC
    merger: tuple[str, str, str] = ("norm", *_FC)  # norm, first and second layer
    layers: type[nn.Sequential] | type[nn.ModuleList] = nn.Sequential  # what holds them, with their activation
    taps: str | None = None  # the list of mergers of intermediate layers
    taps_first: bool = False  # of all modules, which state dicts and optimizers have in order
    width: str = "hidden_size"  # of the configuration
    out_width: str = "out_hidden_size"
    rms_norm: bool = False
    windows: bool = False
    patch_bias: bool = True
    learned_positions: bool = True

    def tower_class(self) -> Any:
        """Transformers' own class."""
        return getattr(self._modeling(), self.vision_class)

    def output_class(self) -> Any:
        """The class of Transformers' own output."""
        if self.taps is None:
            return importlib.import_module("transformers.modeling_outputs").BaseModelOutputWithPooling
        return self._modeling().BaseModelOutputWithDeepstackFeatures

    def _modeling(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")

    def intermediate_size(self, config: Any) -> int:
        """The inner width of a block's MLP; Qwen2-VL gives it as a ratio."""
        if hasattr(config, "intermediate_size"):
            return int(config.intermediate_size)
        return int(getattr(config, self.width) * config.mlp_ratio)

    def activation(self, config: Any) -> str:
        """The activation of a block's MLP, by its name in `vk::mlp`."""
        if config.hidden_act not in ACTIVATIONS or (self.gated and config.hidden_act != "silu"):
            wanted = "silu" if self.gated else f"one of {', '.join(ACTIVATIONS)}"
            refuse("vision encoder", "hidden_act", wanted, repr(config.hidden_act))
        return "swiglu" if self.gated else ACTIVATIONS[config.hidden_act]

    @property
    def gated(self) -> bool:
        return len(self.mlp) == 3

    def sizes(self, config: Any) -> VisionSizes:
        """The sizes that `vision_metadata` needs of an encoder of this configuration."""
        merge_size = config.spatial_merge_size
        rope = getattr(config, "rope_parameters", None) or {}
        cell = merge_size * config.patch_size
        if self.windows and config.window_size < cell:
            refuse("vision encoder", "window_size", f"at least a merged cell, {cell} pixels", config.window_size)
        return VisionSizes(
            head_dim=getattr(config, self.width) // config.num_heads,
            merge_size=merge_size,
            theta=float(rope.get("rope_theta", 10000.0)),
            window=config.window_size // merge_size // config.patch_size if self.windows else None,
        )


# Keys: the model_type of the vision configuration.
FAMILIES = {
    "qwen2_vl_vision": Family(
        "qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionBlock", mlp=("fc1", "fc2"), merger=_LN_Q,
        width="embed_dim", out_width="hidden_size", patch_bias=False, learned_positions=False,
    ),
    "qwen2_5_vl_vision": Family(
        "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VLVisionBlock",
        mlp=("gate_proj", "up_proj", "down_proj"), merger=_LN_Q, rms_norm=True, windows=True, patch_bias=False,
        learned_positions=False,
    ),
    "qwen3_vl_vision": Family(
        "qwen3_vl", "Qwen3VLVisionModel", "Qwen3VLVisionBlock", taps="deepstack_merger_list"
    ),
    "qwen3_vl_moe_vision": Family(
        "qwen3_vl_moe", "Qwen3VLMoeVisionModel", "Qwen3VLMoeVisionBlock", taps="deepstack_merger_list"
    ),
    "qwen3_omni_moe_vision_encoder": Family(
        "qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder", "Qwen3OmniMoeVisionBlock", merger=_LN_Q, taps="merger_list",
        taps_first=True, layers=nn.ModuleList,
    ),
    "qwen3_5_vision": Family("qwen3_5", "Qwen3_5VisionModel", "Qwen3_5VisionBlock"),
    "qwen3_5_moe_vision": Family("qwen3_5_moe", "Qwen3_5MoeVisionModel", "Qwen3_5MoeVisionBlock"),
}  # fmt: skip


def family_key(config: Any) -> str:
    """The key in `FAMILIES` of a vision configuration of Transformers; any other configuration gets no key of it."""
    model_type = str(getattr(config, "model_type", None))
    # Transformers 5.5 gives most vision configurations the model_type of the whole model.
    vision_part = getattr(config, "base_config_key", None) == "vision_config"
    return f"{model_type}_vision" if vision_part and f"{model_type}_vision" in FAMILIES else model_type


def vision_config_of(config: Any) -> Any:
    """Return the vision part of a configuration of Transformers: itself, its vision_config, or its thinker's.

    Raises ValueError if it has none of a family in `FAMILIES`.
    """
    inner = config
    while inner is not None:
        if family_key(inner) in FAMILIES:
            return inner
        inner = getattr(inner, "vision_config", None) or getattr(inner, "thinker_config", None)
    refuse(
        "vision encoder", "config",
        f"one of {', '.join(FAMILIES)}, or one that holds it as its vision_config",
        f"{type(config).__name__} of model_type {getattr(config, 'model_type', None)!r}",
    )  # fmt: skip


__all__ = ["ACTIVATIONS", "FAMILIES", "Family", "family_key", "vision_config_of"]
