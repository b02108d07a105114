"""Numerics, semantics and refusals of vk::segment_attention and its backward."""

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torch_ops
from tests import verify as every_op
from tests.attention.verify import backward, differentiate, expected, verify
from tests.testing.interpreter import with_dtypes
from tests.verify import DTYPES, GPU, HALVES, INTERPRET, flops_of, misaligned
from torch_ops import segment_attention, window_attn
from torch_ops.testing import check, check_draws, poisoned, redrawn, references
from torch_ops.testing.cases import (
    LAYOUTS,
    KeyPieces,
    SegmentCase,
    SegmentInputs,
    contiguous_keys,
    make_segment_inputs,
    scattered_keys,
    segment_cases,
    zigzag_keys,
    zigzag_segments,
)
from torch_ops.testing.tolerance import Draw

OP, BACKWARD_OP = torch.ops.vk.segment_attention, torch.ops.vk.segment_attention_backward
# On the CPU a few head dims stand for all; in the interpreter, which is slow, a few strides and scores too.
NOT_INTERPRETED = (
    r"|odd_strides|column_strided|qkv_view|head_major|softcap_full|peaked|scale|zigzag2_1|gqa7|window_beyond|sinks"
    r"|wild_one_boundary|wild_falling_boundaries|starts|starts_zigzag|starts_steps|short_chunks"
)
LEFT_OUT = r"d\d+" + NOT_INTERPRETED * INTERPRET
WIDTHS = (80, 256) if INTERPRET else (16, 80, 96, 160, 176, 240, 256)
CASES = [
    case
    for case in segment_cases("edge")
    if GPU or not re.fullmatch(LEFT_OUT, case.name) or case.name in {f"d{width}" for width in WIDTHS}
]
TWO = scattered_keys((16, 9), 3, 60, 41)
GROUPS = ((20, 0, 31), (17, 1, 25), (12, 0, 60), (16, 1, 41))

pytestmark = pytest.mark.interpret


def _case(name: str, segments: Any = GROUPS, keys: KeyPieces = TWO, heads: int = 1, dim: int = 40, **rest: Any) -> Any:
    return SegmentCase(name, "", keys, segments, heads, dim, **rest)


def _named(name: str) -> SegmentCase:
    return next(case for case in CASES if case.name == name)


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_references_agree_with_each_other(case: SegmentCase) -> None:
    """Autograd through the forward reference is the backward reference."""
    inputs = make_segment_inputs(case, torch.float64)
    by_autograd = differentiate(references.segment_attention, inputs)
    for name, tensor in backward(inputs, by_autograd["out"], by_autograd["lse"]).items():
        torch.testing.assert_close(tensor, by_autograd[name])


@pytest.mark.no_interpret
@pytest.mark.parametrize("keys", [contiguous_keys(60, 41), TWO], ids=["in order", "apart"])
@pytest.mark.parametrize("options", [{}, {"causal": False, "window_left": 9, "window_right": 4}], ids=str)
def test_the_reference_is_that_of_packed_attention(options: dict[str, Any], keys: KeyPieces) -> None:
    """For segments that see all keys of a sequence, whose keys are put in order."""
    options = {"alibi": 2, "sinks": True, "softcap": 3.0, **options}
    case = _case("packed", ((33, 0, 60), (50, 1, 41)), keys, 4, num_k_heads=2, skipped=3, padding=2, options=options)
    inputs = make_segment_inputs(case, torch.float64)
    ends = torch.tensor([0, 60, 101], dtype=torch.int32)
    rows = torch.cat([_rows_of(inputs, sequence) for sequence in range(2)])
    packed = {"causal": True, **inputs.options}
    wanted = references.window_attn(inputs.q, inputs.k[rows], inputs.v[rows], inputs.cu_seqlens_q, ends, **packed)
    for found, other in zip(inputs.call(references.segment_attention), wanted, strict=True):
        torch.testing.assert_close(found, other)


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window_left": 30},
        {"causal": False, "window_left": 9, "window_right": 14},
        {"causal": False, "window_right": 20, "dropout_p": 0.3},
        {"causal": False, "dropout_p": 0.3},
    ],
    ids=str,
)
def test_the_reference_puts_rows_where_starts_say(options: dict[str, Any]) -> None:
    """Rows cut from packed self-attention, which see their whole sequence, keep what they had."""
    drawn = {"alibi": 2, "sinks": True, "softcap": 3.0, **options}
    packed = make_segment_inputs(
        _case("packed", ((60, 0, 60), (41, 1, 41)), contiguous_keys(60, 41), 4, num_k_heads=2, options=drawn),
        torch.float64,
    )
    ends = torch.tensor([0, 60, 101], dtype=torch.int32)
    whole = references.window_attn(packed.q, packed.k, packed.v, ends, ends, **packed.options)
    cuts = ((11, 1, 3), (20, 0, 40), (30, 0, 7), (6, 1, 35))
    case = _case(
        "cut", tuple((rows, sequence, (60, 41)[sequence]) for rows, sequence, _ in cuts), TWO, 4, num_k_heads=2,
        query_start=tuple(start for _, _, start in cuts),
    )  # fmt: skip
    inputs = make_segment_inputs(case, torch.float64)
    tokens = torch.cat([torch.arange(start, start + rows) + 60 * sequence for rows, sequence, start in cuts])
    held = torch.cat([_rows_of(inputs, sequence) for sequence in range(2)])
    k, v = (rows.index_copy(0, held, own) for rows, own in ((inputs.k, packed.k), (inputs.v, packed.v)))
    found = inputs.call(
        references.segment_attention, q=packed.q[tokens], k=k, v=v, options={**packed.options, **inputs.options}
    )
    for one, other in zip(found, (whole[0][tokens], whole[1][:, tokens]), strict=True):
        torch.testing.assert_close(one, other)


def _rows_of(inputs: SegmentInputs, sequence: int, below: int = 2**31) -> Tensor:
    """Rows of k that hold the first keys of a sequence whose index tensors are well formed."""
    bounds, rows = inputs.key_bounds[sequence].tolist(), inputs.key_rows[sequence].tolist()
    held = [row + key - bounds[p] for p, row in enumerate(rows) for key in range(bounds[p], min(bounds[p + 1], below))]
    return torch.tensor(held, dtype=torch.int64, device=inputs.k.device)


def _seen_rows(inputs: SegmentInputs) -> Tensor:
    """[Tk], which rows of k some query sees; for causal calls without windows."""
    seen = torch.zeros(inputs.k.shape[0], dtype=torch.bool, device=inputs.k.device)
    lengths = inputs.cu_seqlens_q.diff().tolist()
    for length, sequence, limit in zip(lengths, inputs.key_sequence.tolist(), inputs.key_limit.tolist(), strict=True):
        if length:
            seen[_rows_of(inputs, sequence, limit)] = True
    return seen


