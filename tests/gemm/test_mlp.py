"""Numerics, semantics and refusals of vk::mlp and its backward."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import torch_ops
from csrc_free_ops.configs.rows import ATEN
from tests.gemm.verify import Projection, ProjectionTests, assert_second_derivatives_refused, left_to_pytorch
from tests.testing.interpreter import with_dtypes
from tests.verify import DTYPES, GPU, INTERPRET, assert_refuses, assert_same_bits, flops_of, misaligned
from torch_ops import mlp
from torch_ops._gemm import hopper as gemm_hopper
from torch_ops._gemm import plan as gemm
from torch_ops._gemm.tensors import Gradient, GradientOptions
from torch_ops.testing import check, check_draws, redrawn, references
from torch_ops.testing.cases import LINEAR_LAYOUTS, MlpCase, MlpInputs, make_mlp_inputs, mlp_cases, outcome
from torch_ops.testing.tolerance import Draw

ACTIVATIONS = ("gelu_tanh", "gelu", "quick_gelu", "silu", "swiglu")
TOWER, GATED, ODD = mlp_cases("smoke")
APART = replace(GATED, name="apart", apart=True)
APART_ODD = replace(APART, name="apart_odd", inner=85)

pytestmark = pytest.mark.interpret


# Whether the first product is kept or made again.
RECOMPUTES = ((False,), (True,))
MLP = Projection(mlp, references.mlp, make_mlp_inputs, GATED, ("x", "w1", "b1", "w2", "b2", "dout"), RECOMPUTES)


class TestMlp(ProjectionTests):
    projection = MLP


def verify(inputs: MlpInputs, recompute: bool = False) -> None:
    MLP.verify(inputs, recompute=recompute)


@with_dtypes(mlp_cases("edge"), DTYPES)
def test_agrees_with_reference(case: MlpCase, dtype: torch.dtype, device: str) -> None:
    verify(make_mlp_inputs(case, dtype, device), case.recompute)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp_1152_4304_784", "mlp_1280_3420_3136", "mlp_512_1365_4096"])
def test_agrees_at_real_shapes(name: str, device: str) -> None:
    case = next(case for case in mlp_cases("bench") if case.name == name)
    verify(make_mlp_inputs(case, torch.bfloat16, device))


@with_dtypes(mlp_cases("smoke"), DTYPES)
def test_agrees_where_a_row_leaves_products_to_pytorch(
    case: MlpCase, dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    inputs = make_mlp_inputs(case, dtype, device)
    with left_to_pytorch(("gemm", "gemm_pair"), dtype, tmp_path):
        if INTERPRET or GPU:
            assert inputs.call(lambda *args: torch_ops.explain(mlp, *args))["path"] == "aten"
        verify(inputs)


@with_dtypes([*mlp_cases("smoke"), APART_ODD], DTYPES)
def test_kernels_agree_where_pytorch_would_make_the_products(case: MlpCase, dtype: torch.dtype, device: str) -> None:
    with torch_ops.settings(path="portable"):
        verify(make_mlp_inputs(case, dtype, device))


@st.composite
def calls(draw) -> tuple[MlpCase, torch.dtype]:
    activation = draw(st.sampled_from(ACTIVATIONS))
    # With few numbers eager's largest error can be small by luck, and the rule would ask the same of ours.
    lead = draw(st.sampled_from([(40,), (3, 11), (2, 2, 9)] if INTERPRET else [(150,), (5, 31), (2, 3, 29)]))
    case = MlpCase(
        "fuzz", "anything", lead, draw(st.integers(8, 100)), draw(st.integers(8, 50 if INTERPRET else 200)),
        activation, outer=draw(st.integers(8, 60)), bias=draw(st.booleans()),
        recompute=draw(st.booleans()), layout=draw(st.sampled_from(LINEAR_LAYOUTS)),
        apart=activation == "swiglu" and draw(st.booleans()),
    )  # fmt: skip
    return case, draw(st.sampled_from([torch.float16] if INTERPRET else DTYPES))


@given(calls(), st.integers(0, 2**16))
@hypothesis_settings(max_examples=12 if INTERPRET else 60)
def test_agrees_on_anything(call: tuple[MlpCase, torch.dtype], seed: int) -> None:
    case, dtype = call
    verify(make_mlp_inputs(case, dtype, "cuda" if GPU else "cpu", seed), case.recompute)


def _activated(pre: Tensor, activation: str) -> Tensor:
    """The op with layers that do nothing: w1 and w2 are identities."""
    columns = pre.shape[1]
    w2 = torch.eye(columns // 2 if activation == "swiglu" else columns, device=pre.device, dtype=pre.dtype)
    return mlp(pre, torch.eye(columns, device=pre.device, dtype=pre.dtype), None, w2, None, activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_hold_from_tiny_to_huge(activation: str, dtype: torch.dtype, device: str) -> None:
    """Values and slopes where a naive form would cancel or overflow."""
    gated = activation == "swiglu"
    sizes = 2.0 ** torch.arange(-14, 13 if gated else 15, 0.125, device=device, dtype=torch.float64)
    points = torch.cat([-sizes, sizes[:1] * 0, sizes]).to(dtype)[:, None]
    x = torch.cat([points, torch.full_like(points, 1.5)], 1) if gated else points
    dout = torch.ones_like(points)
    results = []
    eager = references.linear.activated
    for function, kind in ((_activated, dtype), (eager, dtype), (eager, torch.float64)):
        leaf = x.detach().to(kind).requires_grad_()
        out = function(leaf, activation)
        (dx,) = torch.autograd.grad(out, leaf, dout.to(kind))
        results.append({"out": out.detach(), "dx": dx})
    actual, eager, reference = results
    assert all(tensor.isfinite().all() for tensor in actual.values())
    # Apart, since huge ones would hide the error of small ones.
    magnitude = points[:, 0].double().abs()
    for chosen in (magnitude < 0.01, (magnitude >= 0.01) & (magnitude < 30), magnitude >= 30):
        check(*({name: tensor[chosen] for name, tensor in each.items()} for each in (actual, eager, reference)))


@pytest.mark.parametrize("value", [1e25, 1e38], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS[:4])
def test_nothing_overflows_in_between(activation: str, value: float, device: str) -> None:
    """Squares and cubes of these are infinite in fp32."""
    x = torch.tensor([[value], [-value]], device=device, requires_grad=True)
    one = torch.ones(1, 1, device=device)
    out = mlp(x, one, None, one, None, activation)
    assert out[0].item() == x[0].item() and out[1].item() == 0
    # On the CPU the others' gradients are PyTorch's own.
    if INTERPRET or GPU or activation == "quick_gelu":
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert dx.flatten().tolist() == [1, 0]


@pytest.mark.no_interpret
@pytest.mark.parametrize("case", [*mlp_cases("smoke"), APART], ids=lambda case: case.name)
def test_same_bits_every_time(case: MlpCase, device: str) -> None:
    inputs = make_mlp_inputs(case, torch.float16, device)
    assert_same_bits(lambda: outcome(mlp, inputs))


@pytest.mark.parametrize("case", [*mlp_cases("smoke"), APART], ids=lambda case: case.name)
def test_recomputing_keeps_no_hidden_and_gives_the_same(case: MlpCase, device: str) -> None:
    inputs = make_mlp_inputs(case, torch.float16, device)
    kept: list[tuple[int, ...]] = []
    hidden = case.rows, inputs.w1.shape[0] * (2 if case.apart else 1)
    for recompute in (False, True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tuple(tensor.shape)), lambda _: None):
            inputs.call(mlp, recompute, x=inputs.x.clone().requires_grad_())
        assert (hidden in kept) == (not recompute), kept
    for name, tensor in outcome(partial(mlp, recompute=True), inputs).items():
        assert torch.equal(tensor, outcome(mlp, inputs)[name]), name


@pytest.mark.skipif(not (INTERPRET or GPU), reason="no kernels run here")
@pytest.mark.parametrize("rows", [0, 150])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_with_its_product_may_be_asked_for_where_there_is_none(bias: bool, rows: int, device: str) -> None:
    """A graph that was traced under another setting, or for more rows, asks for it and gets its own kernel's result."""
    dout, pre, weight = (torch.randn(shape, device=device).half() for shape in ((rows, 24), (rows, 40), (24, 40)))
    dpre, h = (torch.full_like(pre, torch.nan) for _ in range(2))
    sums = torch.full((gemm_hopper.count_of_column_sums(rows) if bias else 0, 40), torch.nan, device=device)
    with torch_ops.settings(path="portable"):
        t = Gradient(dout, weight, pre, dpre, h, sums)
        gemm.plan_gradient(t, GradientOptions("silu", bias)).launch(t)

    def reference(dtype: torch.dtype) -> dict[str, Tensor]:
        x = pre.to(dtype).requires_grad_()
        activated = references.linear.activated(x, "silu")
        (dx,) = torch.autograd.grad(activated, x, dout.to(dtype) @ weight.to(dtype))
        return {"dpre": dx, "h": activated.detach()} | ({"db": dx.sum(0)} if bias else {})

    found = {"dpre": dpre, "h": h} | ({"db": sums.sum(0).half()} if bias else {})
    check(found, reference(torch.float16), reference(torch.float64))


