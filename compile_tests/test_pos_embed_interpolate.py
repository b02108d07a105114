"""The graph contract of `vk::pos_embed_interpolate`, and the code of its kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_tests.contract.graph import Call, GraphContract
from compile_tests.contract.trace import opcheck_fully
from compile_tests.grids import assert_rows_move_by_16_bytes, subject
from compile_tests.kernels import GRIDS
from torch_ops import pos_embed_interpolate
from torch_ops.testing import references


def interpolate(x: Tensor, table: Tensor, grid: Tensor, merge_size: int) -> Tensor:
    return pos_embed_interpolate(table, grid, x.shape[0], merge_size)


def reference(x: Tensor, table: Tensor, grid: Tensor, merge_size: int) -> Tensor:
    return references.pos_embed_interpolate(table, grid, x.shape[0], merge_size)


def operator(call: Call) -> dict[str, Any]:
    given = {name: call.args[name] for name in ("table", "grid", "merge_size")}
    return {**given, "total": call.args["x"].shape[0]}


def backward(call: Call) -> dict[str, Any]:
    given = {name: call.args[name] for name in ("grid", "merge_size")}
    return {**given, "dout": call.grads["out"], "entries": call.args["table"].shape[0]}


SUBJECT = subject(
    "pos_embed_interpolate", interpolate, reference, "table", kernels=GRIDS["pos_embed_interpolate"],
    operator=operator, backward=backward, partial=lambda call: ({**backward(call), "align_corners": False},),
)  # fmt: skip


class TestGraphs(GraphContract):
    subjects = (SUBJECT,)


def test_opcheck_passes_without_aligned_corners() -> None:
    args = SUBJECT.arguments(SUBJECT.call(dtype=torch.float32).requiring())
    opcheck_fully(torch.ops.vk.pos_embed_interpolate.default, (*args, False))


@pytest.mark.parametrize("variant", ("plain", "mean_of_raster", "fp32"))
def test_rows_move_by_16_bytes(variant: str) -> None:
    assert_rows_move_by_16_bytes("pos_embed_interpolate", variant)


def test_reference_reads_the_grid_back_and_the_op_does_not() -> None:
    """Under fake tensors, whose values nobody knows, only the op can be called."""
    with FakeTensorMode():
        grid, table = torch.empty(2, 3, dtype=torch.int64), torch.empty(9, 8)
        assert pos_embed_interpolate(table, grid, 32).shape == (32, 8)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            references.pos_embed_interpolate(table, grid, 32)
