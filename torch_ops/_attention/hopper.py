"""The launcher of the attention core's Hopper kernels (Gluon), which no compiler of PyTorch's can take apart.

`refusal` says from metadata alone why a call cannot take this path; `plan_forward_hopper` returns the function that
launches, as the plans of `plan` do.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from csrc_free_ops.attention.hopper.fwd import _attention_fwd_hopper_kernel
from csrc_free_ops.attention.hopper.scheduler import BY_LENGTH, IN_PLACE, RANKED, SINGLE
from csrc_free_ops.configs.rows import Gpu, Launch
from torch_ops._attention.choose import choose, mean_length
from torch_ops._attention.scores import Scores
from torch_ops._core.counters import tickets
from torch_ops._core.hopper import Descriptors, hopper_refusal, programs
from torch_ops._core.launch import Relaunch
from torch_ops.settings import settings

LOG2E = 1.4426950408889634
# By head dimension: columns of the two parts of q and k (of one that is not there, 16), and of v's tiles.
PARTS = {64: (64, 16, 64), 72: (64, 16, 16), 80: (64, 16, 16), 96: (64, 32, 32), 128: (128, 16, 64)}
# By consumer warpgroups and whether they overlap: registers of a consumer's thread, of the producer's, and at launch.
REGISTERS = {(2, True): (232, 40, 168), (3, True): (160, 32, 128), (3, False): (152, 56, 128)}
# How long a round of tiles of so many warpgroups takes, by that of two; other head dimensions take the last. By 2048
# and 16 x 1024 rows on an H200.
ROUND = {64: {1: 0.5, 2: 1.0, 3: 1.2}, 0: {1: 0.8, 2: 1.0, 3: 1.35}}


def refusal(gpu: Gpu, scores: Scores, dtype: torch.dtype | None = None, /, **tensors: Tensor) -> str:
    """Why a call with these, of which q is one, cannot take the Hopper path, or nothing.

    `dtype` is what it computes in, where that is not the tensors' own.
    """
    q = tensors["q"]
    if reason := hopper_refusal(gpu, dtype or q.dtype):
        return reason
    # Not `in PARTS`: in graphs the size may be a symbol, which has no hash.
    if all(q.shape[-1] != head_dim for head_dim in PARTS):
        return f"the Hopper path takes head dimensions {', '.join(map(str, PARTS))}"
    for name, is_on in (("softcap", scores.softcap), ("ALiBi", scores.alibi), ("dropout", scores.dropout)):
        if is_on:
            return f"the Hopper path has no {name}"
    for name, tensor in tensors.items():
        if not has_tiles(tensor):
            return f"TMA cannot address {name} of strides {tensor.stride()}"
    return ""


def has_tiles(tensor: Tensor) -> bool:
    """Whether TMA can address tiles of this tensor: strides of whole 16 bytes, none of them 0."""
    *outer, column = tensor.stride()
    sizes = tensor.shape[:-1]
    return bool(
        column == 1
        and all(stride % 8 == 0 and (stride or size == 1) for stride, size in zip(outer, sizes, strict=True))
    )


def addressable(*tensors: Tensor) -> bool:
    """Whether TMA can start at these addresses, and there is anything to address."""
    return all(tensor.data_ptr() % 16 == 0 and tensor.numel() > 0 for tensor in tensors)


def _layout(columns: int, rank: int, bits: int) -> NVMMASharedLayout:
    # What warps read by themselves lies as it does in memory.
    if bits == 32:
        return NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)
    return NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=rank)


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of `rows` rows and `columns` columns of one head of [T, H, D] or [B, H, S, D].

    What lies outside of the tensor reads as zero. A batch is described in three dimensions where its strides allow: TMA
    is slower in four.
    """
    shape, strides, bits = list(tensor.shape), list(tensor.stride()), 8 * tensor.dtype.itemsize
    if tensor.dim() == 4:
        batch, heads, length, head_dim = shape
        if folds_heads(tensor):
            shape, strides = [length, batch * heads, head_dim], [strides[2], strides[1], 1]
        elif folds_rows(tensor):
            shape, strides = [batch * length, heads, head_dim], [strides[2], strides[1], 1]
        else:
            return TensorDescriptor(tensor, shape, strides, [1, 1, rows, columns], _layout(columns, 4, bits))
    row, head, _ = strides
    # A dimension of one may have any stride, also one that TMA does not take.
    if shape[1] == 1:
        head = shape[2]
    if shape[0] == 1:
        row = head * shape[1]
    return TensorDescriptor(tensor, shape, [row, head, 1], [rows, 1, columns], _layout(columns, 3, bits))


def folds_heads(tensor: Tensor) -> bool:
    """Whether the heads of all sequences of [B, H, S, D] lie at one distance."""
    batch, heads, _, _ = tensor.shape
    return batch == 1 or tensor.stride(0) == heads * tensor.stride(1)


def folds_rows(tensor: Tensor) -> bool:
    """Whether the rows of all sequences of [B, H, S, D] do."""
    return bool(tensor.stride(0) == tensor.shape[2] * tensor.stride(2))


