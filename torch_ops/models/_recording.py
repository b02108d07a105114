"""The packed call of an encoder on static tensors: CUDA graphs, or on the CPU what stands in for them."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_ops._attention_hopper import tickets
from torch_ops.models.vision import QwenVisionEncoder
from torch_ops.models.vision_metadata import Padding, metadata_of
from torch_ops.settings import settings

Outputs = tuple[Tensor, Tensor, tuple[Tensor, ...]]


class Recording:
    """`encode_packed` on the static tensors of a budget: `replay` returns its outputs, the same tensors every time."""

    replay: Callable[[], Outputs]

    def __init__(self, encoder: QwenVisionEncoder, statics: "Statics", budget: Padding) -> None:
        pixels = statics.pixels[: budget.rows]
        self.metadata = metadata = metadata_of((), encoder.sizes, pixels.device, budget).clone()

        def encode() -> Outputs:
            return encoder.encode_packed(pixels, metadata)

        self.replay = _captured(encode, statics) if pixels.is_cuda else _repeated(encode)


def _captured(encode: Callable[[], Outputs], statics: "Statics") -> Callable[[], Outputs]:
    assert statics.stream is not None
    statics.stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(statics.stream):
        # What compiles or allocates for good does so before the capture.
        encode()
        with (
            tickets(statics.pixels.device).lending(statics.counters),
            # Other threads may go on using the device.
            torch.cuda.graph(graph, pool=statics.pool, stream=statics.stream, capture_error_mode="thread_local"),
        ):
            outputs = encode()

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


def _repeated(encode: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """What stands in for a graph on the CPU."""
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

    That is asked before every replay, so the modules are walked once: what is looked at later are their dictionaries.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        children = [each._modules for each in modules]
        held = [tensors for each in modules for tensors in (each._parameters, each._buffers)]
        # Most are empty: of those it is enough to look at the size.
        self._sized: list[dict[str, Any]] = [*children, *held]
        self._children = [each for each in children if each]
        self._held = [each for each in held if each]
        self._found = self._places()

    def tensors(self) -> list[Tensor]:
        return [tensor for held in self._held for tensor in held.values() if tensor is not None]

    def unchanged(self) -> bool:
        return self._places() == self._found

    def _places(self) -> object:
        tensors = self.tensors()
        return (
            list(map(len, self._sized)),
            [id(child) for children in self._children for child in children.values()],
            [tensor.data_ptr() for tensor in tensors],
            [tensor.dtype for tensor in tensors],
        )


class Statics:
    """What the graphs of an encoder share: the tensor of pixels, a stream and memory to capture with, their order.

    Whoever lets go of it waits until the last call on the device is done: its tensors belong to the stream of the first
    call, whichever others they were used on.
    """

    def __init__(self, encoder: QwenVisionEncoder, rows: int) -> None:
        weight = encoder.patch_embed.proj.weight
        with torch.inference_mode(False):
            self.pixels = torch.zeros((rows, weight[0].numel()), dtype=weight.dtype, device=weight.device)
        self.recordings: dict[Padding, Recording] = {}
        self.weights = Weights(encoder)
        self._generation = settings.generation
        self._filled = 0
        self.stream: torch.cuda.Stream | None = None
        self.pool: Any = None
        self._done: torch.cuda.Event | None = None
        # Of launches in the graphs, see `_Tickets`.
        self.counters: list[Tensor] = []
        if weight.is_cuda:
            # One for all graphs: cuBLAS keeps a workspace for each stream for good.
            self.stream = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()
            self._done = torch.cuda.Event()
            weakref.finalize(self, _settle, self._done, self.counters, weight.device).atexit = False

    def current(self) -> bool:
        """Whether graphs still compute what the encoder would: they read weights where they were."""
        return self._generation == settings.generation and self.weights.unchanged()

    def recording(self, encoder: QwenVisionEncoder, budget: Padding) -> Recording:
        if budget not in self.recordings:
            # Tensors made in inference mode could not be filled outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self.recordings[budget] = Recording(encoder, self, budget)
        return self.recordings[budget]

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
        self.pixels[rows : self._filled].zero_()
        self._filled = rows


def _settle(done: torch.cuda.Event, counters: list[Tensor], device: torch.device) -> None:
    done.synchronize()
    tickets(device).give_back(counters)


__all__ = ["Recording", "Statics", "Weights"]
