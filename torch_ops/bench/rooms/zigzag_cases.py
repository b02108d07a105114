"""Cases of zigzag context parallel: the queries of one rank, and the gathered keys of all ranks.

RANKofWORLD_SIZE:DOCUMENTS    0of4:1x8192x32/8x128, 3of4:2048+2*300x8x64

Documents are written as packed segments are (`packed_cases`), by their lengths over all ranks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torch_ops.bench.measure.opbench import select
from torch_ops.bench.rooms.packed_cases import from_notation, longest_within, notation, shorten
from torch_ops.testing.cases import (
    SegmentCase,
    SegmentInputs,
    WindowAttnCase,
    make_segment_inputs,
    zigzag_keys,
    zigzag_segments,
)

PATTERN = re.compile(r"(?P<rank>\d+)of(?P<world_size>\d+):(?P<documents>.+)")
NOTATION = (
    ", a pattern of names such as 'zigzag_*', or RANKofWORLD_SIZE:DOCUMENTSxLENGTHxHEADSxHEAD_DIM such as "
    "0of4:1x8192x32/8x128, with unequal documents 3of4:2048+2*300x8x64"
)


@dataclass(frozen=True)
class ZigzagCase:
    """Causal attention of one rank; `lengths` are the tokens of each document over all ranks."""

    name: str
    reaches: str
    lengths: tuple[int, ...]
    rank: int
    world_size: int
    num_heads: int
    head_dim: int
    num_k_heads: int | None = None
    tags: frozenset[str] = frozenset({"bench"})

    @property
    def group(self) -> int:
        """Query heads on a key head."""
        return self.num_heads // (self.num_k_heads or self.num_heads)


# Twelve documents of 32768 tokens. Their lengths were drawn from a log-normal distribution with sigma 1.
UNEVEN = (2052, 2547, 4960, 2239, 10137, 532, 3233, 738, 2338, 1845, 1840, 307)


def _dual(local: int, heads: int, dim: int) -> ZigzagCase:
    """A shape from a report on a fused kernel for two groups: the first of four ranks, with so many local rows."""
    return ZigzagCase(f"dual_{local}x{heads}x{dim}", "one short document", (4 * local,), 0, 4, heads, dim)


ZIGZAG = (
    *(_dual(*shape) for shape in ((256, 8, 64), (512, 16, 64), (512, 32, 128))),
    *(
        ZigzagCase(f"{name}_rank{rank}", reaches, lengths, rank, 4, 32, 128, 8)
        for name, reaches, lengths in (
            ("zigzag_8k", "one document of 8192 tokens", (8192,)),
            ("zigzag_32k", "one document of 32768 tokens", (32768,)),
            ("documents_32k", "uneven documents of 32768 tokens", UNEVEN),
        )
        for rank in (0, 3)
    ),
    ZigzagCase("small", "one document", (80,), 0, 2, 2, 16, tags=frozenset({"smoke"})),
    ZigzagCase("small_documents", "uneven documents, one shorter than its chunks are many", (75, 40, 3), 1, 2, 4, 16, 2,
        frozenset({"smoke"})),
)  # fmt: skip


def find_zigzag_cases(wanted: Sequence[str], device: torch.device) -> tuple[ZigzagCase, ...]:
    """Cases by name, by a pattern of names or in the notation; ValueError names the choices."""
    return select(ZIGZAG, wanted, device, _from_notation, NOTATION)


def _from_notation(text: str) -> ZigzagCase | None:
    match = PATTERN.fullmatch(text)
    packed = from_notation(match["documents"].removesuffix("c")) if match else None
    if match is None or packed is None:
        return None
    rank, world_size = int(match["rank"]), int(match["world_size"])
    if rank >= world_size:
        raise ValueError(f"{text!r} has rank {rank} of {world_size}; give a rank from 0 to {world_size - 1}")
    return ZigzagCase(
        text, packed.reaches, packed.lengths, rank, world_size, packed.num_heads, packed.head_dim, packed.num_k_heads
    )


def zigzag_notation(case: ZigzagCase) -> str:
    """The shape of a case; what `find_zigzag_cases` reads back, but for very many documents."""
    return f"{case.rank}of{case.world_size}:{notation(_as_packed(case))}"


def shorten_zigzag(case: ZigzagCase, entries: int) -> ZigzagCase:
    """The case itself where the rank's score matrices have at most so many entries, else shorter documents."""
    lengths = shorten(_as_packed(case), _of_all_ranks(case, entries), case.num_heads).lengths
    return replace(case, lengths=lengths)


def longest_zigzag_within(case: ZigzagCase, entries: int) -> ZigzagCase:
    """The case with no document whose score matrices of one head have more entries than this on the rank."""
    return replace(case, lengths=longest_within(_as_packed(case), _of_all_ranks(case, entries)).lengths)


def _of_all_ranks(case: ZigzagCase, entries: int) -> int:
    """Entries of a document's whole score matrix where a rank's two groups have so many.

    The groups have r + 1 and 2 W - r of the 2 W x 2 W chunks of the matrix.
    """
    chunks = 2 * case.world_size
    return entries * chunks**2 // (chunks + 1)


def _as_packed(case: ZigzagCase) -> WindowAttnCase:
    """Its documents as segments."""
    return WindowAttnCase(
        case.name, case.reaches, case.lengths, case.num_heads, case.head_dim, num_k_heads=case.num_k_heads
    )


def make_zigzag_inputs(
    case: ZigzagCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> SegmentInputs:
    """Fresh random inputs; k and v are in the order that an all-gather leaves."""
    segments = SegmentCase(
        case.name, case.reaches, zigzag_keys(case.world_size, *case.lengths),
        zigzag_segments(case.rank, case.world_size, *case.lengths), case.num_heads, case.head_dim, case.num_k_heads,
    )  # fmt: skip
    return make_segment_inputs(segments, dtype, device, seed)
