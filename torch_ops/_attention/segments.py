"""Attention over keys that segments share: which path a call takes, and its kernels in stock Triton.

Ops call `plan_segment_forward` and `plan_segment_backward` by bare name. Each plan makes a list of tiles on the device
(`csrc_free_ops/attention/portable/segment_tiles.py`), its only workspace besides the backward's delta.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from csrc_free_ops.attention.portable.segment_bwd import (
    _segment_attention_bwd_dkdv_kernel,
    _segment_attention_bwd_dq_kernel,
)
from csrc_free_ops.attention.portable.segment_fwd import _segment_attention_fwd_kernel
from csrc_free_ops.attention.portable.segment_tiles import _segment_tiles_kernel
from csrc_free_ops.configs.rows import Config
from csrc_free_ops.tiles.pieces import KEY_FIELDS, QUERY_FIELDS, SEGMENT_FIELDS
from torch_ops._attention.choose import choose, constants_of, planned_by_precision, slopes_stride
from torch_ops._attention.cpu import segment_backward_cpu, segment_forward_cpu
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import (
    SegmentBackward,
    SegmentForward,
    is_readable,
    made_readable,
    mean_length,
    num_segments,
)
from torch_ops._core.launch import packed_strides
from torch_ops._core.plan import Bound, Plan, reference_plan
from torch_ops._core.registry import runs_kernels, wrap_triton

NO_HOPPER = "segment attention has no Hopper kernels yet"


def plan_segment_forward(t: SegmentForward, options: AttentionOptions) -> Plan:
    """Plan what fills out and lse."""
    if not runs_kernels(t.q):
        return reference_plan(partial(segment_forward_cpu, options), t.q)
    return _plan_forward_portable(t, options).because(NO_HOPPER)


def plan_segment_backward(t: SegmentBackward, options: AttentionOptions) -> Plan:
    """Plan what fills dq, dk and dv."""
    if not runs_kernels(t.q):
        return reference_plan(partial(segment_backward_cpu, options), t.q)
    return _plan_backward_portable(t, options).because(NO_HOPPER)


class _TileList(NamedTuple):
    """The launch that lists tiles of queries and, for a backward, tiles of keys; `size` numbers in int32."""

    bound: Bound
    tiles: int
    key_tiles: int
    size: int

    def make(self, t: SegmentForward | SegmentBackward) -> Tensor:
        tiles = torch.empty((self.size,), dtype=torch.int32, device=t.q.device)
        self.bound(t.cu_q, t.key_sequence, t.key_limit, t.key_bounds, t.key_rows, t.query_start, tiles)
        return tiles


def _bind_tiles(
    t: SegmentForward | SegmentBackward, options: AttentionOptions, block_m: int, block_n: int = 0
) -> _TileList:
    """Bind the list of tiles of `block_m` queries and, for a backward, of `block_n` keys."""
    segments, (sequences, pieces) = num_segments(t), t.key_rows.shape
    # One tile more per segment than its rows fill, and those of the rows outside all segments (tiles/segments.py).
    tiles = t.q.shape[0] // block_m + segments + 2
    key_tiles = cdiv(t.k.shape[0], block_n) if block_n else 0
    size, programs = QUERY_FIELDS.value * tiles, segments + 2
    if block_n:
        size += SEGMENT_FIELDS.value * segments + sequences + 1 + KEY_FIELDS.value * key_tiles
        programs += sequences + key_tiles
    left, _ = options.bounds()
    scalars = (t.q.shape[0], t.k.shape[0], segments, sequences, pieces, tiles, key_tiles, left)
    constants = {
        "HAS_LEFT": options.left >= 0, "HAS_STARTS": t.query_start is not None, "HAS_KEYS": block_n > 0,
        "BLOCK_M": block_m, "BLOCK_N": max(block_n, 1), "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
    return _TileList(Bound(wrap_triton(_segment_tiles_kernel), (programs,), scalars, constants), tiles, key_tiles, size)


def _choose(
    kernel: str, t: SegmentForward | SegmentBackward, options: AttentionOptions, precision: str
) -> tuple[Config, str]:
    """Choose the launch of `kernel` by the mean length of sequences of keys."""
    return choose(kernel, t.q, options, mean_length(t.k.shape[0], t.key_rows.shape[0]), precision=precision)


def _scores(options: AttentionOptions) -> tuple[Any, ...]:
    return (options.scale, options.softcap, options.dropout, *options.bounds())


@planned_by_precision
def _plan_forward_portable(t: SegmentForward, options: AttentionOptions, precision: str) -> Plan:
    launch, source = _choose("segment_attention_fwd", t, options, precision)
    listed = _bind_tiles(t, options, launch.block_m)
    stride_unit, heads, rows, numbers = packed_strides(t.q, t.k, t.v, t.out)
    constants = {
        **dict(zip(("STRIDE_QT", "STRIDE_KT", "STRIDE_VT", "STRIDE_OT"), rows, strict=True)),
        "HAS_LSE": options.has_lse,
        **constants_of(t, options, launch, stride_unit, options.score_mods, precision),
    }  # fmt: skip
    sizes = (t.q.shape[0], t.k.shape[0], listed.tiles, t.key_rows.shape[1], t.q.shape[1])
    # Heads of out lie side by side.
    scalars = (*heads[:3], *numbers, slopes_stride(t.q, options), *sizes, *_scores(options))
    grid = (listed.tiles * t.q.shape[1],)
    bound = Bound(wrap_triton(_segment_attention_fwd_kernel), grid, scalars, constants)
    ready = is_readable(t)

    def launch_forward(t: SegmentForward) -> None:
        t = t if ready else made_readable(t)
        bound(t.q, t.k, t.v, t.out, t.lse, listed.make(t), t.key_bounds, t.key_rows, t.slopes, t.sinks, t.seed)

    return Plan(launch_forward, {"segment_attention_fwd": (launch, source)})


@planned_by_precision
def _plan_backward_portable(t: SegmentBackward, options: AttentionOptions, precision: str) -> Plan:
    """Plan the list, dq with delta on the way, and dk and dv."""
    dq_config, dq_source = _choose("segment_attention_bwd_dq", t, options, precision)
    dkdv_config, dkdv_source = _choose("segment_attention_bwd_dkdv", t, options, precision)
    listed = _bind_tiles(t, options, dq_config.block_m, dkdv_config.block_n)
    q, k = t.q, t.k
    stride_unit, outer, rows, numbers = packed_strides(q, k, t.v, t.out, t.dout, t.dq, t.dk)
    q_row, k_row, v_row, out_row, dout_row, dq_row, dk_row = rows
    q_number, k_number, v_number, out_number, dout_number, dq_number, dk_number = numbers
    strides = {"STRIDE_QT": q_row, "STRIDE_KT": k_row, "STRIDE_VT": v_row, "STRIDE_DOT": dout_row}
    score_mods = options.backward_score_mods
    dq_constants = {
        **strides, "STRIDE_OT": out_row, "STRIDE_DQT": dq_row, "HAS_DLSE": t.dlse is not None,
        **constants_of(t, options, dq_config, stride_unit, score_mods, precision),
    }  # fmt: skip
    dkdv_constants = {
        **strides, "STRIDE_DKT": dk_row, **constants_of(t, options, dkdv_config, stride_unit, score_mods, precision)
    }  # fmt: skip
    pieces, slopes = t.key_rows.shape[1], slopes_stride(q, options)
    dq_scalars = (
        *outer[:5], q_number, k_number, v_number, out_number, dout_number, dq_number, slopes,
        q.shape[0], k.shape[0], listed.tiles, pieces, q.shape[1], *_scores(options),
    )  # fmt: skip
    dkdv_scalars = (
        *outer[:3], outer[4], q_number, k_number, v_number, dout_number, dk_number, slopes,
        q.shape[0], k.shape[0], listed.tiles, num_segments(t), t.key_rows.shape[0], listed.key_tiles, pieces,
        k.shape[1], *_scores(options),
    )  # fmt: skip
    bound_dq = Bound(
        wrap_triton(_segment_attention_bwd_dq_kernel), (listed.tiles * q.shape[1],), dq_scalars, dq_constants
    )  # fmt: skip
    bound_dkdv = Bound(
        wrap_triton(_segment_attention_bwd_dkdv_kernel), (listed.key_tiles * k.shape[1],), dkdv_scalars, dkdv_constants
    )  # fmt: skip
    ready = is_readable(t)

    def launch_backward(t: SegmentBackward) -> None:
        t = t if ready else made_readable(t)
        tiles, delta = listed.make(t), torch.empty_like(t.lse)
        dlse = t.lse if t.dlse is None else t.dlse
        places = t.key_bounds, t.key_rows, t.slopes, t.seed
        bound_dq(t.q, t.k, t.v, t.out, t.lse, t.dout, dlse, tiles, *places, delta, t.dq)
        bound_dkdv(t.q, t.k, t.v, t.lse, t.dout, delta, tiles, *places, t.dk, t.dv)

    return Plan(launch_backward, {
        "segment_attention_bwd_dq": (dq_config, dq_source),
        "segment_attention_bwd_dkdv": (dkdv_config, dkdv_source),
    })  # fmt: skip


def segment_forward_tensors(call: Any, made: tuple[Tensor, Tensor]) -> SegmentForward:
    slopes, sinks = call.alibi_slopes, call.sinks
    return SegmentForward._make((
        *call[:8], *made,
        slopes if slopes is None else slopes.contiguous(), sinks if sinks is None else sinks.contiguous(),
        call.dropout_seed, call.query_start,
    ))  # fmt: skip


def segment_backward_tensors(call: Any, made: tuple[Tensor, Tensor, Tensor]) -> SegmentBackward:
    slopes = call.alibi_slopes
    slopes = slopes if slopes is None else slopes.contiguous()
    return SegmentBackward._make((*call[:12], *made, slopes, call.dropout_seed, call.query_start))
