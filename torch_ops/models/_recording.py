"""The packed call of an encoder on static tensors: a CUDA graph, or on the CPU what stands in for one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_ops.models.vision import QwenVisionEncoder
from torch_ops.models.vision_metadata import Padding, metadata_of

Outputs = tuple[Tensor, Tensor, tuple[Tensor, ...]]


class Recording:
    """`encode_packed` on the static tensors of a budget: `replay` returns its outputs, the same tensors every time."""

    replay: Callable[[], Outputs]

    def __init__(self, encoder: QwenVisionEncoder, pixels: Tensor, budget: Padding, pool: Any) -> None:
        self.metadata = metadata_of((), encoder.sizes, pixels.device, budget).clone()

        def encode() -> Outputs:
            return encoder.encode_packed(pixels, self.metadata)

        self.replay = _captured(encode, pool) if pixels.is_cuda else _repeated(encode)


def _captured(encode: Callable[[], Outputs], pool: Any) -> Callable[[], Outputs]:
    # What compiles or allocates for good does so before the capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        encode()
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on using the device.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
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


__all__ = ["Recording"]
