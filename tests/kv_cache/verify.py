"""Shared by the tests of KV caches: small caches, what they hold, and memory that ends at any step of a call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.verify import DEVICE
from torch_ops import KVCache, PagedKVCache

LAYERS, BATCH, HEADS, HEAD_DIM, PAGE = 2, 3, 2, 16, 4
Cache = KVCache | PagedKVCache


def make(kind: str, capacity: int = 16, pages: int = 14, **options: Any) -> Cache:
    """Sequences of a paged cache have pages for `capacity`, if there are that many."""
    options = {"dtype": torch.float16, "device": DEVICE, **options}
    if kind == "contiguous":
        return KVCache(LAYERS, BATCH, HEADS, capacity, HEAD_DIM, **options)
    cache = PagedKVCache(LAYERS, BATCH, HEADS, pages, PAGE, HEAD_DIM, **options)
    if capacity:
        cache.reserve(capacity)
    return cache


def new(tokens: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(BATCH, HEADS, tokens, HEAD_DIM, device="cpu").to(DEVICE, dtype) for _ in range(2))
    return k, v


def held(cache: Cache, layer: int) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of each sequence, [Hk, n, D]."""
    k, v, seqlens, *table = cache.layer(layer)
    if table:
        k, v = (pool[table[0].long().clamp(min=0)].transpose(1, 2).flatten(2, 3) for pool in (k, v))
    lengths = seqlens.tolist()
    return tuple([each[b, :, :length] for b, length in enumerate(lengths)] for each in (k, v))


def assert_holds(cache: Cache, layer: int, k: list[Tensor], v: list[Tensor]) -> None:
    for actual, expected in zip(held(cache, layer), (k, v), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


class FailingAt(TorchDispatchMode):
    """The call's n-th operation, or its n-th of one kind, runs out of memory instead."""

    def __init__(self, n: int, kind: Any = None) -> None:
        super().__init__()
        self.n, self.kind = n, kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n -= self.kind in (None, func.overloadpacket)
        if self.n == 0:
            raise torch.OutOfMemoryError(f"simulated, in {func}")
        return func(*args, **(kwargs or {}))


def _state(cache: Cache) -> tuple[list[Any], list[list[Tensor]]]:
    """All that a method may change: where tensors are and what the host knows; and keys that count, bit for bit."""
    tensors = [*cache.k, *cache.v, *cache.seqlens]
    known: list[Any] = [seqlens.tolist() for seqlens in cache.seqlens]
    if isinstance(cache, PagedKVCache):
        tensors.append(cache.block_table)
        pages = cache._pages
        known += [cache.block_table.tolist(), pages.tables, pages.users, pages.free, cache._least_reserved]
    known += [(each.data_ptr(), each.shape, each.stride()) for each in tensors]
    keys = [part for layer in range(cache.num_layers) for part in held(cache, layer)]
    return [str(each) for each in known], [[row.clone() for row in part] for part in keys]


def fails(cache: Cache, call: Callable[[], Any], n: int, kind: Any = None) -> bool:
    """Whether a call ran out of memory at its n-th operation. If so, nothing may have changed."""
    known, keys = _state(cache)
    try:
        with FailingAt(n, kind):
            call()
    except torch.OutOfMemoryError as error:
        known_now, keys_now = _state(cache)
        assert known_now == known, error
        for before, after in zip(keys, keys_now, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), error
        return True
    return False
