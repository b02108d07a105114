"""The gradients of a rotary embedding's tables. Ops call `plan_table_gradients` by bare name."""

from typing import NamedTuple

from torch import Tensor

from csrc_free_ops.configs.rows import Config
from csrc_free_ops.rope_tables import _rope_tables_bwd_kernel
from torch_ops._core.launch import blocks_of, contiguous_like, readable, with_columns
from torch_ops._core.plan import Bound, Plan, reference_plan
from torch_ops._core.registry import runs_kernels, wrap_triton
from torch_ops._core.rotation_cpu import table_gradients_cpu

CONFIG = Config(8, 64, 4, 1)


class TableGradients(NamedTuple):
    """dcos and dsin, contiguous, are filled from q and k and from the gradients dq and dk of what they rotate to.

    Without boundaries all rows count; without `cu_k` keys have those of queries.
    """

    dq: Tensor
    dk: Tensor
    q: Tensor
    k: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None
    dcos: Tensor
    dsin: Tensor


def new_table_gradients(like: Tensor, cos: Tensor, needed: bool) -> tuple[Tensor, Tensor]:
    """dcos and dsin, or empty tensors."""
    if needed:
        return contiguous_like(cos), contiguous_like(cos)
    return like.new_empty((0,)), like.new_empty((0,))


def plan_table_gradients(t: TableGradients) -> Plan:
    dq, dk, q, k, cu_q, _, dcos, _ = t
    if not runs_kernels(q):
        return reference_plan(table_gradients_cpu, q)
    total, num_heads, head_dim = q.shape
    half = head_dim // 2
    each = [tensor if tensor.stride(2) == 1 else contiguous_like(tensor) for tensor in (dq, dk, q, k)]
    strides = [stride for tensor in each for stride in tensor.stride()[:2]]
    stride_unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    constants = {
        "STRIDE_UNIT": stride_unit, "HALF": half, "NUM_HEADS": num_heads, "NUM_K_HEADS": k.shape[1],
        "SHARED_ANGLES": dcos.shape[1] == half, "HAS_SEGMENTS": cu_q is not None, **blocks_of(CONFIG),
    }  # fmt: skip
    num_segments = 0 if cu_q is None else cu_q.shape[0] - 1
    scalars = (*[stride // stride_unit for stride in strides], total, num_segments)
    # One tile more than there may be pairs for, so that no graph of dynamic shape asks whether there are any.
    grid = (total * half // CONFIG.block_n + 1,)
    bound = Bound(wrap_triton(_rope_tables_bwd_kernel), grid, scalars, constants)
    ready = readable(dq, dk, q, k)

    def launch(t: TableGradients) -> None:
        dq, dk, q, k, cu_q, cu_k, dcos, dsin = t
        if not ready:
            dq, dk, q, k = (with_columns(tensor) for tensor in (dq, dk, q, k))
        # Any tensor stands in for boundaries that are not there.
        cu_q = dcos if cu_q is None else cu_q.contiguous()
        bound(dq, dk, q, k, cu_q, cu_q if cu_k is None else cu_k.contiguous(), dcos, dsin)

    return Plan(launch, {"rope_tables_bwd": (CONFIG, "fixed")})
