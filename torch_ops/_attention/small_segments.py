"""The attention core's kernels for small segments, windows above all.

`small_segments_config` says from metadata alone whether a call takes them.
"""

from typing import Any

import torch

from csrc_free_ops.attention.portable.small_segments_bwd import (
    _attention_bwd_dkdv_long_segments_fallback_kernel,
    _attention_bwd_dq_long_segments_fallback_kernel,
    _attention_bwd_small_segments_kernel,
)
from csrc_free_ops.attention.portable.small_segments_fwd import (
    _attention_fwd_long_segments_fallback_kernel,
    _attention_fwd_small_segments_kernel,
)
from csrc_free_ops.configs.attention import split_head_dim
from csrc_free_ops.configs.rows import Config
from csrc_free_ops.tiles.score_mod import SOFTCAP
from torch_ops._attention.choose import choose
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import Backward, Forward, is_readable, made_readable, num_segments, query_length
from torch_ops._core.launch import blocks_of, can_overlap, packed_strides
from torch_ops._core.plan import Bound, Plan
from torch_ops._core.registry import wrap_triton

# Programs of the kernels that look for longer segments: two on each multiprocessor of an H200.
FALLBACK_PROGRAMS = 264
# Programs of a persistent grid: more than run at once. 2000 segments of 16 rows take a tenth longer so than with a
# program each; with fewer programs, two fifths.
PERSISTENT_PROGRAMS = 4224
# Mean length up to which many segments may have no rows at all; windows are longer.
SPARSE_ROWS = 32
# Wider heads do not fit the registers, nor does fp32.
WIDEST = 128


def small_segments_config(kernel: str, t: Forward | Backward, options: AttentionOptions) -> tuple[Config, str] | None:
    """The launch of `kernel` if segments of that mean length should take it, and where it comes from; or None.

    Whether single segments are longer is known on the device alone; those are right too, and slower.
    """
    q, k, length = t.q, t.k, query_length(t)
    if t.cu_q is None or t.cu_k is not None or q.shape[1] != k.shape[1] or options.score_mods & ~SOFTCAP.value:
        return None
    if length is None or q.dtype.itemsize != 2 or q.shape[2] > WIDEST or q.shape[0] == 0:
        return None
    launch, source = choose(kernel, q, options, length)
    return (launch, source) if length <= launch.block_m else None


def _constants(t: Forward | Backward, options: AttentionOptions, stride_unit: int) -> dict[str, Any]:
    main, tail = split_head_dim(t.q.shape[2], t.q.dtype.itemsize)
    return {
        "STRIDE_UNIT": stride_unit, "HEAD_DIM": t.q.shape[2], "MAIN": main, "TAIL": tail,
        "HAS_LEFT": options.left >= 0, "HAS_RIGHT": options.right >= 0, "SCORE_MODS": options.score_mods,
        "PRECISION": "ieee", "NUM_HEADS": t.q.shape[1], "OVERLAPS": can_overlap() and num_segments(t) > 0,
    }  # fmt: skip


def _fallback_constants(small_rows: int, launch: Config, shared: dict[str, Any]) -> dict[str, Any]:
    """Options of the kernel for segments of more than `small_rows` rows, beside those of `shared`."""
    early = {"launch_pdl": True} if shared["OVERLAPS"] else {}
    return {**shared, "SMALL_ROWS": small_rows, **blocks_of(launch), **early}


