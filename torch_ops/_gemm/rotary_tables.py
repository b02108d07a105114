"""Gradients of the tables of `qkv_rope`: from q and k before their rotation, which a product makes again."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from torch_ops._core.plan import Plan
from torch_ops._core.rotation_gradient import TableGradients, new_table_gradients, plan_table_gradients
from torch_ops._core.torch_private import without_autocast


class RotaryTables(NamedTuple):
    """The gradients of q and k, and the operands of the product; `cos` stands for both tables."""

    dq: Tensor
    dk: Tensor
    x: Tensor | None
    weight: Tensor
    bias: Tensor | None
    cos: Tensor

    @property
    def columns(self) -> int:
        """The columns of the product that are rotated."""
        return self.dq.shape[1] * self.dq.shape[2] + self.dk.shape[1] * self.dk.shape[2]


def _gradients_of(t: RotaryTables, packed: Tensor, made: tuple[Tensor, ...]) -> TableGradients:
    """Those of q and k before their rotation, which `packed` holds."""
    q, k = packed.unflatten(1, (-1, t.dq.shape[2])).split([t.dq.shape[1], t.dk.shape[1]], 1)
    return TableGradients(t.dq, t.dk, q, k, None, None, *made)


def plan_rotary_tables(t: RotaryTables) -> Plan:
    """Plan dcos and dsin; the launch takes `RotaryTables` and makes them."""
    empty = t.dq.new_empty((t.dq.shape[0], t.columns))
    plan = plan_table_gradients(_gradients_of(t, empty, new_table_gradients(t.dq, t.cos, True)))
    fill, columns = plan.launch, t.columns

    def launch(t: RotaryTables) -> tuple[Tensor, ...]:
        assert t.x is not None
        made = new_table_gradients(t.dq, t.cos, True)
        bias = None if t.bias is None else t.bias.narrow(0, 0, columns)
        with without_autocast():
            packed = functional.linear(t.x, t.weight.narrow(0, 0, columns), bias)
        fill(_gradients_of(t, packed, made))
        return made

    return Plan(launch, plan.kernels)
