"""Numerics, semantics and refusals of vk::rope_window_attn and its backward.

tests/attention/test_window_attn.py tests the attention core; this file tests the rotation around it.
"""

import dataclasses
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import torch_ops
from tests import verify as every_op
from tests.attention.verify import backward, differentiate, verify
from tests.testing.interpreter import with_dtypes
from tests.verify import DTYPES, GPU, INTERPRET, flops_of, misaligned
from torch_ops import rope_window_attn, window_attn
from torch_ops.testing import poisoned, references
from torch_ops.testing.cases import (
    LAYOUTS,
    TABLES,
    RopeWindowAttnInputs,
    WindowAttnCase,
    cumulative,
    make_projected_rope_inputs,
    make_rope_inputs,
    rope_window_attn_cases,
)

# The interpreter computes in numpy, which has no bf16; on the CPU a few head dims stand for all.
HEAD_DIMS = (8, 64, 72, 80, 128) if not GPU else range(8, 257, 8)
# In the interpreter those alone that differ in what is turned, or where.
TURNED_APART = ("image", "padding", "skipped", "no_rows", "gqa", "mqa", "own_boundaries", "d8", "d128")
CASES = [
    case
    for case in rope_window_attn_cases("edge")
    if not INTERPRET or case.name in TURNED_APART
    if not re.fullmatch(r"d\d+", case.name) or case.head_dim in HEAD_DIMS
]
SMALL = WindowAttnCase("small", "two segments, heads that fill no tile", (37, 20), 3, 72, padding=5)

pytestmark = pytest.mark.interpret


@pytest.mark.no_interpret
@pytest.mark.parametrize("tables", TABLES)
def test_references_agree_with_each_other(tables: str) -> None:
    """Autograd through the forward reference is the backward reference."""
    inputs = make_rope_inputs(SMALL, torch.float64, tables=tables)
    by_autograd = differentiate(references.rope_window_attn, inputs)
    for name, tensor in backward(inputs, by_autograd["out"], by_autograd["lse"]).items():
        torch.testing.assert_close(tensor, by_autograd[name])


@pytest.mark.no_interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rotation_of_the_reference_is_that_of_transformers(dtype: torch.dtype) -> None:
    vision = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
    inputs = make_rope_inputs(SMALL, dtype)
    expected = vision.apply_rotary_pos_emb_vision(inputs.q, inputs.k, inputs.cos, inputs.sin)
    for x, wanted in zip((inputs.q, inputs.k), expected, strict=True):
        assert torch.equal(references.rotated(x, inputs.cos, inputs.sin), wanted)


