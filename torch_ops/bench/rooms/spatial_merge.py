"""The benchmark of `vk::spatial_merge`."""

from itertools import product
from typing import Any

from torch import Tensor

from torch_ops import spatial_merge
from torch_ops.bench.measure.opbench import Cost
from torch_ops.bench.rooms.grids import CallInputs, Eager, GridOp, make_bench
from torch_ops.testing import references


def _arguments(inputs: CallInputs) -> tuple[Any, ...]:
    return inputs.x, inputs.grid, inputs.total, *inputs.call.options, inputs.merge_size


def _dout(inputs: CallInputs) -> Tensor:
    rows = inputs.total // inputs.merge_size**2
    return inputs.dout.reshape(rows, -1) if inputs.call.options[0] == "concat" else inputs.dout[:rows]


def _cost(inputs: CallInputs, backward: bool) -> Cost:
    """Rows of x, and of the result, a quarter of them for a mean of 2 x 2; the backward moves as many."""
    rows = inputs.total * inputs.x.shape[1]
    mean = inputs.call.options[0] == "mean"
    moved = rows + (rows // inputs.merge_size**2 if mean else rows)
    return Cost(rows if mean else 0, inputs.x.element_size() * moved)


BENCH = make_bench(
    GridOp(
        spatial_merge, lambda dtype: references.spatial_merge,
        Eager(references.spatial_merge, "views and copies, image by image"), _arguments, _cost,
        ("spatial_merge_fwd", "spatial_merge_bwd"),
        leaf="x", dout=_dout, options=tuple(product(("concat", "mean"), ("merge_block", "raster"))),
    )
)  # fmt: skip
