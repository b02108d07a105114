"""`spatial_merge` under torch.compile, torch.export, AOTInductor, CUDA graphs, and built for every target."""

import pytest
import torch
from torch import Tensor

from compile_tests.contract import opcheck_fully
from compile_tests.grids import BATCHES, CASES, GraphContract, assert_no_second_derivative, ids, make_grid
from torch_ops import spatial_merge
from torch_ops.testing.cases import GridCase, lay_out, make_grid_inputs


def _mean_of_raster(x: Tensor, grid: Tensor, total: int) -> Tensor:
    return spatial_merge(x, grid, total, "mean", "raster")


class TestGraphs(GraphContract):
    name = "spatial_merge"
    graph = "vk.spatial_merge.default\n"
    first_calls = {
        "compiled_with_backward": (
            "x = draw(32, 8); torch.compile(torch_ops.spatial_merge)(x, grid, 32).sum().backward(); "
            "assert (x.grad == 1).all()"
        )
    }

    def encode(self, x: Tensor, grid: Tensor) -> Tensor:
        return spatial_merge(x, grid, x.shape[0])

    def every_op(self, x: Tensor, table: Tensor, dout: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
        total = x.shape[0]
        concat = torch.ops.vk.spatial_merge(x, grid, total)
        mean = torch.ops.vk.spatial_merge(x, grid, total, "mean", "raster")
        return (
            concat, mean, torch.ops.vk.spatial_merge_backward(concat, grid, total, total),
            torch.ops.vk.spatial_merge_backward(mean, grid, total, total, "mean", "raster"),
        )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_opcheck_passes(case: GridCase, device: str) -> None:
    inputs = make_grid_inputs(case, torch.float32, device)
    grid, total, size, x = inputs.grid, inputs.total, inputs.merge_size, inputs.x.requires_grad_()
    merged = total // size**2 * size**2
    for mode, order in (("concat", "merge_block"), ("mean", "raster")):
        opcheck_fully(torch.ops.vk.spatial_merge.default, (x, grid, merged, mode, order, size))
        dout = torch.ops.vk.spatial_merge(x.detach(), grid, merged, mode, order, size)
        dout = lay_out(dout, case.layout)
        opcheck_fully(torch.ops.vk.spatial_merge_backward.default, (dout, grid, merged, total, mode, order, size))


def test_opcheck_passes_backward_of_zero_stride_gradients(device: str) -> None:
    grid, total = make_grid(BATCHES[0], device)
    dout = torch.ones((), device=device).expand(total // 4, 32)
    opcheck_fully(torch.ops.vk.spatial_merge_backward.default, (dout, grid, total, total))


def test_a_total_that_is_no_multiple_is_refused_in_a_graph(device: str) -> None:
    grid, total = make_grid(BATCHES[0], device)
    x = torch.randn(total, 24, device=device)
    compiled = torch.compile(spatial_merge, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x, grid, x.shape[0]), spatial_merge(x, grid, x.shape[0]))
    with pytest.raises(Exception, match="total must be a multiple of"):
        compiled(x, grid, x.shape[0] - 2)


def test_vmap_equals_a_loop(device: str) -> None:
    grid, total = make_grid(BATCHES[0], device)
    x = torch.randn(total, 24, device=device)
    xs = torch.stack([x, x.flip(0)])
    looped = torch.stack([_mean_of_raster(x, grid, total) for x in xs])
    assert torch.equal(torch.func.vmap(lambda x: _mean_of_raster(x, grid, total))(xs), looped)


def test_double_backward_is_refused(device: str) -> None:
    assert_no_second_derivative(_mean_of_raster, device)
