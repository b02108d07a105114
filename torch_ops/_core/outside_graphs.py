"""Calls that Dynamo leaves out of graphs. This imports Dynamo, so only what is traced imports this."""

from collections.abc import Callable
from typing import Any

import torch

from torch_ops._core import arguments, checks
from torch_ops._core.torch_private import leave_frames_uncompiled


@torch.compiler.disable
def call_outside(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with values as they are, between two graphs."""
    return function(*args)


# Where a graph ends, each function on the stack may become a frame of its own. Dynamo would compile each of these once
# per op and argument, and reach its recompile_limit.
leave_frames_uncompiled(
    arguments.with_numbers,
    checks.integers, checks.check_int, checks.check_number, checks.check_bool, checks._of_numpy,
    checks._integer_of_numpy, checks._number_of_numpy, checks._bool_of_numpy,
)  # fmt: skip

__all__ = ["call_outside"]
