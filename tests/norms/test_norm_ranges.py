"""Norms of rows whose magnitude or mean is large or small: squares in fp32 may not overflow, underflow or cancel."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from tests.verify import GPU, INTERPRET
from torch_ops import layer_norm, rms_norm
from torch_ops.testing import check, references
from torch_ops.testing.cases import NormCase, NormInputs, make_norm_inputs

NORMS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
# Several rows to a warp, several parts, a gradient of columns in blocks, all columns in blocks.
POINTS = [
    (op, width)
    for op in NORMS
    for width in (72, 331, 6200, 16500)
    if width < 1000 or not INTERPRET or (op == "layer_norm" and width > 16384)
]
MEANS = [("layer_norm", 16385), ("add_layer_norm", 331)]
if not INTERPRET:
    MEANS += [("layer_norm", 6200), ("add_layer_norm", 16385), ("add_layer_norm", 20000)]
# The interpreter's kernels compute in fp16 and fp32; no square of fp16 leaves fp32.
DTYPES = (torch.float32,) if INTERPRET else (torch.float32, torch.bfloat16)

pytestmark = pytest.mark.interpret


def differentiate(function: Any, inputs: NormInputs) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.tensors.items()}
    results = inputs.call(function, **leaves)
    grads = (inputs.dout, torch.zeros_like(inputs.dsum))[: len(results)]
    gradients = torch.autograd.grad(results, tuple(leaves.values()), [grad.to(results[0].dtype) for grad in grads])
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"normed": results[0].detach(), **named}


def scaled(inputs: NormInputs, factor: float | Tensor) -> NormInputs:
    """x and the residual times a factor."""
    parts = {name: getattr(inputs, name) * factor for name in ("x", "residual") if name in inputs.tensors}
    return dataclasses.replace(inputs, **parts)


def assert_magnitude_changes_no_bits(op: str, case: NormCase, dtype: torch.dtype, exponents: list[int]) -> None:
    """A power of two in x goes through every step, up to the gradient of x, which is divided by it."""
    inputs = make_norm_inputs(op, case, dtype, "cuda" if GPU else "cpu")
    function = getattr(torch.ops.vk, op)
    factor = torch.tensor(exponents, device=inputs.x.device).double().exp2()[:, None].to(dtype)
    expected = differentiate(function, inputs)
    for name, actual in differentiate(function, scaled(inputs, factor)).items():
        if name in ("dx", "dresidual"):
            actual = actual * factor
        assert torch.equal(actual, expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "width"), POINTS)
def test_magnitude_changes_no_bits(op: str, width: int, dtype: torch.dtype) -> None:
    """Rows of about 1e20 and 1e-30 and one of 1; a row is normed as if it were alone in its tile."""
    # The interpreter takes a second to add up the gradients of so many parameters.
    parameters = "none" if INTERPRET and width > 1000 else "same"
    case = NormCase("magnitude", "squares out of range", (3,), width, parameters=parameters, eps=0.0, offset=2.0)
    assert_magnitude_changes_no_bits(op, case, dtype, [66, 0, -100])


@given(
    st.sampled_from(NORMS), st.integers(2, 200), st.lists(st.integers(-110, 110), min_size=1, max_size=6),
    st.sampled_from([0.0, 3.0, -50.0]), st.sampled_from(["same", "none"]),
)  # fmt: skip
@hypothesis_settings(max_examples=6 if INTERPRET else 30)
def test_any_magnitude_changes_no_bits(
    op: str, width: int, exponents: list[int], offset: float, parameters: str
) -> None:
    rows = (len(exponents),)
    case = NormCase("fuzz", "any magnitude", rows, width, parameters=parameters, eps=0.0, offset=offset)
    assert_magnitude_changes_no_bits(op, case, torch.float32, exponents)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_have_their_norm(dtype: torch.dtype, device: str) -> None:
    """PyTorch gives 0."""
    x = torch.full((2, 64), 1e20, device=device, dtype=dtype)
    assert torch.equal(rms_norm(x), torch.ones_like(x))
    signs = torch.tensor([1.0, -1.0], device=device, dtype=dtype).repeat(32)
    assert torch.equal(layer_norm(x * signs), torch.ones_like(x) * signs)


@pytest.mark.parametrize("eps", [1e-24, 1e-6])
@pytest.mark.parametrize("op", NORMS)
def test_small_values_are_scaled_no_further_than_their_eps(op: str, eps: float, device: str) -> None:
    inputs = scaled(make_norm_inputs(op, NormCase("small", "eps", (7,), 96, eps=eps), torch.float32, device), 1e-30)
    reference = getattr(references, op)
    actual = differentiate(getattr(torch.ops.vk, op), inputs)
    check(actual, differentiate(reference, inputs), differentiate(reference, inputs.exact))


def centered_twice(x: Tensor, eps: float) -> Tensor:
    """layer_norm in eager PyTorch, without the rounding of the mean."""
    for _ in range(2):
        x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def add_centered_twice(x: Tensor, residual: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return centered_twice(x + residual, eps), x + residual


@pytest.mark.parametrize(("op", "width"), MEANS)
def test_small_differences_beside_a_large_mean(op: str, width: int, device: str) -> None:
    case = NormCase("mean", "a mean of 100", (5,), width, parameters="none", eps=0.0)
    inputs = make_norm_inputs(op, case, torch.float32, device)
    inputs = scaled(inputs, 1e-3)
    inputs = dataclasses.replace(inputs, x=inputs.x + 100.0)
    eager = add_centered_twice if inputs.residual is not None else centered_twice
    if inputs.residual is not None:
        # The sum of the add_ forms is rounded to fp32 before its norm.
        inputs = dataclasses.replace(inputs, x=inputs.x + inputs.residual, residual=torch.zeros_like(inputs.x))
    truth = differentiate(getattr(references, op), inputs.exact)
    check(differentiate(getattr(torch.ops.vk, op), inputs), differentiate(eager, inputs), truth)
