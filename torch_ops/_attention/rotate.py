"""The rotary embedding of q and k as a pass of its own. Ops call `plan_rotation` by bare name."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from csrc_free_ops.configs.pick import pick
from csrc_free_ops.configs.rows import Config
from csrc_free_ops.rope import _rope_kernel
from torch_ops._core.checks import dtype_name
from torch_ops._core.launch import (
    blocks_of,
    can_overlap,
    contiguous_like,
    current_gpu,
    matrix_strides,
    packed_strides,
    readable,
    with_columns,
)
from torch_ops._core.plan import Bound, Plan, reference_plan
from torch_ops._core.registry import runs_kernels, wrap_triton
from torch_ops._core.rotation_cpu import rotate_cpu
from torch_ops.settings import settings


class Rotation(NamedTuple):
    """q_out and k_out, contiguous, are filled from q and k or in their place.

    Without `cu_k` keys have the boundaries of queries.
    """

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    cu_q: Tensor
    cu_k: Tensor | None
    q_out: Tensor
    k_out: Tensor


def _rotation_config(q: Tensor) -> tuple[Config, str]:
    """The launch for this dtype, head dimension and, where it is known, number of rows, and where it comes from."""
    rows = None if isinstance(q.shape[0], torch.SymInt) else q.shape[0]
    return pick("rope", current_gpu(), dtype_name(q.dtype), q.dtype.itemsize, q.shape[2], False, rows, settings.rows)


def workspaces(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """For q and k when turned: contiguous, whatever their own strides."""
    return contiguous_like(q), contiguous_like(k)


def plan_rotation(t: Rotation, back: bool) -> Plan:
    """Plan a rotation, or with `back` the rotation back, as gradients are."""
    q, k, cos, sin, cu_q, cu_k, *_ = t
    if not runs_kernels(q):
        return reference_plan(partial(rotate_cpu, back), q)
    total, num_heads, head_dim = q.shape
    half = head_dim // 2
    launch, source = _rotation_config(q)
    stride_unit, heads, (q_row, k_row), numbers = packed_strides(q, k)
    table_unit, _, (cos_row, sin_row), table_numbers = matrix_strides(cos, sin)
    overlaps = can_overlap()
    constants = {
        "STRIDE_QT": q_row, "STRIDE_KT": k_row, "STRIDE_CT": cos_row, "STRIDE_ST": sin_row,
        "STRIDE_UNIT": stride_unit, "TABLE_UNIT": table_unit,
        "HALF": half, "NUM_HEADS": num_heads, "NUM_K_HEADS": k.shape[1],
        "SHARED_ANGLES": cos.shape[1] == half, "BACK": back, "OVERLAPS": overlaps,
        **blocks_of(launch), **({"launch_pdl": True} if overlaps else {}),
    }  # fmt: skip
    # One tile more than there may be pairs for: so there is one of no rows too, and none asks whether there are any.
    tiles = total * half // launch.block_n + 1
    grid = (tiles, cdiv(num_heads, launch.block_m) + cdiv(k.shape[1], launch.block_m))
    scalars = (*heads, *numbers, *table_numbers, total, cu_q.shape[0] - 1)
    bound = Bound(wrap_triton(_rope_kernel), grid, scalars, constants)
    ready = readable(q, k, cos, sin) and cu_q.is_contiguous() and (cu_k is None or cu_k.is_contiguous())

    def launch_rotation(t: Rotation) -> None:
        q, k, cos, sin, cu_q, cu_k, q_out, k_out = t
        cu_k = cu_q if cu_k is None else cu_k
        if not ready:
            q, k, cos, sin = with_columns(q), with_columns(k), with_columns(cos), with_columns(sin)
            cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
        bound(q, k, cos, sin, cu_q, cu_k, q_out, k_out)

    return Plan(launch_rotation, {"rope": (launch, source)})