@with_dtypes(CASES, DTYPES)
def test_agrees_with_reference(case: SegmentCase, dtype: torch.dtype, device: str) -> None:
    verify(make_segment_inputs(case, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [0, 3])
def test_agrees_at_real_shapes(rank: int, device: str) -> None:
    lengths = (4096, 1500)
    case = _case("real", zigzag_segments(rank, 4, *lengths), zigzag_keys(4, *lengths), 4, 128, num_k_heads=1)
    verify(make_segment_inputs(case, torch.bfloat16, device))


LONGEST, WIDEST = (40, 12) if INTERPRET else (200, 16 if GPU else 32)


@st.composite
def key_pieces(draw: st.DrawFn) -> KeyPieces:
    """Sequences in pieces anywhere in a buffer, which may overlap; sometimes with entries that make no sense."""
    sequences, pieces = draw(st.integers(1, 3)), draw(st.integers(1, 3 if INTERPRET else 6))
    total = draw(st.integers(1, 2 * LONGEST))
    bounds, rows = [], []
    for _ in range(sequences):
        cuts = sorted(draw(st.lists(st.integers(0, min(LONGEST, total)), min_size=pieces, max_size=pieces)))
        own = [0, *cuts]
        # A shrunk choice is the last row at which the piece lies within the buffer.
        rows.append([total - (b - a) - draw(st.integers(0, total - (b - a))) for a, b in zip(own, cuts, strict=False)])
        bounds.append(own)
    if draw(st.sampled_from([False, False, True])):
        for _ in range(draw(st.integers(1, 3))):
            # Positions past 2^29 have no promise but that nothing breaks.
            table, far = draw(st.sampled_from([(bounds, 2**29), (rows, 2**31 - 1)]))
            wild = st.one_of(st.integers(-9, LONGEST + 9), st.sampled_from([far, -far - 1, 2**20]))
            row = table[draw(st.integers(0, sequences - 1))]
            row[draw(st.integers(0, len(row) - 1))] = draw(wild)
    return KeyPieces(tuple(map(tuple, bounds)), tuple(map(tuple, rows)), total)


@st.composite
def calls(draw: st.DrawFn) -> tuple[SegmentCase, torch.dtype]:
    keys = draw(key_pieces())
    number = st.one_of(st.integers(0, len(keys.bounds) - 1), st.integers(-1, len(keys.bounds)))
    limit = st.one_of(st.integers(0, LONGEST), st.sampled_from([-3, 2**31 - 1]))
    segment = st.tuples(st.one_of(st.just(0), st.just(1), st.integers(2, LONGEST)), number, limit)
    # With few numbers eager's largest error can be small by luck, and the rule would ask the same of ours.
    most = st.integers(40, 60) if INTERPRET else st.integers(150, 200)
    segments = draw(st.lists(segment, max_size=2 if INTERPRET else 5))
    segments.insert(draw(st.integers(0, len(segments))), (draw(most), draw(number), draw(limit)))
    group, num_k_heads = draw(st.sampled_from([1, 2] if INTERPRET else [1, 2, 3, 7])), draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window_left": draw(st.sampled_from([-1, -1, 0, 5, 64, 1000])),
        "window_right": draw(st.sampled_from([-1, -1, 0, 7, 1000])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "scale": draw(st.sampled_from([None, 0.3])),
    }
    if draw(st.booleans()):
        options["alibi"] = draw(st.sampled_from([1, 2]))
    if draw(st.booleans()):
        options["sinks"] = True
    # Keys far behind would take random numbers for all keys before them.
    if draw(st.booleans()) and max(map(max, keys.bounds)) < 2**16:
        options["dropout_p"] = 0.3
    starts = None
    if draw(st.booleans()):
        # Slopes times far distances leave scores no digits.
        far = [] if "alibi" in options else [2**29, -(2**29)]
        start = st.one_of(st.integers(-LONGEST, LONGEST), st.sampled_from([0, 2 * LONGEST, *far]))
        starts = tuple(draw(start) for _ in segments)
    case = SegmentCase(
        "fuzz", "anything", keys, tuple(segments), group * num_k_heads, draw(st.integers(1, WIDEST)) * 8,
        num_k_heads=num_k_heads, skipped=draw(st.sampled_from([0, 0, 5, 40])),
        padding=draw(st.sampled_from([0, 0, 3, 40])), query_start=starts, layout=draw(st.sampled_from(LAYOUTS)),
        options=options,
    )  # fmt: skip
    return case, draw(st.sampled_from([torch.float16] if INTERPRET else DTYPES))


@given(calls(), st.integers(0, 2**16))
@hypothesis_settings(max_examples=24 if GPU else 5 if INTERPRET else 30)
def test_agrees_on_anything(call: tuple[SegmentCase, torch.dtype], seed: int) -> None:
    case, dtype = call
    verify(make_segment_inputs(case, dtype, "cuda" if GPU else "cpu", seed))


@pytest.mark.gpu
def test_thousands_of_segments_and_pieces(device: str) -> None:
    """Several steps of each search."""
    keys = scattered_keys((1, 0, 3, 2), 1, 900, 5, 1500)
    case = _case("thousands", tuple((i % 3, i % 3, 40 + i % 460) for i in range(5100)), keys, 1, 16)
    verify(make_segment_inputs(case, torch.float32, device))


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", [*segment_cases("smoke"), _named("starts_steps_before")], ids=lambda case: case.name)
def test_same_bits_every_time(case: SegmentCase, device: str) -> None:
    inputs = make_segment_inputs(case, torch.float16, device)
    every_op.assert_same_bits(lambda: differentiate(OP, inputs))


@pytest.mark.no_interpret
def test_every_call_sees_its_own_tensors(device: str) -> None:
    for seed in range(3):
        verify(make_segment_inputs(_named("zigzag2_0"), torch.float16, device, seed))


def test_every_call_reads_its_own_index_tensors(device: str) -> None:
    """Limits, pieces and sequences change in place between calls of the same tensors."""
    inputs = make_segment_inputs(_case("changed"), torch.float16, device)
    verify(inputs)
    inputs.key_limit.copy_(torch.tensor([3, 41, 50, 7]))
    inputs.key_sequence.copy_(torch.tensor([1, 1, 0, 0]))
    verify(inputs)
    inputs.key_rows.copy_(inputs.key_rows.flip(0))
    inputs.cu_seqlens_q.copy_(torch.tensor([2, 9, 9, 44, 60]))
    verify(inputs)


@pytest.mark.no_interpret
def test_every_call_reads_its_own_starts(device: str) -> None:
    """They change in place, come and go."""
    options = {"causal": False, "window_left": 9, "window_right": 14}
    case = _case("changed", query_start=(11, 30, 0, 25), options=options)
    inputs = make_segment_inputs(case, torch.float16, device)
    verify(inputs)
    inputs.options["query_start"].copy_(torch.tensor([-5, 40, 48, 3]))
    verify(inputs)
    verify(dataclasses.replace(inputs, options=options))
    verify(inputs)


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", ["limits", "limits_full", "window", "all_steps", "dropout_before", "outside"])
def test_starts_that_follow_from_limits_change_no_bits(name: str, device: str) -> None:
    case = _named(name)
    kept = [max(0, min(limit, case.keys.bounds[sequence][-1])) for _, sequence, limit in case.segments]
    starts = tuple(keys - rows for keys, (rows, _, _) in zip(kept, case.segments, strict=True))
    without, given = (
        differentiate(OP, make_segment_inputs(each, torch.float16, device))
        for each in (case, dataclasses.replace(case, query_start=starts))
    )
    for result, tensor in without.items():
        assert torch.equal(tensor, given[result]), result


@pytest.mark.no_interpret
@pytest.mark.parametrize("options", [{}, {"window_left": 20}, {"alibi": 2, "dropout_p": 0.2}], ids=str)
def test_causal_order_hides_what_a_limit_would(options: dict[str, Any], device: str) -> None:
    """Limits at the end of the rows, or of the sequence: no row sees more keys. Results differ by rounding alone."""
    first = make_segment_inputs(_case("limits", options=options), torch.float16, device)
    whole = _case("whole", tuple((rows, s, (60, 41)[s]) for rows, s, _ in GROUPS),
                  query_start=tuple(limit - rows for rows, _, limit in GROUPS), options=options)  # fmt: skip

    def draw(seed: int) -> Draw:
        inputs = redrawn(first, seed)
        limits = make_segment_inputs(whole, torch.float16, device)
        options = {**inputs.options, "query_start": limits.options["query_start"]}
        found = differentiate(OP, dataclasses.replace(inputs, key_limit=limits.key_limit, options=options))
        return found, *expected(inputs)

    check_draws(draw)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_gpu_than_the_current_one() -> None:
    for where in ("cuda:1", "cuda:0", "cuda:1"):
        verify(make_segment_inputs(_named("apart"), torch.float16, where))
    assert torch.cuda.current_device() == 0


@pytest.mark.no_interpret
def test_misaligned_tensors_after_aligned_ones_of_the_same_layout(device: str) -> None:
    inputs = make_segment_inputs(_named("apart"), torch.float16, device)
    verify(inputs)
    for name in ("q", "k", "v", "dout"):
        verify(dataclasses.replace(inputs, **{name: misaligned(getattr(inputs, name))}))
    verify(inputs)


@pytest.mark.no_interpret
def test_index_tensors_of_any_stride(device: str) -> None:
    case = dataclasses.replace(_named("many_segments"), query_start=(34, 12, -1, 0, 40, 5, 20, -9))
    inputs = make_segment_inputs(case, torch.float16, device)
    starts = inputs.options["query_start"].repeat_interleave(2)[::2]
    apart = {
        "cu_seqlens_q": inputs.cu_seqlens_q.repeat_interleave(2)[::2],
        "key_sequence": inputs.key_sequence.repeat_interleave(3)[::3],
        "key_limit": misaligned(inputs.key_limit),
        "key_bounds": inputs.key_bounds.T.contiguous().T,
        "key_rows": inputs.key_rows.repeat_interleave(2, 1)[:, ::2],
    }
    assert not any(tensor.is_contiguous() for name, tensor in apart.items() if name != "key_limit")
    assert not starts.is_contiguous()
    strided = dataclasses.replace(inputs, **apart, options={**inputs.options, "query_start": starts})
    one, other = (differentiate(OP, each) for each in (inputs, strided))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.no_interpret
def test_k_and_v_of_other_strides_than_each_other(device: str) -> None:
    """As views of one buffer [2, Tk, Hk, D], and of one with keys and values side by side."""
    inputs = make_segment_inputs(_named("apart"), torch.float16, device)
    verify(dataclasses.replace(inputs, **dict(zip("kv", torch.stack((inputs.k, inputs.v)).unbind(), strict=True))))
    verify(dataclasses.replace(inputs, **dict(zip("kv", torch.cat((inputs.k, inputs.v), 2).chunk(2, 2), strict=True))))
    verify(dataclasses.replace(inputs, v=inputs.v.transpose(0, 1).contiguous().transpose(0, 1)))


def test_nan_is_not_taken_for_a_row_without_keys(device: str) -> None:
    inputs = make_segment_inputs(_case("nan", heads=2, dim=64), torch.float16, device)
    inputs.q[2, 1] = torch.nan
    out, lse = inputs.call(OP)
    wanted = torch.zeros(out.shape[:2], dtype=torch.bool, device=device)
    wanted[2, 1] = True
    assert torch.equal(out.isnan().all(-1), wanted) and torch.equal(lse.isnan(), wanted.T)


def _assert_same_with(inputs: SegmentInputs, dirty: SegmentInputs) -> None:
    with poisoned():
        one, other = (differentiate(OP, each) for each in (inputs, dirty))
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_what_no_segment_holds_may_be_nan(device: str) -> None:
    """Rows of q in no segment, and rows of k and v of no sequence."""
    inputs, dirty = (make_segment_inputs(_named("outside"), torch.float32, device) for _ in range(2))
    for tensor in (dirty.q, dirty.dout):
        tensor[:45] = tensor[-33:] = torch.nan
    held = torch.cat([_rows_of(inputs, sequence) for sequence in range(2)])
    unheld = torch.ones(inputs.k.shape[0], dtype=torch.bool, device=device)
    unheld[held] = False
    assert unheld.sum() > 10
    dirty.k[unheld], dirty.v[unheld] = torch.nan, torch.inf
    _assert_same_with(inputs, dirty)


# Keys past the largest limit of each sequence are seen by no segment.
UNSEEN = _case("unseen", ((20, 0, 31), (0, 1, 41), (12, 0, 17), (9, 1, 20)))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2, "softcap": 3.0, "alibi": 1}], ids=str)
def test_rows_of_k_that_no_segment_sees_get_zero(options: dict[str, Any], device: str) -> None:
    inputs = make_segment_inputs(dataclasses.replace(UNSEEN, options=options), torch.float16, device)
    unseen = ~_seen_rows(inputs)
    assert unseen.sum() > 60 and (~unseen).sum() == 31 + 20
    with poisoned():
        found = differentiate(OP, inputs)
    for name in ("dk", "dv"):
        assert (found[name][unseen] == 0).all(), name
        # Dropout may leave out a key for all queries.
        assert (found[name][~unseen] != 0).float().mean() > 0.9, name


