"""The vision encoder of the Qwen-VL families, built from the ops: one module for all of them.

    patches -> + learned positions -> blocks of (norm, attention, norm, MLP) -> merger

Modules and parameters are named as in Transformers (`Qwen3VLVisionModel` and its relatives), so state dicts load both
ways. A block is computed differently:

- q, k and v come rotated from one op, and attention takes all images in one packed call.
- A block returns its own contribution and the residual stream, (branch, residual). The next norm adds the two as it
  reads them and writes the sum once: `add_layer_norm`, `add_rms_norm`.
- The activation of an MLP is computed with its first product.

An op takes a layer's parameters only if the layer is `plain`. A layer that was replaced (an adapter, a quantised
layer), holds quantised weights or has hooks is called as a module. PyTorch's own activation follows it, or attention
that rotates q and k itself. A norm is called as a module too, after PyTorch's own sum.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from torch_ops._core.checks import (
    check_device,
    check_head_dim,
    check_int,
    check_matrix,
    check_num_heads,
    dtype_name,
    refuse,
)
from torch_ops.models._layers import LAYERS, NORMS, RMSNorm, after_sum, chained, norm_of, plain
from torch_ops.models.families import FAMILIES, Family, vision_config_of
from torch_ops.models.vision_metadata import (
    PRECOMPUTED,
    Image,
    VisionMetadata,
    gather_cells,
    images_of,
    metadata_of,
    patches_of,
    precomputed_metadata,
)
from torch_ops.patch_merger import patch_merger
from torch_ops.pos_embed_interpolate import pos_embed_interpolate
from torch_ops.qkv_rope import qkv_rope
from torch_ops.rope_window_attn import rope_window_attn
from torch_ops.window_attn import window_attn

# last_hidden_state, pooler_output, deepstack features, hidden states.
Outputs = tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]


class PatchEmbed(nn.Module):
    """The convolution over patches, which do not overlap, as the linear layer that it is."""

    def __init__(self, family: Family, config: Any) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        width = getattr(config, family.width)
        self.patch = (config.in_channels, *kernel)
        self.proj: Any = nn.Conv3d(config.in_channels, width, kernel, stride=kernel, bias=family.patch_bias)

    def forward(self, pixel_values: Tensor) -> Tensor:
        weight = self.proj.weight
        pixel_values = pixel_values.to(weight.dtype)
        if not plain(self.proj):
            return self.proj(pixel_values.view(-1, *self.patch)).flatten(1)
        return functional.linear(pixel_values, weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    """Attention of packed images: `qkv_rope`, `window_attn` and the projection.

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
        if (cos is None) != (sin is None):
            given, other = ("cos", "sin") if sin is None else ("sin", "cos")
            refuse("VisionAttention", given, f"None where {other} is", "a tensor")
        if cu_seqlens is None:
            cu_seqlens = torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]
        if cos is not None and sin is not None and plain(self.qkv):
            q, k, v = qkv_rope(x, self.qkv.weight, self.qkv.bias, cos, sin, self.num_heads)
            out = window_attn(q, k, v, cu_seqlens, softcap=0.0, dropout_p=0.0)
        else:
            check_matrix("VisionAttention", "x", x, "[T, C]", (None, None))
            q, k, v = self.qkv(x).view(-1, 3, self.num_heads, self.head_dim).unbind(1)
            if cos is None or sin is None:
                out = window_attn(q, k, v, cu_seqlens, softcap=0.0, dropout_p=0.0)
            else:
                out = rope_window_attn(q, k, v, cos, sin, cu_seqlens, softcap=0.0)
        assert isinstance(out, Tensor)
        del q, k, v
        return self.proj(out.flatten(1))


class VisionMLP(nn.Module):
    def __init__(self, family: Family, config: Any) -> None:
        super().__init__()
        outer, inner = getattr(config, family.width), family.intermediate_size(config)
        self._names = family.mlp
        self.activation = family.activation(config)
        for name in self._names[:-1]:
            self.add_module(name, nn.Linear(outer, inner))
        self.add_module(self._names[-1], nn.Linear(inner, outer))

    def forward(self, x: Tensor) -> Tensor:
        return chained(x, [self._modules[name] for name in self._names], self.activation)


