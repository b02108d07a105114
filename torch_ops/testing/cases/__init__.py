"""Named cases, shared by tests, compile tests and benchmarks: one module for each family of ops.

Every case says which branch it is there for. Tags: "smoke" (the few that every kind of test runs), "edge" (each reaches
a branch of its own), "bench" (real shapes; too long for the interpreter).
"""

from torch_ops.testing.cases.attention import (
    LAYOUTS,
    RAGGED_WINDOWS,
    WINDOW_ATTN,
    WindowAttnCase,
    WindowAttnInputs,
    cumulative,
    make_inputs,
    window_attn_cases,
)
from torch_ops.testing.cases.grids import (
    GRIDS,
    ROW_LAYOUTS,
    GridCase,
    GridInputs,
    grid_cases,
    lay_out,
    make_grid_inputs,
)
from torch_ops.testing.cases.linear import (
    LINEAR_LAYOUTS,
    MLP,
    QKV_ROPE,
    MlpCase,
    MlpInputs,
    QkvRopeCase,
    QkvRopeInputs,
    make_mlp_inputs,
    make_qkv_rope_inputs,
    mlp_cases,
    outcome,
    qkv_rope_cases,
)
from torch_ops.testing.cases.merger import (
    MERGERS,
    MergerCase,
    MergerInputs,
    make_merger_inputs,
    merger_cases,
)
from torch_ops.testing.cases.norms import (
    NORM_LAYOUTS,
    NORMS,
    NormCase,
    NormInputs,
    make_norm_inputs,
    norm_cases,
)
from torch_ops.testing.cases.rope import (
    ROPE_WINDOW_ATTN,
    TABLES,
    RopeWindowAttnInputs,
    make_projected_rope_inputs,
    make_rope_inputs,
    rope_window_attn_cases,
)

__all__ = [
    "GRIDS",
    "LAYOUTS",
    "LINEAR_LAYOUTS",
    "MERGERS",
    "MLP",
    "NORMS",
    "NORM_LAYOUTS",
    "QKV_ROPE",
    "RAGGED_WINDOWS",
    "ROPE_WINDOW_ATTN",
    "ROW_LAYOUTS",
    "TABLES",
    "WINDOW_ATTN",
    "GridCase",
    "GridInputs",
    "MergerCase",
    "MergerInputs",
    "MlpCase",
    "MlpInputs",
    "NormCase",
    "NormInputs",
    "QkvRopeCase",
    "QkvRopeInputs",
    "RopeWindowAttnInputs",
    "WindowAttnCase",
    "WindowAttnInputs",
    "cumulative",
    "grid_cases",
    "lay_out",
    "make_grid_inputs",
    "make_inputs",
    "make_merger_inputs",
    "make_mlp_inputs",
    "make_norm_inputs",
    "make_projected_rope_inputs",
    "make_qkv_rope_inputs",
    "make_rope_inputs",
    "merger_cases",
    "mlp_cases",
    "norm_cases",
    "outcome",
    "qkv_rope_cases",
    "rope_window_attn_cases",
    "window_attn_cases",
]
