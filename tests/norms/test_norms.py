"""Numerics, semantics and refusals of the four norms and their backward ops."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ops
from csrc_free_ops.configs.norms import norm_programs
from tests import verify as every_op
from tests.testing.interpreter import with_dtypes
from tests.verify import DTYPES, GPU, INTERPRET, misaligned
from torch_ops import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from torch_ops._core.device import gpu
from torch_ops._norms.portable import norm_config
from torch_ops.testing import check, check_draws, poisoned, redrawn, references
from torch_ops.testing.cases import NORM_LAYOUTS, NormCase, NormInputs, make_norm_inputs, norm_cases
from torch_ops.testing.tolerance import Draw

NORMS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
PUBLIC: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm, "add_layer_norm": add_layer_norm, "rms_norm": rms_norm, "add_rms_norm": add_rms_norm,
}  # fmt: skip
OUTPUTS = ("normed", "sum")

pytestmark = pytest.mark.interpret


def operator(op: str) -> Any:
    return getattr(torch.ops.vk, op)


def differentiate(function: Any, inputs: NormInputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Results and, by autograd, all gradients of a weighted sum of them; in `dtype` where given."""
    leaves = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in inputs.tensors.items()}
    results = inputs.call(function, **leaves)
    grads = [dout.to(results[0].dtype) for dout in (inputs.dout, inputs.dsum)[: len(results)]]
    gradients = torch.autograd.grad(results, tuple(leaves.values()), grads)
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return dict(zip(OUTPUTS, (result.detach() for result in results), strict=False)) | named


def verify(op: str, inputs: NormInputs) -> None:
    """The op against the reference, by the tolerance rule, with unwritten memory poisoned."""
    reference = getattr(references, op)

    def draw(seed: int) -> Draw:
        drawn = redrawn(inputs, seed)
        with poisoned():
            actual = differentiate(operator(op), drawn)
        return actual, differentiate(reference, drawn), differentiate(reference, drawn, torch.float64)

    check_draws(draw)


def of_case(name: str, op: str, dtype: torch.dtype, device: str, **changes: Any) -> NormInputs:
    (case,) = (case for case in norm_cases("edge") if case.name == name)
    return make_norm_inputs(op, dataclasses.replace(case, **changes), dtype, device)


