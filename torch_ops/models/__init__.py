"""Encoders and models that run on the ops of this library."""

from torch_ops.models._sharing import from_transformers
from torch_ops.models.budgets import token_budgets
from torch_ops.models.graph_cache import GraphCache
from torch_ops.models.graphs import EncoderGraphs
from torch_ops.models.packed_encoder import PackedEncoder
from torch_ops.models.vision import QwenVisionEncoder, VisionAttention, from_config
from torch_ops.models.vision_metadata import Padding, VisionMetadata, VisionSizes, vision_metadata

__all__ = [
    "EncoderGraphs",
    "GraphCache",
    "PackedEncoder",
    "Padding",
    "QwenVisionEncoder",
    "VisionAttention",
    "VisionMetadata",
    "VisionSizes",
    "from_config",
    "from_transformers",
    "token_budgets",
    "vision_metadata",
]
