"""Choose which rank encodes which images, from their grid alone, so that every rank gets the same answer.

The unit is a frame. In the Qwen-VL encoders a patch sees patches of its own frame only, so a video may be cut between
frames. A frame of L patches costs

    L + L^2 / balance

because linear layers take time in proportion to L, and attention to L^2. `balance` is the length at which the two are
equal. A block of width C has 4 C^2 + m C I multiplications for each patch, and its attention 2 C L. Its MLP has m
layers (2, or 3 with gates) of inner width I. Hence balance = 2 C + m I / 2. That is 6,608 for the tower of Qwen3-VL-8B.

An encoder with windows has few layers that see whole frames (Qwen2.5-VL 4 of 32), and its balance is as many times
larger. The model leaves out two opposite effects. Mergers are a tenth of the linear part of that tower, and attention
reaches a lower rate than matrix products.

Frames go, the longest first, to the rank with the least load. The largest load is then at most 4/3 - 1/(3 ranks) times
the least possible (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17, 1969). vLLM
spreads whole images this way, by their patches alone (`run_dp_sharded_mrope_vision_model`).
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torch_ops._core.checks import check_int, refuse
from torch_ops._core.device import host_tensor
from torch_ops.models.families import FAMILIES, family_key
from torch_ops.models.vision_metadata import CACHE_SIZE, Image, images_of

# The tower of Qwen3-VL-8B; for encoders of unknown configuration.
BALANCE = 6608.0


@dataclass(frozen=True)
class Part:
    """Consecutive frames of an image or video; `start` is their first patch in the batch."""

    start: int
    frames: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        return self.frames * self.height * self.width


@dataclass(frozen=True)
class Share:
    """The parts that one rank encodes, in batch order, and their cost in patches without attention."""

    parts: tuple[Part, ...]
    cost: float

    @property
    def patches(self) -> int:
        return sum(part.patches for part in self.parts)


def spread_images(
    grid_thw: Tensor | Iterable[Sequence[int]], ranks: int, balance: float = BALANCE
) -> tuple[Share, ...]:
    """Return the share of each rank, by the module's docstring.

    Args:
        grid_thw: rows (t, h, w) in patches, for each image or video: integers [n, 3], or a sequence of triples.
        ranks: number of ranks.
        balance: number of patches of a frame whose attention costs as much as all the rest.

    Returns:
        A `Share` for each rank. Every frame is in one of them, and frames of a video on one rank follow each other.
        Frames without patches are in none.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
    """
    op = "spread_images"
    ranks = check_int(op, "ranks", ranks)
    if ranks < 1:
        refuse(op, "ranks", "1 or more", ranks)
    if not isinstance(balance, Real) or not balance > 0:
        refuse(op, "balance", "a positive number of patches", balance)
    if not isinstance(grid_thw, Iterable):
        refuse(op, "grid_thw", "a tensor or triples (t, h, w)", type(grid_thw).__name__)
    grid = grid_thw if isinstance(grid_thw, Tensor) else _as_grid(op, grid_thw)
    return _spread(images_of(op, grid, 1), ranks, balance)


def _as_grid(op: str, rows: Iterable[Sequence[int]]) -> Tensor:
    images = []
    for image, row in enumerate(rows):
        try:
            t, h, w = (check_int(op, f"grid_thw[{image}]", size) for size in row)
        except (TypeError, ValueError):
            refuse(op, f"grid_thw[{image}]", "three integers (t, h, w)", row)
        images.append((t, h, w))
    return host_tensor(images, torch.int64).view(-1, 3)


def least_loaded(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each item: the longest first, each to the rank with least so far; of equals, the first."""
    loads = [(0.0, rank) for rank in range(ranks)]
    chosen = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, rank = loads[0]
        chosen[item] = rank
        heapq.heapreplace(loads, (load + costs[item], rank))
    return chosen


def balance_of(encoder: Any) -> float:
    """`balance` of an encoder by its configuration, or `BALANCE` where it has none of the known families."""
    config: Any = getattr(encoder, "config", None)
    family = FAMILIES.get(family_key(config))
    if family is None:
        return BALANCE
    width, inner = getattr(config, family.width), family.intermediate_size(config)
    full = len(config.fullatt_block_indexes) if family.windows else config.depth
    return (2 * width + len(family.mlp) * inner / 2) * config.depth / full if full else math.inf


@lru_cache(maxsize=CACHE_SIZE)
def _spread(images: tuple[Image, ...], ranks: int, balance: float) -> tuple[Share, ...]:
    costs = [h * w + (h * w) ** 2 / balance for _, h, w in images]
    frames = [image for image, (t, _, _) in enumerate(images) for _ in range(t)]
    counts = Counter(zip(frames, least_loaded([costs[image] for image in frames], ranks), strict=True))
    parts: list[list[Part]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    start = 0
    for image, (_, h, w) in enumerate(images):
        for rank in range(ranks):
            taken = counts[image, rank]
            if taken and h * w:
                parts[rank].append(Part(start, taken, h, w))
                loads[rank] += taken * costs[image]
                start += taken * h * w
    return tuple(Share(tuple(each), load) for each, load in zip(parts, loads, strict=True))


__all__ = ["BALANCE", "Part", "Share", "balance_of", "least_loaded", "spread_images"]
