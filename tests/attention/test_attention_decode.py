"""Numerics, semantics and refusals of vk::attention_decode."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ops
from tests import verify as every_op
from tests.attention.verify import verify_decode
from tests.testing.interpreter import with_dtypes
from tests.verify import DTYPES, GPU, HALVES, INTERPRET, flops_of, misaligned
from torch_ops import attention_decode, rms_norm, window_attn
from torch_ops.testing import check_draws, references
from torch_ops.testing.cases import (
    DECODE_LAYOUTS,
    DecodeCase,
    DecodeInputs,
    cumulative,
    decode_cases,
    make_decode_inputs,
)
from torch_ops.testing.tolerance import Draw

CASES = decode_cases("edge")
OP = torch.ops.vk.attention_decode
CACHES, PREFIXES = ("k_cache", "v_cache"), ("prefix_k", "prefix_v")

pytestmark = pytest.mark.interpret


def _case(name: str, **changes: Any) -> DecodeCase:
    return dataclasses.replace(next(case for case in CASES if case.name == name), **changes)


@with_dtypes(CASES, DTYPES)
def test_agrees_with_reference(case: DecodeCase, dtype: torch.dtype, device: str) -> None:
    verify_decode(make_decode_inputs(case, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama_b4_16384", "ragged_b16", "prefix_b64_8192", "llama_b16_8192_pages_16"])
def test_agrees_at_real_shapes(name: str, device: str) -> None:
    case = next(case for case in decode_cases("bench") if case.name == name)
    verify_decode(make_decode_inputs(dataclasses.replace(case, num_heads=8, num_k_heads=2), torch.bfloat16, device))


LONGEST = 60 if INTERPRET else 300


@st.composite
def calls(draw) -> tuple[DecodeCase, torch.dtype]:
    prefixes = draw(st.lists(st.integers(0, LONGEST), max_size=2))
    count = draw(st.integers(1, 2 if INTERPRET else 3)) * max(1, len(prefixes))
    lengths = draw(st.lists(st.one_of(st.just(0), st.integers(0, LONGEST)), min_size=count, max_size=count))
    group, num_k_heads = draw(st.sampled_from([1, 2, 3, 7, 8])), draw(st.integers(1, 2))
    invariant = draw(st.booleans())
    options = {
        "causal": draw(st.sampled_from([True, True, False])),
        "window_left": draw(st.sampled_from([-1, -1, 0, 5, 64, 1000])),
        "window_right": draw(st.sampled_from([-1, -1, 0, 7])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "batch_invariant": invariant,
        "num_splits": 0 if invariant else draw(st.sampled_from([0, 0, 1, 2, 5, 20])),
    }
    case = DecodeCase(
        "fuzz", "anything", tuple(lengths), max(lengths) + draw(st.integers(0, 20)), group * num_k_heads, num_k_heads,
        draw(st.sampled_from([8, 40, 64, 72, 80, 128])), queries=draw(st.sampled_from([1, 1, 2, 5, 16])),
        page_size=draw(st.sampled_from([0, 16, 48, 64])), prefixes=tuple(prefixes),
        prefix_capacity=max(prefixes, default=0) + draw(st.integers(0, 9)),
        layout=draw(st.sampled_from(DECODE_LAYOUTS)), cache_layout=draw(st.sampled_from(DECODE_LAYOUTS)),
        cache_dtype=draw(st.sampled_from([None, None, torch.float16, torch.float32])),
        alibi=draw(st.sampled_from(["", "", "heads", "batch"])), sinks=draw(st.booleans()), options=options,
    )  # fmt: skip
    return case, draw(st.sampled_from([torch.float16] if INTERPRET else DTYPES))


@given(calls(), st.integers(0, 2**16))
@hypothesis_settings(max_examples=24 if GPU else 6 if INTERPRET else 60)
def test_agrees_on_anything(call: tuple[DecodeCase, torch.dtype], seed: int) -> None:
    case, dtype = call
    verify_decode(make_decode_inputs(case, dtype, "cuda" if GPU else "cpu", seed))


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", decode_cases("smoke"), ids=lambda case: case.name)
def test_same_bits_every_time(case: DecodeCase, device: str) -> None:
    inputs = make_decode_inputs(case, torch.float16, device)
    for first, second in zip(inputs.call(OP), inputs.call(OP), strict=True):
        assert torch.equal(first, second)


@pytest.mark.skipif(not (INTERPRET or GPU), reason="explains kernels")
@pytest.mark.parametrize("splits", [1, 3])
def test_explain_names_the_kernel_that_adds_up(splits: int, device: str) -> None:
    inputs = make_decode_inputs(_case("split"), torch.float16, device)
    report: Any = inputs.call(partial(torch_ops.explain, attention_decode), num_splits=splits)
    assert sum(report["splits"].values()) == splits
    assert ("attention_decode_combine" in report["kernels"]) == (splits > 1)


def test_every_call_sees_its_own_tensors(device: str) -> None:
    for seed in range(3):
        verify_decode(make_decode_inputs(_case("pages_16"), torch.float16, device, seed))


def test_misaligned_tensors_after_aligned_ones_of_the_same_layout(device: str) -> None:
    inputs = make_decode_inputs(_case("split"), torch.float16, device)
    verify_decode(inputs)
    for name in ("q", "k_cache", "v_cache"):
        aligned = getattr(inputs, name)
        shifted = misaligned(aligned)
        verify_decode(dataclasses.replace(inputs, **{name: shifted}))


@pytest.mark.parametrize("queries", [1, 5])
def test_is_the_end_of_a_causal_prefill(queries: int, device: str) -> None:
    """The result equals attention over all tokens at once, for the last tokens of each sequence."""
    lengths = (45, 70)
    case = _case("one_token", lengths=lengths, queries=queries)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    rows = torch.tensor([[end - queries + i for i in range(queries)] for end in ends], device=device)

    def draw(seed: int) -> Draw:
        inputs = make_decode_inputs(case, torch.float32, device, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        before = torch.randn(sum(lengths), case.num_heads, case.head_dim, generator=generator).to(device)
        for index, end in enumerate(ends):
            before[end - queries : end] = inputs.q[index].transpose(0, 1)
        k, v = (
            torch.cat([cache[index, :, :length].transpose(0, 1) for index, length in enumerate(lengths)])
            for cache in (inputs.k_cache, inputs.v_cache)
        )

        def last(function: Any, dtype: torch.dtype) -> dict[str, Tensor]:
            out, lse = function(before.to(dtype), k.to(dtype), v.to(dtype), cumulative(lengths, device), causal=True)
            return {"out": out[rows].transpose(1, 2), "lse": lse[:, rows].transpose(0, 1)}

        decoded = dict(zip(("out", "lse"), inputs.call(OP), strict=True))
        prefilled = last(lambda *args, **options: window_attn(*args, **options, return_lse=True), torch.float32)
        return decoded, prefilled, last(references.window_attn, torch.float64)

    check_draws(draw)


def _invariant(inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    return inputs.call(OP, batch_invariant=True)


# One, some and all of the parts that a cache may be cut into.
@pytest.mark.parametrize(
    ("length", "sinks"),
    [(40, False), (700, True), (1500, False)] if INTERPRET else itertools.product([40, 700, 1500], [False, True]),
)
def test_a_sequence_has_the_same_bits_in_any_batch_and_cache(length: int, sinks: bool, device: str) -> None:
    lengths = (length, 33, 1000, 0, 1500, 1, 512)
    case = _case("one_token", lengths=lengths, capacity=1500, queries=2, sinks=sinks, head_dim=16)
    many = make_decode_inputs(case, torch.float16, device)
    out, lse = _invariant(many)
    one = {name: getattr(many, name)[:1] for name in ("q", "k_cache", "v_cache", "cache_seqlens")}
    alone = dataclasses.replace(many, **one)
    for capacity in (length, length + 100, 1500):
        caches = {name: one[name][:, :, :capacity] for name in ("k_cache", "v_cache")}
        smaller, smaller_lse = _invariant(dataclasses.replace(alone, **caches))
        assert torch.equal(smaller[0], out[0]) and torch.equal(smaller_lse[0], lse[0]), capacity
    for page_size in (16, 64):
        pages = -(-1500 // page_size)
        padding = (0, 0, 0, pages * page_size - 1500)
        paged = {
            name: torch.nn.functional.pad(one[name], padding)[0].unflatten(1, (pages, page_size)).transpose(0, 1)
            for name in ("k_cache", "v_cache")
        }
        table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        in_pages, lse_in_pages = _invariant(dataclasses.replace(alone, **paged, block_table=table))
        assert torch.equal(in_pages[0], out[0]) and torch.equal(lse_in_pages[0], lse[0]), page_size


def test_a_sequence_has_the_same_bits_among_any_samples_of_its_prefix(device: str) -> None:
    case = _case("prefix", lengths=(40, 33, 0, 17), prefixes=(600,), prefix_capacity=600, head_dim=16)
    inputs = make_decode_inputs(case, torch.float16, device)
    out, lse = _invariant(inputs)
    alone = {name: getattr(inputs, name)[:1] for name in ("q", "k_cache", "v_cache", "cache_seqlens")}
    out_alone, lse_alone = _invariant(dataclasses.replace(inputs, **alone))
    assert torch.equal(out_alone[0], out[0]) and torch.equal(lse_alone[0], lse[0])


def test_a_prefix_is_as_if_it_were_in_the_cache(device: str) -> None:
    def draw(seed: int) -> Draw:
        inputs = make_decode_inputs(_case("prefix", queries=2), torch.float32, device, seed)
        assert inputs.prefix_k is not None and inputs.prefix_v is not None
        caches = {
            name: torch.cat((prefix.expand(4, -1, -1, -1), getattr(inputs, name)), 2)
            for name, prefix in (("k_cache", inputs.prefix_k), ("v_cache", inputs.prefix_v))
        }
        joined = dataclasses.replace(
            inputs, **caches, prefix_k=None, prefix_v=None, cache_seqlens=inputs.cache_seqlens.clamp_min(2) + 50
        )
        inputs = dataclasses.replace(inputs, cache_seqlens=inputs.cache_seqlens.clamp_min(2))
        return (
            dict(enumerate(inputs.call(OP))),
            dict(enumerate(joined.call(references.attention_decode))),
            dict(enumerate(joined.to(torch.float64).call(references.attention_decode))),
        )

    check_draws(draw)


def test_nan_is_not_taken_for_a_row_without_keys(device: str) -> None:
    inputs = make_decode_inputs(_case("split"), torch.float16, device)
    inputs.q[1, 0] = torch.nan
    out, lse = inputs.call(OP)
    expected = torch.zeros(2, 2, 1, dtype=torch.bool, device=device)
    expected[1, 0] = True
    assert torch.equal(out.isnan().all(-1), expected) and torch.equal(lse.isnan(), expected)


@pytest.mark.parametrize("layout", DECODE_LAYOUTS)
def test_out_lies_in_memory_as_q_does(layout: str, device: str) -> None:
    inputs = make_decode_inputs(_case("bshd", layout=layout), torch.float16, device)
    out, lse = inputs.call(OP)
    order = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}.get(layout, (0, 1, 2, 3))
    assert out.permute(order).is_contiguous() and lse.is_contiguous()
    assert lse.dtype == torch.float32 and lse.shape == inputs.q.shape[:3]


def test_lse_comes_when_asked_for(device: str) -> None:
    inputs = make_decode_inputs(_case("one_token"), torch.float16, device)
    out = inputs.call(attention_decode)
    again, lse = inputs.call(attention_decode, return_lse=True)
    assert torch.equal(out, again) and lse.shape == out.shape[:3]


class _Seeing(TorchDispatchMode):
    """Where the tensors of a call lie when it reaches the op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is OP.default:
            self.addresses = {each.data_ptr() for each in args if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_casts_queries_and_no_cache(dtype: torch.dtype, cache_dtype: torch.dtype, device: str) -> None:
    inputs = make_decode_inputs(_case("cache_fp32"), torch.float32, device)
    caches = {name: getattr(inputs, name).to(cache_dtype) for name in CACHES}
    caches |= {name: cache[:1, :, :6] for name, cache in zip(PREFIXES, caches.values(), strict=True)}
    with torch.autocast(device, dtype=dtype):
        out = inputs.call(attention_decode, **caches)
        with _Seeing() as seeing:
            inputs.call(attention_decode, **caches)
    assert out.dtype == dtype
    assert torch.equal(out, inputs.call(attention_decode, q=inputs.q.to(dtype), **caches))
    assert {cache.data_ptr() for cache in caches.values()} <= seeing.addresses, "a cache was copied"


@pytest.mark.parametrize("empty", ["sequences", "queries", "keys", "pages"])
def test_nothing_to_attend_to(empty: str, device: str) -> None:
    inputs = make_decode_inputs(_case("pages_16" if empty == "pages" else "one_token"), torch.float16, device)
    changed: dict[str, Tensor] = {
        "sequences": {name: getattr(inputs, name)[:0] for name in ("q", *CACHES, "cache_seqlens")},
        "queries": {"q": inputs.q[:, :, :0]},
        "keys": {name: getattr(inputs, name)[:, :, :0] for name in CACHES},
        "pages": {"block_table": getattr(inputs, "block_table", None)},
    }[empty]
    if empty == "pages":
        changed["block_table"] = changed["block_table"][:, :0]
    out, lse = inputs.call(OP, **changed)
    assert out.shape == changed.get("q", inputs.q).shape and lse.shape == out.shape[:3]
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("values", [(-5, 40), (2**31 - 1, 7), (-(2**31), 0)], ids=str)
def test_wild_lengths_stay_inside(values: tuple[int, ...], device: str) -> None:
    inputs = make_decode_inputs(_case("split"), torch.float32, device)
    out, _ = inputs.call(OP, cache_seqlens=torch.tensor(values, dtype=torch.int32, device=device))
    clamped = torch.tensor(values).clamp(0, 90).int().to(device)
    assert torch.equal(out, inputs.call(OP, cache_seqlens=clamped)[0])


@pytest.mark.parametrize("name", ["pages_16", "pages_128"])
def test_wild_pages_stay_inside(name: str, device: str) -> None:
    inputs = make_decode_inputs(_case(name), torch.float32, device)
    assert inputs.block_table is not None
    wild = inputs.block_table.clone()
    wild[0, 0], wild[1, 0] = 2**31 - 1, -7
    out, _ = inputs.call(OP, block_table=wild)
    clamped = wild.clamp(0, inputs.k_cache.shape[0] - 1)
    assert torch.equal(out, inputs.call(OP, block_table=clamped)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cache_seqlens": (97, 33, 0)},
            r"cache_seqlens\[0\] is 97, expected from 0 to 96, the keys there is room for",
        ),
        ({"cache_seqlens": (90, -1, 0)}, r"cache_seqlens\[1\] is -1, expected from 0 to 96"),
        ({"block_table": 20}, r"block_table\[1, 0\] is 20, expected from 0 to 19"),
    ],
    ids=str,
)
def test_checked_mode_names_the_entry(changes: dict[str, Any], message: str, device: str) -> None:
    inputs = make_decode_inputs(_case("pages_16"), torch.float32, device)
    if "block_table" in changes:
        assert inputs.block_table is not None
        table = inputs.block_table.clone()
        # The pages of a sequence that it does not use may be anything.
        table[1, 0], table[2, 0] = changes["block_table"], -1
        wrong = {"block_table": table}
    else:
        wrong = {"cache_seqlens": torch.tensor(changes["cache_seqlens"], dtype=torch.int32, device=device)}
    with torch_ops.settings(checked=True), pytest.raises(ValueError, match=message):
        inputs.call(OP, **wrong)
    inputs.call(OP, **wrong)


