"""The benchmark of `vk::rotary_table`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ops import rotary_table
from torch_ops.bench.measure.opbench import Cost
from torch_ops.bench.rooms.grids import CallInputs, Eager, GridOp, make_bench, vision_utils
from torch_ops.testing import references

HEAD_DIM = 72


def _theirs(grid: Tensor, total: int, dim: int, theta: float, merge_size: int) -> tuple[Tensor, Tensor]:
    positions = vision_utils().get_vision_position_ids(grid, merge_size)
    half = dim // 2
    frequencies = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=grid.device) / half))
    angles = (positions[..., None].float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


def _arguments(inputs: CallInputs) -> tuple[Any, ...]:
    return inputs.grid, inputs.total, HEAD_DIM, 10000.0, inputs.merge_size


def _cost(inputs: CallInputs, backward: bool) -> Cost:
    """Rows written once."""
    return Cost(0, inputs.total * HEAD_DIM * torch.float32.itemsize)


BENCH = make_bench(
    GridOp(
        rotary_table, lambda dtype: partial(references.rotary_table, dtype=dtype),
        Eager(_theirs, "Transformers' position ids, angles and their cosines", "transformers"),
        _arguments, _cost, ("rotary_table",),
        outputs=("cos", "sin"), rows=lambda inputs: (torch.float32, HEAD_DIM // 2),
    )
)  # fmt: skip
