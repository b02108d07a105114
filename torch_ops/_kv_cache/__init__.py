"""The launcher that appends to KV caches."""
