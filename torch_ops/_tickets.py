"""Counters on the device that outlive a launch."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from torch_ops._hopper import to_keep


class Tickets:
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


tickets = lru_cache(Tickets)
