"""Gradients in parts, where programs for tiles of rows alone would be too few, and the launcher that adds them up."""

from collections.abc import Callable

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from csrc_free_ops.attention.portable.bwd_split import _attention_bwd_parts_kernel
from torch_ops._core.launch import Relaunch, can_overlap, current_gpu, dense_like, dense_strides
from torch_ops._core.registry import wrap_triton

# Of a program.
ROWS = 16
# Of one gradient, at the most.
MOST_SPLITS = 8


def splits_of(q: Tensor, programs: int, blocks: int) -> int:
    """Into how many the blocks that each of so many programs passes over are split: of fp32, whose blocks take longest,
    as many as make four programs for each multiprocessor."""
    if q.dtype is not torch.float32 or any(isinstance(size, torch.SymInt) for size in (programs, blocks)):
        return 1
    wanted = 4 * current_gpu().multiprocessors // max(programs, 1)
    return max(1, min(wanted, blocks // 2, MOST_SPLITS))


def parts_of(result: Tensor, parts: int) -> Tensor:
    """Where each of several parts goes, one after the other as so many heads; the only one is the result itself."""
    batch, heads, length, head_dim = result.shape
    return result if parts == 1 else result.new_empty((batch, heads * parts, length, head_dim))


def plan_parts(q: Tensor, k: Tensor, v: Tensor, dq_parts: int, dkdv_parts: int) -> Callable[..., None]:
    """launch(dq_parts, dk_parts, dv_parts, dq, dk, dv); of what has one part any tensor may stand for it."""
    batch, heads, length, head_dim = q.shape
    k_heads, k_length = k.shape[1:3]
    unit, outer, rows = dense_strides(dense_like(q), dense_like(k), dense_like(v))
    scalars = (*outer, batch, heads, k_heads, length, k_length)
    overlaps = can_overlap()
    constants = {
        **dict(zip(("STRIDE_DQT", "STRIDE_DKT", "STRIDE_DVT"), rows, strict=True)),
        "UNIT": unit, "HEAD_DIM": head_dim, "DQ_PARTS": dq_parts, "DKDV_PARTS": dkdv_parts, "OVERLAPS": overlaps,
        "BLOCK_M": ROWS, "BLOCK_N": next_power_of_2(head_dim), "num_warps": 4, "num_stages": 1,
        **({"launch_pdl": True} if overlaps else {}),
    }  # fmt: skip
    sizes = [(heads, length)] * (dq_parts > 1) + [(k_heads, k_length)] * (2 * (dkdv_parts > 1))
    grid = (batch * max(size[0] for size in sizes), cdiv(max(size[1] for size in sizes), ROWS), len(sizes))
    relaunch = Relaunch(grid, scalars)

    def add_parts(*tensors: Tensor) -> None:
        if not relaunch(None, tensors):
            compiled = wrap_triton(_attention_bwd_parts_kernel)[grid](*tensors, *scalars, **constants)
            relaunch.keep(None, tensors, constants, compiled)

    return add_parts