def test_hidden_comes_when_a_gradient_may(device: str) -> None:
    inputs = make_mlp_inputs(TOWER, torch.float16, device)
    out, hidden = inputs.call(torch.ops.vk.mlp)
    assert hidden.shape == (37, 76) and not hidden.requires_grad
    bare, nothing = inputs.call(torch.ops.vk.mlp, False)
    assert nothing.shape == (37, 0) and torch.equal(out, bare) and torch.equal(out, inputs.call(mlp))
    x = inputs.x.clone().requires_grad_()
    grads = [
        torch.autograd.grad(inputs.call(torch.ops.vk.mlp, keeps, x=x)[0], x, inputs.dout) for keeps in (True, False)
    ]
    assert torch.equal(*(gradient for (gradient,) in grads))


@pytest.mark.parametrize("case", [TOWER, GATED, APART], ids=lambda case: case.name)
@pytest.mark.parametrize("recompute", [False, True])
def test_any_gradients_alone_are_those_of_all(case: MlpCase, recompute: bool, device: str) -> None:
    inputs = make_mlp_inputs(case, torch.float16, device)
    everything = outcome(mlp, inputs)
    # The interpreter takes a second for each pair.
    sizes = (1, 2) if case is TOWER or not INTERPRET else (1,)
    for wanted in itertools.chain(*(itertools.combinations(inputs.leaves, size) for size in sizes)):
        leaves = {name: inputs.leaves[name].detach().requires_grad_() for name in wanted}
        grads = torch.autograd.grad(inputs.call(mlp, recompute, **leaves), tuple(leaves.values()), inputs.dout)
        for name, gradient in zip(wanted, grads, strict=True):
            assert torch.equal(gradient, everything[f"d{name}"]), (name, wanted)


def test_frozen_weights_keep_no_input(device: str) -> None:
    inputs = make_mlp_inputs(TOWER, torch.float16, device)
    x = inputs.x.clone().requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda _: None):
        inputs.call(mlp, x=x)
        assert kept and x.data_ptr() not in kept
        kept.clear()
        inputs.call(mlp, x=x, w1=inputs.w1.clone().requires_grad_())
        assert x.data_ptr() in kept


@pytest.mark.parametrize("layout", ["zero", "row_strided", "column_strided", "misaligned"])
def test_gradients_in_any_strides(layout: str, device: str) -> None:
    inputs = make_mlp_inputs(TOWER, torch.float16, device)
    dout = inputs.dout
    strided = {
        "zero": dout[:1, :1].expand(dout.shape),
        "row_strided": torch.cat([dout, dout], 1)[:, : dout.shape[1]],
        "column_strided": dout.t().contiguous().t(),
        "misaligned": misaligned(dout),
    }[layout]
    one, other = (outcome(mlp, replace(inputs, dout=each)) for each in (strided, strided.contiguous()))
    for name in one:
        assert torch.equal(one[name], other[name]), name


def _packed(inputs: MlpInputs) -> MlpInputs:
    w1, b1 = (torch.cat(pair) for pair in ((inputs.w1, inputs.w_up), (inputs.b1, inputs.b_up)))
    return replace(inputs, w1=w1, b1=b1, w_up=None, b_up=None)


