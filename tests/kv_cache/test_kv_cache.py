"""Caches of keys and values: what they hold after appending, growing, cutting, reordering, and what they refuse."""

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch._dynamo.utils import counters

import torch_ops
from compile_tests.contract.trace import capture
from tests.kv_cache.verify import BATCH, HEAD_DIM, HEADS, LAYERS, Cache, assert_holds, fails, held, make, new
from tests.verify import DEVICE, INTERPRET
from torch_ops import KVCache, PagedKVCache
from torch_ops.testing import check, references

pytestmark = pytest.mark.interpret


# The operation of a call that fails; 0 and those behind its last are none.
STEPS = st.integers(0, 12)
KINDS = pytest.mark.parametrize("kind", ["contiguous", "paged"])


@KINDS
def test_layers_count_for_themselves(kind: str) -> None:
    """A position that all layers share would advance once for each of them."""
    cache = make(kind)
    first, second, third = new(5), new(2), new(3)
    cache.append(0, *first)
    cache.append(0, *second)
    cache.append(1, *third)
    assert [seqlens.tolist() for seqlens in cache.seqlens] == [[7] * BATCH, [3] * BATCH]
    assert_holds(cache, 0, *(list(torch.cat(pair, 2)) for pair in zip(first, second, strict=True)))
    assert_holds(cache, 1, *map(list, third))


