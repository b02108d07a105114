"""Calls that Dynamo leaves out of graphs. This imports Dynamo, so only what is traced imports this."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def call_outside(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with values as they are, between two graphs."""
    return function(*args)


__all__ = ["call_outside"]
