"""Numerics, semantics and refusals of vk::window_attn and its backward."""

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torch_ops
from tests import verify as every_op
from tests.attention.verify import backward, differentiate, verify, verify_merged_halves
from tests.testing.interpreter import with_dtypes
from tests.verify import DTYPES, GPU, INTERPRET, flops_of, misaligned
from torch_ops import window_attn
from torch_ops._core.launch import precision_of
from torch_ops.testing import assert_close_to_reference, check, references
from torch_ops.testing.cases import LAYOUTS, WindowAttnCase, cumulative, make_inputs, window_attn_cases

# The interpreter computes in numpy, which has no bf16; on the CPU a few head dims stand for all.
CASES = [c for c in window_attn_cases("edge") if GPU or not re.fullmatch(r"d\d+", c.name) or c.head_dim % 40 in (0, 16)]

pytestmark = pytest.mark.interpret


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_references_agree_with_each_other(case: WindowAttnCase) -> None:
    """Autograd through the forward reference is the backward reference."""
    inputs = make_inputs(case, torch.float64)
    by_autograd = differentiate(references.window_attn, inputs)
    for name, tensor in backward(inputs, by_autograd["out"], by_autograd["lse"]).items():
        torch.testing.assert_close(tensor, by_autograd[name])


@with_dtypes(CASES, DTYPES)
def test_agrees_with_reference(case: WindowAttnCase, dtype: torch.dtype, device: str) -> None:
    verify(make_inputs(case, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3vl_l_1024", "qwen3vl_l_mixed", "qwen25vl_windows", "qwen25vl_ragged"])
def test_agrees_at_real_shapes(name: str, device: str) -> None:
    case = next(case for case in window_attn_cases("bench") if case.name == name)
    verify(make_inputs(dataclasses.replace(case, num_heads=2), torch.bfloat16, device))


# Every head dim has a case of its own; here each example on a GPU builds three kernels.
LONGEST, WIDEST = (40, 12) if INTERPRET else (200, 16 if GPU else 32)
lengths = st.lists(st.one_of(st.just(0), st.just(1), st.integers(2, LONGEST)), max_size=2 if INTERPRET else 5)


@st.composite
def calls(draw) -> tuple[WindowAttnCase, torch.dtype]:
    # With few numbers eager's largest error can be small by luck, and the rule would ask the same of ours.
    q_lengths = (*draw(lengths), draw(st.integers(40, 60) if INTERPRET else st.integers(150, 200)))
    k_lengths = None
    if draw(st.booleans()):
        k_lengths = tuple(draw(st.integers(0, LONGEST)) for _ in q_lengths)
    group, num_k_heads = draw(st.sampled_from([1, 2] if INTERPRET else [1, 2, 3, 7])), draw(st.integers(1, 3))
    options = {
        "causal": draw(st.booleans()),
        "window_left": draw(st.sampled_from([-1, -1, 0, 5, 64, 1000])),
        "window_right": draw(st.sampled_from([-1, -1, 0, 7, 1000])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "scale": draw(st.sampled_from([None, 0.3])),
    }
    case = WindowAttnCase(
        "fuzz", "anything", q_lengths, group * num_k_heads, draw(st.integers(1, WIDEST)) * 8,
        k_lengths=k_lengths, num_k_heads=num_k_heads,
        skipped=draw(st.sampled_from([0, 0, 5, 40])), padding=draw(st.sampled_from([0, 0, 3, 40])),
        layout=draw(st.sampled_from(LAYOUTS)), options=options,
    )  # fmt: skip
    return case, draw(st.sampled_from([torch.float16] if INTERPRET else DTYPES))


@given(calls(), st.integers(0, 2**16))
@hypothesis_settings(max_examples=24 if GPU else 8 if INTERPRET else 60)
def test_agrees_on_anything(call: tuple[WindowAttnCase, torch.dtype], seed: int) -> None:
    case, dtype = call
    verify(make_inputs(case, dtype, "cuda" if GPU else "cpu", seed))


@pytest.mark.gpu
def test_thousands_of_segments(device: str) -> None:
    """Several steps of each search; `test_tiles_cover_every_row_once` has them in the interpreter."""
    case = WindowAttnCase("thousands", "many steps of a search", (2, 0, 1) * 1700, 1, 16)
    verify(make_inputs(case, torch.float32, device))


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", window_attn_cases("smoke"), ids=lambda case: case.name)
def test_same_bits_every_time(case: WindowAttnCase, device: str) -> None:
    inputs = make_inputs(case, torch.float16, device)
    every_op.assert_same_bits(lambda: differentiate(torch.ops.vk.window_attn, inputs))


RELAUNCHED = WindowAttnCase("relaunched", "launches kept from the first call", (90, 40), 2, 72)


def test_every_call_sees_its_own_tensors(device: str) -> None:
    for seed in range(3):
        verify(make_inputs(RELAUNCHED, torch.float16, device, seed))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_gpu_than_the_current_one() -> None:
    op = torch.ops.vk.window_attn
    compiled = torch.compile(op, fullgraph=True)
    for where in ("cuda:1", "cuda:0", "cuda:1"):
        inputs = make_inputs(RELAUNCHED, torch.float16, where)
        verify(inputs)
        assert torch.equal(inputs.call(compiled)[0], inputs.call(op)[0])
    assert torch.cuda.current_device() == 0


def test_misaligned_tensors_after_aligned_ones_of_the_same_layout(device: str) -> None:
    inputs = make_inputs(RELAUNCHED, torch.float16, device)
    verify(inputs)
    for name in ("q", "k", "v", "dout"):
        aligned = getattr(inputs, name)
        shifted = misaligned(aligned)
        verify(dataclasses.replace(inputs, **{name: shifted}))
    verify(inputs)


@pytest.mark.parametrize("rows", [3, 40])
def test_nan_is_not_taken_for_a_row_without_keys(rows: int, device: str) -> None:
    inputs = make_inputs(WindowAttnCase("nan", "a NaN among the queries", (rows,), 2, 64), torch.float16, device)
    inputs.q[2, 1] = torch.nan
    out, lse = inputs.call(torch.ops.vk.window_attn)
    expected = torch.zeros(rows, 2, dtype=torch.bool, device=device)
    expected[2, 1] = True
    assert torch.equal(out.isnan().all(-1), expected) and torch.equal(lse.isnan(), expected.T)


@pytest.mark.no_interpret
@pytest.mark.parametrize("set_tf32", ["old", "new"])
def test_either_setting_of_tf32_is_understood(set_tf32: str, matmul: Any) -> None:
    q = torch.empty(1, 1, 16)
    assert precision_of(q) == "ieee"
    if set_tf32 == "old":
        matmul.allow_tf32 = True
    else:
        matmul.fp32_precision = "tf32"
    assert precision_of(q) == "tf32" and precision_of(q.half()) == "ieee"
    matmul.fp32_precision = "ieee"
    assert precision_of(q) == "ieee"


@pytest.mark.gpu
def test_tf32_is_read_at_each_call(device: str, matmul: Any) -> None:
    inputs = make_inputs(RELAUNCHED, torch.float32, device)
    outs = []
    for matmul.allow_tf32 in (False, True, False, True):
        outs.append(differentiate(torch.ops.vk.window_attn, inputs))
    for name in ("out", "dq", "dk", "dv"):
        ieee, tf32, ieee_again, tf32_again = (out[name] for out in outs)
        assert torch.equal(ieee, ieee_again) and torch.equal(tf32, tf32_again), name
        assert not torch.equal(ieee, tf32), name


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 64, 72, 128])
def test_tf32_is_rounded_to_as_pytorch_does(head_dim: int, device: str, matmul: Any) -> None:
    """Not cut off, which would be off by twice as much."""
    matmul.allow_tf32 = True
    verify(make_inputs(WindowAttnCase("tf32", "its rule", (200, 90), 2, head_dim), torch.float32, device))


@pytest.mark.parametrize("deterministic", [True, False])
def test_either_mode_is_right(deterministic: bool, device: str) -> None:
    case = WindowAttnCase("modes", "the flag", (90, 40), 2, 72, options={"deterministic": deterministic})
    verify(make_inputs(case, torch.float16, device))


def test_heads_of_odd_number_read_their_own_columns(device: str) -> None:
    """At D = 72 odd heads take their columns in another order; each is as right as a head alone."""
    inputs = make_inputs(WindowAttnCase("odd", "shifted columns", (70,), 3, 72), torch.float16, device)
    together = window_attn(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)
    for head in range(3):
        one = slice(head, head + 1)
        alone = window_attn(inputs.q[:, one], inputs.k[:, one], inputs.v[:, one], inputs.cu_seqlens)
        reference = references.window_attn(
            *(tensor[:, one].double() for tensor in (inputs.q, inputs.k, inputs.v)), inputs.cu_seqlens
        )[0]
        assert_close_to_reference(together[:, one], alone, reference, f"head {head}")


def test_a_segment_does_not_see_the_others(device: str) -> None:
    inputs = make_inputs(WindowAttnCase("alone", "packing", (30, 60, 9), 2, 40), torch.float32, device)
    packed = window_attn(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)
    for start, end in ((0, 30), (30, 90), (90, 99)):
        rows = slice(start, end)
        alone = window_attn(inputs.q[rows], inputs.k[rows], inputs.v[rows], cumulative((end - start,), device))
        assert torch.equal(packed[rows], alone)


def test_neighbours_may_hold_nan(device: str) -> None:
    """Rows outside all segments reach neither results nor gradients."""
    case = WindowAttnCase("nan", "isolation", (20, 30), 1, 72, skipped=7, padding=25)
    clean = make_inputs(case, torch.float32, device)
    dirty = make_inputs(case, torch.float32, device)
    for tensor in (dirty.q, dirty.k, dirty.v, dirty.dout):
        tensor[:7] = tensor[57:] = torch.nan
    for name, tensor in differentiate(torch.ops.vk.window_attn, dirty).items():
        assert torch.equal(tensor, differentiate(torch.ops.vk.window_attn, clean)[name]), name


def test_merging_halves_of_the_keys_gives_the_whole(device: str) -> None:
    inputs = make_inputs(WindowAttnCase("merge", "merged lse", (40,), 2, 64), torch.float32, device)
    verify_merged_halves(inputs, inputs.cu_seqlens, cumulative((20,), device))


@pytest.mark.parametrize("rows", [7, 40])
def test_rows_of_q_that_overlap(rows: int, device: str) -> None:
    """A view of windows that slide along one dimension, as `unfold` makes it. PyTorch's CPU kernel is wrong there."""
    q = torch.randn(2, rows + 15, device=device).unfold(1, 16, 1).transpose(0, 1)
    k, v = (torch.randn(rows, 2, 16, device=device) for _ in range(2))
    cu = torch.tensor([0, rows], dtype=torch.int32, device=device)
    exact, eager = (
        references.window_attn(*(tensor.contiguous().to(dtype) for tensor in (q, k, v)), cu)[0]
        for dtype in (torch.float64, torch.float32)
    )
    assert_close_to_reference(window_attn(q, k, v, cu), eager, exact)


def test_gradients_with_zero_strides(device: str) -> None:
    inputs = make_inputs(WindowAttnCase("sum", "expanded dout", (40, 9), 2, 72), torch.float32, device)
    every_op.assert_expanded_gradients(lambda q: inputs.call(window_attn, q=q), inputs.q)


@pytest.mark.parametrize("lengths", [(40, 0, 23), (9,) * 6, (140, 150) if GPU else (70,)], ids=str)
def test_out_is_the_same_without_lse(lengths: tuple[int, ...], device: str) -> None:
    inputs = make_inputs(WindowAttnCase("alone", "no lse", lengths, 2, 72, padding=3), torch.float16, device)
    out, lse = inputs.call(torch.ops.vk.window_attn)
    alone, nothing = inputs.call(partial(torch.ops.vk.window_attn, return_lse=False))
    assert torch.equal(alone, out)
    assert nothing.shape == (2, 0) and nothing.dtype == lse.dtype


def test_lse_is_made_where_it_is_asked_for_or_a_gradient_may_be(device: str) -> None:
    inputs = make_inputs(WindowAttnCase("made", "lse or none", (9,), 2, 8), torch.float32, device)
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.vk.window_attn.default:
                made.append(result[1].numel() > 0)
            return result

    v = inputs.v.clone().requires_grad_()
    with Watch():
        inputs.call(window_attn)
        inputs.call(partial(window_attn, return_lse=True))
        inputs.call(window_attn, v=v)
        with torch.no_grad():
            inputs.call(window_attn, v=v)
    assert made == [False, True, True, False]


def test_gradients_come_without_lse_too(device: str) -> None:
    """Captured without gradients and run with them: lse is made anew."""
    inputs = make_inputs(WindowAttnCase("anew", "no lse", (9, 30), 2, 72), torch.float16, device)
    grads = []
    for return_lse in (True, False):
        leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in ("q", "k", "v")}
        out, _ = inputs.call(partial(torch.ops.vk.window_attn, return_lse=return_lse), **leaves)
        grads.append(torch.autograd.grad(out, tuple(leaves.values()), inputs.dout))
    assert all(torch.equal(kept, anew) for kept, anew in zip(*grads, strict=True))


