"""Checks that the ranks of a process group run: context parallel attention against one device's.

Each rank gathers keys and values, runs the op on the gathered buffer, and gets the sum of its gradients back.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from torch_ops import segment_attention
from torch_ops.segments import zigzag, zigzag_indices
from torch_ops.testing import check, references
from torch_ops.testing.cases import cumulative
from torch_ops.testing.tolerance import Draw

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 32
NAMES = "out", "lse", "dq", "dk", "dv"
# Sequences that chunks cut evenly; some that they do not, so that ranks have different numbers of rows; one alone.
LENGTHS = ((64, 32, 128), (37, 0, 3, 61, 90), (1,))


def _on_one_device(lengths: tuple[int, ...], tensors: list[Tensor], dout: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    """out, lse and gradients of the whole batch, by the reference at the tensors' dtype."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out, lse = references.window_attn(*leaves, cumulative(lengths, dout.device), causal=True)
    total = (out * dout.to(out.dtype)).sum() + (lse * dlse.to(lse.dtype)).sum()
    return dict(zip(NAMES, (out, lse, *torch.autograd.grad(total, leaves)), strict=True))


def _gathered(rows: Tensor, rows_per_rank: int, world_size: int) -> Tensor:
    """The rows of all ranks, each padded to as many."""
    padded = rows.new_full((rows_per_rank, *rows.shape[1:]), torch.nan)
    padded[: rows.shape[0]] = rows
    buffer = rows.new_empty((world_size * rows_per_rank, *rows.shape[1:]))
    dist.all_gather_into_tensor(buffer, padded)
    return buffer


def _verify_rank(lengths: tuple[int, ...], dtype: torch.dtype, device: str) -> Draw:
    """This rank's results by the op and its collectives, and its part of one device's."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn((sum(lengths), heads, HEAD_DIM), generator=generator).to(device, dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    dlse = torch.randn((HEADS, sum(lengths)), generator=generator).to(device)
    own = zigzag_indices(lengths, rank, world_size).to(device)
    most = max(zigzag_indices(lengths, each, world_size).numel() for each in range(world_size))
    segments = zigzag(lengths, rank, world_size, most, device)

    keys, values = (_gathered(tensor[own], most, world_size) for tensor in (k, v))
    out, lse = segment_attention(q[own], keys, values, *segments, return_lse=True)
    dq, *gradients = torch.ops.vk.segment_attention_backward(
        dout[own], dlse[:, own].contiguous(), q[own], keys, values, out, lse, *segments, float32_kv=True
    )
    summed = []
    for each in gradients:
        assert each.dtype is torch.float32
        mine = each.new_empty((most, *each.shape[1:]))
        dist.reduce_scatter_tensor(mine, each)
        # No segment sees the padding.
        assert not mine[own.numel() :].any()
        summed.append(mine[: own.numel()].to(dtype))
    actual = dict(zip(NAMES, (out, lse, dq, *summed), strict=True))

    eager = _on_one_device(lengths, [q, k, v], dout, dlse)
    truth = _on_one_device(lengths, [tensor.double() for tensor in (q, k, v)], dout, dlse)
    for whole in (eager, truth):
        whole.update({name: whole[name].index_select(int(name == "lse"), own) for name in NAMES})
    return actual, eager, truth


def ranks_have_what_one_device_has(device: str) -> None:
    """All sequences are judged together: a single token has too few numbers for the rule."""
    for dtype in (torch.float16, torch.float32):
        draws = [_verify_rank(lengths, dtype, device) for lengths in LENGTHS]
        actual, eager, truth = (
            {name: torch.cat([each[name].flatten() for each in part]) for name in NAMES}
            for part in zip(*draws, strict=True)
        )
        check(actual, eager, truth)


BODIES = (ranks_have_what_one_device_has,)
