"""The launcher of the attention core's Hopper kernels (Gluon), which no compiler of PyTorch's can take apart.

`refusal` says from metadata alone why a call cannot take this path; `plan_forward_hopper` returns the function that
launches, as the plans of `_attention` do.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from csrc_free_ops.attention.hopper_fwd import _attention_fwd_hopper_kernel
from csrc_free_ops.attention.hopper_work import BY_LENGTH, IN_PLACE, RANKED, SINGLE
from csrc_free_ops.configs import Gpu, Launch
from torch_ops._attention_portable import choose, mean_length
from torch_ops._hopper import Descriptors, hopper_refusal, programs, to_keep
from torch_ops._launches import Relaunch
from torch_ops._scores import Scores
from torch_ops.settings import settings

LOG2E = 1.4426950408889634
# By head dimension: columns of the two parts of q and k (of one that is not there, 16), and of v's tiles.
PARTS = {64: (64, 16, 64), 72: (64, 16, 16), 80: (64, 16, 16), 96: (64, 32, 32), 128: (128, 16, 64)}
# By consumer warpgroups and whether they overlap: registers of a consumer's thread, of the producer's, and at launch.
REGISTERS = {(2, True): (232, 40, 168), (3, True): (160, 32, 128), (3, False): (152, 56, 128)}
# How long a round of tiles of so many warpgroups takes, by that of two; other head dimensions take the last. By 2048
# and 16 x 1024 rows on an H200.
ROUND = {64: {1: 0.5, 2: 1.0, 3: 1.2}, 0: {1: 0.8, 2: 1.0, 3: 1.35}}


def refusal(gpu: Gpu, scores: Scores, **tensors: Tensor) -> str:
    """Why a call with these, of which q is one, cannot take the Hopper path, or nothing."""
    q = tensors["q"]
    if reason := hopper_refusal(gpu, q.dtype):
        return reason
    # Not `in PARTS`: in graphs the size may be a symbol, which has no hash.
    if all(q.shape[2] != head_dim for head_dim in PARTS):
        return f"the Hopper path takes head dimensions {', '.join(map(str, PARTS))}"
    for name, is_on in (("softcap", scores.softcap), ("ALiBi", scores.alibi), ("dropout", scores.dropout)):
        if is_on:
            return f"the Hopper path has no {name}"
    for name, tensor in tensors.items():
        if not has_tiles(tensor):
            return f"TMA cannot address {name} of strides {tensor.stride()}"
    return ""


def has_tiles(tensor: Tensor) -> bool:
    """Whether TMA can address tiles of this tensor: strides of whole 16 bytes."""
    row, head, column = tensor.stride()
    return bool(column == 1 and row % 8 == 0 and head % 8 == 0 and row and (head or tensor.shape[1] == 1))


def addressable(*tensors: Tensor) -> bool:
    """Whether TMA can start at these addresses, and there is anything to address."""
    return all(tensor.data_ptr() % 16 == 0 and tensor.numel() > 0 for tensor in tensors)


class _Tickets:
    """Counters that programs draw their tiles from: an int32, 0 between launches, one per stream.

    Launches on one stream follow each other. A captured launch may be replayed on any stream, beside any other, so it
    gets a counter of its own, until whoever captured it gives it back; where none is left, one that its graph sets to 0
    first.
    """

    SLAB = 4096

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_stream: dict[int, Tensor] = {}
        self._fresh: list[Tensor] = []
        self._captured: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self) -> Tensor:
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        if torch.cuda.is_current_stream_capturing():
            if not self._fresh:
                return torch.zeros(1, dtype=torch.int32, device=self._device)
            self._captured[stream].append(self._fresh.pop())
            return self._captured[stream][-1]
        counter = self._of_stream.get(stream)
        if counter is None:
            if not self._fresh:
                self._fill()
            counter = self._of_stream[stream] = self._fresh.pop()
        return counter

    @contextlib.contextmanager
    def lending(self, counters: list[Tensor]) -> Iterator[None]:
        """What a capture on this stream takes within is noted in `counters`, for `give_back`."""
        if self._of_stream and not self._fresh:
            self._fill()
        taken = self._captured[torch._C._cuda_getCurrentRawStream(self._device.index)]
        others = len(taken)
        try:
            yield
        finally:
            counters += taken[others:]
            del taken[others:]

    def give_back(self, counters: list[Tensor]) -> None:
        """Of graphs that are done, and never replayed again."""
        self._fresh += counters

    def _fill(self) -> None:
        # 16 bytes apart, so that every launch is on aligned tensors.
        slab = to_keep(lambda: torch.zeros(self.SLAB, 4, dtype=torch.int32, device=self._device), self._device)
        # Other streams do not wait for this one's zeros.
        torch.cuda.current_stream(self._device).synchronize()
        self._fresh += slab[:, :1].unbind()


tickets = lru_cache(_Tickets)


def _layout(columns: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=3)


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of `rows` rows and `columns` columns of one head; what lies outside of [T, H, D] reads as zero."""
    row, head, _ = tensor.stride()
    if tensor.shape[1] == 1:
        head = tensor.shape[2]
    if tensor.shape[0] == 1:
        row = head * tensor.shape[1]
    return TensorDescriptor(tensor, list(tensor.shape), [row, head, 1], [rows, 1, columns], _layout(columns))


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
        "HEAD_DIM": q.shape[2], "HEADS": q.shape[1], "GROUP": q.shape[1] // k.shape[1],
        "HAS_LEFT": scores.left >= 0, "HAS_RIGHT": scores.right >= 0, "STAGES": launch.num_stages,
        "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer, "num_warps": 4, "maxnreg": at_launch,
    }  # fmt: skip