@with_dtypes(CASES, DTYPES)
def test_agrees_with_reference(case: WindowAttnCase, dtype: torch.dtype, device: str) -> None:
    verify(make_rope_inputs(case, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRET else DTYPES, ids=str)
@pytest.mark.parametrize("tables", TABLES)
def test_agrees_with_any_tables(tables: str, dtype: torch.dtype, device: str) -> None:
    verify(make_rope_inputs(SMALL, dtype, device, tables=tables))


@pytest.mark.parametrize("tables", ["half"] if INTERPRET else ["full", "half_own", "column_strided"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_agrees_in_any_layout(layout: str, tables: str, device: str) -> None:
    verify(make_rope_inputs(dataclasses.replace(SMALL, layout=layout), torch.float16, device, tables=tables))


@pytest.mark.parametrize("num_k_heads", [1, 2, 6])
def test_agrees_on_views_of_a_projection(num_k_heads: int, device: str) -> None:
    case = dataclasses.replace(SMALL, num_heads=6, num_k_heads=num_k_heads, options={"causal": True})
    inputs = make_projected_rope_inputs(case, torch.float16, device)
    assert inputs.q.stride(0) == (6 + 2 * num_k_heads) * 72 and not inputs.q.is_contiguous()
    verify(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3vl_l_784", "qwen3vl_l_mixed", "qwen25vl_windows", "qwen25vl_ragged"])
def test_agrees_at_real_shapes(name: str, device: str) -> None:
    case = next(case for case in rope_window_attn_cases("bench") if case.name == name)
    verify(make_projected_rope_inputs(dataclasses.replace(case, num_heads=2), torch.bfloat16, device))


LONGEST, WIDEST, MOST_HEADS = (40, 10, 2) if INTERPRET else (200, 16 if GPU else 32, 3)
lengths = st.lists(st.one_of(st.just(0), st.just(1), st.integers(2, LONGEST)), max_size=2 if INTERPRET else 4)


@st.composite
def calls(draw) -> tuple[WindowAttnCase, torch.dtype, str]:
    # With few numbers eager's largest error can be small by luck, and the rule would ask the same of ours.
    q_lengths = (*draw(lengths), draw(st.integers(40, 60) if INTERPRET else st.integers(150, 200)))
    k_lengths = (*draw(st.permutations(q_lengths[:-1])), q_lengths[-1]) if draw(st.booleans()) else None
    group, num_k_heads = draw(st.sampled_from([1, 2] if INTERPRET else [1, 2, 3, 7])), draw(st.integers(1, MOST_HEADS))
    options = {
        "causal": draw(st.booleans()),
        "window_left": draw(st.sampled_from([-1, -1, 5])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0])),
    }
    case = WindowAttnCase(
        "fuzz", "anything", q_lengths, group * num_k_heads, draw(st.integers(1, WIDEST)) * 8,
        k_lengths=k_lengths, num_k_heads=num_k_heads,
        skipped=draw(st.sampled_from([0, 0, 5, 40])), padding=draw(st.sampled_from([0, 0, 3, 40])),
        layout=draw(st.sampled_from(LAYOUTS)), options=options,
    )  # fmt: skip
    return case, draw(st.sampled_from([torch.float16] if INTERPRET else DTYPES)), draw(st.sampled_from(TABLES))


@given(calls(), st.integers(0, 2**16))
@hypothesis_settings(max_examples=24 if GPU else 4 if INTERPRET else 12)
def test_agrees_on_anything(call: tuple[WindowAttnCase, torch.dtype, str], seed: int) -> None:
    case, dtype, tables = call
    verify(make_rope_inputs(case, dtype, "cuda" if GPU else "cpu", seed, tables))


def _turned(inputs: RopeWindowAttnInputs) -> dict[str, torch.Tensor]:
    """q and k as the op rotates them, to the bit."""
    return {name: references.rotated(getattr(inputs, name), inputs.cos, inputs.sin) for name in ("q", "k")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_window_attn_of_what_was_turned(dtype: torch.dtype, device: str) -> None:
    """Rounded once, before the product: turned in fp32 and not rounded, half types would give other scores."""
    inputs = make_rope_inputs(SMALL, dtype, device, tables="own")
    out, lse = inputs.call(partial(rope_window_attn, return_lse=True))
    expected, expected_lse = window_attn(**_turned(inputs), v=inputs.v, cu_seqlens=inputs.cu_seqlens, return_lse=True)
    if not (INTERPRET or GPU):
        assert torch.equal(lse, expected_lse) and torch.equal(out, expected)
        return
    # A kernel may contract a product and a sum: few entries then round elsewhere, by an ulp of q and k at the most; and
    # of fp32 the scores round as far again.
    q, k = (tensor.double().norm(dim=-1).max() for tensor in (inputs.q, inputs.k))
    reach = 4 * torch.finfo(dtype).eps * (q * k).item() * inputs.q.shape[-1] ** -0.5
    seen = expected_lse.isfinite()
    assert torch.equal(seen, lse.isfinite()) and (lse - expected_lse)[seen].abs().max() <= reach
    verify(inputs)


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", rope_window_attn_cases("smoke"), ids=lambda case: case.name)
def test_same_bits_every_time(case: WindowAttnCase, device: str) -> None:
    inputs = make_rope_inputs(case, torch.float16, device)
    every_op.assert_same_bits(lambda: differentiate(torch.ops.vk.rope_window_attn, inputs))


@pytest.mark.parametrize("deterministic", [True, False])
def test_either_mode_is_right(deterministic: bool, device: str) -> None:
    case = WindowAttnCase("modes", "the flag", (90, 40), 2, 72, options={"deterministic": deterministic})
    verify(make_rope_inputs(case, torch.float16, device))


def test_every_call_sees_its_own_tensors_aligned_or_not(device: str) -> None:
    """Launches are kept from the first call, and tensors off 16 bytes need others."""
    for seed in range(1 if INTERPRET else 2):
        inputs = make_rope_inputs(SMALL, torch.float16, device, seed)
        verify(inputs)
        for name in ("q", "cos") if INTERPRET else ("q", "k", "v", "cos", "sin", "dout"):
            aligned = getattr(inputs, name)
            shifted = misaligned(aligned)
            verify(dataclasses.replace(inputs, **{name: shifted}))


def test_inputs_are_left_as_they_were(device: str) -> None:
    inputs = make_projected_rope_inputs(SMALL, torch.float16, device)
    before = {name: value.clone() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    differentiate(torch.ops.vk.rope_window_attn, inputs)
    for name, value in before.items():
        assert torch.equal(getattr(inputs, name), value), name


def test_rows_outside_all_segments_may_hold_nan(device: str) -> None:
    """In the tables too: nothing times NaN would be NaN, and not the gradient of nothing."""
    case = WindowAttnCase("nan", "isolation", (20, 30), 2, 72, skipped=7, padding=25)
    clean, dirty = (make_rope_inputs(case, torch.float32, device) for _ in range(2))
    for tensor in (dirty.q, dirty.k, dirty.v, dirty.dout, dirty.cos, dirty.sin):
        tensor[:7] = tensor[57:] = torch.nan
    expected = differentiate(torch.ops.vk.rope_window_attn, clean)
    with poisoned():
        actual = differentiate(torch.ops.vk.rope_window_attn, dirty)
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("values", [(0, 50, 200), (-7, 20, 40), (0, 30, 10), (0, 2**31 - 1, 5), (40, 40, 40)], ids=str)
def test_wild_boundaries_stay_inside(values: tuple[int, ...], device: str) -> None:
    """Clamped to the tensors: nothing else is promised of them, and nothing breaks."""
    inputs = make_rope_inputs(WindowAttnCase("wild", "clamping", (40,), 1, 16), torch.float32, device)
    cu = torch.tensor(values, dtype=torch.int32, device=device)
    wild = dataclasses.replace(inputs, cu_seqlens=cu)
    differentiate(torch.ops.vk.rope_window_attn, wild)
    if GPU:
        torch.cuda.synchronize()
    if values == (0, 50, 200):
        whole = dataclasses.replace(inputs, cu_seqlens=cumulative((40, 0), device))
        assert torch.equal(wild.call(rope_window_attn), whole.call(rope_window_attn))


def test_checked_mode_names_the_entry(device: str) -> None:
    inputs = make_rope_inputs(WindowAttnCase("checked", "values", (40,), 1, 16), torch.float32, device)
    bad = dataclasses.replace(inputs, cu_seqlens=torch.tensor((0, 30, 50), dtype=torch.int32, device=device))
    message = r"^rope_window_attn: cu_seqlens\[2\] is 50, expected at most the 40 rows there are"
    with torch_ops.settings(checked=True), pytest.raises(ValueError, match=message):
        bad.call(rope_window_attn)


def test_gradients_with_zero_strides(device: str) -> None:
    inputs = make_rope_inputs(SMALL, torch.float32, device)
    every_op.assert_expanded_gradients(
        lambda q, k, v: inputs.call(rope_window_attn, q=q, k=k, v=v), inputs.q, inputs.k, inputs.v
    )


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int, device: str) -> None:
    case = WindowAttnCase("few", "one program, or none", (rows,), 2, 64)
    inputs = make_rope_inputs(case, torch.float16, device)
    results = differentiate(torch.ops.vk.rope_window_attn, inputs)
    assert results["out"].shape == (rows, 2, 64) and results["dq"].shape == (rows, 2, 64)
    assert torch.equal(results["out"], inputs.v)


def test_lse_comes_when_asked_for_and_is_made_anew_for_a_gradient(device: str) -> None:
    inputs = make_rope_inputs(SMALL, torch.float16, device)
    out = inputs.call(rope_window_attn)
    again, lse = inputs.call(partial(rope_window_attn, return_lse=True))
    assert torch.equal(out, again) and lse.shape == (3, 62) and lse.dtype == torch.float32
    grads = []
    for return_lse in (True, False):
        leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")}
        out, made = inputs.call(partial(torch.ops.vk.rope_window_attn, return_lse=return_lse), **leaves)
        assert made.shape == (3, 62 if return_lse else 0)
        grads.append(torch.autograd.grad(out, tuple(leaves.values()), inputs.dout))
    assert all(torch.equal(kept, anew) for kept, anew in zip(*grads, strict=True))


def test_nothing_turned_is_kept_for_the_backward(device: str) -> None:
    inputs = make_rope_inputs(SMALL, torch.float16, device)
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, lse = inputs.call(partial(rope_window_attn, return_lse=True), **leaves)
    known = {tensor.data_ptr() for tensor in (*leaves.values(), out, lse, inputs.cos, inputs.sin, inputs.cu_seqlens)}
    assert {tensor.data_ptr() for tensor in kept} == known and len(kept) == 8


@pytest.mark.no_interpret
@pytest.mark.parametrize("tables", ["full", "half", "apart"])
def test_gradcheck_in_fp64(tables: str) -> None:
    options = {"causal": True, "softcap": 2.0}
    case = WindowAttnCase("gradcheck", "fp64", (5, 0, 3), 2, 8, (2, 2, 4), 1, options=options)
    inputs = make_rope_inputs(case, torch.float64, tables=tables)
    q, k, v = (tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))

    def call(q, k, v):
        out, lse = inputs.call(torch.ops.vk.rope_window_attn, q=q, k=k, v=v)
        return out, lse[torch.isfinite(lse)]

    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.no_interpret
def test_second_derivatives_and_tangents_are_refused(device: str) -> None:
    inputs = make_rope_inputs(SMALL, torch.float32, device)
    every_op.assert_no_second_derivative("rope_window_attn", lambda q: inputs.call(rope_window_attn, q=q), inputs.q)
    every_op.assert_no_tangent("rope_window_attn", lambda q: inputs.call(rope_window_attn, q=q), inputs.q)


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16], ids=str)
def test_autocast_follows_the_region_but_for_the_tables(dtype: torch.dtype, device: str) -> None:
    inputs = make_rope_inputs(SMALL, torch.float32, device)
    q = inputs.q.clone().requires_grad_()
    with torch.autocast(device, dtype=dtype):
        out, lse = inputs.call(partial(rope_window_attn, return_lse=True), q=q)
    assert out.dtype == dtype and lse.dtype == torch.float32
    cast = {name: getattr(inputs, name).to(dtype) for name in ("q", "k", "v")}
    assert torch.equal(out, inputs.call(rope_window_attn, **cast))
    rounded = {name: getattr(inputs, name).to(dtype) for name in ("cos", "sin")}
    assert not torch.equal(out, inputs.call(rope_window_attn, **cast, **rounded))
    out.sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.isfinite().all()


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"q": lambda x: x[0]}, r"q has shape \[2, 16\], expected shape \[T, H, D\]"),
    ({"cos": None}, r"cos is None, expected a dense tensor"),
    (
        {"sin": lambda x: x[:, None]},
        r"sin has shape \[10, 1, 16\], expected shape \[T, D\] or \[T, D / 2\] = \[10, any\]",
    ),
    ({"cos": lambda x: x[:9]}, r"cos has shape \[9, 16\], expected shape .* = \[10, any\]"),
    ({"cos": lambda x: x[:, :4]}, r"cos has 4, expected 16 or 8 columns"),
    ({"cos": lambda x: x.half()}, r"cos is float16, expected float32 as q is"),
    ({"sin": lambda x: x[:, :8]}, r"sin is \[10, 8\] in float32, expected \[10, 16\] in float32 as cos is"),
    ({"sin": lambda x: x.to("meta")}, r"sin is on meta, expected on .* as q is"),
    (
        {**dict.fromkeys("kv", lambda x: x[:5]), "cu_seqlens_k": torch.tensor([0, 5], dtype=torch.int32)},
        r"k has 5, expected 10 rows as q is, since they share the rows of cos and sin",
    ),
    ({"cu_seqlens": lambda x: x.long()}, r"cu_seqlens is int64, expected int32"),
    ({"scale": -1.0}, r"scale is -1.0, expected a positive number"),
    ({"scale": torch.tensor(0.5)}, r"scale is a tensor, expected a number"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    good = {x: torch.randn(10, 2, 16, device=device) for x in "qkv"}
    good |= {x: torch.randn(10, 16, device=device) for x in ("cos", "sin")} | {"cu_seqlens": cumulative((10,), device)}
    every_op.assert_refuses(rope_window_attn, good, changes, message)


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dout": torch.zeros(3, 2, 16)}, r"dout has shape \[3, 2, 16\], expected shape \[10, 2, 16\] as q is"),
        ({"lse": None}, r"lse is None, expected a dense tensor"),
        ({"cos": torch.zeros(10, 4)}, r"cos has 4, expected 16 or 8 columns"),
    ],
)
def test_backward_refuses(changes: dict, message: str, device: str) -> None:
    x, table = torch.randn(10, 2, 16, device=device), torch.randn(10, 16, device=device)
    good = {
        "dout": x, "dlse": None, "q": x, "k": x, "v": x, "out": x, "lse": torch.zeros(2, 10, device=device),
        "cos": table, "sin": table, "cu_seqlens": cumulative((10,), device),
    }  # fmt: skip
    every_op.assert_refuses(torch.ops.vk.rope_window_attn_backward, good, changes, message)


