"""How the attention family chooses launches: by GPU, dtype, head dimension, flags, length and PyTorch's precision."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csrc_free_ops.configs.attention import attention_products, split_head_dim
from csrc_free_ops.configs.pick import pick
from csrc_free_ops.configs.rows import Launch, Row
from torch_ops._attention.scores import Scores
from torch_ops._core.checks import dtype_name
from torch_ops._core.launch import current_gpu, precision_of
from torch_ops.settings import settings


def mean_length(total: int, num_segments: int) -> int | None:
    """Rows per segment where both are plain numbers; None in graphs of dynamic shape, which may not branch on it."""
    if isinstance(total, torch.SymInt) or isinstance(num_segments, torch.SymInt):
        return None
    return total // max(num_segments, 1)


def choose(
    kernel: str, q: Tensor, scores: Scores, length: int | None, own_rows: tuple[Row, ...] | None = None,
    precision: str | None = None,
) -> tuple[Launch, str]:  # fmt: skip
    """The launch of `kernel` for this dtype and head dimension, and where it comes from; the user's rows come first."""
    device = current_gpu()
    busy = scores.alibi > 0 or scores.dropout > 0
    if q.dim() == 4:
        # Kernels of a batch hold strides besides.
        is_old = device.backend == "cuda" and int(device.arch) < 90
        has_tail = split_head_dim(q.shape[-1], q.dtype.itemsize)[1] > 0
        busy = busy or scores.softcap > 0 or is_old or ("dkdv" in kernel and has_tail)
    own_rows = settings.rows if own_rows is None else own_rows
    return pick(
        kernel, device, dtype_name(q.dtype), q.dtype.itemsize, q.shape[-1], scores.causal, length, own_rows,
        # Of a sink, too, tall tiles leave no registers.
        scores.masked or scores.has_sinks,
        busy,
        precision or current_products(q),
    )  # fmt: skip


def current_products(q: Tensor) -> str:
    """How PyTorch's setting of now has these multiplied."""
    return attention_products(current_gpu(), q.shape[-1], precision_of(q))


def for_each_precision(plan: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    """Of fp32 a plan for either of PyTorch's settings, since launches differ; which one counts is read at each call."""

    @functools.wraps(plan)
    def planning(*args: Any) -> Callable[..., None]:
        if args[0].dtype is not torch.float32:
            return plan(*args, precision="ieee")
        head_dim = args[0].shape[-1]
        plans = {
            setting: plan(*args, precision=attention_products(current_gpu(), head_dim, setting))
            for setting in ("ieee", "tf32")
        }

        def launch(*tensors: Any) -> None:
            plans[precision_of(tensors[0])](*tensors)

        return launch

    return planning


def slopes_stride(q: Tensor, scores: Scores) -> int:
    """From one sequence's slopes of ALiBi to the next one's."""
    return q.shape[1] if scores.alibi == 2 else 0


def constants_of(
    q: Tensor, k: Tensor, scores: Scores, launch: Launch, unit: int, steps: int, precision: str
) -> dict[str, Any]:
    main, tail = split_head_dim(q.shape[-1], q.dtype.itemsize, precision)
    return {
        "UNIT": unit, "HEAD_DIM": q.shape[-1], "MAIN": main, "TAIL": tail, "GROUP": q.shape[1] // k.shape[1],
        "HAS_LEFT": scores.left >= 0, "HAS_RIGHT": scores.right >= 0, "STEPS": steps,
        "PRECISION": precision,
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip
