"""Gradients in parts, where programs for tiles of rows alone would be too few.

`plan_split_sum` adds parts up. `plan_backward_small` makes all gradients of a dense call by one kernel
(csrc_free_ops/attention/portable/bwd_small.py).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from csrc_free_ops.attention.portable.bwd_small import _attention_bwd_small_delta_kernel, _attention_bwd_small_kernel
from csrc_free_ops.attention.portable.bwd_split import _attention_bwd_split_sum_kernel
from csrc_free_ops.configs.rows import Config
from torch_ops._attention.choose import choose, constants_of, slopes_stride
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import Backward, is_readable, key_length, made_readable, query_length
from torch_ops._core.launch import can_overlap, current_gpu, dense_strides
from torch_ops._core.plan import Bound, Plan
from torch_ops._core.registry import wrap_triton

# Rows of a program.
ROWS = 16
# The most parts of one gradient.
MOST_SPLITS = 8
# For each multiprocessor, of queries and of keys together.
MOST_PROGRAMS = 8


def splits_of(q: Tensor, programs: int, blocks: int) -> int:
    """The number of parts into which each program's blocks are split. fp32 blocks take longest, so that fp32 gets four
    programs for each multiprocessor."""
    if q.dtype is not torch.float32 or any(isinstance(size, torch.SymInt) for size in (programs, blocks)):
        return 1
    wanted = 4 * current_gpu().multiprocessors // max(programs, 1)
    return max(1, min(wanted, blocks // 2, MOST_SPLITS))


def allocate_partial(result: Tensor, splits: int) -> Tensor:
    """Allocate several parts, one after the other as so many heads; the only one is the result itself."""
    if splits == 1:
        return result
    batch, heads, length, head_dim = result.shape
    return result.new_empty((batch, heads * splits, length, head_dim))


def plan_split_sum(gradients: Sequence[Tensor], dq_splits: int, dkdv_splits: int) -> Bound:
    """Bind the kernel that adds up parts of (dq, dk, dv): (dq_partial, dk_partial, dv_partial, dq, dk, dv).

    For a gradient of one part any tensor may stand in.
    """
    batch, heads, length, head_dim = gradients[0].shape
    k_heads, k_length = gradients[1].shape[1:3]
    stride_unit, outer, rows, numbers = dense_strides(*gradients)
    scalars = (*outer, *numbers, batch, heads, k_heads, length, k_length, dq_splits, dkdv_splits)
    overlaps = can_overlap()
    constants = {
        **dict(zip(("STRIDE_DQT", "STRIDE_DKT", "STRIDE_DVT"), rows, strict=True)),
        "STRIDE_UNIT": stride_unit, "HEAD_DIM": head_dim, "IS_DQ_SPLIT": dq_splits > 1,
        "IS_DKDV_SPLIT": dkdv_splits > 1, "OVERLAPS": overlaps,
        "BLOCK_M": ROWS, "BLOCK_N": next_power_of_2(head_dim), "num_warps": 4, "num_stages": 1,
        **({"launch_pdl": True} if overlaps else {}),
    }  # fmt: skip
    sizes = [(heads, length)] * (dq_splits > 1) + [(k_heads, k_length)] * (2 * (dkdv_splits > 1))
    grid = (batch * max(size[0] for size in sizes), cdiv(max(size[1] for size in sizes), ROWS), len(sizes))
    return Bound(wrap_triton(_attention_bwd_split_sum_kernel), grid, scalars, constants)


def small_configs(t: Backward, options: AttentionOptions, products: str) -> tuple[Config, Config] | None:
    """Launches of dq and of dk and dv in one kernel, for fp32 with few programs; None where that kernel is not taken.
    Both have one number of warps.

    On an H100 in tf32, with 8 heads and 64 columns, gradients of 512 causal rows took 28.7 us so and 33.9 otherwise
    (plain maths: 49).
    """
    q, k = t.q, t.k
    if t.cu_q is not None or q.dtype is not torch.float32:
        return None
    sizes = (q.shape[0], q.shape[2], k.shape[2])
    if any(isinstance(size, torch.SymInt) for size in sizes) or 0 in sizes:
        return None
    dq, _ = choose("attention_bwd_dq", q, options, query_length(t), precision=products)
    dkdv, _ = choose("attention_bwd_dkdv", q, options, key_length(t), precision=products)
    by_rule, _ = choose("attention_bwd_dkdv", q, options, key_length(t), own_rows=(), precision=products)
    # Whoever gave a row of their own wants that one as it is.
    if dkdv == by_rule and dkdv.num_warps == 2 * dq.num_warps and dkdv.block_n > 64:
        dkdv = replace(dkdv, block_n=dkdv.block_n // 2, num_warps=dq.num_warps)
    alike = (dq.num_warps, dq.num_stages) == (dkdv.num_warps, dkdv.num_stages)
    few = _programs(q, k, dq, dkdv) <= MOST_PROGRAMS * current_gpu().multiprocessors
    return (dq, dkdv) if alike and few else None


def _programs(q: Tensor, k: Tensor, dq: Config, dkdv: Config) -> int:
    return q.shape[0] * (cdiv(q.shape[2], dq.block_m) * q.shape[1] + cdiv(k.shape[2], dkdv.block_n) * k.shape[1])


def plan_backward_small(
    t: Backward, options: AttentionOptions, precision: str, launches: tuple[Config, Config], sources: tuple[str, str]
) -> Plan:
    """Plan a dense backward by one kernel, with `small_configs`."""
    q, k = t.q, t.k
    dq_config, dkdv_config = launches
    batch, num_heads, length, _ = q.shape
    k_length = k.shape[2]
    tiles = cdiv(length, dq_config.block_m) * batch, cdiv(k_length, dkdv_config.block_n) * batch
    programs = _programs(q, k, dq_config, dkdv_config)
    dq_splits = splits_of(q, programs, cdiv(k_length, dq_config.block_n))
    splits = splits_of(q, programs, cdiv(length, dkdv_config.block_m))
    partial = [
        allocate_partial(tensor, each) for tensor, each in zip(t[9:12], (dq_splits, splits, splits), strict=True)
    ]
    stride_unit, outer, rows, numbers = dense_strides(t.out, t.dout, q, k, t.v, t.dout, *partial)
    out_row, dout_row, q_row, k_row, v_row, _, dq_row, dk_row, dv_row = rows
    overlaps = can_overlap()
    early = {"OVERLAPS": overlaps, **({"launch_pdl": True} if overlaps else {})}
    shared = constants_of(t, options, dkdv_config, stride_unit, options.backward_score_mods, precision)
    delta_constants = {
        "STRIDE_OT": out_row, "STRIDE_DOT": dout_row,
        **{name: shared[name] for name in ("STRIDE_UNIT", "HEAD_DIM", "MAIN", "TAIL")},
        "HAS_DLSE": t.dlse is not None, "BLOCK_M": ROWS, "num_warps": 4, "num_stages": 1, **early,
    }  # fmt: skip
    delta_grid = (cdiv(length, ROWS), num_heads, batch)
    make_delta = Bound(
        wrap_triton(_attention_bwd_small_delta_kernel), delta_grid, (*outer[:4], *numbers[:2], length), delta_constants
    )
    scalars = (
        *outer[4:], *numbers[2:], slopes_stride(q, options), batch, length, k_length,
        dq_splits, splits, options.scale, options.softcap, options.dropout, *options.bounds(),
    )  # fmt: skip
    constants = {
        "STRIDE_QT": q_row, "STRIDE_KT": k_row, "STRIDE_VT": v_row, "STRIDE_DOT": dout_row,
        "STRIDE_DQT": dq_row, "STRIDE_DKT": dk_row, "STRIDE_DVT": dv_row,
        "DQ_BLOCK_M": dq_config.block_m, "DQ_BLOCK_N": dq_config.block_n, "IS_DQ_SPLIT": dq_splits > 1,
        "IS_SPLIT": splits > 1,
        **shared, **early,
    }  # fmt: skip
    grid = (max(tiles), num_heads, splits + dq_splits)
    bound = Bound(wrap_triton(_attention_bwd_small_kernel), grid, scalars, constants)
    add_partial = plan_split_sum(t[9:12], dq_splits, splits) if max(dq_splits, splits) > 1 else None
    ready = is_readable(t)

    def launch_backward(t: Backward) -> None:
        dout, dlse, q, k, v, out, lse, _, _, dq, dk, dv, slopes, seed = t if ready else made_readable(t)
        delta = torch.empty_like(lse)
        make_delta(out, lse, dout, lse if dlse is None else dlse, delta)
        dq_partial, dk_partial, dv_partial = (
            allocate_partial(dq, dq_splits),
            allocate_partial(dk, splits),
            allocate_partial(dv, splits),
        )
        bound(q, k, v, lse, dout, delta, slopes, seed, dq_partial, dk_partial, dv_partial)
        if add_partial is not None:
            add_partial(dq_partial, dk_partial, dv_partial, dq, dk, dv)

    why = "one kernel for both, so few are the programs"
    names = ("attention_bwd_dq", "attention_bwd_dkdv")
    chosen = {name: (each, f"{source}; {why}") for name, each, source in zip(names, launches, sources, strict=True)}
    return Plan(launch_backward, chosen)
