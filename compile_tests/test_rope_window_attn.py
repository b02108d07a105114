"""The graph contract of `vk::rope_window_attn`, and the code of its rotation.

test_window_attn.py tests the attention core in graphs.
"""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from compile_tests import kernels
from compile_tests.contract.graph import DEVICE, DTYPE, Call, GraphContract, Subject, assert_same_bits, compiled_by
from csrc_free_ops.configs.candidates import CANDIDATES
from csrc_free_ops.configs.rows import Config
from torch_ops import rope_window_attn
from torch_ops.testing import references
from torch_ops.testing.cases import LAYOUTS, TABLES, WindowAttnCase, make_projected_rope_inputs, make_rope_inputs

CASE = WindowAttnCase("full", "", (40, 23), 4, 16, num_k_heads=2, padding=3, options={"causal": True})
# Rows and segments of calls that share one graph: none repeats, lengths are uneven, some segments are empty.
SIZES = (
    replace(CASE, padding=0),
    *(replace(CASE, lengths=lengths) for lengths in ((100, 0, 7, 31), (5,) * 11, (300, 2), (0, 64, 64))),
)
WITH_TABLES = {name: replace(CASE, name=name) for name in TABLES}
ROWS, BOUNDARIES = torch.export.Dim("rows", min=2, max=65536), torch.export.Dim("boundaries", min=2, max=4097)
with_lse = partial(rope_window_attn, return_lse=True)


def call_of(inputs: Any) -> Call:
    grads = {"out": inputs.dout, "lse": inputs.dlse}
    return Call.of(with_lse, inputs, ("q", "k", "v", "cos", "sin"), grads=grads)


def draw(case: WindowAttnCase, dtype: torch.dtype, seed: int = 0) -> Call:
    """The name of a case says how its tables lie."""
    return call_of(make_rope_inputs(case, dtype, DEVICE, seed, case.name if case.name in TABLES else "half"))


def backward(call: Call) -> dict[str, Any]:
    out, lse = call(torch.ops.vk.rope_window_attn)
    return {"dout": call.grads["out"], "dlse": call.grads["lse"], "out": out, "lse": lse, **call.args}


class TestGraphs(GraphContract):
    subjects = (
        Subject(
            "rope_window_attn", with_lse, references.rope_window_attn, draw, SIZES,
            moving={**dict.fromkeys(("q", "k", "v", "cos", "sin"), {0: ROWS}), "cu_seqlens": {0: BOUNDARIES}},
            kernels=kernels.ROPE_WINDOW_ATTN,
            backward=backward,
            partial=lambda call: ({**backward(call), "dlse": None}, {**backward(call), "needs_tables": True}),
            checked=(
                WITH_TABLES["full"], WITH_TABLES["half"],
                *(replace(WITH_TABLES[tables], k_lengths=(23, 40)) for tables in ("apart", "column_strided")),
                *(replace(CASE, name=layout, layout=layout) for layout in LAYOUTS),
            ),
            compiled=tuple(WITH_TABLES.values()),
            layouts=tuple(replace(CASE, name=layout, layout=layout) for layout in LAYOUTS),
            replayed=tuple(
                WindowAttnCase("full", "", lengths, 4, 72)
                for lengths in ((64,) * 8, (200, 0, 1, 99, 12, 0, 150, 50))
            ),
            autocast="follows",
            casts=("q", "k", "v"),
            batched="q",
        ),
    )  # fmt: skip


def test_compiled_equals_eager_on_views_of_a_projection() -> None:
    call = call_of(make_projected_rope_inputs(replace(CASE, head_dim=72), DTYPE, DEVICE))
    for function in (with_lse, rope_window_attn):
        one = replace(call, grads={"out": call.grads["out"]}) if function is rope_window_attn else call
        assert_same_bits(one.outcome(compiled_by("aot_eager", function, dynamic=False)), one.outcome(function))


def test_gradients_are_turned_where_they_lie() -> None:
    first, last = (
        launch.arguments
        for launch in kernels.ROPE_WINDOW_ATTN.launches()["rope_window_attn_backward"]
        if launch.name == "_rope_kernel"
    )
    assert (first["BACK"], last["BACK"]) == (False, True)
    assert last["q_ptr"] is last["q_out_ptr"] and last["k_ptr"] is last["k_out_ptr"]


# A thread has as many columns of a pair side by side as divide D / 2; `bits` is the width of its loads and stores.
@pytest.mark.parametrize(
    ("head_dim", "dtype", "bits"),
    [(64, torch.bfloat16, 128), (80, torch.bfloat16, 128), (128, torch.float16, 128), (72, torch.bfloat16, 64),
     (8, torch.bfloat16, 64), (72, torch.float32, 128), (80, torch.float32, 128)],
)  # fmt: skip
def test_loads_and_stores_are_as_wide_as_half_a_head_allows(head_dim: int, dtype: torch.dtype, bits: int) -> None:
    options = {"head_dim": head_dim, "dtype": dtype} if dtype is not torch.bfloat16 else {"head_dim": head_dim}
    for built in kernels.ROPE_WINDOW_ATTN.builds("sm_90", "plain", num_heads=16, **options):
        accesses = re.findall(r"(ld|st)\.global(\.v\d)?\.b(\d+)", built.asm["ptx"])
        widths = {(what, int(lanes[2:] or 1) * int(width)) for what, lanes, width in accesses}
        assert {width for what, width in widths if what == "st"} == {bits}
        # Only boundaries are read by 32 bits; fp32 tables, which several heads share, come by 8 or 16 bytes.
        assert {32, bits} <= {width for what, width in widths if what == "ld"} <= {32, 64, 128}


def test_no_candidate_has_less_than_an_element_for_each_thread() -> None:
    """An element that is turned where it lies must belong to one thread."""
    assert CANDIDATES["rope"] and all(one.block_m * one.block_n >= 32 * one.num_warps for one in CANDIDATES["rope"])
    assert {Config(4, 256, 4, 1), Config(16, 256, 8, 1)} <= set(CANDIDATES["rope"])
