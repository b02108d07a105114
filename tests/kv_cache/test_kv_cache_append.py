"""Numerics, semantics and refusals of `kv_cache_append`."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

import torch_ops
from tests.testing.interpreter import with_dtypes
from tests.verify import DEVICE, DTYPES, GPU, INTERPRET, assert_no_tangent, assert_waits_for_nothing
from torch_ops import kv_cache_append
from torch_ops.bench.app import BENCHES
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.testing import check_draws, poisoned, references
from torch_ops.testing.cases import (
    CACHE_LAYOUTS,
    TOKEN_LAYOUTS,
    KvCacheCase,
    KvCacheInputs,
    kv_cache_cases,
    make_kv_cache_inputs,
)
from torch_ops.testing.tolerance import Draw

pytestmark = pytest.mark.interpret


def widened(inputs: KvCacheInputs, dtype: torch.dtype = torch.float64) -> KvCacheInputs:
    """All tensors in that dtype, caches too."""
    tensors = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    wide = {name: value.to(dtype) for name, value in tensors.items() if value.is_floating_point()}
    return replace(inputs, **wide)


def written(inputs: KvCacheInputs) -> Tensor:
    """Which elements of a cache are to be."""
    marks = torch.zeros_like(inputs.k_cache, memory_format=torch.contiguous_format)
    ones = torch.ones_like(inputs.k)
    names = ("q", "cos", "sin")
    _, marked, _ = replace(inputs, k=ones, v=ones, k_cache=marks, v_cache=marks, **dict.fromkeys(names)).call(
        references.kv_cache_append
    )
    return marked == 1


def whole(cache: Tensor) -> Tensor:
    """All the memory that it is a view of."""
    return cache.as_strided((cache.untyped_storage().nbytes() // cache.itemsize,), (1,), 0)


def verify(case: KvCacheCase, dtype: torch.dtype, device: str) -> None:
    def draw(seed: int) -> Any:
        inputs = make_kv_cache_inputs(case, dtype, device, seed)
        eager = inputs.call(references.kv_cache_append)
        truth = widened(inputs).call(references.kv_cache_append)
        mask = written(inputs)
        caches = inputs.k_cache, inputs.v_cache
        kept = [whole(cache).clone() for cache in caches]
        versions = [cache._version for cache in caches]
        with poisoned():
            q = inputs.call(kv_cache_append)
        for cache, before, version in zip(caches, kept, versions, strict=True):
            assert cache._version > version
            now = cache.clone()
            # Where nothing is to be written, in the cache and around it, every bit is as it was.
            cache.copy_(torch.where(mask, torch.zeros_like(cache), cache))
            before.as_strided(cache.shape, cache.stride(), cache.storage_offset()).masked_fill_(mask, 0)
            assert torch.equal(whole(cache), before)
            cache.copy_(now)
        assert torch.equal(inputs.v_cache, eager[2])
        names = ("q", "k_cache")
        named = ((q, inputs.k_cache), eager[:2], truth[:2])
        return tuple(dict(zip(names, tensors, strict=True)) for tensors in named)

    check_draws(draw)


@with_dtypes(kv_cache_cases("edge"), DTYPES)
def test_agrees_with_reference(case: KvCacheCase, dtype: torch.dtype, device: str) -> None:
    verify(case, dtype, device)


@pytest.mark.no_interpret
@pytest.mark.skipif(GPU, reason="fp64 is computed on the CPU")
@pytest.mark.parametrize("case", kv_cache_cases("smoke"), ids=lambda case: case.name)
def test_double_precision(case: KvCacheCase) -> None:
    verify(case, torch.float64, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", kv_cache_cases("bench"), ids=lambda case: case.name)
def test_agrees_at_real_shapes(case: KvCacheCase, device: str) -> None:
    """Only 16 sequences of a batch of 128 run, because more caches would not fit in fp64."""
    case = replace(case, before=case.before[:16])
    verify(case, torch.bfloat16, device)


@pytest.mark.parametrize("head_dim", [8, 80, 128] if INTERPRET else range(8, 257, 8))
def test_every_head_dim(head_dim: int, device: str) -> None:
    for interleaved in (False, True):
        case = KvCacheCase("dim", "columns", (0, 3), 2, 2, head_dim, 6, 0, 2, head_dim // 2, interleaved)
        verify(case, torch.float16, device)


@st.composite
def appends(draw: Any) -> KvCacheCase:
    batch, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    head_dim = 8 * draw(st.integers(1, 4 if INTERPRET else 32))
    page_size = draw(st.sampled_from([0, 0, 1, 3, 8, 16]))
    capacity = draw(st.integers(1, 4 if page_size else 24))
    positions = capacity * max(page_size, 1)
    each = st.one_of(st.integers(0, positions), st.integers(-5, positions + 5))
    columns = draw(st.one_of(st.just(0), st.just(head_dim), st.integers(1, head_dim // 2)))
    lengths = st.none() | st.tuples(*[st.integers(0, tokens)] * batch)
    dtypes = [None, torch.float16, torch.float32]
    return KvCacheCase(
        "fuzz", "anything", draw(st.tuples(*[each] * batch)), tokens, draw(st.integers(1, 3)), head_dim, capacity,
        page_size, draw(st.integers(0, 4)) if columns else 0, columns, draw(st.booleans()), draw(lengths),
        draw(st.sampled_from(TOKEN_LAYOUTS)), draw(st.sampled_from(CACHE_LAYOUTS)), draw(st.sampled_from(dtypes)),
    )  # fmt: skip


@given(appends(), st.sampled_from(DTYPES))
@hypothesis_settings(max_examples=20 if INTERPRET else 60)
def test_agrees_on_anything(case: KvCacheCase, dtype: torch.dtype) -> None:
    verify(case, dtype, DEVICE)


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", kv_cache_cases("smoke"), ids=lambda case: case.name)
def test_same_bits_each_time(case: KvCacheCase, device: str) -> None:
    results = []
    for _ in range(2):
        inputs = make_kv_cache_inputs(case, torch.float16, device)
        results.append((inputs.call(kv_cache_append), inputs.k_cache, inputs.v_cache))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_full_tables_turn_as_those_of_halves(device: str) -> None:
    case = KvCacheCase("tables", "", (0, 3), 4, 2, 64, 8, num_heads=2, columns=32)
    for interleaved in (False, True):
        results = []
        for full in (False, True):
            inputs = make_kv_cache_inputs(replace(case, interleaved=interleaved), torch.float16, device)
            tables = {"cos": inputs.cos, "sin": inputs.sin}
            if full:
                for name, table in tables.items():
                    tables[name] = table.repeat_interleave(2, 1) if interleaved else torch.cat([table, table], 1)
            results.append((inputs.call(kv_cache_append, **tables), inputs.k_cache))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_what_is_infinite_passes_beside_what_is_turned(device: str) -> None:
    inputs = make_kv_cache_inputs(KvCacheCase("inf", "", (0,), 2, 1, 16, 2, columns=4), torch.float16, device)
    inputs.k[..., 8:] = torch.inf
    inputs.call(kv_cache_append)
    assert torch.equal(inputs.k_cache[..., 8:], inputs.k[..., 8:]) and inputs.k_cache[..., :8].isfinite().all()


def test_q_keeps_its_memory_order(device: str) -> None:
    for layout in ("heads", "tokens"):
        case = KvCacheCase("order", "", (0, 3), 4, 2, 16, 8, num_heads=2, columns=8, layout=layout)
        inputs = make_kv_cache_inputs(case, torch.float16, device)
        out = inputs.call(kv_cache_append)
        assert out.stride() == inputs.q.stride() and out.data_ptr() != inputs.q.data_ptr()
        assert inputs.call(kv_cache_append, q=None).shape == (0,)


@pytest.mark.parametrize("page_size", [0, 4])
def test_decode_loop_is_full_attention(page_size: int, device: str) -> None:
    """A prompt and tokens after it, one by one: what the cache holds gives the attention of the whole sequence."""
    check_draws(partial(_after_decode_loop, page_size, device))


def _after_decode_loop(page_size: int, device: str, seed: int) -> Draw:
    torch.manual_seed(seed)
    batch, heads, k_heads, head_dim, prompt, total = 2, 4, 2, 32, 5, 9
    q, k, v = (torch.randn(batch, n, total, head_dim, device=device).half() for n in (heads, k_heads, k_heads))
    angles = 3 * torch.randn(total, head_dim // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    shape = (6, k_heads, page_size) if page_size else (batch, k_heads, total)
    k_cache, v_cache = (torch.full((*shape, head_dim), torch.nan, device=device).half() for _ in range(2))
    table = torch.tensor([[4, 1, 2], [0, 5, 3]], device=device, dtype=torch.int32) if page_size else None
    seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
    turned = []
    for begin, end in ((0, prompt), *((at, at + 1) for at in range(prompt, total))):
        new = (tensor[:, :, begin:end] for tensor in (k, v))
        turned.append(kv_cache_append(*new, k_cache, v_cache, seqlens, table, q[:, :, begin:end], cos, sin))
        seqlens += end - begin
    held = [
        cache if table is None else cache[table.long()].transpose(1, 2).flatten(2, 3) for cache in (k_cache, v_cache)
    ]
    results = []
    for dtype in (None, torch.float16, torch.float64):
        if dtype is None:
            queries, keys, values = torch.cat(turned, 2), *(cache[:, :, :total] for cache in held)
        else:
            queries, keys = (references.turned(each.to(dtype), cos, sin) for each in (q, k))
            values = v.to(dtype)
        packed = (each.transpose(1, 2).flatten(0, 1) for each in (queries, keys, values))
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * total
        results.append({"out": references.window_attn(*packed, cu_seqlens, causal=True)[0]})
    ours, eager, exact = results
    return ours, eager, exact


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_32_bits(device: str) -> None:
    """The last positions of a cache of more than 2^31 elements, and the last of its pages."""
    for page_size in (0, 16):
        shape = (2**17 // page_size, 130, page_size, 128) if page_size else (1, 130, 2**17, 128)
        k_cache, v_cache = (torch.zeros(shape, device=device, dtype=torch.float16) for _ in range(2))
        k, v = (torch.randn(1, 130, 3, 128, device=device).half() for _ in range(2))
        table = torch.full((1, 2**17 // page_size), shape[0] - 1, device=device).int() if page_size else None
        seqlens = torch.tensor([2**17 - 3], dtype=torch.int32, device=device)
        kv_cache_append(k, v, k_cache, v_cache, seqlens, table)
        assert torch.equal(k_cache[-1:, :, -3:], k) and torch.equal(v_cache[-1:, :, -3:], v)
        assert k_cache[0, :2].count_nonzero() == (2 * 3 * 128 if not page_size else 0)


class TestAutograd:
    def test_what_requires_a_gradient_is_refused_by_name(self, device: str) -> None:
        inputs = make_kv_cache_inputs(kv_cache_cases("smoke")[0], torch.float32, device)
        for name in ("k", "q", "cos"):
            kept = inputs.k_cache.clone()
            leaf = {name: getattr(inputs, name).detach().requires_grad_()}
            message = f"^vk::kv_cache_append has no gradient, and {name} requires one: .*no_grad.*{name}.detach"
            with pytest.raises(NotImplementedError, match=message):
                inputs.call(kv_cache_append, **leaf)
            assert torch.equal(inputs.k_cache, kept)
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    assert not inputs.call(kv_cache_append, **leaf).requires_grad

    def test_a_cache_that_autograd_saved_is_not_overwritten_unnoticed(self, device: str) -> None:
        inputs = make_kv_cache_inputs(kv_cache_cases("smoke")[0], torch.float32, device)
        leaf = torch.ones_like(inputs.k_cache, requires_grad=True)
        product = (leaf * inputs.k_cache).sum()
        inputs.call(kv_cache_append)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    def test_inference_tensors(self, device: str) -> None:
        with torch.inference_mode():
            inputs = make_kv_cache_inputs(kv_cache_cases("smoke")[0], torch.float32, device)
            expected = inputs.call(references.kv_cache_append)
            inputs.call(kv_cache_append)
            assert torch.equal(inputs.v_cache, expected[2])

    def test_forward_mode_is_refused_by_name(self, device: str) -> None:
        inputs = make_kv_cache_inputs(kv_cache_cases("smoke")[0], torch.float32, device)
        assert_no_tangent("kv_cache_append", lambda k: inputs.call(kv_cache_append, k=k), inputs.k)


def test_autocast_changes_no_dtype(device: str) -> None:
    inputs = make_kv_cache_inputs(kv_cache_cases("smoke")[0], torch.float32, device)
    expected = inputs.call(references.kv_cache_append)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = inputs.call(kv_cache_append)
    assert out.dtype == inputs.k_cache.dtype == torch.float32 and torch.equal(inputs.v_cache, expected[2])


def _good(device: str) -> KvCacheInputs:
    case = KvCacheCase("good", "", (0, 3), 4, 2, 16, 4, 2, num_heads=4, columns=8)
    return replace(make_kv_cache_inputs(case, torch.float16, device), lengths=torch.tensor([4, 1], device=device).int())


@pytest.mark.parametrize("empty", ["sequences", "tokens", "tokens and angles", "page size", "pages", "columns"])
def test_nothing_to_write_or_no_room(empty: str, device: str) -> None:
    inputs = _good(device)
    kept = inputs.k_cache.clone(), inputs.v_cache.clone()
    changes: dict[str, list[tuple[tuple[str, ...], Any]]] = {
        "sequences": [(("k", "v", "q", "cache_seqlens", "lengths", "block_table"), lambda each: each[:0])],
        "tokens": [(("k", "v", "q"), lambda each: each[:, :, :0])],
        "tokens and angles": [(("k", "v", "q"), lambda each: each[:, :, :0]), (("cos", "sin"), lambda each: each[:0])],
        "page size": [(("k_cache", "v_cache"), lambda cache: cache[:, :, :0])],
        "pages": [(("k_cache", "v_cache"), lambda cache: cache[:0])],
        "columns": [(("block_table",), lambda table: table[:, :0])],
    }
    changed = {name: change(getattr(inputs, name)) for names, change in changes[empty] for name in names}
    with poisoned():
        out = inputs.call(kv_cache_append, **changed)
    assert torch.equal(inputs.k_cache, kept[0]) and torch.equal(inputs.v_cache, kept[1])
    # Queries are turned in any case.
    assert torch.equal(out, inputs.call(kv_cache_append)[: out.shape[0], :, : out.shape[2]])


REFUSED: list[tuple[str, Any, str]] = [
    ("k", lambda k: k[0], r"k has shape \[2, 4, 16\], expected shape \[B, Hk, Sn, D\] = \[any, any, any, any\]"),
    ("k", lambda k: k.int(), r"k is int32, expected float16, bfloat16 or float32"),
    ("k", lambda k: k[:, :, :0], r"v has .*, expected shape \[B, Hk, Sn, D\] = \[2, 2, 0, 16\]"),
    ("k", lambda k: k[:0], r"v has .*, expected shape \[B, Hk, Sn, D\] = \[0, 2, 4, 16\]"),
    ("k", lambda k: k[:1].expand(65536, -1, -1, -1), r"the number of sequences of k is 65536, expected from 0 to"),
    ("k", lambda k: k[..., :12], r"the head dimension of k is 12, expected a multiple of 8 from 8 to 256"),
    ("v", lambda v: v[:, :1], r"v has shape \[2, 1, 4, 16\], expected shape \[B, Hk, Sn, D\] = \[2, 2, 4, 16\]"),
    ("v", lambda v: v.float(), r"v is float32, expected float16 as k is"),
    ("k_cache", lambda c: c[:, :1], r"k_cache.* expected shape \[num_pages, Hk, page_size, D\] = \[any, 2, any, 16\]"),
    ("k_cache", lambda c: c.int(), r"k_cache is int32, expected float16, bfloat16 or float32"),
    ("k_cache", lambda c: c.transpose(2, 3).contiguous().transpose(2, 3), r"k_cache.* expected contiguous columns"),
    ("v_cache", lambda c: c[:1].expand(10, -1, -1, -1), r"v_cache has .*, expected a place for each of its elements"),
    ("v_cache", lambda c: c[1:], r"v_cache has shape \[9, 2, 2, 16\], expected shape .* = \[10, 2, 2, 16\]"),
    ("v_cache", lambda c: c.float(), r"v_cache is float32, expected float16 as k_cache is"),
    ("cache_seqlens", lambda n: n.long(), r"cache_seqlens is int64, expected int32"),
    ("cache_seqlens", lambda n: n[:1], r"cache_seqlens has shape \[1\], expected shape \[2\]"),
    ("block_table", lambda t: t.long(), r"block_table is int64, expected int32"),
    ("block_table", lambda t: t[:1], r"block_table has shape \[1, 4\], expected shape \[B, max_pages\] = \[2, any\]"),
    (
        "block_table",
        lambda t: None,
        r"k_cache has shape \[10, 2, 2, 16\], expected shape \[B, Hk, S, D\] = \[2, 2, any, 16\]",
    ),
    ("q", lambda q: q[:, :, :1], r"q has shape \[2, 4, 1, 16\], expected shape \[B, H, Sn, D\] = \[2, any, 4, 16\]"),
    ("q", lambda q: q.float(), r"q is float32, expected float16 as k is"),
    ("cos", lambda c: c[:, 0], r"cos has shape \[7\], expected shape \[max_positions, columns\]"),
    ("cos", lambda c: c.repeat(1, 2)[:, :9], r"cos has 9, expected 16 columns or, for pairs, 1 to 8"),
    ("cos", lambda c: c.bfloat16(), r"cos is bfloat16, expected float32 or float16 as k is"),
    ("cos", lambda c: None, r"sin is a tensor, expected None where cos is: it is for the rotary embedding"),
    ("cos", lambda c: c[:0], r"sin is \[7, 8\] in float32, expected \[0, 8\] in float32 as cos is"),
    ("sin", lambda s: s[:, :4], r"sin is \[7, 4\] in float32, expected \[7, 8\] in float32 as cos is"),
    ("lengths", lambda n: n.long(), r"lengths is int64, expected int32"),
    ("lengths", lambda n: n[:1], r"lengths has shape \[1\], expected shape \[2\]"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_refuses(name: str, change: Any, message: str, device: str) -> None:
    inputs = _good(device)
    kept = inputs.k_cache.clone(), inputs.v_cache.clone()
    with pytest.raises(ValueError, match=f"^kv_cache_append: {message}"):
        inputs.call(kv_cache_append, **{name: change(getattr(inputs, name))})
    assert torch.equal(inputs.k_cache, kept[0]) and torch.equal(inputs.v_cache, kept[1])
    inputs.call(kv_cache_append)


@pytest.mark.parametrize("other", [lambda cache: cache, lambda cache: cache[:], lambda cache: cache.detach()])
def test_one_memory_as_both_caches_is_refused(other: Any, device: str) -> None:
    """Also after a call of the same shapes, and where the op itself is called."""
    for function in (kv_cache_append, torch.ops.vk.kv_cache_append):
        inputs = _good(device)
        inputs.call(function)
        kept = inputs.k_cache.clone()
        with pytest.raises(ValueError, match="^kv_cache_append: v_cache is in the memory of k_cache, expected in memo"):
            inputs.call(function, v_cache=other(inputs.k_cache))
        assert torch.equal(inputs.k_cache, kept)


def test_views_that_are_negated_as_they_are_read_are_read_but_not_written(device: str) -> None:
    inputs, negated = _good(device), _good(device)
    inputs.call(kv_cache_append, k=-inputs.k)
    negated.call(kv_cache_append, k=torch._neg_view(negated.k))
    assert torch.equal(inputs.k_cache, negated.k_cache)
    for name in ("k_cache", "v_cache"):
        cache = getattr(inputs, name)
        kept = cache.clone()
        with pytest.raises(ValueError, match=f"^kv_cache_append: {name} is a negated view, expected a tensor with mem"):
            inputs.call(kv_cache_append, **{name: torch._neg_view(cache)})
        assert torch.equal(cache, kept)


def test_caches_may_lie_side_by_side(device: str) -> None:
    inputs = _good(device)
    apart = inputs.k_cache.clone(), inputs.v_cache.clone()
    inputs.call(kv_cache_append, k_cache=apart[0], v_cache=apart[1])
    both = torch.stack((inputs.k_cache, inputs.v_cache), 2)
    inputs.call(kv_cache_append, k_cache=both[:, :, 0], v_cache=both[:, :, 1])
    assert torch.equal(both[:, :, 0], apart[0]) and torch.equal(both[:, :, 1], apart[1])


def test_q_without_tables_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="^kv_cache_append: q is .*, expected None where cos and sin are"):
        _good(device).call(kv_cache_append, cos=None, sin=None)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"cache_seqlens": [-1, 0]}, r"cache_seqlens\[0\] is -1, expected from 0 to 8 positions less 4 new tokens"),
    ({"cache_seqlens": [0, 8]}, r"cache_seqlens\[1\] is 8, expected from 0 to 8 positions less 1 new tokens"),
    ({"lengths": [0, 5]}, r"lengths\[1\] is 5, expected from 0 to the 4 tokens of k"),
    (
        {"block_table": [[0, 1, 2, 3], [0, 10, 1, 1]]},
        r"block_table\[1, 1\] is 10, expected one of the 10 pages of k_cache",
    ),
    (
        {"block_table": [[0, -1, 2, 3], [0, 9, 1, 1]]},
        r"block_table\[0, 1\] is -1, expected one of the 10 pages of k_cache",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_checked_mode_names_what_only_the_device_knows(change: dict[str, Any], message: str, device: str) -> None:
    inputs = _good(device)
    kept = inputs.k_cache.clone()
    changed = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in change.items()}
    with torch_ops.settings(checked=True):
        with pytest.raises(ValueError, match=f"^kv_cache_append: {message}"):
            inputs.call(kv_cache_append, **changed)
        assert torch.equal(inputs.k_cache, kept)
        inputs.call(kv_cache_append)
    inputs.call(kv_cache_append, **changed)


def test_checked_mode_wants_a_row_of_the_tables_for_each_position(device: str) -> None:
    inputs = _good(device)
    message = "^kv_cache_append: the number of rows of cos is 3, expected 4 or more for sequence 0"
    with torch_ops.settings(checked=True), pytest.raises(ValueError, match=message):
        inputs.call(kv_cache_append, cos=inputs.cos[:3], sin=inputs.sin[:3])
    none = torch.zeros_like(inputs.cache_seqlens)
    with torch_ops.settings(checked=True):
        inputs.call(kv_cache_append, cos=inputs.cos[:2], sin=inputs.sin[:2], lengths=none)


def test_explain_says_what_would_run(device: str) -> None:
    inputs = _good(device)
    kept = inputs.k_cache.clone()
    report = inputs.call(lambda *args: torch_ops.explain(kv_cache_append, *args))
    computed = GPU or INTERPRET
    assert report["op"] == "vk::kv_cache_append" and report["path"] == ("portable" if computed else "reference")
    assert tuple(report["kernels"]) == (("kv_cache_append",) if computed else ())
    assert torch.equal(inputs.k_cache, kept)
    assert torch_ops.explain(kv_cache_append, **dict(reversed(vars(inputs).items()))) == report
    with pytest.raises(ValueError, match="^kv_cache_append: v has"):
        inputs.call(lambda *args: torch_ops.explain(kv_cache_append, *args), v=inputs.v[:1])


@pytest.mark.no_interpret
def test_benchmark_finds_all_implementations_right() -> None:
    """Compiled baselines are left to GPUs: here they would take a minute to build."""
    bench, cpu = BENCHES["kv_cache_append"], torch.device("cpu")
    usual = [baseline for baseline in bench.baselines if baseline.name in bench.usual["cpu"]]
    for case in bench.cases([], cpu):
        records = run_case(bench, case, (bench.ours, *usual), Setup(torch.float32, cpu, rounds=2))
        assert [one.status for one in records] == ["ok", "ok"]
        assert all(one.bytes_moved > 0 for one in records)


@pytest.mark.gpu
def test_no_call_waits_for_the_device(device: str) -> None:
    inputs = make_kv_cache_inputs(kv_cache_cases("smoke")[1], torch.bfloat16, device)
    assert_waits_for_nothing(lambda: inputs.call(kv_cache_append))


def test_row_strides_that_follow_from_the_batch_change_no_values(device: str) -> None:
    """New tokens and caches that lie as [S, B, H, D]; such strides are numbers at run time."""

    def inside(tensor: Tensor) -> Tensor:
        return tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)

    k, v = (torch.randn(5, 2, 3, 16, device=device, dtype=torch.float16) for _ in range(2))
    q = torch.randn(5, 4, 3, 16, device=device, dtype=torch.float16)
    seqlens = torch.tensor([0, 4, 9, 2, 1], dtype=torch.int32, device=device)
    angles = torch.arange(12, device=device)[:, None] * torch.rand(8, device=device)
    found = []
    for lay in (torch.Tensor.contiguous, inside):
        caches = [lay(torch.zeros(5, 2, 12, 16, device=device, dtype=torch.float16)) for _ in range(2)]
        out = torch_ops.kv_cache_append(lay(k), lay(v), *caches, seqlens, q=lay(q), cos=angles.cos(), sin=angles.sin())
        found.append([out, *caches])
    assert all(map(torch.equal, *found)) and found[0][1].any()
