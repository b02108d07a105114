"""Tensors and counts of each layer, and the methods that fill them: the base of contiguous and paged KV caches.

A method computes the new state beside the old one, in new memory, and then lets `publish` copy it in one step. If
anything fails before, such as an allocation, the cache is as it was.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_ops._core.checks import (
    check_dense,
    check_device,
    check_float,
    check_head_dim,
    check_int,
    check_vector,
    dtype_name,
    refuse,
)
from torch_ops._core.device import host_tensor
from torch_ops._core.registry import is_eager
from torch_ops._core.torch_private import clamp_all, copy_all, mark_static_address, zero_all
from torch_ops._kv_cache.append import check_shape
from torch_ops.kv_cache_append import kv_cache_append
from torch_ops.settings import settings

# One for all sequences, or one for each: on the host, or in a tensor, whose values are looked at in checked mode alone.
Lengths = int | Sequence[int] | Tensor
# The largest int32. Larger lengths are beyond any room too.
MOST_KEYS = torch.iinfo(torch.int32).max


def check_size(op: str, argument: str, value: int, least: int = 1) -> int:
    size = check_int(op, argument, value)
    if size < least:
        refuse(op, argument, f"{least} or more", size)
    return size


def check_sizes(op: str, sizes: dict[str, int]) -> list[int]:
    return [check_size(op, argument, size) for argument, size in sizes.items()]


def static(tensor: Tensor) -> Tensor:
    """Mark the tensor as static, so that CUDA graphs of torch.compile may write to it."""
    mark_static_address(tensor)
    return tensor


def publish(live: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy a new state into tensors that stay where they are: the last step of a method, which allocates nothing.

    All tensors have rows of whole words. As int32 they have one dtype, and one launch copies them.
    """
    if torch.compiler.is_compiling():
        # Inductor lets a group of copies read what it has already overwritten.
        for tensor, value in zip(live, new, strict=True):
            tensor.copy_(value)
        return
    copy_all(*([tensor.view(torch.int32) for tensor in tensors] for tensors in (live, new)))


class Cache:
    """Base of both caches: `k[layer]` and `v[layer]` of one shape, and `seqlens[layer]`, int32 [batch]."""

    def __init__(
        self, num_layers: int, batch: int, shape: tuple[int, ...], dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:  # fmt: skip
        self._name = type(self).__name__
        self.num_layers, self.batch = num_layers, batch
        self._heads = shape[1:2]
        check_head_dim(self._name, "the cache", shape[3])
        with torch.inference_mode(False):
            self.k, self.v = (
                [static(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(num_layers)] for _ in range(2)
            )
            self.seqlens = [static(torch.zeros(batch, dtype=torch.int32, device=device)) for _ in range(num_layers)]
        check_float(self._name, "dtype", self.k[0])

    def append(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor | None = None, cos: Tensor | None = None,
        sin: Tensor | None = None, interleaved: bool = False, lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write k and v [B, Hk, Sn, D] after the keys of one layer, and count them.

        Arguments, rotation, result and refusals are those of `torch_ops.kv_cache_append`. The call waits for nothing:
        in a CUDA graph each replay continues where the previous one ended.

        With `lengths`, int32 [B] on the device, only the first lengths[b] tokens of sequence b are written and counted;
        the others are padding. Tokens without room are counted but not written, and `torch_ops.settings(checked=True)`
        refuses them.
        """
        layer = self._check_layer(layer)
        check_shape(f"{self._name}.append", "k", k, "[B, Hk, Sn, D]", (self.batch, *self._heads, None, None))
        self._check_room(k, lengths)
        out = kv_cache_append(
            k, v, self.k[layer], self.v[layer], self.seqlens[layer], self._table, q, cos, sin, interleaved, lengths
        )
        # Keys that were written count from here on.
        self.seqlens[layer].add_(k.shape[2] if lengths is None else lengths.clamp(0, k.shape[2]))
        return out

    @property
    def _table(self) -> Tensor | None:
        return None

    def _check_layer(self, layer: int) -> int:
        index = check_int(self._name, "layer", layer)
        if not 0 <= index < self.num_layers:
            refuse(self._name, "layer", f"from 0 to {self.num_layers - 1}", index)
        return index

    def _check_room(self, k: Tensor, lengths: Tensor | None) -> None:
        """Check the room that the host knows of."""

    def _on_host(self, op: str, argument: str, values: int | Sequence[int], least: int, most: int | None) -> list[int]:
        several = isinstance(values, Sequence) or (isinstance(values, np.ndarray) and values.ndim == 1)
        if isinstance(values, Tensor):
            refuse(op, argument, "integers on the host", "a tensor")
        if not several and not hasattr(values, "__index__"):
            refuse(op, argument, "an integer, or one for each sequence", type(values).__name__)
        given: list[Any] = list(values) if several else [values] * self.batch  # type: ignore[arg-type]
        if len(given) != self.batch:
            refuse(op, argument, f"of one for each of {self.batch} sequences", len(given))
        each = []
        for place, value in enumerate(given):
            name = f"{argument}[{place}]" if several else argument
            each.append(check_size(op, name, value, least))
            if most is not None and each[-1] > most:
                refuse(op, name, f"at most {most}", each[-1])
        return each

    def _on_device(self, op: str, argument: str, values: Tensor) -> Tensor:
        check_dense(op, argument, values)
        check_vector(op, argument, values, self.batch)
        if values.dtype not in (torch.int32, torch.int64):
            refuse(op, argument, "int32 or int64", dtype_name(values.dtype))
        check_device(op, argument, values, "the cache", self.k[0])
        return values

    def _kept(self, op: str, lengths: Lengths) -> Sequence[Tensor]:
        """The counts of each layer, cut to these lengths."""
        if isinstance(lengths, Tensor):
            lengths = self._on_device(op, "lengths", lengths)
            if settings.checked and is_eager():
                self._on_host(op, "lengths", lengths.tolist(), 0, None)
            lengths = lengths.clamp(0, MOST_KEYS).to(torch.int32)
        else:
            each = self._on_host(op, "lengths", lengths, 0, None)
            lengths = self._send([min(length, MOST_KEYS) for length in each], torch.int32)
        return clamp_all(self.seqlens, [lengths] * self.num_layers)

    def _send(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        """Without waiting: memory that is not pinned is taken over before the call returns."""
        return host_tensor(values, dtype).to(self.k[0].device, non_blocking=True)

    def _reordered(self, places: Tensor) -> Sequence[Tensor]:
        """The counts of each layer, with sequence i the former places[i]."""
        return torch.stack(self.seqlens).index_select(1, places).unbind(0)

    def _grown(self, dimension: int, size: int) -> list[list[Tensor]]:
        """k and v of all layers in new memory, with their contents."""
        with torch.inference_mode(False):
            return [[_grown(tensor, dimension, size) for tensor in tensors] for tensors in (self.k, self.v)]

    def reset(self) -> None:
        """Remove all keys of every sequence."""
        zero_all(self.seqlens)


def _grown(tensor: Tensor, dimension: int, size: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dimension] = size
    grown = static(tensor.new_zeros(shape))
    grown.narrow(dimension, 0, tensor.shape[dimension]).copy_(tensor)
    return grown