def test_rows_of_k_that_no_segment_sees_may_be_nan(device: str) -> None:
    """A buffer that is filled as tokens come holds anything behind them. Gradients there are still 0."""
    inputs, dirty = (make_segment_inputs(UNSEEN, torch.float16, device) for _ in range(2))
    unseen = ~_seen_rows(inputs)
    dirty.k[unseen], dirty.v[unseen] = torch.nan, torch.nan
    _assert_same_with(inputs, dirty)


def test_a_segment_does_not_see_past_its_limit(device: str) -> None:
    """Keys that only other segments see may hold NaN."""
    inputs, dirty = (make_segment_inputs(_case("limit"), torch.float16, device) for _ in range(2))
    past = torch.cat([_rows_of(inputs, 0)[31:], _rows_of(inputs, 1)[25:]])
    dirty.k[past] = dirty.v[past] = torch.nan
    one, other = (differentiate(OP, each) for each in (inputs, dirty))
    for name in ("out", "lse", "dq"):
        clean, found = (each[name].T if name == "lse" else each[name] for each in (one, other))
        assert torch.equal(clean[:37], found[:37]), name
        assert found[49:].isnan().any(), name


def test_a_sequence_does_not_see_what_is_wrong_in_another(device: str) -> None:
    """Their keys lie so far apart that no tile of a GPU holds both."""
    keys = KeyPieces(((0, 40, 60), (0, 11, 41)), ((0, 40), (330, 300)), 341)
    inputs, dirty = (make_segment_inputs(_case("apart", keys=keys), torch.float16, device) for _ in range(2))
    segments = [slice(0, 20), slice(20, 37), slice(37, 49), slice(49, 65)]
    wrong, right = _rows_of(inputs, 1), _rows_of(inputs, 0)
    dirty.k[wrong] = dirty.v[wrong] = torch.nan
    for rows in segments[1::2]:
        dirty.q[rows] = dirty.dout[rows] = torch.nan
    one, other = (differentiate(OP, each) for each in (inputs, dirty))
    for rows in segments[::2]:
        for name in ("out", "dq"):
            assert torch.equal(one[name][rows], other[name][rows]), name
        assert torch.equal(one["lse"][:, rows], other["lse"][:, rows])
    for name in ("dk", "dv"):
        assert torch.equal(one[name][right], other[name][right]) and other[name][wrong].isnan().any(), name


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window_left": 12}][: 1 if INTERPRET else 3], ids=str)
def test_other_segments_change_no_bits(options: dict[str, Any], device: str) -> None:
    inputs = make_segment_inputs(_case("alone", options=options), torch.float16, device)
    together = differentiate(OP, inputs)
    bounds = inputs.cu_seqlens_q.tolist()
    for index in range(len(GROUPS)):
        rows, is_other = slice(bounds[index], bounds[index + 1]), torch.arange(len(GROUPS), device=device) != index
        # The others see no key. Shapes stay, so the launch does.
        alone = dataclasses.replace(inputs, key_sequence=inputs.key_sequence.masked_fill(is_other, -1))
        found = differentiate(OP, alone)
        assert torch.equal(found["out"][rows], together["out"][rows])
        assert torch.equal(found["dq"][rows], together["dq"][rows])
        assert torch.equal(found["lse"][:, rows], together["lse"][:, rows])
        assert not found["out"][: rows.start].any() and not found["dq"][rows.stop :].any()