@KINDS
def test_ragged_tokens_leave_padding_out(kind: str) -> None:
    cache = make(kind, 8)
    parts = []
    for lengths in ([5, 0, 2], [1, 3, 3], [0, 0, 0], [2, 5, 3]):
        k, v = new(5)
        cache.append(0, k, v, lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
        parts.append([[each[b, :, :length] for b, length in enumerate(lengths)] for each in (k, v)])
    expected = [[torch.cat([part[which][b] for part in parts], 1) for b in range(BATCH)] for which in range(2)]
    assert cache.seqlens[0].tolist() == [8, 8, 8] and cache.seqlens[1].tolist() == [0, 0, 0]
    assert_holds(cache, 0, *expected)


@KINDS
def test_keys_and_queries_are_turned_by_their_position(kind: str) -> None:
    cache = make(kind, dtype=torch.float32)
    angles = 3 * torch.randn(16, HEAD_DIM // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    results: list[dict[str, Tensor]] = [{}, {}, {}]
    begin = 0
    for tokens in (5, 1, 2):
        k, v = new(tokens, torch.float32)
        q = torch.randn(BATCH, 4, tokens, HEAD_DIM, device=DEVICE)
        out = cache.append(1, k, v, q, cos, sin)
        rows = slice(begin, begin + tokens)
        results[0] |= {f"q{begin}": out, f"k{begin}": torch.stack(held(cache, 1)[0])[:, :, rows]}
        for of, dtype in ((1, torch.float32), (2, torch.float64)):
            turned = (references.turned(each.to(dtype), cos[rows], sin[rows]) for each in (q, k))
            results[of] |= dict(zip((f"q{begin}", f"k{begin}"), turned, strict=True))
        begin += tokens
    check(*results)


@KINDS
def test_another_dtype_than_the_model_s(kind: str) -> None:
    cache = make(kind, dtype=torch.float16)
    k, v = new(3, torch.float32)
    cache.append(0, k, v)
    assert_holds(cache, 0, *(list(each.half()) for each in (k, v)))


@KINDS
def test_growing_keeps_what_there_is(kind: str) -> None:
    cache = make(kind, 8, pages=6)
    parts = [new(8)]
    cache.append(0, *parts[0])
    if isinstance(cache, KVCache):
        cache.grow(13)
        assert cache.capacity == 13
    else:
        with pytest.raises(ValueError, match=r"the number of free pages is 0 of 6, expected 3 or more for this"):
            cache.reserve(12)
        cache.grow(9, max_pages=8)
        assert cache.num_pages == 9 and cache.free_pages == 3 and cache.block_table.shape == (BATCH, 8)
        cache.reserve(12)
    parts.append(new(4))
    cache.append(0, *parts[1])
    assert_holds(cache, 0, *(list(torch.cat(pair, 2)) for pair in zip(*parts, strict=True)))


@KINDS
def test_truncating_forgets_the_last(kind: str) -> None:
    cache = make(kind)
    k, v = new(9)
    for layer in range(LAYERS):
        cache.append(layer, k, v)
    for lengths, left in (([4, 12, 0], [4, 9, 0]), (5, [4, 5, 0]), (torch.tensor([1, 9, 9], device=DEVICE), [1, 5, 0])):
        cache.truncate(lengths)
        for layer in range(LAYERS):
            assert_holds(cache, layer, *([each[b, :, :n] for b, n in enumerate(left)] for each in (k, v)))
    more = new(2)
    if isinstance(cache, PagedKVCache):
        assert cache.reserved == [4, 8, 0]
        cache.reserve(8)
    cache.append(0, *more)
    both = zip((k, v), more, strict=True)
    expected = ([torch.cat([old[b, :, :n], new[b]], 1) for b, n in enumerate(left)] for old, new in both)
    assert_holds(cache, 0, *expected)


@KINDS
def test_reordering_beams(kind: str) -> None:
    cache = make(kind, 6)
    k, v = new(6)
    for layer in range(LAYERS):
        cache.append(layer, k, v)
    for indices in ([2, 0, 1], [1, 1, 0], [2, 2, 2]):
        cache.reorder(torch.tensor(indices, device=DEVICE) if isinstance(cache, KVCache) else indices)
        k, v = k[indices], v[indices]
        for layer in range(LAYERS):
            assert_holds(cache, layer, *map(list, (k, v)))
    if isinstance(cache, PagedKVCache):
        # One page is full and shared, of the second each has its own.
        assert cache.free_pages == 14 - 1 - BATCH
    cache.truncate(5)
    if isinstance(cache, PagedKVCache):
        cache.truncate(3)
        assert cache.free_pages == 14 - BATCH, "each has its own of what it will write to"
        cache.reserve(6)
    else:
        cache.truncate(3)
    more = new(2)
    cache.append(0, *more)
    assert_holds(cache, 0, *(list(torch.cat([old[:, :, :3], new], 2)) for old, new in zip((k, v), more, strict=True)))


@KINDS
def test_reset(kind: str) -> None:
    cache = make(kind)
    for _ in range(2):
        k, v = new(5)
        cache.append(0, k, v)
        assert_holds(cache, 0, *map(list, (k, v)))
        cache.reset()
        assert cache.seqlens[0].tolist() == [0] * BATCH
        if isinstance(cache, PagedKVCache):
            assert cache.free_pages == cache.num_pages and (cache.block_table == -1).all()
            cache.reserve(5)


def test_pages_are_given_out_by_reserve_alone() -> None:
    cache = make("paged", 0, pages=5)
    assert cache.free_pages == 5 and cache.reserved == [0] * BATCH
    k, v = new(1)
    message = r"^PagedKVCache: the number of tokens of k is .*, expected at most 0, for which every sequence has pages"
    with pytest.raises(ValueError, match=message):
        cache.append(0, k, v)
    cache.reserve([5, 1, 0])
    assert cache.free_pages == 2 and cache.reserved == [8, 4, 0]
    table = cache.block_table.clone()
    with pytest.raises(ValueError, match=r"^PagedKVCache: the number of free pages is 2 of 5, expected 4 or more"):
        cache.reserve([12, 8, 5])
    assert torch.equal(cache.block_table, table) and cache.free_pages == 2
    cache.reserve(4)
    assert cache.reserved == [8, 4, 4] and (cache.block_table >= 0).sum(1).tolist() == [2, 1, 1]
    cache.append(0, k, v)
    assert_holds(cache, 0, *map(list, (k, v)))


def test_without_pages_for_copies_nothing_changes() -> None:
    def ragged(*lengths: int) -> Tensor:
        return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    for lengths, pages, begin, change in (
        ((6, 2, 0), 3, lambda cache: None, lambda cache: cache.reorder([0, 0, 0])),
        ((8, 0, 0), 2, lambda cache: cache.reorder([0, 0, 1]), lambda cache: cache.truncate([6, 8, 0])),
    ):
        cache = make("paged", 0, pages=pages)
        cache.reserve(lengths)
        k, _ = new(8)
        for layer in range(LAYERS):
            cache.append(layer, k, k, lengths=ragged(*lengths))
        begin(cache)
        table, users = cache.block_table.clone(), list(cache._pages.users)
        keys, values = held(cache, 0)
        with pytest.raises(
            ValueError, match=r"^PagedKVCache: the number of free pages is .*, expected \d or more for this"
        ):
            change(cache)
        assert torch.equal(cache.block_table, table) and cache._pages.users == users
        assert_holds(cache, 0, keys, values)


@pytest.mark.parametrize("way", ["no_grad", "compiled"])
@KINDS
@pytest.mark.no_interpret
def test_a_model_s_step(kind: str, way: str) -> None:
    """Weights that require gradients; and a step under torch.compile, over all layers."""
    cache = make(kind, dtype=torch.float32)
    weight = torch.randn(HEAD_DIM, HEAD_DIM, device=DEVICE, requires_grad=True)

    def step(k: Tensor, v: Tensor) -> None:
        for layer in range(LAYERS):
            cache.append(layer, k @ weight, v)

    run = torch.compile(step, fullgraph=True, backend="aot_eager") if way == "compiled" else step
    parts = [new(3, torch.float32) for _ in range(2)]
    with pytest.raises(Exception, match="no gradient, and k requires one"):
        step(*parts[0])
    with torch.no_grad():
        for part in parts:
            run(*part)
        for layer in range(LAYERS):
            assert cache.seqlens[layer].tolist() == [6] * BATCH
            assert_holds(cache, layer, *(
                list(torch.cat(pair, 2)) for pair in zip(*((k @ weight, v) for k, v in parts), strict=True)
            ))  # fmt: skip


@pytest.mark.no_interpret
def test_graphs_hold_one_copy_for_each_tensor() -> None:
    """Inductor lets a group of copies read what it has already overwritten."""
    order, lengths = [2, 0, 0], [1, 4, 2]
    cache, (k, v) = make("contiguous"), new(5)
    for layer in range(LAYERS):
        cache.append(layer, k, v)
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def change() -> None:
        cache.reorder(order)
        cache.truncate(lengths)

    with torch.no_grad():
        torch.compile(change, fullgraph=True, backend=backend)()
    assert found.count("copy_") == 4 * LAYERS and not any("foreach_copy" in target for target in found)
    for layer in range(LAYERS):
        assert_holds(cache, layer, *([each[b, :, :n] for b, n in zip(order, lengths, strict=True)] for each in (k, v)))


@pytest.mark.gpu
@KINDS
def test_cuda_graph_replays_go_on(kind: str) -> None:
    cache = make(kind)
    k, v = new(1)
    graph, _ = capture(lambda: [cache.append(layer, k, v) for layer in range(LAYERS)])
    cache.truncate(0)
    if isinstance(cache, PagedKVCache):
        cache.reserve(16)
    parts = []
    for _ in range(5):
        parts.append(tuple(tensor.normal_().clone() for tensor in (k, v)))
        graph.replay()
    for layer in range(LAYERS):
        assert_holds(cache, layer, *(list(torch.cat(pair, 2)) for pair in zip(*parts, strict=True)))


@pytest.mark.gpu
@KINDS
def test_compiled_steps_have_cuda_graphs(kind: str) -> None:
    """A graph that writes to other inputs than static ones has none."""
    caches = make(kind), make(kind)

    def step(cache: Cache, k: Tensor, v: Tensor) -> list[Tensor]:
        return [cache.append(layer, k, v + layer) for layer in range(LAYERS)]

    compiled = torch.compile(partial(step, caches[0]), fullgraph=True, mode="reduce-overhead")
    counters.clear()
    with torch.no_grad():
        for _ in range(6):
            k, v = new(1)
            torch.compiler.cudagraph_mark_step_begin()
            compiled(k, v)
            step(caches[1], k, v)
    assert counters["inductor"]["cudagraph_skips"] == 0
    for layer in range(LAYERS):
        assert_holds(caches[0], layer, *held(caches[1], layer))


@pytest.mark.gpu
@KINDS
def test_a_step_waits_for_nothing(kind: str) -> None:
    cache = make(kind)
    part = new(1)
    cache.append(0, *part)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.append(0, *part)
        cache.truncate(1)
        if isinstance(cache, PagedKVCache):
            cache.reserve(8)
            cache.reorder([1, 1, 0], 1)
        else:
            cache.reorder([1, 1, 0])
        cache.reset()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


aten = torch.ops.aten


def test_a_reorder_that_fails_half_way_changes_nothing() -> None:
    cache = KVCache(2, 2, 1, 4, 8, device=DEVICE)
    k = torch.arange(2.0, device=DEVICE).view(2, 1, 1, 1).expand(2, 1, 1, 8)
    for layer in range(2):
        cache.append(layer, k, k)
    assert fails(cache, lambda: cache.reorder([1, 0]), 2, aten.index_select)
    cache.reorder([1, 0])
    assert [keys[:, 0, 0, 0].tolist() for keys in cache.k] == [[1, 0], [1, 0]]


@pytest.mark.parametrize("kind", [aten.index_select, aten._foreach_copy_])
def test_a_truncation_whose_copy_fails_changes_nothing(kind: Any) -> None:
    cache = PagedKVCache(1, 2, 1, 8, 4, 8, device=DEVICE)
    cache.reserve(8)
    k = torch.arange(100.0, 108.0, device=DEVICE).view(1, 1, 8, 1).expand(2, 1, 8, 8)
    cache.append(0, k, k)
    cache.reorder([0, 0])
    assert fails(cache, lambda: cache.truncate(6), 1, kind)
    cache.truncate(6)
    cache.reserve(8)
    cache.append(0, torch.stack([k[0, :, :2] - 100, k[0, :, :2]]), k[:, :, :2])
    assert [keys[0, :, 0].tolist() for keys in held(cache, 0)[0]] == [
        [*range(100, 106), 0, 1], [*range(100, 106), 100, 101]
    ]  # fmt: skip


def test_a_cache_grows_in_all_layers_or_in_none() -> None:
    cache = KVCache(4, 1, 1, 4, 8, device=DEVICE)
    assert fails(cache, lambda: cache.grow(8), 2, aten.new_zeros)
    assert cache.capacity == 4 and {keys.shape[2] for keys in (*cache.k, *cache.v)} == {4}
    cache.grow(8)
    assert {keys.shape[2] for keys in (*cache.k, *cache.v)} == {8}


def _counts(*counts: int) -> Tensor:
    return torch.tensor(counts, device=DEVICE, dtype=torch.int32)


# Name, kind, call, and the keys of each sequence that are left of those before.
CHANGES: list[tuple[str, str, Any, Any]] = [
    ("append", "contiguous", lambda c: c.append(1, *new(2), lengths=_counts(2, 0, 1)), None),
    ("append", "paged", lambda c: c.append(1, *new(2), lengths=_counts(2, 0, 1)), None),
    ("truncate", "contiguous", lambda c: c.truncate([3, 9, 0]), lambda keys: [keys[0][:, :3], keys[1], keys[2][:, :0]]),
    ("truncate on the device", "contiguous", lambda c: c.truncate(_counts(1, 2, 3)),
     lambda keys: [keys[b][:, : b + 1] for b in range(BATCH)]),
    ("truncate", "paged", lambda c: c.truncate([3, 9, 0]), lambda keys: [keys[0][:, :3], keys[1], keys[2][:, :0]]),
    ("truncate on the device", "paged", lambda c: c.truncate(_counts(1, 2, 3)),
     lambda keys: [keys[b][:, : b + 1] for b in range(BATCH)]),
    ("truncate of shared pages", "shared", lambda c: c.truncate([5, 3, 2]),
     lambda keys: [keys[b][:, :n] for b, n in enumerate((5, 3, 2))]),
    ("reorder", "contiguous", lambda c: c.reorder([2, 2, 0]), lambda keys: [keys[b] for b in (2, 2, 0)]),
    ("reorder on the device", "contiguous", lambda c: c.reorder(_counts(2, 2, 0)),
     lambda keys: [keys[b] for b in (2, 2, 0)]),
    ("reorder", "paged", lambda c: c.reorder([2, 2, 0]), lambda keys: [keys[b] for b in (2, 2, 0)]),
    ("reorder of known lengths", "shared", lambda c: c.reorder([1, 0, 1], 7),
     lambda keys: [keys[b] for b in (1, 0, 1)]),
    ("reorder to pages that become free", "tight", lambda c: c.reorder([1, 1, 1]), lambda keys: [keys[1]] * BATCH),
    ("reserve", "paged", lambda c: c.reserve([12, 8, 10]), lambda keys: keys),
    ("grow", "contiguous", lambda c: c.grow(20), lambda keys: keys),
    ("grow", "paged", lambda c: c.grow(19, 25), lambda keys: keys),
    ("reset", "contiguous", lambda c: c.reset(), lambda keys: [each[:, :0] for each in keys]),
    ("reset", "shared", lambda c: c.reset(), lambda keys: [each[:, :0] for each in keys]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change", "left"), [pytest.param(*each, id=f"{name}, {each[0]}") for name, *each in CHANGES]
)
def test_what_fails_at_any_step_changes_nothing(kind: str, change: Any, left: Any) -> None:
    """The call is repeated on one cache, and fails one operation later each time, until it does what it should."""
    cache = make(kind if kind == "contiguous" else "paged", 8, pages=6 if kind == "tight" else 14)
    k, v = new(7)
    for layer in range(LAYERS):
        cache.append(layer, k, v)
    if kind == "shared":
        cache.reorder([1, 1, 1], 7)
    before = [[[keys.clone() for keys in part] for part in held(cache, layer)] for layer in range(LAYERS)]
    steps = 1
    while fails(cache, lambda: change(cache), steps):
        steps += 1
    assert steps > 1, "nothing failed"
    if left is None:
        assert [seqlens.tolist() for seqlens in cache.seqlens] == [[7] * BATCH, [9, 7, 8]]
    else:
        for layer, parts in enumerate(before):
            assert_holds(cache, layer, *map(left, parts))


class AnyOrder(RuleBasedStateMachine):
    """Both kinds beside lists of tensors, one for each sequence of each layer.

    Some calls run out of memory at a step that is drawn. They must leave everything as it was, and succeed when they
    are repeated.
    """

    @initialize()
    def begin(self) -> None:
        self.caches = [make("contiguous", 12), make("paged", 12, 40)]
        empty = torch.zeros(HEADS, 0, HEAD_DIM, dtype=torch.float16, device=DEVICE)
        self.rows = [[empty] * BATCH for _ in range(LAYERS)]

    def change(self, step: int, call: Callable[[Cache], object]) -> None:
        for cache in self.caches:
            if not step or fails(cache, partial(call, cache), step):
                call(cache)

    def reserve(self, lengths: int | list[int], step: int = 0) -> None:
        cache = self.caches[1]
        if not step or fails(cache, lambda: cache.reserve(lengths), step):
            cache.reserve(lengths)

    @rule(tokens=st.integers(0, 4), layers=st.sampled_from([(0,), (1,), (0, 1)]), step=STEPS, data=st.data())
    def append(self, tokens: int, layers: tuple[int, ...], step: int, data: Any) -> None:
        lengths = data.draw(st.none() | st.lists(st.integers(0, tokens), min_size=BATCH, max_size=BATCH))
        counts = lengths or [tokens] * BATCH
        if any(rows[b].shape[1] + counts[b] > 12 for rows in self.rows for b in range(BATCH)):
            return
        given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.reserve([max(rows[b].shape[1] for rows in self.rows) + counts[b] for b in range(BATCH)], step)
        for layer in layers:
            k, _ = new(tokens)
            self.change(step, methodcaller("append", layer, k, k, lengths=given))
            rows = self.rows[layer]
            self.rows[layer] = [torch.cat([rows[b], k[b, :, : counts[b]]], 1) for b in range(BATCH)]

    @rule(lengths=st.lists(st.integers(0, 12), min_size=BATCH, max_size=BATCH), step=STEPS)
    def truncate(self, lengths: list[int], step: int) -> None:
        self.change(step, lambda cache: cache.truncate(lengths))
        self.rows = [[each[:, :n] for each, n in zip(rows, lengths, strict=True)] for rows in self.rows]
        self.reserve(4)

    @rule(indices=st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH), step=STEPS)
    def reorder(self, indices: list[int], step: int) -> None:
        self.change(step, lambda cache: cache.reorder(indices))
        self.rows = [[rows[place] for place in indices] for rows in self.rows]
        self.reserve(4)

    @rule(more=st.integers(0, 3), step=STEPS)
    def grow(self, more: int, step: int) -> None:
        def grow(cache: Cache) -> None:
            if isinstance(cache, KVCache):
                cache.grow(cache.capacity + more)
            else:
                cache.grow(cache.num_pages + more, cache.block_table.shape[1] + more)

        self.change(step, grow)

    @precondition(lambda self: hasattr(self, "rows"))
    @invariant()
    def both_hold_what_they_should(self) -> None:
        for cache in self.caches:
            for layer, rows in enumerate(self.rows):
                assert_holds(cache, layer, rows, rows)
        pages = self.caches[1]._pages
        used = [page for table in pages.tables for page in table]
        assert [used.count(page) for page in range(len(pages.users))] == pages.users
        assert sorted(pages.free) == [page for page, users in enumerate(pages.users) if not users]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = hypothesis_settings(
    max_examples=4 if INTERPRET else 40, stateful_step_count=12, derandomize=True, deadline=None
)

REFUSED: list[tuple[str, Any, str]] = [
    ("contiguous", lambda cache: cache.append(0.5, *new(1)), r"KVCache: layer is 0.5, expected an integer"),
    ("contiguous", lambda cache: cache.append(0, None, None), r"KVCache.append: k is None, expected a dense tensor"),
    ("contiguous", lambda cache: cache.append(0, [0.0], None), r"KVCache.append: k is of type list, expected a dense"),
    (
        "contiguous", lambda cache: cache.append(0, *(part[:, :1] for part in new(1))),
        r"KVCache.append: k has .*, expected shape \[B, Hk, Sn, D\] = \[.*\]",
    ),
    ("contiguous", lambda cache: cache.reorder(None), r"KVCache.reorder: indices is NoneType, expected an integer"),
    ("contiguous", lambda cache: cache.truncate(0.5), r"KVCache.truncate: lengths is float, expected an integer"),
    ("contiguous", lambda c: c.append(2, *new(1)), r"KVCache: layer is 2, expected from 0 to 1"),
    ("contiguous", lambda c: c.layer(-1), r"KVCache: layer is -1, expected from 0 to 1"),
    ("contiguous", lambda c: c.append(0, *new(17)),
     r"KVCache: the number of tokens of k is 17, expected at most the capacity, 16"),
    ("contiguous", lambda c: c.append(0, new(1)[0], new(2)[0]),
     r"kv_cache_append: v has shape \[3, 2, 2, 16\], expected shape"),
    ("contiguous", lambda c: c.grow(8), r"KVCache.grow: capacity is 8, expected 16 or more"),
    ("contiguous", lambda c: c.grow("8"), r"KVCache.grow: capacity is '8', expected an integer"),
    ("contiguous", lambda c: c.truncate(-1), r"KVCache.truncate: lengths is -1, expected 0 or more"),
    ("contiguous", lambda c: c.truncate([1, 2]),
     r"KVCache.truncate: lengths has 2, expected one for each of 3 sequences"),
    ("contiguous", lambda c: c.truncate(torch.ones(3, device=DEVICE)),
     r"KVCache.truncate: lengths is float32, expected int32 or int64"),
    ("contiguous", lambda c: c.reorder([0, 1, 3]), r"KVCache.reorder: indices\[2\] is 3, expected at most 2"),
    ("contiguous", lambda c: c.reorder(torch.tensor([0], device=DEVICE)),
     r"KVCache.reorder: indices has shape \[1\], expected shape \[3\]"),
    ("paged", lambda c: c.reorder([0, 1, -1]), r"PagedKVCache.reorder: indices\[2\] is -1, expected 0 or more"),
    ("paged", lambda c: (c.reserve([0, 17, 0]), c.reorder([0, 0, 0], 18)),
     r"PagedKVCache.reorder: lengths\[0\] is 18, expected at most 16, for which the sequence has pages"),
    ("paged", lambda c: c.reorder(torch.tensor([0, 1, 2], device=DEVICE)),
     r"PagedKVCache.reorder: indices is a tensor, expected integers on the host"),
    ("paged", lambda c: c.reserve(57), r"PagedKVCache.reserve: lengths is 57, expected at most 56"),
    ("paged", lambda c: c.reserve([0, 1.5, 0]), r"PagedKVCache.reserve: lengths\[1\] is 1.5, expected an integer"),
    ("paged", lambda c: c.append(0, *new(17)),
     r"PagedKVCache: the number of tokens of k is .*, expected at most 16, for which"),
    ("paged", lambda c: c.grow(13), r"PagedKVCache.grow: num_pages is 13, expected 14 or more"),
    ("paged", lambda c: c.grow(14, 3), r"PagedKVCache.grow: max_pages is 3, expected 14 or more"),
    ("paged", lambda c: (c.reorder([0, 0, 0], 4), c.truncate(torch.tensor([1, 1, 1], device=DEVICE))),
     r"PagedKVCache.truncate: lengths is a tensor, expected integers on the host, since sequences share pages"),
]  # fmt: skip


@pytest.mark.no_interpret
@pytest.mark.parametrize(("kind", "call", "message"), REFUSED)
def test_refuses(kind: str, call: Any, message: str) -> None:
    cache = make(kind)
    with pytest.raises(ValueError, match=f"^{message}"):
        call(cache)
    assert [seqlens.tolist() for seqlens in cache.seqlens] == [[0] * BATCH] * LAYERS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, r"num_layers is 0, expected 1 or more"),
        ({"capacity": None}, r"capacity is None, expected an integer"),
        (
            {"head_dim": 12, "capacity": 2**50},
            r"the head dimension of the cache is 12, expected a multiple of 8 from",
        ),
        ({"dtype": torch.int32}, r"dtype is int32, expected float16, bfloat16 or float32"),
    ],
)
def test_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    sizes = {"num_layers": 1, "batch": 1, "num_kv_heads": 1, "capacity": 4, "head_dim": 16}
    with pytest.raises(ValueError, match=f"^KVCache: {message}"):
        KVCache(**{**sizes, **change})


