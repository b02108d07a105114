"""The graph contract of `vk::spatial_merge`, and the code of its kernels."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.contract.graph import Call, GraphContract, compiled_by
from compile_tests.grids import assert_rows_move_by_16_bytes, subject
from compile_tests.kernels import GRIDS
from torch_ops import spatial_merge
from torch_ops.testing import references

OPTIONS = {"concat": ("concat", "merge_block"), "mean_of_raster": ("mean", "raster")}


def merge(function: Any, option: str, x: Tensor, grid: Tensor, merge_size: int) -> Tensor:
    return function(x, grid, x.shape[0], *OPTIONS[option], merge_size)


def operator(option: str, call: Call) -> dict[str, Any]:
    mode, order = OPTIONS[option]
    return {**call.args, "total": call.args["x"].shape[0], "mode": mode, "order": order}


def backward(option: str, call: Call) -> dict[str, Any]:
    given = operator(option, call)
    return {**given, "rows": given.pop("x").shape[0], "dout": call.grads["out"]}


CONCAT, MEAN = (
    subject(
        "spatial_merge", partial(merge, spatial_merge, option), partial(merge, references.spatial_merge, option), "x",
        kernels=GRIDS["spatial_merge"] if option == "concat" else None,
        operator=partial(operator, option), backward=partial(backward, option),
    )
    for option in OPTIONS
)  # fmt: skip


class TestGraphs(GraphContract):
    subjects = (CONCAT,)


class TestMean(GraphContract):
    subjects = (MEAN,)


@pytest.mark.parametrize("variant", ("plain", "mean_of_raster", "fp32"))
def test_rows_move_by_16_bytes(variant: str) -> None:
    assert_rows_move_by_16_bytes("spatial_merge", variant)


def test_a_total_that_is_no_multiple_is_refused_in_a_graph() -> None:
    call = CONCAT.call()
    x, grid = call.args["x"], call.args["grid"]
    compiled = compiled_by("aot_eager", spatial_merge, dynamic=True)
    assert torch.equal(compiled(x, grid, x.shape[0]), spatial_merge(x, grid, x.shape[0]))
    with pytest.raises(Exception, match="total is .*, expected a multiple of"):
        compiled(x, grid, x.shape[0] - 2)
