"""A record of the Hopper GEMM kernel's launches."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torch_ops import settings
from torch_ops._gemm import hopper as gemm_hopper


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The options of the Hopper kernel's launches, but of those that plans kept."""
    kernel, seen = gemm_hopper._gemm_hopper_kernel, []

    class Noting:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            def launch(*args: Any, **options: Any) -> Any:
                seen.append(options)
                return kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(gemm_hopper, "_gemm_hopper_kernel", Noting())
    # Plans that earlier tests left are made anew where a setting changes.
    with settings(path="portable"), settings(path="hopper"):
        yield seen
