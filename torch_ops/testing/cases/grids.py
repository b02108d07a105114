"""Packed batches of images and videos of any size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_ops.testing.cases._layouts import Layouts, drawn_as


@dataclass(frozen=True)
class GridCase:
    """Images as (frames, height, width) in patches, `padding` rows after the last, and sizes of what goes with them.

    `width` is that of patches and of a learned table of `side` x `side` entries.
    """

    name: str
    reaches: str
    grids: tuple[tuple[int, int, int], ...]
    width: int = 40
    side: int = 6
    padding: int = 0
    merge_size: int = 2
    layout: str = "contiguous"
    tags: frozenset[str] = frozenset({"edge"})

    @property
    def total(self) -> int:
        return sum(t * h * w for t, h, w in self.grids) + self.padding


@dataclass(frozen=True)
class GridInputs:
    """Random tensors of a case: rows of patches, a learned table, and an upstream gradient for each row and column."""

    grid: Tensor
    total: int
    x: Tensor
    table: Tensor
    dout: Tensor
    merge_size: int


_ROWS: Layouts = {
    "contiguous": Tensor.contiguous,
    "view": lambda rows: torch.stack((rows, rows + 1), 1)[:, 0],
    "column_strided": lambda rows: rows.t().contiguous().t(),
    "misaligned": lambda rows: rows.new_empty(rows.numel() + 1)[1:].view(rows.shape).copy_(rows),
    "odd_strides": lambda rows: rows.new_empty(rows.shape[0], rows.shape[1] + 3)[:, : rows.shape[1]].copy_(rows),
}
ROW_LAYOUTS = tuple(_ROWS)


def lay_out(rows: Tensor, layout: str) -> Tensor:
    """The same [rows, columns] in another layout."""
    return drawn_as(_ROWS, layout, rows)


def make_grid_inputs(
    case: GridCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> GridInputs:
    """Fresh random inputs; the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> Tensor:
        drawn = torch.randn((rows, case.width), generator=generator, device="cpu")
        return lay_out(drawn.to(dtype).to(device), case.layout)

    return GridInputs(
        grid=torch.tensor(case.grids, dtype=torch.int64, device="cpu").reshape(-1, 3).to(device),
        total=case.total,
        x=draw(case.total),
        table=draw(case.side * case.side),
        dout=draw(case.total),
        merge_size=case.merge_size,
    )


def _case(name: str, reaches: str, grids: tuple[tuple[int, int, int], ...], *tags: str, **rest: int | str) -> GridCase:
    return GridCase(name, reaches, grids, tags=frozenset(tags or ("edge",)), **rest)  # type: ignore[arg-type]


def _tower(name: str, reaches: str, grids: tuple[tuple[int, int, int], ...]) -> GridCase:
    """Cases of the largest Qwen3-VL encoder: 1152 wide, a table of 48 x 48."""
    return _case(name, reaches, grids, "bench", width=1152, side=48)


GRIDS = (
    _case("image", "one image, larger than the table", ((1, 14, 10),), "smoke", "edge"),
    _case("video", "frames of a video", ((3, 4, 8),), "smoke", "edge"),
    _case("mixed", "tiles that hold rows of several images", ((1, 4, 6), (2, 2, 2), (1, 10, 4)), "smoke", "edge"),
    _case("padding", "rows past the last image", ((1, 6, 4), (1, 2, 6)), "smoke", "edge", padding=32),
    _case("empty", "images of nothing, first and last too", ((0, 4, 4), (1, 4, 4), (1, 0, 6), (2, 2, 4), (1, 8, 0))),
    _case("no_images", "nothing but padding", (), padding=20),
    _case("no_rows", "no rows at all", ((0, 2, 2),)),
    _case("many", "more images than one step of the search looks at", ((1, 2, 2), (1, 2, 4), (0, 2, 2)) * 60, width=16),
    _case("tall", "an image of one column of blocks", ((1, 40, 2), (1, 2, 40)), width=24),
    _case("large", "many patches to an entry", ((1, 20, 16),), side=3, width=16),
    _case("tiny", "entries that no patch takes", ((1, 2, 2), (1, 4, 2)), side=9),
    _case("one_entry", "a table of a single entry", ((1, 4, 4), (1, 2, 6)), side=1),
    _case("same_size", "patches that lie on entries", ((1, 6, 6),), side=6),
    _case("raster", "rows in raster order", ((1, 5, 7), (2, 3, 1), (1, 1, 1)), merge_size=1),
    _case("merge_3", "blocks of 3 x 3", ((1, 6, 9), (2, 3, 3)), merge_size=3),
    _case("narrow", "fewer columns than a tile has", ((1, 4, 6),), width=5),
    _case("wide", "several tiles of columns", ((1, 4, 6),), width=150),
    *(_case(layout, "strides", ((1, 6, 8), (1, 4, 4)), layout=layout) for layout in ROW_LAYOUTS[1:]),
    _tower("qwen3vl_448", "one image of 448 px", ((1, 28, 28),)),
    _tower("qwen3vl_1024", "one image of 1024 px", ((1, 64, 64),)),
    _tower("qwen3vl_8x896", "eight images of 896 px", ((1, 56, 56),) * 8),
    _tower("qwen3vl_video", "16 frames of 448 px", ((16, 28, 28),)),
    _tower("qwen3vl_mixed", "images of 448 to 1344 px", ((1, 28, 28), (1, 42, 42), (1, 56, 56), (1, 84, 84))),
    _tower("qwen3vl_256x128", "256 images of 128 px", ((1, 8, 8),) * 256),
)  # fmt: skip


def grid_cases(tag: str) -> tuple[GridCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in GRIDS if tag in case.tags)
