"""Calls of the attention ops on fake CUDA tensors, and what their bodies launch."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests.contract import SM90, KernelLaunch, Recorder, fake_gpu, record_launches
from csrc_free_ops.attention.hopper.bwd import _attention_bwd_hopper_kernel
from csrc_free_ops.attention.hopper.bwd_dq_finalize import (
    _attention_bwd_delta_dense_kernel,
    _attention_bwd_delta_kernel,
    _attention_bwd_round_acc2_kernel,
    _attention_bwd_round_kernel,
)
from csrc_free_ops.attention.hopper.bwd_small import _attention_bwd_small_hopper_kernel
from csrc_free_ops.attention.hopper.fwd import _attention_fwd_hopper_kernel
from csrc_free_ops.attention.hopper.fwd_fp32 import _attention_fwd_cast_hopper_kernel
from csrc_free_ops.attention.portable.bwd_split import _attention_bwd_parts_kernel
from csrc_free_ops.configs.rows import Launch
from torch_ops._attention import hopper as attention_hopper
from torch_ops._attention import hopper_backward as attention_hopper_backward
from torch_ops._attention import parts as attention_parts
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import Backward, Forward
from torch_ops._core.launch import dense_like
from torch_ops._core.registry import OPS
from torch_ops.testing import check, references
from torch_ops.testing.cases import WindowAttnInputs

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window_and_softcap": {"window_left": 9, "window_right": 3, "softcap": 5.0},
    "gqa": {"num_k_heads": 1},
    "other_keys": {"keys": 70},
    "dlse": {"dlse": True},
    "head_major": {"head_major": True},
    "fp32_d128": {"dtype": torch.float32, "head_dim": 128},
    "short": {"rows": 100},
    "short_with_everything": {"rows": 100, "window_left": 9, "window_right": 3, "softcap": 5.0, "dlse": True},
}
ATTENTION = ("window_attn", "window_attn_backward")
KERNELS: dict[str, JITFunction] = {
    kernel.fn.__name__: kernel
    for name in ATTENTION
    for kernel in get_triton_kernels_for_op(f"vk::{name}")
    # Dense calls share the plans of packed ones.
    if not any(word in kernel.fn.__name__ for word in ("dense", "few", "parts", "delta"))
}


def attention_calls(
    rows: Any = 200, segments: Any = 2, head_dim: int = 72, num_heads: int = 2, num_k_heads: int | None = None,
    keys: int | None = None, dlse: bool = False, head_major: bool = False, dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:  # fmt: skip
    """Arguments of both attention ops, on CUDA tensors of the fake mode in force."""

    def packed(rows: Any, heads: int) -> Tensor:
        if head_major:
            return torch.empty(heads, rows, head_dim, device="cuda", dtype=dtype).transpose(0, 1)
        return torch.empty(rows, heads, head_dim, device="cuda", dtype=dtype)

    def boundaries() -> Tensor:
        return torch.empty(segments + 1, device="cuda", dtype=torch.int32)

    q, out, dout = (packed(rows, num_heads) for _ in range(3))
    k, v = (packed(rows if keys is None else keys, num_k_heads or num_heads) for _ in range(2))
    lse = torch.empty(num_heads, rows, device="cuda")
    cu = boundaries(), None if keys is None else boundaries()
    return {
        "window_attn": ((q, k, v, *cu), options),
        "window_attn_backward": ((dout, torch.empty_like(lse) if dlse else None, q, k, v, out, lse, *cu), options),
    }


def is_short(name: str) -> bool:
    """Whether this variant, or this kernel, is one of short segments."""
    return "short" in name or "rest" in name


def attention_launches(target: GPUTarget = SM90, gpu: str = "no-such-gpu", **variant: Any) -> dict[str, KernelLaunch]:
    """By kernel name, what the bodies of both ops launch on such a GPU; up to 64 rows a segment count as short."""
    with fake_gpu(target, gpu) as mode, record_launches() as launches, mode:
        for name, (args, options) in attention_calls(**variant).items():
            OPS[name].body(*args, **options)
    return {launch.name: launch for launch in launches}


HOPPER_KERNELS: dict[str, JITFunction] = {
    kernel.fn.__name__: kernel
    for kernel in (
        _attention_fwd_hopper_kernel, _attention_fwd_cast_hopper_kernel,
        _attention_bwd_hopper_kernel, _attention_bwd_small_hopper_kernel,
        _attention_bwd_delta_kernel, _attention_bwd_round_kernel, _attention_bwd_round_acc2_kernel,
        _attention_bwd_delta_dense_kernel, _attention_bwd_parts_kernel,
    )
}  # fmt: skip


def hopper_launches(
    launches: dict[str, Launch], head_dim: int, segments: int = 2, dtype: torch.dtype = torch.bfloat16,
    num_heads: int = 16, num_k_heads: int = 16, left: int = -1, right: int = -1, dlse: bool = False,
    deterministic: bool = True, rows: int = 2048, batch: int = 0, sinks: bool = False, has_lse: bool = True,
    cut: str = "",
) -> dict[str, KernelLaunch]:  # fmt: skip
    """By kernel name, what the launchers of the Hopper path launch, with `launches` by the names of the rows.

    With a `batch` tensors are [B, H, S, D] of `rows` rows; those that `cut` names, of q, k and v, TMA takes in four
    dimensions. fp32 ones are what the forward casts to bf16, and have no backward.
    """

    def tensor(name: str, heads: int) -> Tensor:
        if name in cut:
            longer = torch.empty(batch, rows + 1, heads, head_dim, device="meta", dtype=dtype)
            return longer[:, :rows].transpose(1, 2)
        shape = (batch, heads, rows, head_dim) if batch else (rows, heads, head_dim)
        return torch.empty(shape, device="meta", dtype=dtype)

    q, k, v = tensor("q", num_heads), tensor("k", num_k_heads), tensor("v", num_k_heads)
    out = dense_like(q) if batch else q
    lse = torch.empty(q.shape[:3] if batch else (num_heads, rows), device="meta")
    cu = torch.empty(segments + 1, device="meta", dtype=torch.int32)
    sink = torch.empty(num_heads, device="meta") if sinks else None
    options = AttentionOptions(
        0.1, left, right, has_sinks=sinks, has_lse=has_lse, deterministic=deterministic,
        compute_dtype=torch.bfloat16 if dtype is torch.float32 else None,
    )  # fmt: skip
    boundaries = (None, None) if batch else (cu, cu)
    forward = Forward(q, k, v, *boundaries, out, lse, sinks=sink)
    gradients = (dense_like(tensor) if batch else tensor for tensor in (q, k, v))
    backward = Backward(q, lse if dlse else None, q, k, v, out, lse, *boundaries, *gradients)
    launched: list[KernelLaunch] = []
    counters = SimpleNamespace(acquire=lambda size=1: cu)
    with ExitStack() as stack:
        stack.enter_context(fake_gpu(SM90))
        launchers = attention_hopper, attention_hopper_backward
        for module in launchers:
            stack.enter_context(mock.patch.object(module, "programs", lambda index: 132))
            stack.enter_context(mock.patch.object(module, "work_counters", lambda device: counters))
        for module in (*launchers, attention_parts):
            for name in HOPPER_KERNELS.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, Recorder(launched, HOPPER_KERNELS[name])))
        if dtype is torch.float32:
            attention_hopper.plan_forward_fp32_hopper(forward, options).launch(forward)
            return {launch.name: launch for launch in launched}
        for module, name, kernel in (
            (attention_hopper, "forward_launch", "attention_fwd_hopper"),
            (attention_hopper_backward, "choose", "attention_bwd_hopper"),
        ):
            chosen = launches[kernel], "this test"
            stack.enter_context(mock.patch.object(module, name, lambda *_, chosen=chosen, **__: chosen))
        attention_hopper.plan_forward_hopper(forward, options).launch(forward)
        attention_hopper_backward.plan_backward_hopper(backward, options).launch(backward)
    return {launch.name: launch for launch in launched}


def results(function: Callable[..., Any], inputs: WindowAttnInputs, marked: bool = False) -> dict[str, Tensor]:
    """Outputs and gradients of function(q, k, v, *places, **options) -> (out, lse).

    With `marked`, rows and boundaries are marked as dynamic for Dynamo.
    """
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")}
    if marked:
        for tensor in (*leaves.values(), *inputs.places):
            if tensor is not None:
                torch._dynamo.mark_dynamic(tensor, 0)
    out, lse = inputs.call(function, **leaves)
    # Rows that see no key have lse -inf; their dlse is ignored.
    torch.autograd.backward((out, lse), (inputs.dout, inputs.dlse))
    return {"out": out, "lse": lse, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


def assert_right(actual: dict[str, Tensor], inputs: WindowAttnInputs) -> None:
    """The tolerance rule, with eager PyTorch at the same dtype as the yardstick."""
    double = {
        name: value.double()
        for name, value in vars(inputs).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    reference = getattr(references, inputs.op)
    check(actual, results(reference, inputs), results(reference, replace(inputs, **double)))


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, f"{', '.join(different)} differ from the eager call's"
