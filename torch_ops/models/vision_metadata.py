"""The metadata of a batch of images that the blocks of a vision encoder need, made once per batch and cached.

Images and frames of any size are packed into one tensor of patches. The grid alone determines where each patch lies,
which patches see each other, and the windows. All of it is computed on the host, sent without waiting, and cached for
the next batch of the same sizes:

    metadata = vision_metadata(grid_thw, encoder.sizes, "cuda")
    output = encoder(pixel_values, metadata=metadata)
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torch_ops._core.checks import check_dense, check_int, dtype_name, refuse
from torch_ops._core.registry import is_eager, sent
from torch_ops._core.torch_private import pytree
from torch_ops._grids import LONGEST_SIDE
from torch_ops.rotary_table import rotary_table

Image = tuple[int, int, int]

# Frames that a host would make borders of; a clip of a day has two million.
MOST_FRAMES = 2**24

# Batches whose metadata is kept; of a large batch (36,000 patches of head dimension 72) it takes 11 MB.
CACHE_SIZE = 32

# Tensors that Transformers' vision encoders take ready-made, and their dimensions; the longest segment is not needed.
PRECOMPUTED = {
    "cu_seqlens": 1, "position_ids": 2, "interp_indices": 2, "interp_weights": 2, "window_index": 1,
    "cu_window_seqlens": 1,
}  # fmt: skip


@dataclass(frozen=True)
class VisionSizes:
    """The sizes of an encoder that its metadata depends on; ``window`` is a window's side in merged cells."""

    head_dim: int
    merge_size: int = 2
    theta: float = 10000.0
    window: int | None = None


