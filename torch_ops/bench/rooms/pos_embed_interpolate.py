"""The benchmark of `vk::pos_embed_interpolate`."""

import torch
from torch import Tensor

from torch_ops import pos_embed_interpolate
from torch_ops.bench.measure.opbench import Cost
from torch_ops.bench.rooms.grids import CallInputs, Eager, GridOp, make_bench, vision_utils
from torch_ops.testing import references


def _theirs(table: Tensor, grid: Tensor, total: int, merge_size: int) -> Tensor:
    indices, weights = vision_utils().get_vision_interpolation_indices_and_weights(
        grid, num_grid_per_side=int(table.shape[0] ** 0.5), mode="bilinear", align_corners=True,
        spatial_merge_size=merge_size,
    )  # fmt: skip
    return (torch.nn.functional.embedding(indices, table) * weights[:, :, None]).sum(1).to(table.dtype)


def _cost(inputs: CallInputs, backward: bool) -> Cost:
    """Rows written once and the table read once; four products and sums for each number of an embedding.

    The backward moves and multiplies as many.
    """
    rows = inputs.total * inputs.x.shape[1]
    return Cost(8 * rows, inputs.x.element_size() * (rows + inputs.table.numel()))


BENCH = make_bench(
    GridOp(
        pos_embed_interpolate, lambda dtype: references.pos_embed_interpolate,
        Eager(_theirs, "Transformers' indices and weights, and a sum of four", "transformers"),
        lambda inputs: (inputs.table, inputs.grid, inputs.total, inputs.merge_size), _cost,
        ("pos_embed_fwd", "pos_embed_bwd"), leaf="table",
    )
)  # fmt: skip
