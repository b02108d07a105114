"""Checks for `mlp`, `qkv_rope` and `patch_merger`, and single layers for the tests of the Hopper kernels."""

import contextlib
import gc
import itertools
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import torch_ops
from csrc_free_ops.configs.rows import ATEN, TunedConfig, as_document
from tests.verify import INTERPRET, assert_no_second_derivative, assert_no_tangent, assert_waits_for_nothing, misaligned
from torch_ops import qkv_rope
from torch_ops._gemm.hopper import count_of_column_sums, plan_linear_hopper
from torch_ops._gemm.plan import plan_gradient, plan_linear
from torch_ops._gemm.portable import padded
from torch_ops._gemm.tensors import Gradient as GradientTensors
from torch_ops._gemm.tensors import GradientOptions, Linear, LinearOptions
from torch_ops.testing import check, check_draws, poisoned, redrawn, references
from torch_ops.testing.cases import MlpCase, QkvRopeInputs, make_mlp_inputs, outcome
from torch_ops.testing.tolerance import Draw


def check_outcome(function: Callable[..., Any], reference: Callable[..., Any], inputs: Any) -> None:
    """A function's results and gradients, by the tolerance rule, with unwritten memory poisoned."""

    def draw(seed: int) -> Draw:
        drawn = redrawn(inputs, seed)
        with poisoned():
            actual = outcome(function, drawn)
        return actual, outcome(reference, drawn), outcome(reference, drawn, torch.float64)

    check_draws(draw)


@dataclass(frozen=True)
class Projection:
    """An op, its reference, and `make`, which draws inputs of a case.

    `tensors` are those that may lie anywhere; `options` are what calls may have behind the inputs' own arguments.
    """

    function: Callable[..., Any]
    reference: Callable[..., Any]
    make: Callable[..., Any]
    case: Any
    tensors: tuple[str, ...]
    options: tuple[tuple[Any, ...], ...] = ((),)

    def verify(self, inputs: Any, **options: Any) -> None:
        """The op against the reference."""
        check_outcome(partial(self.function, **options), self.reference, inputs)


@contextlib.contextmanager
def left_to_pytorch(kernels: tuple[str, ...], dtype: torch.dtype, folder: Path) -> Iterator[None]:
    """Within, launch rows leave the products of these kernels to PyTorch."""
    rows = [TunedConfig(name, str(dtype).removeprefix("torch."), 0, ATEN) for name in kernels]
    file = folder / "rows.json"
    file.write_text(json.dumps(as_document(rows, {"gpu": "any", "triton": "any", "date": "now"})))
    with torch_ops.settings(path="auto", rows=str(file)):
        yield


def _results(projection: Projection, inputs: Any, *args: Any, **changes: Any) -> tuple[Tensor, ...]:
    results = inputs.call(projection.function, *args, **changes)
    return results if isinstance(results, tuple) else (results,)


def assert_second_derivatives_refused(
    function: Callable[..., Any], reference: Callable[..., Any], inputs: Any, refusal: str
) -> None:
    """Try every pair of leaves that alone require a gradient. Where the reference has a derivative of one's gradient by
    the other, the op must refuse it."""
    refused = 0
    for first, second in itertools.product(inputs.leaves, repeat=2):
        leaves = {name: inputs.leaves[name].detach().clone().requires_grad_() for name in (first, second)}

        def mixed(function: Callable[..., Any], leaves: dict[str, Tensor], first: str, second: str) -> Tensor:
            results = inputs.call(function, **leaves)
            results = results if isinstance(results, tuple) else (results,)
            total = sum((each * dout).sum() for each, dout in zip(results, inputs.douts.values(), strict=True))
            (gradient,) = torch.autograd.grad(total, leaves[first], create_graph=True)
            # With the total beside it there is always a derivative, if not of this gradient.
            (both,) = torch.autograd.grad(total + gradient.sin().sum(), leaves[second], retain_graph=True)
            (once,) = torch.autograd.grad(total, leaves[second])
            return both - once

        if mixed(reference, leaves, first, second).abs().max() > 1e-4:
            refused += 1
            with pytest.raises(NotImplementedError, match=refusal):
                mixed(function, leaves, first, second)
    assert refused > 1


