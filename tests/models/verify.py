"""Tiny models and towers, and how outputs of encoders are compared."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from compile_tests.models import named_outputs, tiny_tower, vision_config
from torch_ops.models import QwenVisionEncoder, from_transformers
from torch_ops.models.qwen_vl import encode, load_tower
from torch_ops.testing import check
from torch_ops.testing.tolerance import compare

# One of each kind; the MoE models of Qwen3-VL and Qwen3.5 have the towers of their relatives.
KINDS = ("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "qwen3_omni_moe_vision_encoder", "qwen3_5_vision")

VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 24,
    "num_position_embeddings": 64,
}
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_TAPPED = {**VISION, "deepstack_visual_indexes": [0]}
_QWEN3 = {"vision_config": _TAPPED, "text_config": TEXT}
# The language model of the older ones.
_OLDER_TEXT = {
    **{name: value for name, value in TEXT.items() if name != "head_dim"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
}
_QWEN2 = {
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 24, "num_heads": 2, "mlp_ratio": 2},
    "text_config": _OLDER_TEXT,
}
_QWEN2_5 = {
    # Windows of 2 x 2 merged cells, and one layer of full attention.
    "vision_config": {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 24,
        "window_size": 56, "fullatt_block_indexes": [1],
    },
    "text_config": _OLDER_TEXT,
}  # fmt: skip
_THINKER = {
    "vision_config": _TAPPED,
    "text_config": {**TEXT, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
    "audio_config": {
        "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "d_model": 8,
        "n_window": 4, "output_dim": 24, "downsample_hidden_size": 8, "max_source_positions": 20,
    },
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_vl": (Qwen2VLForConditionalGeneration, Qwen2VLConfig, _QWEN2),
    "qwen2_5_vl": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, _QWEN2_5),
    "qwen3_vl": (Qwen3VLForConditionalGeneration, Qwen3VLConfig, _QWEN3),
    "qwen3_omni_moe": (
        Qwen3OmniMoeForConditionalGeneration,
        Qwen3OmniMoeConfig,
        {"thinker_config": _THINKER, "enable_audio_output": False},
    ),
    "qwen3_omni_moe_thinker": (
        Qwen3OmniMoeThinkerForConditionalGeneration,
        Qwen3OmniMoeThinkerConfig,
        _THINKER,
    ),
    "qwen3_5": (Qwen3_5ForConditionalGeneration, Qwen3_5Config, {"vision_config": VISION, "text_config": TEXT}),
}


def tiny_model() -> Any:
    vision = vision_config("qwen3_vl_vision").to_dict()
    text = {
        "vocab_size": 64, "hidden_size": 40, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    config = Qwen3VLConfig(
        vision_config=vision, text_config=text, image_token_id=5, vision_start_token_id=6, video_token_id=7
    )
    return Qwen3VLForConditionalGeneration._from_config(config).eval()


def frozen(model_type: str, dtype: torch.dtype = torch.float64) -> QwenVisionEncoder:
    """In fp64 what is computed in another order agrees to many digits."""
    return from_transformers(tiny_tower(model_type, dtype)).requires_grad_(False)


def doubled(module: nn.Module) -> Any:
    """A copy in fp64, whose results are the reference."""
    return copy.deepcopy(module).double()


def check_outputs(actual: Any, eager: Any, truth: Any) -> None:
    """The tolerance rule on outputs of Transformers' kind."""
    assert list(actual) == list(eager)
    check(*(named_outputs(outputs) for outputs in (actual, eager, truth)))


def about(name: object) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def save_full_model(directory: Path, family: str = "qwen3_vl", **options: Any) -> PreTrainedModel:
    """A tiny vision-language model, written to ``directory``; returns its vision tower."""
    model_class, config_class, sizes = MODELS[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config_class(**copy.deepcopy(sizes)))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    model.eval().save_pretrained(directory, **options)
    (visual,) = (module for name, module in model.named_modules() if name.split(".")[-1] == "visual")
    assert isinstance(visual, PreTrainedModel)
    return visual


def tensors(output: Any) -> dict[str, torch.Tensor]:
    taps = getattr(output, "deepstack_features", None) or ()
    return {
        "last_hidden_state": output.last_hidden_state,
        "pooler_output": output.pooler_output,
        **{f"deepstack_features[{i}]": tap for i, tap in enumerate(taps)},
    }


def assert_same_weights(left: PreTrainedModel, right: PreTrainedModel) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def check_differences(
    differences: Any,
    folder: Path,
    batch: tuple[Tensor, Tensor],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Two encoders that both keep the tolerance rule differ by no more than their errors together allow.

    The error of Transformers' own tower is measured; of two encoders of ours each may have it twice.
    """
    pixels, grid = batch
    pixels = pixels.to(device, dtype)
    with torch.no_grad():
        eager, truth = (
            named_outputs(encode(load_tower(folder, kind, device), pixels.to(kind), grid))
            for kind in (dtype, torch.float64)
        )
    assert differences.keys() == eager.keys()
    for name, difference in differences.items():
        report = compare(eager[name], eager[name], truth[name], name)
        assert difference["absolute"] <= 2 * report.max_allowed, str(report)
