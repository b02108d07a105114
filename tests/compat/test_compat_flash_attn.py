"""flash-attn's signatures over the ops: layouts, meaning, refusals."""

import contextlib
import inspect
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.verify import INTERPRET
from torch_ops import attention, attention_decode, compat, kv_cache_append, window_attn
from torch_ops.compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from torch_ops.testing import check_draws, poisoned, references
from torch_ops.testing.cases import cumulative
from torch_ops.testing.tolerance import Draw

DTYPES = [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16, torch.float32]
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 16
LENGTHS, KEY_LENGTHS = (9, 0, 14), (12, 3, 7)
# Options of flash-attn, and what the references call them.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (3, 1)}, {"window_left": 3, "window_right": 1}),
    "causal_and_window": ({"causal": True, "window_size": (2, 5)}, {"window_left": 2, "window_right": 0}),
    "half_a_window": ({"window_size": (-1, 2)}, {"window_right": 2}),
    "scale_and_softcap": ({"softmax_scale": 0.5, "softcap": 2.0}, {"scale": 0.5, "softcap": 2.0}),
}

pytestmark = pytest.mark.interpret


def draw_of(device: str) -> Callable[..., Tensor]:
    return partial(torch.randn, device=device)


def differentiate(function: Callable[..., Any], dout: Tensor, tensors: list[Tensor]) -> dict[str, Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out, lse = function(*leaves)[:2]
    seen = torch.isfinite(lse)
    gradients = torch.autograd.grad((out * dout.to(out.dtype)).sum() + lse[seen].sum(), leaves)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def verify(
    ours: Callable[..., Any], reference: Callable[..., Any], shapes: Any, dtype: torch.dtype, device: str
) -> None:
    """Checks out, lse and gradients of both by the tolerance rule."""

    def draw(seed: int) -> Draw:
        torch.manual_seed(seed)
        tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        dout = torch.randn(shapes[0], device=device).to(dtype)
        with poisoned():
            actual = differentiate(ours, dout, tensors)
        wide = [tensor.double() for tensor in tensors]
        return actual, differentiate(reference, dout, tensors), differentiate(reference, dout, wide)

    check_draws(draw)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_batches(name: str, dtype: torch.dtype, device: str) -> None:
    options, named = OPTIONS[name]
    batch, rows, keys = 2, 9, 13

    def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cu_q, cu_k = cumulative((rows,) * batch, device), cumulative((keys,) * batch, device)
        flat = (tensor.flatten(0, 1) for tensor in (q, k, v))
        out, lse = references.window_attn(*flat, cu_q, cu_k, **named)
        return out.view(q.shape), lse.view(-1, batch, rows).transpose(0, 1)

    shapes = [(batch, rows, HEADS, HEAD_DIM), *[(batch, keys, KEY_HEADS, HEAD_DIM)] * 2]
    verify(partial(flash_attn_func, **options, return_attn_probs=True), reference, shapes, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences(name: str, dtype: torch.dtype, device: str) -> None:
    """max_seqlen may be anything."""
    options, named = OPTIONS[name]
    cu = cumulative(LENGTHS, device), cumulative(KEY_LENGTHS, device)
    shapes = [(sum(LENGTHS), HEADS, HEAD_DIM), *[(sum(KEY_LENGTHS), KEY_HEADS, HEAD_DIM)] * 2]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_varlen_func(q, k, v, *cu, 1, -7, **options, return_attn_probs=True)

    verify(ours, lambda q, k, v: references.window_attn(q, k, v, *cu, **named), shapes, dtype, device)


EVERYTHING: dict[str, Any] = {"softmax_scale": 0.4, "causal": True, "window_size": (5, -1), "softcap": 3.0}
AS_OPS: dict[str, Any] = {"scale": 0.4, "causal": True, "window_left": 5, "softcap": 3.0}


def seeded(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    return function(*args, **options)


@pytest.mark.parametrize("alibi", [(HEADS,), (3, HEADS)], ids=str)
def test_every_argument_reaches_the_op(alibi: tuple[int, ...], device: str) -> None:
    """Dropout's seed too, which PyTorch's generator draws."""
    draw = draw_of(device)
    slopes = draw(alibi).abs()
    rest = {"alibi_slopes": slopes, "dropout_p": 0.2}
    q, k, v = draw(3, 9, HEADS, HEAD_DIM), *(draw(3, 7, KEY_HEADS, HEAD_DIM) for _ in range(2))
    out, lse, nothing = seeded(flash_attn_func, q, k, v, **EVERYTHING, **rest, return_attn_probs=True)
    views = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected, expected_lse = seeded(attention, *views, **AS_OPS, **rest, return_lse=True)
    assert torch.equal(out, expected.transpose(1, 2)) and torch.equal(lse, expected_lse) and nothing is None
    assert out.is_contiguous() and torch.equal(seeded(flash_attn_func, q, k, v, **EVERYTHING, **rest), out)
    assert not torch.equal(flash_attn_func(q, k, v, **EVERYTHING, **rest), out)

    packed = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    cu = cumulative((9,) * 3, device), cumulative((7,) * 3, device)
    out, lse, nothing = seeded(flash_attn_varlen_func, *packed, *cu, 9, 7, **EVERYTHING, **rest, return_attn_probs=True)
    expected, expected_lse = seeded(window_attn, *packed, *cu, **AS_OPS, **rest, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and nothing is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_order_of_sums_is_the_callers_to_choose(
    deterministic: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    for name in ("attention", "window_attn"):
        monkeypatch.setattr(compat.flash_attn, name, lambda q, *args, **options: given.append(options) or q)
    q = draw_of(device)(2, 9, 1, 8)
    flash_attn_func(q, q, q, deterministic=deterministic)
    flash_attn_varlen_func(q[0], q[0], q[0], *[cumulative((9,), device)] * 2, deterministic=deterministic)
    assert [options["deterministic"] for options in given] == [deterministic] * 2


def test_packed_tensors_are_not_copied_and_have_gradients(device: str) -> None:
    options = {**EVERYTHING, "return_attn_probs": True}
    qkv = draw_of(device)(2, 9, 3, 2, HEAD_DIM).requires_grad_()
    q, kv = qkv.detach()[:, :, 0], qkv.detach()[:, :, 1:].requires_grad_()
    leaves = [tensor.detach().requires_grad_() for tensor in qkv.unbind(2)]
    cu = cumulative((9, 9), device)
    pairs = [
        (flash_attn_qkvpacked_func(qkv, **options), flash_attn_kvpacked_func(q, kv, **options),
         flash_attn_func(*leaves, **options)),
        (flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 9, **options),
         flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv.flatten(0, 1), cu, cu, 9, 9, **options),
         flash_attn_varlen_func(*(leaf.flatten(0, 1) for leaf in leaves), cu, cu, 9, 9, **options)),
    ]  # fmt: skip
    for whole, half, apart in pairs:
        assert all(torch.equal(one, other) for one, other in zip((*whole[:2], *half[:2]), apart[:2] * 2, strict=True))
        (of_qkv,) = torch.autograd.grad(whole[0].sum(), qkv)
        (of_kv,) = torch.autograd.grad(half[0].sum(), kv)
        expected = torch.stack(torch.autograd.grad(apart[0].sum(), leaves), 2)
        assert torch.equal(of_qkv, expected) and torch.equal(of_kv, expected[:, :, 1:])


def test_boundaries_that_are_one_tensor_are_known_to_be_equal(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone could not select the kernels for small segments."""
    given = []

    def noting(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, *args: Any, **options: Any
    ) -> Tensor:
        given.append(cu_k)
        return q

    monkeypatch.setattr(compat.flash_attn, "window_attn", noting)
    q = draw_of(device)(9, 1, 8)
    cu = cumulative((4, 5), device)
    for keys, cu_k in ((q, cu), (q, cu.clone()), (torch.cat([q, q]), cu)):
        flash_attn_varlen_func(q, keys, keys, cu, cu_k, 5, 5)
    assert given[0] is None and given[1] is not None and given[2] is cu


# The cache.

CAPACITY, PAGE = 48, 16


def make_cache(lengths: tuple[int, ...], paged: bool, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Caches in flash-attn's layout; pages lie in no order. Rows of the cache without a key are NaN."""
    batch, pages = len(lengths), CAPACITY // PAGE
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    unused = torch.arange(CAPACITY, device=device) >= seqlens[:, None]
    caches = torch.randn(2, batch, CAPACITY, KEY_HEADS, HEAD_DIM, device=device).to(dtype)
    caches[:, unused] = torch.nan
    if not paged:
        return {"k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": seqlens}
    table = torch.randperm(batch * pages, device=device).view(batch, pages)
    pools = torch.empty_like(caches).view(2, batch * pages, PAGE, KEY_HEADS, HEAD_DIM)
    pools[:, table.flatten()] = caches.view_as(pools)
    return {"k_cache": pools[0], "v_cache": pools[1], "cache_seqlens": seqlens, "block_table": table.int()}


def rows_of(cache: dict[str, Any], name: str) -> Tensor:
    """[B, capacity, Hk, D] of either kind of cache."""
    if "block_table" not in cache:
        return cache[name]
    return cache[name][cache["block_table"].long()].flatten(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("paged", [False, True], ids=["whole", "paged"])
def test_cache_is_attention_to_all_keys(paged: bool, causal: bool, dtype: torch.dtype, device: str) -> None:
    lengths, new = (5, 0, 31), 3
    after = tuple(length + new for length in lengths)

    def full(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
        cu = cumulative((new,) * len(lengths), device), cumulative(after, device)
        out, lse = references.window_attn(q.flatten(0, 1), torch.cat(keys), torch.cat(values), *cu, causal=causal)
        return out.view(q.shape), lse.view(HEADS, *q.shape[:2]).transpose(0, 1)

    def draw(seed: int) -> Draw:
        torch.manual_seed(seed)
        cache = make_cache(lengths, paged, dtype, device)
        q = torch.randn(len(lengths), new, HEADS, HEAD_DIM, device=device).to(dtype)
        k, v = torch.randn(2, len(lengths), new, KEY_HEADS, HEAD_DIM, device=device).to(dtype)
        seqlens = cache["cache_seqlens"].clone()
        with poisoned():
            results = flash_attn_with_kvcache(q, k=k, v=v, **cache, causal=causal, return_softmax_lse=True)
        assert torch.equal(cache["cache_seqlens"], seqlens)
        both = []
        for name, fresh in (("k_cache", k), ("v_cache", v)):
            rows = rows_of(cache, name)
            assert all(torch.equal(rows[b, length : length + new], fresh[b]) for b, length in enumerate(lengths))
            both.append([rows[b, :length] for b, length in enumerate(after)])
        wide = ([each.double() for each in tensors] for tensors in both)
        eager, truth = full(q, *both), full(q.double(), *wide)
        drawn = (dict(zip(("out", "lse"), pair, strict=True)) for pair in (results, eager, truth))
        return next(drawn), next(drawn), next(drawn)

    check_draws(draw)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [HEAD_DIM // 2, HEAD_DIM // 4])
def test_cache_turns_keys_and_queries(pairs: int, interleaved: bool, device: str) -> None:
    cache = make_cache((5, 0, 31), False, torch.float32, device)
    draw = draw_of(device)
    q, k, v = draw(3, 4, HEADS, HEAD_DIM), draw(3, 4, KEY_HEADS, HEAD_DIM), draw(3, 4, KEY_HEADS, HEAD_DIM)
    angles = draw(CAPACITY, pairs)
    views = {name: cache[name].transpose(1, 2).clone() for name in ("k_cache", "v_cache")}
    seqlens = cache["cache_seqlens"]
    tables = angles.cos(), angles.sin()
    turned = kv_cache_append(
        k.transpose(1, 2), v.transpose(1, 2), *views.values(), seqlens, None, q.transpose(1, 2), *tables, interleaved
    )
    expected = attention_decode(turned, *views.values(), seqlens + 4, causal=True).transpose(1, 2)
    out = flash_attn_with_kvcache(q, k=k, v=v, rotary_cos=tables[0], rotary_sin=tables[1], **cache, causal=True,
                                  rotary_interleaved=interleaved)  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(cache["k_cache"].transpose(1, 2), views["k_cache"], rtol=0, atol=0, equal_nan=True)


def test_every_argument_reaches_the_decode_op(device: str) -> None:
    cache = make_cache((5, 9, 31), True, torch.float32, device)
    slopes = draw_of(device)(HEADS).abs()
    q = draw_of(device)(3, 2, HEADS, HEAD_DIM)
    out, lse = flash_attn_with_kvcache(
        q, **cache, **EVERYTHING, alibi_slopes=slopes, num_splits=2, return_softmax_lse=True
    )
    views = (cache[name].transpose(1, 2) for name in ("k_cache", "v_cache"))
    expected, expected_lse = attention_decode(
        q.transpose(1, 2), *views, cache["cache_seqlens"], cache["block_table"], **AS_OPS, alibi_slopes=slopes,
        num_splits=2, return_lse=True,
    )  # fmt: skip
    assert torch.equal(out, expected.transpose(1, 2)) and torch.equal(lse, expected_lse) and out.is_contiguous()


@pytest.mark.parametrize("paged", [False, True], ids=["whole", "paged"])
def test_lengths_may_be_one_number_or_left_out(paged: bool, device: str) -> None:
    cache = make_cache((CAPACITY,) * 2, paged, torch.float32, device)
    q = draw_of(device)(2, 1, HEADS, HEAD_DIM)
    seqlens = cache.pop("cache_seqlens")
    outs = [flash_attn_with_kvcache(q, **cache, cache_seqlens=given) for given in (seqlens, CAPACITY, None)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    few = flash_attn_with_kvcache(q, **cache, cache_seqlens=7)
    assert torch.equal(few, flash_attn_with_kvcache(q, **cache, cache_seqlens=torch.full_like(seqlens, 7)))


@pytest.mark.no_interpret
def test_a_length_on_the_host_has_room_for_new_keys(device: str) -> None:
    """It is refused before anything is written; of a length on the device, keys without room are dropped."""
    q, angles = torch.zeros(1, 1, 1, 8, device=device), torch.ones(3, 4, device=device)
    for pages, length, added, turned in product((0, 2), range(-1, 36), (0, 1, 2), (False, True)):
        if pages and turned:
            continue
        shape, capacity = ((2, 16, 1, 8), 32) if pages else ((1, 2, 1, 8), 2)
        cache = torch.ones(shape, device=device)
        k = torch.full((1, added, 1, 8), 9.0, device=device) if added else None
        tables = {"rotary_cos": angles[:1], "rotary_sin": angles[:1]} if turned and added == 1 else {}
        table = torch.arange(2, device=device).int()[None] if pages else None
        call = partial(flash_attn_with_kvcache, q, cache, cache.clone(), k, k, block_table=table, **tables)
        fits = 0 <= length and length + added <= (1 if tables else capacity)
        refused = pytest.raises(ValueError, match="cache_seqlens is|rows of rotary_cos")
        with contextlib.nullcontext() if fits else refused:
            call(cache_seqlens=np.int64(length))
        assert (cache == 9).sum() <= (8 * added if fits else 0)


def _refusals() -> dict[str, tuple[Callable[[], Any], str]]:
    x, packed = torch.randn(1, 3, 2, 8), torch.randn(3, 2, 8)
    cu = cumulative((3,), "cpu")
    cache = partial(flash_attn_with_kvcache, x, x, x, cache_seqlens=1)
    angles = torch.ones(4, 4)
    varlen = partial(flash_attn_varlen_func, packed, packed, packed, cu, cu, 3, 3)
    return {
        "layout": (lambda: flash_attn_func(packed, x, x), "func: q has shape [3, 2, 8], expected shape [B, S, H, D]"),
        "none": (lambda: flash_attn_func(x, None, x), "func: k is None, expected a dense tensor"),
        "packed_layout": (lambda: flash_attn_qkvpacked_func(x), "qkvpacked_func: qkv.* expected shape [B, S, 3, H, D]"),
        "pairs": (lambda: flash_attn_kvpacked_func(x, torch.ones(1, 3, 3, 2, 8)),
                  "kv has .*, expected shape [B, S, 2, H, D]"),
        "varlen_layout": (lambda: flash_attn_varlen_func(x, x, x, cu, cu, 3, 3), "q has .*, expected shape [T, H, D]"),
        "varlen_packed": (lambda: flash_attn_varlen_qkvpacked_func(packed, cu, 3), "qkv.* expected shape [T, 3, H, D]"),
        "varlen_pairs": (lambda: flash_attn_varlen_kvpacked_func(packed, packed, cu, cu, 3, 3),
                         "kv has .*, expected shape [T, 2, H, D]"),
        "varlen_pages": (lambda: varlen(block_table=cu), "flash_attn_varlen_func: block_table is .*, expected None"),
        "scale": (lambda: flash_attn_func(x, x, x, softmax_scale=-1.0),
                  "softmax_scale is .*, expected a positive number or None"),
        "tensor": (lambda: varlen(softmax_scale=torch.ones(())), "softmax_scale is .*, expected a number"),
        "window": (lambda: flash_attn_func(x, x, x, window_size=4), "window_size is 4, expected a pair (left, right)"),
        "width": (lambda: varlen(window_size=(1.5, 0)), "window_size is 1.5, expected an integer"),
        "dropout": (lambda: flash_attn_func(x, x, x, 1.0), "dropout_p is .*, expected a probability"),
        "head_dim": (lambda: flash_attn_func(*[x[..., :5]] * 3), "the head dimension of q.* expected a multiple of 8"),
        "cache_batch_idx": (lambda: cache(cache_batch_idx=cu), "kvcache: cache_batch_idx is .*, expected None"),
        "cache_leftpad": (lambda: cache(cache_leftpad=cu), "kvcache: cache_leftpad is .*, expected None"),
        "queries": (lambda: flash_attn_with_kvcache(torch.ones(1, 17, 2, 8), x, x),
                    "q has 17, expected 0 to 16 queries of each sequence"),
        "no_v": (lambda: cache(k=x), "k is .*, expected None where v is"),
        "no_k": (lambda: cache(v=x), "v is .*, expected None where k is"),
        "no_sin": (lambda: cache(k=x, v=x, rotary_cos=angles), "rotary_cos is .*, expected None where rotary_sin is"),
        "no_cos": (lambda: cache(k=x, v=x, rotary_sin=angles), "rotary_sin is .*, expected None where rotary_cos is"),
        "nothing_new": (lambda: cache(rotary_cos=angles, rotary_sin=angles), "rotary_cos.* expected None where k is"),
        "no_lengths": (lambda: flash_attn_with_kvcache(x, x, x, x, x), "cache_seqlens.* expected lengths where k is"),
        "length": (lambda: flash_attn_with_kvcache(x, x, x, cache_seqlens=1.0), "cache_seqlens.* expected an integer"),
        "no_room": (lambda: cache(k=x, v=x, cache_seqlens=2),
                    "cache_seqlens is 2, expected from 0 to 3 positions less 3"),
        "fewer_new": (lambda: cache(k=x[:, :1], v=x[:, :1], rotary_cos=angles, rotary_sin=angles),
                      "q has 3, expected 1 rows as k is, where rotary_cos is given"),
        "one_angle": (lambda: cache(k=x, v=x, rotary_cos=angles, rotary_sin=angles),
                      "rotary_cos is .*, expected None for several queries"),
        "pages": (lambda: flash_attn_with_kvcache(x, x, x, block_table=cu), "block_table.* expected shape [B, pages]"),
        "cache_layout": (lambda: flash_attn_with_kvcache(x, x[0], x), "k_cache has .*, expected shape [B, S, H, D]"),
    }  # fmt: skip


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", _refusals())
def test_refuses_by_name(name: str) -> None:
    call, message = _refusals()[name]
    with pytest.raises(ValueError, match=".*".join(map(re.escape, message.split(".*")))):
        call()


@pytest.mark.no_interpret
def test_signatures_are_those_of_flash_attn() -> None:
    """In order, from the sources of 2.8; only what is not looked at may be left out here."""
    shared = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    keys = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    expected = {
        flash_attn_func: f"q k v {shared}",
        flash_attn_kvpacked_func: f"q kv {shared}",
        flash_attn_qkvpacked_func: f"qkv {shared}",
        flash_attn_varlen_func: f"q k v {keys} {shared} block_table",
        flash_attn_varlen_kvpacked_func: f"q kv {keys} {shared}",
        flash_attn_varlen_qkvpacked_func: f"qkv cu_seqlens max_seqlen {shared}",
        flash_attn_with_kvcache: "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits "
        "return_softmax_lse",
    }
    for function, names in expected.items():
        parameters = inspect.signature(function).parameters.values()
        assert [parameter.name for parameter in parameters] == names.split()
        optional = [parameter.default is not parameter.empty for parameter in parameters]
        assert all(later or not earlier for earlier, later in pairwise(optional))