@with_dtypes(norm_cases("edge"), DTYPES)
@pytest.mark.parametrize("op", NORMS)
def test_agrees_with_reference(op: str, case: NormCase, dtype: torch.dtype, device: str) -> None:
    verify(op, make_norm_inputs(op, case, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("case", norm_cases("bench"), ids=lambda case: case.name)
@pytest.mark.parametrize("op", NORMS)
def test_agrees_at_real_shapes(op: str, case: NormCase, device: str) -> None:
    verify(op, make_norm_inputs(op, case, torch.bfloat16, device))


@st.composite
def calls(draw) -> tuple[str, NormCase, torch.dtype]:
    # With few numbers eager's largest error can be small by luck, and the rule would ask the same of ours.
    width = draw(st.integers(16, 700 if INTERPRET else 3000 if GPU else 1500))
    least = 1500 // width + 2
    rows = draw(
        st.one_of(
            st.tuples(st.integers(least, least + 20)),
            st.tuples(st.integers(2, 4), st.integers(least, least + 5)),
        )
    )
    case = NormCase(
        "fuzz", "anything", rows, width,
        layout=draw(st.sampled_from([layout for layout in NORM_LAYOUTS if layout != "expanded"])),
        parameters=draw(st.sampled_from(["same", "same", "fp32", "none", "weight"])),
        eps=draw(st.sampled_from([1e-6, 1e-5, 0.1])), offset=draw(st.sampled_from([0.0, 0.0, 3.0])),
    )  # fmt: skip
    return draw(st.sampled_from(NORMS)), case, draw(st.sampled_from(DTYPES))


@given(calls(), st.integers(0, 2**16))
@hypothesis_settings(max_examples=24 if GPU else 8 if INTERPRET else 60)
def test_agrees_on_anything(call: tuple[str, NormCase, torch.dtype], seed: int) -> None:
    op, case, dtype = call
    verify(op, make_norm_inputs(op, case, dtype, "cuda" if GPU else "cpu", seed))


# The interpreter runs programs one after another.
REPEATED = ["many_rows"] if INTERPRET else ["many_rows", "merger", "wide_rows", "fp32_parameters"]


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("op", NORMS)
def test_same_bits_every_time(op: str, name: str, device: str) -> None:
    inputs = of_case(name, op, torch.float16, device)
    every_op.assert_same_bits(lambda: differentiate(operator(op), inputs))


@pytest.mark.parametrize("name", ["l_tower", "merger", "wide"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_sum_is_normed_as_it_was_rounded(op: str, name: str, device: str) -> None:
    """The bits of both results are those of an addition and a norm."""
    inputs = of_case(name, f"add_{op}", torch.float16, device)
    normed, total = inputs.call(operator(f"add_{op}"))
    assert torch.equal(total, inputs.x + inputs.residual)
    parameters = [tensor for tensor in (inputs.weight, inputs.bias) if tensor is not None]
    assert torch.equal(normed, PUBLIC[op](total, *parameters))


@pytest.mark.gpu
@pytest.mark.parametrize("op", NORMS)
def test_programs_add_up_rows_of_many_columns(op: str, device: str) -> None:
    """A program keeps the sums of rows wider than registers in memory, where other threads add than before."""
    inputs = make_norm_inputs(op, NormCase("in_turn", "rows in turn", (700,), 8300), torch.bfloat16, device)
    launch, _ = norm_config("norm_bwd_wide", inputs.x)
    assert norm_programs(gpu(), launch, 700, True) < 700
    verify(op, inputs)


@pytest.mark.parametrize("op", NORMS)
def test_every_call_sees_its_own_tensors(op: str, device: str) -> None:
    """Launches are kept from the first call on; tensors off 16 bytes take none of these."""
    case = NormCase("kept", "launches kept", (17,), 768)
    for seed in range(3):
        verify(op, make_norm_inputs(op, case, torch.float16, device, seed))
    inputs = make_norm_inputs(op, case, torch.float16, device)
    for name in (*inputs.tensors, "dout"):
        aligned = getattr(inputs, name)
        shifted = misaligned(aligned)
        verify(op, dataclasses.replace(inputs, **{name: shifted}))
    verify(op, inputs)


@pytest.mark.parametrize("op", NORMS)
def test_results_are_fresh_and_contiguous(op: str, device: str) -> None:
    inputs = of_case("column_strided", op, torch.float32, device)
    storages = {tensor.untyped_storage().data_ptr() for tensor in inputs.tensors.values()}
    for result in inputs.call(PUBLIC[op]):
        assert result.is_contiguous() and result.untyped_storage().data_ptr() not in storages


@pytest.mark.parametrize("layout", NORM_LAYOUTS)
@pytest.mark.parametrize("op", NORMS)
def test_strides_change_no_bits(op: str, layout: str, device: str) -> None:
    inputs = make_norm_inputs(op, NormCase(layout, "strides", (6, 9), 136, layout=layout), torch.float32, device)
    compact = dataclasses.replace(inputs, **{name: tensor.contiguous() for name, tensor in inputs.tensors.items()})
    strided, same = (differentiate(operator(op), each) for each in (inputs, compact))
    verify(op, inputs)
    if layout not in ("misaligned", "odd_strides"):
        # Those two are read by narrower loads, and a row's sum is made in another order.
        assert all(torch.equal(strided[name], same[name]) for name in OUTPUTS if name in same)


@pytest.mark.parametrize("op", NORMS)
def test_parameters_in_any_strides(op: str, device: str) -> None:
    inputs = of_case("s_tower", op, torch.float32, device)
    expected = inputs.call(PUBLIC[op])
    strided = {name: getattr(inputs, name) for name in ("weight", "bias") if getattr(inputs, name) is not None}
    strided = {name: torch.stack([vector, vector], 1)[:, 0] for name, vector in strided.items()}
    assert all(torch.equal(a, b) for a, b in zip(inputs.call(PUBLIC[op], **strided), expected, strict=True))
    ones = inputs.x.new_ones(1).expand(inputs.x.shape[-1])
    bias = {} if inputs.bias is None else {"bias": inputs.bias}
    assert torch.equal(
        inputs.call(PUBLIC[op], weight=ones, **bias)[0], inputs.call(PUBLIC[op], weight=ones.clone(), **bias)[0]
    )


@pytest.mark.parametrize("op", NORMS)
def test_gradients_with_zero_strides(op: str, device: str) -> None:
    inputs = of_case("s_tower", op, torch.float32, device)
    every_op.assert_expanded_gradients(lambda x: inputs.call(PUBLIC[op], x=x), inputs.x)


class Backwards(TorchDispatchMode):
    """Notes the needs_ flags and the sizes of the results of backward ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[bool, ...], tuple[bool, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "norm_backward" in str(func):
            needs = (True,) + (False,) * (len(result) - 1)
            flags = tuple(arg for arg in args if isinstance(arg, bool))
            self.seen.append((flags + needs[len(flags) :], tuple(each.numel() > 0 for each in result)))
        return result


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("x", "weight"), ("bias",), ("residual",)], ids="+".join)
@pytest.mark.parametrize("op", NORMS)
def test_only_what_is_wanted_is_computed(op: str, wanted: tuple[str, ...], device: str) -> None:
    """Frozen parameters, as under LoRA, cost nothing; a gradient that is computed alone is the same.

    On a GPU but for the last bit: that is another build, in which other products are fused with additions.
    """
    inputs = of_case("s_tower", op, torch.float32, device)
    if not set(wanted) <= set(inputs.tensors):
        pytest.skip(f"{op} takes no {wanted[0]}")
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in wanted}
    with Backwards() as backwards:
        results = inputs.call(PUBLIC[op], **leaves)
        grads = torch.autograd.grad(results, tuple(leaves.values()), (inputs.dout, inputs.dsum)[: len(results)])
    ((needs, computed),) = backwards.seen
    own = ("weight", "bias") if "layer" in op else ("weight",)
    assert needs == computed == (not {"x", "residual"}.isdisjoint(wanted), *(name in wanted for name in own))
    everything = differentiate(operator(op), inputs)
    alone = {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
    if GPU:
        exact = differentiate(getattr(references, op), inputs, torch.float64)
        check(alone, everything, {name: exact[name] for name in alone})
    else:
        assert all(torch.equal(grad, everything[name]) for name, grad in alone.items())


@pytest.mark.parametrize("used", ["normed", "sum"])
@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
def test_one_result_is_used(op: str, used: str, device: str) -> None:
    inputs = of_case("narrow", op, torch.float32, device)
    place = OUTPUTS.index(used)
    found = []
    for function, dtype in (
        (operator(op), torch.float32),
        (getattr(references, op), torch.float32),
        (getattr(references, op), torch.float64),
    ):
        leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.tensors.items()}
        result = inputs.call(function, **leaves)[place]
        upstream = (inputs.dout, inputs.dsum)[place].to(dtype)
        grads = torch.autograd.grad(result, tuple(leaves.values()), upstream, materialize_grads=True)
        found.append(dict(zip(leaves, grads, strict=True)))
    check(*found)


@pytest.mark.parametrize("needs", [(True, True), (False, True), (True, False)], ids=str)
def test_backward_ops_without_a_gradient_of_the_norm(needs: tuple[bool, bool], device: str) -> None:
    x, dsum, weight = (torch.randn(*shape, device=device) for shape in ((5, 64), (5, 64), (64,)))
    with poisoned():
        dx, dweight = torch.ops.vk.add_rms_norm_backward(None, dsum, x, weight, 1e-6, *needs)
    assert torch.equal(dx, dsum) if needs[0] else dx.numel() == 0
    assert torch.equal(dweight, torch.zeros_like(weight)) if needs[1] else dweight.numel() == 0
    assert dx.data_ptr() != dsum.data_ptr()


@pytest.mark.no_interpret
@pytest.mark.parametrize("parameters", ["same", "weight", "none"])
@pytest.mark.parametrize("op", NORMS)
def test_gradcheck_in_fp64(op: str, parameters: str) -> None:
    case = NormCase("gradcheck", "fp64", (2, 3), 7, parameters=parameters, eps=0.01)
    inputs = make_norm_inputs(op, case, torch.float64)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.tensors.items()}

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return inputs.call(operator(op), **dict(zip(leaves, tensors, strict=True)))

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))


@pytest.mark.no_interpret
@pytest.mark.parametrize("op", NORMS)
def test_a_second_derivative_and_a_tangent_are_refused(op: str, device: str) -> None:
    inputs = of_case("narrow", op, torch.float32, device)
    every_op.assert_no_second_derivative(op, lambda x: inputs.call(PUBLIC[op], x=x)[0], inputs.x)
    every_op.assert_no_tangent(op, lambda x: inputs.call(PUBLIC[op], x=x), inputs.x)


@pytest.mark.parametrize("parameters", ["same", "fp32"])
@pytest.mark.parametrize("op", NORMS)
def test_autocast_changes_nothing(op: str, parameters: str, device: str) -> None:
    for dtype in (torch.float32, torch.float16 if INTERPRET else torch.bfloat16):
        inputs = of_case("s_tower", op, dtype, device, parameters=parameters)
        outside = differentiate(PUBLIC[op], inputs)
        with torch.autocast(device, dtype=torch.float16 if INTERPRET else torch.bfloat16):
            inside = differentiate(PUBLIC[op], inputs)
        for name, tensor in outside.items():
            assert inside[name].dtype == tensor.dtype and torch.equal(inside[name], tensor), name
        assert inside["normed"].dtype == dtype and inside["dweight"].dtype == inputs.weight.dtype


@pytest.mark.parametrize("name", ["s_tower", "merger", "wide"])
@pytest.mark.parametrize("op", NORMS)
def test_nan_stays_in_its_row(op: str, name: str, device: str) -> None:
    inputs = of_case(name, op, torch.float32, device)
    inputs.x[1, 5] = torch.nan
    for result in inputs.call(PUBLIC[op]):
        rows = result.isnan().any(-1)
        assert rows.nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("op", NORMS)
def test_rows_that_are_not_there_reach_no_sum(op: str, device: str) -> None:
    """With eps = 0 what pads a tile of rows has an infinite 1 / sqrt, and times 0 that is NaN."""
    inputs = of_case("narrow", op, torch.float16, device, eps=0.0, rows=(71,))
    for name, tensor in differentiate(operator(op), inputs).items():
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("width", [72, 1152, 6200, 16500])
def test_a_row_of_equal_values_has_no_deviation(width: int, device: str) -> None:
    """A mean that is off by its rounding would come out as many times as large as 1 / sqrt(eps)."""
    values = torch.tensor([1.2345, 123.456, -7.7], device=device)
    for dtype in DTYPES:
        x = values.to(dtype)[:, None].expand(-1, width).contiguous().requires_grad_()
        out = layer_norm(x, eps=1e-6)
        assert not out.any(), dtype
        dout = torch.randn(3, width, device=device).to(dtype)
        (dx,) = torch.autograd.grad(out, x, dout)
        truth = dout.double() - dout.double().mean(1, keepdim=True)
        torch.testing.assert_close(dx / 1000.0, truth.to(dtype))


def test_large_differences_are_not_lost_beside_a_large_mean(device: str) -> None:
    """E[x^2] - E[x]^2 would be 0 or less here."""
    x = 10000.0 + torch.arange(64, device=device).float().remainder(2)[None].repeat(3, 1)
    out = layer_norm(x, eps=0.0)
    assert torch.equal(out, (x - 10000.5) * 2)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_operators_take_what_the_public_functions_take(op: str, device: str) -> None:
    inputs = of_case("narrow", op, torch.float32, device, parameters="none")
    x = inputs.x.requires_grad_()
    assert torch.equal(operator(op)(x), PUBLIC[op](x))
    (alone,) = torch.autograd.grad(operator(op)(x), x, inputs.dout)
    (whole,) = torch.autograd.grad(PUBLIC[op](x), x, inputs.dout)
    assert torch.equal(alone, whole)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"x": lambda x: x[0, 0]}, r"x has shape \[\], expected \[..., C\] with C"),
    ({"x": lambda x: x[:, :0]}, r"x has shape \[4, 0\], expected \[..., C\]"),
    ({"x": lambda x: x.int()}, r"x is int32, expected float16, bfloat16 or float32"),
    ({"x": None}, r"x is None, expected a dense tensor"),
    ({"x": lambda x: x.to_sparse()}, r"x is of layout .*, expected a dense tensor"),
    ({"weight": lambda x: x[:5]}, r"weight has .*, expected shape \[C\] = \[8\]"),
    ({"weight": lambda x: x[None]}, r"weight has .*, expected shape \[C\] = \[8\]"),
    ({"weight": lambda x: x.half()}, r"weight is float16, expected float32"),
    ({"bias": lambda x: x.double()}, r"bias is float64, expected float32"),
    (
        {"x": lambda x: x.half(), "residual": lambda x: x.half(), "weight": lambda x: x.bfloat16()},
        r"weight is bfloat16, expected float16 or float32 beside x in float16",
    ),
    ({"weight": lambda x: x.to("meta")}, r"weight is on meta, expected on .* as x"),
    ({"residual": lambda x: x[:3]}, r"residual has shape \[3, 8\], expected shape \[4, 8\] as x is"),
    ({"residual": lambda x: x.half()}, r"residual is float16, expected float32 as x is"),
    ({"residual": None}, r"residual is None, expected a dense tensor"),
    ({"eps": -1e-6}, r"eps is -1e-06, expected 0 or a positive number that fp32 holds"),
    ({"eps": float("nan")}, r"eps is nan, expected 0 or a positive"),
    ({"eps": 1e39}, r"eps is 1e\+39, expected 0 or a positive number that fp32 holds"),
    ({"eps": torch.tensor(0.1)}, r"eps is a tensor, expected a number"),
]


@pytest.mark.no_interpret
@pytest.mark.parametrize(("changes", "message"), REFUSALS)
@pytest.mark.parametrize("op", NORMS)
def test_refuses(op: str, changes: dict[str, Any], message: str, device: str) -> None:
    good: dict[str, Any] = {
        "x": torch.randn(4, 8, device=device), "residual": torch.randn(4, 8, device=device),
        "weight": torch.randn(8, device=device), "bias": torch.randn(8, device=device), "eps": 1e-6,
    }  # fmt: skip
    takes = {"x", "weight", "eps"} | ({"residual"} if "add" in op else set()) | ({"bias"} if "layer" in op else set())
    own = {name: change for name, change in changes.items() if name in takes}
    if not own:
        pytest.skip(f"{op} takes no such argument")
    every_op.assert_refuses(PUBLIC[op], {name: good[name] for name in takes}, own, message)


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dnormed": torch.zeros(3, 8)}, r"dnormed has shape \[3, 8\], expected shape \[4, 8\] as sum is"),
        ({"dsum": torch.zeros(4, 8).half()}, r"dsum is float16, expected float32 as sum is"),
        ({"dnormed": None, "dsum": None}, r"dnormed or dsum is None, expected a dense tensor"),
        ({"bias": None}, r"needs_dbias is True, expected False without a bias"),
        ({"sum": None}, r"sum is None, expected a dense tensor"),
        ({"eps": -1.0}, r"eps is -1.0, expected 0 or a positive number that fp32 holds"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_backward_refuses(changes: dict[str, Any], message: str, device: str) -> None:
    rows, vector = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    good = {"dnormed": rows, "dsum": rows, "sum": rows, "weight": vector, "bias": vector, "eps": 1e-6,
            "needs_dx": True, "needs_dweight": True, "needs_dbias": True}  # fmt: skip
    every_op.assert_refuses(torch.ops.vk.add_layer_norm_backward, good, changes, message)


@pytest.mark.parametrize("op", NORMS)
def test_explain_says_what_would_run(op: str, device: str) -> None:
    inputs = of_case("l_tower", op, torch.float16, device)
    report = torch_ops.explain(PUBLIC[op], **inputs.tensors)
    assert report["op"] == f"vk::{op}"
    if not (GPU or INTERPRET):
        assert report["path"] == "reference" and not report["kernels"]
        return
    assert list(report["kernels"]) == ["norm_fwd", "norm_bwd", "norm_bwd_sums"]
    wide = of_case("wide", op, torch.float16, device)
    report = torch_ops.explain(PUBLIC[op], **wide.tensors)
    assert list(report["kernels"]) == ["norm_fwd_wide", "norm_bwd_wide", "norm_bwd_sums"]
    with pytest.raises(ValueError, match=f"{op}: eps is .*, expected"):
        torch_ops.explain(PUBLIC[op], *inputs.tensors.values(), eps=-1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("op", NORMS)
def test_no_call_waits_for_the_device(op: str, device: str) -> None:
    inputs = of_case("l_tower", op, torch.bfloat16, device)
    every_op.assert_waits_for_nothing(lambda: differentiate(PUBLIC[op], inputs))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("width", [1152, 20000])
def test_more_than_two_billion_elements(width: int, device: str) -> None:
    """The last rows lie past 2^31 elements of every tensor."""
    rows = 2**31 // width + 200
    x, dout = (torch.zeros(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    tail = slice(rows - 100, rows)
    x[tail].normal_()
    dout[tail].normal_()
    weight = torch.randn(width, device=device)
    normed, total = torch.ops.vk.add_rms_norm(x, x, weight)
    dx, dweight = torch.ops.vk.add_rms_norm_backward(dout, x, total, weight, 1e-6, True, True)
    assert (rows - 100) * width > 2**31
    # Rows of zeros add nothing to the gradient of the weight.
    last = NormInputs(x[tail], x[tail], weight, None, 1e-6, dout[tail], x[tail])
    actual = {"normed": normed[tail], "sum": total[tail], "dx": dx[tail], "dweight": dweight}
    eager, truth = (differentiate(references.add_rms_norm, last, dtype) for dtype in (None, torch.float64))
    check(actual, eager, {name: truth[name] for name in actual})


@pytest.mark.gpu
@pytest.mark.large
def test_a_row_stride_beyond_two_billion(device: str) -> None:
    stride = 2**26
    x = torch.empty(stride * 40 + 768, device=device, dtype=torch.float16).as_strided((40, 768), (stride, 1))
    x.copy_(torch.randn(40, 768))
    assert torch.equal(layer_norm(x), layer_norm(x.contiguous()))