def test_pieces_cut_from_a_buffer_change_no_key(device: str) -> None:
    """The same keys in other pieces: the results differ by rounding alone."""
    cuts = (contiguous_keys(60, 41), zigzag_keys(3, 60, 41), TWO, scattered_keys((1, 2, 5, 3), 0, 60, 41))
    first = make_segment_inputs(_case("cut", keys=cuts[0]), torch.float16, device)
    rows = torch.cat([_rows_of(first, sequence) for sequence in range(2)])
    for keys in cuts[1 : 2 if INTERPRET else None]:

        def draw(seed: int, keys: KeyPieces = keys) -> Draw:
            inputs = redrawn(first, seed)
            held = make_segment_inputs(_case("cut", keys=keys), torch.float16, device)
            places = torch.cat([_rows_of(held, sequence) for sequence in range(2)])
            for name in ("k", "v"):
                getattr(held, name)[places] = getattr(inputs, name)[rows]
            held = dataclasses.replace(held, q=inputs.q, dout=inputs.dout, dlse=inputs.dlse)
            found = differentiate(OP, held)
            for name in ("dk", "dv"):
                found[name] = found[name][places]
            return found, *expected(inputs)

        check_draws(draw)


@pytest.mark.no_interpret
@pytest.mark.parametrize("deterministic", [True, False])
def test_either_mode_is_right(deterministic: bool, device: str) -> None:
    case = _case("modes", dim=72, options={"deterministic": deterministic})
    inputs = make_segment_inputs(case, torch.float16, device)
    verify(inputs)
    every_op.assert_same_bits(lambda: differentiate(OP, inputs))


def _backward(inputs: SegmentInputs, out: Tensor, lse: Tensor, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = {name: value for name, value in inputs.options.items() if name != "sinks"}
    tensors = inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse
    return BACKWARD_OP(*tensors, *inputs.places, **options, **more)


@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRET else DTYPES, ids=str)
@pytest.mark.parametrize("name", ["shared", "gqa3", "rows_twice", "all_steps"][: 1 if INTERPRET else 4])
def test_gradients_of_keys_in_fp32(name: str, dtype: torch.dtype, device: str) -> None:
    """The sums before they are rounded, as a sum over ranks wants them."""
    inputs = make_segment_inputs(_named(name), dtype, device)
    out, lse = inputs.call(OP)
    with poisoned():
        dq, *rounded = _backward(inputs, out, lse)
        dq_again, *wide = _backward(inputs, out, lse, float32_kv=True)
    assert torch.equal(dq, dq_again)
    for one, other, rows in zip(rounded, wide, (inputs.k, inputs.v), strict=True):
        assert one.dtype == dtype and other.dtype == torch.float32 and other.shape == rows.shape
        assert torch.equal(one, other.to(dtype))
        assert dtype == torch.float32 or not torch.equal(one.float(), other)


def test_gradients_of_keys_are_summed_in_fp32(device: str) -> None:
    """Many segments that see a key: a sum in fp16 would be off by many times what eager's fp32 sum of blocks is."""
    count = 12 if INTERPRET else 60
    first = make_segment_inputs(_case("sum", ((9, 0, 30),) * count, contiguous_keys(30), 2, 16), torch.float16, device)

    def draw(seed: int) -> Draw:
        inputs = redrawn(first, seed)
        out, lse = inputs.call(OP)
        actual = _backward(inputs, out, lse, float32_kv=True)
        results = [actual]
        for dtype in (torch.float16, torch.float64):
            tensors = (inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse)
            cast = (tensor if tensor is lse else tensor.to(dtype) for tensor in tensors)
            results.append(references.segment_attention_backward(*cast, *inputs.places, float32_kv=True))
        one, other, third = (dict(zip(("dq", "dk", "dv"), each, strict=True)) for each in results)
        return one, other, third

    check_draws(draw)


@pytest.mark.no_interpret
def test_fp64_keeps_its_own_type_for_gradients_of_keys() -> None:
    inputs = make_segment_inputs(_case("wide"), torch.float64)
    out, lse = inputs.call(OP)
    assert lse.dtype == torch.float64
    narrow, wide = _backward(inputs, out, lse), _backward(inputs, out, lse, float32_kv=True)
    assert all(one.dtype == torch.float64 and torch.equal(one, other) for one, other in zip(narrow, wide, strict=True))


@pytest.mark.no_interpret
def test_gradients_with_zero_strides(device: str) -> None:
    inputs = make_segment_inputs(_case("sum", dim=72), torch.float32, device)
    every_op.assert_expanded_gradients(lambda q: inputs.call(segment_attention, q=q), inputs.q)
    verify(dataclasses.replace(inputs, dout=inputs.dout.new_ones(()).expand_as(inputs.dout)))


@pytest.mark.no_interpret
def test_out_is_the_same_without_lse(device: str) -> None:
    inputs = make_segment_inputs(_named("outside"), torch.float16, device)
    out, lse = inputs.call(OP)
    alone, nothing = inputs.call(partial(OP, return_lse=False))
    assert torch.equal(alone, out)
    assert nothing.shape == (inputs.q.shape[1], 0) and nothing.dtype == lse.dtype


@pytest.mark.no_interpret
def test_lse_is_made_where_it_is_asked_for_or_a_gradient_may_be(device: str) -> None:
    inputs = make_segment_inputs(_case("made", dim=8), torch.float32, device)
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is OP.default:
                made.append(result[1].numel() > 0)
            return result

    v = inputs.v.clone().requires_grad_()
    with Watch():
        inputs.call(segment_attention)
        inputs.call(partial(segment_attention, return_lse=True))
        inputs.call(segment_attention, v=v)
        with torch.no_grad():
            inputs.call(segment_attention, v=v)
    assert made == [False, True, True, False]


@pytest.mark.no_interpret
def test_gradients_come_without_lse_too(device: str) -> None:
    """Captured without gradients and run with them: lse is made anew."""
    inputs = make_segment_inputs(_case("anew", dim=72), torch.float16, device)
    grads = []
    for return_lse in (True, False):
        leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in ("q", "k", "v")}
        out, _ = inputs.call(partial(OP, return_lse=return_lse), **leaves)
        grads.append(torch.autograd.grad(out, tuple(leaves.values()), inputs.dout))
    assert all(torch.equal(kept, anew) for kept, anew in zip(*grads, strict=True))


