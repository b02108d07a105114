"""Calls of dense attention on fake CUDA tensors, and what its bodies launch."""

from typing import Any

import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests.contract import SM90, KernelLaunch, fake_gpu, record_launches
from torch_ops._core.registry import OPS

# What torch must take each kernel to write.
WRITES = {
    "attention": {"_attention_fwd_dense_kernel": {"out_ptr", "lse_ptr"}},
    "attention_backward": {
        "_attention_bwd_dq_dense_kernel": {"delta_ptr", "dq_ptr"},
        "_attention_bwd_dkdv_dense_kernel": {"dk_ptr", "dv_ptr"},
    },
}
# Instead of the backward's, of fp32 where programs for tiles of rows are few.
FEW = {
    "_attention_bwd_few_delta_kernel": {"delta_ptr"},
    "_attention_bwd_few_kernel": {"dq_ptr", "dk_ptr", "dv_ptr"},
    "_attention_bwd_parts_kernel": {"dq_ptr", "dk_ptr", "dv_ptr"},
}
KERNELS: dict[str, JITFunction] = {
    kernel.fn.__name__: kernel for op in WRITES for kernel in get_triton_kernels_for_op(f"vk::{op}")
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal_gqa": {"causal": True, "num_k_heads": 1},
    "window_and_softcap": {"window_left": 9, "window_right": 3, "softcap": 5.0},
    "other_keys_dlse": {"keys": 70, "dlse": True},
    "rows_first": {"rows_first": True},
    "fp32_d128": {"dtype": torch.float32, "head_dim": 128},
    "downcast": {"dtype": torch.float32, "compute_dtype": torch.bfloat16, "head_dim": 128},
    "steps": {"alibi": 1, "sinks": True, "dropout_p": 0.1, "softcap": 3.0, "causal": True},
}


def writes_of(op: str, variant: str) -> dict[str, set[str]]:
    """As WRITES, of a variant's sizes."""
    return FEW if (op, variant) == ("attention_backward", "fp32_d128") else WRITES[op]


def dense_calls(
    batch: Any = 3, rows: Any = 200, head_dim: int = 72, num_heads: int = 2, num_k_heads: int | None = None,
    keys: Any = None, dlse: bool = False, rows_first: bool = False, dtype: torch.dtype = torch.bfloat16,
    alibi: int = 0, sinks: bool = False, dropout_p: float = 0.0, **options: Any,
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:  # fmt: skip
    """Arguments of both ops, on CUDA tensors of the fake mode in force."""

    def tensor(heads: int, rows: Any) -> Tensor:
        if rows_first:
            return torch.empty(batch, rows, heads, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
        return torch.empty(batch, heads, rows, head_dim, device="cuda", dtype=dtype)

    q, out, dout = (tensor(num_heads, rows) for _ in range(3))
    k, v = (tensor(num_k_heads or num_heads, rows if keys is None else keys) for _ in range(2))
    lse = torch.empty(batch, num_heads, rows, device="cuda")
    if alibi:
        options["alibi_slopes"] = torch.empty((batch, num_heads)[-alibi:], device="cuda")
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_seed": torch.empty(1, dtype=torch.int64, device="cuda")}
    backward = (dout, torch.empty_like(lse) if dlse else None, q, k, v, out, lse), dict(options)
    if sinks:
        options["sinks"] = torch.empty(num_heads, device="cuda")
    return {"attention": ((q, k, v), options), "attention_backward": backward}


def dense_launches(target: GPUTarget = SM90, gpu: str = "no-such-gpu", **variant: Any) -> dict[str, KernelLaunch]:
    """By kernel name, what the bodies of both ops launch on such a GPU."""
    with fake_gpu(target, gpu) as mode, record_launches() as launches, mode:
        for name, (args, options) in dense_calls(**variant).items():
            OPS[name].body(*args, **options)
    return {launch.name: launch for launch in launches}
