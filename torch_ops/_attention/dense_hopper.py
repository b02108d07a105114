"""The launcher of the attention core's Hopper kernels for batches of sequences of one length, [B, H, S, D].

A batch is one segment, whose heads are those of all sequences. Plans are as those of `hopper` and
`hopper_backward`, without boundaries.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from triton import next_power_of_2

from csrc_free_ops.attention.hopper.bwd import _attention_bwd_hopper_kernel
from csrc_free_ops.attention.hopper.bwd_dq_finalize import _attention_bwd_delta_dense_kernel
from csrc_free_ops.attention.hopper.bwd_protocol import tile_columns
from csrc_free_ops.attention.hopper.bwd_small import _attention_bwd_apart_kernel
from csrc_free_ops.attention.hopper.fwd import _attention_fwd_hopper_kernel
from csrc_free_ops.attention.hopper.fwd_fp32 import _attention_fwd_cast_hopper_kernel
from csrc_free_ops.attention.hopper.scheduler import DENSE, DENSE_CUT, DENSE_ENDS
from csrc_free_ops.configs.attention import split_head_dim
from csrc_free_ops.configs.rows import Launch
from torch_ops._attention.hopper import LOG2E, PARTS, describe, folded, forward_constants, forward_descriptors
from torch_ops._attention.hopper_backward import PASS_KEYS, SENT_ROWS, apart_constants, fits_apart, pass_constants
from torch_ops._attention.parts import parts_of, plan_parts
from torch_ops._attention.scores import Scores
from torch_ops._core.counters import block_size, tickets
from torch_ops._core.hopper import Descriptors, programs
from torch_ops._core.launch import Relaunch, dense_like, dense_strides

# Of a thread: those that cast need more than a producer.
CAST_REGISTERS = 224, 56


def plan_dense_forward_hopper(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, launch: Launch, scores: Scores, has_lse: bool = True
) -> Callable[..., None]:
    """launch(q, k, v, out, lse, sinks) for [B, H, S, D], as above; `out` is laid out as what will be written."""
    out_batch, out_head, out_row, _ = out.stride()
    order = _forward_order(q, launch, scores)
    constants = forward_constants(q, k, launch, scores, order, out_row, has_lse, folded(q, k, v, out))
    scalars = (
        out_batch, out_head, q.shape[2], k.shape[2], q.shape[0], scores.scale * LOG2E, *scores.bounds()
    )  # fmt: skip
    descriptors_of = forward_descriptors(q.shape[3], launch.block_n)
    device = q.device
    grid = (programs(device.index), 1)
    relaunch = Relaunch(grid, scalars)

    def launch_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> None:
        descriptors = descriptors_of(q, q, k, k, v, out, out)
        tensors = (out, lse, None, None, sinks, tickets(device).take())
        if not relaunch(None, tensors, descriptors):
            compiled = _attention_fwd_hopper_kernel[grid](*descriptors, *tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_forward


def _whole_columns(head_dim: int) -> int:
    """Of a tile that a descriptor brings in one part."""
    return int(next_power_of_2(head_dim))


def cast_launch(head_dim: int) -> Launch:
    """The launch of the forward that casts as it goes, whose stages leave room for no more keys."""
    return Launch(128, 128 if head_dim == 64 else 64, 8, 2 if head_dim == 96 else 3)


def plan_dense_forward_cast(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dtype: torch.dtype, launch: Launch, scores: Scores, has_lse: bool
) -> Callable[..., None]:
    """launch(q, k, v, out, lse, sinks) of fp32 inputs, computed in `dtype`; `out` is fp32."""
    halves = [tensor.new_empty(tensor.shape, dtype=dtype, device="meta") for tensor in (k, v)]
    (k_batch, k_head, k_row, _), (v_batch, v_head, v_row, _), (out_batch, out_head, out_row, _) = (
        tensor.stride() for tensor in (k, v, out)
    )
    order = _forward_order(q, launch, scores)
    bits = folded(q, *halves, out)
    constants = forward_constants(q, k, launch, scores, order, out_row, has_lse, bits)
    constants |= dict(zip(("CONSUMER_REGISTERS", "PRODUCER_REGISTERS"), CAST_REGISTERS, strict=True))
    constants |= {"K_STRIDE": k_row, "V_STRIDE": v_row}
    scalars = (
        k_batch, k_head, v_batch, v_head,
        out_batch, out_head, q.shape[2], k.shape[2], q.shape[0], scores.scale * LOG2E, *scores.bounds()
    )  # fmt: skip
    device, block = q.device, launch.block_n
    main, tail, width = PARTS[q.shape[3]]
    tiles = ((64, _whole_columns(q.shape[3])), (block, main), (block, tail), (block, width))
    descriptors_of = Descriptors(*[partial(describe, rows=height, columns=across) for height, across in tiles])
    num_counts = block_size(k.shape[0] * k.shape[1] + 1)
    grid = (programs(device.index), 1)
    relaunch = Relaunch(grid, scalars)

    def launch_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> None:
        k_half, v_half = (torch.empty(tensor.shape, dtype=dtype, device=device) for tensor in (k, v))
        counts = tickets(device).take(num_counts)
        descriptors = descriptors_of(q, k_half, k_half, v_half)
        tensors = (k, v, k_half, v_half, out, lse, sinks, counts, tickets(device).take())
        if not relaunch(None, tensors, descriptors):
            compiled = _attention_fwd_cast_hopper_kernel[grid](*descriptors, *tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_forward


def _forward_order(q: Tensor, launch: Launch, scores: Scores) -> int:
    """Rows that see more keys the later they are make tiles of one round end at very different times."""
    units = -(-q.shape[2] // 64)
    rounds = units * q.shape[0] * q.shape[1] / programs(q.device.index)
    pairs = launch.block_m == 128 and units % 2 == 0 and 1 < rounds <= 2
    return (DENSE_ENDS if pairs and scores.left < 0 <= scores.right else DENSE_CUT).value


def _members_apart(q: Tensor, k: Tensor, scores: Scores) -> int:
    """How many query heads of a group have programs of their own, whose parts of dk and dv are then added up, or 1.

    All of them, where programs for key heads alone would leave multiprocessors without work: at the end too, with
    bounds, since tiles then take unequally long.
    """
    group = q.shape[1] // k.shape[1]
    rounds = -(-k.shape[2] // PASS_KEYS) * k.shape[0] * k.shape[1] / programs(q.device.index)
    return group if rounds <= (2 if scores.masked else 0.5) else 1


def _plan_delta(
    dout: Tensor, q: Tensor, k: Tensor, out: Tensor, scores: Scores, has_dlse: bool
) -> Callable[..., None]:  # fmt: skip
    """launch(out, lse, dout, dlse, delta, dq, counts); counts are None where dq is not added up."""
    batch, heads, length, head_dim = q.shape
    main, tail = split_head_dim(head_dim, q.dtype.itemsize)
    unit, outer, (out_row, dout_row, dq_row) = dense_strides(out, dout, dense_like(q))
    scalars = (*outer, heads, length, k.shape[2], *scores.bounds())
    constants = {
        "STRIDE_OT": out_row, "STRIDE_DOT": dout_row, "STRIDE_DQT": dq_row, "UNIT": unit,
        "HEAD_DIM": head_dim, "MAIN": main, "TAIL": tail, "HAS_DLSE": has_dlse,
        "HAS_LEFT": scores.left >= 0, "HAS_RIGHT": scores.right >= 0,
        "BLOCK_M": SENT_ROWS, "BLOCK_N": PASS_KEYS, "num_stages": 1, "num_warps": 8, "launch_pdl": True,
    }  # fmt: skip
    grid = (batch * heads, -(-length // SENT_ROWS))
    relaunch = Relaunch(grid, scalars)

    def launch_delta(*tensors: Tensor | None) -> None:
        if not relaunch(None, tensors):
            compiled = _attention_bwd_delta_dense_kernel[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_delta


def plan_dense_backward_hopper(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, launch: Launch, scores: Scores, has_dlse: bool
) -> Callable[..., None]:  # fmt: skip
    """launch(dout, dlse, q, k, v, out, lse, dq, dk, dv) for [B, H, S, D], as above.

    Each gradient is laid out as `dense_like` its input. dq is added up in order in any case: who adds last to a row
    rounds it, and knows so by the order.
    """
    batch, heads, length, head_dim = q.shape
    k_length = k.shape[2]
    lines = batch * heads
    tiles = -(-length // SENT_ROWS)
    is_apart = fits_apart(q, k, 1, scores)
    members = 1 if is_apart else _members_apart(q, k, scores)
    # Parts of dk and dv are as those of as many key heads as there are query heads.
    owner = q.new_empty((batch, heads, k_length, head_dim), device="meta") if members > 1 else k
    strides = [dense_like(tensor).stride() for tensor in (owner, owner if members > 1 else v, q)]
    batches, of_heads, (dk_row, dv_row, dq_row), _ = zip(*strides, strict=True)
    rows, bits = (dk_row, dv_row, dq_row), folded(q, k, v, dout)
    if is_apart:
        kernel, constants = _attention_bwd_apart_kernel, apart_constants(q, k, scores, DENSE.value, rows, bits)
        grid = (batch * sum(-(-tensor.shape[2] // PASS_KEYS) * tensor.shape[1] for tensor in (q, k)), 1)
    else:
        kernel, grid = _attention_bwd_hopper_kernel, (programs(q.device.index), 1)
        constants = pass_constants(q, owner, launch, scores, True, DENSE.value, 1, rows, bits, members)
    scalars = (*batches, *of_heads, length, k_length, batch, scores.scale, *scores.bounds())
    descriptors_of = Descriptors(*[partial(describe, rows=SENT_ROWS, columns=tile_columns(head_dim))] * 4)
    device = q.device
    relaunch = Relaunch(grid, scalars)
    launch_delta = _plan_delta(dout, q, k, out, scores, has_dlse)
    add_members = plan_parts(q, k, v, 1, members) if members > 1 else None

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        lse = lse.contiguous()
        delta = torch.empty_like(lse)
        descriptors = descriptors_of(q, k, v, dout)
        parts, counts = [dk, dv], None
        if is_apart:
            tensors: tuple[Tensor | None, ...] = (lse, delta, None, None, dk, dv, dq)
        else:
            # Before the kernel that the main one overlaps: it may be made of zeros here.
            ticket = tickets(device).take()
            sums = torch.empty(lines * length * head_dim, dtype=torch.float32, device=device)
            counts = torch.empty(lines * tiles, dtype=torch.int32, device=device)
            if add_members is not None:
                parts = [parts_of(part, members) for part in parts]
            descriptors = (*descriptors, None, None)
            tensors = (lse, delta, None, None, sums, counts, ticket, *parts, dq)
        launch_delta(out, lse, dout, lse if dlse is None else dlse.contiguous(), delta, dq, counts)
        if not relaunch(None, tensors, descriptors):
            compiled = kernel[grid](*descriptors, *tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)
        if add_members is not None:
            add_members(dq, *parts, dq, dk, dv)

    return launch_backward
