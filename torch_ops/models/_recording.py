"""The packed call of an encoder on static tensors: CUDA graphs, or on the CPU what stands in for them."""

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_ops._core.counters import work_counters
from torch_ops._core.device import out_of_memory
from torch_ops._core.torch_private import copy_all
from torch_ops.models._capture import OwnStream, own_stream
from torch_ops.models._watch import Behaviour, Weights, numeric_flags
from torch_ops.models.vision_metadata import Image, Padding, VisionMetadata, metadata_of
from torch_ops.settings import settings

if TYPE_CHECKING:
    from torch_ops.models.vision import QwenVisionEncoder

Outputs = tuple[Tensor, Tensor, tuple[Tensor, ...]]


class Inputs:
    """The pixels that graphs read: rows of a tensor that stays where it is."""

    def __init__(self, encoder: "QwenVisionEncoder", rows: int) -> None:
        weight = encoder.patch_embed.proj.weight
        # Tensors made in inference mode could not be filled outside of it.
        with torch.inference_mode(False):
            self.pixels = torch.zeros((rows, weight[0].numel()), dtype=weight.dtype, device=weight.device)
        self._filled = 0

    @torch.no_grad()
    def fill(self, pixel_values: Tensor) -> None:
        rows = pixel_values.shape[0]
        self.pixels[:rows].copy_(pixel_values, non_blocking=True)
        # Rows of a batch before may hold anything, and padding is to be finite.
        if rows < self._filled:
            self.pixels[rows : self._filled].zero_()
        self._filled = rows


class Recording:
    """`encode_packed` on the static tensors of a budget: `replay` returns its outputs, the same tensors every time."""

    replay: Callable[[], Outputs]

    def __init__(self, encoder: "QwenVisionEncoder", statics: "Statics", budget: Padding) -> None:
        self.inputs = statics.inputs(encoder, budget)
        pixels = self.inputs.pixels[: budget.rows]
        self.metadata = metadata = metadata_of((), encoder.sizes, pixels.device, budget).clone()
        self._filled: VisionMetadata | None = None

        encode = functools.partial(encoder.encode_packed, pixels, metadata)
        self.replay = _captured(encode, statics) if pixels.is_cuda else _repeated(encode)

    def fill(self, metadata: VisionMetadata) -> None:
        """Copy the metadata of a batch. Metadata of the last grid is the same object, so nothing is copied."""
        if metadata is not self._filled:
            self._filled = None
            self.metadata.copy_(metadata)
            self._filled = metadata


def _captured(encode: Callable[[], Outputs], statics: "Statics") -> Callable[[], Outputs]:
    own = statics.own
    assert own is not None
    # Compilation and lasting allocations happen before the capture.
    encode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(own.stream), work_counters(own.stream.device).recording_acquired(statics.counters):
        # `torch.cuda.graph` would first wait for the device and give back all memory that the process has cached. Other
        # threads may go on using the device.
        graph.capture_begin(pool=own.pool, capture_error_mode="thread_local")
        try:
            outputs = encode()
        finally:
            graph.capture_end()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


