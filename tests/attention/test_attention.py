"""Numerics, semantics and refusals of vk::attention and its backward."""

import json
import re
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import torch_ops
from csrc_free_ops.configs.rows import Config, TunedConfig, as_document
from tests import verify as every_op
from tests.attention.verify import (
    backward,
    differentiate,
    plans_made_anew,
    verify,
    verify_downcast,
    verify_merged_halves,
)
from tests.testing.interpreter import with_dtypes
from tests.verify import DTYPES, GPU, INTERPRET, flops_of
from torch_ops import attention, settings, window_attn
from torch_ops._attention import portable as attention_portable
from torch_ops._attention import split as attention_split
from torch_ops._attention.split import plan_split_sum
from torch_ops._core.launch import current_gpu
from torch_ops._core.philox import keep_weights, philox
from torch_ops.testing import assert_close_to_reference, references
from torch_ops.testing.cases import DENSE_LAYOUTS, DenseCase, cumulative, dense_cases, make_dense_inputs

# On the CPU a few head dims stand for all, as in the tests of packed attention.
CASES = [c for c in dense_cases("edge") if GPU or not re.fullmatch(r"d\d+", c.name) or c.head_dim % 40 in (0, 16)]

pytestmark = pytest.mark.interpret


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_references_agree_with_each_other(case: DenseCase) -> None:
    """Autograd through the forward reference is the backward reference."""
    inputs = make_dense_inputs(case, torch.float64)
    by_autograd = differentiate(references.attention, inputs)
    for name, tensor in backward(inputs, by_autograd["out"], by_autograd["lse"]).items():
        torch.testing.assert_close(tensor, by_autograd[name])


@pytest.mark.no_interpret
@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_pytorch_s(causal: bool) -> None:
    q, k, v = (torch.randn(2, heads, 20, 16, dtype=torch.float64) for heads in (6, 2, 2))
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(references.attention(q, k, v, causal=causal)[0], expected)


# The CPU loops over sequences of packed attention, which test_window_attn.py runs at every dtype.
@with_dtypes(CASES, DTYPES, in_turn=not GPU)
def test_agrees_with_reference(case: DenseCase, dtype: torch.dtype, device: str) -> None:
    verify(make_dense_inputs(case, dtype, device))


@pytest.mark.parametrize(("softcap", "scale"), [(100.0, 25.0), (50.0, 12.5)])
def test_gradients_where_a_softcap_is_all_but_reached(softcap: float, scale: float, device: str) -> None:
    """Scores pass it many times over, and its slope there is not what 1 - tanh^2 leaves of it."""
    heads = 1 if INTERPRET else 4
    case = DenseCase("capped", "softcap", 1, heads, 128, 64, options={"softcap": softcap, "scale": scale})
    verify(make_dense_inputs(case, torch.float32, device))


def test_a_sink_of_no_weight_leaves_rows_without_keys_empty(device: str) -> None:
    """-inf switches a sink off: the first two rows see neither a key nor it."""
    q, k, v = (torch.randn(1, 2, rows, 16, device=device) for rows in (3, 1, 1))
    sinks = torch.tensor([-torch.inf, 0.0], device=device, requires_grad=True)
    out, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert not out[:, :, :2].any()
    torch.testing.assert_close(out[:, 0, 2], v[:, 0, 0])
    assert lse[0, :, :2].tolist() == [[-torch.inf] * 2, [0.0] * 2]
    (dsinks,) = torch.autograd.grad(out.sum(), sinks)
    assert dsinks[0] == 0 and dsinks.isfinite().all()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_weights_add_up_to_one_at_any_score(has_sinks: bool, device: str) -> None:
    """An lse of 7200 is off by 2^-12 once rounded; weights made of it would be too."""
    q, v = torch.full((1, 2, 33, 64), 30.0, device=device), torch.ones(1, 2, 33, 64, device=device)
    sinks = torch.full((2,), -10.0, device=device) if has_sinks else None
    out = attention(q, q, v, causal=True, sinks=sinks)
    assert (out - 1).abs().max() < 2**-18


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 64, 72, 128])
def test_tf32_is_rounded_to_as_pytorch_does(head_dim: int, device: str, matmul: Any) -> None:
    """Not cut off, which would be off by twice as much. Infinities and NaN stay such."""
    matmul.allow_tf32 = True
    verify(make_dense_inputs(DenseCase("tf32", "its rule", 2, 4, 200, head_dim), torch.float32, device))
    q = torch.randn(1, 1, 40, head_dim, device=device)
    v = q.clone()
    v[..., 3, 5], v[..., 4, 6] = float("inf"), float("nan")
    out = attention(q, q, v)
    assert out[..., 5].isposinf().all() and out[..., 6].isnan().all()
    assert out.isfinite().sum() == out.numel() - 2 * 40


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["b2h8kv4s1024d128_causal", "b1h8s512d64_causal", "b1h8s512d64"])
@pytest.mark.parametrize("layout", ["heads_first", "rows_first"])
def test_agrees_at_real_shapes(name: str, layout: str, device: str) -> None:
    case = next(case for case in dense_cases("bench") if case.name == name)
    verify(make_dense_inputs(replace(case, layout=layout), torch.bfloat16, device))


