"""Calls of the ops on image grids for the graph contract."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from compile_tests.contract.graph import DEVICE, Call, Subject
from compile_tests.kernels import GRIDS
from torch_ops.testing.cases import ROW_LAYOUTS, GridCase, grid_cases, lay_out, make_grid_inputs

# Batches of calls that share one graph: none has as many patches or images as another.
SIZES = tuple(
    GridCase(str(len(grids)), "", grids, 24, 5)
    for grids in (((1, 4, 6), (2, 2, 2)), ((1, 2, 2),) * 11, ((3, 4, 4), (0, 2, 2), (1, 6, 10)))
)
# PyTorch makes a graph of its own for a batch of one image.
SINGLE = GridCase("1", "", ((1, 10, 8),), 24, 5)
BLOCKS, IMAGES = torch.export.Dim("blocks", min=2, max=65536), torch.export.Dim("images", min=2, max=4096)
CHECKED = ("mixed", "padding", "raster", "empty", *ROW_LAYOUTS)


def subject(name: str, function: Callable[..., Any], reference: Callable[..., Any], leaf: str, **rest: Any) -> Subject:
    """The functions take x, whose rows say how many patches there are, `leaf`, grid and merge_size.

    A result has no more numbers than x.
    """
    results = ("out",) if leaf else ("cos", "sin")

    def draw(case: GridCase, dtype: torch.dtype, seed: int = 0) -> Call:
        inputs = make_grid_inputs(case, dtype, DEVICE, seed)
        table = {"table": inputs.table} if leaf == "table" else {}
        args = {"x": inputs.x, **table, "grid": inputs.grid, "merge_size": case.merge_size}
        call = Call(args, dict.fromkeys(results), (leaf,) if leaf else ())
        if not leaf:
            return call
        with torch.no_grad():
            shape = call(function).shape
        return replace(call, grads={"out": lay_out(inputs.dout.flatten()[: shape.numel()].view(shape), case.layout)})

    return Subject(
        name, function, reference, draw, SIZES,
        moving={"x": {0: 4 * BLOCKS}, "grid": {0: IMAGES}},
        checked=tuple(case for case in grid_cases("edge") if case.name in CHECKED),
        compiled=(SIZES[0], SINGLE, *SIZES[1:]),
        layouts=tuple(GridCase(layout, "", SIZES[0].grids, layout=layout) for layout in ROW_LAYOUTS),
        # A replay of fewer patches than were captured pads them.
        replayed=tuple(GridCase("graph", "", grids, 24, 5, padding=padding) for grids, padding in (
            (((1, 8, 8), (1, 4, 4), (2, 2, 2)), 0), (((1, 4, 6), (2, 2, 2), (0, 2, 2)), 56),
        )),
        batched=leaf,
        **rest,
    )  # fmt: skip


def assert_rows_move_by_16_bytes(name: str, variant: str) -> None:
    """Loads and stores of rows alike; the others read the few numbers of grids that a program wants."""
    for built in GRIDS[name].builds("sm_90", variant, rows=12544):
        ptx = built.asm["ptx"]
        stores = [line for line in ptx.splitlines() if "st.global" in line]
        if built.launch.name == "_pos_embed_bwd_kernel":
            # It writes one row, a sum.
            assert len(stores) == 1
        else:
            assert stores and all(".v4." in line for line in stores), built
        loads = [line for line in ptx.splitlines() if "ld.global" in line and ".b64" not in line]
        assert all(".v4." in line for line in loads), built
        assert bool(loads) == (built.launch.name != "_rotary_table_kernel")
