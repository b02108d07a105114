"""Memory layouts of test tensors by name."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

# Each function draws the tensor of a shape: `layout(draw, *shape)`.
Layouts = Mapping[str, Callable[..., Tensor]]


def drawn_as(layouts: Layouts, layout: str, *args: Any) -> Tensor:
    if layout not in layouts:
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(layouts)}")
    return layouts[layout](*args)