def test_only_lse_is_used(device: str) -> None:
    inputs = make_segment_inputs(_case("lse", dim=16), torch.float32, device)
    results = []
    for function, dtype in (
        (OP, torch.float32),
        (references.segment_attention, torch.float32),
        (references.segment_attention, torch.float64),
    ):
        q, k = (tensor.to(dtype).requires_grad_() for tensor in (inputs.q, inputs.k))
        _, lse = function(q, k, inputs.v.to(dtype), *inputs.places)
        dq, dk = torch.autograd.grad((lse * inputs.dlse.to(dtype)).sum(), (q, k))
        results.append({"dq": dq, "dk": dk})
    check(*results)


def test_rows_without_keys_ignore_the_gradient_of_lse(device: str) -> None:
    """Their lse is -inf; what comes back for it may be anything finite."""
    inputs = make_segment_inputs(_named("limits"), torch.float16, device)
    out, lse = inputs.call(OP)
    empty = lse == -torch.inf
    assert 0 < empty.sum() < empty.numel()
    changed = dataclasses.replace(inputs, dlse=inputs.dlse.masked_fill(empty, 1e4))
    with poisoned():
        one, other = (_backward(each, out, lse) for each in (inputs, changed))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert (one[0].transpose(0, 1)[empty] == 0).all() and (out.transpose(0, 1)[empty] == 0).all()


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "window_left": 2, "softcap": 2.0},
        {"window_left": 2, "alibi": 2, "sinks": True, "dropout_p": 0.3},
    ],
    ids=str,
)
def test_gradcheck_in_fp64(options: dict[str, Any]) -> None:
    keys = KeyPieces(((0, 2, 5, 7), (0, 0, 3, 3)), ((4, 1, 2), (0, 3, 2)), 7)
    case = _case("gradcheck", ((3, 0, 4), (0, 0, 1), (1, 1, 3), (2, 0, 7)), keys, 2, 8, num_k_heads=1, options=options)
    inputs = make_segment_inputs(case, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    if "sinks" in options:
        leaves.append(inputs.options["sinks"].requires_grad_())

    def call(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> tuple[Tensor, Tensor]:
        given = {**inputs.options, "sinks": sinks[0]} if sinks else inputs.options
        out, lse = inputs.call(OP, q=q, k=k, v=v, options=given)
        return out, lse[torch.isfinite(lse)]

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.no_interpret
def test_second_derivatives_and_tangents_are_refused(device: str) -> None:
    inputs = make_segment_inputs(_case("double", dim=8), torch.float32, device)
    every_op.assert_no_second_derivative("segment_attention", lambda q: inputs.call(segment_attention, q=q), inputs.q)
    every_op.assert_no_tangent("segment_attention", lambda q: inputs.call(segment_attention, q=q), inputs.q)


@pytest.mark.no_interpret
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_follows_the_region(dtype: torch.dtype, device: str) -> None:
    inputs = make_segment_inputs(_case("autocast", dim=64), torch.float32, device)
    q = inputs.q.clone().requires_grad_()
    with torch.autocast(device, dtype=dtype):
        out, lse = inputs.call(partial(segment_attention, return_lse=True), q=q)
    assert out.dtype == dtype and lse.dtype == torch.float32
    q_cast, k, v = (tensor.to(dtype) for tensor in (inputs.q, inputs.k, inputs.v))
    assert torch.equal(out, inputs.call(segment_attention, q=q_cast, k=k, v=v))
    out.sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32 and q.grad.isfinite().all()


@pytest.mark.no_interpret
def test_lse_comes_when_asked_for(device: str) -> None:
    inputs = make_segment_inputs(_named("whole"), torch.float16, device)
    out = inputs.call(segment_attention)
    again, lse = inputs.call(partial(segment_attention, return_lse=True))
    assert torch.equal(out, again)
    assert lse.shape == (inputs.q.shape[1], inputs.q.shape[0]) and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize("world_size", [3] if INTERPRET else [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_dropout_goes_by_positions(world_size: int, causal: bool, device: str) -> None:
    """Unit vectors for values show which weights are dropped: those of whole sequences in packed attention."""
    lengths, heads = (48, 37), 1 if INTERPRET else 2
    q, k = (torch.randn(sum(lengths), heads, 48, device=device) for _ in range(2))
    v = torch.cat([torch.eye(48, device=device)[:length] for length in lengths])[:, None].repeat(1, heads, 1)
    seed = torch.tensor([-(2**50) - 3], device=device)
    drop = {"causal": causal, "dropout_p": 0.4, "dropout_seed": seed}
    cu_seqlens = torch.tensor([0, 48, 85], dtype=torch.int32, device=device)
    whole = window_attn(q, k, v, cu_seqlens, **drop) != 0
    assert 0.5 < whole[47].float().mean() < 0.7
    keys = zigzag_keys(world_size, *lengths)
    # The queries of a segment are those before its limit.
    segments = ((11, 1, 37), (30, 0, 48), (26, 1, 37 if not causal else 30), (18, 0, 48 if not causal else 19))
    starts = (0, 48)
    queries = torch.cat([torch.arange(limit - n, limit) + starts[s] for n, s, limit in segments]).to(device)
    layout = make_segment_inputs(_case("mask", segments, keys, heads), torch.float32, device)
    held = torch.cat([_rows_of(layout, sequence) for sequence in range(2)])
    gathered = [torch.empty_like(tensor).index_copy_(0, held, tensor) for tensor in (k, v)]
    found = segment_attention(q[queries], *gathered, *layout.places, **drop) != 0
    assert torch.equal(found, whole[queries])


@pytest.mark.no_interpret
def test_dropout_draws_a_seed_where_none_is_given(device: str) -> None:
    inputs = make_segment_inputs(_case("seed"), torch.float32, device)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(inputs.call(partial(segment_attention, dropout_p=0.5)))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], inputs.call(segment_attention))


def test_wild_index_tensors_stay_inside(device: str) -> None:
    """Nothing outside of results is written, and results stay finite, whatever index tensors say."""
    inputs = make_segment_inputs(_case("wild", dim=16), torch.float32, device)
    values = torch.tensor([2**31 - 1, -(2**31), -1, 0, 5, 2**20, -(2**20), 40, 1000], dtype=torch.int32)
    windows = {"causal": False, "window_left": 9, "window_right": 2**31 - 1}
    for seed in range(4 if INTERPRET else 40):
        generator = torch.Generator().manual_seed(seed)
        wild = {}
        for name, place in zip(
            ("cu_seqlens_q", "key_sequence", "key_limit", "key_bounds", "key_rows"), inputs.places, strict=True
        ):
            drawn = values[torch.randint(len(values), place.shape, generator=generator)].to(device)
            spoiled = torch.rand(place.shape, generator=generator).to(device) < 0.5
            wild[name] = torch.where(spoiled, drawn, place)
        options: dict[str, Any] = windows if seed % 4 == 3 else {}
        if seed % 2:
            starts = values[torch.randint(len(values), inputs.key_limit.shape, generator=generator)]
            options = {**options, "query_start": starts.to(device)}
        given = dataclasses.replace(inputs, **wild, options=options)
        with poisoned():
            out, lse = given.call(OP)
            grads = _backward(given, out, lse)
        assert all(tensor.isfinite().all() for tensor in (out, *grads)), seed
        assert (lse.isfinite() | (lse == -torch.inf)).all(), seed
    if GPU:
        torch.cuda.synchronize()
    verify(inputs)


CHECKED: list[tuple[str, Any, str]] = [
    ("cu_seqlens_q", [-1, 20, 37, 49, 65], r"cu_seqlens_q\[0\] is -1, expected at least 0"),
    ("cu_seqlens_q", [0, 20, 17, 49, 65], r"cu_seqlens_q\[2\] is 17, expected at least cu_seqlens_q\[1\] = 20"),
    ("cu_seqlens_q", [0, 20, 37, 49, 66], r"cu_seqlens_q\[4\] is 66, expected at most the 65 rows there are"),
    ("key_sequence", [0, 1, 2, 1], r"key_sequence\[2\] is 2, expected from 0 to 1"),
    ("key_sequence", [0, -1, 0, 1], r"key_sequence\[1\] is -1, expected from 0 to 1"),
    ("key_limit", [31, 42, 60, 41], r"key_limit\[1\] is 42, expected from 0 to the 41 keys of sequence 1"),
    ("key_limit", [31, 25, -2, 41], r"key_limit\[2\] is -2, expected from 0 to the 60 keys of sequence 0"),
    ("key_bounds", [[0, 30, 60], [3, 9, 41]], r"key_bounds\[1, 0\] is 3, expected 0"),
    ("key_bounds", [[-2, 30, 60], [0, 9, 41]], r"key_bounds\[0, 0\] is -2, expected 0"),
    ("key_bounds", [[0, 30, 60], [0, 9, 5]], r"key_bounds\[1, 2\] is 5, expected at least key_bounds\[1, 1\] = 9"),
    ("key_bounds", [[0, 30, 60], [0, 9, 2**29 + 1]], r"key_bounds\[1, 2\] is 536870913, expected at most 536870912"),
    ("key_bounds", [[0, 30, 60], [0, 9, 109]], r"key_bounds\[1, 2\] is 109, expected at most 108, since k has 99 rows"),
    ("key_rows", [[0, 70], [30, 60]], r"key_rows\[0, 1\] is 70, expected from 0 to 69, .* 30 of the 99 rows of k"),
    ("key_rows", [[0, 62], [-1, 30]], r"key_rows\[1, 0\] is -1, expected from 0 to 90"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("name", "values", "message"), CHECKED)
def test_checked_mode_names_the_entry(name: str, values: Any, message: str, device: str) -> None:
    keys = KeyPieces(((0, 30, 60), (0, 9, 41)), ((0, 62), (31, 5)), 99)
    inputs = make_segment_inputs(_case("checked", keys=keys, dim=16), torch.float32, device)
    wrong = {name: torch.tensor(values, dtype=torch.int32, device=device)}
    with torch_ops.settings(checked=True):
        out, lse = inputs.call(partial(segment_attention, return_lse=True))
        _backward(inputs, out, lse)
        with pytest.raises(ValueError, match=f"^segment_attention: {message}"):
            inputs.call(segment_attention, **wrong)
        with pytest.raises(ValueError, match=f"^segment_attention_backward: {message}"):
            _backward(dataclasses.replace(inputs, **wrong), out, lse)
    inputs.call(segment_attention, **wrong)


@pytest.mark.parametrize("end", [2**29, 2**30, 2**31 - 65, 2**31 - 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False, "window_left": 9, "window_right": 2**31 - 1}, {"causal": False, "window_left": 9}],
    ids=("causal", "bounded", "left"),
)
def test_a_sequence_has_at_most_so_many_keys(end: int, options: dict[str, Any], device: str) -> None:
    """Kernels count positions in 32 bits, so keys behind 2^29 do not exist; the last 60 lie in k."""

    def index(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, dout, k, v = (torch.randn(rows, 4, 16, device=device) for rows in (20, 20, 60, 60))
    places = index([0, 20]), index([0]), index([end]), index([[0, end]]), index([[60 - end]])

    def results(ops: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = [tensor.to(dtype) for tensor in (q, k, v)]
        out, lse = ops.segment_attention(*inputs, *places, **options)
        grads = ops.segment_attention_backward(dout.to(dtype), None, *inputs, out, lse, *places, **options)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))

    found = results(torch.ops.vk, torch.float32)
    check(found, results(references, torch.float32), results(references, torch.float64))
    sees_keys = end == 2**29
    assert found["out"].any() == sees_keys and found["lse"].isfinite().any() == sees_keys


@pytest.mark.no_interpret
def test_checked_mode_names_a_start_out_of_range(device: str) -> None:
    inputs = make_segment_inputs(_named("whole"), torch.float32, device)
    starts = torch.zeros_like(inputs.key_limit)
    with torch_ops.settings(checked=True):
        for value in (2**29, -(2**29)):
            inputs.call(partial(segment_attention, query_start=starts.fill_(value)))
        for value in (2**29 + 1, -(2**31)):
            wrong = partial(segment_attention, query_start=starts.fill_(value))
            with pytest.raises(ValueError, match=rf"query_start\[0\] is {value}, expected at most 536870912 from 0"):
                inputs.call(wrong)


@pytest.mark.no_interpret
def test_checked_mode_takes_what_is_empty(device: str) -> None:
    """Where a piece is empty, its row may be anything."""
    for name in ("empty", "no_segments", "no_rows"):
        inputs = make_segment_inputs(_named(name), torch.float32, device)
        rows = torch.where(inputs.key_bounds.diff() > 0, inputs.key_rows, -77)
        limits = inputs.key_limit.minimum(inputs.key_bounds[inputs.key_sequence.long(), -1])
        with torch_ops.settings(checked=True):
            inputs.call(segment_attention, key_rows=rows, key_limit=limits)


INDICES = ("cu_seqlens_q", "key_sequence", "key_limit", "key_bounds", "key_rows")
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"q": lambda x: x[0]}, r"q has shape \[4, 16\], expected shape \[T, H, D\]"),
    ({"k": lambda x: x[None]}, r"k has shape \[1, 20, 2, 16\], expected shape \[T, H, D\]"),
    ({"v": lambda x: x[..., None]}, r"v has shape \[20, 2, 16, 1\], expected shape \[T, H, D\]"),
    ({"q": lambda x: x.int()}, r"q is int32, expected float16, bfloat16 or float32"),
    ({"k": lambda x: x.half()}, r"k is float16, expected float32 as q is"),
    ({"v": lambda x: x.half()}, r"v is float16, expected float32 as q is"),
    ({"k": lambda x: x.to("meta")}, r"k is on meta, expected on .* as q is"),
    ({"k": lambda x: x[..., :8]}, r"the head dimension of k is 8, expected 16 as that of q is"),
    ({"v": lambda x: x[..., :8]}, r"the head dimension of v is 8, expected 16 as that of q is"),
    (dict.fromkeys("qkv", lambda x: x[..., :12]), r"is 12, expected a multiple of 8 from 8 to 256"),
    (dict.fromkeys("qkv", lambda x: x.repeat(1, 1, 20)), r"is 320, expected .* from 8 to 256"),
    ({"q": lambda x: x[:, :3]}, r"heads of k is 2, expected a divisor of the 3 heads of q"),
    (dict.fromkeys("kv", lambda x: x[:, :0]), r"heads of k is 0, expected a divisor of the 4 heads of q"),
    (dict.fromkeys("qkv", lambda x: x[:, :0]), r"heads of q is 0, expected from 1 to 65535"),
    ({"v": lambda x: x[:5]}, r"v has shape \[5, 2, 16\], expected shape \[20, 2, 16\] as k is"),
    ({"v": lambda x: x[:, :1]}, r"v has shape \[20, 1, 16\], expected shape \[20, 2, 16\] as k is"),
    *(({name: lambda x: x.long()}, rf"{name} is int64, expected int32") for name in INDICES),
    *(({name: lambda x: x.float()}, rf"{name} is float32, expected int32") for name in INDICES),
    *(({name: lambda x: x.to("meta")}, rf"{name} is on meta, expected on .* as q is") for name in INDICES),
    ({"query_start": torch.zeros(2, dtype=torch.int64)}, r"query_start is int64, expected int32"),
    ({"query_start": torch.zeros(2)}, r"query_start is float32, expected int32"),
    ({"query_start": torch.zeros(3).int()}, r"query_start has shape \[3\], expected shape \[n\] = \[2\]"),
    ({"query_start": torch.zeros(2, 1).int()}, r"query_start has shape \[2, 1\], expected shape \[n\] = \[2\]"),
    ({"query_start": torch.zeros(2, device="meta").int()}, r"query_start is on meta, expected on .* as q is"),
    ({"query_start": torch.zeros(2).int().to_sparse()}, r"query_start is of layout .*, expected a dense tensor"),
    *(({name: None}, rf"{name} is None, expected a dense tensor") for name in (*"qkv", *INDICES)),
    *(
        ({name: lambda x: x.to_sparse()}, rf"{name} is of layout .*, expected a dense tensor")
        for name in ("q", *INDICES)
    ),
    *(({name: lambda x: x[None]}, rf"{name} has shape \[1, .*, expected") for name in INDICES),
    *(({name: lambda x: x[:0]}, rf"{name} has shape \[0.*\], expected") for name in INDICES if name != "key_bounds"),
    ({"key_sequence": lambda x: x[:1]}, r"key_sequence has shape \[1\], expected shape \[n\] = \[2\]"),
    ({"key_limit": lambda x: x.repeat(2)}, r"key_limit has shape \[4\], expected shape \[n\] = \[2\]"),
    ({"cu_seqlens_q": lambda x: x[:2]}, r"key_sequence has shape \[2\], expected shape \[n\] = \[1\]"),
    ({"key_bounds": lambda x: x[0]}, r"key_bounds has shape \[3\], expected shape \[S, P \+ 1\]"),
    ({"key_bounds": lambda x: x[:, :1]}, r"key_bounds has shape \[2, 1\], expected shape \[S, P \+ 1\] with one piece"),
    ({"key_bounds": lambda x: x[:, :2]}, r"key_rows has shape \[2, 2\], expected shape \[S, P\] = \[2, 1\]"),
    ({"key_rows": lambda x: x[:1]}, r"key_rows has shape \[1, 2\], expected shape \[S, P\] = \[2, 2\]"),
    ({"key_rows": lambda x: x.flatten()}, r"key_rows has shape \[4\], expected shape \[S, P\] = \[2, 2\]"),
    ({"scale": -1.0}, r"scale is -1.0, expected a positive number"),
    ({"scale": 0.0}, r"scale is 0.0, expected a positive number"),
    ({"scale": float("nan")}, r"scale is nan, expected a positive number"),
    ({"scale": torch.tensor(0.5)}, r"scale is a tensor, expected a number"),
    ({"scale": True}, r"scale is True, expected a number"),
    ({"window_left": -2}, r"window_left is -2, expected -1 \(unbounded\) or a number of keys"),
    ({"window_right": -5}, r"window_right is -5, expected -1 \(unbounded\) or a number of keys"),
    ({"window_left": True}, r"window_left is True, expected an integer"),
    ({"window_right": 3.0}, r"window_right is 3.0, expected an integer"),
    ({"softcap": -3.0}, r"softcap is -3.0, expected 0 \(off\) or a positive number"),
    ({"softcap": torch.tensor(5.0)}, r"softcap is a tensor, expected a number"),
    ({"softcap": False}, r"softcap is False, expected a number"),
    ({"causal": 1}, r"causal is 1, expected True or False"),
    ({"deterministic": None}, r"deterministic is None, expected True or False"),
    ({"return_lse": 1}, r"return_lse is 1, expected True or False"),
    ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \[3\], expected shape \[H\] = \[4\] or one row"),
    ({"alibi_slopes": torch.ones(3, 4)}, r"alibi_slopes has shape \[3, 4\], expected .*\[2, 4\]"),
    ({"alibi_slopes": torch.ones(4).half()}, r"alibi_slopes is float16, expected float32"),
    ({"alibi_slopes": torch.ones(4, device="meta")}, r"alibi_slopes is on meta, expected on .* as q is"),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, r"alibi_slopes has requires_grad=True"),
    ({"sinks": torch.ones(3)}, r"sinks has shape \[3\], expected shape \[H\] = \[4\]"),
    ({"sinks": torch.ones(4).half()}, r"sinks is float16, expected float32 as q is"),
    ({"dropout_p": 1.0}, r"dropout_p is 1.0, expected a probability from 0 to below 1"),
    ({"dropout_p": -0.1}, r"dropout_p is -0.1, expected a probability"),
    ({"dropout_p": True}, r"dropout_p is True, expected a number"),
    ({"dropout_seed": torch.tensor(3)}, r"dropout_seed is int64 of \[\], expected int64 of shape \[1\]"),
    ({"dropout_seed": torch.tensor([3.0])}, r"dropout_seed is float32 of \[1\], expected int64 of shape \[1\]"),
]


