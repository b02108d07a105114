"""Calls of the ops with a rotary embedding on fake CUDA tensors, and what their bodies launch."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests import attention
from compile_tests.attention import attention_calls
from compile_tests.contract import SM90, KernelLaunch, fake_gpu, record_launches
from csrc_free_ops.rope import _rope_kernel
from torch_ops._core.registry import OPS

ROPE = ("rope_window_attn", "rope_window_attn_backward")
KERNELS: dict[str, JITFunction] = {"_rope_kernel": _rope_kernel}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: variant for name, variant in attention.VARIANTS.items() if name != "other_keys"},
    "own_boundaries": {"keys": 200},
    "half_tables": {"half": True},
    "own_tables": {"table_dtype": torch.bfloat16, "rows": 100},
}


def rope_calls(
    half: bool = False, table_dtype: torch.dtype = torch.float32, **variant: Any
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of both ops, on CUDA tensors of the fake mode in force; `half` for tables [T, D / 2]."""
    calls = attention_calls(**variant)
    ((q, k, v, *places), options), (given, _) = calls.values()
    tables = [
        torch.empty(q.shape[0], q.shape[2] // (2 if half else 1), device="cuda", dtype=table_dtype) for _ in range(2)
    ]
    return {
        "rope_window_attn": ((q, k, v, *tables, *places), options),
        "rope_window_attn_backward": ((*given[:7], *tables, *places), options),
    }


def rope_launches(
    op: str, target: GPUTarget = SM90, gpu: str = "no-such-gpu", path: str = "portable", **variant: Any
) -> list[KernelLaunch]:
    """What the body of one of the ops launches on such a GPU, in order."""
    with fake_gpu(target, gpu, path) as mode, record_launches() as launches, mode:
        args, options = rope_calls(**variant)[op]
        OPS[op].body(*args, **options)
    return launches