@dataclass(frozen=True)
class Padding:
    """Sizes that a batch is padded to, for graphs of fixed shape; None leaves a size as it is."""

    rows: int | None = None
    images: int | None = None
    segments: int | None = None
    windows: int | None = None

    def with_integers(self, op: str, name: str) -> "Padding":
        """Refuse sizes that are no integers; NumPy's become Python's."""
        sizes = vars(self).items()
        return Padding(
            **{field: size if size is None else check_int(op, f"{name}.{field}", size) for field, size in sizes}
        )

    def holds(self, sizes: "Padding") -> bool:
        """Return whether a batch of these sizes can be padded to it."""
        bounds = (self.rows, self.images, self.segments, self.windows)
        wanted = (sizes.rows, sizes.images, sizes.segments, sizes.windows)
        return all(
            size is None or most is None or size <= most for size, most in zip(wanted, bounds, strict=True)
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class VisionMetadata:
    """Tensors on the encoder's device, the images as the host knows them, and the sizes of the encoder.

    ``cos`` and ``sin`` are in the order of the blocks' rows, which is window order in an encoder with windows. A
    segment is a frame. torch.compile and torch.export see a structure of its tensors alone.
    """

    grid: Tensor | None  # int64 [n, 3]
    cu_seqlens: Tensor  # int32 [segments + 1]
    cos: Tensor  # fp32 [T, D / 2]
    sin: Tensor
    window_index: Tensor | None = None  # int64 [T / merge_size^2], the merged cell at each place of the window order
    reverse_index: Tensor | None = None  # its inverse
    cu_window_seqlens: Tensor | None = None  # int32 [windows + 1]
    interp_indices: Tensor | None = None  # int64 [T, taps], where Transformers' own are given
    interp_weights: Tensor | None = None
    images: tuple[Image, ...] | None = None
    sizes: VisionSizes | None = None

    @property
    def made_of(self) -> tuple[Image, ...] | None:
        """Images that all tensors follow from; None if the host does not know them, or a tensor was replaced."""
        return self.images if getattr(self, "_is_made", False) else None

    @property
    def total(self) -> int:
        """Patches in all, without padding."""
        return patches_of(self._known())

    def clone(self) -> "VisionMetadata":
        """Return a copy with its own tensors, for `copy_`: the inputs of a CUDA graph, whose images are not known."""
        tensors: Any = {name: tensor.clone() for name, tensor in self.tensors()}
        return dataclasses.replace(self, images=None, **tensors)

    def to(self, device: torch.device) -> "VisionMetadata":
        """Return a copy on another device."""
        tensors: Any = {name: sent(tensor, device) for name, tensor in self.tensors()}
        return dataclasses.replace(self, **tensors)

    def copy_(self, other: "VisionMetadata") -> "VisionMetadata":
        """Fill the tensors of a `clone` with another batch's, of the same shapes; never waits.

        Raises ValueError for other metadata than a clone, which may be cached, and for other shapes.
        """
        if self.images is not None:
            refuse("VisionMetadata.copy_", "self", "a clone()", "metadata that may be cached for other calls")
        theirs = dict(other.tensors())
        for name, tensor in self.tensors():
            if name not in theirs or theirs[name].shape != tensor.shape:
                got = list(theirs[name].shape) if name in theirs else None
                refuse("VisionMetadata.copy_", name, f"of shape {list(tensor.shape)}", got)
            tensor.copy_(theirs[name], non_blocking=True)
        return self

    def _known(self) -> tuple[Image, ...]:
        if self.images is None:
            refuse("VisionMetadata", "images", "known to the host", "known to the device alone")
        return self.images or ()

    def __getstate__(self) -> dict[str, Any]:
        """State of copies and pickles. Their tensors are their owner's, who may change them."""
        return {name: value for name, value in vars(self).items() if name != "_is_made"}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in _TENSORS:
            if getattr(self, name) is not None:
                yield name, getattr(self, name)


_KNOWN_TO_THE_HOST = ["images", "sizes"]
_TENSORS = [field.name for field in dataclasses.fields(VisionMetadata) if field.name not in _KNOWN_TO_THE_HOST]

pytree.register_dataclass(
    VisionMetadata,
    field_names=_TENSORS,
    drop_field_names=_KNOWN_TO_THE_HOST,
    serialized_type_name="torch_ops.models.vision_metadata.VisionMetadata",
)
# An exported program is saved with the inputs it was traced with.
torch.serialization.add_safe_globals([VisionMetadata, VisionSizes])


@torch.compiler.disable
def vision_metadata(
    grid_thw: Tensor,
    sizes: VisionSizes,
    device: torch.device | str = "cpu",
    padding: Padding | None = None,
) -> VisionMetadata:
    """Return the metadata of a batch of images or videos.

    Args:
        grid_thw: integers [n, 3], a row (t, h, w) for each image or video, in patches. On the CPU it costs no
            synchronisation; on a device it is read back, which costs one.
        sizes: sizes of the encoder, ``encoder.sizes``.
        device: device of the encoder.
        padding: sizes that the batch is padded to: rows, and images, segments (frames) and windows, which are empty.
            Default: no padding.

    Returns:
        VisionMetadata, cached: a batch of the same grid, sizes and device gets the same object on the same CUDA stream.
        Its tensors must not be changed; ``clone`` it for that.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
    """
    if not isinstance(sizes, VisionSizes):
        refuse("vision_metadata", "sizes", "VisionSizes, as encoder.sizes", type(sizes).__name__)
    if not isinstance(padding, Padding | None):
        refuse("vision_metadata", "padding", "a Padding or None", type(padding).__name__)
    padding = padding and padding.with_integers("vision_metadata", "padding")
    images = images_of("vision_metadata", grid_thw, sizes.merge_size)
    return metadata_of(images, sizes, device, padding)


def patches_of(images: Iterable[Image]) -> int:
    return sum(t * h * w for t, h, w in images)


def check_grid(op: str, grid_thw: Tensor) -> None:
    """Check a grid as far as possible without reading it."""
    if not isinstance(grid_thw, Tensor) or grid_thw.dim() != 2 or grid_thw.shape[1] != 3:
        got = f"shape {list(grid_thw.shape)}" if isinstance(grid_thw, Tensor) else type(grid_thw).__name__
        refuse(op, "grid_thw", "a tensor of shape [n, 3], a row (t, h, w) for each image", got)
    if grid_thw.is_floating_point() or grid_thw.is_complex() or grid_thw.dtype == torch.bool:
        refuse(op, "grid_thw", "of an integer dtype", grid_thw.dtype)
    check_dense(op, "grid_thw", grid_thw)
    if grid_thw.is_meta:
        refuse(op, "grid_thw", "a tensor that has values", "a tensor on the meta device")


def images_of(op: str, grid_thw: Tensor, merge_size: int) -> tuple[Image, ...]:
    """The rows (t, h, w) of a grid, checked, in the name of `op`; a grid on a device is read back."""
    check_grid(op, grid_thw)
    images = tuple((t, h, w) for t, h, w in grid_thw.tolist())
    for image, (t, h, w) in enumerate(images):
        if t < 0:
            refuse(op, f"grid_thw[{image}, 0], frames,", "at least 0", t)
        for column, name, size in ((1, "height", h), (2, "width", w)):
            if size < 0 or size % merge_size:
                wanted = f"at least 0 and a multiple of {merge_size}, the encoder's spatial_merge_size"
                refuse(op, f"grid_thw[{image}, {column}], the {name},", wanted, size)
            if size > LONGEST_SIDE:
                refuse(op, f"grid_thw[{image}, {column}], the {name},", f"at most {LONGEST_SIDE}", size)
    if (frames := sum(t for t, _, _ in images)) > MOST_FRAMES:
        refuse(op, "grid_thw", f"of at most {MOST_FRAMES} frames", frames)
    return images


def filled_sizes(images: tuple[Image, ...], sizes: VisionSizes) -> Padding:
    """The sizes of a batch without padding."""
    windows = None
    if sizes.window is not None:
        side = sizes.window * sizes.merge_size
        windows = sum(t * -(-h // side) * -(-w // side) for t, h, w in images)
    frames = sum(t for t, _, _ in images)
    return Padding(patches_of(images), len(images), frames, windows)


# After a graph break, a CUDA stream that Dynamo rebuilt has no `cuda_stream` in PyTorch 2.11.
@torch.compiler.disable(reason="metadata is made by the host, and remembered")
def metadata_of(
    images: tuple[Image, ...], sizes: VisionSizes, device: torch.device | str, padding: Padding | None = None
) -> VisionMetadata:
    """`vision_metadata` of images that are known to be right."""
    device, padding, stream = torch.device(device), padding or Padding(), 0
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        # Tensors that another stream sent may not have arrived.
        stream = torch.cuda.current_stream(device).cuda_stream
        if torch.cuda.is_current_stream_capturing():
            refuse("vision_metadata", "metadata", "made before a CUDA graph is captured", "made within the capture")
    make = _cached_metadata if is_eager() else _cached_metadata.__wrapped__
    # Tensors made in inference mode could not be kept for a gradient.
    with torch.inference_mode(False), torch.no_grad():
        return make(images, sizes, device, padding, stream)


@lru_cache(maxsize=CACHE_SIZE)
def _cached_metadata(
    images: tuple[Image, ...], sizes: VisionSizes, device: torch.device, padding: Padding, stream: int
) -> VisionMetadata:
    total = patches_of(images)
    unit = sizes.merge_size**2
    rows = _at_least("rows", padding.rows, total)
    if rows % unit:
        refuse("vision_metadata", "padding.rows", f"a multiple of {unit}", rows)
    nothing = ((0, 0, 0),) * (_at_least("images", padding.images, len(images)) - len(images))
    grid = torch.empty((0, 3), dtype=torch.int64, device="cpu")
    if images or nothing:
        grid = torch.tensor((*images, *nothing), dtype=torch.int64, device="cpu")
    grid = sent(grid, device)
    frames = [h * w for t, h, w in images for _ in range(t)]
    cos, sin = rotary_table(grid, rows, sizes.head_dim, sizes.theta, sizes.merge_size)
    window_index = reverse_index = cu_window_seqlens = None
    if sizes.window is not None:
        index, cells = _windows(images, sizes, rows // unit)
        cu_window_seqlens = sent(_cu_seqlens("windows", [count * unit for count in cells], padding.windows), device)
        window_index, reverse_index = sent(index, device), sent(index.argsort(), device)
        # Compilers guard on what a tensor is a view of; a clone is none.
        cos, sin = (gather_cells(table, window_index, sizes).clone() for table in (cos, sin))
    made = VisionMetadata(
        grid=grid,
        cu_seqlens=sent(_cu_seqlens("segments", frames, padding.segments), device),
        cos=cos,
        sin=sin,
        window_index=window_index,
        reverse_index=reverse_index,
        cu_window_seqlens=cu_window_seqlens,
        images=images,
        sizes=sizes,
    )
    # Not a field, because `dataclasses.replace` copies fields.
    object.__setattr__(made, "_is_made", True)
    return made


def _at_least(name: str, wanted: int | None, count: int) -> int:
    if wanted is not None and wanted < count:
        refuse("vision_metadata", f"padding.{name}", f"at least the {count} of the batch", wanted)
    return count if wanted is None else wanted


def _cu_seqlens(name: str, lengths: list[int], wanted: int | None) -> Tensor:
    ends = list(accumulate(lengths, initial=0))
    empty = [ends[-1]] * (_at_least(name, wanted, len(lengths)) - len(lengths))
    return torch.tensor(ends + empty, dtype=torch.int32, device="cpu")


def _windows(images: tuple[Image, ...], sizes: VisionSizes, cells: int) -> tuple[Tensor, list[int]]:
    """The merged cells in window order, those of padding last, and the number of cells in each window.

    Frame by frame, windows are in raster order, and so are the cells of a window; those at the right and lower edge are
    smaller.
    """
    assert sizes.window is not None
    order, counts, start = [], [], 0
    for t, h, w in images:
        rows = torch.arange(h // sizes.merge_size, device="cpu") // sizes.window
        cols = torch.arange(w // sizes.merge_size, device="cpu") // sizes.window
        down, across = -(-len(rows) // sizes.window), -(-len(cols) // sizes.window)
        frame = torch.arange(t, device="cpu")[:, None, None]
        window = ((frame * down + rows[:, None]) * across + cols).flatten()
        order.append(window.argsort(stable=True) + start)
        counts.extend(window.bincount().tolist())
        start += len(window)
    return torch.cat([*order, torch.arange(start, cells, device="cpu")]), counts


def gather_cells(rows: Tensor, index: Tensor, sizes: VisionSizes) -> Tensor:
    """Rows [T, C] with their merged cells in the order of `index`."""
    cells = rows.view(index.shape[0], sizes.merge_size**2, rows.shape[1])
    return cells[index].flatten(0, 1)


def precomputed_metadata(
    given: Mapping[str, Any],
    grid_thw: Tensor | None,
    sizes: VisionSizes,
    device: torch.device,
    learned_positions: bool,
) -> VisionMetadata:
    """Return metadata from tensors of Transformers' helpers, in plain PyTorch; the grid gives only what is missing.

    As in Transformers, interp_indices and interp_weights count together, and so do window_index and cu_window_seqlens.
    Tensors may lie on the host, and are sent. With one of them the images are not known, since it need not follow from
    the grid.
    """
    _check_precomputed(given)
    values: Any = (None if given.get(name) is None else sent(given[name], device) for name in PRECOMPUTED)
    cu_seqlens, position_ids, indices, weights, window_index, cu_window_seqlens = values
    interpolated = indices is not None and weights is not None
    windowed = sizes.window is not None
    ordered = windowed and window_index is not None and cu_window_seqlens is not None
    missing = {
        "cu_seqlens": cu_seqlens is None,
        "position_ids": position_ids is None,
        "interp_indices and interp_weights": learned_positions and not interpolated,
        "window_index and cu_window_seqlens": windowed and not ordered,
    }
    used = ordered or interpolated and learned_positions or cu_seqlens is not None or position_ids is not None
    base: Any = None
    if any(missing.values()):
        if grid_thw is None:
            names = ", ".join(name for name, lacking in missing.items() if lacking)
            refuse("vision encoder", "grid_thw", f"a grid, unless metadata or {names} are given", None)
        base = vision_metadata(grid_thw, sizes, device)
    if not used:
        return base
    if position_ids is not None:
        cos, sin = _angles(position_ids, sizes)
    elif ordered:
        cos, sin = rotary_table(base.grid, base.total, sizes.head_dim, sizes.theta, sizes.merge_size)
    else:
        cos, sin = base.cos, base.sin
    reverse_index: Tensor | None
    if ordered:
        reverse_index = torch.argsort(window_index)
        cu_window_seqlens = _int32(cu_window_seqlens)
    else:
        window_index = base.window_index if windowed else None
        reverse_index = base.reverse_index if windowed else None
        cu_window_seqlens = base.cu_window_seqlens if windowed else None
    # The tables of the grid's own metadata are in window order already.
    if windowed and (ordered or position_ids is not None):
        cells = cos.shape[0] // sizes.merge_size**2
        if window_index.shape[0] != cells:
            wanted = f"of {cells} entries, the merged cells of the {cos.shape[0]} patches that have angles"
            refuse("vision encoder", "window_index", wanted, window_index.shape[0])
        cos, sin = gather_cells(cos, window_index, sizes), gather_cells(sin, window_index, sizes)
    return VisionMetadata(
        grid=None if base is None else base.grid,
        cu_seqlens=base.cu_seqlens if cu_seqlens is None else _int32(cu_seqlens),
        cos=cos,
        sin=sin,
        window_index=window_index,
        reverse_index=reverse_index,
        cu_window_seqlens=cu_window_seqlens,
        interp_indices=indices if interpolated else None,
        interp_weights=weights if interpolated else None,
        sizes=sizes,
    )


def _check_precomputed(given: Mapping[str, Any]) -> None:
    """Check ready-made tensors as far as possible without reading them."""
    for name in PRECOMPUTED:
        tensor = given.get(name)
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            refuse("vision encoder", name, "a tensor", type(tensor).__name__)
        if tensor.dim() != PRECOMPUTED[name]:
            refuse("vision encoder", name, f"of {PRECOMPUTED[name]} dimensions", f"shape {list(tensor.shape)}")
        if name != "interp_weights" and tensor.dtype not in (torch.int32, torch.int64):
            refuse("vision encoder", name, "of int32 or int64", dtype_name(tensor.dtype))
    places, indices, weights = (given.get(name) for name in ("position_ids", "interp_indices", "interp_weights"))
    if places is not None and places.shape[1] != 2:
        refuse("vision encoder", "position_ids", "of shape [T, 2], a row and a column", f"shape {list(places.shape)}")
    if indices is not None and weights is not None and weights.shape != indices.shape:
        wanted = f"of shape {list(indices.shape)} as interp_indices is"
        refuse("vision encoder", "interp_weights", wanted, f"shape {list(weights.shape)}")


def _int32(tensor: Any) -> Tensor:
    """Exporters of Transformers make int64 borders."""
    return tensor.to(torch.int32)


def _angles(position_ids: Tensor, sizes: VisionSizes) -> tuple[Tensor, Tensor]:
    """cos and sin of patches at (row, column), as `rotary_table` has them."""
    half = sizes.head_dim // 2
    frequencies = 1.0 / (
        sizes.theta ** (torch.arange(0, half, 2, dtype=torch.float32, device=position_ids.device) / half)
    )
    angles = (position_ids[..., None].float() * frequencies).flatten(1)
    return angles.cos(), angles.sin()


__all__ = [
    "Padding", "VisionMetadata", "VisionSizes", "filled_sizes", "gather_cells", "images_of", "metadata_of",
    "patches_of", "precomputed_metadata", "sent", "vision_metadata",
]  # fmt: skip
