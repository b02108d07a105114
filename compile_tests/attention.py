"""Launches of attention on the Hopper path, whose kernels are opaque in traces."""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from compile_tests.contract.trace import SM90, KernelLaunch, Recorder, fake_gpu
from csrc_free_ops.attention.hopper.bwd import _attention_bwd_hopper_kernel
from csrc_free_ops.attention.hopper.bwd_dq_finalize import (
    _attention_bwd_delta_dense_kernel,
    _attention_bwd_delta_kernel,
    _attention_bwd_round_acc2_kernel,
    _attention_bwd_round_kernel,
)
from csrc_free_ops.attention.hopper.bwd_small import _attention_bwd_small_hopper_kernel
from csrc_free_ops.attention.hopper.fwd import _attention_fwd_hopper_kernel
from csrc_free_ops.attention.hopper.fwd_fp32 import _attention_fwd_fp32_hopper_kernel
from csrc_free_ops.attention.portable.bwd_split import _attention_bwd_split_sum_kernel
from csrc_free_ops.configs.rows import Config
from torch_ops._attention import hopper as attention_hopper
from torch_ops._attention import hopper_backward as attention_hopper_backward
from torch_ops._attention import split as attention_split
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import Backward, Forward
from torch_ops._core.launch import dense_like

HOPPER_KERNELS: dict[str, JITFunction] = {
    kernel.fn.__name__: kernel
    for kernel in (
        _attention_fwd_hopper_kernel, _attention_fwd_fp32_hopper_kernel,
        _attention_bwd_hopper_kernel, _attention_bwd_small_hopper_kernel,
        _attention_bwd_delta_kernel, _attention_bwd_round_kernel, _attention_bwd_round_acc2_kernel,
        _attention_bwd_delta_dense_kernel, _attention_bwd_split_sum_kernel,
    )
}  # fmt: skip


def hopper_launches(
    launches: dict[str, Config], head_dim: int, segments: int = 2, dtype: torch.dtype = torch.bfloat16,
    num_heads: int = 16, num_k_heads: int = 16, left: int = -1, right: int = -1, dlse: bool = False,
    deterministic: bool = True, rows: int = 2048, batch: int = 0, sinks: bool = False, has_lse: bool = True,
    cut: str = "", skipped_rows: int | None = None, batch_inside: bool = False,
) -> dict[str, KernelLaunch]:  # fmt: skip
    """The launches of the Hopper path by kernel name, with `launches` by the names of the rows.

    With a `batch` tensors are [B, H, S, D] of `rows` rows. TMA takes those of q, k and v that `cut` names in four
    dimensions. With `batch_inside` they lie as [S, B, H, D]. fp32 ones are what the forward casts to bf16, and have no
    backward.
    """

    def tensor(name: str, heads: int) -> Tensor:
        if batch_inside:
            inside = torch.empty(rows, batch, heads, head_dim, device="meta", dtype=dtype)
            return inside.permute(1, 2, 0, 3)
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
        for module in (*launchers, attention_split):
            for name in HOPPER_KERNELS.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, Recorder(launched, HOPPER_KERNELS[name])))
        if dtype is torch.float32:
            attention_hopper.plan_forward_fp32_hopper(forward, options).launch(forward)
            return {launch.name: launch for launch in launched}
        for module, name, kernel in (
            (attention_hopper, "forward_config", "attention_fwd_hopper"),
            (attention_hopper_backward, "choose", "attention_bwd_hopper"),
        ):
            chosen = launches[kernel], "this test"
            stack.enter_context(mock.patch.object(module, name, lambda *_, chosen=chosen, **__: chosen))
        attention_hopper.plan_forward_hopper(forward, options, skipped_rows).launch(forward)
        attention_hopper_backward.plan_backward_hopper(backward, options).launch(backward)
    return {launch.name: launch for launch in launched}
