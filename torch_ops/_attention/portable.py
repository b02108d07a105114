"""The attention core's kernels in stock Triton, for packed and dense calls; `plan` chooses among the paths."""

from typing import Any

import torch
from torch import Tensor
from triton import cdiv

from csrc_free_ops.attention.portable.bwd import _attention_bwd_dq_dense_kernel, _attention_bwd_dq_kernel
from csrc_free_ops.attention.portable.bwd_dkdv import _attention_bwd_dkdv_dense_kernel, _attention_bwd_dkdv_kernel
from csrc_free_ops.attention.portable.fwd import _attention_fwd_dense_kernel, _attention_fwd_kernel
from csrc_free_ops.configs.rows import Config
from torch_ops._attention.choose import choose, constants_of, planned_by_precision, slopes_stride
from torch_ops._attention.hopper_dkdv import Dkdv, plan_fp32_dkdv, supports_fp32_dkdv
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.split import allocate_partial, plan_backward_small, plan_split_sum, small_configs, splits_of
from torch_ops._attention.tensors import (
    Backward,
    Forward,
    is_readable,
    key_length,
    made_readable,
    num_segments,
    query_length,
)
from torch_ops._core.launch import can_overlap, dense_strides, packed_strides
from torch_ops._core.plan import Bound, Kernels, Plan
from torch_ops._core.registry import wrap_triton


def _sizes(t: Forward | Backward) -> tuple[int, ...]:
    if t.cu_q is None:
        return t.q.shape[2], t.k.shape[2]
    return t.q.shape[0], t.k.shape[0], num_segments(t)


def _tiles(t: Forward | Backward, rows: Tensor, block: int) -> int:
    if t.cu_q is None:
        return cdiv(rows.shape[2], block) * rows.shape[0]
    # One tile more per segment than its rows fill, and those of the rows outside all segments (tiles/segments.py).
    return rows.shape[0] // block + num_segments(t) + 2


def _scalars(t: Forward | Backward, options: AttentionOptions, *splits: int) -> tuple[Any, ...]:
    return (
        slopes_stride(t.q, options), *_sizes(t), *splits,
        options.scale, options.softcap, options.dropout, *options.bounds(),
    )  # fmt: skip


@planned_by_precision
def plan_forward_portable(t: Forward, options: AttentionOptions, precision: str) -> Plan:
    is_dense = t.cu_q is None
    launch, source = choose("attention_fwd", t.q, options, query_length(t), precision=precision)
    if is_dense:
        stride_unit, outer, rows, numbers = dense_strides(t.q, t.k, t.v, t.out)
    else:
        stride_unit, heads, rows, numbers = packed_strides(t.q, t.k, t.v, t.out)
        # Heads of out lie side by side.
        outer = heads[:3]
    constants = {
        **dict(zip(("STRIDE_QT", "STRIDE_KT", "STRIDE_VT", "STRIDE_OT"), rows, strict=True)),
        "HAS_LSE": options.has_lse,
        **constants_of(t, options, launch, stride_unit, options.score_mods, precision),
    }  # fmt: skip
    kernel = wrap_triton(_attention_fwd_dense_kernel) if is_dense else wrap_triton(_attention_fwd_kernel)
    grid = (_tiles(t, t.q, launch.block_m), t.q.shape[1])
    bound = Bound(kernel, grid, (*outer, *numbers, *_scalars(t, options)), constants)
    ready = is_readable(t)

    def launch_forward(t: Forward) -> None:
        q, k, v, cu_q, cu_k, out, lse, slopes, sinks, seed = t if ready else made_readable(t)
        if is_dense:
            bound(q, k, v, out, lse, slopes, sinks, seed)
        else:
            bound(q, k, v, out, lse, cu_q, cu_q if cu_k is None else cu_k, slopes, sinks, seed)

    return Plan(launch_forward, {"attention_fwd": (launch, source)})


