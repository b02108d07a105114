"""An encoder of packed batches as a module for torch.export."""

from typing import Any

from torch import Tensor, nn
from torch.export import Dim

from torch_ops.models.vision import QwenVisionEncoder
from torch_ops.models.vision_metadata import VisionMetadata


class PackedEncoder(nn.Module):
    """`encode_packed` of an encoder as a module of its own, for torch.export."""

    def __init__(self, encoder: QwenVisionEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: Tensor, metadata: VisionMetadata) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        return self.encoder.encode_packed(pixel_values, metadata)

    def dynamic_shapes(self, metadata: VisionMetadata) -> tuple[Any, ...]:
        """Shapes for torch.export of (pixel_values, metadata): any number of images, segments and windows, and merged
        cells from 2 on.
        """
        # PyTorch takes tensors of one row for another case.
        cells = Dim("cells", min=2)
        patches = self.encoder.spatial_merge_size**2 * cells
        sizes = {
            "grid": Dim("images"), "cu_seqlens": Dim("borders"), "cos": patches, "sin": patches,
            "window_index": cells, "reverse_index": cells, "cu_window_seqlens": Dim("window_borders"),
            "interp_indices": patches, "interp_weights": patches,
        }  # fmt: skip
        return {0: patches}, [{0: sizes[name]} for name, _ in metadata.tensors()]


__all__ = ["PackedEncoder"]