def _first_product(inputs: MlpInputs) -> Any:
    """The kernel that makes it and its launch; None where it is PyTorch's, which may sum other layouts otherwise."""
    kernels = inputs.call(lambda *args, **up: torch_ops.explain(mlp, *args, **up))["kernels"]
    name, chosen = next(iter(kernels.items()), ("", {"launch": ATEN.entry()}))
    return None if chosen["launch"] == ATEN.entry() else (name, chosen["launch"])


def _verify_both(one: MlpInputs, other: MlpInputs, recompute: bool) -> bool:
    """Check the tolerance rule, and the same bits where one kernel makes both results; return whether it does.

    Gradients are sums of PyTorch's own products.
    """
    for inputs in (one, other):
        verify(inputs, recompute)
    alike = _first_product(one) is not None and _first_product(one) == _first_product(other)
    if alike:
        assert torch.equal(one.call(mlp, recompute), other.call(mlp, recompute))
    return alike


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_weights_compute_what_one_of_both_does(dtype: torch.dtype, recompute: bool, device: str) -> None:
    inputs = make_mlp_inputs(APART, dtype, device)
    assert _verify_both(inputs, _packed(inputs), recompute) or not INTERPRET


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_weights_give_one_hidden(dtype: torch.dtype, device: str) -> None:
    def draw(seed: int) -> Draw:
        inputs = redrawn(make_mlp_inputs(APART, dtype, device), seed)
        packed = _packed(inputs)
        actual = {name: each.call(torch.ops.vk.mlp)[1] for name, each in (("apart", inputs), ("packed", packed))}
        eager, truth = (
            functional.linear(packed.x.to(kind), packed.w1.to(kind), packed.b1.to(kind))
            for kind in (dtype, torch.float64)
        )
        assert eager.shape == (45, 136)
        return actual, dict.fromkeys(actual, eager), dict.fromkeys(actual, truth)

    check_draws(draw)


@pytest.mark.parametrize("recompute", [False, True])
def test_two_weights_of_different_strides(recompute: bool, device: str) -> None:
    inputs = make_mlp_inputs(APART, torch.float16, device)
    transposed = replace(inputs, w_up=inputs.w_up.t().contiguous().t())
    assert _verify_both(inputs, transposed, recompute) or not INTERPRET


def test_frozen_gates_keep_no_input(device: str) -> None:
    inputs = make_mlp_inputs(APART, torch.float16, device)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()), lambda _: None):
        inputs.call(mlp, b_up=inputs.b_up.clone().requires_grad_())
        assert kept and inputs.x.data_ptr() not in kept
        inputs.call(mlp, w_up=inputs.w_up.clone().requires_grad_())
        assert inputs.x.data_ptr() in kept


@pytest.mark.no_interpret
def test_no_second_derivative_of_two_weights_is_dropped(device: str) -> None:
    inputs = make_mlp_inputs(replace(APART, lead=(4,)), torch.float32, device)
    assert_second_derivatives_refused(mlp, references.mlp, inputs, "vk::mlp_backward has no derivative")


def test_leading_dimensions_are_rows(device: str) -> None:
    inputs = make_mlp_inputs(MlpCase("lead", "", (2, 3, 5), 24, 40), torch.float16, device)
    out = inputs.call(mlp)
    assert out.shape == (2, 3, 5, 24) and out.is_contiguous()
    assert torch.equal(out.view(30, 24), inputs.call(mlp, x=inputs.x.view(30, 24)))


@pytest.mark.no_interpret
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_in_fp64(activation: str, recompute: bool) -> None:
    _check_gradients(MlpCase("gradcheck", "fp64", (2, 2), 3, 5, activation, outer=2), recompute)


@pytest.mark.no_interpret
@pytest.mark.parametrize("recompute", [False, True])
def test_gradcheck_of_two_weights_in_fp64(recompute: bool) -> None:
    _check_gradients(MlpCase("gradcheck", "fp64", (2, 2), 3, 5, "swiglu", outer=2, apart=True), recompute)


