"""Work spread over the ranks of a process group, on torch.distributed."""

from torch_ops.distributed.encode import encode_across_ranks
from torch_ops.distributed.spread import Part, Share, spread_images

__all__ = ["Part", "Share", "encode_across_ranks", "spread_images"]
