"""ring-flash-attention's functions of zigzag llama3 over the op: meaning, layouts, refusals, the seed's cases."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from tests.verify import INTERPRET, assert_same_bits, assert_waits_for_nothing
from torch_ops import compat, settings, window_attn
from torch_ops.compat.ring_flash_attn import (
    fused_zigzag_llama3_flash_attn_varlen_forward,
    replace_execute_grouped_attention_with_fused_varlen,
)
from torch_ops.testing import check_draws, poisoned
from torch_ops.testing.cases import cumulative
from torch_ops.testing.tolerance import Draw

DTYPES = [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16, torch.float32]
# The limit of the seed's tests, absolute and relative.
SEED_LIMIT = 1e-2

pytestmark = pytest.mark.interpret


# --- the reference, in plain PyTorch ---


def attend(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, seen_keys: int, causal: bool = True,
    window: tuple[int, int] = (-1, -1), scale: float | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [n, H, D] and lse [H, n] of queries at these key positions, over the first keys of one sequence."""
    k, v = (each[:seen_keys].repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    distance = torch.arange(k.shape[0], device=q.device) - position[:, None]
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype)[:, None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1) if k.shape[0] else scores.new_full(scores.shape[:2], -torch.inf)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("hnm,mhd->nhd", weights, v), lse


def differentiate(
    function: Callable[..., tuple[Tensor, ...]], names: Sequence[str], upstream: Sequence[Tensor], leaves: Any
) -> dict[str, Tensor]:
    """Results by name, and gradients of a weighted sum of them; infinite results have no part in it."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    results = function(**leaves)
    total: Any = 0
    for result, weights in zip(results, upstream, strict=True):
        seen = torch.isfinite(result)
        total = total + (result[seen] * weights.to(result.dtype)[seen]).sum()
    gradients = torch.autograd.grad(total, tuple(leaves.values()))
    return {
        **dict(zip(names, results, strict=True)),
        **{f"d{name}": each for name, each in zip(leaves, gradients, strict=True)},
    }


def verify(
    ours: Callable[..., Any], reference: Callable[..., Any], names: Sequence[str], shapes: dict[str, Any],
    dtype: torch.dtype, device: str, limit: float | None = None,
) -> None:  # fmt: skip
    """Compare results and gradients by the tolerance rule, and by a limit where there is one."""

    def draw(seed: int) -> Draw:
        torch.manual_seed(seed)
        leaves = {name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}
        with torch.no_grad():
            upstream = [torch.randn(each.shape, device=device) for each in reference(**leaves)]
        with poisoned():
            actual = differentiate(ours, names, upstream, leaves)
        eager = differentiate(reference, names, upstream, leaves)
        wide = {name: leaf.double() for name, leaf in leaves.items()}
        truth = differentiate(reference, names, upstream, wide)
        if limit is not None:
            for name, tensor in truth.items():
                torch.testing.assert_close(actual[name].double(), tensor, atol=limit, rtol=limit, msg=name)
        return actual, eager, truth

    check_draws(draw)


# --- two groups ---


@dataclass(frozen=True)
class Groups:
    """Lengths of the sequences in both groups and in the keys, and limits. Rows lie outside of all sequences too."""

    q0: tuple[int, ...]
    q1: tuple[int, ...]
    k: tuple[int, ...]
    limits: tuple[Any, Any]
    heads: int
    key_heads: int
    head_dim: int
    outside: int = 0
    causal: bool = True
    scale: float | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        rows = {name: sum(getattr(self, name)) + 2 * self.outside for name in ("q0", "q1")}
        keys = {name: (sum(self.k) + self.outside, self.key_heads, self.head_dim) for name in ("k", "v")}
        return {**{name: (size, self.heads, self.head_dim) for name, size in rows.items()}, **keys}

    def ours(self, device: str) -> Callable[..., Any]:
        cu_q = [cumulative(own, device) + self.outside for own in (self.q0, self.q1)]
        limits = [
            torch.tensor(limit, dtype=torch.int32, device=device) if isinstance(limit, tuple) else limit
            for limit in self.limits
        ]
        longest = [max(own) for own in (self.q0, self.q1, self.k)]
        rest = (cu_q[0], cu_q[1], cumulative(self.k, device), *longest, *limits, self.scale, self.causal)
        return lambda q0, q1, k, v: fused_zigzag_llama3_flash_attn_varlen_forward(q0, q1, k, v, *rest)

    def reference(self, q0: Tensor, q1: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        outs, lses = [], []
        wide = torch.promote_types(q0.dtype, torch.float32)
        for q, lengths, limit in ((q0, self.q0, self.limits[0]), (q1, self.q1, self.limits[1])):
            width = 2 ** (max(lengths) - 1).bit_length()
            parts, rows = [q.new_zeros((self.outside, *q.shape[1:]))], []
            starts = [*accumulate(lengths, initial=self.outside)], [*accumulate(self.k, initial=0)]
            for sequence, (length, first, key) in enumerate(zip(lengths, *starts, strict=False)):
                kv_len = min(limit[sequence] if isinstance(limit, tuple) else limit, self.k[sequence])
                position = torch.arange(length, device=q.device) + kv_len - length
                queries, keys = slice(first, first + length), slice(key, key + self.k[sequence])
                out, lse = attend(q[queries], k[keys], v[keys], position, kv_len, self.causal, scale=self.scale)
                parts.append(out)
                padding = lse.new_full((lse.shape[0], width - length), -torch.inf)
                rows.append(torch.cat([lse, padding], 1).to(wide))
            parts.append(q.new_zeros((self.outside, *q.shape[1:])))
            outs.append(torch.cat(parts))
            lses.append(torch.cat(rows))
        return *outs, *lses


FUSED = ("out0", "out1", "lse0", "lse1")


def verify_groups(case: Groups, dtype: torch.dtype, device: str, limit: float | None = None) -> None:
    verify(case.ours(device), case.reference, FUSED, case.shapes, dtype, device, limit)


@pytest.mark.no_interpret
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sequences", [2, 3])
def test_seed_several_sequences(sequences: int, head_dim: int, device: str) -> None:
    """The seed's second category: limits of 100 and 800 for sequences of 400, 800 and 600 keys."""
    lengths = (own[:sequences] for own in ((30, 80, 50), (70, 120, 90), (400, 800, 600)))
    verify_groups(Groups(*lengths, (100, 800), 8, 8, head_dim), torch.float16, device, SEED_LIMIT)


