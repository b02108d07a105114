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
from torch_ops.testing.cases.norms import (
    NORM_LAYOUTS,
    NORMS,
    NormCase,
    NormInputs,
    make_norm_inputs,
    norm_cases,
)

__all__ = [
    "LAYOUTS",
    "NORMS",
    "NORM_LAYOUTS",
    "RAGGED_WINDOWS",
    "WINDOW_ATTN",
    "NormCase",
    "NormInputs",
    "WindowAttnCase",
    "WindowAttnInputs",
    "cumulative",
    "make_inputs",
    "make_norm_inputs",
    "norm_cases",
    "window_attn_cases",
]
