"""Encode the images of a batch on all ranks of a process group, each its share.

Every rank holds the encoder and the whole batch, and computes all shares from the grid (`spread_images`), so sizes need
no exchange. One collective gathers the outputs. Each rank writes its outputs one after the other into a row of bytes,
as long as the largest share needs. Rows are bytes because outputs may differ in dtype, as they do under autocast.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_ops._core.checks import refuse
from torch_ops._core.torch_private import pytree
from torch_ops.distributed.spread import Part, Share, balance_of, spread_images
from torch_ops.models.vision_metadata import images_of

_OP = "encode_across_ranks"

# Outputs start at multiples of so many bytes, where a view of any dtype is possible.
_ALIGNMENT = 16

# Its name from torch 2.13 on, and the former one.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


@torch.compiler.disable
def encode_across_ranks(
    encoder: Callable[[Tensor, Tensor], Any],
    pixel_values: Tensor,
    grid_thw: Tensor,
    group: "dist.ProcessGroup | None" = None,
    *,
    balance: float | None = None,
) -> Any:
    """Compute `encoder(pixel_values, grid_thw)`, of which each rank of a process group computes a share.

    All ranks of the group call it with the same encoder, pixel values and grid. All get the whole output, in batch
    order. Each rank calls the encoder once, with its share. A rank without a share encodes a single merged cell, whose
    outputs give widths and dtypes. For a batch of at most one frame, or a group of one rank, each rank encodes the
    whole batch. Only the outputs are exchanged, and with a grid on the CPU nothing waits for the device.

    Args:
        encoder: `QwenVisionEncoder`, or any callable of pixel values and grid whose frames do not see each other, such
            as `functools.partial(encoder, chunk_tokens=...)`. Its result may hold tensors in tuples, lists, dicts or
            Transformers' outputs. Each has a row for each patch or merged cell in batch order, frame by frame.
        pixel_values: [T, P], the whole batch on every rank.
        grid_thw: integers [n, 3], a row (t, h, w) for each image or video. Keep it on the CPU, as for the encoder; the
            grid of a share is on its device.
        group: group of torch.distributed. Default: the default group.
        balance: as in `spread_images`, the same on all ranks. Default: by the encoder's configuration.

    Returns:
        The encoder's result. Outputs are the same up to the order of summation in a matrix product, because frames are
        encoded with others than in one call. All ranks have the same bits, except for a batch of one frame, which each
        rank computes. The gathered rows need as much memory again as the outputs, and more if shares are uneven.

    Raises:
        ValueError: for a bad argument, or if outputs would have a gradient. The message names the argument, what was
            expected and what came. Errors that every rank can see are raised before anything is sent. An error in the
            encoder on one rank leaves the others waiting until the group's timeout, as in any collective.
    """
    ranks, rank = _place(group)
    merge_size = getattr(encoder, "spatial_merge_size", 2)
    images = images_of(_OP, grid_thw, merge_size)
    _check_pixel_values(pixel_values, sum(t * h * w for t, h, w in images), group)
    shares = spread_images(images, ranks, balance_of(encoder) if balance is None else balance)

    if ranks == 1 or sum(part.frames for share in shares for part in share.parts) <= 1:
        output = encoder(pixel_values, grid_thw)
        _check_gradients(pytree.tree_leaves(output))
        return output

    own = shares[rank].parts or (Part(0, 1, merge_size, merge_size),)
    rows = torch.cat([pixel_values[part.start : part.start + part.patches] for part in own])
    grid = torch.tensor([(part.frames, part.height, part.width) for part in own], dtype=grid_thw.dtype, device="cpu")
    output = encoder(rows, grid.to(grid_thw.device))
    leaves, structure = pytree.tree_flatten(output)
    _check_gradients(leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    outputs = _laid_out(tensors, rows, merge_size, max(share.patches for share in shares))
    gathered = iter(_gathered(tensors, outputs, shares, rank, group))
    whole = pytree.tree_unflatten([next(gathered) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
    if isinstance(output, OrderedDict):
        # One of Transformers' outputs is made anew in the order of its class.
        for name in output:
            whole.move_to_end(name)
    return whole


@dataclass(frozen=True)
class _Output:
    """Where a rank's row of bytes holds an output, of up to `rows` rows; each is of `unit` patches."""

    start: int
    rows: int
    unit: int
    width: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + self.rows * math.prod(self.width) * self.dtype.itemsize

    def of(self, row: Tensor) -> Tensor:
        return row[self.start : self.stop].view(self.dtype).view(self.rows, *self.width)