def _good(device: str) -> dict[str, Any]:
    index = partial(torch.tensor, dtype=torch.int32, device=device)
    return {
        "q": torch.randn(10, 4, 16, device=device),
        "k": torch.randn(20, 2, 16, device=device),
        "v": torch.randn(20, 2, 16, device=device),
        "cu_seqlens_q": index([0, 4, 10]),
        "key_sequence": index([1, 0]),
        "key_limit": index([5, 9]),
        "key_bounds": index([[0, 3, 9], [0, 6, 8]]),
        "key_rows": index([[0, 3], [9, 15]]),
    }


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    every_op.assert_refuses(segment_attention, _good(device), changes, message)


@pytest.mark.no_interpret
def test_refuses_dropout_without_a_seed(device: str) -> None:
    """The op does; the function draws a seed."""
    message = r"dropout_seed is None, expected an int64 tensor of shape \[1\] where dropout_p is not 0"
    every_op.assert_refuses(OP, _good(device), {"dropout_p": 0.5}, message)


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dout": torch.zeros(3, 4, 16)}, r"dout has shape \[3, 4, 16\], expected shape \[10, 4, 16\] as q is"),
        ({"dout": torch.zeros(10, 4, 16).half()}, r"dout is float16, expected float32 as q is"),
        ({"lse": torch.zeros(4, 10).half()}, r"lse is float16, expected float32"),
        ({"lse": torch.zeros(10, 4)}, r"lse has shape \[10, 4\], expected shape \[H, T\] = \[4, 10\]"),
        ({"out": None}, r"out is None, expected a dense tensor"),
        ({"lse": None}, r"lse is None, expected a dense tensor"),
        ({"dlse": torch.zeros(10, 4)}, r"dlse has shape \[10, 4\], expected shape \[H, T\] = \[4, 10\]"),
        ({"k": lambda x: x[:, :, :8]}, r"the head dimension of k is 8, expected 16"),
        ({"key_rows": lambda x: x[:1]}, r"key_rows has shape \[1, 2\], expected shape \[S, P\] = \[2, 2\]"),
        ({"query_start": torch.zeros(3).int()}, r"query_start has shape \[3\], expected shape \[n\] = \[2\]"),
        ({"query_start": torch.zeros(2)}, r"query_start is float32, expected int32"),
        ({"query_start": torch.zeros(2, device="meta").int()}, r"query_start is on meta, expected on .* as q is"),
        ({"window_left": -2}, r"window_left is -2, expected -1"),
        ({"dropout_p": 0.5}, r"dropout_seed is None, expected an int64 tensor of shape \[1\]"),
    ],
)
def test_backward_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    good = _good(device)
    out, lse = OP(**good)
    given = {"dout": good["q"], "dlse": None, **good, "out": out, "lse": lse}
    every_op.assert_refuses(BACKWARD_OP, given, changes, message)


