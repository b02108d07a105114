"""Encoders and models that run on the ops of this library."""

from torch_ops.models.vision import PackedEncoder, QwenVisionEncoder, VisionAttention, from_config, from_transformers
from torch_ops.models.vision_metadata import Padding, VisionMetadata, VisionSizes, vision_metadata

__all__ = [
    "PackedEncoder",
    "Padding",
    "QwenVisionEncoder",
    "VisionAttention",
    "VisionMetadata",
    "VisionSizes",
    "from_config",
    "from_transformers",
    "vision_metadata",
]
