"""The launcher of what surrounds products of the GEMM core outside of their epilogues, and of their gradients.

Plans depend on metadata alone; what they return launches, into tensors that its caller allocated.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from csrc_free_ops.configs.rows import Launch
from csrc_free_ops.gemm.activations import _activate_kernel, _mlp_bwd_kernel
from csrc_free_ops.gemm.rotary import _qkv_rope_bwd_kernel, _rotate_kernel
from torch_ops._core.launch import Relaunch, blocks_of, head_strides, readable, row_stride, with_columns
from torch_ops._core.registry import runs_kernels, wrap_triton
from torch_ops._gemm.portable import GATED, Rows, angle_constants, choose_product, nothing_to_do, product_size, rows_of

# Rows of a gradient that one program sums up; as many rows of sums are left as there are such runs. A rotation's are
# short, since its tiles are wide.
RUN, ROTATED_RUN = 128, 16


def _count_runs(rows: int, run: int) -> int:
    """At least two, so that no graph of dynamic shape asks whether there is one; what is past the end sums to 0."""
    return rows // run + 2


def new_sums(like: Tensor, rows: int, columns: int, run: int = RUN) -> Tensor:
    """Where the sums of so many rows go: a row for each run, one for all where no kernel computes, none of no rows."""
    nothing = not isinstance(rows, torch.SymInt) and rows == 0
    runs = 0 if nothing else _count_runs(rows, run) if runs_kernels(like) else 1
    return like.new_empty((runs, columns), dtype=torch.promote_types(like.dtype, torch.float32))


def plan_activate(
    rows: Rows, weight: Tensor, activation: str, width: int, up: Tensor | None = None
) -> Callable[..., None]:
    """launch(pre, out) fills out, rows of `width` columns, from pre, the contiguous product with weight."""
    if rows.known == 0:
        return nothing_to_do
    n, _ = product_size(weight, up)
    columns = n // (2 if activation == GATED else 1)
    launch, _ = choose_product("activate", rows, weight, up)
    grid = (cdiv(rows.count, launch.block_m), cdiv(columns, launch.block_n))
    constants = {
        "N": columns, "STRIDE_PM": n, "STRIDE_OM": width, "ACTIVATION": activation, **blocks_of(launch)
    }  # fmt: skip
    relaunch = Relaunch(grid, (rows.count,))

    def launch_activate(pre: Tensor, out: Tensor) -> None:
        tensors = (pre, out)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_activate_kernel)[grid](*tensors, rows.count, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_activate


def plan_activation_backward(
    rows: Rows, weight: Tensor, activation: str, columns: tuple[int, int, int], makes_h: bool, sums: bool,
    up: Tensor | None = None,
) -> Callable[..., None]:  # fmt: skip
    """launch(dh, pre, dpre, h, partial) fills dpre, with `makes_h` h, and with `sums` partial [runs, n].

    pre is contiguous. `columns`: where the gradient of up begins in dpre's rows, the columns of dpre, and those of h
    and dh. The rest of dpre is zeros.
    """
    if rows.known == 0:
        return nothing_to_do
    n, _ = product_size(weight, up)
    inner = n // (2 if activation == GATED else 1)
    launch, _ = choose_product("mlp_bwd", rows, weight, up)
    up_begins, stride, stride_h = columns
    # Behind the last columns of up there may be more zeros than a tile of inner ones has room for.
    longest = max(inner, stride - up_begins) if activation == GATED else inner
    grid = (_count_runs(rows.count, RUN), cdiv(longest, launch.block_n))
    constants = {
        "N": inner, "STRIDE_GM": stride_h, "STRIDE_PM": n, "UP_BEGINS": up_begins, "STRIDE_DM": stride,
        "STRIDE_HM": stride_h,
        "ACTIVATION": activation, "MAKES_H": makes_h, "SUMS": sums, "ROWS": RUN, **blocks_of(launch),
    }  # fmt: skip
    relaunch = Relaunch(grid, (rows.count,))

    def launch_backward(dh: Tensor, pre: Tensor, dpre: Tensor, h: Tensor, partial: Tensor) -> None:
        tensors = (dh, pre, dpre, h, partial)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_mlp_bwd_kernel)[grid](*tensors, rows.count, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_backward


def plan_rotate(
    rows: Rows, weight: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_k_heads: int
) -> Callable[..., None]:
    """launch(packed, cos, sin, q, k, v) fills q, k and v from the contiguous product with weight."""
    if rows.known == 0:
        return nothing_to_do
    launch, _ = choose_product("rotate", rows, weight)
    angles = angle_constants(cos, sin, weight.shape[0], num_heads, num_k_heads)
    grid = (cdiv(rows.count, launch.block_m), _pair_tiles(angles, launch))
    constants = {**angles, **blocks_of(launch)}
    relaunch = Relaunch(grid, (rows.count,))

    def launch_rotate(packed: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        tensors = (packed, rows_of(cos), rows_of(sin), q, k, v)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_rotate_kernel)[grid](*tensors, rows.count, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_rotate


def plan_rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, packs: bool, sums: bool
) -> Callable[..., None]:
    """launch(dq, dk, dv, cos, sin, packed, partial) fills packed [T, n] with `packs`, partial [runs, n] with `sums`."""
    total, num_heads, _ = dq.shape
    rows = Rows(total, 0)
    if rows.known == 0:
        return nothing_to_do
    launch, _ = choose_product("qkv_rope_bwd", rows, weight)
    angles = angle_constants(cos, sin, weight.shape[0], num_heads, dk.shape[1])
    unit, strides = head_strides(dq, dk, dv)
    launch = _no_larger(launch, int(num_heads * angles["HALF"]))
    grid = (_count_runs(total, ROTATED_RUN), _pair_tiles(angles, launch))
    constants = {
        "STRIDE_QT": row_stride(dq), "STRIDE_KT": row_stride(dk), "STRIDE_VT": row_stride(dv), "UNIT": unit,
        "PACKS": packs, "SUMS": sums, "ROWS": ROTATED_RUN, **angles, **blocks_of(launch),
    }  # fmt: skip
    scalars = (*strides, total)
    relaunch = Relaunch(grid, scalars)
    ready = readable(dq, dk, dv)

    def launch_backward(
        dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, packed: Tensor, partial: Tensor
    ) -> None:
        if not ready:
            dq, dk, dv = with_columns(dq), with_columns(dk), with_columns(dv)
        tensors = (dq, dk, dv, rows_of(cos), rows_of(sin), packed, partial)
        if not relaunch(None, tensors):
            compiled = wrap_triton(_qkv_rope_bwd_kernel)[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_backward


def _no_larger(launch: Launch, pairs: int) -> Launch:
    """With tiles that a run of rows and so many pairs fill, and as many pairs to a warp."""
    rows, columns = min(launch.block_m, ROTATED_RUN), min(launch.block_n, next_power_of_2(pairs))
    return replace(
        launch, block_m=rows, block_n=columns, num_warps=max(1, launch.num_warps * columns // launch.block_n)
    )


def _pair_tiles(angles: dict[str, Any], launch: Launch) -> int:
    of_q, of_k = (cdiv(angles[heads] * angles["HALF"], launch.block_n) for heads in ("NUM_HEADS", "NUM_K_HEADS"))
    return int(of_q + 2 * of_k)


def sum_runs(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of sums, added up in a fixed order."""
    return partial.sum(0).to(dtype)