LONGEST, WIDEST = (40, 12) if INTERPRET else (300, 16 if GPU else 32)


@st.composite
def calls(draw: Any) -> tuple[DenseCase, torch.dtype]:
    group, num_k_heads = draw(st.sampled_from([1, 2] if INTERPRET else [1, 2, 3, 7])), draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window_left": draw(st.sampled_from([-1, -1, 0, 5, 64, 1000])),
        "window_right": draw(st.sampled_from([-1, -1, 0, 7, 1000])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "scale": draw(st.sampled_from([None, 0.3])),
    }
    options |= {name: value for name, value in (("alibi", 1), ("alibi", 2), ("sinks", True)) if draw(st.booleans())}
    if draw(st.booleans()):
        options["dropout_p"] = draw(st.sampled_from([0.1, 0.9]))
    length = draw(st.integers(40, 60) if INTERPRET else st.integers(150, 200))
    case = DenseCase(
        "fuzz", "anything", draw(st.integers(1, 3)), group * num_k_heads, length, draw(st.integers(1, WIDEST)) * 8,
        num_k_heads=num_k_heads, k_length=draw(st.one_of(st.none(), st.integers(0, LONGEST))),
        layout=draw(st.sampled_from(DENSE_LAYOUTS)), options=options,
    )  # fmt: skip
    return case, draw(st.sampled_from([torch.float16] if INTERPRET else DTYPES))


@given(calls(), st.integers(0, 2**16))
@hypothesis_settings(max_examples=24 if GPU else 8)
def test_agrees_on_anything(call: tuple[DenseCase, torch.dtype], seed: int) -> None:
    case, dtype = call
    verify(make_dense_inputs(case, dtype, "cuda" if GPU else "cpu", seed))


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", dense_cases("smoke"), ids=lambda case: case.name)
def test_same_bits_every_time(case: DenseCase, device: str) -> None:
    inputs = make_dense_inputs(case, torch.float16, device)
    every_op.assert_same_bits(lambda: differentiate(torch.ops.vk.attention, inputs))


# A GPU has larger tiles than the interpreter.
LONG = 1 if INTERPRET else 4
IN_PARTS: dict[str, dict[str, Any]] = {
    "full": {"length": 70 * LONG},
    "causal": {"batch": 3, "length": 50 * LONG, "options": {"causal": True}},
    "window": {"length": 90 * LONG, "k_length": 200 * LONG, "options": {"window_left": 50, "window_right": 20}},
    "few_queries": {"length": 1, "k_length": 300 * LONG, "options": {"causal": True}},
    "few_keys": {"length": 300 * LONG, "k_length": 5},
    "unseen": {"length": 100 * LONG, "k_length": 40 * LONG, "options": {"causal": True, "window_left": 10}},
    "gqa": {"batch": 2, "length": 70 * LONG, "num_k_heads": 1, "layout": "rows_first", "options": {"causal": True}},
    "steps": {"length": 70 * LONG, "options": {"dropout_p": 0.25, "alibi": 2, "sinks": True, "softcap": 3.0}},
}


# In the interpreter a case has one head dimension for each way, and each way has both.
WAYS = ("beside each other", "one after the other")
IN_PARTS_EITHER_WAY = [
    (name, way, head_dim)
    for place, name in enumerate(IN_PARTS)
    for turn, way in enumerate(WAYS)
    for column, head_dim in enumerate((40, 64))
    if GPU or (place + turn + column) % 2 == 0
]