def _pairs(case: SegmentCase, seen: Any) -> int:
    """The pairs of a query and a key for which `seen` (position, key) holds."""
    pairs = 0
    for index, (queries, sequence, limit) in enumerate(case.segments):
        kv_len = max(0, min(limit, case.keys.bounds[sequence][-1]))
        start = kv_len - queries if case.query_start is None else case.query_start[index]
        positions = range(start, start + queries)
        pairs += sum(bool(seen(position, key)) for position in positions for key in range(kv_len))
    return pairs


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, lambda position, key: key <= position),
        ({"causal": False}, lambda position, key: True),
        ({"window_left": 7}, lambda position, key: position - 7 <= key <= position),
        (
            {"causal": False, "window_left": 3, "window_right": 2},
            lambda position, key: position - 3 <= key <= position + 2,
        ),
    ],
    ids=("causal", "full", "left", "window"),
)
@pytest.mark.parametrize("starts", [None, (45, 3, -4, -13, 20)], ids=("limits", "starts"))
def test_flops_are_exact(options: dict[str, Any], seen: Any, starts: tuple[int, ...] | None, device: str) -> None:
    case = dataclasses.replace(_named("limits"), options=options, query_start=starts)
    inputs = make_segment_inputs(case, torch.float32, device)
    q = inputs.q.requires_grad_()
    flops, (out, _) = flops_of(lambda: inputs.call(OP))
    assert flops == 4 * 1 * 40 * _pairs(case, seen)
    assert flops_of(lambda: out.sum().backward())[0] == 10 * 1 * 40 * _pairs(case, seen)
    assert q.grad is not None


