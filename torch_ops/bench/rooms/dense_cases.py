"""Cases of dense attention: their notation on the command line, and shorter versions of them.

BATCHxHEADSxLENGTHxHEAD_DIM[c]    1x8x512x64, 2x8/4x1024x128c (4 key heads, causal), 4x8x11000/10000x64 (10000 keys)
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from torch_ops.bench.measure.opbench import select
from torch_ops.bench.rooms.packed_cases import longest_within, shorten
from torch_ops.testing.cases import DENSE, DenseCase, WindowAttnCase

PATTERN = re.compile(
    r"(?P<batch>\d+)x(?P<heads>\d+)(?:/(?P<k_heads>\d+))?x(?P<length>\d+)(?:/(?P<k_length>\d+))?x(?P<dim>\d+)"
)
NOTATION = (
    ", a pattern of names such as 'b8h32*', or BATCHxHEADS[/KEY_HEADS]xLENGTHxHEAD_DIM[c] such as 2x8/4x1024x128c"
)


def find_dense_cases(wanted: Sequence[str], device: torch.device) -> tuple[DenseCase, ...]:
    """Cases by name, by a pattern of names or in the notation; ValueError names the choices."""
    return select(DENSE, wanted, device, _from_notation, NOTATION)


def dense_notation(case: DenseCase) -> str:
    """The shape of a case; what `find_dense_cases` reads back, but for options other than causal order."""
    heads, length = str(case.num_heads), str(case.length)
    if case.num_k_heads not in (None, case.num_heads):
        heads += f"/{case.num_k_heads}"
    if case.k_length not in (None, case.length):
        length += f"/{case.k_length}"
    return f"{case.batch}x{heads}x{length}x{case.head_dim}{'c' if case.options.get('causal') else ''}"


def shorten_dense(case: DenseCase, entries: int) -> DenseCase:
    """The case itself where all of its score matrices have at most so many entries, else fewer and shorter
    sequences."""
    return _batched(case, shorten(_as_packed(case), entries, case.num_heads))


def longest_dense_within(case: DenseCase, entries: int) -> DenseCase:
    """The case with no score matrix of more entries than this."""
    return _batched(case, longest_within(_as_packed(case), entries))


def _as_packed(case: DenseCase) -> WindowAttnCase:
    """Its sequences as segments."""
    k_lengths = None if case.k_length is None else (case.k_length,) * case.batch
    lengths = (case.length,) * case.batch
    return WindowAttnCase(case.name, case.reaches, lengths, case.num_heads, case.head_dim, k_lengths)


def _batched(case: DenseCase, packed: WindowAttnCase) -> DenseCase:
    if not packed.lengths:
        return case
    k_length = None if packed.k_lengths is None else packed.k_lengths[0]
    return replace(case, batch=len(packed.lengths), length=packed.lengths[0], k_length=k_length)


def parse_dense(text: str) -> dict[str, int] | None:
    """The numbers of a shape by name, None of another text; ValueError says which number to change."""
    match = PATTERN.fullmatch(text)
    if match is None:
        return None
    shape = {name: int(number) for name, number in match.groupdict().items() if number is not None}
    heads, k_heads, dim = shape["heads"], shape.setdefault("k_heads", shape["heads"]), shape["dim"]
    shape.setdefault("k_length", shape["length"])
    if not all(shape[name] for name in ("batch", "heads", "length")):
        raise ValueError(f"{text!r} is empty; give numbers of 1 or more")
    if k_heads < 1 or heads % k_heads:
        raise ValueError(f"{text!r} has {heads} query heads and {k_heads} key heads; give a divisor of {heads}")
    if dim % 8 or not 8 <= dim <= 256:
        raise ValueError(f"{text!r} has head dim {dim}; give a multiple of 8 from 8 to 256")
    return shape


def _from_notation(text: str) -> DenseCase | None:
    shape = parse_dense(text.removesuffix("c"))
    if shape is None:
        return None
    return DenseCase(
        name=text, reaches="the shape that was asked for", batch=shape["batch"], num_heads=shape["heads"],
        length=shape["length"], head_dim=shape["dim"],
        num_k_heads=None if shape["k_heads"] == shape["heads"] else shape["k_heads"],
        k_length=None if shape["k_length"] == shape["length"] else shape["k_length"],
        options={"causal": True} if text.endswith("c") else {}, tags=frozenset({"bench"}),
    )  # fmt: skip