def _fallback_grid(t: Forward | Backward, rows: int) -> tuple[int, ...]:
    return (min(FALLBACK_PROGRAMS, (t.q.shape[0] // rows + num_segments(t) + 2) * t.q.shape[1]), 1)


def _grid(t: Forward | Backward) -> tuple[int, ...]:
    return (num_segments(t) * t.q.shape[1], 1)


def _warps(launch: Config) -> dict[str, int]:
    return {"BLOCK": launch.block_m, "num_warps": launch.num_warps, "num_stages": launch.num_stages}


def plan_forward_small_segments(
    t: Forward, options: AttentionOptions, launch: Config, source: str, plan_longer: Plan | None = None
) -> Plan:
    """Plan segments of up to launch.block_m rows. `plan_longer`, if given, writes all other rows."""
    stride_unit, heads, rows, numbers = packed_strides(t.q, t.k, t.v, t.out)
    scalars = (*heads[:3], *numbers, t.q.shape[0], num_segments(t), options.scale, options.softcap, *options.bounds())
    shared = {
        **dict(zip(("STRIDE_QT", "STRIDE_KT", "STRIDE_VT", "STRIDE_OT"), rows, strict=True)),
        "HAS_LSE": options.has_lse, **_constants(t, options, stride_unit),
    }  # fmt: skip
    fallback, _ = choose("attention_fwd_long_segments_fallback", t.q, options, None)
    length = query_length(t)
    is_persistent = plan_longer is not None and length is not None and length <= SPARSE_ROWS
    grid = (min(PERSISTENT_PROGRAMS, _grid(t)[0]), 1) if is_persistent else _grid(t)
    constants = {**shared, **_warps(launch), "PERSISTENT": is_persistent}
    bound = Bound(wrap_triton(_attention_fwd_small_segments_kernel), grid, scalars, constants)
    longer = Bound(
        wrap_triton(_attention_fwd_long_segments_fallback_kernel),
        _fallback_grid(t, fallback.block_m),
        scalars,
        _fallback_constants(launch.block_m, fallback, shared),
    )
    ready = is_readable(t)

    def launch_forward(t: Forward) -> None:
        q, k, v, cu_q, _, out, lse, *_ = t if ready else made_readable(t)
        bound(q, k, v, out, lse, cu_q)
        if plan_longer is None:
            longer(q, k, v, out, lse, cu_q)
        else:
            plan_longer.launch(t)

    kernels = {"attention_fwd_small_segments": (launch, source)}
    return Plan(launch_forward, kernels if plan_longer is None else {**kernels, **plan_longer.kernels})


def plan_backward_small_segments(t: Backward, options: AttentionOptions, launch: Config, source: str) -> Plan:
    stride_unit, heads, rows, numbers = packed_strides(t.q, t.k, t.v, t.out, t.dout, t.dq)
    q_row, k_row, v_row, out_row, dout_row, gradient_row = rows
    sizes = (t.q.shape[0], num_segments(t), options.scale, options.softcap, *options.bounds())
    shared = {
        "STRIDE_QT": q_row, "STRIDE_KT": k_row, "STRIDE_VT": v_row, "STRIDE_DOT": dout_row,
        **_constants(t, options, stride_unit),
    }  # fmt: skip
    of_queries = {**shared, "STRIDE_OT": out_row, "STRIDE_DQT": gradient_row, "HAS_DLSE": t.dlse is not None}
    of_keys = {**shared, "STRIDE_DKT": gradient_row}
    dq_fallback, _ = choose("attention_bwd_dq_long_segments_fallback", t.q, options, None)
    dkdv_fallback, _ = choose("attention_bwd_dkdv_long_segments_fallback", t.q, options, None)
    scalars = (*heads[:5], *numbers, *sizes)
    keys_scalars = (*heads[:3], heads[4], *numbers[:3], *numbers[4:], *sizes)
    bound = Bound(
        wrap_triton(_attention_bwd_small_segments_kernel), _grid(t), scalars, {**of_queries, **_warps(launch)}
    )
    longer_dq = Bound(
        wrap_triton(_attention_bwd_dq_long_segments_fallback_kernel), _fallback_grid(t, dq_fallback.block_m), scalars,
        _fallback_constants(launch.block_m, dq_fallback, of_queries),
    )  # fmt: skip
    longer_dkdv = Bound(
        wrap_triton(_attention_bwd_dkdv_long_segments_fallback_kernel), _fallback_grid(t, dkdv_fallback.block_n),
        keys_scalars, _fallback_constants(launch.block_m, dkdv_fallback, of_keys),
    )  # fmt: skip
    ready = is_readable(t)

    def launch_backward(t: Backward) -> None:
        dout, dlse, q, k, v, out, lse, cu_q, _, dq, dk, dv, *_ = t if ready else made_readable(t)
        dlse = lse if dlse is None else dlse
        delta = torch.empty_like(lse)
        bound(q, k, v, out, lse, dout, dlse, cu_q, dq, dk, dv)
        longer_dq(q, k, v, out, lse, dout, dlse, cu_q, delta, dq)
        longer_dkdv(q, k, v, lse, dout, delta, cu_q, dk, dv)

    return Plan(launch_backward, {"attention_bwd_small_segments": (launch, source)})
