"""KV caches for decoding, contiguous and paged."""

from torch_ops.kv_cache.caches import KVCache, PagedKVCache

__all__ = ["KVCache", "PagedKVCache"]
