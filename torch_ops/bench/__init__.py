"""The benchmark application: `vk bench ...` and `python -m torch_ops.bench ...` are the same."""

from torch_ops.bench.app import app

__all__ = ["app"]
