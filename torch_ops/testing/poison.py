"""Uninitialised memory that gives itself away."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills every tensor that PyTorch would leave uninitialised with NaN, so that an unwritten output shows."""
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
        warnings.filterwarnings("ignore", message=".*[Dd]eterministic behavior was enabled.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            deterministic.fill_uninitialized_memory = fill
