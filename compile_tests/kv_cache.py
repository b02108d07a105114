"""Calls of `kv_cache_append` on fake CUDA tensors, and what its body launches."""

from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests.contract import SM90, KernelLaunch, fake_gpu, record_launches
from csrc_free_ops.kv_cache_append import _kv_cache_append_kernel
from torch_ops._core.registry import OPS

KV_CACHE = ("kv_cache_append",)
KERNELS: dict[str, JITFunction] = {"_kv_cache_append_kernel": _kv_cache_append_kernel}
VARIANTS: dict[str, dict[str, Any]] = {
    "decode": {},
    "paged": {"page_size": 64},
    "prompt": {"batch": 2, "tokens": 40},
    "plain": {"columns": 0, "num_heads": 0},
    "without_q": {"num_heads": 0},
    "full_tables": {"columns": 128},
    "partial": {"head_dim": 80, "columns": 16},
    "interleaved": {"interleaved": True, "page_size": 16},
    "d72": {"head_dim": 72, "columns": 36, "page_size": 24},
    "wide": {"head_dim": 256, "columns": 128},
    "fp32": {"dtype": torch.float32},
    "half_cache": {"dtype": torch.float32, "cache_dtype": torch.bfloat16},
    "ragged": {"tokens": 5, "ragged": True},
    "flash_cache": {"flash": True},
}


def kv_cache_call(
    batch: Any = 4, tokens: Any = 1, capacity: Any = 1000, max_positions: Any = 4096, pages: Any = 99,
    max_pages: Any = 16, page_size: int = 0, num_heads: int = 32, num_k_heads: int = 8, head_dim: int = 128,
    columns: int = 64, interleaved: bool = False, dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None, ragged: bool = False, flash: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Its arguments, on CUDA tensors of the fake mode in force; new ones lie as projections leave them."""

    def empty(*shape: Any, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, device="cuda", dtype=dtype)

    def cache() -> Tensor:
        outer, rows = (pages, page_size) if page_size else (batch, capacity)
        if flash:
            return empty(outer, rows, num_k_heads, head_dim, dtype=cache_dtype or dtype).transpose(1, 2)
        return empty(outer, num_k_heads, rows, head_dim, dtype=cache_dtype or dtype)

    def new(heads: int) -> Tensor:
        return empty(batch, tokens, heads, head_dim).transpose(1, 2)

    def count() -> Tensor:
        return empty(batch, dtype=torch.int32)

    return (
        new(num_k_heads), new(num_k_heads), cache(), cache(), count(),
        empty(batch, max_pages, dtype=torch.int32) if page_size else None, new(num_heads) if num_heads else None,
        *(empty(max_positions, columns, dtype=torch.float32) if columns else None for _ in range(2)), interleaved,
        count() if ragged else None,
    )  # fmt: skip


def kv_cache_launch(target: GPUTarget = SM90, gpu: str = "no-such-gpu", **variant: Any) -> KernelLaunch:
    """What the body launches on such a GPU."""
    with fake_gpu(target, gpu) as mode, record_launches() as launches, mode:
        OPS["kv_cache_append"].body(*kv_cache_call(**variant))
    (launch,) = launches
    return launch
