"""The launcher of what surrounds products of the GEMM core outside of their epilogues, and of their gradients.

Plans depend on metadata alone. Those of what stands beside a product are a launcher, of tensors, and its kernel.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from csrc_free_ops.configs.rows import Config
from csrc_free_ops.gemm.activations import _activate_kernel, _mlp_bwd_kernel
from csrc_free_ops.gemm.column_sums import _column_sums_kernel
from csrc_free_ops.gemm.rotary import _qkv_rope_bwd_kernel, _rotate_kernel
from torch_ops._core.launch import blocks_of, packed_strides, readable, with_columns
from torch_ops._core.plan import Bound, Kernels, Plan, reference_plan
from torch_ops._core.registry import runs_kernels, wrap_triton
from torch_ops._gemm.cpu import column_sums_cpu
from torch_ops._gemm.portable import (
    GATED,
    Rows,
    angle_constants,
    choose_product,
    nothing_to_do,
    pair_tiles,
    product_size,
    table_rows,
)
from torch_ops._gemm.tensors import ColumnSums, Rotary, RotaryBackward

Launcher = Callable[..., None]

# Rows of a gradient that one program sums up; as many rows of sums are left as there are such runs. A rotation's are
# short, since its tiles are wide.
RUN, ROTATED_RUN = 128, 16
# Eight loads of 16 bytes in flight for each thread, and as many programs as multiprocessors for 4096 columns.
COLUMN_SUMS_CONFIG = Config(512, 32, 8, 1)


def _count_runs(rows: int, run: int) -> int:
    """At least two, so that no graph of dynamic shape asks whether there is one; what is past the end sums to 0."""
    return rows // run + 2


def new_column_sums(like: Tensor, rows: int, columns: int, run: int = RUN) -> Tensor:
    """Where the sums of so many rows go: a row for each run, one for all where no kernel computes, none of no rows."""
    nothing = not isinstance(rows, torch.SymInt) and rows == 0
    runs = 0 if nothing else _count_runs(rows, run) if runs_kernels(like) else 1
    return like.new_empty((runs, columns), dtype=torch.promote_types(like.dtype, torch.float32))


def plan_activate(
    rows: Rows, weight: Tensor, activation: str, width: int, up: Tensor | None = None
) -> tuple[Launcher, Kernels]:
    """launch(pre, out) fills out, rows of `width` columns, from pre, the contiguous product with weight."""
    chosen = choose_product("activate", rows, weight, up)
    kernels = {"activate": chosen}
    if rows.known == 0:
        return nothing_to_do, kernels
    launch, _ = chosen
    n, _ = product_size(weight, up)
    columns = n // (2 if activation == GATED else 1)
    grid = (cdiv(rows.count, launch.block_m), cdiv(columns, launch.block_n))
    constants = {
        "N": columns, "STRIDE_PM": n, "STRIDE_OM": width, "ACTIVATION": activation, **blocks_of(launch)
    }  # fmt: skip
    return Bound(wrap_triton(_activate_kernel), grid, (rows.count,), constants), kernels


def plan_activation_backward(
    rows: Rows, weight: Tensor, activation: str, columns: tuple[int, int, int], makes_h: bool, sums: bool,
    up: Tensor | None = None,
) -> tuple[Launcher, Kernels]:  # fmt: skip
    """launch(dh, pre, dpre, h, partial) fills dpre, with `makes_h` h, and with `sums` partial [runs, n].

    pre is contiguous. `columns`: where the gradient of up begins in dpre's rows, the columns of dpre, and those of h
    and dh. The rest of dpre is zeros.
    """
    chosen = choose_product("mlp_bwd", rows, weight, up)
    kernels = {"mlp_bwd": chosen}
    if rows.known == 0:
        return nothing_to_do, kernels
    launch, _ = chosen
    n, _ = product_size(weight, up)
    inner = n // (2 if activation == GATED else 1)
    up_begins, stride, stride_h = columns
    # Behind the last columns of up there may be more zeros than a tile of inner ones has room for.
    longest = max(inner, stride - up_begins) if activation == GATED else inner
    grid = (_count_runs(rows.count, RUN), cdiv(longest, launch.block_n))
    constants = {
        "N": inner, "STRIDE_GM": stride_h, "STRIDE_PM": n, "UP_BEGINS": up_begins, "STRIDE_DM": stride,
        "STRIDE_HM": stride_h,
        "ACTIVATION": activation, "MAKES_H": makes_h, "COLUMN_SUMS": sums, "ROWS": RUN, **blocks_of(launch),
    }  # fmt: skip
    return Bound(wrap_triton(_mlp_bwd_kernel), grid, (rows.count,), constants), kernels


def plan_rotate(t: Rotary) -> tuple[Launcher, Kernels]:
    """launch(packed, t) fills q, k and v from the contiguous product with weight."""
    rows = Rows.of(t.x)
    chosen = choose_product("rotate", rows, t.weight)
    kernels = {"rotate": chosen}
    if rows.known == 0:
        return nothing_to_do, kernels
    launch, _ = chosen
    angles = angle_constants(t.cos, t.sin, t.q, t.k)
    grid = (cdiv(rows.count, launch.block_m), pair_tiles(angles, launch))
    bound = Bound(wrap_triton(_rotate_kernel), grid, (rows.count,), {**angles, **blocks_of(launch)})
    return lambda packed, t: bound(packed, table_rows(t.cos), table_rows(t.sin), t.q, t.k, t.v), kernels


def plan_rotary_backward(t: RotaryBackward, weight: Tensor, packs: bool, sums: bool) -> Plan:
    """Fill packed with `packs`, and partial [runs, n] with `sums`."""
    dq, dk, dv, cos, sin, *_ = t
    total, num_heads, _ = dq.shape
    rows = Rows(total, 0)
    chosen = choose_product("qkv_rope_bwd", rows, weight)
    kernels = {"qkv_rope_bwd": chosen}
    if rows.known == 0:
        return Plan(nothing_to_do, kernels)
    angles = angle_constants(cos, sin, dq, dk)
    stride_unit, heads, (q_row, k_row, v_row), numbers = packed_strides(dq, dk, dv)
    launch = _no_larger(chosen[0], int(num_heads * angles["HALF"]))
    grid = (_count_runs(total, ROTATED_RUN), pair_tiles(angles, launch))
    constants = {
        "STRIDE_QT": q_row, "STRIDE_KT": k_row, "STRIDE_VT": v_row,
        "STRIDE_UNIT": stride_unit, "PACKS": packs, "COLUMN_SUMS": sums, "ROWS": ROTATED_RUN,
        **angles, **blocks_of(launch),
    }  # fmt: skip
    bound = Bound(wrap_triton(_qkv_rope_bwd_kernel), grid, (*heads, *numbers, total), constants)
    ready = readable(dq, dk, dv)

    def launch_backward(t: RotaryBackward) -> None:
        dq, dk, dv, cos, sin, packed, partial = t
        if not ready:
            dq, dk, dv = with_columns(dq), with_columns(dk), with_columns(dv)
        bound(dq, dk, dv, table_rows(cos), table_rows(sin), packed, partial)

    return Plan(launch_backward, {"qkv_rope_bwd": (launch, chosen[1])})


def _no_larger(launch: Config, pairs: int) -> Config:
    """With tiles that a run of rows and so many pairs fill, and as many pairs to a warp."""
    rows, columns = min(launch.block_m, ROTATED_RUN), min(launch.block_n, next_power_of_2(pairs))
    return replace(
        launch, block_m=rows, block_n=columns, num_warps=max(1, launch.num_warps * columns // launch.block_n)
    )


def sum_runs(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of sums, added up in a fixed order."""
    return partial.sum(0).to(dtype)


def plan_column_sums(t: ColumnSums) -> Plan:
    """Plan the sums of matrices with contiguous columns, by one launch; none where no sums are given."""
    matrices = [
        (0, 0) if matrix is None or sums is None else (matrix.shape[1], matrix.stride(0))
        for matrix, sums in ((t.first, t.first_sums), (t.second, t.second_sums))
    ]
    given = t.first if matrices[0][0] else t.second
    (first, first_stride), (second, second_stride) = matrices
    if given is None or first + second == 0:
        return Plan(nothing_to_do)
    if not runs_kernels(given):
        return reference_plan(column_sums_cpu, given)
    launch = COLUMN_SUMS_CONFIG
    constants = {
        "FIRST_COLUMNS": first, "SECOND_COLUMNS": second, "FIRST_STRIDE": first_stride, "SECOND_STRIDE": second_stride,
        **blocks_of(launch),
    }  # fmt: skip
    grid = (cdiv(first, launch.block_n) + cdiv(second, launch.block_n),)
    bound = Bound(wrap_triton(_column_sums_kernel), grid, (given.shape[0],), constants)
    return Plan(lambda t: bound(*t), {"column_sums": (launch, "fixed")})