class VisionBlock(nn.Module):
    """A transformer block between the norms' sums; see the module's docstring."""

    # Transformers sets this and `gradient_checkpointing`, on every module that has it, where a whole model is told to.
    _gradient_checkpointing_func: Callable[..., Any] = staticmethod(partial(checkpoint, use_reentrant=False))

    def __init__(self, family: Family, config: Any) -> None:
        super().__init__()
        width = getattr(config, family.width)
        # Set on the instance, because torch.compile would otherwise guard on the class for each block.
        self.gradient_checkpointing = False
        self.norm1 = norm_of(family, width)
        self.norm2 = norm_of(family, width)
        self.attn = VisionAttention(width, config.num_heads)
        self.mlp = VisionMLP(family, config)

    def forward(
        self, branch: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, cu_seqlens: Tensor,
        returns_entered: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """(branch, residual) to the block's own, and with `returns_entered` the sum of the two, which entered it."""
        if self.gradient_checkpointing and self.training:
            # Summed before, since what goes in is kept: one tensor instead of two.
            entered = branch if residual is None else branch + residual
            start = self._started_from(entered)
            branch, total, _ = self._gradient_checkpointing_func(
                self._compute, start, None, cos, sin, cu_seqlens, False
            )  # fmt: skip
            return branch, total, entered if returns_entered else None
        return self._compute(branch, residual, cos, sin, cu_seqlens, returns_entered)

    def _started_from(self, entered: Tensor) -> Tensor:
        """Input of a checkpoint: a reentrant one gives its parameters gradients only if an input has one."""
        options = getattr(self._gradient_checkpointing_func, "keywords", {})
        if options.get("use_reentrant") is False or torch.compiler.is_compiling():
            return entered
        if entered.requires_grad or not (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())):
            return entered
        return entered.detach().requires_grad_()

    def _compute(
        self, branch: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, cu_seqlens: Tensor,
        returns_entered: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        if residual is None:
            normed, entered = self.norm1(branch), branch
        else:
            normed, entered = after_sum(self.norm1, branch, residual)
        normed, total = after_sum(self.norm2, self.attn(normed, cos, sin, cu_seqlens), entered)
        # At the MLP memory is at its peak: there nothing is held that nobody wants.
        kept = entered if returns_entered else None
        del entered
        return self.mlp(normed), total, kept


class PatchMerger(nn.Module):
    """Norm, the patches of a merged cell side by side, and two layers with GELU (by erf) between them.

    The patches of a cell follow each other, so that putting them side by side is a view. `after_shuffle` norms the
    cells instead of the patches.
    """

    def __init__(self, family: Family, config: Any, after_shuffle: bool = False) -> None:
        super().__init__()
        self._names = family.merger
        self.after_shuffle = after_shuffle
        self.merge_size = config.spatial_merge_size
        patch = getattr(config, family.width)
        self.width = patch * self.merge_size**2
        norm, first, second = self._names
        self.add_module(norm, norm_of(family, self.width if after_shuffle else patch))
        for name, out_width in ((first, self.width), (second, getattr(config, family.out_width))):
            owner, _, leaf = name.rpartition(".")
            if owner and not hasattr(self, owner):
                self.add_module(owner, nn.Module())
            self.get_submodule(owner).add_module(leaf, nn.Linear(self.width, out_width))

    def forward(self, x: Tensor) -> Tensor:
        modules: list[Any] = [self.get_submodule(name) for name in self._names]
        norm, *layers = modules
        if plain(norm, NORMS) and all([plain(layer) for layer in layers]):
            first, second = layers
            return patch_merger(
                x, norm.weight, getattr(norm, "bias", None), first.weight, first.bias, second.weight, second.bias,
                self.merge_size, self.after_shuffle, 1e-6, isinstance(norm, RMSNorm),
            )  # fmt: skip
        x = norm(x.view(-1, self.width)) if self.after_shuffle else norm(x).view(-1, self.width)
        return chained(x, layers, "gelu")


class QwenVisionEncoder(nn.Module):
    """The vision encoder of a Qwen-VL family, for a vision configuration of Transformers.

    It takes and returns what Transformers' class does, and can replace `visual` of a whole model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        config = vision_config_of(config)
        family = FAMILIES[config.model_type]
        self.config = config
        self.family = family
        self.sizes = family.sizes(config)
        self.spatial_merge_size = config.spatial_merge_size
        self._output = family.output_class()
        # Layers without windows; None where no layer has any.
        self._full_layers = frozenset(config.fullatt_block_indexes) if family.windows else None
        self._taps = tuple(config.deepstack_visual_indexes) if family.taps else ()

        self.patch_embed = PatchEmbed(family, config)
        self.pos_embed: Any = None
        if family.learned_positions:
            self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks: Any = nn.ModuleList([VisionBlock(family, config) for _ in range(config.depth)])
        self.merger = PatchMerger(family, config)
        if family.taps:
            self.add_module(family.taps, nn.ModuleList([PatchMerger(family, config, True) for _ in self._taps]))
        # Whatever takes their place later has the same name.
        self.layer_names = tuple(name for name, module in self.named_modules() if plain(module, LAYERS + NORMS))

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embed.proj.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.patch_embed.proj.weight.device

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(block.gradient_checkpointing for block in self.blocks)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Keep only the input of each block in training, and compute the block again for its gradient."""
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        for block in self.blocks:
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(checkpoint, **options)

    def gradient_checkpointing_disable(self) -> None:
        for block in self.blocks:
            block.gradient_checkpointing = False

    def forward(
        self,
        hidden_states: Tensor,
        grid_thw: Tensor | None = None,
        *,
        metadata: VisionMetadata | None = None,
        chunk_tokens: int | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Encode all images or videos of a batch, packed.

        Args:
            hidden_states: pixel values [T, P], a row for each patch, as Transformers' processors make them.
            grid_thw: integers [n, 3], a row (t, h, w) for each image or video, in patches. Keep it on the CPU: a grid
                on the encoder's device is read back, which costs a synchronisation.
            metadata: result of `vision_metadata`, instead of the grid.
            chunk_tokens: largest number of patches at once, for long videos. The batch is cut between frames, which do
                not see each other. A frame of more patches is a chunk of its own. Default: the whole batch.
            output_hidden_states, return_dict: as in Transformers. Default: the configuration's.
            kwargs: tensors of Transformers' helpers are used: cu_seqlens, position_ids, interp_indices with
                interp_weights, and window_index with cu_window_seqlens. Others have no effect, such as
                output_attentions, which whole models pass on: there are no attention weights.

        Returns:
            Transformers' output: last_hidden_state [T, C], in window order if the encoder has windows. pooler_output is
            [T / 4, out]. deepstack_features is a list of [T / 4, out], if the family has them.

        Raises:
            ValueError: for a bad argument. The message names it, what was expected and what came.
        """
        self.check_metadata(metadata)
        images: tuple[Image, ...] | None = ()
        if metadata is None and grid_thw is not None and all(kwargs.get(name) is None for name in PRECOMPUTED):
            # Chunks have metadata of their own: the rotary tables of the whole may be as large as its features.
            images, metadata = self._read(hidden_states, grid_thw, chunk_tokens is None)
        elif metadata is None:
            learned = self.pos_embed is not None
            metadata = precomputed_metadata(kwargs, grid_thw, self.sizes, self.device, learned)
        if metadata is not None:
            images = metadata.images
            self.check_pixels(hidden_states, metadata.cos.shape[0])
        keep = bool(self._asked("output_hidden_states", output_hidden_states, False))
        if chunk_tokens is None:
            assert metadata is not None
            last, pooled, taps, kept = self._encode(hidden_states, metadata, keep)
        else:
            last, pooled, taps, kept = self._encode_chunks(hidden_states, images, chunk_tokens, keep)
        output = self.output_of(last, pooled, taps)
        if keep:
            output["hidden_states"] = (*kept, last)
        return output if self._asked("return_dict", return_dict, True) else output.to_tuple()

    # One graph break. A function that sees the images would compile again for every number of them.
    @torch.compiler.disable(reason="the host reads the grid, and makes or remembers its metadata")
    def _read(
        self, pixel_values: Tensor, grid_thw: Tensor, whole: bool
    ) -> tuple[tuple[Image, ...], VisionMetadata | None]:
        images = images_of("vision_metadata", grid_thw, self.sizes.merge_size)
        # A wrong grid may be of more patches than there is memory for their tables.
        self.check_pixels(pixel_values, patches_of(images))
        return images, metadata_of(images, self.sizes, self.device) if whole else None

    def encode_packed(
        self, pixel_values: Tensor, metadata: VisionMetadata
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Compute (last_hidden_state, pooler_output, deepstack features): `forward` as a function of tensors alone.

        For CUDA graphs, torch.compile and torch.export: nothing depends on values, and shapes only on those of the
        tensors. Rows past the images are computed too. They see nothing, and are finite if their pixels are.
        """
        _check_is_metadata(metadata)
        return self._encode(pixel_values, metadata, False)[:3]

    def output_of(self, last: Tensor, pooled: Tensor, taps: Iterable[Tensor]) -> Any:
        """Transformers' output of what `encode_packed` returns."""
        fields: dict[str, Any] = {"last_hidden_state": last, "pooler_output": pooled}
        if self.family.taps:
            fields["deepstack_features"] = list(taps)
        return self._output(**fields)

    def check_metadata(self, metadata: VisionMetadata | None) -> None:
        if metadata is None:
            return
        _check_is_metadata(metadata)
        if metadata.sizes not in (None, self.sizes):
            refuse("vision encoder", "metadata", f"made for encoder.sizes = {self.sizes}", f"made for {metadata.sizes}")

    def check_pixels(self, pixel_values: Tensor, rows: int, *, sent: bool = False) -> None:
        """With `sent`, who calls sends pixel values of the host."""
        if not isinstance(pixel_values, Tensor):
            refuse("vision encoder", "pixel_values", "a tensor", type(pixel_values).__name__)
        if pixel_values.is_complex():
            refuse("vision encoder", "pixel_values", "of a real dtype", dtype_name(pixel_values.dtype))
        weight = self.patch_embed.proj.weight
        if not (sent and pixel_values.device.type == "cpu"):
            check_device("vision encoder", "pixel_values", pixel_values, "the encoder", weight)
        columns = weight.shape[1:].numel()
        if pixel_values.dim() != 2 or pixel_values.shape[1] != columns:
            got = list(pixel_values.shape)
            refuse("vision encoder", "pixel_values", f"of shape [T, {columns}], a row for each patch", got)
        if pixel_values.shape[0] != rows:
            wanted = f"of {rows} rows, the patches of the grid"
            refuse("vision encoder", "pixel_values", wanted, pixel_values.shape[0])

    def _asked(self, name: str, given: Any, default: bool) -> Any:
        return getattr(self.config, name, default) if given is None else given

    def _positions(self, patches: Tensor, metadata: VisionMetadata) -> Tensor:
        assert self.pos_embed is not None
        if metadata.interp_indices is not None and metadata.interp_weights is not None:
            taken = self.pos_embed(metadata.interp_indices) * metadata.interp_weights[:, :, None]
            return taken.sum(1).to(patches.dtype)
        assert metadata.grid is not None
        if plain(self.pos_embed):
            table = self.pos_embed.weight
        else:
            table = self.pos_embed(torch.arange(self.config.num_position_embeddings, device=patches.device))
        rows, merge_size = patches.shape[0], self.spatial_merge_size
        return pos_embed_interpolate(table, metadata.grid, rows, merge_size).to(patches.dtype)

    def _encode(self, pixel_values: Tensor, metadata: VisionMetadata, keep: bool) -> Outputs:
        if (metadata.window_index is None) != (self.sizes.window is None):
            wanted, got = ("with", "without") if metadata.window_index is None else ("without", "with")
            refuse("vision encoder", "metadata", f"{wanted} windows, as the encoder is", f"{got} windows")
        branch, residual = self.patch_embed(pixel_values), None
        if self.pos_embed is not None:
            residual = self._positions(branch, metadata)
        if metadata.window_index is not None:
            branch = gather_cells(branch, metadata.window_index, self.sizes)
        taps, kept = [], []
        for layer, block in enumerate(self.blocks):
            full = self._full_layers is None or layer in self._full_layers
            cu_seqlens = metadata.cu_seqlens if full else metadata.cu_window_seqlens
            tapped = layer > 0 and layer - 1 in self._taps
            branch, residual, entered = block(
                branch, residual, metadata.cos, metadata.sin, cu_seqlens, tapped or keep
            )  # fmt: skip
            if tapped:
                taps.append(self._tap(layer - 1, entered))
            if keep:
                kept.append(entered)
            # Or it would live until the next block returns.
            del entered
        hidden = branch if residual is None else branch + residual
        if len(self.blocks) - 1 in self._taps:
            taps.append(self._tap(len(self.blocks) - 1, hidden))
        pooled = self.merger(hidden)
        if metadata.reverse_index is not None:
            pooled = pooled[metadata.reverse_index]
        return hidden, pooled, tuple(taps), tuple(kept)

    def _encode_chunks(self, pixel_values: Tensor, images: tuple[Image, ...] | None, most: int, keep: bool) -> Outputs:
        """`_encode` of chunks of at most `most` patches; the outputs of each are copied to their place as they come."""
        rows, start = pixel_values.shape[0], 0
        parts: list[list[Tensor]] = []
        whole: list[Tensor] = []
        structure: Any = None

        def place(outputs: Outputs) -> int:
            nonlocal structure, whole
            leaves, structure = pytree.tree_flatten(outputs)
            count = outputs[0].shape[0]
            if any(leaf.requires_grad for leaf in leaves):
                # The gradient holds all parts anyway, and would be copied for each.
                parts.append(leaves)
                return count
            # Rows of a patch, or of a merged cell.
            units = [count // leaf.shape[0] for leaf in leaves]
            if not whole:
                whole = [
                    leaf.new_empty((rows // unit, leaf.shape[1])) for leaf, unit in zip(leaves, units, strict=True)
                ]
            for tensor, leaf, unit in zip(whole, leaves, units, strict=True):
                tensor[start // unit : (start + count) // unit] = leaf
            return count

        for chunk in self._chunks(pixel_values, images, most):
            start += place(self._encode(*chunk, keep))
        if structure is None:
            # There is no patch.
            return self._encode(pixel_values, metadata_of(images or (), self.sizes, self.device), keep)
        return pytree.tree_unflatten([torch.cat(each) for each in zip(*parts, strict=True)] or whole, structure)

    def _tap(self, layer: int, hidden: Tensor) -> Tensor:
        assert self.family.taps is not None
        return getattr(self, self.family.taps)[self._taps.index(layer)](hidden)

    def _chunks(
        self, pixel_values: Tensor, images: tuple[Image, ...] | None, chunk_tokens: int
    ) -> Iterable[tuple[Tensor, VisionMetadata]]:
        """Rows of consecutive frames, and their own metadata."""
        check_int("vision encoder", "chunk_tokens", chunk_tokens)
        if chunk_tokens < 1:
            refuse("vision encoder", "chunk_tokens", "1 or more", chunk_tokens)
        if images is None:
            wanted = (
                f"None with a clone() of metadata or with any of {', '.join(PRECOMPUTED)}, "
                "since the host then has no frame boundaries"
            )
            refuse("vision encoder", "chunk_tokens", wanted, chunk_tokens)
        assert images is not None
        if patches_of(images) != pixel_values.shape[0]:
            refuse("vision encoder", "chunk_tokens", "None with metadata that is padded", chunk_tokens)
        start = 0
        for run in split_images(images, int(chunk_tokens)):
            if rows := patches_of(run):
                yield pixel_values[start : start + rows], metadata_of(run, self.sizes, self.device)
            start += rows


def _check_is_metadata(metadata: Any) -> None:
    if not isinstance(metadata, VisionMetadata):
        refuse("vision encoder", "metadata", "a result of vision_metadata", type(metadata).__name__)


def split_images(images: Iterable[Image], most: int) -> Iterable[tuple[Image, ...]]:
    """Images, cut between frames into runs of at most `most` patches, or of a single frame."""
    run: list[Image] = []
    room = most
    for t, h, w in images:
        size = h * w
        while t:
            taken = min(t, max(room // size, 0 if run else 1)) if size else t
            if taken:
                run.append((taken, h, w))
                t, room = t - taken, room - taken * size
            if t:
                yield tuple(run)
                run, room = [], most
    if run:
        yield tuple(run)


class PackedEncoder(nn.Module):
    """`encode_packed` of an encoder as a module of its own, for torch.export."""

    def __init__(self, encoder: QwenVisionEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: Tensor, metadata: VisionMetadata) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        return self.encoder.encode_packed(pixel_values, metadata)

    def dynamic_shapes(self, metadata: VisionMetadata) -> tuple[Any, ...]:
        """Shapes for torch.export of (pixel_values, metadata): any number of images, segments and windows, and merged
        cells from 2 on.
        """
        # PyTorch takes tensors of one row for another case.
        cells = Dim("cells", min=2)
        patches = self.encoder.spatial_merge_size**2 * cells
        sizes = {
            "grid": Dim("images"), "cu_seqlens": Dim("borders"), "cos": patches, "sin": patches,
            "window_index": cells, "reverse_index": cells, "cu_window_seqlens": Dim("window_borders"),
            "interp_indices": patches, "interp_weights": patches,
        }  # fmt: skip
        return {0: patches}, [{0: sizes[name]} for name, _ in metadata.tensors()]


def from_config(config: Any) -> QwenVisionEncoder:
    """Build an encoder with fresh weights from a Transformers configuration, of a vision encoder or a whole model."""
    return QwenVisionEncoder(config)


__all__ = ["PackedEncoder", "QwenVisionEncoder", "VisionAttention", "from_config"]
