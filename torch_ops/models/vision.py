"""The vision encoder of the Qwen-VL families, built from the ops: one module for all of them.

    patches -> + learned positions -> blocks of (norm, attention, norm, MLP) -> merger

Modules and parameters are named as in Transformers (`Qwen3VLVisionModel` and its relatives), so state dicts load both
ways. `vision_block` is a block, `_chunks` cuts long batches, `_inputs` checks them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_ops._core.checks import refuse
from torch_ops.models._blocks import PatchEmbed, PatchMerger, VisionAttention, VisionMLP, called, in_pairs
from torch_ops.models._checkpointing import CheckpointedBlocks
from torch_ops.models._chunks import Outputs, chunks_of, joined
from torch_ops.models._constants import TowerConstants
from torch_ops.models._inputs import CheckedInputs, check_is_metadata, check_is_tensor
from torch_ops.models._layers import LAYERS, NORMS, plain, watched
from torch_ops.models.families import FAMILIES, family_key, vision_config_of
from torch_ops.models.graph_cache import GraphCache
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
from torch_ops.pos_embed_interpolate import pos_embed_interpolate


class QwenVisionEncoder(CheckedInputs, CheckpointedBlocks, TowerConstants):
    """The vision encoder of a Qwen-VL family, for a vision configuration of Transformers.

    It takes and returns what Transformers' class does, and can replace `visual` of a whole model. `graphs` is a
    `GraphCache`, by which calls of a size that comes again replay CUDA graphs, or None.
    """

    def __init__(self, config: Any) -> None:
        # Without Transformers there is no configuration, but the ops and `VisionAttention` work.
        from torch_ops.models.vision_block import BLOCKS

        super().__init__()
        config = vision_config_of(config)
        family = FAMILIES[family_key(config)]
        self.config = config
        self.family = family
        self.sizes = family.sizes(config)
        self.graphs: GraphCache | None = None
        self._no_split_modules = {family.block_class}
        self._output = family.output_class()
        # Layers without windows; None where no layer has any.
        self._full_layers = frozenset(config.fullatt_block_indexes) if family.windows else None
        self._taps = tuple(config.deepstack_visual_indexes) if family.taps else ()

        taps = [PatchMerger(family, config, True) for _ in self._taps]
        if family.taps and family.taps_first:
            self.add_module(family.taps, nn.ModuleList(taps))
        self.patch_embed = PatchEmbed(family, config)
        self.patch = self.patch_embed.patch
        self.pos_embed: Any = None
        if family.learned_positions:
            self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self._kind = BLOCKS[family.block_class]
        self.blocks: Any = nn.ModuleList([self._kind(family, config) for _ in range(config.depth)])
        self.merger = PatchMerger(family, config)
        if family.taps and not family.taps_first:
            self.add_module(family.taps, nn.ModuleList(taps))
        # Whatever takes their place later has the same name, and is called with the arguments that Transformers gives.
        self.layer_names = tuple(name for name, module in self.named_modules() if plain(module, LAYERS + NORMS))
        parts = (PatchEmbed, VisionMLP, PatchMerger)
        self.places = tuple(
            name for name, module in self.named_modules() if name in self.layer_names or type(module) in parts
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embed.proj.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.patch_embed.proj.weight.device

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
            hidden_states: pixel values [T, P], a row for each patch, as Transformers' processors make them. Batches of
                such rows, as collators make them, [B, T / B, P], and patches that are not flattened are taken too.
            grid_thw: integers [n, 3], a row (t, h, w) for each image or video, in patches. A grid on the encoder's
                device is read back once, which costs a synchronisation; one on the CPU costs none.
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
        check_is_tensor(hidden_states)
        hidden_states = self.rows_of(hidden_states)
        images: tuple[Image, ...] | None = ()
        keep = bool(self._asked("output_hidden_states", output_hidden_states, False))
        given = any([kwargs.get(name) is not None for name in PRECOMPUTED])
        if not torch.compiler.is_compiling() and self.graphs is not None:
            asked = {
                "output_hidden_states is": keep,
                "chunk_tokens is": chunk_tokens is not None,
                "tensors of Transformers' helpers are": given,
            }
            outputs = None
            if why := next((f"{name} given" for name, is_asked in asked.items() if is_asked), ""):
                self.graphs.stay_eager(why)
            else:
                outputs, metadata = self._replayed(self.graphs, hidden_states, grid_thw, metadata)
            if outputs is not None:
                last, pooled, *features = outputs
                return self._returned(self.output_of(last, pooled, features), return_dict)
        if metadata is None and grid_thw is not None and not given:
            # Chunks have metadata of their own: the rotary tables of the whole may be as large as its features.
            images, metadata = self._read(hidden_states, grid_thw, chunk_tokens is None)
        elif metadata is None:
            learned = self.pos_embed is not None
            metadata = precomputed_metadata(kwargs, grid_thw, self.sizes, hidden_states.device, learned)
        if metadata is not None:
            images = metadata.made_of
            self.check_pixels(hidden_states, metadata.cos.shape[0])
        if chunk_tokens is None:
            assert metadata is not None
            last, pooled, taps, kept = self._encode(hidden_states, metadata, keep)
        else:
            last, pooled, taps, kept = self._encode_chunks(hidden_states, images, chunk_tokens, keep)
        output = self.output_of(last, pooled, taps)
        if keep:
            output["hidden_states"] = (*kept, last)
        return self._returned(output, return_dict)

    def _returned(self, output: Any, return_dict: bool | None) -> Any:
        return output if self._asked("return_dict", return_dict, True) else output.to_tuple()

    def _replayed(
        self, graphs: GraphCache, pixel_values: Tensor, grid_thw: Tensor | None, metadata: VisionMetadata | None
    ) -> tuple[list[Tensor] | None, VisionMetadata | None]:
        """Outputs by a graph, or metadata for an eager call; a grid on the device is read back once for both."""
        images, why = self._images_of(grid_thw, metadata)
        if images is None:
            graphs.stay_eager(why)
            return None, metadata
        self.check_pixels(pixel_values, patches_of(images))
        outputs = graphs.replayed(self, pixel_values, images)
        if outputs is None and metadata is None:
            metadata = metadata_of(images, self.sizes, pixel_values.device)
        return outputs, metadata

    def _images_of(
        self, grid_thw: Tensor | None, metadata: VisionMetadata | None
    ) -> tuple[tuple[Image, ...] | None, str]:
        """Return the images that a batch is made of, or why they do not tell all of it."""
        if metadata is None:
            if grid_thw is None:
                return None, "there is no grid"
            return images_of("vision_metadata", grid_thw, self.sizes.merge_size), ""
        images = metadata.made_of
        if images is None:
            return None, "metadata has tensors that do not follow from its images"
        # Padded metadata has more rows than its images.
        return (None, "metadata is padded") if metadata.cos.shape[0] != patches_of(images) else (images, "")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Drop graphs before the encoder is moved or cast, so that their memory is free for it."""
        if self.graphs is not None:
            self.graphs.clear()
        return super()._apply(fn, recurse)

    # One graph break. A function that sees the images would compile again for every number of them.
    @torch.compiler.disable(reason="the host reads the grid, and makes or remembers its metadata")
    def _read(
        self, pixel_values: Tensor, grid_thw: Tensor, whole: bool
    ) -> tuple[tuple[Image, ...], VisionMetadata | None]:
        images = images_of("vision_metadata", grid_thw, self.sizes.merge_size)
        # A wrong grid may be of more patches than there is memory for their tables.
        self.check_pixels(pixel_values, patches_of(images))
        return images, metadata_of(images, self.sizes, pixel_values.device) if whole else None

    def encode_packed(
        self, pixel_values: Tensor, metadata: VisionMetadata
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Compute (last_hidden_state, pooler_output, deepstack features): `forward` as a function of tensors alone.

        For CUDA graphs, torch.compile and torch.export: nothing depends on values, and shapes only on those of the
        tensors. Rows past the images are computed too. They see nothing, and are finite if their pixels are.
        """
        check_is_metadata(metadata)
        return self._encode(self.rows_of(pixel_values), metadata, False)[:3]

    def output_of(self, last: Tensor, pooled: Tensor, taps: Iterable[Tensor]) -> Any:
        """Transformers' output of what `encode_packed` returns."""
        fields: dict[str, Any] = {"last_hidden_state": last, "pooler_output": pooled}
        if self.family.taps:
            fields["deepstack_features"] = list(taps)
        return self._output(**fields)

    def _asked(self, name: str, given: Any, default: bool) -> Any:
        return getattr(self.config, name, default) if given is None else given

    def _positions(self, patches: Tensor, metadata: VisionMetadata) -> Tensor:
        assert self.pos_embed is not None
        if metadata.interp_indices is not None and metadata.interp_weights is not None:
            taken = self.pos_embed(metadata.interp_indices) * metadata.interp_weights[:, :, None]
            return taken.sum(1).to(patches.dtype)
        assert metadata.grid is not None
        if plain(self.pos_embed) and not watched():
            table = self.pos_embed.weight
        else:
            table = self.pos_embed(torch.arange(self.config.num_position_embeddings, device=patches.device))
        # A narrow table would round the sum of its rows once more.
        table = table.to(torch.promote_types(table.dtype, patches.dtype))
        rows, merge_size = patches.shape[0], self.sizes.merge_size
        return pos_embed_interpolate(table, metadata.grid, rows, merge_size).to(patches.dtype)

    def _encode(self, pixel_values: Tensor, metadata: VisionMetadata, keep: bool) -> Outputs:
        if (metadata.window_index is None) != (self.sizes.window is None):
            wanted, got = ("with", "without") if metadata.window_index is None else ("without", "with")
            refuse("vision encoder", "metadata", f"{wanted} windows, as the encoder is", f"{got} windows")
        branch, residual = self.patch_embed(pixel_values), None
        if branch.device != pixel_values.device:
            # Offloaded weights are brought to the device that computes, and the pixels too.
            metadata = metadata.to(branch.device)
        if self.pos_embed is not None:
            residual = self._positions(branch, metadata)
        if metadata.window_index is not None:
            branch = gather_cells(branch, metadata.window_index, self.sizes)
        rotation = metadata.cos, metadata.sin
        # Hooks of all modules see blocks only where they are called.
        alone = not watched()
        taps, kept = [], []
        for layer, block in enumerate(self.blocks):
            full = self._full_layers is None or layer in self._full_layers
            cu_seqlens: Any = metadata.cu_seqlens if full else metadata.cu_window_seqlens
            tapped = layer > 0 and layer - 1 in self._taps
            if alone and in_pairs(block, self._kind):
                branch, residual, entered = block.step(branch, residual, cu_seqlens, rotation, tapped or keep)
            else:
                entered = branch if residual is None else branch + residual
                branch = called(block, self._kind, entered, cu_seqlens, rotation, self.sizes.head_dim)
                residual = None
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
            pooled = pooled[metadata.reverse_index.to(pooled.device)]
        return hidden, pooled, tuple(taps), tuple(kept)

    def _encode_chunks(self, pixel_values: Tensor, images: tuple[Image, ...] | None, most: int, keep: bool) -> Outputs:
        def encode(pixels: Tensor, run: tuple[Image, ...]) -> Outputs:
            return self._encode(pixels, metadata_of(run, self.sizes, pixels.device), keep)

        made = (encode(*chunk) for chunk in chunks_of(pixel_values, images, most))
        # Without a patch there is no chunk.
        return joined(made, pixel_values.shape[0]) or encode(pixel_values, images or ())

    def _tap(self, layer: int, hidden: Tensor) -> Tensor:
        assert self.family.taps is not None
        return getattr(self, self.family.taps)[self._taps.index(layer)](hidden)


def from_config(config: Any) -> QwenVisionEncoder:
    """Build an encoder with fresh weights from a Transformers configuration, of a vision encoder or a whole model."""
    return QwenVisionEncoder(config)


__all__ = ["QwenVisionEncoder", "VisionAttention", "from_config"]
