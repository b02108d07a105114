"""The transformer block of a vision encoder. Needs Transformers, whose class of checkpointed layers it is.

A block is called in two ways:

- As a module it takes and returns hidden states, with Transformers' arguments. Checkpoints, hooks and wrappers see the
  call that they see in Transformers.
- Its `step` takes and returns its own contribution and the residual stream, (branch, residual). The
  next norm adds the two as it reads them and writes the sum once: `add_layer_norm`, `add_rms_norm`.

`_blocks.in_pairs` says which of the two it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from torch_ops.models._blocks import Rotation, VisionAttention, VisionMLP, attend, whole
from torch_ops.models._constants import Constant, Constants
from torch_ops.models._layers import after_sum, norm_of, untouched, watched
from torch_ops.models._named import name_classes
from torch_ops.models.families import FAMILIES, Family


class BlockAttention(Constants, VisionAttention):
    """`VisionAttention` with the arguments that Transformers gives to the attention of a block."""

    dim = Constant(lambda self: self.num_heads * self.head_dim)
    scaling = Constant(lambda self: self.head_dim**-0.5)
    num_key_value_groups = Constant(lambda self: 1)
    attention_dropout = Constant(lambda self: 0.0)
    is_causal = Constant(lambda self: False)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: Rotation, **kwargs: Any
    ) -> Tensor:
        """Compute hidden states [T, C] to [T, C]. Further arguments of Transformers have no effect."""
        cos, sin = position_embeddings
        return attend(self, hidden_states, cos, sin, cu_seqlens)


class VisionBlock(GradientCheckpointingLayer):
    """Norm, attention, norm and MLP, each pair with its residual sum."""

    # Transformers sets this and `gradient_checkpointing`, on every module that has it, where a whole model is told to.
    _gradient_checkpointing_func: Callable[..., Any] = staticmethod(partial(checkpoint, use_reentrant=False))

    def __init__(self, family: Family, config: Any) -> None:
        super().__init__()
        width = getattr(config, family.width)
        # Set on the instance, because torch.compile would otherwise guard on the class for each block.
        self.gradient_checkpointing = False
        self.head_dim = width // config.num_heads
        self.norm1 = norm_of(family, width)
        self.norm2 = norm_of(family, width)
        self.attn = BlockAttention(width, config.num_heads)
        self.mlp = VisionMLP(family, config)

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: Rotation, **kwargs: Any
    ) -> Tensor:
        """Compute hidden states [T, C] to [T, C]. Further arguments of Transformers have no effect."""
        branch, total, _ = self.step(hidden_states, None, cu_seqlens, position_embeddings, False)
        return branch + total

    def step(
        self, branch: Tensor, residual: Tensor | None, cu_seqlens: Tensor, rotation: Rotation, returns_entered: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(branch, residual) to the block's own, and with `returns_entered` the sum of the two, which entered it."""
        if residual is None:
            normed, entered = self.norm1(branch), branch
        else:
            normed, entered = after_sum(self.norm1, branch, residual)
        if not untouched(self.attn, (BlockAttention,)) or watched():
            rotation = whole(rotation, self.head_dim)
        attended = self.attn(normed, cu_seqlens=cu_seqlens, position_embeddings=rotation)
        normed, total = after_sum(self.norm2, attended, entered)
        # At the MLP memory is at its peak: there nothing is held that nobody wants.
        kept = entered if returns_entered else None
        del entered, attended
        return self.mlp(normed), total, kept


BLOCKS = name_classes(VisionBlock, [family.block_class for family in FAMILIES.values()])

__all__ = ["BLOCKS", "BlockAttention", "VisionBlock"]