@pytest.mark.skipif(not (INTERPRET or GPU), reason="a CPU has no kernels")
@pytest.mark.parametrize(("name", "way", "head_dim"), IN_PARTS_EITHER_WAY)
def test_gradients_in_parts(name: str, way: str, head_dim: int, device: str) -> None:
    """With few tiles of fp32 rows, the blocks that a program passes over are split, and parts are added up.

    Where those of queries and of keys are few together, they are made beside each other.
    """
    case = DenseCase(name, way, **{"batch": 1, "num_heads": 2, "head_dim": head_dim, **IN_PARTS[name]})
    inputs = make_dense_inputs(case, torch.float32, device)
    beside = way == "beside each other"
    planning = attention_split if beside else attention_portable
    with ExitStack() as stack:
        planned = stack.enter_context(mock.patch.object(planning, "plan_split_sum", wraps=plan_split_sum))
        if not beside:
            stack.enter_context(mock.patch.object(attention_portable, "small_configs", lambda *args: None))
        if INTERPRET:
            # It is taken to have fewer multiprocessors than a GPU.
            gpu = replace(current_gpu(), multiprocessors=32)
            stack.enter_context(mock.patch.object(attention_split, "current_gpu", lambda: gpu))
        stack.enter_context(plans_made_anew())
        verify(inputs)
        # The interpreter runs programs one after another, so that sums have one order.
        runs = [differentiate(torch.ops.vk.attention, inputs) for _ in range(2 if GPU else 0)]
    assert planned.called
    for name in runs[0] if runs else ():
        assert torch.equal(runs[0][name], runs[1][name]), name


@pytest.mark.gpu
def test_a_row_of_the_user_s_own_keeps_its_tile(tmp_path: Path) -> None:
    """Where one kernel for all gradients would want another, there are two."""
    own = Config(32, 128, 8, 1)
    rows = tmp_path / "rows.json"
    row = TunedConfig("attention_bwd_dkdv", "float32", 128, own)
    rows.write_text(json.dumps(as_document([row], {"gpu": "any", "triton": "-", "date": "-"})))
    inputs = make_dense_inputs(DenseCase("own", "", 1, 2, 200, 128, options={"causal": True}), torch.float32, "cuda")
    with settings(path="auto", rows=str(rows)):
        kernels = inputs.call(partial(torch_ops.explain, attention))["kernels"]
        verify(inputs)
    assert kernels["attention_bwd_dkdv"]["launch"] == own.entry()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.25, "alibi": 2, "sinks": True}], ids=str)
def test_a_batch_is_packed_sequences_of_one_length(options: dict[str, Any], device: str) -> None:
    """The dropout mask is that of the packed op too, whatever the path."""
    case = DenseCase("same", "packed", 2, 4, 70, 40, num_k_heads=2, options=options)
    inputs = make_dense_inputs(case, torch.float32, device)
    dense, lse = inputs.call(torch.ops.vk.attention)
    packed = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (inputs.q, inputs.k, inputs.v))
    out, packed_lse = window_attn(*packed, cumulative((70,) * 2, device), return_lse=True, **inputs.options)
    exact = inputs.call(references.attention, **{name: getattr(inputs, name).double() for name in "qkv"})
    assert_close_to_reference(dense, out.unflatten(0, (2, 70)).transpose(1, 2), exact[0], "out")
    assert_close_to_reference(lse, packed_lse.unflatten(1, (2, 70)).transpose(0, 1), exact[1], "lse")


@pytest.mark.parametrize("layout", ["heads_first", "rows_first", "batch_inside"])
def test_results_lie_as_inputs_do(layout: str, device: str) -> None:
    """Transposed inputs give transposed results, and gradients are not copied."""
    inputs = make_dense_inputs(
        DenseCase("order", "memory", 2, 4, 30, 16, num_k_heads=2, k_length=20, layout=layout), torch.float16, device
    )
    tensors = [inputs.q, inputs.k, inputs.v]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out, _ = torch.ops.vk.attention(*leaves)
    assert out.stride() == inputs.q.stride()
    grads = torch.ops.vk.attention_backward(inputs.dout, None, *tensors, *torch.ops.vk.attention(*tensors))
    assert [grad.stride() for grad in grads] == [tensor.stride() for tensor in tensors]


