"""PyTorch operators written in Triton. Importing this registers all of `torch.ops.vk`."""

# First: it refuses pairs of torch and triton that cannot work, before they break.
from torch_ops._core.versions import __version__  # isort: split

from torch_ops import segments

# A private op, which exported programs of `torch_ops.models` call.
from torch_ops import vision_attention as _vision_attention  # noqa: F401
from torch_ops._tools.explain import explain, info
from torch_ops._tools.warmup import warmup
from torch_ops.attention import attention
from torch_ops.attention_decode import attention_decode
from torch_ops.kv_cache import KVCache, PagedKVCache
from torch_ops.kv_cache_append import kv_cache_append
from torch_ops.layer_norm import add_layer_norm, layer_norm
from torch_ops.mlp import mlp
from torch_ops.patch_merger import patch_merger
from torch_ops.pos_embed_interpolate import pos_embed_interpolate
from torch_ops.qkv_rope import qkv_rope
from torch_ops.rms_norm import add_rms_norm, rms_norm
from torch_ops.rope_window_attn import rope_window_attn
from torch_ops.rotary_table import rotary_table
from torch_ops.segment_attention import segment_attention
from torch_ops.settings import settings
from torch_ops.spatial_merge import spatial_merge
from torch_ops.window_attn import window_attn

__all__ = [
    "KVCache",
    "PagedKVCache",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_decode",
    "explain",
    "info",
    "kv_cache_append",
    "layer_norm",
    "mlp",
    "patch_merger",
    "pos_embed_interpolate",
    "qkv_rope",
    "rms_norm",
    "rope_window_attn",
    "rotary_table",
    "segment_attention",
    "segments",
    "settings",
    "spatial_merge",
    "warmup",
    "window_attn",
]
