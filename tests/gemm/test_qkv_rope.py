"""Numerics, semantics and refusals of vk::qkv_rope and its backward.

From tests/gemm/verify.py come what plans keep, strides and addresses, NaN, derivatives that are refused, autocast in a
backward, and that no call waits.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

import torch_ops
from tests.gemm.verify import Projection, ProjectionTests, left_to_pytorch
from tests.testing.interpreter import with_dtypes
from tests.verify import DTYPES, GPU, INTERPRET, assert_refuses, assert_same_bits, flops_of, misaligned
from torch_ops import qkv_rope
from torch_ops.testing import references
from torch_ops.testing.cases import (
    LINEAR_LAYOUTS,
    QkvRopeCase,
    QkvRopeInputs,
    cumulative,
    make_qkv_rope_inputs,
    outcome,
    qkv_rope_cases,
)

TOWER = qkv_rope_cases("smoke")[0]

pytestmark = pytest.mark.interpret


QKV_ROPE = Projection(
    qkv_rope, references.qkv_rope, make_qkv_rope_inputs, TOWER, ("x", "weight", "bias", "cos", "dq")
)  # fmt: skip


class TestQkvRope(ProjectionTests):
    projection = QKV_ROPE


def verify(inputs: QkvRopeInputs) -> None:
    QKV_ROPE.verify(inputs)


@with_dtypes(qkv_rope_cases("edge"), DTYPES)
def test_agrees_with_reference(case: QkvRopeCase, dtype: torch.dtype, device: str) -> None:
    verify(make_qkv_rope_inputs(case, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qkv_1152_784", "qkv_1280_4096", "qkv_768_3136"])
def test_agrees_at_real_shapes(name: str, device: str) -> None:
    case = next(case for case in qkv_rope_cases("bench") if case.name == name)
    verify(make_qkv_rope_inputs(case, torch.bfloat16, device))


@with_dtypes(qkv_rope_cases("smoke"), DTYPES)
def test_agrees_where_a_row_leaves_products_to_pytorch(
    case: QkvRopeCase, dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    inputs = make_qkv_rope_inputs(case, dtype, device)
    with left_to_pytorch(("gemm_pair",), dtype, tmp_path):
        if INTERPRET or GPU:
            assert inputs.call(lambda *args: torch_ops.explain(qkv_rope, *args))["path"] == "aten"
        verify(inputs)


@pytest.mark.gpu
@with_dtypes(qkv_rope_cases("smoke"), DTYPES)
def test_kernels_agree_where_pytorch_would_make_the_product(case: QkvRopeCase, dtype: torch.dtype, device: str) -> None:
    with torch_ops.settings(path="portable"):
        verify(make_qkv_rope_inputs(case, dtype, device))


@st.composite
def calls(draw) -> tuple[QkvRopeCase, torch.dtype]:
    # With few numbers eager's largest error can be small by luck, and the rule would ask the same of ours.
    num_k_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2 if INTERPRET else 3))
    case = QkvRopeCase(
        "fuzz", "anything", draw(st.integers(20, 40 if INTERPRET else 200)), draw(st.integers(32, 100)),
        num_k_heads * group, 8 * draw(st.integers(1, 4 if INTERPRET else 12)), num_k_heads=num_k_heads,
        bias=draw(st.booleans()), half_table=draw(st.booleans()), own_table=draw(st.booleans()),
        layout=draw(st.sampled_from(LINEAR_LAYOUTS)),
    )  # fmt: skip
    return case, draw(st.sampled_from([torch.float16] if INTERPRET else DTYPES))


@given(calls(), st.integers(0, 2**16))
@hypothesis_settings(max_examples=12 if INTERPRET else 60)
def test_agrees_on_anything(call: tuple[QkvRopeCase, torch.dtype], seed: int) -> None:
    case, dtype = call
    verify(make_qkv_rope_inputs(case, dtype, "cuda" if GPU else "cpu", seed))


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", qkv_rope_cases("smoke"), ids=lambda case: case.name)
def test_same_bits_every_time(case: QkvRopeCase, device: str) -> None:
    inputs = make_qkv_rope_inputs(case, torch.float16, device)
    assert_same_bits(lambda: outcome(qkv_rope, inputs))


def test_results_are_contiguous_and_of_one_s_own(device: str) -> None:
    """`window_attn` takes them as they are."""
    inputs = make_qkv_rope_inputs(TOWER, torch.float16, device)
    results = inputs.call(qkv_rope)
    assert all(result.is_contiguous() for result in results)
    assert len({result.untyped_storage().data_ptr() for result in results}) == 3
    out = torch_ops.window_attn(*results, cumulative((30, 10), device))
    assert out.shape == results[0].shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_of_a_head_are_turned_together(dtype: torch.dtype, device: str) -> None:
    """A weight that picks columns, and a quarter turn: the second half comes to the first, negated."""
    x = torch.randn(9, 48, device=device, dtype=dtype)
    weight = torch.eye(48, device=device, dtype=dtype)
    cos, sin = torch.zeros(9, 16, device=device), torch.ones(9, 16, device=device)
    q, k, v = qkv_rope(x, weight, None, cos, sin, 1)
    for turned, begin in ((q, 0), (k, 16)):
        assert torch.equal(turned[:, 0], torch.cat([-x[:, begin + 8 : begin + 16], x[:, begin : begin + 8]], 1))
    assert torch.equal(v[:, 0], x[:, 32:])


def test_rounds_where_docs_gemm_md_says(device: str) -> None:
    """Only portable kernels add in PyTorch's order."""
    inputs = make_qkv_rope_inputs(TOWER, torch.float16, device)
    with torch_ops.settings(path="portable"):
        results = inputs.call(qkv_rope)
    if GPU or INTERPRET:
        wide = {name: leaf.float() for name, leaf in inputs.leaves.items()}
        expected = [each.half() for each in inputs.call(references.qkv_rope, **wide)]
    else:
        expected = inputs.call(references.qkv_rope)
    same = [(one == other).float().mean() for one, other in zip(results, expected, strict=True)]
    assert min(same) > 0.98, same


