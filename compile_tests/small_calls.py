"""A small call of every op: what draws its inputs, and its cases, of which some have the tag smoke."""

from functools import partial

from torch_ops.testing import cases

NORMS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
DRAWN = {
    "window_attn": (cases.make_inputs, cases.window_attn_cases),
    "rope_window_attn": (cases.make_rope_inputs, cases.rope_window_attn_cases),
    "attention": (cases.make_dense_inputs, cases.dense_cases),
    "attention_decode": (cases.make_decode_inputs, cases.decode_cases),
    "kv_cache_append": (cases.make_kv_cache_inputs, cases.kv_cache_cases),
    "mlp": (cases.make_mlp_inputs, cases.mlp_cases),
    "qkv_rope": (cases.make_qkv_rope_inputs, cases.qkv_rope_cases),
    "patch_merger": (cases.make_merger_inputs, cases.merger_cases),
    **{op: (partial(cases.make_norm_inputs, op), cases.norm_cases) for op in NORMS},
}
