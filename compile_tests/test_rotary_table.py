"""`rotary_table` under torch.compile, torch.export, AOTInductor, CUDA graphs, and built for every target."""

import pytest
import torch
from torch import Tensor

from compile_tests.contract import opcheck_fully, sass
from compile_tests.grids import CASES, GraphContract, builds_of, ids
from torch_ops import rotary_table
from torch_ops.testing.cases import GridCase, make_grid_inputs


class TestGraphs(GraphContract):
    name = "rotary_table"
    graph = "vk.rotary_table.default\n"
    has_backward = False
    first_calls = {
        "compiled": (
            "one, other = (f(grid, 32, 16)[0] for f in (torch.compile(torch_ops.rotary_table), "
            "torch_ops.rotary_table)); assert torch.equal(one, other)"
        ),
        "torch.ops": "cos, sin = torch.ops.vk.rotary_table(grid, 32, 16); assert cos.shape == (32, 8)",
    }

    def encode(self, x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(grid, x.shape[0], 16)

    def every_op(self, x: Tensor, table: Tensor, dout: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.vk.rotary_table(grid, x.shape[0], 16)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_opcheck_passes(case: GridCase, device: str) -> None:
    inputs = make_grid_inputs(case, torch.float32, device)
    opcheck_fully(torch.ops.vk.rotary_table.default, (inputs.grid, inputs.total, 16, 10000.0, inputs.merge_size))


def test_no_approximate_functions_are_used() -> None:
    """Neither those of the special function unit nor local memory, which the device library's slow path takes."""
    (built,) = builds_of("rotary_table", "sm_90", "plain", 1152)
    assert not {"sin.approx", "cos.approx", "ex2.approx"} & set(built.asm["ptx"].split())
    assert "MUFU.SIN" not in sass(built) and "MUFU.COS" not in sass(built) and "MUFU.EX2" not in sass(built)