def test_both_halves_of_a_full_table_are_used(device: str) -> None:
    inputs = make_qkv_rope_inputs(TOWER, torch.float32, device)
    other = inputs.cos.clone()
    other[:, 36:] += 1
    first, second = inputs.call(qkv_rope)[0], inputs.call(qkv_rope, cos=other)[0]
    assert torch.equal(first[..., :36], second[..., :36]) and not torch.equal(first[..., 36:], second[..., 36:])


def test_half_a_table_serves_both_halves(device: str) -> None:
    half = make_qkv_rope_inputs(QkvRopeCase("half", "", 33, 40, 2, 72, half_table=True), torch.float16, device)
    tables = {name: torch.cat([getattr(half, name)] * 2, 1) for name in ("cos", "sin")}
    for actual, expected in zip(half.call(qkv_rope), half.call(qkv_rope, **tables), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("stride", ["rows", "columns"])
def test_strided_tables(stride: str, device: str) -> None:
    inputs = make_qkv_rope_inputs(TOWER, torch.float32, device)
    tables = {}
    for name in ("cos", "sin"):
        table = getattr(inputs, name)
        tables[name] = torch.cat([table] * 2, 1)[:, :72] if stride == "rows" else table.t().contiguous().t()
    for actual, expected in zip(inputs.call(qkv_rope, **tables), inputs.call(qkv_rope), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_a_single_gradient_is_the_one_of_all(wanted: str, device: str) -> None:
    inputs = make_qkv_rope_inputs(TOWER, torch.float16, device)
    everything = outcome(qkv_rope, inputs)
    leaf = inputs.leaves[wanted].detach().clone().requires_grad_()
    results = inputs.call(qkv_rope, **{wanted: leaf})
    (gradient,) = torch.autograd.grad(results, leaf, tuple(inputs.douts.values()))
    assert torch.equal(gradient, everything[f"d{wanted}"])


def test_a_frozen_weight_keeps_no_activations(device: str) -> None:
    inputs = make_qkv_rope_inputs(TOWER, torch.float16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda _: None):
        inputs.call(qkv_rope, x=inputs.x.clone().requires_grad_())
        assert kept and inputs.x.data_ptr() not in kept
        kept.clear()
        inputs.call(qkv_rope, weight=inputs.weight.clone().requires_grad_())
        assert inputs.x.data_ptr() in kept


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_results_that_go_unused(used: tuple[int, ...], device: str) -> None:
    inputs = make_qkv_rope_inputs(TOWER, torch.float32, device)
    douts = [dout if index in used else torch.zeros_like(dout) for index, dout in enumerate(inputs.douts.values())]
    expected = outcome(qkv_rope, replace(inputs, dq=douts[0], dk=douts[1], dv=douts[2]))
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
    results = inputs.call(qkv_rope, **leaves)
    grads = torch.autograd.grad([results[index] for index in used], tuple(leaves.values()), [douts[i] for i in used])
    for name, gradient in zip(leaves, grads, strict=True):
        assert torch.equal(gradient, expected[f"d{name}"]), name


@pytest.mark.parametrize("layout", ["zero", "head_major", "packed", "column_strided", "misaligned"])
def test_gradients_in_any_strides(layout: str, device: str) -> None:
    inputs = make_qkv_rope_inputs(TOWER, torch.float16, device)

    def laid_out(dout: Tensor) -> Tensor:
        rows, heads, dim = dout.shape
        if layout == "zero":
            return dout[:1, :1, :1].expand(dout.shape)
        if layout == "head_major":
            return dout.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "packed":
            return torch.stack([dout] * 3, 1)[:, 1]
        if layout == "column_strided":
            return dout.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        return misaligned(dout)

    strided = {f"d{name}": laid_out(dout) for name, dout in inputs.douts.items()}
    compact = {name: dout.contiguous() for name, dout in strided.items()}
    one, other = (outcome(qkv_rope, replace(inputs, **douts)) for douts in (strided, compact))
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.no_interpret
@pytest.mark.parametrize("half_table", [False, True])
def test_gradcheck_in_fp64(half_table: bool) -> None:
    case = QkvRopeCase("gradcheck", "fp64", 5, 7, 2, 8, num_k_heads=1, half_table=half_table)
    inputs = make_qkv_rope_inputs(case, torch.float64)
    leaves = {name: leaf.requires_grad_() for name, leaf in inputs.leaves.items()}

    def call(*given: Tensor) -> Any:
        return inputs.call(qkv_rope, **dict(zip(leaves, given, strict=True)))

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16], ids=str)
def test_autocast_follows_the_region_and_leaves_tables_alone(dtype: torch.dtype, device: str) -> None:
    inputs = make_qkv_rope_inputs(TOWER, torch.float32, device)
    weight = inputs.weight.clone().requires_grad_()
    with torch.autocast(device, dtype=dtype):
        results = inputs.call(qkv_rope, weight=weight)
    cast = {name: leaf.to(dtype) for name, leaf in inputs.leaves.items()}
    for actual, expected in zip(results, inputs.call(qkv_rope, **cast), strict=True):
        assert actual.dtype == dtype and torch.equal(actual, expected)
    sum(result.sum() for result in results).backward()
    assert weight.grad.dtype == torch.float32 and weight.grad.isfinite().all()