@pytest.mark.no_interpret
def test_philox_is_philox() -> None:
    """The known answers of Random123 (Salmon et al., SC 2011), of 7 and of 10 rounds."""
    answers = {
        (7, 0, 0): "5f6fb709 0d893f64 4f121f81 4f730a48",
        (7, -1, 0xFFFFFFFF): "5207ddc2 45165e59 4d8ee751 8c52f662",
        (10, 0, 0): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        (10, -1, 0xFFFFFFFF): "408f276d 41c83b0e a20bc7c6 6d5451fd",
    }
    for (rounds, seed, word), expected in answers.items():
        words = philox(torch.tensor(seed), (torch.tensor(word),) * 4, rounds)
        assert " ".join(f"{int(each):08x}" for each in words) == expected


def test_dropout_drops_what_it_should(device: str) -> None:
    """With weights of one over the number of keys and values of one, out is the share that is kept, grown."""
    q, k = torch.zeros(2, 3, 50, 16, device=device), torch.zeros(2, 3, 40, 16, device=device)
    seed = torch.tensor([77], device=device)
    out = attention(q, k, torch.ones_like(k), dropout_p=0.4, dropout_seed=seed)
    kept = keep_weights(
        seed, torch.arange(6, device=device).view(2, 3), torch.arange(50, device=device), 40, 0.4
    ).float()
    torch.testing.assert_close(out[..., 0], kept.mean(-1) / 0.6)
    assert abs(kept.mean().item() - 0.6) < 0.02
    rows, keys = kept.mean(-1), kept.mean(-2)
    assert rows.std() < 0.12 and keys.std() < 0.12, "no row and no key is favoured"


