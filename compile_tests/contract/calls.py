"""A small call of every op, from the smallest cases of the testing kit."""

from functools import partial
from typing import Any

import torch

import torch_ops
from compile_tests.contract.graph import DEVICE, DTYPE, Call
from torch_ops.testing import cases

GRID = torch.tensor([[1, 4, 6], [2, 2, 2]], device=DEVICE)
NORMS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
# Ops that write to an argument or have no inputs with a gradient are called without one.
WITHOUT_GRADIENT = ("attention_decode", "kv_cache_append", "rotary_table")
DRAWN = {
    "window_attn": (cases.make_inputs, cases.window_attn_cases),
    "rope_window_attn": (cases.make_rope_inputs, cases.rope_window_attn_cases),
    "segment_attention": (cases.make_segment_inputs, cases.segment_cases),
    "attention": (cases.make_dense_inputs, cases.dense_cases),
    "attention_decode": (cases.make_decode_inputs, cases.decode_cases),
    "kv_cache_append": (cases.make_kv_cache_inputs, cases.kv_cache_cases),
    "mlp": (cases.make_mlp_inputs, cases.mlp_cases),
    "qkv_rope": (cases.make_qkv_rope_inputs, cases.qkv_rope_cases),
    "patch_merger": (cases.make_merger_inputs, cases.merger_cases),
    **{op: (partial(cases.make_norm_inputs, op), cases.norm_cases) for op in NORMS},
}


def small_calls() -> dict[str, tuple[dict[str, Any], str]]:
    """The arguments of a small call of each op, and the name of one with a gradient."""
    x, table = (torch.randn(32, 8, device=DEVICE, dtype=DTYPE) for _ in range(2))
    found: dict[str, tuple[dict[str, Any], str]] = {
        "rotary_table": ({"grid": GRID, "total": 32, "dim": 16}, ""),
        "pos_embed_interpolate": ({"table": table[:9], "grid": GRID, "total": 32}, "table"),
        "spatial_merge": ({"x": x, "grid": GRID, "total": 32}, "x"),
    }
    for op, (make, cases_of) in DRAWN.items():
        call = Call.of(getattr(torch_ops, op), make(cases_of("smoke")[0], DTYPE, DEVICE), (), grads={})
        found[op] = call.args, "" if op in WITHOUT_GRADIENT else next(iter(call.args))
    return found