def test_autocast_takes_tables_of_another_half_type_along(device: str) -> None:
    """As x, which had their dtype."""
    inputs = make_qkv_rope_inputs(TOWER, torch.float32, device)
    region = torch.float16
    everything = {**inputs.leaves, "cos": inputs.cos, "sin": inputs.sin}
    other = {name: tensor.to(torch.bfloat16) for name, tensor in everything.items()}
    with torch.autocast(device, dtype=region):
        results = inputs.call(qkv_rope, **other)
    expected = inputs.call(qkv_rope, **{name: tensor.to(region) for name, tensor in other.items()})
    for actual, wanted in zip(results, expected, strict=True):
        assert actual.dtype == region and torch.equal(actual, wanted)


REFUSALS = [
    ({"x": lambda x: x[0]}, r"x has shape \[12\], expected shape \[T, C\]"),
    ({"x": lambda x: x.int()}, r"x is int32, expected float16, bfloat16 or float32"),
    ({"x": lambda x: x[:, :0]}, r"the number of columns of x is 0, expected 1 or more"),
    ({"x": None}, r"x is None, expected a dense tensor"),
    ({"weight": lambda x: x[:, :9]}, r"weight has shape \[64, 9\], expected shape .* = \[any, 12\]"),
    ({"weight": lambda x: x.half()}, r"weight is float16, expected float32 as x is"),
    ({"weight": lambda x: x[None]}, r"weight.* expected shape \[\(H \+ 2 Hk\) D, C\]"),
    ({"num_heads": 3}, r"rows of weight is 64, expected a multiple of its 5 heads"),
    ({"num_heads": 0}, r"the number of heads of q is 0, expected from 1 to 65535"),
    ({"num_k_heads": 0}, r"the number of heads of k is 0, expected from 1 to 65535"),
    ({"weight": lambda x: x[:48]}, r"head dimension of weight is 12, expected a multiple of 8"),
    ({"bias": lambda x: x[:5]}, r"bias has shape \[5\], expected shape \[64\]"),
    ({"bias": lambda x: x.half()}, r"bias is float16, expected float32 as x is"),
    ({"cos": lambda x: x[:3]}, r"cos has shape \[3, 16\], expected shape .* = \[10, any\]"),
    ({"cos": lambda x: x[:, :4]}, r"cos has 4, expected 16 or 8 columns"),
    ({"cos": lambda x: x.half()}, r"cos is float16, expected float32 as x is"),
    ({"sin": lambda x: x[:, :8]}, r"sin is \[10, 8\] in float32, expected \[10, 16\] in float32"),
    ({"sin": lambda x: x.to("meta")}, r"sin is on meta, expected on .* as x is"),
    ({"x": lambda x: x.to_sparse()}, r"x is of layout .*, expected a dense tensor"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    good = {
        "x": torch.randn(10, 12, device=device), "weight": torch.randn(64, 12, device=device),
        "bias": torch.randn(64, device=device), "cos": torch.randn(10, 16, device=device),
        "sin": torch.randn(10, 16, device=device), "num_heads": 2, "num_k_heads": 1,
    }  # fmt: skip
    assert_refuses(qkv_rope, good, changes, message)


BACKWARD_REFUSALS = [
    ({"dk": torch.zeros(9, 1, 16)}, r"dk has shape \[9, 1, 16\], expected 10 rows and 16 columns as dq is"),
    ({"dv": torch.zeros(10, 2, 16)}, r"dv has shape \[10, 2, 16\], expected shape \[10, 1, 16\] as dk is"),
    ({"x": None}, r"x is None, expected a dense tensor"),
    ({"x": torch.zeros(10, 9)}, r"x has shape \[10, 9\], expected shape \[T, C\] = \[10, 12\]"),
    ({"weight": torch.zeros(32, 12)}, r"the head dimension of weight is 8, expected 16 as that of dq is"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), BACKWARD_REFUSALS)
def test_backward_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    good = {
        "dq": torch.zeros(10, 2, 16), "dk": torch.zeros(10, 1, 16), "dv": torch.zeros(10, 1, 16),
        "x": torch.zeros(10, 12), "weight": torch.zeros(64, 12), "cos": torch.zeros(10, 16), "sin": torch.zeros(10, 16),
    }  # fmt: skip
    good = {name: tensor.to(device) for name, tensor in good.items()}
    assert_refuses(torch.ops.vk.qkv_rope_backward, good, changes, message)


def test_flops_are_exact(device: str) -> None:
    inputs = make_qkv_rope_inputs(TOWER, torch.float32, device)
    product = 2 * TOWER.rows * TOWER.width * TOWER.heads * TOWER.head_dim
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
    flops, results = flops_of(lambda: inputs.call(qkv_rope, **leaves))
    assert flops == product
    assert flops_of(lambda: torch.autograd.backward(results, tuple(inputs.douts.values())))[0] == 2 * product


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements(device: str) -> None:
    """The last rows of x and of every result lie past 2^31 elements."""
    rows, tail = 2**31 // 1024 + 4096, 2048
    case = QkvRopeCase("large", "int64 offsets", tail, 1024, 16, 64)
    last = make_qkv_rope_inputs(case, torch.bfloat16, device)
    x = torch.zeros(rows, 1024, device=device, dtype=torch.bfloat16)
    tables = {name: torch.zeros(rows, 64, device=device) for name in ("cos", "sin")}
    x[-tail:] = last.x
    for name, table in tables.items():
        table[-tail:] = getattr(last, name)
    for whole, alone in zip(last.call(qkv_rope, x=x, **tables), last.call(qkv_rope), strict=True):
        assert torch.equal(whole[-tail:], alone)