def test_flops_are_those_of_the_products(device: str) -> None:
    case = WindowAttnCase("flops", "counter", (30, 10), 2, 16, options={"causal": True})
    inputs = make_rope_inputs(case, torch.float32, device)
    pairs = 30 * 31 // 2 + 10 * 11 // 2
    q = inputs.q.requires_grad_()
    flops, (out, _) = flops_of(lambda: inputs.call(torch.ops.vk.rope_window_attn, q=q))
    assert flops == 4 * 2 * 16 * pairs
    assert flops_of(lambda: out.sum().backward())[0] == 10 * 2 * 16 * pairs


def test_explains_itself(device: str) -> None:
    inputs = make_rope_inputs(SMALL, torch.float16, device)
    explained = inputs.call(partial(torch_ops.explain, rope_window_attn))
    of_attention = torch_ops.explain(window_attn, **_turned(inputs), v=inputs.v, cu_seqlens=inputs.cu_seqlens)
    assert explained["op"] == "vk::rope_window_attn" and explained["path"] == of_attention["path"]
    kernels = explained["kernels"]
    if explained["path"] != "reference":
        own = {name: kernels[name] for name in ("rope", "rope_tables_bwd")}
        assert list(kernels)[0] == "rope" and {**kernels} == {**own, **of_attention["kernels"]}
    with pytest.raises(ValueError, match="rope_window_attn: cos has 8, expected 72 or 36 columns"):
        inputs.call(partial(torch_ops.explain, rope_window_attn), cos=inputs.cos[:, :8])