@pytest.mark.no_interpret
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("local", [128, 256])
def test_seed_single_sequence(local: int, heads: int, head_dim: int, world_size: int, device: str) -> None:
    """The seed's first category: rank 0 has the first chunk and the last."""
    chunk = local // 2
    limits = (chunk, 2 * world_size * chunk)
    case = Groups((chunk,), (chunk,), (local * world_size,), limits, heads, heads, head_dim)
    verify_groups(case, torch.float16, device, SEED_LIMIT)


SMALL = Groups((9, 0, 14), (7, 12, 0), (30, 5, 20), ((9, 5, 14), (23, 9, 3)), 4, 2, 16, outside=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"causal": False}, {"limits": (11, 2**40)}, {"limits": (0, (4, 0, 6)), "scale": 0.4}, {"key_heads": 4}],
    ids=str,
)
def test_groups(changes: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """Limits of each sequence or of all, past its end too; more queries than keys; rows in no sequence."""
    verify_groups(replace(SMALL, **changes), dtype, device)


def test_lse_is_padded_and_cut(device: str) -> None:
    """Row s * H + h, entry i is the row of the sequence. Rows past the width are computed, and not stored."""
    q0, q1, k, v = (torch.randn(shape, device=device) for shape in SMALL.shapes.values())
    wide = SMALL.ours(device)(q0, q1, k, v)
    assert [list(each.shape) for each in wide[2:]] == [[12, 16], [12, 16]]
    cu = [cumulative(own, device) + 3 for own in (SMALL.q0, SMALL.q1)]
    limits = [torch.tensor(limit, dtype=torch.int32, device=device) for limit in SMALL.limits]
    call = partial(fused_zigzag_llama3_flash_attn_varlen_forward, q0, q1, k, v, *cu, cumulative(SMALL.k, device))
    for longest, width in ((1, 1), (2, 2), (5, 8), (8, 8), (33, 64)):
        out0, out1, lse0, lse1 = call(longest, 12, 1, *limits)
        assert torch.equal(out0, wide[0]) and torch.equal(out1, wide[1]) and torch.equal(lse1, wide[3])
        assert lse0.shape == (12, width)
        for sequence, length in enumerate(SMALL.q0):
            rows = lse0[sequence * 4 : sequence * 4 + 4]
            stored = min(length, width)
            assert torch.equal(rows[:, :stored], wide[2][sequence * 4 : sequence * 4 + 4, :stored])
            assert (rows[:, length:] == -torch.inf).all()


def test_groups_of_nothing(device: str) -> None:
    def call(rows: tuple[int, int], keys: int, *lengths: tuple[int, ...]) -> Any:
        q0, q1, k, v = (torch.randn(n, 2, 8, device=device, requires_grad=True) for n in (*rows, keys, keys))
        cu = [cumulative(own, device) for own in lengths]
        results = fused_zigzag_llama3_flash_attn_varlen_forward(q0, q1, k, v, *cu, 4, 4, 4, 3, 9)
        gradients = torch.autograd.grad(results[0].sum() + results[1].sum(), (q0, q1, k, v))
        assert all(each.isfinite().all() for each in gradients)
        return results

    assert [list(each.shape) for each in call((0, 0), 0, (), (), ())] == [[0, 2, 8], [0, 2, 8], [0, 4], [0, 4]]
    out0, out1, lse0, lse1 = call((0, 3), 5, (0,), (3,), (5,))
    assert list(out0.shape) == [0, 2, 8] and (lse0 == -torch.inf).all() and lse1[:, :3].isfinite().all()
    out0, out1, lse0, lse1 = call((3, 3), 0, (3,), (3,), (0,))
    assert not out0.any() and not out1.any() and (torch.cat([lse0, lse1]) == -torch.inf).all()


@pytest.mark.no_interpret
def test_groups_have_the_same_bits_every_time(device: str) -> None:
    leaves = {name: torch.randn(shape, device=device).half() for name, shape in SMALL.shapes.items()}
    upstream = [torch.randn(each.shape, device=device) for each in SMALL.ours(device)(**leaves)]
    assert_same_bits(lambda: differentiate(SMALL.ours(device), FUSED, upstream, leaves))


# --- grouped attention ---


@dataclass(frozen=True)
class Rank:
    """A rank's call of grouped attention, with the lists that ring-flash-attention's helpers make.

    Chunks are those of floor division, which its helpers have where 2 W divides the lengths.
    """

    lengths: tuple[int, ...]
    rank: int
    world_size: int
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 16
    is_global: bool = False

    @property
    def chunks(self) -> tuple[int, int]:
        return self.rank, 2 * self.world_size - 1 - self.rank

    def bounds(self, length: int, chunk: int) -> tuple[int, int]:
        return length * chunk // (2 * self.world_size), length * (chunk + 1) // (2 * self.world_size)

    def tokens(self, rank: int) -> list[int]:
        """Places in the packed batch of a rank's rows, in their order."""
        starts = accumulate(self.lengths, initial=0)
        return [
            start + token
            for start, length in zip(starts, self.lengths, strict=False)
            for chunk in (rank, 2 * self.world_size - 1 - rank)
            for token in range(*self.bounds(length, chunk))
        ]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        rows = {f"q{group}": self.rows(chunk) for group, chunk in enumerate(self.chunks)}
        shapes: dict[str, tuple[int, ...]] = {name: (n, self.heads, self.head_dim) for name, n in rows.items()}
        return {**shapes, "kv_buffer": (2, sum(self.lengths), self.key_heads, self.head_dim)}

    def rows(self, chunk: int) -> int:
        return sum(end - start for start, end in (self.bounds(length, chunk) for length in self.lengths))

    def arguments(self, device: str) -> dict[str, Any]:
        sizes = [[end - start for start, end in map(partial(self.bounds, chunk=c), self.lengths)] for c in self.chunks]
        indices: list[list[int]] = [[], []]
        row = 0
        for pair in zip(*sizes, strict=True):
            for own, size in zip(indices, pair, strict=True):
                own.extend(range(row, row + size))
                row += size
        starts = [*accumulate(self.lengths, initial=0)]
        slices = []
        for chunk in self.chunks:
            ends = [self.bounds(length, chunk)[1] for length in self.lengths]
            ranges = [(start, start + end) for start, end, n in zip(starts, ends, self.lengths, strict=False) if n]
            slices.append((ranges, cumulative(tuple(ends), device)))
        factor = 1 if self.is_global else self.world_size
        return {
            "chunk_cu_seqlens_q_list": [cumulative(tuple(own), device) for own in sizes],
            "chunk_indices_list": [torch.tensor(own, dtype=torch.int64, device=device) for own in indices],
            "kv_slices": slices, "nheads": self.heads, "head_dim": self.head_dim, "softmax_scale": None,
            "dropout_p": 0.0, "causal": True, "window_size": (-1, -1), "alibi_slopes": None, "deterministic": True,
            "world_size": self.world_size,
            "cu_seqlens_k": cumulative(tuple(length // factor for length in self.lengths), device),
            "chunk_idx_0": self.chunks[0], "chunk_idx_1": self.chunks[1],
        }  # fmt: skip

    def ours(self, device: str, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        arguments = {**self.arguments(device), **options}

        def call(q0: Tensor, q1: Tensor, kv_buffer: Tensor) -> tuple[Tensor, Tensor]:
            return replace_execute_grouped_attention_with_fused_varlen([q0, q1], kv_buffer=kv_buffer, **arguments)[:2]

        return call

    def reference(
        self, q0: Tensor, q1: Tensor, kv_buffer: Tensor, alibi_slopes: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """out and lse in local order: each query over its whole sequence, put back into order, at its own position."""
        wide = torch.promote_types(q0.dtype, torch.float32)
        order = [token for rank in range(self.world_size) for token in self.tokens(rank)]
        k, v = kv_buffer[:, torch.tensor(order, device=q0.device).argsort()]
        outs, lses = [], []
        rows = [0, 0]
        for sequence, (start, end) in enumerate(pairwise(accumulate(self.lengths, initial=0))):
            slopes = alibi_slopes[sequence] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
            for group, (q, chunk) in enumerate(zip((q0, q1), self.chunks, strict=True)):
                position = torch.arange(*self.bounds(end - start, chunk), device=q.device)
                queries = q[rows[group] : rows[group] + len(position)]
                rows[group] += len(position)
                out, lse = attend(queries, k[start:end], v[start:end], position, end - start, slopes=slopes, **options)
                outs.append(out)
                lses.append(lse)
        return torch.cat(outs), torch.cat(lses, 1).to(wide)


GROUPED = ("out", "lse")
# Options, and what the reference calls them. Slopes have the numbers of their dimensions.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.4},
    "window": {"window_size": (9, 3)},
    "alibi": {"alibi": 1},
    "alibi_of_sequences_and_window": {"alibi": 2, "window_size": (20, -1)},
    "full": {"causal": False},
    "full_window": {"causal": False, "window_size": (9, 13)},
    "full_alibi_of_sequences": {"causal": False, "alibi": 2},
    "full_alibi_and_left_window": {"causal": False, "alibi": 1, "window_size": (9, -1)},
}


def verify_rank(case: Rank, options: dict[str, Any], dtype: torch.dtype, device: str, limit: Any = None) -> None:
    options = dict(options)
    dimensions = options.pop("alibi", 0)
    slopes = torch.rand(len(case.lengths), case.heads, device=device)
    alibi_slopes = None if dimensions == 0 else slopes if dimensions == 2 else slopes[0]
    ours = case.ours(device, alibi_slopes=alibi_slopes, **options)
    named = {"softmax_scale": "scale", "window_size": "window"}
    of_reference = {named.get(name, name): value for name, value in options.items()}
    reference = partial(case.reference, alibi_slopes=alibi_slopes, **of_reference)
    verify(ours, reference, GROUPED, case.shapes, dtype, device, limit)


@pytest.mark.no_interpret
def test_seed_integration(device: str) -> None:
    """The seed's third category."""
    verify_rank(Rank((1024,), 0, 4, 8, 8, 64), {}, torch.float16, device, SEED_LIMIT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, dtype: torch.dtype, device: str) -> None:
    verify_rank(Rank((24, 0, 48), 1, 2), OPTIONS[name], dtype, device)


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", ["plain", "window", "full", "full_window"])
@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (3, 2), (4, 1), (4, 3)])
def test_every_rank(world_size: int, rank: int, name: str, device: str) -> None:
    lengths = tuple(2 * world_size * chunk for chunk in (40, 0, 3, 11))
    verify_rank(Rank(lengths, rank, world_size), OPTIONS[name], torch.float32, device)


@pytest.mark.no_interpret
@pytest.mark.parametrize("lengths", [(37, 0, 61), (1, 2, 3, 100)], ids=str)
def test_boundaries_of_all_ranks_allow_uneven_lengths(lengths: tuple[int, ...], device: str) -> None:
    for rank in range(3):
        for name in ("plain", "full", "full_window"):
            verify_rank(Rank(lengths, rank, 3, is_global=True), OPTIONS[name], torch.float32, device)


@pytest.mark.parametrize("causal", [True, False])
def test_dropout_is_that_of_a_single_device(causal: bool, device: str) -> None:
    """Each rank drops what one device drops of the whole batch, by the same draw of PyTorch's generator."""
    lengths, world_size = (24, 40), 2
    q = torch.randn(sum(lengths), 4, 16, device=device)
    k, v = torch.randn(2, sum(lengths), 2, 16, device=device).unbind(0)
    options = {"dropout_p": 0.4, "causal": causal}
    torch.manual_seed(3)
    whole = window_attn(q, k, v, cumulative(lengths, device), **options)
    without = window_attn(q, k, v, cumulative(lengths, device), causal=causal)
    ranks = [Rank(lengths, rank, world_size) for rank in range(world_size)]
    order = torch.tensor([token for each in ranks for token in each.tokens(each.rank)], device=device)
    kv_buffer = torch.stack([k, v])[:, order]
    for each in ranks:
        own = torch.tensor(each.tokens(each.rank), device=device)
        groups = [q[own][indices] for indices in each.arguments(device)["chunk_indices_list"]]
        torch.manual_seed(3)
        out, _ = each.ours(device, **options)(*groups, kv_buffer)
        torch.testing.assert_close(out, whole[own])
        assert (out - without[own]).abs().max() > 0.1


def test_groups_that_a_rank_has_no_chunk_of(device: str) -> None:
    """ring-flash-attention cut into four groups: a rank has chunks of two, and its helpers leave the others empty."""
    case = Rank((32, 16), 1, 2)
    q0, q1, kv_buffer = (torch.randn(shape, device=device) for shape in case.shapes.values())
    call = partial(replace_execute_grouped_attention_with_fused_varlen, kv_buffer=kv_buffer)
    arguments = case.arguments(device)
    out, lse, info = call([q0, q1], **arguments)
    empty = {
        "chunk_cu_seqlens_q_list": cumulative((), device), "kv_slices": ([], cumulative((), device)),
        "chunk_indices_list": torch.empty(0, dtype=torch.int64, device=device),
    }  # fmt: skip
    split = {**arguments, **{name: [none, *arguments[name], none] for name, none in empty.items()}}
    split_out, split_lse, split_info = call([q0[:0], q0, q1, q0[:0]], **split)
    assert torch.equal(out, split_out) and torch.equal(lse, split_lse)
    assert split_info["kv_slices"] is split["kv_slices"] and info["kv_slices"] is arguments["kv_slices"]
    assert set(info) == {"chunk_indices_list", "chunk_cu_seqlens_q_list", "kv_slices"}


@pytest.mark.parametrize("name", ["plain", "full", "full_window"])
def test_further_groups_see_what_their_slices_hold(name: str, device: str) -> None:
    """Each late chunk cut in two groups gives the results of one group, if the slices end where the rows do."""
    case = Rank((32, 16), 1, 2)
    q0, q1, kv_buffer = (torch.randn(shape, device=device) for shape in case.shapes.values())
    call = partial(replace_execute_grouped_attention_with_fused_varlen, kv_buffer=kv_buffer)
    arguments = {**case.arguments(device), **OPTIONS[name]}
    expected = call([q0, q1], **arguments)
    # The late chunk has rows 16 to 24 of the first sequence, and 8 to 12 of the second. Take out their first rows.
    first, second = torch.tensor([0, 1, 2, 8], device=device), torch.tensor([3, 4, 5, 6, 7, 9, 10, 11], device=device)
    indices = arguments["chunk_indices_list"]
    cut = {
        **arguments,
        "chunk_cu_seqlens_q_list": [
            arguments["chunk_cu_seqlens_q_list"][0], cumulative((5, 3), device), cumulative((3, 1), device)
        ],
        "chunk_indices_list": [indices[0], indices[1][second], indices[1][first]],
        "kv_slices": [*arguments["kv_slices"], ([(0, 19), (32, 41)], cumulative((19, 9), device))],
    }  # fmt: skip
    actual = call([q0, q1[second], q1[first]], **cut)
    for one, other in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", ["window", "full", "full_window"])
def test_rows_in_no_sequence_see_nothing(name: str, device: str) -> None:
    """A group may have rows behind its last boundary, as a batch of fixed size has."""
    case = Rank((32, 16), 1, 2)
    q0, q1, kv_buffer = (torch.randn(shape, device=device) for shape in case.shapes.values())
    call = partial(replace_execute_grouped_attention_with_fused_varlen, kv_buffer=kv_buffer)
    arguments = {**case.arguments(device), **OPTIONS[name]}
    expected = call([q0, q1], **arguments)
    rows = q0.shape[0] + q1.shape[0]
    more = torch.arange(rows, rows + 3, device=device), torch.arange(rows + 3, rows + 5, device=device)
    arguments["chunk_indices_list"] = [
        torch.cat(pair) for pair in zip(arguments["chunk_indices_list"], more, strict=True)
    ]
    out, lse, _ = call([torch.cat([q0, q0[:3]]), torch.cat([q1, q1[:2]])], **arguments)
    torch.testing.assert_close(out[:rows], expected[0])
    torch.testing.assert_close(lse[:, :rows], expected[1])
    assert not out[rows:].any() and (lse[:, rows:] == -torch.inf).all()


def test_heads_may_come_in_strides(device: str) -> None:
    """As ring-flash-attention gathers them: some key heads at a time, with the query heads that they serve."""
    case = Rank((32, 16), 0, 2)
    q0, q1, kv_buffer = (torch.randn(shape, device=device) for shape in case.shapes.values())
    out, lse = case.ours(device)(q0, q1, kv_buffer)
    part = replace(case, heads=2, key_heads=1).ours(device)
    for head in range(2):
        some = slice(2 * head, 2 * head + 2)
        some_out, some_lse = part(q0[:, some], q1[:, some], kv_buffer[:, :, head : head + 1])
        torch.testing.assert_close(some_out, out[:, some])
        torch.testing.assert_close(some_lse, lse[some])


def test_keys_are_not_copied_and_options_reach_the_op(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def noting(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return torch_ops.segment_attention(*args, **options)

    monkeypatch.setattr(compat.ring_flash_attn, "segment_attention", noting)
    case = Rank((32, 16), 0, 2)
    q0, q1, kv_buffer = (torch.randn(shape, device=device) for shape in case.shapes.values())
    for deterministic in (True, False):
        case.ours(device, deterministic=deterministic)(q0, q1, kv_buffer)
        (_, k, v, *_), options = calls.pop()
        assert options["deterministic"] is deterministic
        assert k.data_ptr() == kv_buffer[0].data_ptr() and v.data_ptr() == kv_buffer[1].data_ptr()
    leaves = [torch.randn(shape, device=device) for shape in SMALL.shapes.values()]
    SMALL.ours(device)(*leaves)
    assert calls[-1][0][1] is leaves[2] and calls[-1][0][2] is leaves[3]


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    leaves = [torch.randn(shape, device="cuda").half().requires_grad_() for shape in SMALL.shapes.values()]
    groups = SMALL.ours("cuda")

    def fused() -> None:
        out0, out1, lse0, lse1 = groups(*leaves)
        torch.autograd.grad(out0.sum() + out1.sum() + lse0[:, 0].sum(), leaves)

    assert_waits_for_nothing(fused)
    case = Rank((32, 16), 1, 2)
    tensors = [torch.randn(shape, device="cuda").half().requires_grad_() for shape in case.shapes.values()]
    for options in ({}, {"causal": False, "window_size": (3, 4)}):
        call = case.ours("cuda", **options)
        assert_waits_for_nothing(lambda call=call: torch.autograd.grad(call(*tensors)[0].sum(), tensors))


@pytest.mark.no_interpret
def test_explain_takes_both(device: str) -> None:
    leaves = [torch.randn(shape, device=device) for shape in SMALL.shapes.values()]
    cu = [cumulative(own, device) for own in (SMALL.q0, SMALL.q1, SMALL.k)]
    report = torch_ops.explain(fused_zigzag_llama3_flash_attn_varlen_forward, *leaves, *cu, 14, 12, 30, 9, 99)
    assert report["op"] == "vk::segment_attention"
    case = Rank((32, 16), 1, 2)
    q0, q1, kv_buffer = (torch.randn(shape, device=device) for shape in case.shapes.values())
    function = replace_execute_grouped_attention_with_fused_varlen
    report = torch_ops.explain(function, [q0, q1], kv_buffer=kv_buffer, **case.arguments(device))
    assert report["op"] == "vk::segment_attention"


# --- refusals ---


def _fused(**changes: Any) -> Any:
    """A good call on the CPU, with some arguments changed."""
    q, k, cu = torch.ones(7, 2, 8), torch.ones(9, 1, 8), cumulative((3, 4), "cpu")
    good = {
        "q0": q, "q1": q, "k": k, "v": k, "cu_seqlens_q0": cu, "cu_seqlens_q1": cu,
        "cu_seqlens_k": cumulative((5, 4), "cpu"), "max_seqlen_q0": 4, "max_seqlen_q1": 4, "max_seqlen_k": 5,
        "max_kv_len_q0": 3, "max_kv_len_q1": torch.tensor([5, 4], dtype=torch.int32),
    }  # fmt: skip
    return fused_zigzag_llama3_flash_attn_varlen_forward(**{**good, **changes})


def _grouped(**changes: Any) -> Any:
    case = Rank((32, 16), 1, 2)
    q0, q1, kv_buffer = (torch.ones(shape) for shape in case.shapes.values())
    good = {"chunk_q_list": [q0, q1], "kv_buffer": kv_buffer, **case.arguments("cpu")}
    changed = {name: change(good[name]) if callable(change) else change for name, change in changes.items()}
    return replace_execute_grouped_attention_with_fused_varlen(**{**good, **changed})


def _with(place: int, change: Any) -> Callable[[Any], list[Any]]:
    """A list with a change at one place: a value, or a function of the good one."""

    def changed(given: Any) -> list[Any]:
        each = list(given)
        each[place] = change(each[place]) if callable(change) else change
        return each

    return changed


def _ranges(group: int, ranges: Any) -> dict[str, Any]:
    return {"kv_slices": _with(group, lambda given: (ranges, given[1]))}


# Changes of a good call, and what is refused. Rank 1 of 2 has chunks 1 and 2 of sequences of 32 and 16 keys.
FUSED_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"q0": torch.ones(7, 8)}, "q0 has shape [7, 8], expected shape [T, H, D]"),
    "keys": ({"k": None}, "k is None, expected a dense tensor"),
    "dtype": ({"q1": torch.ones(7, 2, 8).half()}, "q1 is float16, expected float32 as q0 is"),
    "heads": ({"q1": torch.ones(7, 1, 8)}, "q1 has shape [7, 1, 8], expected shape [T, 2, 8] as q0 is, but for T"),
    "boundaries": ({"cu_seqlens_q1": cumulative((3,), "cpu")},
                   "cu_seqlens_q1 has shape [2], expected shape [3] as cu_seqlens_q0 is"),
    "boundaries_of_keys": ({"cu_seqlens_k": cumulative((9,), "cpu")},
                           "cu_seqlens_k has shape [2], expected shape [3] as cu_seqlens_q0 is"),
    "boundaries_dtype": ({"cu_seqlens_k": torch.tensor([0, 5, 9])}, "cu_seqlens_k is int64, expected int32"),
    "device": ({"cu_seqlens_k": cumulative((5, 4), "meta")}, "cu_seqlens_k is on meta, expected on cpu as q0 is"),
    "longest": ({"max_seqlen_q0": -3}, "max_seqlen_q0 is -3, expected at least 0"),
    "longest_type": ({"max_seqlen_q1": 4.0}, "max_seqlen_q1 is 4.0, expected an integer"),
    "longest_keys": ({"max_seqlen_k": -1}, "max_seqlen_k is -1, expected at least 0"),
    "limit": ({"max_kv_len_q0": -1}, "max_kv_len_q0 is -1, expected at least 0"),
    "limit_dtype": ({"max_kv_len_q1": torch.tensor([5, 4])}, "max_kv_len_q1 is int64, expected int32, or an integer"),
    "limit_shape": ({"max_kv_len_q1": torch.ones(3, dtype=torch.int32)},
                    "max_kv_len_q1 has shape [3], expected shape [2], a limit for each sequence"),
    "scale": ({"softmax_scale": 0.0}, "softmax_scale is 0.0, expected a positive number or None"),
    "causal": ({"causal": 1}, "causal is 1, expected True or False"),
}  # fmt: skip

GROUPED_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "buffer": ({"kv_buffer": lambda given: given[0]},
               "kv_buffer has shape [48, 2, 16], expected shape [2, T, H, D]"),
    "heads": ({"nheads": 3}, "nheads is 3, expected a multiple of the 2 heads of kv_buffer"),
    "heads_of_queries": ({"nheads": 2}, "chunk_q_list[0] has shape [12, 4, 16], expected shape [T, 2, 16]"),
    "head_dim": ({"head_dim": 8}, "head_dim is 8, expected 16 as that of kv_buffer is"),
    "dtype": ({"chunk_q_list": _with(1, lambda q: q.half())},
              "chunk_q_list[1] is float16, expected float32 as kv_buffer is"),
    "no_groups": ({"chunk_q_list": []}, "chunk_q_list is of length 0, expected a list of one or more groups"),
    "fewer_groups": ({"chunk_indices_list": lambda given: given[:1]},
                     "chunk_indices_list is of length 1, expected a list of 2 groups"),
    "boundaries": ({"chunk_cu_seqlens_q_list": _with(0, cumulative((12,), "cpu"))},
                   "chunk_cu_seqlens_q_list[0] has shape [2], expected shape [3] as cu_seqlens_k is"),
    "boundaries_dtype": ({"chunk_cu_seqlens_q_list": _with(0, lambda cu: cu.long())},
                         "chunk_cu_seqlens_q_list[0] is int64, expected int32"),
    "indices_dtype": ({"chunk_indices_list": _with(1, lambda given: given.int())},
                      "chunk_indices_list[1] is int32, expected int64"),
    "indices_shape": ({"chunk_indices_list": _with(1, lambda given: given[:3])},
                      "chunk_indices_list[1] has shape [3], expected shape [12], one for each row of the group"),
    "indices": ({"chunk_indices_list": _with(1, lambda given: given + 1)},
                "chunk_indices_list is .*, expected lists that hold each of the 24 local rows once"),
    "world_size": ({"world_size": 0}, "world_size is 0, expected at least 1"),
    "chunk": ({"chunk_idx_1": 4}, "chunk_idx_1 is 4, expected from 0 to 3, as world_size is 2"),
    "chunk_type": ({"chunk_idx_0": 1.0}, "chunk_idx_0 is 1.0, expected an integer"),
    "cu_seqlens_k": ({"cu_seqlens_k": cumulative((16, 9), "cpu")},
                     "cu_seqlens_k[2] is 25, expected 48, the rows of kv_buffer, or a rank's share of them"),
    "other_lengths": ({"cu_seqlens_k": cumulative((8, 16), "cpu")},
                      "kv_slices[0][0] is [(0, 16), (32, 40)], expected ranges of sequences of [16, 32] keys, as "
                      "cu_seqlens_k has"),
    "other_chunk": ({"chunk_idx_0": 0},
                    "kv_slices[0][0][0] is (0, 16), expected (0, 8), the sequence up to the end of chunk 0"),
    "other_second_chunk": ({"chunk_idx_1": 3},
                           "kv_slices[1][0][0] is (0, 24), expected (0, 32), the sequence up to the end of chunk 3"),
    "other_end": (_ranges(1, [(0, 24), (32, 45)]),
                  "kv_slices[1][0][1] is (32, 45), expected (32, 44), the sequence up to the end of chunk 2"),
    "other_starts": (_ranges(1, [(0, 18), (24, 42)]),
                     "kv_slices[1][0] is [(0, 18), (24, 42)], expected ranges that start as those of kv_slices[0] do"),
    "falling_starts": ({"kv_slices": lambda given: [([(5, 6), (0, 3)], cu) for _, cu in given]},
                       "kv_slices[0][0] is [(5, 6), (0, 3)], expected ranges with starts that rise from 0 to at most "
                       "the 48 rows of kv_buffer"),
    "no_ranges": ({"kv_slices": lambda given: [([], cu) for _, cu in given]},
                  "kv_slices[0][0] is 0 ranges, expected a range for each of the 2 sequences that has keys"),
    "more_ranges": ({"kv_slices": lambda given: [([(0, 1)] * 3, cu) for _, cu in given]},
                    "kv_slices[0][0] is 3 ranges, expected a range for each of the 2 sequences that has keys"),
    "slices": ({"kv_slices": _with(0, 3)},
               "kv_slices[0] is of type int, expected a pair (list of ranges, boundaries)"),
    "range": (_ranges(0, [(0, 16), 32]), "kv_slices[0][0][1] is 32, expected a pair (start, end)"),
    "range_type": (_ranges(0, [(0, 16.0), (32, 40)]), "kv_slices[0][0][0] is 16.0, expected an integer"),
    "slice_boundaries": ({"kv_slices": _with(1, lambda given: (given[0], cumulative((24, 11), "cpu")))},
                         "kv_slices[1][1] is [0, 24, 35], expected boundaries of [24, 12] keys, as the ranges have"),
    "slice_boundaries_shape": ({"kv_slices": _with(1, lambda given: (given[0], cumulative((36,), "cpu")))},
                               "kv_slices[1][1] has shape [2], expected shape [3] as cu_seqlens_k is"),
    "window": ({"window_size": 3}, "window_size is 3, expected a pair (left, right)"),
    "scale": ({"softmax_scale": -1.0}, "softmax_scale is -1.0, expected a positive number or None"),
    "dropout_type": ({"dropout_p": True}, "dropout_p is True, expected a number"),
    "causal": ({"causal": None}, "causal is None, expected True or False"),
}  # fmt: skip


def refused(function: Callable[..., Any], name: str, changes: dict[str, Any], message: str) -> None:
    function()
    pattern = ".*".join(map(re.escape, f"{name}: {message}".split(".*")))
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        function(**changes)


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", FUSED_REFUSALS)
def test_fused_refuses_by_name(name: str) -> None:
    refused(_fused, "fused_zigzag_llama3_flash_attn_varlen_forward", *FUSED_REFUSALS[name])


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", GROUPED_REFUSALS)
def test_grouped_refuses_by_name(name: str) -> None:
    refused(_grouped, "replace_execute_grouped_attention_with_fused_varlen", *GROUPED_REFUSALS[name])


@pytest.mark.no_interpret
def test_a_further_group_is_refused_where_it_leaves_its_sequence() -> None:
    def further(given: Any) -> list[Any]:
        return [*given, ([(0, 33), (32, 40)], cumulative((33, 8), "cpu"))]

    lists = {
        "chunk_q_list": lambda given: [*given, given[0][:0]],
        "chunk_cu_seqlens_q_list": lambda given: [*given, torch.zeros_like(given[0])],
        "chunk_indices_list": lambda given: [*given, given[0][:0]],
    }  # fmt: skip
    message = "kv_slices[2][0][0] is (0, 33), expected within (0, 32), the sequence"
    with pytest.raises(ValueError, match=re.escape(message)):
        _grouped(**lists, kv_slices=further)


@pytest.mark.no_interpret
def test_what_the_ops_refuse_has_their_names() -> None:
    for change, message in (
        ({"dropout_p": 1.0}, "segment_attention: dropout_p is 1.0, expected a probability"),
        ({"alibi_slopes": torch.ones(3)}, r"segment_attention: alibi_slopes has shape \[3\]"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            _grouped(**change)
    with pytest.raises(ValueError, match="^segment_attention: v has shape .* as k is"):
        _fused(v=torch.ones(8, 1, 8))


@pytest.mark.gpu
def test_values_on_the_gpu_are_compared_in_checked_mode() -> None:
    case = Rank((32, 16), 1, 2)
    tensors = [torch.randn(shape, device="cuda").half() for shape in case.shapes.values()]
    case.ours("cuda")(*tensors)
    other = {"cu_seqlens_k": cumulative((8, 16), "cuda")}
    case.ours("cuda", **other)(*tensors)
    with settings(checked=True):
        case.ours("cuda")(*tensors)
        with pytest.raises(ValueError, match="expected ranges of sequences of"):
            case.ours("cuda", **other)(*tensors)


@pytest.mark.no_interpret
def test_checked_mode_takes_what_is_right(device: str) -> None:
    """Limits past a sequence too, which the seed's own cases have."""
    with settings(checked=True):
        verify_groups(replace(SMALL, limits=(11, 2**40)), torch.float32, device)
        verify_rank(Rank((24, 0, 48), 1, 2), OPTIONS["full_window"], torch.float32, device)


@pytest.mark.no_interpret
def test_signatures_are_those_of_the_seed() -> None:
    expected = {
        fused_zigzag_llama3_flash_attn_varlen_forward: "q0 q1 k v cu_seqlens_q0 cu_seqlens_q1 cu_seqlens_k "
        "max_seqlen_q0 max_seqlen_q1 max_seqlen_k max_kv_len_q0 max_kv_len_q1 softmax_scale causal",
        replace_execute_grouped_attention_with_fused_varlen: "chunk_q_list chunk_cu_seqlens_q_list chunk_indices_list "
        "kv_buffer kv_slices nheads head_dim softmax_scale dropout_p causal window_size alibi_slopes deterministic "
        "world_size cu_seqlens_k chunk_idx_0 chunk_idx_1",
    }
    for function, names in expected.items():
        assert list(inspect.signature(function).parameters) == names.split()
    parameters = inspect.signature(fused_zigzag_llama3_flash_attn_varlen_forward).parameters
    assert parameters["softmax_scale"].default is None and parameters["causal"].default is True


@pytest.mark.no_interpret
def test_examples_of_the_docs_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text()
    (section,) = re.findall(r"^## ring-flash-attention$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(examples) == 2
    for code in examples:
        exec(code, names)
    assert names["out0"].shape == (300, 8, 64) and names["lse0"].shape == (16, 256)
    assert names["out"].shape == (600, 8, 64) and names["lse"].shape == (8, 600) and names["lse"].isfinite().all()