class ProjectionTests:
    """Subclassed by each op's tests."""

    projection: Projection

    def _inputs(self, dtype: torch.dtype, device: str, seed: int = 0) -> Any:
        return self.projection.make(self.projection.case, dtype, device, seed)

    def test_every_call_sees_its_own_tensors(self, device: str) -> None:
        for seed in range(3):
            self.projection.verify(self._inputs(torch.float16, device, seed))

    def test_nothing_of_a_call_is_kept(self, device: str) -> None:
        """Plans are, and a graph's memory refuses whatever lives on in it."""
        inputs = self._inputs(torch.float16, device)
        with torch.no_grad():
            _results(self.projection, inputs)
        tensors = [weakref.ref(value) for value in vars(inputs).values() if isinstance(value, Tensor)]
        del inputs
        gc.collect()
        assert len(tensors) > 3 and not [each for each in tensors if each() is not None]

    def test_rows_in_one_place(self, device: str) -> None:
        """Which TMA cannot address."""
        inputs = self._inputs(torch.float16, device)
        one = inputs.x.new_tensor(1.0) * inputs.x[:1].clone()
        self.projection.verify(replace(inputs, x=one.expand(inputs.x.shape)))

    def test_misaligned_tensors_after_aligned_ones_of_the_same_layout(self, device: str) -> None:
        inputs = self._inputs(torch.float16, device)
        self.projection.verify(inputs)
        for name in self.projection.tensors:
            aligned = getattr(inputs, name)
            shifted = misaligned(aligned)
            self.projection.verify(replace(inputs, **{name: shifted}))
        self.projection.verify(inputs)

    def test_nan_stays_in_its_row(self, device: str) -> None:
        inputs = self._inputs(torch.float16, device)
        clean = _results(self.projection, inputs)
        inputs.x[5] = torch.nan
        for dirty, result in zip(_results(self.projection, inputs), clean, strict=True):
            assert dirty[5].isnan().all()
            assert torch.equal(dirty[6:], result[6:]) and torch.equal(dirty[:5], result[:5])

    @pytest.mark.no_interpret
    def test_a_second_derivative_is_refused(self, device: str) -> None:
        inputs = self._inputs(torch.float32, device)
        name = self.projection.function.__name__
        assert_no_second_derivative(name, lambda x: _results(self.projection, inputs, x=x)[0], inputs.x)

    @pytest.mark.no_interpret
    def test_no_second_derivative_is_dropped(self, device: str) -> None:
        name = self.projection.function.__name__
        for options in self.projection.options:
            assert_second_derivatives_refused(
                lambda *args, options=options, **named: self.projection.function(*args, *options, **named),
                self.projection.reference, self._inputs(torch.float32, device),
                f"vk::{name}_backward has no derivative",
            )  # fmt: skip

    @pytest.mark.no_interpret
    def test_a_tangent_is_refused(self, device: str) -> None:
        inputs = self._inputs(torch.float32, device)
        name = self.projection.function.__name__
        assert_no_tangent(name, lambda x: inputs.call(self.projection.function, x=x), inputs.x)

    def test_a_backward_inside_an_autocast_region_computes_as_outside(self, device: str) -> None:
        inputs = self._inputs(torch.float32, device)
        douts = tuple(inputs.douts.values())
        for options in self.projection.options:
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
            results = _results(self.projection, inputs, *options, **leaves)
            outside = torch.autograd.grad(results, tuple(leaves.values()), douts, retain_graph=True)
            with torch.autocast(device, dtype=torch.float16 if INTERPRET else torch.bfloat16):
                inside = torch.autograd.grad(results, tuple(leaves.values()), douts)
            assert all(torch.equal(one, other) for one, other in zip(inside, outside, strict=True)), options

    @pytest.mark.gpu
    def test_no_call_waits_for_the_device(self, device: str) -> None:
        inputs = self._inputs(torch.bfloat16, device)
        assert_waits_for_nothing(lambda: outcome(self.projection.function, inputs))


