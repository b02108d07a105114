"""The packed call of an encoder on static tensors: CUDA graphs, or on the CPU what stands in for them."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from torch_ops._core.counters import work_counters
from torch_ops._core.torch_private import addresses_equal, buffers_of, children_of, parameters_of
from torch_ops.models._capture import OwnStream, own_stream
from torch_ops.models.vision import QwenVisionEncoder
from torch_ops.models.vision_metadata import Padding, VisionMetadata, metadata_of
from torch_ops.settings import settings

Outputs = tuple[Tensor, Tensor, tuple[Tensor, ...]]


class Recording:
    """`encode_packed` on the static tensors of a budget: `replay` returns its outputs, the same tensors every time."""

    replay: Callable[[], Outputs]

    def __init__(self, encoder: QwenVisionEncoder, statics: "Statics", budget: Padding) -> None:
        pixels = statics.pixels[: budget.rows]
        self.metadata = metadata = metadata_of((), encoder.sizes, pixels.device, budget).clone()
        self._filled: VisionMetadata | None = None

        def encode() -> Outputs:
            return encoder.encode_packed(pixels, metadata)

        self.replay = _captured(encode, statics) if pixels.is_cuda else _repeated(encode)

    def fill(self, metadata: VisionMetadata) -> None:
        """With what is there already, if the batch before had the same grid: then its metadata is the same object."""
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
    with (
        torch.cuda.stream(own.stream),
        work_counters(statics.pixels.device).recording_acquired(statics.counters),
        # Other threads may go on using the device.
        torch.cuda.graph(graph, pool=own.pool, stream=own.stream, capture_error_mode="thread_local"),
    ):
        outputs = encode()

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


class Weights:
    """The parameters and buffers of a module as they were found, and whether they still are where they were.

    Every replay asks, so the modules are walked once. Later their dictionaries are compared by functions that take no
    step in Python for each entry. `in_place` must be known before a replay: it says that the graphs read no memory that
    was given back. A tensor or module that was put aside keeps its memory, since both are held here. One that was
    moved, as by `module.to`, may not. `unchanged` may be asked while the device computes.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        children = [children_of(each) for each in modules]
        held = [tensors for each in modules for tensors in (parameters_of(each), buffers_of(each))]
        # Most are empty: of those it is enough to look at the size.
        self._sized: list[dict[str, Any]] = [*children, *held]
        self._children = [each for each in children if each]
        # Those that hold None, such as a bias that is not there, are few.
        self._mixed = [each for each in held if any(tensor is None for tensor in each.values())]
        self._full = [each for each in held if each and all(tensor is not None for tensor in each.values())]
        self._found, self._rest = self.tensors(), self._look_at_the_rest()
        self._addresses, self._places = list(map(_address, self._found)), list(range(len(self._found)))

    def tensors(self) -> list[Tensor]:
        return [*_all(self._full), *(tensor for tensor in _all(self._mixed) if tensor is not None)]

    def in_place(self) -> bool:
        if addresses_equal is not None:
            return addresses_equal(self._found, self._addresses, self._places)
        return list(map(_address, self._found)) == self._addresses

    def unchanged(self) -> bool:
        tensors = self.tensors()
        # A None was a tensor before.
        there = type(None) not in map(type, tensors)
        return there and list(map(_address, tensors)) == self._addresses and self._look_at_the_rest() == self._rest

    def _look_at_the_rest(self) -> object:
        tensors = self.tensors()
        kinds = list(map(_dtype, tensors)), list(map(_shape, tensors)), list(map(_strides, tensors))
        return list(map(len, self._sized)), list(map(id, _all(self._children))), kinds


def _all(dictionaries: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(_values, dictionaries))


_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values
_address: Callable[[Tensor], int] = Tensor.data_ptr
_dtype: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_shape: Callable[[Tensor], torch.Size] = attrgetter("shape")
_strides: Callable[[Tensor], tuple[int, ...]] = Tensor.stride


class Statics:
    """State that the graphs of an encoder share: the pixel tensor, a stream and memory to capture with, their order.

    Dropping it waits until the last call on the device is done. Its tensors belong to the stream of the first call,
    whatever other streams used them.
    """

    def __init__(self, encoder: QwenVisionEncoder, rows: int) -> None:
        weight = encoder.patch_embed.proj.weight
        with torch.inference_mode(False):
            self.pixels = torch.zeros((rows, weight[0].numel()), dtype=weight.dtype, device=weight.device)
        self.recordings: dict[Padding, Recording] = {}
        self.weights = Weights(encoder)
        self._generation = settings.generation
        self._filled = 0
        self.own: OwnStream | None = None
        self._done: torch.cuda.Event | None = None
        # Counters of launches in the graphs, see `_core/counters.py`.
        self.counters: list[Tensor] = []
        if weight.is_cuda:
            # One for all graphs, since each has a workspace of cuBLAS.
            self.own = own_stream(weight.device)
            self._done = torch.cuda.Event()
            weakref.finalize(self, _settle, self._done, self.counters, weight.device).atexit = False

    def current(self) -> bool:
        """Whether graphs still compute what the encoder would: they read weights where they were."""
        return self._generation == settings.generation and self.weights.unchanged()

    def usable(self) -> bool:
        """Whether graphs may be replayed, if only to find that they are not current."""
        return self._generation == settings.generation and self.weights.in_place()

    def recording(self, encoder: QwenVisionEncoder, budget: Padding) -> Recording:
        if budget not in self.recordings:
            # Tensors made in inference mode could not be filled outside of it.
            with torch.inference_mode(False), torch.no_grad(), self._pool_kept():
                self.recordings[budget] = Recording(encoder, self, budget)
        return self.recordings[budget]

    @contextlib.contextmanager
    def _pool_kept(self) -> Iterator[None]:
        """A pool takes no more graphs once its last is gone, be it the first, whose capture failed."""
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

    @torch.no_grad()
    def fill(self, pixel_values: Tensor) -> None:
        rows = pixel_values.shape[0]
        self.pixels[:rows].copy_(pixel_values, non_blocking=True)
        # Rows of a batch before may hold anything, and padding is to be finite.
        if rows < self._filled:
            self.pixels[rows : self._filled].zero_()
        self._filled = rows


def _settle(done: torch.cuda.Event, counters: list[Tensor], device: torch.device) -> None:
    done.synchronize()
    work_counters(device).release(counters)


__all__ = ["Recording", "Statics", "Weights"]