def test_seed_is_pytorch_s(device: str) -> None:
    q = torch.randn(1, 2, 40, 16, device=device)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attention(q, q, q, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_merging_halves_of_the_keys_gives_the_whole(device: str) -> None:
    inputs = make_dense_inputs(DenseCase("merge", "merged lse", 2, 2, 40, 64), torch.float32, device)
    verify_merged_halves(inputs)


@pytest.mark.parametrize("lie", ["expanded", "strided"])
def test_slopes_and_sinks_in_any_strides(lie: str, device: str) -> None:
    q = torch.randn(2, 4, 40, 16, device=device)
    if lie == "expanded":
        slopes, sinks = torch.rand(4, device=device).expand(2, 4), torch.rand((), device=device).expand(4)
    else:
        slopes, sinks = torch.rand(4, 2, device=device).t(), torch.rand(4, 3, device=device)[:, 1]
    leaf, copy = (q.clone().requires_grad_() for _ in range(2))
    out = attention(leaf, q, q, alibi_slopes=slopes, sinks=sinks)
    expected = attention(copy, q, q, alibi_slopes=slopes.contiguous(), sinks=sinks.contiguous())
    assert torch.equal(out, expected)
    assert torch.equal(*(torch.autograd.grad(x.sum(), y)[0] for x, y in ((out, leaf), (expected, copy))))


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_scores_of_minus_infinity_weigh_nothing(options: dict[str, Any], device: str) -> None:
    """Whole blocks of them too, which are no rows without keys."""
    q, k, v = (torch.randn(1, 1, 64, 16, device=device) for _ in range(3))
    q = q.abs() + 0.1
    k[:, :, :40, 0] = -torch.inf
    results = attention(q, k, v, return_lse=True, **options)
    eager = references.attention(q, k, v, **options)
    exact = references.attention(q.double(), k.double(), v.double(), **options)
    for result, yardstick, truth in zip(results, eager, exact, strict=True):
        assert_close_to_reference(result, yardstick, truth)


@pytest.mark.no_interpret
def test_gradients_come_in_batches(device: str) -> None:
    """As `torch.autograd.functional.jacobian` asks for them where it is vectorized; of sinks too."""
    q, k = (torch.randn(1, 2, 4, 8, device=device, requires_grad=True) for _ in range(2))
    sinks = torch.randn(2, device=device, requires_grad=True)
    out, lse = attention(q, k, k, sinks=sinks, return_lse=True)
    douts = torch.randn(3, *out.shape, device=device)
    leaves = q, k, sinks
    batched = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    for index, dout in enumerate(douts):
        for all_of_them, one in zip(batched, torch.autograd.grad(out, leaves, dout, retain_graph=True), strict=True):
            assert_close_to_reference(all_of_them[index], one, one.double())


def test_rows_of_such_scores_alone_have_no_gradient(device: str) -> None:
    """And give none, as rows without keys."""
    q, k, v = (torch.randn(1, 2, 40, 16, device=device) for _ in range(3))
    k[..., 0] = k[..., 0].abs() + 0.1
    q[:, :, 5, 0] = -torch.inf
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = attention(*leaves, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, torch.randn_like(out))
    # PyTorch's own kernel on the CPU has lse 0 there.
    assert lse[:, :, 5].isneginf().all() or not (GPU or INTERPRET)
    assert not out[:, :, 5].any() and not gradients[0][:, :, 5].any()
    # Its ds of 0 times q of -inf is no number, in the column of that one.
    assert all(gradient[..., 1:].isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("shared", ["heads", "batch"])
def test_expanded_keys(shared: str, device: str) -> None:
    """One key head for all, or one sequence of keys, by strides of 0."""
    q = torch.randn(3, 4, 40, 16, device=device)
    k, v = (
        torch.randn((3, 1, 40, 16) if shared == "heads" else (1, 4, 40, 16), device=device).expand(3, 4, 40, 16)
        for _ in range(2)
    )
    eager, exact = (references.attention(*(x.to(dtype) for x in (q, k, v)))[0] for dtype in (q.dtype, torch.float64))
    assert_close_to_reference(attention(q, k, v), eager, exact)


def test_gradients_with_zero_strides(device: str) -> None:
    inputs = make_dense_inputs(DenseCase("sum", "expanded dout", 2, 2, 40, 72), torch.float32, device)
    every_op.assert_expanded_gradients(lambda q: inputs.call(attention, q=q), inputs.q)


def test_nothing_is_read_past_a_sequence(device: str) -> None:
    """Rows between sequences, and behind the last, reach neither results nor gradients."""
    case = DenseCase("cut", "gaps", 3, 2, 37, 72, layout="cut", options={"causal": True})
    clean, dirty = (make_dense_inputs(case, torch.float16, device) for _ in range(2))
    for tensor in (dirty.q, dirty.k, dirty.v, dirty.dout):
        base = tensor._base
        own = tensor.clone()
        base.fill_(torch.nan)
        tensor.copy_(own)
    for name, tensor in differentiate(torch.ops.vk.attention, dirty).items():
        assert torch.equal(tensor, differentiate(torch.ops.vk.attention, clean)[name]), name


@pytest.mark.no_interpret
@pytest.mark.parametrize("bounds", [(-1, 0), (7, 0), (3, 5)], ids=str)
def test_values_that_a_row_does_not_see_never_reach_it_on_a_cpu(bounds: tuple[int, int]) -> None:
    """Each row is compared with attention over its own keys alone, which hold what they hold."""
    left, right = bounds
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 24, 8, dtype=torch.float64) for _ in range(4))
    k[..., 9, 0], v[..., 12, 3], v[..., 12, 4] = torch.nan, torch.inf, -torch.inf
    v[..., 14, 3], v[..., 17, 5], dout[..., 2, 1], q[..., 4, 2] = -torch.inf, torch.nan, torch.nan, torch.inf
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = attention(*leaves, window_left=left, window_right=right)
    gradients = torch.autograd.grad(out, leaves, dout)
    sums = [torch.zeros_like(tensor) for tensor in leaves]
    for row in range(24):
        keys = slice(0 if left < 0 else max(row - left, 0), row + right + 1)
        own = [q[..., row : row + 1, :], k[..., keys, :], v[..., keys, :]]
        alone = scaled_dot_product_attention(*own)
        torch.testing.assert_close(out[..., row : row + 1, :], alone, equal_nan=True)
        for total, gradient in zip(sums, torch.autograd.grad(alone, leaves, dout[..., row : row + 1, :]), strict=True):
            # The slices' backward fills the other rows with zeros, which add nothing.
            total += gradient
    for name, ours, exact in zip("qkv", gradients, sums, strict=True):
        torch.testing.assert_close(ours, exact, equal_nan=True, msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.no_interpret
def test_gradcheck() -> None:
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor([3])

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> Any:
        return attention(q, k, v, causal=True, sinks=sinks, dropout_p=0.3, dropout_seed=seed, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))


