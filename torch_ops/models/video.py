"""Videos as sequences of images, cut into patches as Transformers' video processors cut theirs.

frames = [open_image(path) for path in sorted(Path("clip").glob("*.png"))]
pixel_values, grid_thw = preprocess_video(frames)
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from PIL import Image
from torch import Tensor

from torch_ops._core.device import host_tensor
from torch_ops.models.qwen_vl import Qwen2VLImageProcessorPil, image_processor, preprocess


def preprocess_video(
    frames: Iterable[Image.Image], processor: Qwen2VLImageProcessorPil | None = None
) -> tuple[Tensor, Tensor]:
    """All frames of one video, in their order: none is left out, and each is resized as an image is.

    A patch is two frames deep (the processor's temporal_patch_size): frames are taken in pairs, and where their number
    is odd the last one is repeated. Returns ``pixel_values`` as `preprocess` does and ``grid_thw`` int64 ``[1, 3]``,
    the number of pairs, and patches down and across. Raises ValueError for no frame and for frames of different sizes.
    """
    processor = processor or image_processor()
    depth = int(processor.temporal_patch_size)
    parts, height, width = [], 0, 0
    for group in _groups(frames, depth):
        pixel_values, grid = preprocess(group, processor)
        height, width = grid[0, 1:].tolist()
        # A patch of an image has the image at every depth: [frame, patch, channel, depth, pixel].
        patches = pixel_values.view(len(group), height * width, -1, depth, processor.patch_size**2)
        picked = [patches[min(place, len(group) - 1), :, :, place] for place in range(depth)]
        parts.append(torch.stack(picked, dim=2).flatten(1))
    if not parts:
        raise ValueError("frames must hold at least one image")
    return torch.cat(parts), host_tensor([[len(parts), height, width]], torch.int64)


def _groups(frames: Iterable[Image.Image], depth: int) -> Iterator[list[Image.Image]]:
    left = iter(_of_one_size(frames))
    while group := list(islice(left, depth)):
        yield group


def _of_one_size(frames: Iterable[Image.Image]) -> Iterator[Image.Image]:
    size = None
    for frame in frames:
        size = size or frame.size
        if frame.size != size:
            raise ValueError(f"frames of a video must be of one size: {_by(frame.size)} pixels after {_by(size)}")
        yield frame


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


__all__ = ["preprocess_video"]
