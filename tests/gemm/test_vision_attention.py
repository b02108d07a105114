"""Numerics, layouts and refusals of vk::_vision_attention, and its packed gradient.

The tests that all projections share come from tests/gemm/verify.py.
"""

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import torch_ops
from tests.gemm.verify import Projection, ProjectionTests
from tests.testing.interpreter import with_dtypes
from tests.verify import DTYPES, INTERPRET, assert_refuses, assert_same_bits, flops_of
from torch_ops._attention.packed_heads import PackedBackward, PackedOptions, heads_of, plan_packed_backward
from torch_ops._core.plan import Plan
from torch_ops._gemm.elementwise import plan_column_sums
from torch_ops._gemm.tensors import ColumnSums
from torch_ops.testing import check, poisoned, references
from torch_ops.testing.cases import VisionAttentionCase, cumulative, make_vision_attention_inputs, outcome
from torch_ops.vision_attention import vision_attention

LEAVES = ("x", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias")
CASE = VisionAttentionCase("case", "", 40, 32, 2, 16)

pytestmark = pytest.mark.interpret


def _vision_attention(x: Tensor, *arguments: Any) -> Tensor:
    """The op for arguments of the reference: all rows are one segment, and nothing is rotated."""
    *weights, _, _, num_heads = arguments
    return vision_attention(x, *weights, _one_segment(x.shape[0], x.device), num_heads)


@functools.cache
def _one_segment(rows: int, device: torch.device) -> Tensor:
    # Made before the calls that must not wait.
    return cumulative((rows,), device)


ONE_SEGMENT = Projection(
    _vision_attention, references.vision_attention, make_vision_attention_inputs, CASE, (*LEAVES, "dout")
)  # fmt: skip


def skip_long_sums(rows: int, dtype: torch.dtype) -> None:
    if INTERPRET and dtype is torch.float32 and rows > 100:
        pytest.skip("numpy adds rows one after the other, which rounds more often than a GPU's tree of sums")


class TestVisionAttention(ProjectionTests):
    projection = ONE_SEGMENT
    # Attention mixes rows.
    test_nan_stays_in_its_row = None


CASES = tuple(
    VisionAttentionCase(f"{rows}_rows_{head_dim}", "", rows, 40, heads, head_dim)
    for rows, heads, head_dim in ((1, 1, 8), (3, 2, 72), (77, 3, 16), (200, 2, 64))
)


@with_dtypes(CASES, DTYPES)
def test_agrees_with_reference(case: VisionAttentionCase, dtype: torch.dtype, device: str) -> None:
    skip_long_sums(case.rows, dtype)
    ONE_SEGMENT.verify(make_vision_attention_inputs(case, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("path", ("portable", "hopper"))
@pytest.mark.parametrize("rows", (256, 999, 2048, 4096))
def test_agrees_at_real_shapes(rows: int, path: str, device: str) -> None:
    """With dq beside dk and dv, with two accumulators of dq, and with one."""
    case = VisionAttentionCase("real", "", rows, 1024, 16, 64)
    with torch_ops.settings(path=path):
        ONE_SEGMENT.verify(make_vision_attention_inputs(case, torch.bfloat16, device))


@pytest.mark.parametrize("lengths", ((40,), (17, 0, 23), (1,) * 40, (30,)), ids=str)
def test_segments_are_those_of_window_attn(lengths: tuple[int, ...], device: str) -> None:
    """Rows past the last boundary have no keys."""
    inputs = make_vision_attention_inputs(CASE, torch.float16, device)
    cu = cumulative(lengths, device)

    def as_op(x: Tensor, *arguments: Any) -> Tensor:
        *weights, _, _, num_heads = arguments
        return vision_attention(x, *weights, cu, num_heads)

    def of_parts(x: Tensor, *arguments: Any) -> Tensor:
        qkv_weight, qkv_bias, proj_weight, proj_bias, _, _, num_heads = arguments
        q, k, v = functional.linear(x, qkv_weight, qkv_bias).unflatten(1, (3, num_heads, -1)).unbind(1)
        out = references.window_attn(q, k, v, cu)[0]
        return functional.linear(out.flatten(1), proj_weight, proj_bias)

    with poisoned():
        actual = outcome(as_op, inputs)
    check(actual, outcome(of_parts, inputs), outcome(of_parts, inputs, torch.float64))


def test_no_rows(device: str) -> None:
    inputs = make_vision_attention_inputs(replace(CASE, rows=0), torch.float16, device)
    with poisoned():
        found = outcome(_vision_attention, inputs)
    assert found.pop("out").shape == (0, 32) and found.pop("dx").shape == (0, 32)
    assert len(found) == 4 and not any(gradient.any() for gradient in found.values())


def test_gradients_in_part_are_those_of_all(device: str) -> None:
    inputs = make_vision_attention_inputs(replace(CASE, rows=21), torch.float16, device)
    whole = outcome(_vision_attention, inputs)
    for wanted in itertools.product((False, True), repeat=5):
        leaves = {
            name: leaf.detach().requires_grad_(needed)
            for (name, leaf), needed in zip(inputs.leaves.items(), wanted, strict=True)
        }
        result = inputs.call(_vision_attention, **leaves)
        assert result.requires_grad == any(wanted) and torch.equal(result, whole["out"])
        if any(wanted):
            result.backward(inputs.dout)
        for name, leaf in leaves.items():
            assert (leaf.grad is not None) == leaf.requires_grad
            assert leaf.grad is None or torch.equal(leaf.grad, whole[f"d{name}"]), (name, wanted)


@pytest.mark.parametrize("absent", (("qkv_bias",), ("proj_bias",), ("qkv_bias", "proj_bias")), ids=str)
def test_biases_may_be_absent(absent: tuple[str, ...], device: str) -> None:
    inputs = make_vision_attention_inputs(CASE, torch.float16, device)

    def without(function: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        zeros = {name: torch.zeros_like(getattr(inputs, name)) for name in absent}
        if function is _vision_attention:
            zeros = dict.fromkeys(absent)  # type: ignore[assignment]
        leaves = {
            name: leaf.detach().to(dtype or leaf.dtype).requires_grad_()
            for name, leaf in inputs.leaves.items()
            if name not in absent
        }
        filled = {name: zero if zero is None else zero.to(dtype or zero.dtype) for name, zero in zeros.items()}
        out = inputs.call(function, **leaves, **filled)
        gradients = torch.autograd.grad(out, tuple(leaves.values()), inputs.dout.to(out.dtype))
        return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}

    check(
        without(_vision_attention),
        without(references.vision_attention),
        without(references.vision_attention, torch.float64),
    )


def test_only_what_a_backward_needs_is_kept(device: str) -> None:
    inputs = make_vision_attention_inputs(CASE, torch.float16, device)
    kept: dict[str, list[tuple[int, ...]]] = {}
    for wanted in ((), ("proj_bias",), ("proj_weight",), ("x",)):
        shapes: list[tuple[int, ...]] = []
        leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in wanted}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=shapes: to.append(tuple(t.shape)) or t, lambda t: t):
            inputs.call(_vision_attention, **leaves)
        kept[wanted[0] if wanted else ""] = shapes
    packed, attended = (40, 96), (40, 2, 16)
    assert not kept[""] and not {packed, attended} & set(kept["proj_bias"])
    assert attended in kept["proj_weight"] and packed not in kept["proj_weight"]
    assert {packed, attended} < set(kept["x"]) and (40, 32) not in kept["x"]


def test_bits_repeat_also_of_expanded_gradients(device: str) -> None:
    inputs = make_vision_attention_inputs(CASE, torch.float16, device)
    assert_same_bits(lambda: outcome(_vision_attention, inputs))
    for dout in (inputs.dout[:1].expand(40, 32), inputs.dout[0, 0].expand(40, 32), inputs.dout.t().contiguous().t()):
        given = replace(inputs, dout=dout)
        whole = outcome(_vision_attention, replace(inputs, dout=dout.contiguous()))
        check(
            outcome(_vision_attention, given), outcome(references.vision_attention, given),
            outcome(references.vision_attention, given, torch.float64),
        )  # fmt: skip
        assert torch.equal(outcome(_vision_attention, given)["dproj_bias"], whole["dproj_bias"])


def packed_backward(lengths: tuple[int, ...], num_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Any:
    """A backward whose gradient lies amid NaN, the memory around, and what window_attn_backward gives."""
    rows, columns = sum(lengths), num_heads * head_dim
    packed = torch.randn(rows, 3 * columns, generator=torch.Generator().manual_seed(rows)).to(device, dtype)
    cu = cumulative(lengths, device)
    out, lse = torch.ops.vk.window_attn(*heads_of(packed, num_heads), cu)
    dout = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    around = torch.full((rows + 2, 3 * columns + 64), torch.nan, device=device, dtype=dtype)
    dpacked = around[1:-1, 32 : 32 + 3 * columns]
    q, k, v = heads_of(packed, num_heads)
    expected = torch.ops.vk.window_attn_backward(dout.view(out.shape), None, q, k, v, out, lse, cu)
    return PackedBackward(dout, packed, out, lse, cu, dpacked), around, torch.stack(expected, 1).flatten(1)


def assert_written_in_place(t: PackedBackward, around: Tensor, expected: Tensor, num_heads: int) -> Plan:
    plan = plan_packed_backward(t, PackedOptions(num_heads))
    with poisoned():
        plan.launch(t)
    assert torch.equal(t.dpacked, expected)
    t.dpacked.fill_(torch.nan)
    assert around.isnan().all(), "memory beside the gradient was written"
    return plan


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", ((1,), (70,), (200, 31), (20,) * 7), ids=str)
def test_packed_gradient_is_written_in_place(lengths: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """In stock Triton, with segments that are small and with ones that are not."""
    with torch_ops.settings(path="portable"):
        assert_written_in_place(*packed_backward(lengths, 2, 24, dtype, device), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", (64, 72, 80, 128))
@pytest.mark.parametrize(
    ("lengths", "num_heads"),
    (
        ((130,), 1), ((256,), 16), ((900,), 4), ((1100,), 8), ((2048,), 16), ((4096,), 16), ((5000,), 16),
        ((700, 1, 300), 4), ((130,) * 40, 16), ((1,), 140), ((128,), 140),
    ),
    ids=str,
)  # fmt: skip
def test_packed_gradient_of_the_hopper_path(
    lengths: tuple[int, ...], num_heads: int, head_dim: int, device: str
) -> None:
    """The cases reach programs of their own for dq, one and two accumulators of dq, and several segments."""
    with torch_ops.settings(path="hopper"):
        plan = assert_written_in_place(
            *packed_backward(lengths, num_heads, head_dim, torch.bfloat16, device), num_heads
        )
    assert plan.path == "hopper"


@pytest.mark.gpu
def test_opaque_launch_is_a_sound_op(device: str) -> None:
    t, _, expected = packed_backward((300, 200), 2, 64, torch.bfloat16, device)
    t = t._replace(dpacked=torch.zeros_like(t.packed))
    with torch_ops.settings(path="hopper"):
        torch.library.opcheck(torch.ops.vk._packed_attention_bwd.default, (*t, 2))
        torch.ops.vk._packed_attention_bwd(*t, 2)
    assert torch.equal(t.dpacked, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", (0, 1, 513, 1300))
def test_column_sums(rows: int, dtype: torch.dtype, device: str) -> None:
    """Sums of both matrices, of either, and of rows that lie apart or in one place."""
    skip_long_sums(rows, dtype)
    first = torch.randn(rows, 80).to(device, dtype)[:, 8:78]
    for second in (torch.randn(rows, 33).to(device, dtype), torch.randn(1, 33).to(device, dtype).expand(rows, 33)):
        for has_first, has_second in ((True, True), (True, False), (False, True), (False, False)):
            sums = [first.new_full((70,), torch.nan), second.new_full((33,), torch.nan)]
            t = ColumnSums(first, second, sums[0] if has_first else None, sums[1] if has_second else None)
            plan_column_sums(t).launch(t)
            for matrix, given, found in ((first, has_first, sums[0]), (second, has_second, sums[1])):
                if given:
                    check({"sum": found}, {"sum": matrix.sum(0)}, {"sum": matrix.double().sum(0)})
                else:
                    assert found.isnan().all()


@pytest.mark.no_interpret
def test_gradients_by_gradcheck() -> None:
    inputs = make_vision_attention_inputs(VisionAttentionCase("small", "", 5, 8, 1, 8), torch.float64)
    leaves = tuple(leaf.requires_grad_() for leaf in inputs.leaves.values())
    assert torch.autograd.gradcheck(lambda *given: _vision_attention(*given, None, None, 1), leaves)


@pytest.mark.no_interpret
def test_flops_are_those_of_the_products(device: str) -> None:
    inputs = make_vision_attention_inputs(CASE, torch.float16, device)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
    forward, out = flops_of(lambda: inputs.call(_vision_attention, **leaves))
    projections, attention = 2 * 40 * (96 * 32 + 32 * 32), 4 * 40 * 40 * 32
    assert forward == projections + attention
    backward, _ = flops_of(lambda: torch.autograd.grad(out, tuple(leaves.values()), inputs.dout))
    assert backward == 2 * projections + attention * 5 // 2


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"x": lambda x: x[0]}, r"x has shape|x is"),
        ({"x": lambda x: x.to(torch.int32)}, "x is"),
        ({"qkv_weight": lambda weight: weight[:, :-1]}, "qkv_weight is"),
        ({"qkv_weight": lambda weight: weight[:-1]}, "the number of rows of qkv_weight is"),
        ({"qkv_bias": lambda bias: bias[:-1]}, "qkv_bias is"),
        ({"proj_weight": lambda weight: weight[:, :-1]}, "proj_weight is"),
        ({"proj_bias": lambda bias: bias.double()}, "proj_bias is"),
        ({"cu_seqlens": lambda cu: cu.long()}, "cu_seqlens is"),
        ({"num_heads": 0}, "the number of heads of q is"),
    ),
    ids=lambda value: str(value) if isinstance(value, str) else next(iter(value)),
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str, device: str) -> None:
    inputs = make_vision_attention_inputs(CASE, torch.float16, device)
    good = {**inputs.leaves, "cu_seqlens": cumulative((40,), device), "num_heads": 2}
    assert_refuses(torch.ops.vk._vision_attention, good, changes, message.replace(" is", " (is|has)"))


@pytest.mark.no_interpret
def test_explain_says_the_path_of_attention(device: str) -> None:
    inputs = make_vision_attention_inputs(CASE, torch.float16, device)
    found = torch_ops.explain(torch.ops.vk._vision_attention, *inputs.leaves.values(), cumulative((40,), device), 2)
    assert found["path"] == ("portable" if device == "cuda" else "reference")


@pytest.mark.no_interpret
def test_checked_mode_refuses_boundaries(device: str) -> None:
    inputs = make_vision_attention_inputs(CASE, torch.float16, device)
    with torch_ops.settings(checked=True), pytest.raises(ValueError, match=r"cu_seqlens\[1\] is 41"):
        vision_attention(*inputs.leaves.values(), cumulative((41,), device), 2)


@pytest.mark.gpu
def test_a_backward_asks_for_less_memory_than_pytorch_with_compile(device: str) -> None:
    """At most 64 MiB, which a compiled module with FlashAttention-4 asks for; eager ones ask for 136 MiB."""
    inputs = make_vision_attention_inputs(VisionAttentionCase("peak", "", 4096, 1024, 16, 64), torch.bfloat16, device)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
    out = inputs.call(_vision_attention, **leaves)

    def backward() -> Any:
        return torch.autograd.grad(out, tuple(leaves.values()), inputs.dout, retain_graph=True)

    backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    backward()
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before <= 56 * 2**20
