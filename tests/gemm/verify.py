"""What the tests of `mlp` and `qkv_rope` have in common: each module applies it to its op."""

import contextlib
import gc
import itertools
import json
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from csrc_free_ops.configs.rows import ATEN, Row, as_document
from torch_ops.testing import check_draws, poisoned, redrawn
from torch_ops.testing.cases import outcome
from torch_ops.testing.tolerance import Draw

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


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
    rows = [Row(name, str(dtype).removeprefix("torch."), 0, ATEN) for name in kernels]
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
    """Of any two leaves that alone require a gradient, and of upstream gradients that do not: where the reference has a
    derivative of one's gradient by the other, a call for it is refused."""
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
            shifted = aligned.new_empty(aligned.numel() + 1)[1:].view(aligned.shape).copy_(aligned)
            self.projection.verify(replace(inputs, **{name: shifted}))
        self.projection.verify(inputs)

    def test_nan_stays_in_its_row(self, device: str) -> None:
        inputs = self._inputs(torch.float16, device)
        clean = _results(self.projection, inputs)
        inputs.x[5] = torch.nan
        for dirty, result in zip(_results(self.projection, inputs), clean, strict=True):
            assert dirty[5].isnan().all()
            assert torch.equal(dirty[6:], result[6:]) and torch.equal(dirty[:5], result[:5])

    def test_a_second_derivative_is_refused(self, device: str) -> None:
        inputs = self._inputs(torch.float32, device)
        x = inputs.x.requires_grad_()
        (dx,) = torch.autograd.grad(_results(self.projection, inputs)[0].square().sum(), x, create_graph=True)
        name = self.projection.function.__name__
        with pytest.raises(NotImplementedError, match=f"vk::{name}_backward has no derivative"):
            torch.autograd.grad(dx.sum(), x)

    def test_no_second_derivative_is_dropped(self, device: str) -> None:
        name = self.projection.function.__name__
        for options in self.projection.options:
            assert_second_derivatives_refused(
                lambda *args, options=options, **named: self.projection.function(*args, *options, **named),
                self.projection.reference, self._inputs(torch.float32, device),
                f"vk::{name}_backward has no derivative",
            )  # fmt: skip

    def test_a_tangent_is_refused(self, device: str) -> None:
        inputs = self._inputs(torch.float32, device)
        name = self.projection.function.__name__
        with pytest.raises(NotImplementedError, match=f"vk::{name} has no forward-mode derivative"):
            torch.func.jvp(
                lambda x: inputs.call(self.projection.function, x=x), (inputs.x,), (torch.ones_like(inputs.x),)
            )

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
        outcome(self.projection.function, inputs)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outcome(self.projection.function, inputs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
