"""The form of what `torch_ops.explain` says. Launchers fill it in for the ops that stand on them."""

from typing import Any

import torch

from csrc_free_ops.configs.rows import Launch
from torch_ops._core.registry import OPS


def called_on_fakes(op: str, *args: Any, **kwargs: Any) -> Any:
    """What the operator makes of tensors without values; bad arguments are refused as the op itself would."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        return OPS[op].overload(*args, **kwargs)


def describe(
    op: str, device: torch.device, path: str, why: str, kernels: dict[str, tuple[Launch, str]]
) -> dict[str, Any]:
    """`kernels` are, by name, launches and where they come from."""
    return {
        "op": f"vk::{op}",
        "device": str(device),
        "path": path,
        "why": why,
        "kernels": {name: {"launch": launch.entry(), "source": source} for name, (launch, source) in kernels.items()},
    }


def by_reference(op: str, device: torch.device) -> dict[str, Any]:
    return describe(op, device, "reference", f"tensors on {device} are computed by ATen", {})
