"""CUDA graphs that a vision encoder captures by itself, for sizes that come again.

`accelerate` gives an encoder a `GraphCache`. The first call of a size runs eagerly, the second one captures a graph.
Later calls replay it for every batch of about that size. `EncoderGraphs` is for budgets that are known ahead.
"""

import threading
import warnings
from collections import OrderedDict
from dataclasses import astuple
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_ops._core.checks import check_int, refuse
from torch_ops._core.device import out_of_memory
from torch_ops._core.torch_private import IS_REPLICA, count_dispatch_modes, has_functorch_transforms, has_global_hooks
from torch_ops.models._admission import MOST_SIZES, Admission
from torch_ops.models._capture import pool_bytes
from torch_ops.models._recording import Statics
from torch_ops.models._watch import obstacle_of
from torch_ops.models.budgets import words_of
from torch_ops.models.vision_metadata import Image, Padding, VisionSizes, filled_sizes
from torch_ops.settings import settings

if TYPE_CHECKING:
    from torch_ops.models.vision import QwenVisionEncoder

# Types of devices that have graphs.
DEVICES = ("cuda",)
# Buckets for each doubling of a size: the largest share of padding is a ninth.
PER_DOUBLING = 8


class GraphCache:
    """The CUDA graphs that an encoder holds, for inference on a GPU.

    Args:
        max_graphs: number of graphs. The least recently used one goes. Default: 8.
        max_bytes: bytes of GPU memory that all graphs may hold. If a graph alone takes more, calls of its size and of
            larger ones stay eager, with a warning. Default: 1 GiB.
        copy_outputs: whether outputs are copies. If not, they are views that the next call overwrites. Default: True.

    A size is the number of patches, images, frames and windows of a batch. If two batches of one size follow each
    other, the graph is of just that size. If sizes differ, it has room up to the next eighth of a doubling. Graphs
    share one memory pool, whose bytes are checked after each capture. They read weights in place, so a weight changed
    in place counts from the next call on.

    Calls are eager with gradients, in training mode, under autocast, `torch.compile` or a mode of PyTorch, while a
    graph is captured, and with `settings(checked=True)`. So are they where modules have hooks, FSDP, tensor parallelism
    or offloading manage weights, or a layer holds weights of another type. Graphs are dropped after a change of
    weights, modules, adapters, PyTorch's numeric flags or `torch_ops.settings`. A copy or pickle of the encoder and
    `.to()` start without graphs.

    Threads take turns. Calls on several streams follow each other on the device.
    """

    def __init__(self, *, max_graphs: int = 8, max_bytes: int = 2**30, copy_outputs: bool = True) -> None:
        bounds = {"max_graphs": max_graphs, "max_bytes": max_bytes}
        self.max_graphs, self.max_bytes = (check_int("GraphCache", name, number) for name, number in bounds.items())
        for name in bounds:
            if getattr(self, name) < 1:
                refuse("GraphCache", name, "1 or more", getattr(self, name))
        self.copy_outputs = copy_outputs
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._statics: Statics | None = None
        # Replays of each graph, the least recently used first.
        self._replays: OrderedDict[Padding, int] = OrderedDict()
        self._admission = Admission()
        self._why = ""
        self._warned = False

    @property
    def captured(self) -> tuple[Padding, ...]:
        """Sizes of the graphs that are held, the least recently used first."""
        return tuple(self._replays)

    @property
    def why_eager(self) -> str:
        """Why the last call outside of `torch.compile` was eager; empty if it replayed a graph."""
        return self._why

    @property
    def pool(self) -> tuple[int, int] | None:
        """Memory pool of the graphs, as `torch.cuda.memory_snapshot` knows it; None without graphs."""
        own = None if self._statics is None else self._statics.own
        return None if own is None else tuple(own.pool)

    @property
    def static_tensors(self) -> tuple[Tensor, ...]:
        """Tensors outside of the memory pool that calls are copied into: pixels, and the metadata of each graph."""
        return () if self._statics is None else self._statics.static_tensors()

    @property
    def bytes(self) -> int:
        """Bytes of GPU memory that graphs hold: their pool and static tensors. Reads PyTorch's memory snapshot."""
        pool = self.pool
        return sum(each.nbytes for each in self.static_tensors) + (0 if pool is None else pool_bytes(pool))

    def clear(self) -> None:
        """Drop all graphs once none is in use, and forget sizes."""
        with self._lock:
            self._drop_all()
            self._admission = Admission()

    def __repr__(self) -> str:
        held = "; ".join(map(words_of, self.captured)) or "none"
        return f"GraphCache(max_graphs={self.max_graphs}, max_bytes={self.max_bytes}, held: {held})"

    def stay_eager(self, why: str) -> None:
        """Say why a call does not ask for a graph."""
        self._why = why

    def replayed(
        self, encoder: "QwenVisionEncoder", pixel_values: Tensor, images: tuple[Image, ...]
    ) -> list[Tensor] | None:
        """Return (last_hidden_state, pooler_output, *deepstack features) by a graph, or None for an eager call."""
        # Another thread may write its own reason meanwhile.
        why = self._why = _why_eager(encoder, pixel_values)
        if why:
            return None
        if not pixel_values.shape[0]:
            self._why = "the batch is empty"
            return None
        with self._lock, torch.cuda.device(encoder.device if encoder.device.type == "cuda" else -1):
            return self._replayed(encoder, pixel_values, images)

    def _replayed(
        self, encoder: "QwenVisionEncoder", pixel_values: Tensor, images: tuple[Image, ...]
    ) -> list[Tensor] | None:
        owner = encoder if self._statics is None else self._statics.encoder()
        if owner is None:
            self.clear()
        elif owner is not encoder:
            self._why = "the graphs are those of another encoder"
            return None
        filled, bucket = _sizes_of(images, encoder.sizes)
        budget = filled if filled in self._replays else self._held(filled, bucket)
        if budget is None:
            repeated, self._why = self._admission.meet(filled, bucket)
            if self._why:
                return None
            budget = filled if repeated and not self._of_bucket(bucket) else bucket
            if not self._make_room(encoder, budget):
                return None
        statics = self._statics
        assert statics is not None
        captured = budget not in statics.recordings
        try:
            outputs = statics.replayed(encoder, pixel_values, images, budget, self.copy_outputs)
            # Another graph may have grown the pool; a replay does not.
            if captured and outputs is not None and not self._fits(budget):
                return outputs
        except Exception as error:
            if not captured:
                raise
            self._give_up(budget, error)
            return None
        if outputs is None:
            self._drop_all()
            if captured:
                # A call that changes its own modules will do so again.
                self._admission.dropped(())
            self._why = "weights, modules or settings changed since the capture"
            return None
        self._replays[budget] = self._replays.get(budget, -1) + 1
        self._replays.move_to_end(budget)
        self._admission.replayed(self._replays[budget])
        return outputs

    def _held(self, filled: Padding, bucket: Padding) -> Padding | None:
        """Return the smallest graph that holds the batch, if it is no larger than the bucket's."""
        held = (each for each in self._replays if each.holds(filled) and bucket.holds(each))
        return min(held, key=lambda each: (each.rows or 0, astuple(each)), default=None)

    def _make_room(self, encoder: "QwenVisionEncoder", budget: Padding) -> bool:
        """Prepare the capture of one more graph; False if there is to be none."""
        statics = self._statics
        if statics is not None and not (statics.pixels.device == encoder.device and statics.current()):
            self._drop_all()
            statics = None
        if statics is None:
            # A look at all of FSDP's state takes long, and weights in shards are not those that a graph reads.
            why = self._why = obstacle_of(encoder)
            if why:
                return False
            statics = Statics(encoder, budget.rows or 0)
        why = self._why = statics.behaviour.why_eager()
        if why:
            return False
        self._statics = statics
        # A graph with more room takes the place of the one before.
        for each in self._of_bucket(bucket_of(budget)):
            self._drop(each)
        while len(self._replays) >= self._admission.most_graphs(self.max_graphs):
            oldest, replays = next(iter(self._replays.items()))
            self._admission.made_way(bucket_of(oldest), replays)
            self._drop(oldest)
        return True

    def _of_bucket(self, bucket: Padding) -> list[Padding]:
        return [each for each in self._replays if bucket_of(each) == bucket]

    def _fits(self, budget: Padding) -> bool:
        """Return whether memory is within its bound. If it is not, all graphs are dropped, and fewer are held later."""
        if self.bytes <= self.max_bytes:
            return True
        others = len(self._replays)
        self._drop_all()
        if others:
            self._admission.refuse_so_many(others)
        else:
            self._admission.refuse_larger(budget.rows or 0)
            self._say(f"a graph of {budget.rows} patches takes more than max_bytes = {self.max_bytes}")
        return False

    def _drop(self, budget: Padding) -> None:
        assert self._statics is not None
        del self._replays[budget]
        self._statics.drop(budget)

    def _drop_all(self) -> None:
        if self._replays:
            self._admission.dropped(self._replays.values())
        self._replays.clear()
        self._statics = None

    def _give_up(self, budget: Padding, error: Exception) -> None:
        """Stay eager where a graph could not be captured, and say so once."""
        self._drop_all()
        lacking = out_of_memory(error)
        reason = "memory does not suffice" if lacking else str(error).partition("\n")[0]
        why = f"no graph of {budget.rows} patches could be captured: {reason}"
        if lacking:
            self._admission.refuse_larger(budget.rows or 0)
        else:
            self._admission.refuse_bucket(bucket_of(budget), why)
        self._say(why)

    def _say(self, why: str) -> None:
        self._why = why
        if not self._warned:
            self._warned = True
            warnings.warn(f"the vision encoder stays eager: {why}", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        """State of copies and pickles, which have no graphs yet."""
        return {name: getattr(self, name) for name in ("max_graphs", "max_bytes", "copy_outputs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()


def _why_eager(encoder: "QwenVisionEncoder", pixel_values: Tensor) -> str:
    """Return why no graph can do what this call does, or nothing. Every call asks, and the device waits meanwhile."""
    device = encoder.device
    if device.type not in DEVICES:
        return f"a {device.type} has no graphs"
    if torch.is_grad_enabled():
        return "gradients are enabled; call it under torch.inference_mode() or torch.no_grad()"
    if getattr(encoder, IS_REPLICA, False):
        return "the encoder is a replica of DataParallel"
    if encoder.training:
        return "the encoder is in training mode"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if settings.checked:
        return "settings.checked is True, and checks wait for the device"
    if type(pixel_values) is not Tensor:
        return f"pixel_values is a {type(pixel_values).__name__}"
    if count_dispatch_modes() or has_functorch_transforms() or torch.jit.is_tracing():
        return "the call is traced"
    if has_global_hooks():
        return "hooks of all modules are registered"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the stream is being captured"
    return ""


@lru_cache(maxsize=MOST_SIZES)
def _sizes_of(images: tuple[Image, ...], sizes: VisionSizes) -> tuple[Padding, Padding]:
    """Return the sizes of a batch and of its bucket."""
    filled = filled_sizes(images, sizes)
    return filled, bucket_of(filled)


def bucket_of(sizes: Padding) -> Padding:
    """Return the sizes that all batches of about these sizes fit into."""

    def rounded(size: int | None, per_doubling: int) -> int | None:
        if size is None or size <= 1:
            return size
        step = max(1, 2 ** (size - 1).bit_length() // 2 // per_doubling)
        return -(-size // step) * step

    rows = rounded(sizes.rows, PER_DOUBLING)
    assert rows is not None
    # Attention has a schedule for one segment, so a batch of one frame has buckets of its own.
    return Padding(-(-rows // 4) * 4, *(rounded(size, 1) for size in astuple(sizes)[1:]))


__all__ = ["GraphCache", "bucket_of"]
