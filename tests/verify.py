"""Shared by the tests of all ops: where they run, and checks that every op passes."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter computes in numpy, which has no bf16.
HALVES = [torch.float16] if INTERPRET else [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32]


def misaligned(tensor: Tensor) -> Tensor:
    """A contiguous copy whose address is no multiple of 16 bytes."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def assert_same_bits(call: Callable[[], Any]) -> None:
    """Two calls give the same bits in all of their results."""
    first, second = (pytree.tree_leaves(call()) for _ in range(2))
    assert first and all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def assert_expanded_gradients(function: Callable[..., Any], *tensors: Tensor) -> None:
    """The gradients of a sum, whose upstream gradients have strides of 0, are those of ones."""
    some, others = ([x.detach().clone().requires_grad_() for x in tensors] for _ in range(2))
    sum(result.sum() for result in pytree.tree_leaves(function(*some))).backward()
    results = pytree.tree_leaves(function(*others))
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(some, others, strict=True))


def assert_waits_for_nothing(call: Callable[[], Any]) -> None:
    """A second call never waits for the GPU."""
    call()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def assert_no_second_derivative(op: str, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    leaf = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
    refusal = f"vk::{op}_backward has no derivative: there are no second derivatives"
    with pytest.raises(NotImplementedError, match=refusal):
        torch.autograd.grad(gradient.sum(), leaf)


def assert_no_tangent(op: str, function: Callable[[Tensor], Any], x: Tensor) -> None:
    with pytest.raises(NotImplementedError, match=f"vk::{op} has no forward-mode derivative"):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))


def flops_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """The FLOPs that PyTorch's counter finds in a call, and the call's result."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


def assert_refuses(function: Callable[..., Any], good: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    """The arguments `good` are taken; with `changes`, each a value or a function of the good one, they are refused."""
    function(**good)
    device = next(value.device for value in good.values() if isinstance(value, Tensor))
    given = {name: change(good.get(name)) if callable(change) else change for name, change in changes.items()}
    for name, value in given.items():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            given[name] = value.to(device)
    name = getattr(function, "__name__", str(function)).removeprefix("vk.")
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        function(**{**good, **given})
