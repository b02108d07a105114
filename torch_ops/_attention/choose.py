"""How the attention family chooses launches: by GPU, dtype, head dimension, flags, length and PyTorch's precision."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.configs.attention import attention_products, split_head_dim
from csrc_free_ops.configs.pick import pick
from csrc_free_ops.configs.rows import Config, TunedConfig
from torch_ops._attention.options import AttentionOptions
from torch_ops._core.checks import dtype_name
from torch_ops._core.launch import current_gpu, for_each_precision, precision_of
from torch_ops._core.plan import Plan
from torch_ops.settings import settings


def choose(
    kernel: str, q: Tensor, options: AttentionOptions, length: int | None,
    own_rows: tuple[TunedConfig, ...] | None = None, precision: str | None = None,
) -> tuple[Config, str]:  # fmt: skip
    """The launch of `kernel` for this dtype and head dimension, and where it comes from; the user's rows come first."""
    device = current_gpu()
    busy = options.alibi > 0 or options.dropout > 0
    if kernel.startswith("segment_attention"):
        busy = busy or options.softcap > 0
    elif q.dim() == 4:
        # Kernels of a batch hold strides besides.
        is_old = device.backend == "cuda" and int(device.arch) < 90
        has_tail = split_head_dim(q.shape[-1], q.dtype.itemsize)[1] > 0
        busy = busy or options.softcap > 0 or is_old or ("dkdv" in kernel and has_tail)
    own_rows = settings.rows if own_rows is None else own_rows
    return pick(
        kernel, device, dtype_name(q.dtype), q.dtype.itemsize, q.shape[-1], options.causal, length, own_rows,
        # Tall tiles leave no registers for a sink either.
        options.masked or options.has_sinks,
        busy,
        precision or current_products(q),
    )  # fmt: skip


def current_products(q: Tensor) -> str:
    """How PyTorch's setting of now has these multiplied."""
    return attention_products(current_gpu(), q.shape[-1], precision_of(q))


def planned_by_precision(plan: Callable[..., Plan]) -> Callable[..., Plan]:
    """Give plan(t, options, precision) the way that fp32 is multiplied, for either of PyTorch's settings."""

    @functools.wraps(plan)
    def planning(t: Any, options: AttentionOptions) -> Plan:
        def of_setting(setting: str) -> Plan:
            is_fp32 = t.q.dtype is torch.float32
            products = attention_products(current_gpu(), t.q.shape[-1], setting) if is_fp32 else setting
            return plan(t, options, products)

        return for_each_precision(t.q, of_setting)

    return planning


def slopes_stride(q: Tensor, options: AttentionOptions) -> int:
    """From one sequence's slopes of ALiBi to the next one's."""
    return q.shape[1] if options.alibi == 2 else 0


def constants_of(
    t: Any, options: AttentionOptions, launch: Config, stride_unit: int, score_mods: int, precision: str
) -> dict[str, Any]:
    q, k = t.q, t.k
    main, tail = split_head_dim(q.shape[-1], q.dtype.itemsize, precision)
    return {
        "STRIDE_UNIT": stride_unit, "HEAD_DIM": q.shape[-1], "MAIN": main, "TAIL": tail,
       
        "GROUP": q.shape[1] // k.shape[1],
        "HAS_LEFT": options.left >= 0, "HAS_RIGHT": options.right >= 0, "SCORE_MODS": score_mods,
        "PRECISION": precision,
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip
