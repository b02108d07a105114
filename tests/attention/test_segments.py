"""Index tensors of segment attention against a list of every row, their refusals, and that nothing waits for a GPU."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_ops
from tests.verify import DEVICE, assert_waits_for_nothing
from torch_ops import segment_attention
from torch_ops.segments import MOST_ROWS, Segments, dual_group, whole_sequences, zigzag, zigzag_indices
from torch_ops.testing.cases import cumulative

# A token: its sequence, and its number in the sequence.
Token = tuple[int, int]


def tokens_of(lengths: Sequence[int], rank: int, world_size: int) -> list[Token]:
    """Return the tokens of a rank in the order of its rows."""
    chunks = 2 * world_size
    return [
        (sequence, token)
        for sequence, length in enumerate(lengths)
        for chunk in (rank, chunks - 1 - rank)
        for token in range(length * chunk // chunks, length * (chunk + 1) // chunks)
    ]


def gathered(lengths: Sequence[int], world_size: int, rows_per_rank: int | None) -> list[Token | None]:
    """Return the token of each row of the all-gathered buffer, None for padding."""
    buffer: list[Token | None] = []
    for rank in range(world_size):
        rows = tokens_of(lengths, rank, world_size)
        buffer += [*rows, *[None] * (0 if rows_per_rank is None else rows_per_rank - len(rows))]
    return buffer


def queries_of(segments: Segments) -> list[Token]:
    """Return the sequence and the key position of each query row, segment by segment."""
    boundaries = itertools.pairwise(segments.cu_seqlens_q.tolist())
    named = zip(boundaries, segments.key_sequence.tolist(), segments.key_limit.tolist(), strict=True)
    return [
        (sequence, row + limit - (end - start)) for (start, end), sequence, limit in named for row in range(end - start)
    ]


def keys_of(segments: Segments, buffer: Sequence[Token | None]) -> list[list[Token | None]]:
    """Return the tokens of each sequence in the order of its keys, read from the rows that its pieces name."""
    return [
        [
            buffer[row + key - begin]
            for row, (begin, end) in zip(rows, itertools.pairwise(bounds), strict=True)
            for key in range(begin, end)
        ]
        for bounds, rows in zip(segments.key_bounds.tolist(), segments.key_rows.tolist(), strict=True)
    ]


def verify_whole(segments: Segments) -> None:
    """Whole sequences leave queries where they were, and what sees nothing sees nothing."""
    kept = [tensor.clone() for tensor in segments]
    whole, starts = whole_sequences(segments)
    for name in ("cu_seqlens_q", "key_sequence", "key_bounds", "key_rows"):
        assert getattr(whole, name) is getattr(segments, name)
    assert all(torch.equal(one, other) for one, other in zip(segments, kept, strict=True))
    for tensor in (whole.key_limit, starts):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.device == segments.key_limit.device
        assert tensor.shape == segments.key_limit.shape
    lengths = segments.key_bounds[:, -1].tolist()
    named = list(zip(segments.key_sequence.tolist(), segments.key_limit.tolist(), strict=True))
    assert whole.key_limit.tolist() == [lengths[sequence] if limit else 0 for sequence, limit in named]
    spans = zip(itertools.pairwise(segments.cu_seqlens_q.tolist()), named, starts.tolist(), strict=True)
    rows = [(sequence, first + row) for (a, b), (sequence, _), first in spans for row in range(b - a)]
    assert rows == queries_of(segments)


def verify_zigzag(lengths: Sequence[int], world_size: int, spare: int | None, device: str) -> None:
    most = max(len(tokens_of(lengths, rank, world_size)) for rank in range(world_size))
    rows_per_rank = None if spare is None else most + spare
    buffer = gathered(lengths, world_size, rows_per_rank)
    packed = [(sequence, token) for sequence, length in enumerate(lengths) for token in range(length)]
    on_device = torch.tensor(lengths, dtype=torch.int64, device=device)
    for rank in range(world_size):
        segments = zigzag(lengths, rank, world_size, rows_per_rank, device=device)
        for one, other in zip(segments, zigzag(on_device, rank, world_size, rows_per_rank), strict=True):
            assert torch.equal(one, other)
            assert one.dtype == torch.int32 and one.is_contiguous() and one.device.type == device
        mine = tokens_of(lengths, rank, world_size)
        assert segments.cu_seqlens_q[0] == 0 and queries_of(segments) == mine
        verify_whole(segments)
        assert keys_of(segments, buffer) == [
            [(sequence, token) for token in range(length)] for sequence, length in enumerate(lengths)
        ]
        indices = zigzag_indices(on_device, rank, world_size)
        assert indices.dtype == torch.int64 and [packed[index] for index in indices.tolist()] == mine
        assert torch.equal(zigzag_indices(lengths, rank, world_size).to(device), indices)
        # A late chunk's end is the most that a segment sees.
        assert segments.key_limit.tolist() == [
            length * (chunk + 1) // (2 * world_size)
            for length in lengths
            for chunk in (rank, 2 * world_size - 1 - rank)
        ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "lengths", [(), (0,), (16,), (64, 16, 128), (1, 2, 3), (7, 0, 33, 5), (100,), (15, 17, 0, 0, 1)], ids=str
)
def test_zigzag_names_every_row(lengths: tuple[int, ...], world_size: int, device: str) -> None:
    for spare in (None, 0, 5):
        verify_zigzag(lengths, world_size, spare, device)


@given(lengths=st.lists(st.integers(0, 40), max_size=6), world_size=st.integers(1, 6), spare=st.sampled_from([None, 3]))
def test_zigzag_names_every_row_of_anything(lengths: list[int], world_size: int, spare: int | None) -> None:
    verify_zigzag(lengths, world_size, spare, DEVICE)


@given(lengths=st.lists(st.integers(0, 300), max_size=6), world_size=st.integers(1, 9))
def test_ranks_have_each_token_once_and_as_much_work(lengths: list[int], world_size: int) -> None:
    indices = [zigzag_indices(lengths, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat(indices).sort().values, torch.arange(sum(lengths)))
    for own in indices:
        assert abs(own.numel() - sum(lengths) / world_size) < 2 * max(len(lengths), 1)
    equal = [2 * world_size * length for length in lengths]
    pairs = []
    for rank in range(world_size):
        pairs.append(sum(token + 1 for _, token in queries_of(zigzag(equal, rank, world_size))))
    assert len(set(pairs)) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_lengths_of_any_integers(dtype: torch.dtype, device: str) -> None:
    """Products are made in int64: 200 times 16 has no place in uint8."""
    lengths = torch.tensor([100, 3], dtype=dtype, device=device)
    expected = zigzag([100, 3], 1, 8)
    for given_lengths in (lengths, np.array([100, 3], dtype=str(dtype).removeprefix("torch."))):
        made = zigzag(given_lengths, np.uint8(1), np.uint8(8), device="cpu")
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def test_long_sequences_do_not_overflow(device: str) -> None:
    """The product of a length and a chunk's number passes int32."""
    length = MOST_ROWS - 1000
    for lengths in ([length, 999], torch.tensor([length, 999], dtype=torch.int32, device=device)):
        segments = zigzag(lengths, 3, 8)
        assert segments.key_bounds.tolist() == [[each * chunk // 16 for chunk in range(17)] for each in (length, 999)]
        assert segments.key_limit.tolist() == [each * end // 16 for each in (length, 999) for end in (4, 13)]
        assert int(segments.key_rows.max()) < MOST_ROWS


def test_negative_lengths_that_only_a_gpu_knows_count_as_none() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.tensor([8, -3], dtype=torch.int32))
        assert zigzag(fake, 0, 2).key_bounds.shape == (2, 5)
    compiled = torch.compile(lambda lengths: zigzag(lengths, 0, 2), backend="eager", fullgraph=True)
    made = compiled(torch.tensor([8, -3, 8]))
    assert all(torch.equal(one, other) for one, other in zip(made, zigzag([8, 0, 8], 0, 2), strict=True))


def test_graphs_make_index_tensors_of_any_lengths() -> None:
    """A compiled step may make them, for another number of sequences each time."""

    def step(lengths: Tensor) -> Segments:
        return zigzag(lengths, 1, 2, rows_per_rank=200)

    def whole(lengths: Tensor) -> tuple[Tensor, ...]:
        segments, starts = whole_sequences(step(lengths))
        return *segments, starts

    for function in (step, whole):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for lengths in ([7, 30, 0], [64, 3, 3, 3, 90], [5, 5]):
                made = compiled(torch.tensor(lengths, dtype=torch.int32))
                expected = function(torch.tensor(lengths, dtype=torch.int32))
                assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


# --- two groups ---


def verify_dual_group(
    boundaries: Sequence[Sequence[int]], limits: Sequence[int | Tensor], rows_q0: int | None, device: str
) -> Segments:
    """Compare with rows and limits written out; boundaries are good ones."""
    q0, q1, keys = boundaries
    segments = dual_group(
        *(torch.tensor(own, dtype=torch.int32, device=device) for own in boundaries), *limits, rows_q0
    )
    for tensor in segments:
        assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.device.type == device
    first = q0[-1] if rows_q0 is None else rows_q0
    expected: dict[int, Token] = {}
    for own, limit, shift in ((q0, limits[0], 0), (q1, limits[1], first)):
        of_sequence = limit.tolist() if isinstance(limit, Tensor) else [limit] * (len(keys) - 1)
        for sequence, (start, end) in enumerate(itertools.pairwise(own)):
            seen = min(of_sequence[sequence], keys[sequence + 1] - keys[sequence])
            expected |= {shift + row: (sequence, row + seen - end) for row in range(start, end)}
    found: dict[int, Token] = {}
    spans = itertools.pairwise(segments.cu_seqlens_q.tolist())
    named = zip(spans, segments.key_sequence.tolist(), segments.key_limit.tolist(), strict=True)
    for (start, end), sequence, limit in named:
        for row in range(start, end):
            found[row] = (sequence, row + limit - end)
    # The segment between the groups holds rows that no group has, and sees nothing.
    between = [row for row in found if row not in expected]
    assert all(q0[-1] <= row < first + q1[0] for row in between)
    assert {row: found[row] for row in expected} == expected
    if rows_q0 is not None and len(keys) > 1:
        assert segments.key_limit[len(keys) - 1] == 0
    packed = [(sequence, key) for sequence, (a, b) in enumerate(itertools.pairwise(keys)) for key in range(b - a)]
    buffer = [None] * keys[0] + packed
    assert keys_of(segments, buffer) == [
        [(sequence, key) for key in range(b - a)] for sequence, (a, b) in enumerate(itertools.pairwise(keys))
    ]
    verify_whole(segments)
    return segments


@pytest.mark.parametrize("rows_q0", [None, 110, 130])
@pytest.mark.parametrize("of_tensor", [False, True], ids=["integers", "tensors"])
def test_dual_group_names_every_row(rows_q0: int | None, of_tensor: bool, device: str) -> None:
    """The seed's lengths: limits may lie past a sequence."""
    limits: list[Any] = [100, 800]
    if of_tensor:
        limits = [torch.tensor(limit, dtype=torch.int32, device=device) for limit in ([100, 0], [900, 800])]
    segments = verify_dual_group(([0, 30, 110], [0, 70, 190], [0, 400, 1200]), limits, rows_q0, device)
    assert segments.cu_seqlens_q.shape[0] == (5 if rows_q0 is None else 6)


def test_groups_without_sequences_rows_or_keys(device: str) -> None:
    for rows_q0 in (None, 0, 7):
        nothing = verify_dual_group(([0], [0], [0]), [5, 5], rows_q0, device)
        assert nothing.key_bounds.shape == (0, 2) and nothing.key_rows.shape == (0, 1)
        assert nothing.key_sequence.shape == (0,)
        verify_dual_group(([0, 0, 0], [0, 4, 4], [0, 0, 9]), [5, 5], rows_q0, device)


def test_rows_before_the_first_and_past_the_last_boundary(device: str) -> None:
    verify_dual_group(([3, 9, 12], [4, 6, 11], [2, 20, 25]), [5, 25], 15, device)


def test_boundaries_that_fall_count_as_the_largest_before_them(device: str) -> None:
    def made(q0: list[int], q1: list[int], keys: list[int], *limits: Any) -> Segments:
        return dual_group(*(torch.tensor(own, dtype=torch.int32, device=device) for own in (q0, q1, keys)), *limits)

    wild = made([-4, 9, 5, 20], [0, 6, -1, 8], [0, 7, 3, 9], torch.tensor([-5, 3, 99], device=device).int(), 99, 12)
    good = made([0, 9, 9, 12], [0, 6, 6, 8], [0, 7, 7, 9], torch.tensor([0, 0, 2], device=device).int(), 99, 12)
    assert all(torch.equal(one, other) for one, other in zip(wild, good, strict=True))
    huge = made([0, 9], [0, 9], [0, 7], 2**40, MOST_ROWS)
    assert huge.key_limit.tolist() == [7, 7]


# --- whole sequences ---


def test_whole_sequences_start_where_causal_segments_did(device: str) -> None:
    """Values written out: chunks 1 and 2 of 4, then two groups, of which one has more queries than keys."""
    whole, starts = whole_sequences(zigzag([16, 7, 0], 1, 2, device=device))
    assert whole.key_limit.tolist() == [16, 16, 7, 7, 0, 0] and starts.tolist() == [4, 8, 1, 3, 0, 0]
    boundaries = (torch.tensor(own, dtype=torch.int32, device=device) for own in ([0, 3, 9], [0, 4, 4], [0, 20, 25]))
    limits = [torch.tensor(limit, dtype=torch.int32, device=device) for limit in ([11, 2], [0, 99])]
    whole, starts = whole_sequences(dual_group(*boundaries, *limits, rows_q0=12))
    # The third segment holds the rows between the groups.
    assert whole.cu_seqlens_q.tolist() == [0, 3, 9, 12, 16, 16]
    assert whole.key_limit.tolist() == [20, 5, 0, 0, 5] and starts.tolist() == [8, -4, -3, -4, 5]


def test_whole_sequences_count_rows_that_exist(device: str) -> None:
    """The last boundary lies past q, and one segment has no sequence. Both see what the op gives them."""
    boundaries = (torch.tensor(own, dtype=torch.int32, device=device) for own in ([0, 3], [0, 99], [0, 47]))
    segments = dual_group(*boundaries, 5, 47, rows_q0=3)
    q, k, v = (torch.randn(rows, 2, 16, device=device) for rows in (23, 47, 47))
    for each in (segments, segments._replace(key_sequence=segments.key_sequence - 1)):
        whole, starts = whole_sequences(each, 23)
        options = {"window_left": 9, "return_lse": True}
        causal = segment_attention(q, k, v, *each, **options)
        again = segment_attention(q, k, v, *whole._replace(key_limit=each.key_limit), **options, query_start=starts)
        for one, other in zip(causal, again, strict=True):
            assert torch.equal(one, other)


def test_sequences_that_do_not_exist_have_no_length(device: str) -> None:
    segments = zigzag([16, 7], 1, 2, device=device)
    missing = torch.tensor([2, -1, 2**31 - 1, 0], dtype=torch.int32, device=device)
    whole, starts = whole_sequences(segments._replace(key_sequence=missing))
    assert whole.key_limit.tolist() == [0, 0, 0, 16] and starts.tolist() == [-4, -4, -2, 3]
    none = segments._replace(key_bounds=segments.key_bounds[:0], key_rows=segments.key_rows[:0])
    assert whole_sequences(none)[0].key_limit.tolist() == [0] * 4


@pytest.mark.no_interpret
def test_graphs_make_index_tensors_of_python_lengths() -> None:
    def function(q: Tensor) -> Tensor:
        return segment_attention(q, q, q, *zigzag([40], 0, 1))

    q = torch.randn(40, 2, 16)
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(q), function(q))


def test_starts_of_boundaries_that_fall(device: str) -> None:
    """A segment with a falling boundary is empty. The others keep their places."""
    given = (
        torch.tensor(own, dtype=torch.int32, device=device) for own in ([0, 9, 5, 12], [0, 0, 0, 0], [0, 20, 30, 50])
    )
    _, starts = whole_sequences(dual_group(*given, 9, 9))
    assert starts.tolist() == [0, 9, 6, 9, 9, 9]


def test_rows_between_groups_still_see_nothing(device: str) -> None:
    boundaries = (torch.tensor(own, dtype=torch.int32, device=device) for own in ([0, 3, 9], [2, 6, 8], [0, 20, 25]))
    segments, query_start = whole_sequences(dual_group(*boundaries, 4, 25, rows_q0=13))
    q, k = torch.randn(23, 2, 8, device=device), torch.randn(25, 2, 8, device=device)
    out, lse = segment_attention(q, k, k, *segments, causal=False, return_lse=True, query_start=query_start)
    outside = torch.tensor([9 <= row < 15 or row >= 21 for row in range(23)], device=device)
    assert torch.equal((lse == -torch.inf).all(0), outside) and torch.equal((out == 0).all(-1).all(-1), outside)


# --- nothing waits ---


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    lengths = torch.tensor([64, 3, 17], dtype=torch.int32, device="cuda")
    boundaries = [cumulative(own, "cuda") for own in ((3, 4), (5, 6), (70, 80))]
    assert_waits_for_nothing(lambda: zigzag(lengths, 1, 4))
    assert_waits_for_nothing(lambda: zigzag(lengths, 1, 4, rows_per_rank=100))
    assert_waits_for_nothing(lambda: zigzag([64, 3, 17], 1, 4, device="cuda"))
    assert_waits_for_nothing(lambda: dual_group(*boundaries, 10, lengths[:2], 7))
    assert_waits_for_nothing(lambda: dual_group(*boundaries, lengths[:2], 10))
    assert_waits_for_nothing(lambda: whole_sequences(zigzag(lengths, 1, 4)))
    assert_waits_for_nothing(lambda: whole_sequences(dual_group(*boundaries, lengths[:2], 10, 7)))


def test_no_value_is_asked_for() -> None:
    """Fake tensors have none."""
    with FakeTensorMode() as mode:
        lengths = mode.from_tensor(torch.tensor([64, 3], dtype=torch.int32))
        boundaries = [mode.from_tensor(cumulative(own, "cpu")) for own in ((3, 4), (5, 6), (70, 80))]
        for made in (zigzag(lengths, 1, 4), zigzag(lengths, 1, 4, rows_per_rank=100), zigzag([64, 3], 1, 4)):
            assert [list(each.shape) for each in made] == [[5], [4], [4], [2, 9], [2, 8]]
            whole, starts = whole_sequences(made)
            assert whole.key_limit.shape == starts.shape == (4,)
        for made in (dual_group(*boundaries, 10, lengths), dual_group(*boundaries, lengths, 10)):
            assert [list(each.shape) for each in made] == [[5], [4], [4], [2, 2], [2, 1]]
            whole, starts = whole_sequences(made)
            assert whole.key_limit.shape == starts.shape == (4,)


# --- refusals ---


def _refusals() -> dict[str, tuple[Any, str]]:
    cu, limit = cumulative((3, 4), "cpu"), torch.ones(2, dtype=torch.int32)
    group = {"cu_seqlens_q0": cu, "cu_seqlens_q1": cu, "cu_seqlens_k": cu, "limit_q0": 3, "limit_q1": limit}
    return {
        "rank": (lambda: zigzag([8], 2, 2), "zigzag: rank is 2, expected from 0 to 1, as world_size is 2"),
        "rank_below": (lambda: zigzag([8], -1, 2), "zigzag: rank is -1, expected from 0 to 1, as world_size is 2"),
        "rank_type": (lambda: zigzag([8], 0.0, 2), "zigzag: rank is 0.0, expected an integer"),
        "world_size": (lambda: zigzag([8], 0, 0), "zigzag: world_size is 0, expected at least 1"),
        "world_size_type": (lambda: zigzag([8], 0, True), "zigzag: world_size is True, expected an integer"),
        "negative": (lambda: zigzag([8, -1], 0, 2), "zigzag: lengths[1] is -1, expected at least 0"),
        "negative_tensor": (lambda: zigzag(torch.tensor([8, -1]), 0, 2),
                            "zigzag: lengths[1] is -1, expected at least 0"),
        "length_type": (lambda: zigzag([8, 2.5], 0, 2), "zigzag: lengths[1] is 2.5, expected an integer"),
        "lengths": (lambda: zigzag(8, 0, 2), "zigzag: lengths is 8, expected integers or a tensor of them"),
        "lengths_dtype": (lambda: zigzag(torch.ones(2), 0, 2), "zigzag: lengths is float32, expected integers"),
        "lengths_bool": (lambda: zigzag(torch.ones(2).bool(), 0, 2), "zigzag: lengths is bool, expected integers"),
        "lengths_shape": (lambda: zigzag(torch.ones(2, 2).long(), 0, 2),
                          "zigzag: lengths has shape [2, 2], expected shape [S]"),
        "lengths_layout": (lambda: zigzag(torch.ones(2).long().to_sparse(), 0, 2),
                           "zigzag: lengths is of layout torch.sparse_coo, expected a dense tensor"),
        "total": (lambda: zigzag([2**31 - 1, 1], 0, 2),
                  "zigzag: the sum of lengths is 2147483648, expected at most 2147483647, which int32 holds"),
        "rows_per_rank": (lambda: zigzag([8, 7], 0, 2, 7),
                          "zigzag: rows_per_rank is 7, expected at least 8, the rows of the rank with the most"),
        "rows_per_rank_type": (lambda: zigzag([8], 0, 2, 4.0), "zigzag: rows_per_rank is 4.0, expected an integer"),
        "rows_per_rank_total": (lambda: zigzag([8], 0, 2, 2**30),
                                "zigzag: rows_per_rank is 1073741824, expected at most 1073741823, so that int32 "
                                "counts the rows of 2 ranks"),
        "indices_rank": (lambda: zigzag_indices([8], 2, 2),
                         "zigzag_indices: rank is 2, expected from 0 to 1, as world_size is 2"),
        "indices_negative": (lambda: zigzag_indices([-8], 0, 2),
                             "zigzag_indices: lengths[0] is -8, expected at least 0"),
        "group_dtype": (lambda: dual_group(**{**group, "cu_seqlens_q0": cu.long()}),
                        "dual_group: cu_seqlens_q0 is int64, expected int32"),
        "group_dimensions": (lambda: dual_group(**{**group, "cu_seqlens_q0": cu[None]}),
                             "dual_group: cu_seqlens_q0 has shape [1, 3], expected one dimension with one entry more "
                             "than there are segments"),
        "group_q1": (lambda: dual_group(**{**group, "cu_seqlens_q1": cu[:2]}),
                     "dual_group: cu_seqlens_q1 has shape [2], expected shape [3] as cu_seqlens_q0 is"),
        "group_k": (lambda: dual_group(**{**group, "cu_seqlens_k": cu[:2]}),
                    "dual_group: cu_seqlens_k has shape [2], expected shape [3] as cu_seqlens_q0 is"),
        "group_device": (lambda: dual_group(**{**group, "cu_seqlens_k": cu.to("meta")}),
                         "dual_group: cu_seqlens_k is on meta, expected on cpu as cu_seqlens_q0 is"),
        "limit": (lambda: dual_group(**{**group, "limit_q0": -1}), "dual_group: limit_q0 is -1, expected at least 0"),
        "limit_type": (lambda: dual_group(**{**group, "limit_q0": 1.0}),
                       "dual_group: limit_q0 is 1.0, expected an integer"),
        "limit_dtype": (lambda: dual_group(**{**group, "limit_q1": limit.long()}),
                        "dual_group: limit_q1 is int64, expected int32, or an integer"),
        "limit_shape": (lambda: dual_group(**{**group, "limit_q1": limit[:1]}),
                        "dual_group: limit_q1 has shape [1], expected shape [2], a limit for each sequence"),
        "limit_device": (lambda: dual_group(**{**group, "limit_q1": limit.to("meta")}),
                         "dual_group: limit_q1 is on meta, expected on cpu as cu_seqlens_q0 is"),
        "rows_q0": (lambda: dual_group(**group, rows_q0=-1),
                    "dual_group: rows_q0 is -1, expected from 0 to 2147483647"),
        "rows_q0_large": (lambda: dual_group(**group, rows_q0=2**31),
                          "dual_group: rows_q0 is 2147483648, expected from 0 to 2147483647"),
        "rows_q0_type": (lambda: dual_group(**group, rows_q0=7.0), "dual_group: rows_q0 is 7.0, expected an integer"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _refusals())
def test_refuses_by_name(name: str) -> None:
    call, message = _refusals()[name]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_the_module_is_part_of_the_library() -> None:
    assert torch_ops.segments.zigzag is zigzag and "segments" in torch_ops.__all__
