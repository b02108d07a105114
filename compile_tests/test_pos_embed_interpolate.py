"""`pos_embed_interpolate` under torch.compile, torch.export, AOTInductor, CUDA graphs, and built for every target."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_tests.contract import opcheck_fully
from compile_tests.grids import BATCHES, CASES, GraphContract, assert_no_second_derivative, ids, make_grid
from torch_ops import pos_embed_interpolate
from torch_ops.testing import references
from torch_ops.testing.cases import GridCase, make_grid_inputs


class TestGraphs(GraphContract):
    name = "pos_embed_interpolate"
    graph = "vk.pos_embed_interpolate.default\n<built-in function add>\n"
    first_calls = {
        "compiled_with_backward": (
            "table = draw(9, 8); torch.compile(torch_ops.pos_embed_interpolate)(table, grid, 32).sum().backward(); "
            "assert table.grad.abs().sum() > 0"
        )
    }

    def tensors(self, total: int, device: str) -> tuple[Tensor, ...]:
        return torch.randn(total, 24, device=device), torch.randn(25, 24, device=device)

    def encode(self, x: Tensor, table: Tensor, grid: Tensor) -> Tensor:
        return x + pos_embed_interpolate(table, grid, x.shape[0])

    def every_op(self, x: Tensor, table: Tensor, dout: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.ops.vk.pos_embed_interpolate(table, grid, x.shape[0]),
            torch.ops.vk.pos_embed_interpolate_backward(dout, grid, table.shape[0]),
        )


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_opcheck_passes(case: GridCase, device: str) -> None:
    inputs = make_grid_inputs(case, torch.float32, device)
    grid, size, table = inputs.grid, inputs.merge_size, inputs.table.requires_grad_()
    for align_corners in (True, False):
        opcheck_fully(torch.ops.vk.pos_embed_interpolate.default, (table, grid, inputs.total, size, align_corners))
    opcheck_fully(torch.ops.vk.pos_embed_interpolate_backward.default, (inputs.dout, grid, table.shape[0], size))


def test_opcheck_passes_backward_of_zero_stride_gradients(device: str) -> None:
    grid, total = make_grid(BATCHES[0], device)
    dout = torch.ones((), device=device).expand(total, 8)
    opcheck_fully(torch.ops.vk.pos_embed_interpolate_backward.default, (dout, grid, 9))


def test_double_backward_is_refused(device: str) -> None:
    assert_no_second_derivative(pos_embed_interpolate, device)


def test_reference_reads_the_grid_back_and_the_op_does_not(device: str) -> None:
    """A guard on the point of it all: under fake tensors, whose values nobody knows, only the op can be called."""
    with FakeTensorMode():
        grid, table = torch.empty(2, 3, dtype=torch.int64), torch.empty(9, 8)
        assert pos_embed_interpolate(table, grid, 32).shape == (32, 8)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            references.pos_embed_interpolate(table, grid, 32)