def test_checked_mode_refuses_what_does_not_fit_and_counts_nothing() -> None:
    for kind in ("contiguous", "paged"):
        cache = make(kind, 8, pages=6)
        cache.append(0, *new(6))
        with (
            torch_ops.settings(checked=True),
            pytest.raises(ValueError, match=r"^kv_cache_append: cache_seqlens\[0\]|block"),
        ):
            cache.append(0, *new(3))
        assert cache.seqlens[0].tolist() == [6] * BATCH


def test_a_cache_made_for_inference_outlives_it() -> None:
    with torch.inference_mode():
        cache = make("contiguous")
        cache.append(0, *new(2))
        cache.grow(20)
    with torch.no_grad():
        cache.append(0, *new(2))
    assert cache.seqlens[0].tolist() == [4] * BATCH


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_lengths_may_be_any_integers(kind: str) -> None:
    """Beyond int32 they keep everything. Negative ones keep nothing, which only a device does not refuse."""
    cache = make(kind)
    cache.append(0, *new(5))
    cache.truncate(torch.tensor([2**32, 2**31, 3], device=DEVICE))
    cache.truncate(2**40)
    assert cache.seqlens[0].tolist() == [5, 5, 3]
    cache.truncate(torch.tensor([-1, -(2**31) - 1, -(2**40)], device=DEVICE))
    assert cache.seqlens[0].tolist() == [0, 0, 0]
    with torch_ops.settings(checked=True), pytest.raises(ValueError, match=r"lengths\[1\] is -"):
        cache.truncate(torch.tensor([0, -(2**40), 0], device=DEVICE))