# A sequence of [T, 5, H, D], or rows so far apart that offsets within a tile may need 64 bits.
@pytest.mark.parametrize("row", [0, 2**22 + 8], ids=["one_of_batch", "wide"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["small_segments", "fp32"])
def test_row_strides_that_no_model_settles_change_no_bits(row: int, dtype: torch.dtype, device: str) -> None:
    heads = [torch.randn(5, 2, 16, device=device, dtype=dtype) for _ in range(4)]
    tables = [torch.randn(5, 16, device=device) for _ in range(2)]

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        stride = row or 5 * tensor[0].numel()
        memory = torch.empty(4 * stride + tensor[0].numel(), device=device, dtype=tensor.dtype)
        return memory.as_strided(tensor.shape, (stride, *tensor.stride()[1:])).copy_(tensor)

    cu = cumulative((3, 2), device)
    found = []
    for change in (torch.clone, apart):
        *leaves, dout = [change(tensor) for tensor in heads]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = rope_window_attn(*leaves, *[change(table) for table in tables], cu)
        found.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
def test_no_call_waits_for_the_device(device: str) -> None:
    inputs = make_rope_inputs(SMALL, torch.bfloat16, device)
    q = inputs.q.requires_grad_()
    every_op.assert_waits_for_nothing(lambda: inputs.call(rope_window_attn, q=q).backward(inputs.dout))


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements(device: str) -> None:
    """The last segments lie past 2^31 elements of q, k and their gradients."""
    num_heads, head_dim, window = 16, 128, 64
    total = (2**31 // (num_heads * head_dim * window) + 8) * window
    q, k, v, dout = (torch.empty(total, num_heads, head_dim, device=device, dtype=torch.bfloat16) for _ in range(4))
    cos, sin = (torch.empty(total, head_dim // 2, device=device, dtype=torch.bfloat16) for _ in range(2))
    tail = slice(total - 2 * window, total)
    tensors = (q, k, v, cos, sin, dout)
    for tensor in tensors:
        tensor.zero_()
        tensor[tail].normal_()
    inputs = [(tensors, torch.arange(0, total + 1, window, device=device, dtype=torch.int32))]
    inputs.append((tuple(tensor[tail].clone() for tensor in tensors), cumulative((window, window), device)))
    results = []
    for (q, k, v, cos, sin, dout), cu in inputs:
        out, lse = torch.ops.vk.rope_window_attn(q, k, v, cos, sin, cu)
        grads = torch.ops.vk.rope_window_attn_backward(dout, None, q, k, v, out, lse, cos, sin, cu)
        results.append([each[-2 * window :] for each in (out, *grads)])
    assert all(torch.equal(whole, alone) for whole, alone in zip(*results, strict=True))
