"""What `vk bench attention` measures: one shape, a sweep of its lengths, a step of decoding, or the suite.

The suite is that of a report on an attention kernel: shapes of a small language model, and three sizes of a batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from torch_ops.bench.measure.contest import Terms
from torch_ops.bench.measure.room import find_named
from torch_ops.bench.rooms.dense_cases import shorten_dense
from torch_ops.testing.cases import DENSE, DecodeCase, DenseCase

# A small language model's prefill, whose heads share keys, and its batch in training.
LANGUAGE_MODEL = "b2h8kv4s1024d128_causal", "b32h10s2048d128_causal"
SIZES = "b1h8s512d64_causal", "b4h32s1024d64_causal", "b8h32s2048d128_causal"
# On a CPU: what is left of a case has so many entries of score matrices.
CPU_ENTRIES = 2**19
# Lengths of a sweep begin here, or so far down where the longest is no longer than twice that.
SHORTEST, SHORTEST_OF_SHORT = 128, 16


def suite_rows(terms: Terms, dtype: torch.dtype | None = None) -> list[tuple[DenseCase, Terms]]:
    """Case and terms of every row, or of those of one type: all in both 16-bit types, sizes of a batch in fp32 too; cut
    down on a CPU."""
    rows = []
    for name in (*LANGUAGE_MODEL, *SIZES):
        (case,) = find_named(DENSE, [name])
        if terms.device.type != "cuda":
            case = shorten_dense(case, CPU_ENTRIES)
        fp32 = [replace(terms, dtype=torch.float32)]
        if terms.device.type == "cuda":
            fp32.append(replace(terms, dtype=torch.float32, tf32=True))
        halves = [replace(terms, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
        rows += [(case, each) for each in (*(fp32 if name in SIZES else ()), *halves)]
    return [(case, each) for case, each in rows if dtype in (None, each.dtype)]


def sweep(longest: int) -> list[int]:
    """Powers of two up to a length, and the length itself."""
    first = SHORTEST if longest > 2 * SHORTEST else SHORTEST_OF_SHORT
    powers = [2**power for power in range(longest.bit_length()) if first <= 2**power < longest]
    return [*powers, longest]


def decoding(batch: int, heads: int, k_heads: int, keys: int, head_dim: int, queries: int) -> DecodeCase:
    """A step of decoding with full caches of so many keys."""
    return DecodeCase(
        f"{batch}x{heads}/{k_heads}x{queries}/{keys}x{head_dim}", "the shape that was asked for",
        (keys,) * batch, keys, heads, k_heads, head_dim, queries=queries,
    )  # fmt: skip


def lengths_of(cases: Sequence[DenseCase | DecodeCase]) -> dict[str, int]:
    """By name, how many keys a sequence has."""
    return {case.name: case.capacity if isinstance(case, DecodeCase) else case.length for case in cases}