def _repeated(encode: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """Stand in for a graph on the CPU."""
    outputs: list[Outputs] = []

    @torch.inference_mode(False)
    @torch.no_grad()
    def replay() -> Outputs:
        last, pooled, taps = encode()
        if not outputs:
            outputs.append((last, pooled, taps))
        for static, fresh in zip((*outputs[0][:2], *outputs[0][2]), (last, pooled, *taps), strict=True):
            static.copy_(fresh)
        return outputs[0]

    return replay


class Statics:
    """State that the graphs of an encoder share: pixels, a stream and memory to capture with, their order.

    Dropping it waits until the last call on the device is done. Its tensors belong to the stream of the first call,
    whatever other streams used them.
    """

    def __init__(self, encoder: "QwenVisionEncoder", rows: int) -> None:
        # A copy of an encoder may share its cache, as replicas of DataParallel do.
        self.encoder = weakref.ref(encoder)
        self._inputs = Inputs(encoder, rows)
        self.recordings: dict[Padding, Recording] = {}
        self.weights, self.behaviour = Weights(encoder), Behaviour(encoder)
        self._generation, self._flags = settings.generation, numeric_flags()
        self.own: OwnStream | None = None
        self._done: torch.cuda.Event | None = None
        # Counters of launches in the graphs, see `_core/counters.py`.
        self.counters: list[Tensor] = []
        device = self.pixels.device
        if device.type == "cuda":
            # One for all graphs, since each has a workspace of cuBLAS.
            self.own = own_stream(device)
            self._done = torch.cuda.Event()
            weakref.finalize(self, _settle, self._done, self.counters, device).atexit = False

    @property
    def pixels(self) -> Tensor:
        return self._inputs.pixels

    def inputs(self, encoder: "QwenVisionEncoder", budget: Padding) -> Inputs:
        """Return the pixels that this budget's graph reads, or would read."""
        if budget in self.recordings:
            return self.recordings[budget].inputs
        assert budget.rows is not None
        if budget.rows > self.pixels.shape[0]:
            # Graphs that are there keep theirs.
            self._inputs = Inputs(encoder, budget.rows)
        return self._inputs

    def static_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors outside of the memory pool that calls are copied into."""
        recordings = self.recordings.values()
        pixels = dict.fromkeys((self.pixels, *(each.inputs.pixels for each in recordings)))
        return (*pixels, *(tensor for each in recordings for _, tensor in each.metadata.tensors()))

    def current(self) -> bool:
        """Return whether graphs still compute what the encoder would."""
        return (
            self._generation == settings.generation
            and self.weights.unchanged()
            and self.behaviour.unchanged()
            and self._flags == numeric_flags()
        )

    def usable(self) -> bool:
        """Return whether a replay reads valid memory. Its results may still be out of date; `current` tells."""
        return self._generation == settings.generation and self.weights.in_place()

    def replayed(
        self, encoder: "QwenVisionEncoder", pixel_values: Tensor, images: tuple[Image, ...], budget: Padding,
        copies: bool,
    ) -> list[Tensor] | None:  # fmt: skip
        """Return the outputs of a batch, cut to its rows; None where graphs are no longer what the encoder computes."""
        with self.in_order():
            self.inputs(encoder, budget).fill(pixel_values)
            # Addresses are compared while pixels are copied; everything else while the device computes.
            if not (self.usable() if budget in self.recordings else self.current()):
                return None
            recording = self.recording(encoder, budget)
            recording.fill(metadata_of(images, encoder.sizes, self.pixels.device, budget))
            last, pooled, taps = recording.replay()
            if not self.current():
                return None
            rows, unit = pixel_values.shape[0], encoder.sizes.merge_size**2
            outputs = [last[:rows], *(each[: rows // unit] for each in (pooled, *taps))]
            if not copies:
                return outputs
            copied = [torch.empty_like(each) for each in outputs]
            # In one launch, if their layouts allow it.
            copy_all(copied, outputs)
            return copied

    def recording(self, encoder: "QwenVisionEncoder", budget: Padding) -> Recording:
        if budget not in self.recordings:
            # Tensors made in inference mode could not be filled outside of it.
            with torch.inference_mode(False), torch.no_grad(), _no_collection:
                self.recordings[budget] = self._recorded(encoder, budget)
        return self.recordings[budget]

    def _recorded(self, encoder: "QwenVisionEncoder", budget: Padding) -> Recording:
        try:
            with self._pool_kept():
                return Recording(encoder, self, budget)
        except Exception as error:
            if self.own is None or not out_of_memory(error):
                raise
        # A capture cannot use memory that the process has cached.
        torch.cuda.empty_cache()
        with self._pool_kept():
            return Recording(encoder, self, budget)

    def drop(self, budget: Padding) -> None:
        """Drop one graph, once the device no longer replays it."""
        if self._done is not None:
            self._done.synchronize()
        del self.recordings[budget]
        if self.own is not None and not self.recordings:
            # The pool ended with its last graph.
            self.own = own_stream(self.pixels.device)

    @contextlib.contextmanager
    def _pool_kept(self) -> Iterator[None]:
        """Make another pool if the first capture in this one fails: a pool without graphs takes no more."""
        try:
            yield
        except BaseException:
            if self.own is not None and not self.recordings:
                self.own = own_stream(self.pixels.device)
            raise

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """After the call before, which may have been on another stream."""
        if self._done is None:
            yield
            return
        torch.cuda.current_stream().wait_event(self._done)
        try:
            yield
        finally:
            self._done.record()


class _NoCollection:
    """Within it no garbage is collected, because freeing another encoder's graphs waits for the device.

    A capture may not do so. Several threads may capture at once.
    """

    def __init__(self) -> None:
        self._lock, self._captures, self._was_enabled = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._captures:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._captures += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._captures -= 1
            if not self._captures and self._was_enabled:
                gc.enable()


_no_collection = _NoCollection()


def _settle(done: torch.cuda.Event, counters: list[Tensor], device: torch.device) -> None:
    done.synchronize()
    work_counters(device).release(counters)


__all__ = ["Inputs", "Recording", "Statics"]
