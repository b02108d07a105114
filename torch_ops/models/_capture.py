"""Streams to capture CUDA graphs on, whose cuBLAS workspace lies in the memory of the graphs.

PyTorch keeps a cuBLAS workspace for each stream and thread, and a captured graph keeps using it. PyTorch drops the
workspace of a stream when any graph of the stream ends, and all of them when `torch.compile` makes a graph
(pytorch/pytorch#193402). The graph then writes to memory of others, or to none.

A stream without a workspace gets one from the first product of a capture, in the pool of that graph. There it stays
mapped while any graph of the pool lives. PyTorch's own 32 streams are handed out in turn, so these are others.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

NON_BLOCKING = 1


@dataclass(frozen=True)
class OwnStream:
    """A stream that nobody else captures or multiplies on, and the pool of all graphs that are captured on it."""

    stream: torch.cuda.Stream
    pool: Any


def own_stream(device: torch.device) -> OwnStream:
    """It is never given back: the next stream at its address could be taken for it."""
    # Also starts the context, and cuBLAS, which cannot be started within a capture.
    x = torch.ones((16, 16), dtype=torch.float16, device=device)
    torch.addmm(x[0], torch.mm(x, x), x)
    return OwnStream(_new_stream(device), torch.cuda.graph_pool_handle())


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    if torch.version.hip is not None:
        return torch.cuda.Stream(device)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        code = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), ctypes.c_uint(NON_BLOCKING))
    if code != 0:
        raise RuntimeError(f"cuStreamCreate failed with CUDA error {code}")
    return torch.cuda.ExternalStream(handle.value, device=device)


def pool_bytes(pool: Any) -> int:
    """Memory that a pool of graphs has reserved."""
    segments: Any = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))