@planned_by_precision
def plan_backward_portable(t: Backward, options: AttentionOptions, precision: str) -> Plan:
    """Plan dq, with delta on the way, and then dk and dv.

    A dense fp32 call may take other kernels: one for all gradients where programs are few, and on Hopper GPUs one for
    dk and dv.
    """
    is_dense, q, k = t.cu_q is None, t.q, t.k
    dq_config, dq_source = choose("attention_bwd_dq", q, options, query_length(t), precision=precision)
    dkdv_config, dkdv_source = choose("attention_bwd_dkdv", q, options, key_length(t), precision=precision)
    kernels: Kernels = {"attention_bwd_dq": (dq_config, dq_source), "attention_bwd_dkdv": (dkdv_config, dkdv_source)}
    beside = small_configs(t, options, precision)
    takes_dkdv = supports_fp32_dkdv(t, options, precision, beside is not None)
    if beside is not None and not takes_dkdv:
        return plan_backward_small(t, options, precision, beside, (dq_source, dkdv_source))
    # A kernel that runs by itself has half as many programs as two that run beside each other.
    dq_tiles, dkdv_tiles = _tiles(t, q, dq_config.block_m), _tiles(t, k, dkdv_config.block_n)
    dq_splits = dkdv_splits = 1
    if is_dense:
        dq_splits = splits_of(q, 2 * dq_tiles * q.shape[1], cdiv(k.shape[2], dq_config.block_n))
        dkdv_splits = splits_of(q, 2 * dkdv_tiles * k.shape[1], cdiv(q.shape[2], dkdv_config.block_m))
    fp32_dkdv = plan_fp32_dkdv(Dkdv(q, k, t.v, t.lse, t.dout, t.lse, t.dk, t.dv), options) if takes_dkdv else None
    if fp32_dkdv is not None:
        del kernels["attention_bwd_dkdv"]
        kernels |= fp32_dkdv.kernels
        dkdv_splits = 1
    bound_dq, bound_dkdv = _bind_gradients(t, options, precision, dq_config, dkdv_config, dq_splits, dkdv_splits)
    add_partial = plan_split_sum(t[9:12], dq_splits, dkdv_splits) if max(dq_splits, dkdv_splits) > 1 else None
    ready = is_readable(t)

    def launch_backward(t: Backward) -> None:
        dout, dlse, q, k, v, out, lse, cu_q, cu_k, dq, dk, dv, slopes, seed = t if ready else made_readable(t)
        dlse = lse if dlse is None else dlse
        delta = torch.empty_like(lse)
        if not is_dense:
            cu_k = cu_q if cu_k is None else cu_k
            bound_dq(q, k, v, out, lse, dout, dlse, cu_q, cu_k, slopes, seed, delta, dq)
            bound_dkdv(q, k, v, lse, dout, delta, cu_q, cu_k, slopes, seed, dk, dv)
            return
        dq_partial, dk_partial, dv_partial = (
            allocate_partial(dq, dq_splits),
            allocate_partial(dk, dkdv_splits),
            allocate_partial(dv, dkdv_splits),
        )
        bound_dq(q, k, v, out, lse, dout, dlse, slopes, seed, delta, dq_partial)
        if fp32_dkdv is not None:
            fp32_dkdv.launch(Dkdv(q, k, v, lse, dout, delta, dk, dv))
        else:
            bound_dkdv(q, k, v, lse, dout, delta, slopes, seed, dk_partial, dv_partial)
        if add_partial is not None:
            add_partial(dq_partial, dk_partial, dv_partial, dq, dk, dv)

    return Plan(launch_backward, kernels)


def _bind_gradients(
    t: Backward, options: AttentionOptions, precision: str, dq_config: Config, dkdv_config: Config,
    dq_splits: int, dkdv_splits: int,
) -> tuple[Bound, Bound]:  # fmt: skip
    """The kernels of dq, and of dk and dv, with so many parts of each gradient."""
    is_dense = t.cu_q is None
    made = [allocate_partial(x, n) for x, n in zip(t[9:12], (dq_splits, dkdv_splits, dkdv_splits), strict=True)]
    if is_dense:
        stride_unit, outer, rows, numbers = dense_strides(t.q, t.k, t.v, t.out, t.dout, *made)
        read, dq_outer, dkdv_outer = outer[:10], [*outer[10:12], *numbers[:6]], [*outer[12:], *numbers[:3], numbers[4]]
        dkdv_outer += numbers[6:]
        dkdv_read = (*read[:6], *read[8:])
    else:
        stride_unit, outer, rows, numbers = packed_strides(t.q, t.k, t.v, t.out, t.dout, *made)
        read, dq_outer, dkdv_outer = outer[:5], numbers[:6], [*numbers[:3], numbers[4], numbers[6]]
        dkdv_read = (*read[:3], *read[4:])
    q_row, k_row, v_row, out_row, dout_row, dq_row, dk_row, dv_row = rows
    dq_scalars, dkdv_scalars = (
        _scalars(t, options, *([splits] if is_dense else [])) for splits in (dq_splits, dkdv_splits)
    )
    strides = {"STRIDE_QT": q_row, "STRIDE_KT": k_row, "STRIDE_VT": v_row, "STRIDE_DOT": dout_row}
    overlaps = can_overlap()
    early = {"OVERLAPS": overlaps, **({"launch_pdl": True} if overlaps else {})}
    of_dq = {"IS_SPLIT": dq_splits > 1, **early} if is_dense else {}
    of_dkdv = {"STRIDE_DVT": dv_row, "IS_SPLIT": dkdv_splits > 1, **early} if is_dense else {}
    dq_constants = {
        **strides, "STRIDE_OT": out_row, "STRIDE_DQT": dq_row, "HAS_DLSE": t.dlse is not None, **of_dq,
        **constants_of(t, options, dq_config, stride_unit, options.backward_score_mods, precision),
    }  # fmt: skip
    dkdv_constants = {
        **strides, "STRIDE_DKT": dk_row, **of_dkdv,
        **constants_of(t, options, dkdv_config, stride_unit, options.backward_score_mods, precision),
    }  # fmt: skip
    dq_grid: tuple[int, ...] = (_tiles(t, t.q, dq_config.block_m), t.q.shape[1])
    dkdv_grid: tuple[int, ...] = (_tiles(t, t.k, dkdv_config.block_n), t.k.shape[1])
    if is_dense:
        dq_grid, dkdv_grid = (*dq_grid, dq_splits), (*dkdv_grid, dkdv_splits)
        dq_kernel = wrap_triton(_attention_bwd_dq_dense_kernel)
        dkdv_kernel = wrap_triton(_attention_bwd_dkdv_dense_kernel)
    else:
        dq_kernel, dkdv_kernel = wrap_triton(_attention_bwd_dq_kernel), wrap_triton(_attention_bwd_dkdv_kernel)
    return (
        Bound(dq_kernel, dq_grid, (*read, *dq_outer, *dq_scalars), dq_constants),
        Bound(dkdv_kernel, dkdv_grid, (*dkdv_read, *dkdv_outer, *dkdv_scalars), dkdv_constants),
    )