@pytest.mark.no_interpret
def test_flops_of_fake_lengths_are_a_bound() -> None:
    with torch._subclasses.FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, k = torch.empty(40, 2, 16), torch.empty(70, 2, 16)
        index = partial(torch.empty, dtype=torch.int32)
        places = index(4), index(3), index(3), index(2, 5), index(2, 4)
        OP(q, k, k, *places)
        OP(q, k, k, *places, query_start=index(3))
    assert counter.get_total_flops() == 2 * (4 * 2 * 16 * 40 * 70)


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_only_where_allowed(allowed: bool, device: str, matmul: Any) -> None:
    inputs = make_segment_inputs(_case("tf32", ((200, 0, 256),), contiguous_keys(256), 1, 64), torch.float32, device)
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    out = inputs.call(segment_attention)
    exact, _ = references.segment_attention(*(t.double() for t in (inputs.q, inputs.k, inputs.v)), *inputs.places)
    error = ((out - exact).norm() / exact.norm()).item()
    assert (error > 1e-5) == allowed, error


@pytest.mark.gpu
def test_no_call_waits_for_the_device(device: str) -> None:
    inputs = make_segment_inputs(_named("apart"), torch.bfloat16, device)
    q = inputs.q.requires_grad_()
    every_op.assert_waits_for_nothing(lambda: inputs.call(segment_attention, q=q).backward(inputs.dout))


@pytest.mark.gpu
def test_a_captured_graph_reads_other_limits_and_pieces(device: str) -> None:
    """Index tensors are filled anew between replays."""
    inputs = make_segment_inputs(_case("replayed"), torch.float16, device)
    leaves = [getattr(inputs, name).requires_grad_() for name in ("q", "k", "v")]

    def step() -> tuple[Tensor, ...]:
        out = inputs.call(segment_attention)
        return out, *torch.autograd.grad(out, leaves, inputs.dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for name in ("apart", "changed", "few"):
        if name == "changed":
            inputs.key_limit.copy_(torch.tensor([3, 41, 50, 7]))
            inputs.key_sequence.copy_(torch.tensor([1, 1, 0, 0]))
            inputs.cu_seqlens_q.copy_(torch.tensor([2, 9, 9, 44, 60]))
        elif name == "few":
            inputs.cu_seqlens_q.copy_(torch.tensor([0, 65, 0, 0, 0]))
            inputs.key_bounds.copy_(inputs.key_bounds.minimum(torch.tensor(33, device=device)))
            inputs.key_rows.copy_(inputs.key_rows.flip(1))
        graph.replay()
        for found, wanted in zip(captured, step(), strict=True):
            assert torch.equal(found, wanted), name


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements(device: str) -> None:
    """A sequence's first half, and a segment, lie past 2^31 elements of q, k, v and every gradient."""
    window = 300
    # In the small tensors, rows of the whole ones side by side.
    keys = KeyPieces(((0, window, 2 * window), (0, 0, 0)), ((window, 0), (0, 0)), 2 * window)
    segments = ((window, 0, window), (0, 1, 9), (window, 0, 2 * window))
    inputs = make_segment_inputs(_case("large", segments, keys, heads=16, dim=128), torch.bfloat16, device)
    total = 2**31 // (16 * 128) + 3 * window
    own = torch.cat((torch.arange(5, 5 + window), torch.arange(total - window, total))).to(device)
    q, k, v, dout = (
        torch.zeros(total, 16, 128, device=device, dtype=torch.bfloat16).index_copy_(0, own, getattr(inputs, name))
        for name in ("q", "k", "v", "dout")
    )
    assert q[: total - window].numel() > 2**31
    index = partial(torch.tensor, dtype=torch.int32, device=device)
    cu_seqlens_q = index([5, 5 + window, total - window, total])
    places = (cu_seqlens_q, *inputs.places[1:4], index([[total - window, 5], [0, 0]]))
    with poisoned():
        out, lse = OP(q, k, v, *places)
        dlse = torch.zeros_like(lse).index_copy_(1, own, inputs.dlse)
        grads = BACKWARD_OP(dout, dlse, q, k, v, out, lse, *places)
    for whole in (out, *grads):
        assert not whole[:5].any() and not whole[5 + window : total - window].any()
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    check({**{name: whole[own] for name, whole in found.items()}, "lse": lse[:, own]}, *expected(inputs))


@pytest.mark.gpu
@pytest.mark.large
def test_a_row_stride_beyond_two_billion(device: str) -> None:
    """Rows so far apart that offsets within one tile pass 2^31 elements."""
    stride = 2**26
    storage = torch.empty(stride * 40 + 64, device=device, dtype=torch.float16)
    q = storage.as_strided((40, 1, 64), (stride, 64, 1))
    q.copy_(torch.randn(40, 1, 64))
    compact = q.contiguous()
    places = make_segment_inputs(_case("strided", ((40, 0, 40),), scattered_keys((16,), 0, 40), 1, 64), q.dtype, device)
    assert torch.equal(
        segment_attention(q, q, q, *places.places), segment_attention(compact, compact, compact, *places.places)
    )
