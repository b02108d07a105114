"""Attributes of Transformers' modules that follow from the configuration: ours tell them, and refuse other values."""

from collections.abc import Callable
from typing import Any

from torch import nn

from torch_ops._core.checks import refuse
from torch_ops.models.vision_metadata import VisionSizes


class Constant(property):
    """An attribute that can be read, and set to nothing but its value. Without a value it can only be refused."""

    def __init__(self, value: Callable[[Any], Any] | None = None) -> None:
        super().__init__(value)


class Constants(nn.Module):
    """A module with constants: what is set on it counts, or is refused. A plain property would miss modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        constant = getattr(type(self), name, None)
        if not isinstance(constant, Constant):
            super().__setattr__(name, value)
            return
        own = None if constant.fget is None else constant.fget(self)
        if type(value) is not type(own) or value != own:
            got = value if isinstance(value, bool | int | float | str | list | tuple) else type(value).__name__
            wanted = "what the config says" if own is None else f"{own}, by the config"
            refuse(type(self).__name__, name, f"{wanted}; put another module in this one's place", got)


def _listed(indexes: Any) -> list[int]:
    if not indexes:
        raise AttributeError("this family has none")
    return sorted(indexes)


class TowerConstants(Constants):
    """The constants of a vision encoder."""

    config: Any
    sizes: VisionSizes
    patch: tuple[int, ...]

    patch_size = Constant(lambda self: self.patch[-1])
    spatial_merge_size = Constant(lambda self: self.sizes.merge_size)
    spatial_merge_unit = Constant(lambda self: self.sizes.merge_size**2)
    num_grid_per_side = Constant(lambda self: int(self.config.num_position_embeddings**0.5))
    interpolation_mode = Constant(lambda self: "bilinear")
    interpolation_align_corners = Constant(lambda self: True)
    window_size = Constant(lambda self: self.config.window_size)
    fullatt_block_indexes = Constant(lambda self: _listed(self._full_layers))
    deepstack_visual_indexes = Constant(lambda self: _listed(self._taps))
    rotary_pos_emb = Constant()


__all__ = ["Constant", "Constants", "TowerConstants"]
