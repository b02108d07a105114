"""Counters on the device that outlive a launch."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from triton import next_power_of_2

from torch_ops._core.hopper import to_keep
from torch_ops._core.torch_private import raw_cuda_stream

SMALLEST_BLOCK = 32


def block_size(count: int) -> int:
    """The size of a block of at least so many counters: of few sizes, so that few are kept."""
    return max(SMALLEST_BLOCK, next_power_of_2(count))


class WorkCounters:
    """Counters of launches, int32, 0 between them: one that programs draw their tiles from, or a block. Per stream.

    Launches on one stream follow each other. A captured launch may be replayed on any stream, beside any other, so it
    gets counters of its own until its owner gives them back. Where none are left, it gets some that its graph sets to 0
    first. So does a launch that takes more than LARGEST.
    """

    SLAB = 2**14
    LARGEST = 2**12

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Keys: stream and size, and size.
        self._of_stream: dict[tuple[int, int], Tensor] = {}
        self._fresh: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._captured: defaultdict[int, list[Tensor]] = defaultdict(list)

    def acquire(self, size: int = 1) -> Tensor:
        """One counter, or a block of this `block_size`."""
        stream = raw_cuda_stream(self._device.index)
        if torch.cuda.is_current_stream_capturing():
            if not self._fresh[size]:
                return self._zeros(size)
            self._captured[stream].append(self._fresh[size].pop())
            return self._captured[stream][-1]
        counters = self._of_stream.get((stream, size))
        if counters is None:
            if size > self.LARGEST:
                return self._zeros(size)
            if not self._fresh[size]:
                self._fill(size)
            counters = self._of_stream[stream, size] = self._fresh[size].pop()
        return counters

    @contextlib.contextmanager
    def recording_acquired(self, counters: list[Tensor]) -> Iterator[None]:
        """Within, counters that a capture on this stream takes are noted in `counters`, for `release`."""
        for size in {size for _, size in list(self._of_stream)}:
            if not self._fresh[size]:
                self._fill(size)
        taken = self._captured[raw_cuda_stream(self._device.index)]
        others = len(taken)
        try:
            yield
        finally:
            counters += taken[others:]
            del taken[others:]

    def release(self, counters: list[Tensor]) -> None:
        """Counters of graphs that are done and never replayed again."""
        for each in counters:
            self._fresh[each.numel()].append(each)

    def _fill(self, size: int) -> None:
        # At least 16 bytes apart, so that every launch is on aligned tensors.
        apart = max(size, 4)
        slab = to_keep(lambda: self._zeros(self.SLAB // apart, apart), self._device)
        # Other streams do not wait for this one's zeros.
        torch.cuda.current_stream(self._device).synchronize()
        self._fresh[size] += slab[:, :size].unbind()

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)


work_counters = lru_cache(WorkCounters)