def test_weights_add_up_to_one_at_any_score(device: str) -> None:
    """An lse of 7200 is off by 2^-12 once rounded; weights made of it would be too."""
    q, k, v = (torch.full((1, heads, rows, 64), 30.0, device=device) for heads, rows in ((2, 1), (1, 40), (1, 40)))
    out, _ = OP(q, k, v.fill_(1), torch.tensor([40], dtype=torch.int32, device=device))
    assert (out - 1).abs().max() < 2**-18


def test_checked_mode_asks_for_no_page_before_the_window(device: str) -> None:
    q = torch.randn(1, 2, 2, 16, device=device)
    k, v = torch.randn(2, 4, 1, 16, 16, device=device).unbind()
    lengths = torch.tensor([50], dtype=torch.int32, device=device)
    # Queries stand at 48 and 49: with 16 keys before it the first sees from 32 on, with 17 from 31.
    table = torch.tensor([[-1, -1, 1, 2]], dtype=torch.int32, device=device)
    call = partial(OP, q, k, v, lengths, table)
    with torch_ops.settings(checked=True):
        out, _ = call(window_left=16)
        with pytest.raises(ValueError, match=r"block_table\[0, 1\] is -1, expected from 0 to 3"):
            call(window_left=17)
    expected, _ = OP(q, k, v, lengths, table.clamp(min=0), window_left=16)
    assert torch.equal(out, expected)


