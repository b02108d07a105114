"""Caches of keys and values for decoding, contiguous and in pages."""

from torch_ops.kv_cache.caches import KVCache, PagedKVCache

__all__ = ["KVCache", "PagedKVCache"]