def forward_launch(q: Tensor, scores: Scores, num_segments: int) -> tuple[Launch, str]:
    """The forward's launch, and where it comes from.

    Shipped rows were measured with many segments. One segment's tiles take so many rounds of the programs: it takes the
    launch of long segments, or, where tiles of two warpgroups are done sooner than those of three, such tiles. Of one
    round, smaller blocks begin sooner; at head dimension 72 they are faster in any.
    """
    launch, source = choose("attention_fwd_hopper", q, scores, mean_length(q.shape[0], num_segments))
    if num_segments != 1 or any(row.launch is launch for row in settings.rows):
        return launch, source
    launch, source = choose("attention_fwd_hopper", q, scores, None, ())
    if launch.block_m != 192:
        return launch, source
    each = -(-q.shape[0] // 64) * q.shape[1] / programs(q.device.index)
    rounds, rest = divmod(each, 3)
    takes = ROUND.get(q.shape[2], ROUND[0])
    tall = rounds * takes[3] + (takes[math.ceil(rest)] if rest else 0)
    if each > 2 and tall <= math.ceil(each / 2):
        return launch, source
    columns = 64 if each <= 2 or q.shape[2] == 72 else launch.block_n
    return Launch(128, columns, 8, 3 if q.shape[2] <= 80 else launch.num_stages), source


def plan_forward_hopper(
    q: Tensor, k: Tensor, num_segments: int, launch: Launch, scores: Scores, has_lse: bool = True
) -> Callable[..., None]:
    """launch(q, k, v, cu_q, cu_k, out, lse) on tensors that `addressable` allows; without `has_lse` none is written."""
    # With three warpgroups, scores and weights of a wider head do not fit the registers at once.
    overlap = launch.block_m == 128 or q.shape[2] <= 72
    groups = launch.block_m // 64
    constants = constants_of(q, k, launch, scores, REGISTERS[groups, overlap])
    constants |= {"GROUPS": groups, "BLOCK_N": launch.block_n, "OVERLAP": overlap}
    constants |= {"ORDER": order_of(num_segments, SINGLE.value), "HAS_LSE": has_lse, "launch_pdl": True}
    scalars = (q.shape[0], k.shape[0], num_segments, scores.scale * LOG2E, *scores.bounds())
    main, tail, width = PARTS[q.shape[2]]
    cols = launch.block_n
    tiles = ((64, main), (64, tail), (cols, main), (cols, tail), (cols, width), (64, main), (64, tail))
    descriptors_of = Descriptors(*[partial(describe, rows=rows, columns=columns) for rows, columns in tiles])
    device = q.device
    grid = (programs(device.index), 1)
    relaunch = Relaunch(grid, scalars)

    def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, out: Tensor, lse: Tensor) -> None:
        descriptors = descriptors_of(q, q, k, k, v, out, out)
        tensors = (out, lse, cu_q.contiguous(), cu_k.contiguous(), tickets(device).take())
        if not relaunch(None, tensors, descriptors):
            compiled = _attention_fwd_hopper_kernel[grid](*descriptors, *tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return launch_forward