@pytest.mark.no_interpret
@pytest.mark.parametrize("apart", [False, True])
def test_gradcheck_of_the_op_s_second_result_too(apart: bool) -> None:
    case = MlpCase("gradcheck", "fp64", (2, 2), 3, 5, "swiglu", outer=2, apart=apart)
    _check_gradients(case, True, torch.ops.vk.mlp)


def _check_gradients(case: MlpCase, option: bool, function: Any = mlp) -> None:
    inputs = make_mlp_inputs(case, torch.float64)
    leaves = {name: leaf.requires_grad_() for name, leaf in inputs.leaves.items()}

    def call(*given: Tensor) -> Any:
        return inputs.call(function, option, **dict(zip(leaves, given, strict=True)))

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


@pytest.mark.parametrize("case", [TOWER, APART], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16], ids=str)
def test_autocast_follows_the_region(dtype: torch.dtype, case: MlpCase, device: str) -> None:
    """Weights in fp32, as mixed precision keeps them, and their gradients too."""
    inputs = make_mlp_inputs(case, torch.float32, device)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in inputs.leaves.items()}
    with torch.autocast(device, dtype=dtype):
        out = inputs.call(mlp, **{**leaves, "x": leaves["x"].to(dtype)})
    cast = {name: leaf.to(dtype) for name, leaf in inputs.leaves.items()}
    assert out.dtype == dtype and torch.equal(out, inputs.call(mlp, **cast))
    out.sum().backward()
    assert all(leaf.grad.dtype == torch.float32 and leaf.grad.isfinite().all() for leaf in leaves.values())


