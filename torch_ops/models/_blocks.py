"""The modules that a vision encoder of the Qwen-VL families is made of; `vision_block` puts some of them together.

They are computed differently than in Transformers:

- q, k and v come rotated from one op, and attention takes all images in one packed call.
- The activation of an MLP is computed with its first product.

An op takes a layer's parameters only if the layer is `plain`. A layer that was replaced (an adapter, a quantised
layer), holds quantised weights or has hooks is called as a module. PyTorch's own activation follows it, or attention
that rotates q and k itself. A norm is called as a module too, after PyTorch's own sum.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_ops._core.checks import check_head_dim, check_matrix, check_num_heads, refuse
from torch_ops._core.torch_private import COMPILED_CALL, children_of
from torch_ops.models._boundaries import one_segment
from torch_ops.models._constants import Constant, Constants
from torch_ops.models._layers import NORMS, RMSNorm, chained, norm_of, plain, promoted, untouched, watched
from torch_ops.models.families import Family
from torch_ops.patch_merger import patch_merger
from torch_ops.qkv_rope import qkv_rope
from torch_ops.rope_window_attn import rope_window_attn
from torch_ops.vision_attention import vision_attention
from torch_ops.window_attn import window_attn

# cos and sin [T, D], or [T, D / 2] where both halves of a head are alike.
Rotation = tuple[Tensor, Tensor]


class PatchEmbed(Constants):
    """The convolution over patches, which do not overlap, as the linear layer that it is."""

    in_channels = Constant(lambda self: self.patch[0])
    temporal_patch_size = Constant(lambda self: self.patch[1])
    patch_size = Constant(lambda self: self.patch[2])
    embed_dim = Constant(lambda self: self.proj.weight.shape[0])

    def __init__(self, family: Family, config: Any) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        width = getattr(config, family.width)
        self.patch = (config.in_channels, *kernel)
        self.proj: Any = nn.Conv3d(config.in_channels, width, kernel, stride=kernel, bias=family.patch_bias)

    def forward(self, pixel_values: Tensor) -> Tensor:
        weight = self.proj.weight
        pixel_values = pixel_values.to(weight.dtype)
        if not plain(self.proj) or watched():
            return self.proj(pixel_values.view(-1, *self.patch)).flatten(1)
        return functional.linear(pixel_values, weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    """Attention of packed images: `qkv_rope`, `window_attn` and the projection, or one op for all without rotation.

    Args:
        hidden_size: C, the columns of x.
        num_heads: H.
        head_dim: D, a multiple of 8 up to 256. Default: C / H.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int | None = None) -> None:
        super().__init__()
        check_num_heads("VisionAttention", "q, num_heads,", num_heads)
        if head_dim is None and hidden_size % num_heads != 0:
            refuse("VisionAttention", "hidden_size", f"a multiple of num_heads = {num_heads}", hidden_size)
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        check_head_dim("VisionAttention", "q, head_dim,", self.head_dim)
        self.qkv: Any = nn.Linear(hidden_size, 3 * num_heads * self.head_dim)
        self.proj = nn.Linear(num_heads * self.head_dim, hidden_size)

    def forward(
        self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Compute x [T, C] to [T, C]; cos and sin are as in `qkv_rope`, cu_seqlens as in `window_attn`.

        Without cos and sin nothing is rotated. Without cu_seqlens all rows are one segment.
        """
        return attend(self, x, cos, sin, cu_seqlens)


def attend(
    attention: VisionAttention, x: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Compute what `VisionAttention` does. It is no method, which torch.compile would guard for each block."""
    if (cos is None) != (sin is None):
        given, other = ("cos", "sin") if sin is None else ("sin", "cos")
        refuse("VisionAttention", given, f"None where {other} is", "a tensor")
    takes_qkv = plain(attention.qkv) and not watched()
    if cos is None or not takes_qkv:
        check_matrix("VisionAttention", "x", x, "[T, C]", (None, None))
    if cu_seqlens is None:
        cu_seqlens = one_segment(x.shape[0], x.device)
    if cos is None and takes_qkv and plain(attention.proj):
        qkv, proj = attention.qkv, attention.proj
        return vision_attention(x, qkv.weight, qkv.bias, proj.weight, proj.bias, cu_seqlens, attention.num_heads)
    if cos is not None and sin is not None and takes_qkv:
        q, k, v = qkv_rope(x, attention.qkv.weight, attention.qkv.bias, cos, sin, attention.num_heads)
        out = window_attn(q, k, v, cu_seqlens, softcap=0.0, dropout_p=0.0)
    else:
        q, k, v = attention.qkv(x).view(-1, 3, attention.num_heads, attention.head_dim).unbind(1)
        if cos is None or sin is None:
            out = window_attn(q, k, v, cu_seqlens, softcap=0.0, dropout_p=0.0)
        else:
            out = rope_window_attn(q, k, v, cos, sin, cu_seqlens, softcap=0.0)
    assert isinstance(out, Tensor)
    del q, k, v
    return attention.proj(out.flatten(1))


class VisionMLP(Constants):
    act, act_fn = Constant(), Constant()

    def __init__(self, family: Family, config: Any) -> None:
        super().__init__()
        outer, inner = getattr(config, family.width), family.intermediate_size(config)
        self._names = family.mlp
        self.activation = family.activation(config)
        for name in self._names[:-1]:
            self.add_module(name, nn.Linear(outer, inner))
        self.add_module(self._names[-1], nn.Linear(inner, outer))

    def forward(self, x: Tensor) -> Tensor:
        return chained(x, [children_of(self)[name] for name in self._names], self.activation)


class PatchMerger(Constants):
    """Norm, the patches of a merged cell side by side, and two layers with GELU (by erf) between them.

    The patches of a cell follow each other, so that putting them side by side is a view. `after_shuffle` norms the
    cells instead of the patches.
    """

    act_fn = Constant()
    hidden_size = Constant(lambda self: self.width)
    use_postshuffle_norm = Constant(lambda self: self.after_shuffle)

    def __init__(self, family: Family, config: Any, after_shuffle: bool = False) -> None:
        super().__init__()
        self._names = family.merger
        self.after_shuffle = after_shuffle
        self.merge_size = config.spatial_merge_size
        patch = getattr(config, family.width)
        self.width = patch * self.merge_size**2
        norm, first, second = self._names
        self.add_module(norm, norm_of(family, self.width if after_shuffle else patch))
        layers = [nn.Linear(self.width, width) for width in (self.width, getattr(config, family.out_width))]
        self._inner = first.rpartition(".")[0]
        if self._inner:
            held: list[nn.Module] = [layers[0], nn.GELU(), layers[1]]
            listed = family.layers is nn.ModuleList
            self.add_module(self._inner, nn.ModuleList(held) if listed else nn.Sequential(*held))
        else:
            self.add_module(first, layers[0])
            self.add_module(second, layers[1])

    def forward(self, x: Tensor) -> Tensor:
        modules: list[Any] = [self.get_submodule(name) for name in self._names]
        norm, *layers = modules
        # FSDP, by a policy of sizes, and offloading bring a sequence the weights of its layers when it is called.
        inner: Any = getattr(self, self._inner) if self._inner else None
        seen = watched()
        called = not (
            inner is None
            or untouched(inner, (nn.Sequential, nn.ModuleList))
            and untouched(inner[1], (nn.GELU,))
            and not seen
        )
        if not (called or seen) and plain(norm, NORMS) and all([plain(layer) for layer in layers]):
            first, second = layers
            weight, is_rms = norm.weight, isinstance(norm, RMSNorm)
            if is_rms:
                x, weight = promoted(x, weight)
            return patch_merger(
                x, weight, getattr(norm, "bias", None), first.weight, first.bias, second.weight, second.bias,
                self.merge_size, self.after_shuffle, 1e-6, is_rms,
            )  # fmt: skip
        x = norm(x.view(-1, self.width)) if self.after_shuffle else norm(x).view(-1, self.width)
        if not called:
            return chained(x, layers, "gelu")
        for module in inner if isinstance(inner, nn.ModuleList) else (inner,):
            x = module(x)
        return x


def in_pairs(block: Any, kind: type) -> bool:
    """Whether nothing stands between a call of the block, of this kind, and its `step`."""
    return (
        untouched(block, (kind,))
        # `block.compile()` replaces its call. Within another compilation that counts for nothing.
        and (torch.compiler.is_compiling() or COMPILED_CALL not in block.__dict__)
        and not (block.gradient_checkpointing and block.training)
    )


def called(
    block: Any, kind: type, hidden_states: Tensor, cu_seqlens: Tensor, rotation: Rotation, head_dim: int
) -> Tensor:
    """Call a block as Transformers does."""
    if not untouched(block, (kind,)) or watched():
        rotation = whole(rotation, head_dim)
    return block(_started_from(block, hidden_states), cu_seqlens=cu_seqlens, position_embeddings=rotation)


def whole(rotation: Rotation, head_dim: int) -> Rotation:
    """Return cos and sin [T, D], a number for each column of a head, as Transformers' are."""
    cos, sin = rotation
    if cos.shape[1] == head_dim:
        return rotation
    return torch.cat((cos, cos), 1), torch.cat((sin, sin), 1)


def _started_from(block: Any, hidden_states: Tensor) -> Tensor:
    """Input of a checkpoint: a reentrant one gives its parameters gradients only if an input has one."""
    if not (getattr(block, "gradient_checkpointing", False) and block.training) or torch.compiler.is_compiling():
        return hidden_states
    options = getattr(block._gradient_checkpointing_func, "keywords", {})
    if options.get("use_reentrant") is False or hidden_states.requires_grad:
        return hidden_states
    if not (torch.is_grad_enabled() and any(p.requires_grad for p in block.parameters())):
        return hidden_states
    return hidden_states.detach().requires_grad_()