HALVES = [dtype for dtype in DTYPES if dtype.itemsize == 2]


@pytest.mark.parametrize("options", [{}, {"causal": True, "sinks": True, "dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize("compute_dtype", HALVES, ids=str)
def test_downcast_is_asked_for(compute_dtype: torch.dtype, options: dict[str, Any], device: str) -> None:
    """fp32 in and out, gradients too, with the bits of a call in the half type where no kernel casts as it goes."""
    inputs = make_dense_inputs(DenseCase("downcast", "fp32", 2, 2, 40, 64, options=options), torch.float32, device)
    halves = replace(inputs, **{name: getattr(inputs, name).to(compute_dtype) for name in ("q", "k", "v", "dout")})
    with torch_ops.settings(path="portable"):
        results = differentiate(partial(torch.ops.vk.attention, compute_dtype=compute_dtype), inputs)
        expected = differentiate(torch.ops.vk.attention, halves)
    for name, tensor in results.items():
        assert tensor.dtype is torch.float32, name
        # That of sinks is made of dout as it came.
        assert name == "dsinks" or torch.equal(tensor, expected[name].float()), name


ROWS = 40 if INTERPRET else 200
DOWNCASTS = (
    DenseCase("downcast", "no mask", 2, 2, ROWS, 64),
    DenseCase("causal_gqa", "a key head of three", 2, 6, ROWS, 128, num_k_heads=2, options={"causal": True}),
    DenseCase("window", "masked blocks on both sides", 2, 2, ROWS, 96, options={"window_left": 70, "window_right": 25}),
    DenseCase("sinks", "a logit more", 2, 4, ROWS, 72, num_k_heads=2, options={"sinks": True}),
    DenseCase("cross", "more keys", 3, 2, ROWS, 80, k_length=ROWS + 70, options={"causal": True}),
    DenseCase("tall", "rows that see no key", 2, 2, ROWS, 64, k_length=30, options={"causal": True, "sinks": True}),
    DenseCase("steps", "what only stock Triton has", 2, 2, ROWS, 64, options={"alibi": 2, "dropout_p": 0.2}),
    DenseCase("narrow", "a head dimension of stock Triton's", 2, 2, ROWS, 40),
    *(DenseCase(layout, "strides", 2, 2, ROWS, 64, layout=layout) for layout in DENSE_LAYOUTS[1:]),
)


@pytest.mark.parametrize("case", DOWNCASTS, ids=lambda case: case.name)
@pytest.mark.parametrize("compute_dtype", HALVES, ids=str)
def test_downcast_agrees_with_reference(case: DenseCase, compute_dtype: torch.dtype, device: str) -> None:
    verify_downcast(make_dense_inputs(case, torch.float32, device), compute_dtype)


def test_downcast_with_and_without_lse(device: str) -> None:
    """Also of expanded keys, which TMA cannot address, and of none."""
    q, k = torch.randn(2, 4, ROWS, 64, device=device), torch.randn(2, 1, ROWS, 64, device=device)
    for keys in (k, k.expand(2, 4, ROWS, 64), k[:, :, :0]):
        out, lse = attention(q, keys, keys, return_lse=True, compute_dtype=torch.float16)
        assert torch.equal(attention(q, keys, keys, compute_dtype=torch.float16), out)
        assert lse.shape == q.shape[:3] and lse.dtype is out.dtype is torch.float32
    assert not out.any() and lse.isneginf().all()


@pytest.mark.parametrize("path", ["portable", "auto"])
def test_downcast_keeps_sinks_in_either_type(path: str, device: str) -> None:
    with torch_ops.settings(path=path):
        _assert_sinks_of_either_type(device)


def _assert_sinks_of_either_type(device: str) -> None:
    q = torch.randn(1, 2, ROWS, 64, device=device)
    wide = torch.randn(2, device=device).half().float()
    outs = []
    for sinks in (wide, wide.half()):
        leaf = sinks.requires_grad_()
        out = attention(q, q, q, sinks=leaf, compute_dtype=torch.float16)
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        assert gradient.dtype is sinks.dtype and gradient.any()
        outs.append(out)
    assert torch.equal(*outs)
    with pytest.raises(
        ValueError, match="^attention: sinks is bfloat16, expected float32 or float16 as compute_dtype is"
    ):
        attention(q, q, q, sinks=wide.bfloat16(), compute_dtype=torch.float16)


@pytest.mark.no_interpret
def test_downcast_is_of_fp32_and_not_of_autocast(device: str) -> None:
    q = torch.randn(1, 2, ROWS, 64, device=device)
    sinks = torch.randn(2, device=device)
    expected = attention(q, q, q, sinks=sinks, compute_dtype=torch.float16, return_lse=True)
    with torch.autocast(device, torch.bfloat16):
        leaf = q.clone().requires_grad_()
        results = attention(leaf, q, q, sinks=sinks, compute_dtype=torch.float16, return_lse=True)
        (gradient,) = torch.autograd.grad(results[0].sum(), leaf)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    again = attention(leaf, q, q, sinks=sinks, compute_dtype=torch.float16)
    assert torch.equal(gradient, torch.autograd.grad(again.sum(), leaf)[0])
    for name in "qkv":
        given = {**dict.fromkeys("qkv", q), name: q.half()}
        with pytest.raises(ValueError, match=f"^attention: {name}.* expected float32 where compute_dtype is given"):
            attention(**given, compute_dtype=torch.float16)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 30 * 40),
        ({"causal": True}, sum(i + 11 for i in range(30))),
        ({"window_left": 0, "window_right": 0}, 30),
    ],
    ids=str,
)
def test_flops_are_exact(options: dict[str, Any], pairs: int, device: str) -> None:
    q, k = torch.randn(2, 4, 30, 16, device=device, requires_grad=True), torch.randn(2, 2, 40, 16, device=device)
    flops, (out, _) = flops_of(lambda: torch.ops.vk.attention(q, k, k, **options))
    assert flops == 4 * 2 * 4 * 16 * pairs
    assert flops_of(lambda: out.sum().backward())[0] == 10 * 2 * 4 * 16 * pairs


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"q": lambda x: x[0]}, r"q has shape \[2, 10, 16\], expected shape \[B, H, S, D\]"),
    ({"q": lambda x: x.int()}, r"q is int32, expected "),
    ({"k": lambda x: x[:1]}, r"the batch of k is 1, expected 2 as that of q is"),
    ({"k": lambda x: x.half()}, r"k is float16, expected float32 as q is"),
    ({"v": lambda x: x[:, :, :9]}, r"v has 9, expected 10 rows as k is"),
    ({"v": lambda x: x[:, :1]}, r"v has .*, expected shape .* as k is"),
    ({"k": lambda x: x[..., :8]}, r"the head dimension of k is 8, expected 16 as that of q is"),
    ({"q": lambda x: x[:, :1]}, r"the number of heads of k is 2, expected a divisor of the 1 heads of q"),
    ({"scale": -1.0}, r"scale is -1.0, expected a positive number"),
    ({"scale": torch.tensor(1.0)}, r"scale is a tensor, expected a number"),
    ({"window_left": -2}, r"window_left is -2, expected -1 \(unbounded\) or a number of keys"),
    ({"softcap": -1.0}, r"softcap is -1.0, expected 0 \(off\)"),
    ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \[3\], expected shape \[H\] = \[2\]"),
    ({"alibi_slopes": torch.ones(2).half()}, r"alibi_slopes is float16, expected float32"),
    ({"sinks": torch.ones(2, 2)}, r"sinks has shape \[2, 2\], expected shape \[H\] = \[2\]"),
    ({"sinks": torch.ones(2).half()}, r"sinks is float16, expected float32 as q is"),
    ({"dropout_p": 1.0}, r"dropout_p is 1.0, expected a probability from 0 to below 1, in fp32 too"),
    ({"dropout_p": 1 - 2**-30}, r"dropout_p is 0.9\d+, expected a probability from 0 to below 1"),
    ({"dropout_p": torch.tensor(0.1)}, r"dropout_p is a tensor, expected a number"),
    ({"dropout_p": 0.1, "dropout_seed": torch.ones(1)}, r"dropout_seed.* expected int64 of shape"),
    ({"compute_dtype": torch.float32}, r"compute_dtype is torch.float32, expected torch.float16"),
]  # fmt: skip


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message[:30] for _, message in REFUSALS])
def test_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    good = {name: torch.randn(2, 2, 10, 16, device=device) for name in "qkv"}
    every_op.assert_refuses(attention, good, changes, message)


