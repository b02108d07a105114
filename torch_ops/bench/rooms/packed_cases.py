"""Cases of packed attention: their notation on the command line, and shorter versions of them.

SEGMENTSxLENGTHxHEADSxHEAD_DIM[c]    1x4096x16x72, 8x2048x32/8x128c (8 key heads, causal)
LENGTH+N*LENGTH+...xHEADSxHEAD_DIM   784+1764+3136+7056x16x72, 153*64+17*48x16x80
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from torch_ops.bench.measure.opbench import select
from torch_ops.testing.cases import WINDOW_ATTN, WindowAttnCase

PATTERN = re.compile(
    r"(?:(?P<count>\d+)x(?P<length>\d+)|(?P<setup>\d+(?:\*\d+)?(?:\+\d+(?:\*\d+)?)*))"
    r"x(?P<heads>\d+)(?:/(?P<k_heads>\d+))?x(?P<dim>\d+)(?P<causal>c?)"
)
NOTATION = (
    ", a pattern of names such as 'qwen3vl_*', or SEGMENTSxLENGTHxHEADSxHEAD_DIM[c] such as 1x4096x16x72, "
    "with unequal segments 33+2*64x16x72"
)
# Tiles have at most this many rows: lengths keep their remainder by it when they are shortened.
TILE = 128


def find_cases(wanted: Sequence[str], device: torch.device) -> tuple[WindowAttnCase, ...]:
    """Cases by name, by a pattern of names or in the notation; ValueError names the choices."""
    return select(WINDOW_ATTN, wanted, device, from_notation, NOTATION)


def notation(case: WindowAttnCase) -> str:
    """The shape of a case; what `find_cases` reads back, unless keys have lengths of their own."""
    heads = str(case.num_heads)
    if case.num_k_heads not in (None, case.num_heads):
        heads += f"/{case.num_k_heads}"
    keys = "" if case.k_lengths is None else f" on {_lengths(case.k_lengths)}"
    causal = "c" if case.options.get("causal") else ""
    return f"{_lengths(case.lengths)}{keys}x{heads}x{case.head_dim}{causal}"


def shorten(case: WindowAttnCase, entries: int, heads: int) -> WindowAttnCase:
    """The case itself where `heads` score matrices of each segment have at most `entries` together.

    Else with shorter and, where that is not enough, fewer segments, of the same heads, head
    dimension, options and remainder by a tile.
    """
    for limit in (None, 16384, 8192, 4096, 2048, 1024, 512, 256, TILE):
        shorter = case if limit is None else _limited(case, limit)
        pairs = list(zip(shorter.lengths, shorter.k_lengths or shorter.lengths, strict=True))
        total = heads * sum(queries * keys for queries, keys in pairs)
        if total <= entries:
            return shorter
    step = math.ceil(total / entries)
    keys = shorter.k_lengths
    return replace(shorter, lengths=shorter.lengths[::step], k_lengths=None if keys is None else keys[::step])


def longest_within(case: WindowAttnCase, entries: int) -> WindowAttnCase:
    """The case with no segment whose score matrix of one head has more entries than this."""
    limit = math.isqrt(entries) // TILE * TILE
    return _limited(case, max(limit - TILE, TILE))


def _limited(case: WindowAttnCase, limit: int) -> WindowAttnCase:
    def cut(lengths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n if n <= limit else limit + n % TILE for n in lengths)

    keys = None if case.k_lengths is None else cut(case.k_lengths)
    return replace(case, lengths=cut(case.lengths), k_lengths=keys)


def _lengths(lengths: tuple[int, ...]) -> str:
    runs = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
    if len(runs) == 1:
        return f"{runs[0][1]}x{runs[0][0]}"
    if len(runs) > 12:
        return f"{len(lengths)} segments of {min(lengths)}..{max(lengths)}"
    return "+".join(f"{count}*{length}" if count > 1 else str(length) for length, count in runs)


def from_notation(text: str) -> WindowAttnCase | None:
    match = PATTERN.fullmatch(text)
    if match is None:
        return None
    part = match.groupdict()
    setup = part["setup"] or f"{part['count']}*{part['length']}"
    lengths: list[int] = []
    for term in setup.split("+"):
        count, _, length = term.rpartition("*")
        lengths += [int(length)] * int(count or 1)
    heads, dim = int(part["heads"]), int(part["dim"])
    k_heads = int(part["k_heads"] or heads)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"{text!r} has an empty segment; give lengths of 1 or more")
    if k_heads < 1 or heads % k_heads:
        raise ValueError(f"{text!r} has {heads} heads on {k_heads} key heads; give a divisor")
    if dim % 8 or not 8 <= dim <= 256:
        raise ValueError(f"{text!r} has head dim {dim}; give a multiple of 8 from 8 to 256")
    return WindowAttnCase(
        name=text, reaches="the shape that was asked for", lengths=tuple(lengths), num_heads=heads, head_dim=dim,
        num_k_heads=None if k_heads == heads else k_heads, options={"causal": True} if part["causal"] else {},
        tags=frozenset({"bench"}),
    )  # fmt: skip
