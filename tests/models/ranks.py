"""Checks that the ranks of a process group run: `encode_across_ranks` against the encoder alone.

A group is started once and goes through all of `BODIES`, since a process takes seconds to start.
"""

import copy
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch.utils import _pytree as pytree

from compile_tests.models import GRID, draw_pixels, named_outputs, tiny_tower
from torch_ops.distributed import encode_across_ranks, spread_images
from torch_ops.models import from_transformers
from torch_ops.testing import check

# Images of one and several windows and a video; fewer frames than ranks; a video alone; one image much larger than
# the rest; frames of nothing between others; one image; none.
GRIDS = (
    GRID,
    ((1, 4, 6), (1, 2, 2)),
    ((7, 4, 6),),
    ((1, 2, 2), (1, 16, 18), (1, 2, 4)),
    ((0, 4, 4), (1, 2, 6), (2, 0, 4), (1, 4, 4), (1, 6, 4)),
    ((1, 8, 6),),
    (),
)
TOWERS = ("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision")
PATCH = 8


def start(ranks: int, device: str, folder: Path, bodies: Sequence[Callable[[str], None]] | None = None) -> None:
    """Runs bodies (default: all of this module) in a group of new processes; raises what the first of them raised.

    The others fail after it, since they lose a peer.
    """
    try:
        # A forked process has imported everything, but cannot use CUDA.
        mp.start_processes(
            _run,
            (ranks, device, folder, bodies or BODIES),
            ranks,
            start_method="spawn" if torch.cuda.is_available() else "fork",
        )
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        causes = sorted(folder.glob("rank*"), key=lambda path: path.stat().st_mtime_ns)
        raise AssertionError(f"{causes[0].name}: {causes[0].read_text()}" if causes else str(error)) from None
    assert len(list(folder.glob("done*"))) == ranks