def folded(*tensors: Tensor) -> int:
    """A bit for each, the first the lowest: FOLDED of `tiles.hopper_memory.coordinates`."""
    return sum((not folds_heads(tensor) and folds_rows(tensor)) << place for place, tensor in enumerate(tensors))


def order_of(num_segments: int, of_one: int) -> int:
    if num_segments == 1:
        return of_one
    return (BY_LENGTH if num_segments <= RANKED.value - 2 else IN_PLACE).value


def constants_of(
    q: Tensor, k: Tensor, launch: Launch, scores: Scores, registers: tuple[int, int, int]
) -> dict[str, Any]:
    """What both directions are built for."""
    consumer, producer, at_launch = registers
    return {
        "HEAD_DIM": q.shape[-1], "HEADS": q.shape[1], "GROUP": q.shape[1] // k.shape[1],
        "HAS_LEFT": scores.left >= 0, "HAS_RIGHT": scores.right >= 0, "STAGES": launch.num_stages,
        "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer, "num_warps": 4, "maxnreg": at_launch,
    }  # fmt: skip


def forward_launch(q: Tensor, scores: Scores, num_segments: int) -> tuple[Launch, str]:
    """The forward's launch, and where it comes from.

    Shipped rows were measured with many segments. One segment's tiles, and those of a batch [B, H, S, D], whose heads
    are all one segment's, take so many rounds of the programs: they take the launch of long segments, or, where tiles
    of two warpgroups are done sooner than those of three, such tiles. Of one round, smaller blocks begin sooner; at
    head dimension 72 they are faster in any.
    """
    rows, heads = (q.shape[2], q.shape[0] * q.shape[1]) if q.dim() == 4 else (q.shape[0], q.shape[1])
    launch, source = choose("attention_fwd_hopper", q, scores, mean_length(rows, num_segments))
    if num_segments != 1 or any(row.launch is launch for row in settings.rows):
        return launch, source
    launch, source = choose("attention_fwd_hopper", q, scores, None, ())
    if launch.block_m != 192:
        return launch, source
    head_dim = q.shape[-1]
    each = -(-rows // 64) * heads / programs(q.device.index)
    if q.dim() == 4 and head_dim == 64 and scores.masked and each > 2:
        # 4 x 32 x 1024 causal rows take 54.7 us on an H200, with tiles of three warpgroups 58.0.
        return Launch(128, 128, 8, 3), source
    rounds, rest = divmod(each, 3)
    takes = ROUND.get(head_dim, ROUND[0])
    tall = rounds * takes[3] + (takes[math.ceil(rest)] if rest else 0)
    if each > 2 and tall <= math.ceil(each / 2):
        return launch, source
    columns = 64 if each <= 2 or head_dim == 72 else launch.block_n
    return Launch(128, columns, 8, 3 if head_dim <= 80 else launch.num_stages), source


def forward_constants(
    q: Tensor,
    k: Tensor,
    launch: Launch,
    scores: Scores,
    order: int,
    out_row: int,
    has_lse: bool,
    folded: int = 0,
) -> dict[str, Any]:
    # With three warpgroups, scores and weights of a wider head do not fit the registers at once.
    overlap = launch.block_m == 128 or q.shape[-1] <= 72
    groups = launch.block_m // 64
    return {
        **constants_of(q, k, launch, scores, REGISTERS[groups, overlap]),
        "GROUPS": groups, "BLOCK_N": launch.block_n, "OVERLAP": overlap, "ORDER": order, "HAS_LSE": has_lse,
        "HAS_SINKS": scores.has_sinks, "OUT_STRIDE": out_row, "FOLDED": folded, "launch_pdl": True,
    }  # fmt: skip


def forward_descriptors(head_dim: int, columns: int) -> Descriptors:
    """Of q, q, k, k, v, out, out: main and tail of each but v."""
    main, tail, width = PARTS[head_dim]
    tiles = ((64, main), (64, tail), (columns, main), (columns, tail), (columns, width), (64, main), (64, tail))
    return Descriptors(*[partial(describe, rows=rows, columns=columns) for rows, columns in tiles])


def plan_forward_hopper(
    q: Tensor, k: Tensor, num_segments: int, launch: Launch, scores: Scores, has_lse: bool = True
) -> Callable[..., None]:
    """launch(q, k, v, cu_q, cu_k, out, lse, sinks) on tensors that `addressable` allows; no lse without `has_lse`."""
    order = order_of(num_segments, SINGLE.value)
    constants = forward_constants(q, k, launch, scores, order, q.shape[1] * q.shape[2], has_lse)
    scalars = (0, 0, q.shape[0], k.shape[0], num_segments, scores.scale * LOG2E, *scores.bounds())
    descriptors_of = forward_descriptors(q.shape[2], launch.block_n)
    device = q.device
    grid = (programs(device.index), 1)
    relaunch = Relaunch(grid, scalars)

    def launch_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, out: Tensor, lse: Tensor,
        sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        descriptors = descriptors_of(q, q, k, k, v, out, out)
        tensors = (out, lse, cu_q.contiguous(), cu_k.contiguous(), sinks, tickets(device).take())
        if not relaunch(None, tensors, descriptors):
            compiled = _attention_fwd_hopper_kernel[grid](*descriptors, *tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_forward