def test_slopes_get_no_gradient_and_say_so(device: str) -> None:
    q = torch.randn(1, 2, 10, 16, device=device, requires_grad=True)
    slopes = torch.ones(2, device=device, requires_grad=True)
    message = "alibi_slopes has requires_grad=True, but it gets no gradient; pass alibi_slopes.detach"
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, alibi_slopes=slopes)


@pytest.mark.no_interpret
def test_backward_refuses(device: str) -> None:
    x = torch.randn(2, 2, 10, 16, device=device)
    lse = torch.zeros(2, 2, 10, device=device)
    good = {"dout": x, "dlse": None, "q": x, "k": x, "v": x, "out": x, "lse": lse}
    for name, value, message in (
        ("dout", x[:1], r"dout has .*, expected shape \[2, 2, 10, 16\] as q is"),
        ("lse", lse[:1], r"lse has .*, expected shape \[B, H, S\] = \[2, 2, 10\]"),
        ("dlse", lse.half(), r"dlse is float16, expected float32"),
    ):
        every_op.assert_refuses(torch.ops.vk.attention_backward, good, {name: value}, message)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_either_mode_and_path_is_right(head_dim: int, device: str) -> None:
    case = DenseCase("modes", "the flag", 2, 4, 600, head_dim, num_k_heads=2, options={"deterministic": False})
    for path in ("hopper", "portable"):
        with torch_ops.settings(path=path):
            verify(make_dense_inputs(case, torch.bfloat16, device))