def test_only_lse_is_used(device: str) -> None:
    inputs = make_inputs(WindowAttnCase("lse", "no dout", (30, 12), 2, 16), torch.float32, device)
    results = []
    for function, dtype in (
        (torch.ops.vk.window_attn, torch.float32),
        (references.window_attn, torch.float32),
        (references.window_attn, torch.float64),
    ):
        q, k = (tensor.to(dtype).requires_grad_() for tensor in (inputs.q, inputs.k))
        _, lse = function(q, k, inputs.v.to(dtype), inputs.cu_seqlens)
        dq, dk = torch.autograd.grad((lse * inputs.dlse.to(dtype)).sum(), (q, k))
        results.append({"dq": dq, "dk": dk})
    check(*results)


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_left": 2, "window_right": 3}, {"softcap": 2.0}], ids=str
)
def test_gradcheck_in_fp64(options: dict) -> None:
    case = WindowAttnCase("gradcheck", "fp64", (5, 0, 3), 2, 8, k_lengths=(4, 2, 6), num_k_heads=1, options=options)
    inputs = make_inputs(case, torch.float64)
    q, k, v = (tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))

    def call(q, k, v):
        out, lse = inputs.call(torch.ops.vk.window_attn, q=q, k=k, v=v)
        return out, lse[torch.isfinite(lse)]

    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.no_interpret
