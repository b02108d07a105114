"""One plain function per op, the maths as one would write it down: any dtype, differentiable by autograd.

Run in fp64 it is the truth, run in the tested dtype it is "eager PyTorch" of the tolerance rule. One module for each
family of ops.
"""

from torch_ops.testing.references.decode import attention_decode
from torch_ops.testing.references.dense_attention import attention, attention_backward
from torch_ops.testing.references.grids import pos_embed_interpolate, rotary_table, spatial_merge
from torch_ops.testing.references.kv_cache import kv_cache_append, turned
from torch_ops.testing.references.linear import mlp, qkv_rope
from torch_ops.testing.references.merger import patch_merger
from torch_ops.testing.references.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from torch_ops.testing.references.packed_attention import window_attn, window_attn_backward
from torch_ops.testing.references.rope import rope_window_attn, rope_window_attn_backward, rotated
from torch_ops.testing.references.segment_attention import segment_attention, segment_attention_backward
from torch_ops.testing.references.vision_attention import vision_attention

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_backward",
    "attention_decode",
    "kv_cache_append",
    "layer_norm",
    "mlp",
    "patch_merger",
    "pos_embed_interpolate",
    "qkv_rope",
    "rms_norm",
    "rope_window_attn",
    "rope_window_attn_backward",
    "rotary_table",
    "rotated",
    "segment_attention",
    "segment_attention_backward",
    "spatial_merge",
    "turned",
    "vision_attention",
    "window_attn",
    "window_attn_backward",
]
