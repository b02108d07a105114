"""Calls of the ops of the GEMM core on fake CUDA tensors, and what their bodies launch."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests.contract import SM90, KernelLaunch, fake_gpu, record_launches
from torch_ops import _gemm
from torch_ops._registry import OPS

GEMM = ("mlp", "mlp_backward", "qkv_rope", "qkv_rope_backward")
GEMM_KERNELS: dict[str, JITFunction] = {
    kernel.fn.__name__: kernel for name in GEMM for kernel in get_triton_kernels_for_op(f"vk::{name}")
}
# By op, what a call changes of the plain one.
GEMM_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu", "inner": 1365},
    "swiglu": {"activation": "swiglu", "inner": 3420, "num_k_heads": 2, "half_table": True},
    "bare": {"bias": False, "activation": "quick_gelu", "table_dtype": torch.bfloat16},
    "forward_alone": {"return_hidden": False},
    "fp32": {"dtype": torch.float32},
}

Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


def gemm_calls(
    rows: Any = 200, width: int = 1152, inner: int = 4304, num_heads: int = 16, num_k_heads: int | None = None,
    head_dim: int = 72, activation: str = "gelu_tanh", bias: bool = True, return_hidden: bool = True,
    half_table: bool = False, table_dtype: torch.dtype = torch.float32, dtype: torch.dtype = torch.bfloat16,
) -> Calls:  # fmt: skip
    """Arguments of the ops, on CUDA tensors of the fake mode in force."""

    def new(*shape: Any, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype)

    gated = 2 if activation == "swiglu" else 1
    k_heads = num_k_heads or num_heads
    x, w1, w2 = new(rows, width), new(gated * inner, width), new(width, inner)
    b1, b2 = (new(gated * inner), new(width)) if bias else (None, None)
    hidden = new(rows, gated * inner if return_hidden else 0)
    weight = new((num_heads + 2 * k_heads) * head_dim, width)
    tables = [new(rows, head_dim // 2 if half_table else head_dim, dtype=table_dtype) for _ in range(2)]
    q, k = (new(rows, heads, head_dim) for heads in (num_heads, k_heads))
    return {
        "mlp": ((x, w1, b1, w2, b2, activation), {"return_hidden": return_hidden}),
        "mlp_backward": ((x, x, w1, b1, w2, hidden, activation), {"needs_b1": bias, "needs_b2": bias}),
        "qkv_rope": ((x, weight, new(weight.shape[0]) if bias else None, *tables, num_heads, k_heads), {}),
        "qkv_rope_backward": ((q, k, k, x, weight, *tables), {"needs_bias": bias}),
    }


def gemm_launches(
    target: GPUTarget = SM90, gpu: str = "no-such-gpu", path: str = "portable", **variant: Any
) -> dict[str, list[KernelLaunch]]:
    """By op, what its body launches on such a GPU, beside the products that are left to PyTorch."""
    found = {}
    with fake_gpu(target, gpu, path) as mode, mode, mock.patch.object(_gemm, "linear_into"):
        for name, (args, options) in gemm_calls(**variant).items():
            with record_launches() as launches:
                OPS[name].body(*args, **options)
            found[name] = list(launches)
    return found
