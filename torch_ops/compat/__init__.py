"""Other libraries' signatures over the ops. Importable without those libraries."""

from torch_ops.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from torch_ops.compat.flash_attn_kvcache import flash_attn_with_kvcache
from torch_ops.compat.gqa import reshape_for_gqa, restore_from_gqa
from torch_ops.compat.ring_flash_attn import (
    fused_zigzag_llama3_flash_attn_varlen_forward,
    replace_execute_grouped_attention_with_fused_varlen,
)
from torch_ops.compat.sdpa import scaled_dot_product_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fused_zigzag_llama3_flash_attn_varlen_forward",
    "replace_execute_grouped_attention_with_fused_varlen",
    "reshape_for_gqa",
    "restore_from_gqa",
    "scaled_dot_product_attention",
]
