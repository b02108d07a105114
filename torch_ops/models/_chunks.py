"""Long batches in chunks: frames do not see each other, so a batch is cut between them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_ops._core.checks import check_int, refuse
from torch_ops._core.torch_private import pytree
from torch_ops.models.vision_metadata import PRECOMPUTED, Image, patches_of

# last_hidden_state, pooler_output, deepstack features, hidden states.
Outputs = tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]


def chunks_of(
    pixel_values: Tensor, images: tuple[Image, ...] | None, chunk_tokens: int
) -> Iterable[tuple[Tensor, tuple[Image, ...]]]:
    """Rows of consecutive frames, and their images."""
    chunk_tokens = check_int("vision encoder", "chunk_tokens", chunk_tokens)
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
    for run in split_images(images, chunk_tokens):
        if rows := patches_of(run):
            yield pixel_values[start : start + rows], run
        start += rows


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


def joined(outputs: Iterable[Outputs], rows: int) -> Outputs | None:
    """The outputs of all chunks as one, of so many patches; each is copied to its place as it comes. None of none."""
    start = 0
    parts: list[list[Tensor]] = []
    whole: list[Tensor] = []
    structure: Any = None

    def place(chunk: Outputs) -> int:
        nonlocal structure, whole
        leaves, structure = pytree.tree_flatten(chunk)
        count = chunk[0].shape[0]
        if any(leaf.requires_grad for leaf in leaves):
            # The gradient holds all parts anyway, and would be copied for each.
            parts.append(leaves)
            return count
        # Rows of a patch, or of a merged cell.
        units = [count // leaf.shape[0] for leaf in leaves]
        if not whole:
            whole = [leaf.new_empty((rows // unit, leaf.shape[1])) for leaf, unit in zip(leaves, units, strict=True)]
        for tensor, leaf, unit in zip(whole, leaves, units, strict=True):
            tensor[start // unit : (start + count) // unit] = leaf
        return count

    # With map no name holds a chunk while the next one is computed.
    for count in map(place, outputs):
        start += count
    if structure is None:
        return None
    return pytree.tree_unflatten([torch.cat(leaves) for leaves in zip(*parts, strict=True)] or whole, structure)
