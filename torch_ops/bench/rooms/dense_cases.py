"""Cases of dense attention: their notation on the command line, and shorter versions of them.

BATCHxHEADSxLENGTHxHEAD_DIM[c]    1x8x512x64, 2x8/4x1024x128c (4 key heads, causal), 4x8x11000/10000x64 (10000 keys)
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from torch_ops.bench.measure.room import named
from torch_ops.bench.rooms.packed_cases import longest_within, shorten
from torch_ops.testing.cases import DENSE, DenseCase, WindowAttnCase, dense_cases

NOTATION = re.compile(
    r"(?P<batch>\d+)x(?P<heads>\d+)(?:/(?P<k_heads>\d+))?"
    r"x(?P<length>\d+)(?:/(?P<k_length>\d+))?x(?P<dim>\d+)(?P<causal>c?)"
)


def find_dense_cases(wanted: Sequence[str]) -> tuple[DenseCase, ...]:
    """Cases by name, by a pattern of names or in the notation; ValueError names the choices."""
    found: dict[str, DenseCase] = {}
    for text in (text.strip() for item in wanted for text in item.split(",")):
        cases = named(DENSE, text) or (_from_notation(text),)
        found |= {case.name: case for case in cases}
    return tuple(found.values())


def dense_notation(case: DenseCase) -> str:
    """The shape of a case; what `find_dense_cases` reads back, but for options other than causal order."""
    heads, length = str(case.num_heads), str(case.length)
    if case.num_k_heads not in (None, case.num_heads):
        heads += f"/{case.num_k_heads}"
    if case.k_length not in (None, case.length):
        length += f"/{case.k_length}"
    return f"{case.batch}x{heads}x{length}x{case.head_dim}{'c' if case.options.get('causal') else ''}"


def dense_case(
    batch: int, heads: int, k_heads: int, length: int, head_dim: int, causal: bool, k_length: int | None = None,
    name: str = "",
) -> DenseCase:  # fmt: skip
    """The case of these numbers, called by its notation unless it has a name."""
    case = DenseCase(
        name=name,
        reaches="the shape that was asked for",
        batch=batch,
        num_heads=heads,
        length=length,
        head_dim=head_dim,
        num_k_heads=None if k_heads == heads else k_heads,
        k_length=None if k_length in (None, length) else k_length,
        options={"causal": True} if causal else {},
        tags=frozenset({"bench"}),
    )
    return case if name else replace(case, name=dense_notation(case))


def shorten_dense(case: DenseCase, entries: int) -> DenseCase:
    """The case itself where all of its score matrices have at most so many entries, else one of fewer and shorter
    sequences, as `shorten` makes them."""
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


def _from_notation(text: str) -> DenseCase:
    match = NOTATION.fullmatch(text)
    if match is None:
        names = ", ".join(case.name for case in (*dense_cases("bench"), *dense_cases("smoke")))
        raise ValueError(
            f"no case is called {text!r}; give one of {names}, a pattern of names such as 'b8h32*', or "
            f"BATCHxHEADSxLENGTHxHEAD_DIM[c] such as 1x8x512x64 or 2x8/4x1024x128c"
        )
    part = match.groupdict()
    batch, heads, length, dim = (int(part[name]) for name in ("batch", "heads", "length", "dim"))
    k_heads = int(part["k_heads"] or heads)
    if not batch or not heads or not length:
        raise ValueError(f"{text!r} has nothing in it; give numbers of 1 or more")
    if k_heads < 1 or heads % k_heads:
        raise ValueError(f"{text!r} has {heads} heads on {k_heads} key heads; give a divisor")
    if dim % 8 or not 8 <= dim <= 256:
        raise ValueError(f"{text!r} has head dim {dim}; give a multiple of 8 from 8 to 256")
    k_length = None if part["k_length"] is None else int(part["k_length"])
    return dense_case(batch, heads, k_heads, length, dim, bool(part["causal"]), k_length, text)
