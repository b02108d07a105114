"""Streams to capture CUDA graphs on, whose products work in the memory of the graphs.

PyTorch keeps a workspace of cuBLAS for each stream, and a graph that was captured there goes on using it. But a
stream's is dropped when any graph of it ends, and all are whenever `torch.compile` makes a graph of its own
(pytorch/pytorch#193402): what the graph then writes to is another's, or no memory at all. A stream that has no
workspace yet gets it from the first product of a capture, in the pool of that graph; there it stays mapped while any
graph of the pool lives, whoever drops it.
"""

from dataclasses import dataclass
from typing import Any

import torch

# PyTorch hands out so many streams in turn, and others may have multiplied on them.
STREAMS = 32
# Of a pool, more than one segment of small tensors and less than a workspace.
ENOUGH_BYTES = 4 * 2**20
# Graphs of streams that others use: where one ends, their workspaces do.
_kept: list[torch.cuda.CUDAGraph] = []


@dataclass(frozen=True)
class OwnStream:
    """A stream, and the pool of all graphs that are captured on it; to be kept as long as they are."""

    stream: torch.cuda.Stream
    pool: Any
    first: torch.cuda.CUDAGraph


def own_stream(device: torch.device) -> OwnStream:
    """If all streams have workspaces, one of them, and its graphs are as safe as PyTorch's are."""
    x = torch.ones((16, 16), dtype=torch.float16, device=device)
    # cuBLAS cannot be started within a capture.
    torch.addmm(x[0], torch.mm(x, x), x)
    for _ in range(STREAMS):
        own = OwnStream(torch.cuda.Stream(device), torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph())
        # Other threads may go on using the device.
        with torch.cuda.graph(own.first, pool=own.pool, stream=own.stream, capture_error_mode="thread_local"):
            torch.addmm(x[0], torch.mm(x, x), x)
        if pool_bytes(own.pool) >= ENOUGH_BYTES:
            break
        _kept.append(own.first)
    return own


def pool_bytes(pool: Any) -> int:
    """Of a pool of graphs, the memory that it has reserved."""
    segments: Any = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))
