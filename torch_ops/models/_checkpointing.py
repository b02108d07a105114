"""Blocks of a vision encoder that keep only their input in training."""

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_ops._core.checks import check_int, refuse


class CheckpointedBlocks(nn.Module):
    """The part of an encoder that turns checkpoints of its blocks on and off, as Transformers' models do."""

    blocks: Any
    # Class of the blocks.
    _kind: type[nn.Module]

    @property
    def is_activation_checkpointing(self) -> bool:
        return any(getattr(block, "gradient_checkpointing", False) for block in self.blocks)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, every_n_layers: int = 1
    ) -> None:
        """Keep only the input of every n-th block in training, and compute the block again for its gradient."""
        every_n_layers = check_int("vision encoder", "every_n_layers", every_n_layers)
        if every_n_layers < 1:
            refuse("vision encoder", "every_n_layers", "1 or more", every_n_layers)
        options = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        for layer, block in enumerate(self.blocks):
            # A wrapper looks like the block that it holds, but does not pass on what is set.
            for each in (block, *(module for module in block.modules() if isinstance(module, self._kind))):
                each.gradient_checkpointing = layer % every_n_layers == 0
                each._gradient_checkpointing_func = partial(checkpoint, **options)

    def activation_checkpointing_disable(self) -> None:
        for block in self.blocks:
            for each in (block, *(module for module in block.modules() if isinstance(module, self._kind))):
                each.gradient_checkpointing = False

    # The names of Transformers up to version 5.
    is_gradient_checkpointing = is_activation_checkpointing
    gradient_checkpointing_disable = activation_checkpointing_disable

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, every_n_layers: int = 1
    ) -> None:
        """Do the same as `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, every_n_layers)


__all__ = ["CheckpointedBlocks"]