@pytest.mark.no_interpret
def test_a_gradient_is_refused(device: str) -> None:
    inputs = make_decode_inputs(_case("one_token"), torch.float32, device)
    out, _ = inputs.call(OP, q=inputs.q.requires_grad_())
    with pytest.raises(NotImplementedError, match="vk::attention_decode has no derivative: it is for inference"):
        out.sum().backward()


@pytest.mark.no_interpret
def test_a_tangent_is_refused(device: str) -> None:
    inputs = make_decode_inputs(_case("one_token"), torch.float32, device)
    every_op.assert_no_tangent("attention_decode", lambda q: inputs.call(attention_decode, q=q), inputs.q)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"q": lambda x: x[0]}, r"q has shape \[4, 3, 16\], expected shape \[B, H, Sq, D\]"),
    ({"q": lambda x: x.int()}, r"q is int32, expected float16, bfloat16 or float32"),
    ({"q": lambda x: x.repeat(1, 1, 6, 1)}, r"number of queries of q is 18, expected from 0 to 16"),
    ({"q": lambda x: x[..., :12]}, r"head dimension of q is 12, expected a multiple of 8"),
    ({"k_cache": lambda x: x[0]}, r"k_cache has .*, expected shape \[B, Hk, S, D\]"),
    (dict.fromkeys(CACHES, lambda x: x[..., :8]), r"head dimension of k_cache is 8, expected 16 as that of q is"),
    ({"k_cache": lambda x: x.repeat(1, 1, 1, 2)[..., ::2]}, r"k_cache has .*, expected contig"),
    ({"v_cache": lambda x: x[:, :, :5]}, r"v_cache.* expected shape .* as k_cache is"),
    ({"v_cache": lambda x: x.half()}, r"v_cache is float16, expected float32 as k_cache is"),
    ({"q": lambda x: x[:, :3]}, r"heads of k_cache is 2, expected a divisor of the 3 heads of q"),
    (
        dict.fromkeys(CACHES, lambda x: x[:1]),
        r"k_cache has .*, expected 2 sequences as q is, unless block_table is given",
    ),
    ({"cache_seqlens": lambda x: x[:1]}, r"cache_seqlens.* expected shape \[2\]"),
    ({"cache_seqlens": lambda x: x.long()}, r"cache_seqlens is int64, expected int32"),
    ({"cache_seqlens": lambda x: x.to("meta")}, r"cache_seqlens is on meta, expected on"),
    ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, r"block_table has .*, expected shape \[B, pages\]"),
    ({"block_table": torch.zeros(2, 2).long()}, r"block_table is int64, expected int32"),
    (
        {"block_table": torch.zeros(2, 2, dtype=torch.int32), **dict.fromkeys(CACHES, lambda x: x[:, :, :20])},
        r"the page size of k_cache is 20, expected a multiple of 16",
    ),
    (
        {"block_table": torch.zeros(2, 2, dtype=torch.int32), **dict.fromkeys(CACHES, lambda x: x[:0])},
        r"k_cache has .*, expected one page or more",
    ),
    ({"scale": -1.0}, r"scale is -1.0, expected a positive number"),
    ({"scale": torch.tensor(0.5)}, r"scale is a tensor, expected a number"),
    ({"window_left": -2}, r"window_left is -2, expected -1 \(unbounded\) or a number of keys"),
    ({"softcap": -3.0}, r"softcap is -3.0, expected 0 \(off\) or a positive number"),
    ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \[3\], expected shape \[H\] ="),
    ({"alibi_slopes": torch.ones(4).half()}, r"alibi_slopes is float16, expected float32"),
    ({"sinks": torch.ones(3)}, r"sinks has shape \[3\], expected shape \[H\] = \[4\]"),
    ({"sinks": torch.ones(4).half()}, r"sinks is .*, expected float32 as q is"),
    ({"prefix_k": torch.zeros(2, 2, 32, 16)}, r"prefix_k is a tensor, expected None where prefix_v is"),
    (
        dict.fromkeys(PREFIXES, torch.zeros(3, 2, 32, 16)),
        r"the number of prefixes of prefix_k is 3, expected a divisor of the 2 sequences",
    ),
    (
        dict.fromkeys(PREFIXES, torch.zeros(2, 1, 32, 16)),
        r"the number of heads of prefix_k is 1, expected 2 as of k_cache",
    ),
    ({"num_splits": 2000}, r"num_splits is 2000, expected 0 \(chosen\) or up to 1024"),
    ({"num_splits": 2, "batch_invariant": True}, r"num_splits is .*, expected 0 with batch_invariant"),
    ({"v_cache": None}, r"v_cache is None, expected a dense tensor"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    good = {
        "q": torch.randn(2, 4, 3, 16, device=device),
        "k_cache": torch.randn(2, 2, 32, 16, device=device),
        "v_cache": torch.randn(2, 2, 32, 16, device=device),
        "cache_seqlens": torch.tensor([20, 32], dtype=torch.int32, device=device),
    }
    every_op.assert_refuses(attention_decode, good, changes, message)


def test_flops_are_those_of_all_there_is_room_for(device: str) -> None:
    inputs = make_decode_inputs(_case("prefix"), torch.float32, device)
    assert flops_of(lambda: inputs.call(OP))[0] == 4 * inputs.q.numel() * (48 + 50)


@pytest.mark.gpu
def test_no_call_waits_for_the_device(device: str) -> None:
    inputs = make_decode_inputs(_case("prefix_everything"), torch.bfloat16, device)
    every_op.assert_waits_for_nothing(lambda: inputs.call(OP))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_more_than_two_billion_elements(paged: bool, device: str) -> None:
    """The last sequence, and the last pages, lie past 2^31 elements of both caches."""
    heads, rows, dim = 8, 64 if paged else 4096, 128
    blocks = 2**31 // (heads * rows * dim) + (4 if paged else 1)
    caches = [torch.empty(blocks, heads, rows, dim, device=device, dtype=torch.float16) for _ in range(2)]
    for cache in caches:
        cache[-3 if paged else -1 :].normal_()
    q = torch.randn(1, heads, 1, dim, device=device, dtype=torch.float16)
    lengths = torch.tensor([150], dtype=torch.int32, device=device)
    alone = [cache[-3 if paged else -1 :].clone() for cache in caches]
    if paged:
        last = torch.arange(blocks - 3, blocks, dtype=torch.int32, device=device)[None]
        out = attention_decode(q, *caches, lengths, last)
        expected = attention_decode(q, *alone, lengths, last - last[0, 0])
    else:
        out = attention_decode(q.expand(blocks, -1, -1, -1), *caches, lengths.expand(blocks), num_splits=4)[-1:]
        expected = attention_decode(q, *alone, lengths, num_splits=4)
    assert caches[0].numel() > 2**31 and torch.equal(out, expected)


@pytest.mark.gpu
def test_kernels_that_begin_early_read_what_was_written_before() -> None:
    """Calls back to back on buffers that the allocator hands from one to the next, against calls that wait."""
    inputs = make_decode_inputs(_case("prefix", capacity=600, lengths=(600, 33, 0, 17)), torch.bfloat16, "cuda")

    def run(then: Any) -> list[Tensor]:
        q, outs = inputs.q, []
        for splits in (1, 2, 7, 0) * 10:
            q = inputs.call(attention_decode, q=q, num_splits=splits).add_(inputs.q)
            outs.append(q)
            then()
        return outs

    waiting = run(torch.cuda.synchronize)
    for _ in range(5):
        for together, alone in zip(run(lambda: None), waiting, strict=True):
            assert torch.equal(together, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16, 128])