def _run(rank: int, ranks: int, device: str, folder: Path, bodies: Sequence[Callable[[str], None]]) -> None:
    # The ranks share what cores there are.
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    try:
        for body in bodies:
            body(device)
        (folder / f"done{rank}").touch()
    except BaseException:
        (folder / f"rank{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def grid_of(images: tuple[tuple[int, int, int], ...]) -> Tensor:
    return torch.tensor(images, dtype=torch.int64).view(-1, 3)


class Exact:
    """An encoder whose rows are the same to the last bit in any batch, of many dtypes and odd widths."""

    spatial_merge_size = 2

    def __init__(self) -> None:
        self.grids: list[Tensor] = []

    def __call__(self, pixel_values: Tensor, grid_thw: Tensor) -> dict[str, Any]:
        assert pixel_values.shape[0] == grid_thw.prod(1).sum()
        self.grids.append(grid_thw)
        cells = pixel_values.view(-1, 4, PATCH)[:, 1]
        return {
            "pooled": cells[:, :3].half(),
            "last": 2 * pixel_values,
            "taps": [cells.double().view(-1, 2, PATCH // 2), (cells[:, 0] > 0), cells.t().contiguous().t().bfloat16()],
            "nothing": None,
        }


def same(actual: Any, expected: Any) -> None:
    """Equal in structure, and in every bit."""
    leaves, structure = pytree.tree_flatten(actual)
    others, wanted = pytree.tree_flatten(expected)
    assert structure == wanted
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(other, Tensor):
            assert leaf.dtype is other.dtype and leaf.device == other.device
            assert torch.equal(leaf, other)
        else:
            assert leaf is other


def bits_are_in_the_order_of_the_batch(device: str) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # Every process takes part in making every group.
    halves = [dist.new_group([*range(low, low + ranks // 2)]) for low in (0, ranks // 2)]
    odd = dist.new_group([*range(1, ranks, 2)])
    alone = dist.new_group([0])
    groups = [None, halves[rank >= ranks // 2], *([odd] if rank % 2 else []), *([alone] if rank == 0 else [])]
    for images in GRIDS:
        grid = grid_of(images)
        pixels = torch.randn((int(grid.prod(1).sum()), PATCH), generator=torch.Generator().manual_seed(1)).to(device)
        expected = Exact()(pixels, grid)
        for group in groups:
            for given in (grid, grid.int().to(device)):
                encoder = Exact()
                same(encode_across_ranks(encoder, pixels, given, group), expected)
                (seen,) = encoder.grids
                assert seen.dtype is given.dtype and seen.device == given.device
                size, own = dist.get_world_size(group), dist.get_rank(group)
                if size > 1 and int((grid[:, 0] * (grid[:, 1] * grid[:, 2] > 0)).sum()) > 1:
                    share = spread_images(grid, size)[own]
                    frames = [[part.frames, part.height, part.width] for part in share.parts]
                    assert seen.tolist() == (frames or [[1, 2, 2]])
                else:
                    assert seen.tolist() == given.tolist()


def towers_give_what_they_give_alone(device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for model_type in TOWERS:
        tower = tiny_tower(model_type, dtype).to(device)
        encoder = from_transformers(tower)
        truth = from_transformers(copy.deepcopy(tower).cpu().double())
        for images in GRIDS[:-1]:
            grid = grid_of(images)
            pixels = draw_pixels(tower, grid, dtype)
            with torch.inference_mode():
                alone = encoder(pixels.to(device), grid)
                # Transformers' own wants no frames of nothing.
                eager = named_outputs(tower(pixels.to(device), grid[grid.prod(1) > 0].to(device)))
                spread = encode_across_ranks(encoder, pixels.to(device), grid)
                exact = {name: each.to(device) for name, each in named_outputs(truth(pixels.double(), grid)).items()}
            assert type(spread) is type(alone) and list(spread) == list(alone)
            actual, expected = named_outputs(spread), named_outputs(alone)
            assert {name: (each.dtype, each.shape) for name, each in actual.items()} == {
                name: (each.dtype, each.shape) for name, each in expected.items()
            }
            check(actual, eager, exact)
            for name, each in actual.items():
                first = each.clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, each), f"{model_type} {name}: another rank has other bits"


@torch.no_grad()
def other_callables(device: str) -> None:
    """In chunks, compiled, as a tuple of tensors, under autocast, and Transformers' own."""
    grid, dtype = grid_of(GRID), torch.float32
    compiled: list[Any] = []

    def keep(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled.append(module)
        return module.forward

    for model_type in ("qwen2_5_vl_vision", "qwen3_vl_vision"):
        tower = tiny_tower(model_type, dtype).to(device)
        encoder = from_transformers(tower)
        pixels = draw_pixels(tower, grid, dtype).to(device)
        truth = from_transformers(copy.deepcopy(tower).cpu().double())

        def leaves_of(output: Any) -> dict[str, Tensor]:
            return {str(index): leaf.cpu() for index, leaf in enumerate(pytree.tree_leaves(output))}

        for other, named in (
            (partial(encoder, chunk_tokens=40), {}),
            (partial(encoder, output_hidden_states=True), {"output_hidden_states": True}),
            (partial(encoder, return_dict=False), {}),
            (tower, {}),
            *([(torch.compile(encoder, backend=keep), {})] if model_type == TOWERS[-1] else []),
        ):
            given = grid.to(device) if other is tower else grid
            actual = encode_across_ranks(other, pixels, given)
            assert not isinstance(other, OptimizedModule) or compiled
            expected = other(pixels, given)
            assert type(actual) is type(expected)
            assert not isinstance(expected, dict) or list(actual) == list(expected)
            eager, exact = (
                leaves_of(tower(pixels, grid.to(device), **named)),
                leaves_of(truth(pixels.cpu().double(), grid, **named)),
            )
            assert len(leaves_of(actual)) == len(exact)
            check(leaves_of(actual), eager, exact)
        with torch.autocast(device, torch.bfloat16):
            expected = named_outputs(encoder(pixels, grid))
            actual = named_outputs(encode_across_ranks(encoder, pixels, grid))
        with torch.autocast(device, torch.bfloat16):
            theirs = named_outputs(tower(pixels, grid.to(device)))
        exact = {name: each.to(device) for name, each in named_outputs(truth(pixels.cpu().double(), grid)).items()}
        assert {name: each.dtype for name, each in actual.items()} == {
            name: each.dtype for name, each in expected.items()
        }
        check(actual, theirs, exact)


def refused(message: str, function: Callable[..., Any], *args: Any, **named: Any) -> None:
    try:
        function(*args, **named)
    except ValueError as error:
        assert re.search(message, str(error)), f"wanted {message}, got {error}"
    else:
        raise AssertionError(f"nothing was refused, wanted {message}")


def refusals_are_those_of_every_rank(device: str) -> None:
    """None sends anything, or the ranks would not meet in what comes next."""
    grid = grid_of(GRID)
    encoder = from_transformers(tiny_tower("qwen3_vl_vision").to(device))
    pixels = draw_pixels(encoder, grid).to(device)
    odd = torch.tensor([[1, 2, 3], [1, 2, 2]])
    call = encode_across_ranks
    refused(r"pixel_values has shape \[279, 96\], expected .* \[280, P\]", call, encoder, pixels[1:], grid)
    refused(r"pixel_values is list, expected a tensor", call, encoder, pixels.tolist(), grid)
    refused(r"grid_thw is tuple, expected a tensor of shape \[n, 3\]", call, encoder, pixels, GRID)
    refused(r"grid_thw\[0, 1\], the height.*multiple of 2", call, encoder, pixels, odd[:, [0, 2, 1]])
    refused("balance is .*, expected a positive number", call, encoder, pixels, grid, balance=0.0)
    refused("on a device that the group has a backend for", call, encoder, pixels.to("meta"), grid)
    if device == "cuda":
        refused(r"is on cpu, expected .* has a backend for \(cuda\)", call, encoder, pixels.cpu(), grid)
    # With and without a share, one frame, and frozen.
    for images in (GRID, ((1, 2, 2), (1, 4, 4)), ((1, 4, 4),)):
        some = grid_of(images)
        part = pixels[: int(some.prod(1).sum())]
        refused("outputs has a gradient, expected no gradient.*torch.inference_mode", call, encoder, part, some)
    encoder.requires_grad_(False)
    refused("outputs has a gradient, expected no gradient", call, encoder, pixels.clone().requires_grad_(), grid)
    assert not call(encoder, pixels, grid).pooler_output.requires_grad

    def short(rows: Tensor, grid: Tensor) -> Tensor:
        return rows[1:]

    refused("outputs has shape .*, expected a row for each patch or merged cell", call, short, pixels, grid)
    refused(
        f"outputs is on meta, expected on {pixels.device} as pixel_values is", call, lambda rows, _: rows.to("meta"),
        pixels, grid,
    )  # fmt: skip
    others = dist.new_group([0])
    if dist.get_rank():
        refused("group is .*, expected one that this process belongs to", call, encoder, pixels, grid, others)


def nothing_waits(device: str) -> None:
    if device != "cuda":
        return
    encoder = from_transformers(tiny_tower("qwen2_5_vl_vision", torch.bfloat16).to(device)).requires_grad_(False)
    for images in (GRID, ((1, 4, 6), (1, 2, 2))):
        grid = grid_of(images)
        pixels = draw_pixels(encoder, grid, torch.bfloat16).to(device)
        expected = encode_across_ranks(encoder, pixels, grid).pooler_output
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            actual = encode_across_ranks(encoder, pixels, grid).pooler_output
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(actual, expected)


def example_runs(device: str) -> None:
    path = Path(__file__).parents[2] / "examples" / "encode_ranks.py"
    sys.stdout.flush()
    runpy.run_path(str(path))["show"](device, tiny=True)


BODIES = (
    bits_are_in_the_order_of_the_batch,
    towers_give_what_they_give_alone,
    other_callables,
    refusals_are_those_of_every_rank,
    nothing_waits,
    example_runs,
)
