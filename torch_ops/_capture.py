"""Streams to capture CUDA graphs on, whose products work in the memory of the graphs.

PyTorch keeps cuBLAS's workspace of each stream, and a graph that was captured there goes on using it. But all of them
are dropped whenever `torch.compile` makes a graph of its own, and since torch 2.12 a stream's own when any graph of it
ends (pytorch/pytorch#193402): what the graph then writes to may be another's by now, or no memory at all. A stream
that has no workspace yet gets it from the first product of a capture, in the pool of that graph; there it stays mapped
while any graph of the pool lives, whoever drops it.
"""

from typing import Any

import torch

# PyTorch hands out so many streams in turn, and others may have multiplied on them.
STREAMS = 32
# Of a pool, more than one segment of small tensors and less than a workspace.
ENOUGH_BYTES = 4 * 2**20


def stream_to_capture(pool: Any, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """The stream, and a graph of the pool that is to be kept as long as others are captured there.

    If all streams have workspaces, the last of them.
    """
    x = torch.ones((16, 16), dtype=torch.float16, device=device)
    for _ in range(STREAMS):
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        # Other threads may go on using the device.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            torch.addmm(x[0], torch.mm(x, x), x)
        if pool_bytes(pool) >= ENOUGH_BYTES:
            break
    return stream, graph


def pool_bytes(pool: Any) -> int:
    """Of a pool of graphs, the memory that it has reserved."""
    segments: Any = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))