def test_second_derivatives_and_tangents_are_refused(device: str) -> None:
    inputs = make_inputs(WindowAttnCase("double", "create_graph", (9,), 1, 8), torch.float32, device)
    every_op.assert_no_second_derivative("window_attn", lambda q: inputs.call(window_attn, q=q), inputs.q)
    every_op.assert_no_tangent("window_attn", lambda q: inputs.call(window_attn, q=q), inputs.q)


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16], ids=str)
def test_autocast_follows_the_region(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(WindowAttnCase("autocast", "casts", (33,), 2, 64), torch.float32, device)
    q = inputs.q.clone().requires_grad_()
    with torch.autocast(device, dtype=dtype):
        out, lse = window_attn(q, inputs.k, inputs.v, inputs.cu_seqlens, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    cast = (tensor.to(dtype) for tensor in (inputs.q, inputs.k, inputs.v))
    assert torch.equal(out, window_attn(*cast, inputs.cu_seqlens))
    out.sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.isfinite().all()


@pytest.mark.parametrize("return_lse", [True, False], ids=["lse", "lse made anew"])
def test_a_backward_inside_an_autocast_region_computes_as_outside(return_lse: bool, device: str) -> None:
    inputs = make_inputs(WindowAttnCase("autocast", "backward", (33, 20), 2, 64), torch.float32, device)
    leaves = [getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")]
    out, _ = torch.ops.vk.window_attn(*leaves, inputs.cu_seqlens, return_lse=return_lse)
    outside = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
    with torch.autocast(device, dtype=torch.float16 if INTERPRET else torch.bfloat16):
        inside = torch.autograd.grad(out, leaves, inputs.dout)
    assert all(torch.equal(one, other) for one, other in zip(inside, outside, strict=True))


def test_lse_comes_when_asked_for(device: str) -> None:
    inputs = make_inputs(window_attn_cases("smoke")[0], torch.float32, device)
    out = window_attn(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)
    again, lse = window_attn(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, return_lse=True)
    assert torch.equal(out, again)
    assert lse.shape == (inputs.q.shape[1], inputs.q.shape[0]) and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize("values", [(0, 50, 200), (-7, 20, 40), (0, 30, 10), (0, 2**31 - 1, 5), (40, 40, 40)], ids=str)
def test_wild_boundaries_stay_inside(values: tuple[int, ...], device: str) -> None:
    """Values out of range are clamped to the tensors: nothing else is promised of them, and nothing breaks."""
    inputs = make_inputs(WindowAttnCase("wild", "clamping", (40,), 1, 16), torch.float32, device)
    cu = torch.tensor(values, dtype=torch.int32, device=device)
    out, lse = torch.ops.vk.window_attn(inputs.q, inputs.k, inputs.v, cu)
    torch.ops.vk.window_attn_backward(inputs.dout, None, inputs.q, inputs.k, inputs.v, out, lse, cu)
    if GPU:
        torch.cuda.synchronize()
    if values == (0, 50, 200):
        assert torch.equal(out, window_attn(inputs.q, inputs.k, inputs.v, cumulative((40, 0), device)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1, 40), r"cu_seqlens\[0\] is -1, expected at least 0"),
        ((0, 30, 20), r"cu_seqlens\[2\] is 20, expected at least cu_seqlens\[1\] = 30"),
        ((0, 30, 50), r"cu_seqlens\[2\] is 50, expected at most the 40 rows there are"),
    ],
)
def test_checked_mode_names_the_entry(values: tuple[int, ...], message: str, device: str) -> None:
    inputs = make_inputs(WindowAttnCase("checked", "values", (40,), 1, 16), torch.float32, device)
    cu = torch.tensor(values, dtype=torch.int32, device=device)
    with torch_ops.settings(checked=True), pytest.raises(ValueError, match=message):
        window_attn(inputs.q, inputs.k, inputs.v, cu)
    window_attn(inputs.q, inputs.k, inputs.v, cu)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"q": lambda x: x[0]}, r"q has shape \[2, 16\], expected shape \[T, H, D\]"),
    ({"k": lambda x: x[None]}, r"k has shape \[1, 10, 2, 16\], expected shape \[T, H, D\]"),
    ({"q": lambda x: x.int()}, r"q is int32, expected float16, bfloat16 or float32"),
    ({"k": lambda x: x.half()}, r"k is float16, expected float32 as q is"),
    ({"k": lambda x: x[..., :8]}, r"the head dimension of k is 8, expected 16 as that of q is"),
    (dict.fromkeys("qkv", lambda x: x[..., :12]), r"is 12, expected a multiple of 8 from 8 to 256"),
    (dict.fromkeys("qkv", lambda x: x.repeat(1, 1, 20)), r"is 320, expected .* from 8 to 256"),
    ({"q": lambda x: x.repeat(1, 2, 1)[:, :3]}, r"heads of k is 2, expected a divisor of the 3 heads of q"),
    (dict.fromkeys("qkv", lambda x: x[:, :0]), r"heads of q is 0, expected from 1 to 65535"),
    ({"v": lambda x: x[:5]}, r"v has shape \[5, 2, 16\], expected shape \[10, 2, 16\] as k is"),
    ({"k": lambda x: x[:5], "v": lambda x: x[:5]}, r"k has 5, expected 10 rows as q is, unless cu_seqlens_k is given"),
    ({"cu_seqlens": lambda x: x.long()}, r"cu_seqlens is int64, expected int32"),
    ({"cu_seqlens": lambda x: x[None]}, r"cu_seqlens has shape \[1, 2\], expected one dimension"),
    ({"cu_seqlens": lambda x: x[:0]}, r"cu_seqlens has shape \[0\], expected one dimension"),
    (
        {"cu_seqlens_k": torch.zeros(1, dtype=torch.int32)},
        r"cu_seqlens_k has shape \[1\], expected shape \[2\] as cu_seqlens is",
    ),
    ({"scale": -1.0}, r"scale is -1.0, expected a positive number"),
    ({"scale": 1e-50}, r"scale is 1e-50, expected a positive number that fp32 holds"),
    ({"scale": float("nan")}, r"scale is nan, expected a positive number"),
    ({"window_left": -2}, r"window_left is -2, expected -1 \(unbounded\) or a number of keys"),
    ({"softcap": -3.0}, r"softcap is -3.0, expected 0 \(off\) or a positive number"),
    ({"softcap": 1e39}, r"softcap is 1e\+39, expected 0 .* that fp32 holds"),
    ({"v": None}, r"v is None, expected a dense tensor"),
    ({"cu_seqlens": None}, r"cu_seqlens is None, expected a dense tensor"),
    ({"scale": torch.tensor(0.5)}, r"scale is a tensor, expected a number"),
    ({"softcap": torch.tensor(5.0)}, r"softcap is a tensor, expected a number"),
    ({"dropout_seed": torch.tensor(3)}, r"dropout_seed is int64 of \[\], expected int64 of shape \[1\]"),
    ({"q": lambda x: x.to_sparse()}, r"q is of layout .*, expected a dense tensor"),
    ({"cu_seqlens": lambda x: x.to("meta")}, r"cu_seqlens is on meta, expected on .* as q is"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    tensors = {x: torch.randn(10, 2, 16, device=device) for x in "qkv"}
    good = {**tensors, "cu_seqlens": cumulative((10,), device)}
    every_op.assert_refuses(window_attn, good, changes, message)


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dout": torch.zeros(3, 2, 16)}, r"dout has shape \[3, 2, 16\], expected shape \[10, 2, 16\] as q is"),
        ({"lse": torch.zeros(2, 10, dtype=torch.float16)}, r"lse is float16, expected float32"),
        ({"out": None}, r"out is None, expected a dense tensor"),
        ({"lse": None}, r"lse is None, expected a dense tensor"),
        ({"dlse": torch.zeros(10, 2)}, r"dlse has shape \[10, 2\], expected shape \[H, T\] = \[2, 10\]"),
    ],
)
def test_backward_refuses(changes: dict, message: str, device: str) -> None:
    x = torch.randn(10, 2, 16, device=device)
    good = {
        "dout": x, "dlse": None, "q": x, "k": x, "v": x, "out": x, "lse": torch.zeros(2, 10, device=device),
        "cu_seqlens": cumulative((10,), device),
    }  # fmt: skip
    every_op.assert_refuses(torch.ops.vk.window_attn_backward, good, changes, message)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 30 * 30 + 10 * 10),
        ({"causal": True}, 30 * 31 // 2 + 10 * 11 // 2),
        ({"window_left": 0, "window_right": 0}, 40),
    ],
    ids=str,
)
def test_flops_are_exact(options: dict, pairs: int, device: str) -> None:
    inputs = make_inputs(WindowAttnCase("flops", "counter", (30, 10), 2, 16, options=options), torch.float32, device)
    q = inputs.q.requires_grad_()
    flops, (out, _) = flops_of(lambda: inputs.call(torch.ops.vk.window_attn, q=q))
    assert flops == 4 * 2 * 16 * pairs
    assert flops_of(lambda: out.sum().backward())[0] == 10 * 2 * 16 * pairs


