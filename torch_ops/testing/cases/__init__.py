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

__all__ = [
    "GRIDS",
    "LAYOUTS",
    "RAGGED_WINDOWS",
    "ROW_LAYOUTS",
    "WINDOW_ATTN",
    "GridCase",
    "GridInputs",
    "WindowAttnCase",
    "WindowAttnInputs",
    "cumulative",
    "grid_cases",
    "lay_out",
    "make_grid_inputs",
    "make_inputs",
    "window_attn_cases",
]
