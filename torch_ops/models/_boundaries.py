"""Boundaries of one segment, [0, rows] on the device, remembered by rows and device.

PyTorch makes them by two kernels, which take a tenth of the time of a small call. They are sent once instead, without
waiting, and shared by all CUDA streams. A stream waits on the device until they have arrived. A CUDA graph that is
being captured cannot wait for another stream, so it takes only boundaries that are known to have arrived. Their memory
then stays, because the graph reads it at each replay.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from torch_ops._core.registry import is_eager, sent
from torch_ops._core.torch_private import has_functorch_transforms, raw_cuda_stream

# Numbers of rows and devices; each takes 512 bytes.
CACHE_SIZE = 1024

Key = tuple[int, torch.device]


@dataclass
class _Known:
    """Boundaries, the event of their arrival until it is known to have come, and the streams that use them."""

    tensor: Tensor
    arrival: Any = None
    streams: set[int] = field(default_factory=set)


_known: OrderedDict[Key, _Known] = OrderedDict()
_of_graphs: dict[Key, _Known] = {}
_lock = Lock()


def one_segment(rows: int, device: torch.device) -> Tensor:
    """Return int32 [0, rows], to read alone. It costs no synchronisation."""
    # Rows may be a symbol in a trace, which leaves it to what runs it.
    if torch.compiler.is_compiling() or has_functorch_transforms() or not is_eager():
        return _computed(rows, device)
    with _lock:
        return _cached(rows, device)


def _computed(rows: int, device: torch.device) -> Tensor:
    return torch.arange(2, dtype=torch.int32, device=device) * rows


def _cached(rows: int, device: torch.device) -> Tensor:
    on_gpu = device.type == "cuda"
    known = _of_graphs.get((rows, device)) or _known.get((rows, device))
    if on_gpu and torch.cuda.is_current_stream_capturing():
        if known is None or known.arrival is not None:
            return _computed(rows, device)
        _of_graphs[rows, device] = known
        return known.tensor
    if known is None:
        known = _known[rows, device] = _send(rows, device)
        if len(_known) > CACHE_SIZE:
            _known.popitem(last=False)
    elif (rows, device) in _known:
        _known.move_to_end((rows, device))
    if on_gpu:
        _use(known, device)
    return known.tensor


def _send(rows: int, device: torch.device) -> _Known:
    # A tensor made in inference mode could not be saved for a backward.
    with torch.inference_mode(False), torch.no_grad():
        tensor = sent(torch.tensor([0, rows], dtype=torch.int32, device="cpu"), device)
    if device.type != "cuda":
        return _Known(tensor)
    stream = torch.cuda.current_stream(device)
    return _Known(tensor, stream.record_event(), {stream.cuda_stream})


def _use(known: _Known, device: torch.device) -> None:
    """Let the current stream wait for the boundaries, and keep their memory until its work is done."""
    if known.arrival is not None and known.arrival.query():
        known.arrival = None
    if raw_cuda_stream(device.index) in known.streams:
        return
    stream = torch.cuda.current_stream(device)
    if known.arrival is not None:
        stream.wait_event(known.arrival)
    known.tensor.record_stream(stream)
    known.streams.add(stream.cuda_stream)


__all__ = ["one_segment"]
