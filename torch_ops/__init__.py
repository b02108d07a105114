"""PyTorch operators written in Triton. Importing this registers all of `torch.ops.vk`."""

from torch_ops import _versions  # noqa: F401  refuses pairs of torch and triton that cannot work, before they break
from torch_ops._explain import explain, info, warmup
from torch_ops.pos_embed_interpolate import pos_embed_interpolate
from torch_ops.rotary_table import rotary_table
from torch_ops.settings import settings
from torch_ops.spatial_merge import spatial_merge
from torch_ops.window_attn import window_attn

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "explain",
    "info",
    "pos_embed_interpolate",
    "rotary_table",
    "settings",
    "spatial_merge",
    "warmup",
    "window_attn",
]