class Layer:
    """One linear layer with its activation, of random tensors."""

    def __init__(
        self, activation: str, inner: int, width: int, rows: int, dtype: torch.dtype = torch.bfloat16,
        bias: bool = True, keeps_pre: bool = True, apart: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        inputs = make_mlp_inputs(
            MlpCase("layer", "", (rows,), width, inner, activation, bias=bias, apart=apart), dtype, "cuda", seed
        )
        self.activation, self.keeps_pre = activation, keeps_pre
        self.x, self.weight, self.bias, self.up, self.up_bias = (
            inputs.x, inputs.w1, inputs.b1, inputs.w_up, inputs.b_up
        )  # fmt: skip
        self.inner = inner

    def tensors(self) -> Linear:
        """Unwritten memory is NaN."""
        n = self.weight.shape[0] * (2 if self.up is not None else 1)
        out = self.x.new_full((self.x.shape[0], padded(self.inner, self.x.dtype)), torch.nan)
        pre = self.x.new_full((self.x.shape[0], n), torch.nan) if self.keeps_pre else None
        return Linear(self.x, self.weight, self.bias, out, pre, self.up, self.up_bias)

    def plan(self, launch: Any = None) -> Callable[[Linear], None]:
        if launch is None:
            return plan_linear(self.tensors(), LinearOptions(self.activation)).launch
        return plan_linear_hopper((launch, ""), self.tensors(), self.activation).launch

    def run(self, plan: Callable[[Linear], None]) -> dict[str, Tensor]:
        t = self.tensors()
        plan(t)
        results = {"out": t.out[:, : self.inner]}
        return results if t.pre is None else results | {"pre": t.pre}

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        x, weight, bias, up, up_bias = (
            None if tensor is None else tensor.to(dtype)
            for tensor in (self.x, self.weight, self.bias, self.up, self.up_bias)
        )
        pre = functional.linear(x, weight, bias)
        if up is not None:
            pre = torch.cat([pre, functional.linear(x, up, up_bias)], 1)
        results = {"out": references.linear.activated(pre, self.activation)}
        return results | {"pre": pre} if self.keeps_pre else results

    def verify(self, launch: Any = None) -> dict[str, Tensor]:
        actual = self.run(self.plan(launch))
        check(actual, self.reference(self.x.dtype), self.reference(torch.float64))
        return actual


class Gradient:
    """The gradient of one layer and the activation before it, on random tensors; weight's rows are `apart` columns
    longer."""

    def __init__(
        self, activation: str, columns: int, inner: int, rows: int, dtype: torch.dtype = torch.bfloat16,
        bias: bool = True, apart: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator("cuda").manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        self.activation, self.bias, self.inner = activation, bias, inner
        self.dout, self.pre = draw(rows, columns), draw(rows, inner) * 2
        self.weight = (draw(columns, inner + apart) / columns**0.5)[:, :inner]

    def run(self, plan: Callable[..., None]) -> dict[str, Tensor]:
        """Unwritten memory is NaN."""
        dpre, h = (torch.full_like(self.pre, torch.nan) for _ in range(2))
        sums = self.pre.new_full((count_of_column_sums(len(self.pre)), self.inner), torch.nan, dtype=torch.float32)
        plan(GradientTensors(self.dout, self.weight, self.pre, dpre, h, sums))
        results = {"dpre": dpre, "h": h}
        return results | {"db": sums.sum(0).to(self.pre.dtype)} if self.bias else results

    def plan(self) -> Callable[..., None]:
        t = GradientTensors(self.dout, self.weight, self.pre, self.pre, self.pre, self.pre)
        plan = plan_gradient(t, GradientOptions(self.activation, self.bias))
        assert plan.path == "hopper"
        return plan.launch

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        pre = self.pre.to(dtype).detach().requires_grad_()
        h = references.linear.activated(pre, self.activation)
        h.backward(self.dout.to(dtype) @ self.weight.to(dtype))
        results = {"dpre": pre.grad, "h": h.detach()}
        return results | {"db": pre.grad.sum(0)} if self.bias else results

    def verify(self) -> dict[str, Tensor]:
        actual = self.run(self.plan())
        check(actual, self.reference(self.pre.dtype), self.reference(torch.float64))
        return actual


def verify_projection(inputs: QkvRopeInputs) -> None:
    found = [
        outcome(function, inputs, dtype, backward=False)
        for function, dtype in (
            (qkv_rope, None), (references.qkv_rope, None), (references.qkv_rope, torch.float64),
        )
    ]  # fmt: skip
    check(*found)
