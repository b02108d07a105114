"""PyTorch's flash registry with our implementation active, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from torch_ops.integrations.torch_flash import IMPLEMENTATION, override_kernels


@contextmanager
def activated(device: str) -> Iterator[None]:
    """Within, aten's flash ops on this device are ours, by the registry on a GPU.

    PyTorch has no kernels of these ops for a CPU. Ours are registered there, so calls pass the whole dispatcher.
    """
    if device == "cuda":
        activate_flash_attention_impl(IMPLEMENTATION)
        try:
            yield
        finally:
            restore_flash_attention_impl()
        return
    overrides = override_kernels("CPU")
    try:
        yield
    finally:
        overrides.remove()