@pytest.mark.gpu
def test_no_call_waits_for_the_device(device: str) -> None:
    inputs = make_dense_inputs(dense_cases("smoke")[1], torch.bfloat16, device)
    q = inputs.q.requires_grad_()
    every_op.assert_waits_for_nothing(lambda: inputs.call(attention, q=q).backward(inputs.dout))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("path", ["hopper", "portable"])
def test_more_than_two_billion_elements(path: str, device: str) -> None:
    """The last sequence lies past 2^31 elements of q, k, v and every gradient."""
    heads, length, head_dim = 16, 512, 128
    batch = 2**31 // (heads * length * head_dim) + 2
    q, k, v, dout = (torch.empty(batch, heads, length, head_dim, device=device, dtype=torch.bfloat16) for _ in range(4))
    for tensor in (q, k, v, dout):
        tensor.zero_()
        tensor[-1].normal_()
    with torch_ops.settings(path=path):
        out, lse = torch.ops.vk.attention(q, k, v)
        grads = torch.ops.vk.attention_backward(dout, None, q, k, v, out, lse)
        alone = [tensor[-1:].clone() for tensor in (q, k, v, dout)]
        own_out, own_lse = torch.ops.vk.attention(*alone[:3])
        own_grads = torch.ops.vk.attention_backward(alone[3], None, *alone[:3], own_out, own_lse)
    assert (batch - 1) * heads * length * head_dim >= 2**31
    for whole, one in zip((out, lse, *grads), (own_out, own_lse, *own_grads), strict=True):
        assert_close_to_reference(whole[-1:], one, one.double())


# Batch, rows, columns and row stride, or no stride for [S, B, H, D]. Hopper kernels for short and long rows need a GPU.
APART = [(1, 5, 16, 2**22 + 8), (5, 5, 16, 0), *([(5, 300, 64, 0), (5, 100, 128, 0), (5, 3000, 72, 0)] if GPU else [])]


@pytest.mark.parametrize(("batch", "length", "head_dim", "row"), APART, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_row_stride_that_no_model_settles_changes_no_bits(
    batch: int, length: int, head_dim: int, row: int, dtype: torch.dtype, device: str
) -> None:
    """It is a number at run time, of 64 bits where offsets within a tile may need them."""
    compact = [torch.randn(batch, 2, length, head_dim, device=device, dtype=dtype) for _ in range(4)]
    apart = []
    for tensor in compact:
        if row:
            memory = torch.empty(length * row, device=device, dtype=dtype)
            apart.append(memory.as_strided(tensor.shape, (length * row, head_dim, row, 1)).copy_(tensor))
        else:
            apart.append(tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3))
    found = []
    for *leaves, dout in (compact, apart):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = attention(*leaves, causal=True)
        found.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(map(torch.equal, *found))
