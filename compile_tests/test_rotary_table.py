"""The graph contract of `vk::rotary_table`, and the code of its kernel."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.contract.build import sass
from compile_tests.contract.graph import Call, GraphContract
from compile_tests.grids import assert_rows_move_by_16_bytes, subject
from compile_tests.kernels import GRIDS
from torch_ops import rotary_table
from torch_ops.testing import references


def tables(x: Tensor, grid: Tensor, merge_size: int) -> tuple[Tensor, Tensor]:
    return rotary_table(grid, x.shape[0], 16, merge_size=merge_size)


def reference(x: Tensor, grid: Tensor, merge_size: int) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return references.rotary_table(grid, x.shape[0], 16, merge_size=merge_size, dtype=dtype)


def operator(call: Call) -> dict[str, Any]:
    given = {name: call.args[name] for name in ("grid", "merge_size")}
    return {**given, "total": call.args["x"].shape[0], "dim": 16, "theta": 10000.0}


class TestGraphs(GraphContract):
    subjects = (subject("rotary_table", tables, reference, "", kernels=GRIDS["rotary_table"], operator=operator),)


@pytest.mark.parametrize("variant", ("plain", "mean_of_raster", "fp32"))
def test_rows_move_by_16_bytes(variant: str) -> None:
    assert_rows_move_by_16_bytes("rotary_table", variant)


def test_no_approximate_functions_are_used() -> None:
    """Neither those of the special function unit nor local memory, which the device library's slow path takes."""
    (built,) = GRIDS["rotary_table"].builds("sm_90", "plain", rows=12544)
    assert not {"sin.approx", "cos.approx", "ex2.approx"} & set(built.asm["ptx"].split())
    assert "MUFU.SIN" not in sass(built) and "MUFU.COS" not in sass(built) and "MUFU.EX2" not in sass(built)
