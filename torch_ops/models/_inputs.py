"""The inputs of a vision encoder, pixel values and metadata, and their refusals."""

import math
from typing import Any

from torch import Tensor, nn

from torch_ops._core.checks import check_device, dtype_name, refuse
from torch_ops.models._blocks import PatchEmbed
from torch_ops.models._layers import plain, untouched
from torch_ops.models.vision_metadata import VisionMetadata, VisionSizes


class CheckedInputs(nn.Module):
    """The part of an encoder that checks the inputs of a call. `EncoderGraphs` calls it too."""

    patch: tuple[int, ...]
    sizes: VisionSizes
    patch_embed: PatchEmbed

    def check_metadata(self, metadata: VisionMetadata | None) -> None:
        if metadata is None:
            return
        check_is_metadata(metadata)
        if metadata.sizes not in (None, self.sizes):
            refuse("vision encoder", "metadata", f"made for encoder.sizes = {self.sizes}", f"made for {metadata.sizes}")

    def rows_of(self, pixel_values: Tensor) -> Tensor:
        """Return pixel values with a row for each patch, where their shape tells which patches there are."""
        if not isinstance(pixel_values, Tensor) or pixel_values.dim() == 2:
            return pixel_values
        if pixel_values.shape[1:] == self.patch:
            return pixel_values.flatten(1)
        if pixel_values.dim() > 2 and pixel_values.shape[-1] == math.prod(self.patch):
            return pixel_values.flatten(0, -2)
        return pixel_values

    def check_pixels(self, pixel_values: Tensor, rows: int, *, sent: bool = False) -> None:
        """Refuse pixel values of another shape, dtype or device. With `sent`, the caller sends those of the host."""
        check_is_tensor(pixel_values)
        if pixel_values.is_complex():
            refuse("vision encoder", "pixel_values", "of a real dtype", dtype_name(pixel_values.dtype))
        embed = self.patch_embed
        # FSDP and offloading bring weights and pixels together when a module is called, and weights may be in shards.
        in_place = untouched(embed, (PatchEmbed,)) and plain(embed.proj)
        if in_place and not (sent and pixel_values.device.type == "cpu"):
            check_device("vision encoder", "pixel_values", pixel_values, "the encoder", embed.proj.weight)
        columns = math.prod(self.patch)
        if pixel_values.dim() != 2 or pixel_values.shape[1] != columns:
            got = list(pixel_values.shape)
            refuse("vision encoder", "pixel_values", f"of shape [T, {columns}], a row for each patch", got)
        if pixel_values.shape[0] != rows:
            wanted = f"of {rows} rows, the patches of the grid"
            refuse("vision encoder", "pixel_values", wanted, pixel_values.shape[0])


def check_is_tensor(pixel_values: object) -> None:
    if not isinstance(pixel_values, Tensor):
        refuse("vision encoder", "pixel_values", "a tensor", type(pixel_values).__name__)


def check_is_metadata(metadata: Any) -> None:
    if not isinstance(metadata, VisionMetadata):
        refuse("vision encoder", "metadata", "a result of vision_metadata", type(metadata).__name__)


__all__ = ["CheckedInputs", "check_is_metadata", "check_is_tensor"]
