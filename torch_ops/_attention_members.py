"""The launcher of the kernel that adds up parts of dk and dv, which programs of one key head made apart."""

from collections.abc import Callable

from torch import Tensor
from triton import next_power_of_2

from csrc_free_ops.attention.hopper_bwd_sums import _attention_bwd_members_kernel
from torch_ops._launches import Relaunch, dense_like

# Of a program.
ROWS = 16


def plan_members(k: Tensor, v: Tensor, members: int) -> Callable[..., None]:
    """launch(dk_parts, dv_parts, dk, dv), with parts as those of so many heads for each one of k's."""
    batch, heads, length, head_dim = k.shape
    (dk_batch, dk_head, dk_row, _), (dv_batch, dv_head, dv_row, _) = (dense_like(tensor).stride() for tensor in (k, v))
    scalars = (*[stride // 8 for stride in (dk_batch, dk_head, dv_batch, dv_head)], heads, length)
    constants = {
        "STRIDE_DKT": dk_row, "STRIDE_DVT": dv_row, "UNIT": 8, "HEAD_DIM": head_dim, "MEMBERS": members,
        "BLOCK_M": ROWS, "BLOCK_N": next_power_of_2(head_dim), "num_warps": 4, "num_stages": 1,
        "launch_pdl": True,
    }  # fmt: skip
    grid = (batch * heads, -(-length // ROWS), 2)
    relaunch = Relaunch(grid, scalars)

    def launch(*tensors: Tensor) -> None:
        if not relaunch(None, tensors):
            compiled = _attention_bwd_members_kernel[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch
