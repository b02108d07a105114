"""Calls of attention over a cache on fake CUDA tensors, and what its body launches."""

from typing import Any

import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests.contract import SM90, KernelLaunch, fake_gpu, record_launches
from torch_ops._core.registry import OPS

OP = "attention_decode"
KERNELS: dict[str, JITFunction] = {kernel.fn.__name__: kernel for kernel in get_triton_kernels_for_op(f"vk::{OP}")}
ATTEND, COMBINE = "_attention_decode_kernel", "_attention_decode_combine_kernel"

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole": {"num_splits": 1},
    "speculative": {"queries": 5, "num_k_heads": 2},
    "pages_16": {"page_size": 16},
    "pages_128": {"page_size": 128},
    "prefix": {"batch": 64, "capacity": 256, "prefixes": 2, "prefix_lengths": True},
    "everything": {
        "queries": 3, "prefixes": 1, "page_size": 64, "window_left": 50, "softcap": 5.0, "alibi": True, "sinks": True,
    },
    "invariant": {"batch_invariant": True},
    "fp32": {"dtype": torch.float32, "head_dim": 72},
    "wider_cache": {"cache_dtype": torch.float32, "num_splits": 2},
}  # fmt: skip


def decode_calls(
    batch: Any = 3, capacity: Any = 4096, head_dim: int = 128, num_heads: int = 32, num_k_heads: int = 8,
    queries: Any = 1, page_size: int = 0, prefixes: int = 0, prefix_lengths: bool = False, alibi: bool = False,
    sinks: bool = False, dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None, **options: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Arguments of the op, on CUDA tensors of the fake mode in force."""

    def drawn(*shape: Any, kind: torch.dtype = cache_dtype or dtype) -> Tensor:
        return torch.empty(*shape, device="cuda", dtype=kind)

    blocks, rows, table = batch, capacity, None
    if page_size:
        pages = capacity // page_size
        blocks, rows = batch * pages, page_size
        table = drawn(batch, pages, kind=torch.int32)
    q = drawn(batch, num_heads, queries, head_dim, kind=dtype)
    caches = [drawn(blocks, num_k_heads, rows, head_dim) for _ in range(2)]
    if alibi:
        options["alibi_slopes"] = drawn(num_heads, kind=torch.float32)
    if sinks:
        options["sinks"] = drawn(num_heads, kind=dtype)
    if prefixes:
        for name in ("prefix_k", "prefix_v"):
            options[name] = drawn(prefixes, num_k_heads, 1000, head_dim)
        options["prefix_seqlens"] = drawn(prefixes, kind=torch.int32) if prefix_lengths else None
    return (q, *caches, drawn(batch, kind=torch.int32), table), options


def decode_launches(target: GPUTarget = SM90, gpu: str = "no-such-gpu", **variant: Any) -> list[KernelLaunch]:
    """What the op's body launches on such a GPU, in order."""
    with fake_gpu(target, gpu) as mode, record_launches() as launches, mode:
        args, options = decode_calls(**variant)
        OPS[OP].body(*args, **options)
    return launches
