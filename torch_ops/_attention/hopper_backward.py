"""The launcher of the attention core's Hopper backward: what plans of `hopper` are for the forward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from csrc_free_ops.attention.hopper.bwd import _attention_bwd_hopper_kernel
from csrc_free_ops.attention.hopper.bwd_dq_finalize import (
    _attention_bwd_delta_kernel,
    _attention_bwd_round_kernel,
    _attention_bwd_round_lanes_kernel,
    first_columns,
)
from csrc_free_ops.attention.hopper.bwd_protocol import lane_count, tile_columns
from csrc_free_ops.attention.hopper.bwd_small import STAGES, _attention_bwd_apart_kernel
from csrc_free_ops.attention.hopper.scheduler import BY_LENGTH, EVEN, SINGLE
from csrc_free_ops.configs.attention import split_head_dim
from csrc_free_ops.configs.rows import Launch
from torch_ops._attention.hopper import REGISTERS, Descriptors, constants_of, describe, order_of, programs
from torch_ops._attention.scores import Scores
from torch_ops._core.counters import tickets
from torch_ops._core.launch import Relaunch, head_strides, row_stride

# Query rows whose dq is sent at once, keys of a program, and rows that are rounded at once.
SENT_ROWS, PASS_KEYS, ROUNDED_ROWS = 64, 128, 16
# Rows of what goes to a second lane at once, of the first and of the rest of the columns.
LANE_ROWS, LANE_REST_ROWS = 32, 64
# Of 12 and more rounds an order took up to 4 % less time at head dimension 128 and up to 2 % more at 80 (H200); between
# 10 and 12 none was measured.
MANY_ROUNDS = 10
# As rows would say it, of the kernel that has none, where gradients are made apart.
APART = Launch(SENT_ROWS, PASS_KEYS, 8, STAGES.value)


def _registers(head_dim: int) -> tuple[int, int, int]:
    """Beside two sums of 128 columns ptxas makes every product wait for the last where a consumer has fewer."""
    return REGISTERS[2, True] if head_dim <= 96 else (240, 24, 168)


def _rows_back(total: int) -> int:
    """What `lane_distance` is on the device, in rows."""
    return (-(-total // SENT_ROWS) - 1) // 2 * SENT_ROWS


def _describe_lane(part: Tensor, rows: int) -> TensorDescriptor:
    """Columns of the second lane of sums, which lies in dq; `part` is dq as fp32, [T, H, half of the columns].

    Of a row's columns the first half is in the row that `tiles.lanes` says, so many blocks before, and the second in
    the row itself. In shared memory the halves follow each other, so strides cannot fall from the first to the last.
    """
    total, heads, width = part.shape
    back = _rows_back(total)
    row, head, _ = part.stride()
    shape, strides = [heads, total - back, 2, width], [head, row, back * row, 1]
    return TensorDescriptor(part, shape, strides, [1, rows, 2, width], NVMMASharedLayout(0, 32, rank=4))


def _tiles_together(q: Tensor, k: Tensor, num_segments: int, scores: Scores) -> int:
    """How many tiles begin at blocks of their own, with a second lane of sums (`tiles.lanes`), or 1 for none.

    Those of one segment that run side by side, where they are few: the last would wait for all others at the end. With
    more than three rounds of them it was no faster. TMA, which sends to the lane, takes tiles of powers of two: half of
    64, and of 8 or 16 more. Counters of both lanes must fit the first block of dq.
    """
    together = programs(q.device.index) // k.shape[1]
    tiles = -(-k.shape[0] // PASS_KEYS)
    counters = 2 * (q.shape[0] // SENT_ROWS + 3) + 1
    has_room = q.shape[0] > 2 * SENT_ROWS and counters * 4 <= SENT_ROWS * q.shape[2] * q.itemsize
    few = num_segments == 1 and q.shape[2] <= 80 and tiles <= 3 * together
    return together if few and has_room and not scores.masked else 1


def fits_apart(q: Tensor, k: Tensor, num_segments: int, scores: Scores) -> bool:
    """Whether dq and, beside it, dk and dv of one segment can be made by programs of their own, all at once.

    q and k are [T, H, D], or [B, H, S, D], whose heads are all one segment's. Beside wide heads there are no registers
    for masks.
    """
    batch, row = (q.shape[0], 2) if q.dim() == 4 else (1, 0)
    tiles = sum(-(-tensor.shape[row] // PASS_KEYS) * tensor.shape[1] for tensor in (q, k)) * batch
    has_registers = q.shape[-1] <= 96 or not scores.masked
    return num_segments == 1 and has_registers and tiles <= programs(q.device.index)


def _keeps_order(q: Tensor, k: Tensor, num_segments: int, deterministic: bool) -> bool:
    """Whether dq is added up in a fixed order. Sums begin at 0, so of two tiles any order gives the same.

    Of several segments and many rounds of tiles there is hardly anything to wait for, and in order the first part is
    written, not added to zeros.
    """
    rounds = k.shape[0] // PASS_KEYS * k.shape[1] / programs(q.device.index)
    return k.shape[0] > 2 * PASS_KEYS and (deterministic or (num_segments > 1 and rounds > MANY_ROUNDS))


def _plan_delta(
    dout: Tensor, out: Tensor, total_k: int, num_segments: int, scores: Scores, has_dlse: bool, ordered: bool,
    lanes: int,
) -> Callable[..., None]:  # fmt: skip
    """launch(out, lse, dout, dlse, cu_q, cu_k, delta, sums, counts)."""
    total_q, num_heads, head_dim = out.shape
    main, tail = split_head_dim(head_dim, out.dtype.itemsize)
    unit, head_stride = head_strides(out, dout)
    scalars = (*head_stride, total_q, total_k, num_segments, *scores.bounds())
    constants = {
        "STRIDE_OT": row_stride(out), "STRIDE_DOT": row_stride(dout), "UNIT": unit, "HAS_DLSE": has_dlse,
        "HEAD_DIM": head_dim, "MAIN": main, "TAIL": tail, "HAS_LEFT": scores.left >= 0, "HAS_RIGHT": scores.right >= 0,
        "ORDERED": ordered, "LANES": lanes, "ONE": num_segments == 1, "OVERLAPPED": True,
        "BLOCK_M": SENT_ROWS, "BLOCK_N": PASS_KEYS, "num_stages": 1, "num_warps": 8, "launch_pdl": True,
    }  # fmt: skip
    grid = (total_q // SENT_ROWS + num_segments + 2, num_heads)
    relaunch = Relaunch(grid, scalars)

    def launch_delta(*tensors: Tensor) -> None:
        if not relaunch(None, tensors):
            compiled = _attention_bwd_delta_kernel[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_delta


def apart_constants(
    q: Tensor, k: Tensor, scores: Scores, order: int, rows: tuple[int, int, int], folded: int = 0
) -> dict[str, Any]:
    """`rows` are the row strides of dk, dv and dq."""
    constants = constants_of(q, k, APART, scores, _registers(q.shape[-1]))
    del constants["STAGES"]
    strides = dict(zip(("STRIDE_DKT", "STRIDE_DVT", "STRIDE_DQT"), rows, strict=True))
    return {**constants, "ORDER": order, **strides, "FOLDED": folded, "launch_pdl": True}


def _plan_apart(dout: Tensor, q: Tensor, k: Tensor, out: Tensor, scores: Scores, has_dlse: bool) -> Callable[..., None]:
    """What `plan_backward_hopper` gives, where `fits_apart`."""
    total_q, num_heads, head_dim = q.shape
    total_k, num_k_heads, _ = k.shape
    constants = apart_constants(q, k, scores, SINGLE.value, (num_k_heads * head_dim,) * 2 + (num_heads * head_dim,))
    scalars = (0, 0, 0, head_dim, head_dim, head_dim, total_q, total_k, 1, scores.scale, *scores.bounds())
    launch_delta = _plan_delta(dout, out, total_k, 1, scores, has_dlse, ordered=False, lanes=0)
    tile = partial(describe, rows=SENT_ROWS, columns=tile_columns(head_dim))
    descriptors_of = Descriptors(*[tile] * 4)
    grid = (-(-total_q // PASS_KEYS) * num_heads + -(-total_k // PASS_KEYS) * num_k_heads, 1)
    relaunch = Relaunch(grid, scalars)

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Tensor, cu_k: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        lse, cu_q, cu_k = lse.contiguous(), cu_q.contiguous(), cu_k.contiguous()
        delta = torch.empty_like(lse)
        # In place of sums and counters, of which there are none.
        launch_delta(out, lse, dout, lse if dlse is None else dlse.contiguous(), cu_q, cu_k, delta, delta, delta)
        descriptors, tensors = descriptors_of(q, k, v, dout), (lse, delta, cu_q, cu_k, dk, dv, dq)
        if not relaunch(None, tensors, descriptors):
            compiled = _attention_bwd_apart_kernel[grid](*descriptors, *tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_backward


def pass_constants(
    q: Tensor, k: Tensor, launch: Launch, scores: Scores, ordered: bool, order: int, together: int,
    rows: tuple[int, int, int], folded: int = 0, members: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """`rows` are the row strides of dk, dv and dq."""
    head_dim = q.shape[-1]
    return {
        **constants_of(q, k, launch, scores, _registers(head_dim)),
        "ORDERED": ordered, "ORDER": order, "ROUND": together,
        **dict(zip(("STRIDE_DKT", "STRIDE_DVT", "STRIDE_DQT"), rows, strict=True)), "FOLDED": folded,
        "MEMBERS": members,
        # Keys of as many tiles as there is shared memory for.
        "OWN_STAGES": 2 if head_dim <= 80 else 1,
        # Its programs begin while the kernel before ends, and do what needs none of its results.
        "launch_pdl": True,
    }  # fmt: skip


def plan_backward_hopper(
    dout: Tensor, q: Tensor, k: Tensor, out: Tensor, num_segments: int, launch: Launch, scores: Scores,
    has_dlse: bool, deterministic: bool,
) -> Callable[..., None]:  # fmt: skip
    """launch(dout, dlse, q, k, v, out, lse, cu_q, cu_k, dq, dk, dv) on tensors that `addressable` allows.

    Unless `deterministic`, dq may be added up in any order.
    """
    if fits_apart(q, k, num_segments, scores):
        return _plan_apart(dout, q, k, out, scores, has_dlse)
    ordered = _keeps_order(q, k, num_segments, deterministic)
    total_q, num_heads, head_dim = q.shape
    main, tail = split_head_dim(head_dim, q.dtype.itemsize)
    together = _tiles_together(q, k, num_segments, scores) if ordered else 1
    # The producer of wider heads lacks registers for EVEN.
    order = order_of(num_segments, (EVEN if head_dim <= 80 else BY_LENGTH).value)
    row = k.shape[1] * head_dim
    constants = pass_constants(q, k, launch, scores, ordered, order, together, (row, row, num_heads * head_dim))
    tiles = total_q // SENT_ROWS + num_segments + 2
    lanes = lane_count(together)
    # Counters lie in dq, which is written last, where it has room for them.
    num_counts = lanes * num_heads * tiles + 1
    counts_fit = num_counts * 4 <= q.numel() * q.itemsize
    launch_delta = _plan_delta(dout, out, k.shape[0], num_segments, scores, has_dlse, ordered, lanes)
    scalars = (0,) * 6 + (total_q, k.shape[0], num_segments, scores.scale, *scores.bounds())
    widths = (first_columns(head_dim) // 2, (head_dim - first_columns(head_dim)) // 2)
    has_rest = widths[1] > 0
    tile = partial(describe, rows=SENT_ROWS, columns=tile_columns(head_dim))
    round_constants = {
        "STRIDE_DQT": num_heads * head_dim, "HEAD_DIM": head_dim, "BLOCK_M": ROUNDED_ROWS, "OVERLAPS": True,
        "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    rounded_rows = total_q
    if lanes == 1:
        round_kernel = _attention_bwd_round_kernel
        round_scalars: tuple[Any, ...] = (total_q, scores.scale)
        round_constants |= {"MAIN": main, "TAIL": tail, "num_stages": 1}
        descriptors_of = Descriptors(*[tile] * 4)
    else:
        round_kernel = _attention_bwd_round_lanes_kernel
        # The rows before those are rounded with them.
        rounded_rows -= _rows_back(total_q)
        round_scalars = (total_q, k.shape[0], scores.scale)
        round_constants |= {"ROUND": together, "BLOCK": SENT_ROWS, "OWNED": PASS_KEYS}
        in_lane = [partial(_describe_lane, rows=rows) for rows in (LANE_ROWS, LANE_REST_ROWS)]
        descriptors_of = Descriptors(*[tile] * 4, *in_lane[: 2 if has_rest else 1])
    device = q.device
    grid = (programs(device.index), 1)
    round_grid = (-(-rounded_rows // ROUNDED_ROWS), num_heads)
    relaunch, relaunch_round = Relaunch(grid, scalars), Relaunch(round_grid, round_scalars)

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Tensor, cu_k: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        lse, cu_q, cu_k = lse.contiguous(), cu_q.contiguous(), cu_k.contiguous()
        dlse = lse if dlse is None else dlse.contiguous()
        # Before the kernel that the main one overlaps: it may be made of zeros here.
        ticket = tickets(device).take()
        delta = torch.empty_like(lse)
        sums = torch.empty(num_heads * total_q * head_dim, dtype=torch.float32, device=device)
        if counts_fit:
            counts = dq.view(torch.int32)
        else:
            counts = torch.empty(num_counts, dtype=torch.int32, device=device)
        launch_delta(out, lse, dout, dlse, cu_q, cu_k, delta, sums, counts)
        if lanes == 1:
            descriptors = (*descriptors_of(q, k, v, dout), None, None)
            rounded: tuple[Tensor, ...] = (sums, dq)
        else:
            lane = dq.view(torch.float32)
            in_parts = lane.split(widths, 2) if has_rest else (lane,)
            descriptors = (*descriptors_of(q, k, v, dout, *in_parts), *(None,) * (not has_rest))
            rounded = (sums, lane, dq, cu_q, cu_k)
        tensors = (lse, delta, cu_q, cu_k, sums, counts, ticket, dk, dv, None)
        if not relaunch(None, tensors, descriptors):
            compiled = _attention_bwd_hopper_kernel[grid](*descriptors, *tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)
        if not relaunch_round(None, rounded):
            compiled = round_kernel[round_grid](*rounded, *round_scalars, **round_constants)
            relaunch_round.keep(None, rounded, round_constants, compiled)

    return launch_backward