def test_flops_of_fake_lengths_are_a_bound() -> None:
    with torch._subclasses.FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q = torch.empty(40, 2, 16)
        torch.ops.vk.window_attn(q, q, q, torch.empty(3, dtype=torch.int32))
    assert counter.get_total_flops() == 4 * 2 * 16 * 40 * 40


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_only_where_allowed(allowed: bool, device: str, matmul: Any) -> None:
    inputs = make_inputs(WindowAttnCase("tf32", "precision", (256,), 1, 64), torch.float32, device)
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    out = window_attn(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)
    exact, _ = references.window_attn(*(t.double() for t in (inputs.q, inputs.k, inputs.v)), inputs.cu_seqlens)
    error = ((out - exact).norm() / exact.norm()).item()
    assert (error > 1e-5) == allowed, error


@pytest.mark.gpu
def test_no_call_waits_for_the_device(device: str) -> None:
    inputs = make_inputs(window_attn_cases("smoke")[1], torch.bfloat16, device)
    q = inputs.q.requires_grad_()
    every_op.assert_waits_for_nothing(lambda: inputs.call(window_attn, q=q).backward(inputs.dout))


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements(device: str) -> None:
    """The last segments lie past 2^31 elements of q, k, v and every gradient."""
    num_heads, head_dim, window = 16, 128, 64
    segments = 2**31 // (num_heads * head_dim * window) + 8
    total = segments * window
    q, k, v, dout = (torch.empty(total, num_heads, head_dim, device=device, dtype=torch.bfloat16) for _ in range(4))
    # Two, since one segment alone may have a launch of its own, which adds in another order.
    tail = slice(total - 2 * window, total)
    for tensor in (q, k, v, dout):
        tensor.zero_()
        tensor[tail].normal_()
    cu_seqlens = torch.arange(0, total + 1, window, device=device, dtype=torch.int32)
    out, lse = torch.ops.vk.window_attn(q, k, v, cu_seqlens)
    grads = torch.ops.vk.window_attn_backward(dout, None, q, k, v, out, lse, cu_seqlens)
    last = cumulative((window, window), device)
    last_out, last_lse = torch.ops.vk.window_attn(*(t[tail].clone() for t in (q, k, v)), last)
    last_grads = torch.ops.vk.window_attn_backward(
        dout[tail], None, *(t[tail].clone() for t in (q, k, v)), last_out, last_lse, last
    )
    assert q.numel() - 2 * window * num_heads * head_dim > 2**31
    assert torch.equal(out[tail], last_out) and torch.equal(lse[:, tail], last_lse)
    for whole, alone in zip(grads, last_grads, strict=True):
        assert torch.equal(whole[tail], alone)


@pytest.mark.gpu
@pytest.mark.large
def test_a_row_stride_beyond_two_billion(device: str) -> None:
    """Rows so far apart that offsets within one tile pass 2^31 elements."""
    stride = 2**26
    storage = torch.empty(stride * 40 + 64, device=device, dtype=torch.float16)
    q = storage.as_strided((40, 1, 64), (stride, 64, 1))
    q.copy_(torch.randn(40, 1, 64))
    compact = q.contiguous()
    cu_seqlens = cumulative((40,), device)
    assert torch.equal(window_attn(q, q, q, cu_seqlens), window_attn(compact, compact, compact, cu_seqlens))