GATES = {"activation": "swiglu", "w_up": torch.ones(16, 12), "b_up": torch.ones(16)}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"activation": "relu"}, r"activation is 'relu', expected one of gelu_tanh"),
    ({"x": lambda x: x[0, 0]}, r"x has shape \[\], expected shape \[..., C\]"),
    ({"x": lambda x: x.int()}, r"x is int32, expected float16, bfloat16 or float32"),
    ({"x": None}, r"x is None, expected a dense tensor"),
    ({"x": lambda x: x[:, :9]}, r"w1 has shape \[16, 12\], expected shape \[I, C\] = \[any, 9\]"),
    ({"w1": lambda x: x.half()}, r"w1 is float16, expected float32 as x is"),
    ({"w2": lambda x: x[:, :9]}, r"w2 has shape \[12, 9\], expected shape \[N, I\] = \[any, 16\]"),
    ({"activation": "swiglu"}, r"w2 has shape \[12, 16\], expected shape \[N, I\] = \[any, 8\]"),
    (
        {"activation": "swiglu", "w1": lambda x: x[:15]},
        r"the number of rows of w1 is 15, expected even: gates, then what they gate",
    ),
    ({"b1": lambda x: x[:5]}, r"b1 has shape \[5\], expected shape \[16\]"),
    ({"b2": lambda x: x[None]}, r"b2 has shape \[1, 12\], expected shape \[12\]"),
    ({"b2": lambda x: x.half()}, r"b2 is float16, expected float32 as x is"),
    ({"w2": lambda x: x[:0], "b2": None}, r"w2 has shape \[0, \d+\], expected sizes from 1 on"),
    ({"w2": lambda x: x.to("meta")}, r"w2 is on meta, expected on .* as x is"),
    ({"w_up": torch.ones(16, 12)}, r"w_up is .*, expected None with activation 'silu', since only 'swiglu'"),
    ({"b_up": torch.ones(16)}, r"b_up is a tensor, expected None where w_up is"),
    ({**GATES, "w_up": torch.ones(15, 12)}, r"w_up has shape \[15, 12\], expected shape \[I, C\] = \[16, 12\]"),
    ({**GATES, "w_up": torch.ones(16, 12).half()}, r"w_up is float16, expected float32 as x is"),
    ({**GATES, "b_up": None}, r"b_up is None, expected a tensor where b1 is one, else None"),
    ({**GATES, "b1": None}, r"b_up is a tensor, expected a tensor where b1 is one, else None"),
    ({**GATES, "b_up": torch.ones(15)}, r"b_up has shape \[15\], expected shape \[16\]"),
    ({"w1": lambda x: x.to_sparse()}, r"w1 is of layout .*, expected a dense tensor"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    good = {
        "x": torch.randn(10, 12, device=device), "w1": torch.randn(16, 12, device=device),
        "b1": torch.randn(16, device=device), "w2": torch.randn(12, 16, device=device),
        "b2": torch.randn(12, device=device), "activation": "silu",
    }  # fmt: skip
    assert_refuses(mlp, good, changes, message)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_plan_is_of_a_layout(layout: torch.layout, device: str) -> None:
    """Strides of a sparse tensor read as those of an expanded one, or not at all."""
    x, w = torch.randn(4, 8, device=device), torch.randn(8, 8, device=device)
    mlp(x[:1, :1].expand(4, 8), w, None, w, None, "silu")
    with pytest.raises(ValueError, match="^mlp: x is of layout .*, expected a dense tensor"):
        mlp(x.to_sparse(layout=layout), w, None, w, None, "silu")


BACKWARD_REFUSALS = [
    ({"dout": torch.zeros(10, 9)}, r"dout has shape \[10, 9\], expected shape \[..., N\] with N = 12"),
    ({"hidden": torch.zeros(9, 16)}, r"hidden has shape \[9, 16\], expected shape \[10, 16\], or without columns"),
    ({"hidden": torch.zeros(10, 16).half()}, r"hidden is float16, expected float32 as dout is"),
    ({"x": None}, r"x is None, expected a dense tensor"),
    ({"x": torch.zeros(10, 9)}, r"x has shape \[10, 9\], expected shape \[10, 12\]"),
    ({"needs_b_up": True}, r"needs_w_up and needs_b_up is True, expected False without w_up"),
    ({"w_up": torch.zeros(16, 12)}, r"w_up.* expected None with activation 'gelu_tanh', since only 'swiglu' gates"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), BACKWARD_REFUSALS)
def test_backward_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    good = {
        "dout": torch.zeros(10, 12), "x": torch.zeros(10, 12), "w1": torch.zeros(16, 12), "b1": torch.zeros(16),
        "w2": torch.zeros(12, 16), "hidden": torch.zeros(10, 16),
    }  # fmt: skip
    good = {name: tensor.to(device) for name, tensor in good.items()}
    assert_refuses(torch.ops.vk.mlp_backward, good, changes, message)


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [(TOWER, 2 * 37 * 40 * 76, 2 * 37 * 40 * 76), (APART, 2 * 45 * 32 * 136, 2 * 45 * 32 * 68)],
    ids=["tower", "apart"],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_flops_are_exact(recompute: bool, case: MlpCase, first: int, second: int, device: str) -> None:
    inputs = make_mlp_inputs(case, torch.float32, device)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
    flops, out = flops_of(lambda: inputs.call(mlp, recompute, **leaves))
    assert flops == first + second
    assert flops_of(lambda: out.backward(inputs.dout))[0] == (3 if recompute else 2) * first + 2 * second


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements(device: str) -> None:
    """The last rows of x, of what lies between the layers and of every gradient of theirs lie past 2^31 elements."""
    rows, tail = 2**31 // 1024 + 4096, 2048
    last = make_mlp_inputs(MlpCase("large", "int64 offsets", (tail,), 1024, 1024), torch.bfloat16, device)
    x, dout = (torch.zeros(rows, 1024, device=device, dtype=torch.bfloat16) for _ in range(2))
    x[-tail:], dout[-tail:] = last.x, last.dout
    whole, alone = (replace(last, x=x, dout=dout), last)
    outs = []
    for inputs in (whole, alone):
        leaf = inputs.x.requires_grad_()
        out = inputs.call(mlp, x=leaf)
        outs.append((out.detach()[-tail:], torch.autograd.grad(out, leaf, inputs.dout)[0][-tail:]))
    assert torch.equal(outs[0][0], outs[1][0])
    # PyTorch may choose another order of sums for another number of rows.
    torch.testing.assert_close(outs[0][1], outs[1][1])