def _laid_out(tensors: Sequence[Tensor], pixels: Tensor, merge_size: int, most: int) -> list[_Output]:
    """Outputs one after the other, with room for a share of `most` patches."""
    outputs, start = [], 0
    patches = pixels.shape[0]
    for tensor in tensors:
        if tensor.device != pixels.device:
            refuse(_OP, "the encoder's outputs", f"on {pixels.device} as pixel_values is", tensor.device)
        units = [unit for unit in (1, merge_size**2) if tensor.dim() and tensor.shape[0] * unit == patches]
        if not units:
            wanted = f"of a row for each patch or merged cell, {patches} or {patches // merge_size**2}"
            refuse(_OP, "the encoder's outputs", wanted, f"shape {list(tensor.shape)}")
        output = _Output(start, most // units[0], units[0], tuple(tensor.shape[1:]), tensor.dtype)
        outputs.append(output)
        start = -(-output.stop // _ALIGNMENT) * _ALIGNMENT
    return outputs


def _gathered(
    tensors: Sequence[Tensor],
    outputs: Sequence[_Output],
    shares: Sequence[Share],
    rank: int,
    group: "dist.ProcessGroup | None",
) -> list[Tensor]:
    """The outputs of all ranks in the order of the batch."""
    if not tensors:
        return []
    length = -(-outputs[-1].stop // _ALIGNMENT) * _ALIGNMENT
    rows = torch.empty((len(shares), length), dtype=torch.uint8, device=tensors[0].device)
    if shares[rank].parts:
        for tensor, output in zip(tensors, outputs, strict=True):
            output.of(rows[rank])[: tensor.shape[0]].copy_(tensor)
    assert _all_gather is not None
    _all_gather(rows.view(-1), rows[rank], group=group)
    places = _places(shares)
    whole = []
    for output in outputs:
        held = [output.of(row) for row in rows]
        whole.append(torch.cat([held[r][first // output.unit : last // output.unit] for r, first, last in places]))
    return whole


def _places(shares: Sequence[Share]) -> list[tuple[int, int, int]]:
    """Rank, and first and last of its own patches, of all parts in the order of the batch."""
    found = []
    for rank, share in enumerate(shares):
        first = 0
        for part in share.parts:
            found.append((part.start, rank, first, first + part.patches))
            first += part.patches
    return [(rank, first, last) for _, rank, first, last in sorted(found)]


def _place(group: "dist.ProcessGroup | None") -> tuple[int, int]:
    """The number of ranks, and the own one."""
    if not (dist.is_available() and dist.is_initialized()):
        wanted = "one of torch.distributed; call init_process_group in processes that torchrun starts"
        refuse(_OP, "group", wanted, "no process group")
    rank = dist.get_rank(group)
    if rank < 0:
        refuse(_OP, "group", "one that this process belongs to", f"another, seen from rank {dist.get_rank()} of all")
    return dist.get_world_size(group), rank


def _check_pixel_values(pixel_values: Tensor, total: int, group: "dist.ProcessGroup | None") -> None:
    if not isinstance(pixel_values, Tensor) or pixel_values.dim() != 2 or pixel_values.shape[0] != total:
        got = f"shape {list(pixel_values.shape)}" if isinstance(pixel_values, Tensor) else type(pixel_values).__name__
        refuse(_OP, "pixel_values", f"a tensor of shape [{total}, P], a row for each patch of the grid", got)
    # As in "cpu:gloo,cuda:nccl".
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    if pixel_values.device.type not in backends:
        wanted = f"on a device that the group has a backend for ({', '.join(backends)})"
        refuse(_OP, "pixel_values", wanted, pixel_values.device)


def _check_gradients(leaves: Sequence[Any]) -> None:
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        wanted = "no gradient; call it under torch.no_grad or torch.inference_mode (DDP spreads training)"
        refuse(_OP, "the encoder's outputs", f"of {wanted}", "a gradient")


__all__ = ["encode_across_ranks"]