def test_keys_lengths_and_pages_may_come_from_the_kernel_before(page_size: int) -> None:
    """In memory that held others when a call began, against calls that wait."""
    batch, heads, capacity, dim, rounds = 4, 2, 4096, 128, 12
    torch.manual_seed(page_size)
    q, weight = torch.randn(batch, 8, 1, dim, device="cuda").half(), torch.ones(dim, device="cuda").half()
    drawn = torch.randn(rounds, batch * heads * capacity, dim, device="cuda").half()
    drawn_lengths = torch.randint(0, capacity + 1, (rounds, batch), device="cuda", dtype=torch.int32)
    size = page_size or capacity
    blocks = batch * capacity // size
    tables = torch.stack([torch.randperm(blocks, device="cuda") for _ in range(rounds)]).int().view(rounds, batch, -1)
    lengths, table = torch.empty_like(drawn_lengths[0]), torch.empty_like(tables[0])

    def run(then: Any) -> list[Tensor]:
        outs = []
        for turn, (counts, pages, rows) in enumerate(zip(drawn_lengths, tables, drawn, strict=True)):
            writes = (
                partial(torch.add, counts, 0, out=lengths), partial(torch.add, pages, 0, out=table),
                partial(rms_norm, rows, weight),
            )  # fmt: skip
            written: dict[int, Tensor] = {}
            # Each has its turn as the kernel before.
            for place in (turn % 3, (turn + 1) % 3, (turn + 2) % 3):
                written[place] = writes[place]()
                then()
            cache = written[2].view(blocks, heads, size, dim)
            outs.append(attention_decode(q, cache, cache, lengths, table if page_size else None))
            then()
        return outs

    waiting = run(torch.cuda.synchronize)
    for _ in range(3):
        for together, alone in zip(run(lambda: None), waiting, strict=True):
            assert torch.equal(together, alone)


@pytest.mark.parametrize("page_size", [0, 16, 48])
def test_keys_whose_stride_follows_from_the_batch_change_no_bits(page_size: int, device: str) -> None:
    """Caches that lie as [S, B, H, D]; such a stride is a number at run time."""
    blocks, rows = (6, page_size) if page_size else (3, 48)
    q = torch.randn(3, 4, 1, 16, device=device, dtype=torch.float16)
    caches = [torch.randn(blocks, 2, rows, 16, device=device, dtype=torch.float16) for _ in range(2)]
    inside = [cache.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for cache in caches]
    seqlens = torch.tensor([2 * rows, 7, rows + 3] if page_size else [48, 7, 23], dtype=torch.int32, device=device)
    table = torch.tensor([[4, 1], [0, 5], [2, 3]], dtype=torch.int32, device=device) if page_size else None
    found = [attention_decode(q, *each, seqlens, table) for each in (caches, inside)]
    assert inside[0].stride(2) == 2 * blocks * 16 and torch.equal(*found)
