"""Cases of attention of query segments to shared sequences of keys, whose rows lie in pieces."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torch_ops.testing.cases._layouts import drawn_as
from torch_ops.testing.cases.attention import LAYOUTS, PACKED, drawn_options


class KeyPieces(NamedTuple):
    """Where the keys of each sequence lie.

    `bounds` [S, P + 1] are the first keys of pieces and the sequence's length, `rows` [S, P] the rows of these keys.
    k and v have `total` rows.
    """

    bounds: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]
    total: int


def contiguous_keys(*lengths: int) -> KeyPieces:
    """One piece a sequence, one sequence after the other."""
    starts = (0, *itertools.accumulate(lengths))
    return KeyPieces(tuple((0, length) for length in lengths), tuple((row,) for row in starts[:-1]), starts[-1])


def zigzag_keys(world_size: int, *lengths: int) -> KeyPieces:
    """The buffer that an all-gather leaves: rank r holds chunks r and 2 W - 1 - r of every sequence."""
    chunks = 2 * world_size
    bounds = [tuple(length * i // chunks for i in range(chunks + 1)) for length in lengths]
    rows = [[0] * chunks for _ in lengths]
    total = 0
    for rank in range(world_size):
        for sequence, chunk in itertools.product(range(len(lengths)), (rank, chunks - 1 - rank)):
            rows[sequence][chunk] = total
            total += bounds[sequence][chunk + 1] - bounds[sequence][chunk]
    return KeyPieces(tuple(bounds), tuple(map(tuple, rows)), total)


def scattered_keys(sizes: tuple[int, ...], gap: int, *lengths: int) -> KeyPieces:
    """Pieces of these sizes in turn; the last piece comes first, and `gap` rows that no sequence has follow each."""
    bounds, rows, total = [], [], 0
    for length in lengths:
        cut = [0]
        for size in itertools.cycle(sizes):
            if cut[-1] == length:
                break
            cut.append(min(cut[-1] + size, length))
        first: list[int] = []
        for start, end in reversed([*itertools.pairwise(cut)]):
            first.insert(0, total)
            total += end - start + gap
        bounds.append(cut)
        rows.append(first)
    # Sequences of fewer pieces end in empty ones.
    most = max(map(len, rows), default=0)
    return KeyPieces(
        tuple((*cut, *[cut[-1]] * (most + 1 - len(cut))) for cut in bounds),
        tuple((*first, *[0] * (most - len(first))) for first in rows),
        total,
    )


# The queries of a segment, its sequence and its key limit.
QuerySegment = tuple[int, int, int]


def zigzag_segments(rank: int, world_size: int, *lengths: int) -> tuple[QuerySegment, ...]:
    """The two chunks of every sequence that a rank holds; each sees keys up to its end."""
    ends = [[length * i // (2 * world_size) for i in range(2 * world_size + 1)] for length in lengths]
    return tuple(
        (ends[sequence][chunk + 1] - ends[sequence][chunk], sequence, ends[sequence][chunk + 1])
        for sequence in range(len(lengths))
        for chunk in (rank, 2 * world_size - 1 - rank)
    )


@dataclass(frozen=True)
class SegmentCase:
    """Shapes, index tensors and options of one call; `num_k_heads` is `num_heads` where None.

    `skipped` rows of q come before the first segment, `padding` rows after the last. `boundaries` replaces the
    cu_seqlens_q that follow from the segments. `query_start` has the key position of each segment's first row.
    """

    name: str
    reaches: str
    keys: KeyPieces
    segments: tuple[QuerySegment, ...]
    num_heads: int
    head_dim: int
    num_k_heads: int | None = None
    skipped: int = 0
    padding: int = 0
    boundaries: tuple[int, ...] | None = None
    query_start: tuple[int, ...] | None = None
    layout: str = "contiguous"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    tags: frozenset[str] = frozenset({"edge"})

    @property
    def total_q(self) -> int:
        return self.skipped + sum(queries for queries, _, _ in self.segments) + self.padding

    @property
    def cu_seqlens_q(self) -> tuple[int, ...]:
        if self.boundaries is not None:
            return self.boundaries
        return tuple(itertools.accumulate((queries for queries, _, _ in self.segments), initial=self.skipped))


@dataclass(frozen=True)
class SegmentInputs:
    """Random tensors of a case, and upstream gradients for out and lse; `op` is what they are for.

    `query_start` is among the options.
    """

    op: ClassVar[str] = "segment_attention"

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    key_sequence: Tensor
    key_limit: Tensor
    key_bounds: Tensor
    key_rows: Tensor
    dout: Tensor
    dlse: Tensor
    options: dict[str, Any]

    @property
    def places(self) -> tuple[Tensor, ...]:
        """Arguments after q, k and v, and in the backward after lse."""
        return self.cu_seqlens_q, self.key_sequence, self.key_limit, self.key_bounds, self.key_rows

    def call(self, function: Any, **tensors: Any) -> Any:
        """function(q, k, v, the five index tensors, **options), with those of these tensors that are given."""
        given = replace(self, **tensors)
        return function(given.q, given.k, given.v, *given.places, **given.options)


def make_segment_inputs(
    case: SegmentCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> SegmentInputs:
    """Fresh random inputs; the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype).to(device)

    def index(values: Any, *shape: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cpu").reshape(shape).to(device)

    count = len(case.segments)
    sequences, pieces = len(case.keys.bounds), max(map(len, case.keys.rows), default=1)
    q_shape = (case.total_q, case.num_heads, case.head_dim)
    k_shape = (case.keys.total, case.num_k_heads or case.num_heads, case.head_dim)
    starts = {} if case.query_start is None else {"query_start": index(case.query_start, count)}
    return SegmentInputs(
        q=drawn_as(PACKED, case.layout, draw, *q_shape),
        k=drawn_as(PACKED, case.layout, draw, *k_shape),
        v=drawn_as(PACKED, case.layout, draw, *k_shape),
        cu_seqlens_q=index(case.cu_seqlens_q, count + 1),
        key_sequence=index([sequence for _, sequence, _ in case.segments], count),
        key_limit=index([limit for _, _, limit in case.segments], count),
        key_bounds=index(case.keys.bounds, sequences, pieces + 1),
        key_rows=index(case.keys.rows, sequences, pieces),
        dout=drawn_as(PACKED, case.layout, draw, *q_shape),
        dlse=draw(case.num_heads, case.total_q).to(torch.promote_types(dtype, torch.float32)),
        options={**drawn_options(case.options, sequences, case.num_heads, draw, device), **starts},
    )


def _case(
    name: str, reaches: str, keys: KeyPieces, segments: tuple[QuerySegment, ...], heads: int, dim: int, *tags: str,
    **rest: Any,
) -> SegmentCase:  # fmt: skip
    return SegmentCase(name, reaches, keys, segments, heads, dim, tags=frozenset(tags or ("edge",)), **rest)


def _zigzag(
    name: str, reaches: str, rank: int, world_size: int, lengths: tuple[int, ...], heads: int, dim: int, *tags: str,
    **rest: Any,
) -> SegmentCase:  # fmt: skip
    keys, segments = zigzag_keys(world_size, *lengths), zigzag_segments(rank, world_size, *lengths)
    return _case(name, reaches, keys, segments, heads, dim, *tags, **rest)


def _zigzag_in_whole(
    name: str, reaches: str, rank: int, world_size: int, lengths: tuple[int, ...], heads: int, dim: int, *tags: str,
    **rest: Any,
) -> SegmentCase:  # fmt: skip
    """Chunks at their own positions, each of which sees its whole sequence."""
    chunks = zigzag_segments(rank, world_size, *lengths)
    segments = tuple((queries, sequence, lengths[sequence]) for queries, sequence, _ in chunks)
    starts = tuple(end - queries for queries, _, end in chunks)
    keys = zigzag_keys(world_size, *lengths)
    return _case(name, reaches, keys, segments, heads, dim, *tags, query_start=starts, **rest)


FULL = {"causal": False}
INT32 = 2**31 - 1
# Two sequences in order, and in pieces that lie in reverse order.
_TWO, _APART = contiguous_keys(60, 41), scattered_keys((16, 9), 3, 60, 41)
_GROUPS = ((20, 0, 31), (17, 1, 25), (12, 0, 60), (16, 1, 41))
_STEPS = {"alibi": 2, "sinks": True, "dropout_p": 0.2, "softcap": 3.0}

SEGMENT_ATTENTION = (
    _case("whole", "one piece, one segment, split head dim", contiguous_keys(100), ((100, 0, 100),), 2, 72,
        "smoke", "edge"),
    _case("dual_group", "two groups with limits of their own", _TWO, _GROUPS, 1, 64, "smoke", "edge"),
    _zigzag("zigzag2_0", "the first and the last chunk", 0, 2, (150, 37), 2, 40, "smoke", "edge"),
    _zigzag("zigzag2_1", "chunks in the middle", 1, 2, (150, 37), 1, 40),
    _zigzag("zigzag4_3", "chunks that follow each other, three heads on a key head", 3, 4, (100, 34, 5), 3, 64,
        num_k_heads=1),
    _zigzag("zigzag4_full", "all keys of a sequence from all pieces", 1, 4, (131, 40), 1, 16,
        options=FULL),
    _case("prefix", "limits that cut a piece", _APART, ((30, 0, 33), (5, 1, 1), (9, 1, 17)), 2, 32),
    _case("apart", "pieces in reverse order, rows of no sequence between", _APART, _GROUPS, 2, 72, "smoke", "edge"),
    _case(
        "shared", "two sequences that begin with the same rows, of which one comes twice",
        KeyPieces(((0, 40, 55, 55), (0, 40, 40, 63)), ((30, 0, 0), (30, 0, 10)), 75),
        ((33, 0, 55), (20, 1, 63), (9, 0, 44)), 1, 48,
    ),
    _case(
        "rows_twice", "a sequence that holds rows twice", KeyPieces(((0, 30, 60),), ((5, 0),), 40), ((45, 0, 60),), 1,
        24,
    ),
    _case(
        "many_segments", "segments of a sequence in any order, not side by side", _APART,
        ((7, 1, 41), (20, 0, 60), (3, 1, 9), (13, 0, 20), (1, 1, 41), (1, 0, 1), (40, 0, 60), (2, 1, 30)), 1, 40,
    ),
    _case("one_query", "segments of one query", _TWO, tuple((1, i % 2, 1 + 4 * i) for i in range(10)), 1, 16),
    _case(
        "limits", "limits above the length, of 0, negative and below the queries", _APART,
        ((20, 0, 99), (12, 1, 0), (9, 0, -5), (40, 1, 13), (30, 0, INT32)), 1, 40,
    ),
    _case(
        "limits_full", "rows that stand before the first key", _APART, ((20, 0, 99), (12, 1, 0), (40, 1, 13)), 1, 40,
        options=FULL,
    ),
    _case(
        "empty", "empty segments, sequences and pieces",
        KeyPieces(((0, 0, 0, 0), (0, 0, 20, 20), (0, 11, 11, 30)), ((4, 9, 0), (50, 3, 7), (30, 1, 60)), 90),
        ((0, 2, 30), (9, 0, 5), (0, 0, 0), (20, 1, 20), (0, 1, 3), (25, 2, 30), (0, 2, 9)), 1, 64,
    ),
    _case("outside", "rows of q before the first segment and past the last", _APART, _GROUPS, 2, 72, skipped=45,
        padding=33),
    _case("no_segments", "rows of q in no segment", _TWO, (), 1, 16, padding=20),
    _case("no_rows", "no rows of q", _TWO, ((0, 0, 9), (0, 1, 0)), 1, 64),
    _case("no_sequences", "no sequence to see", KeyPieces((), (), 12), ((9, 0, 5),), 1, 16),
    _case("no_keys", "no rows of k", KeyPieces(((0, 0), (0, 30)), ((0,), (0,)), 0), ((9, 0, 5), (20, 1, 30)), 1, 16),
    _case("gqa3", "three heads on a key head", _APART, _GROUPS[1:3], 6, 40, num_k_heads=2),
    _case("gqa7", "seven heads on a key head", _APART, _GROUPS, 7, 16, num_k_heads=1),
    _zigzag("short_chunks", "chunks shorter than a tile, some of them empty", 1, 8, (40, 3, 17), 8, 64),
    _case(
        "tiny_pieces", "pieces of 1 to 5 keys", scattered_keys((1, 2, 5, 3, 4), 1, 45, 23),
        ((30, 0, 45), (23, 1, 23), (7, 0, 20)), 1, 40, "smoke", "edge",
    ),
    _case("peaked", "scores so large that a row sees one key", _APART, _GROUPS, 1, 64, options={"scale": 4.0}),
    _case("scale", "an explicit scale", _APART, _GROUPS, 1, 16, options={"scale": 0.5}),
    _zigzag("window_left", "a sliding window across pieces", 0, 2, (150, 40), 1, 32, options={"window_left": 30}),
    _case(
        "window", "masked keys on both sides, across pieces", scattered_keys((33, 20), 2, 150), ((90, 0, 150),), 1, 16,
        options={**FULL, "window_left": 40, "window_right": 25},
    ),
    _case(
        "window_right", "a bound on the right alone", _APART, ((20, 0, 60), (30, 1, 41), (9, 0, 20)), 1, 16,
        options={**FULL, "window_right": 3},
    ),
    _case("window_causal", "causal order goes before the right bound", _APART, _GROUPS, 1, 8,
        options={"window_right": 9}),
    _case("window_zero", "a window of the query's own position", _APART, _GROUPS, 1, 8, options={"window_left": 0}),
    _case("window_beyond", "a window wider than the sequence", _APART, _GROUPS, 1, 8,
        options={**FULL, "window_left": 500, "window_right": INT32}),
    _case("softcap", "capped scores", _APART, _GROUPS, 1, 48, options={"softcap": 2.0}),
    _case("softcap_full", "capped scores, all keys", _APART, _GROUPS, 1, 24, options={**FULL, "softcap": 1.5}),
    _case("alibi", "slopes of each head", _APART, _GROUPS, 2, 48, options={"alibi": 1}),
    _case("alibi_rows", "slopes of each sequence, keys behind the query", _APART, (*_GROUPS, (9, 0, 4)), 2, 16,
        options={**FULL, "alibi": 2}),
    _case("sinks", "a logit more", _APART, _GROUPS, 2, 64, skipped=3, padding=4, options={"sinks": True}),
    _case(
        "sinks_tall", "rows that see a sink alone", _APART, ((50, 0, 20), (7, 1, 0), (9, 5, 3), (11, 1, 41)), 2, 72,
        options={"sinks": True},
    ),
    _case("dropout", "weights that are left out", _APART, _GROUPS, 1, 40, options={"dropout_p": 0.3}),
    _zigzag("dropout_zigzag", "the mask of a rank", 1, 2, (50, 21), 3, 16, num_k_heads=1, options={"dropout_p": 0.1}),
    _case("dropout_before", "positions below 0", _APART, ((50, 0, 20), (44, 1, 41)), 1, 16,
        options={**FULL, "dropout_p": 0.2}),
    _case(
        "all_steps", "whatever stands between scores and sums", _APART, ((33, 1, 41), (60, 0, 60), (20, 1, 11)), 1, 24,
        options={**_STEPS, "window_left": 30},
    ),
    _case(
        "starts", "keys behind the last row in causal order", _APART, ((20, 0, 60), (17, 1, 41), (12, 0, 50)), 2, 40,
        query_start=(9, 0, 48),
    ),
    _case(
        "starts_before", "rows before the first key, and rows that all keys lie before", _APART,
        ((30, 0, 60), (9, 1, 41), (20, 1, 25), (5, 0, 0)), 1, 24, query_start=(-17, -9, 30, 4), skipped=3,
    ),
    _case(
        "starts_window", "windows that end before the first key, inside and behind the keys",
        scattered_keys((33, 20), 2, 150), ((40, 0, 150), (30, 0, 150), (25, 0, 90), (20, 0, 60), (9, 0, 150)), 1, 16,
        options={**FULL, "window_left": 25, "window_right": 12}, query_start=(60, -21, 85, 90, -30),
    ),
    _case(
        "starts_right", "a bound on the right alone", _TWO, ((20, 0, 60), (30, 1, 41), (9, 0, 60), (7, 1, 30)), 1, 8,
        options={**FULL, "window_right": 3}, query_start=(31, -20, 70, 9),
    ),
    _zigzag_in_whole("starts_zigzag", "windows across the chunks of a rank", 1, 2, (150, 37), 3, 40, num_k_heads=1,
        options={**FULL, "window_left": 20, "window_right": 30}),
    _zigzag_in_whole("starts_steps", "whatever goes by positions, in all keys of a sequence", 0, 3, (61, 20, 2), 2, 24,
        options={**FULL, **_STEPS, "window_right": 20}),
    _case(
        "starts_steps_before", "slopes and masks before the first key and behind the last", _APART,
        ((33, 1, 41), (20, 0, 60), (12, 1, 20)), 2, 16, options={**FULL, **_STEPS}, query_start=(-12, 50, 37),
    ),
    _case(
        "starts_far", "starts 2^29 away", _TWO, ((20, 0, 60), (17, 1, 41), (9, 0, 31), (5, 1, 41)), 1, 16,
        options={**FULL, "window_left": 9, "window_right": INT32}, query_start=(2**29, -(2**29), 7, -3),
    ),
    *(_case(layout, f"{layout} strides", _APART, _GROUPS, 2, 72, layout=layout) for layout in LAYOUTS[1:]),
    *(
        _case(f"d{d}", f"head dim {d}", _APART, _GROUPS, 1, d, options={"causal": d % 16 == 0})
        for d in range(8, 257, 8)
    ),
    _case(
        "wild_falling_bounds", "a piece whose bounds fall",
        KeyPieces(((0, 30, 10, 45), (0, 20, 38, 25)), ((50, 3, 7), (0, 20, 9)), 100),
        ((45, 0, 45), (25, 1, 25)), 1, 40,
    ),
    _case(
        "wild_late_bounds", "a sequence without its first keys", KeyPieces(((12, 30, 50),), ((40, 0),), 60),
        ((20, 0, 50), (20, 0, 14)), 1, 40,
    ),
    _case(
        "wild_bounds", "bounds below 0 and far past k",
        KeyPieces(((-20, 10, 30), (0, 25, 2**29), (0, -7, -9)), ((3, 0), (15, 2), (0, 0)), 40),
        ((40, 0, 30), (33, 1, INT32), (9, 2, 5), (12, 1, 30)), 1, 40,
    ),
    _case(
        "wild_pieces", "pieces that begin or end outside of k",
        KeyPieces(((0, 20, 50), (0, 30, 40)), ((40, 100), (-9, 55)), 60), ((50, 0, 50), (40, 1, 40)), 1, 40,
    ),
    _case(
        "wild_rows", "rows at the ends of int32", KeyPieces(((0, 9, 30, 50),), ((INT32 - 3, 10, -INT32 - 1),), 40),
        ((50, 0, 50), (20, 0, 33)), 1, 16, options=FULL,
    ),
    _case(
        "wild_sequences", "sequence numbers out of range", _APART,
        ((20, 0, 31), (9, 2, 25), (12, -1, 60), (16, 1, 41), (3, INT32, 9), (5, -INT32 - 1, 9)), 1, 64,
    ),
    _case("wild_falling_boundaries", "boundaries of queries that fall", _APART, _GROUPS, 1, 40,
        boundaries=(0, 40, 10, 25, 65)),
    _case("wild_boundaries", "boundaries of queries past q and before it", _APART, _GROUPS, 1, 40,
        boundaries=(-9, 30, 20, INT32, 50)),
    _case("wild_one_boundary", "one boundary counts", _APART, _GROUPS, 1, 40, boundaries=(50, 40, 30, 20, -5)),
)  # fmt: skip


def segment_cases(tag: str) -> tuple[SegmentCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in SEGMENT_ATTENTION if tag in case.tags)
