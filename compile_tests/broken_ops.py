"""Ops that are wrong on purpose: what the contract's helpers must catch."""

# ruff: noqa: N803  (kernels write constants in capitals)

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton


@triton.jit
def silent_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Writes nothing that torch could see."""
    tl.load(x_ptr + tl.arange(0, BLOCK))


@triton.jit
def overwriting_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Writes its input too, in an op that says it mutates nothing."""
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))
    tl.store(x_ptr + offsets, 0.0)


@triton.jit
def copying_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, SCALE: tl.constexpr = 1):
    """Has an argument that a launch may leave out."""
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * SCALE)


@triton_op("vk_broken::silent", mutates_args=())
def silent(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    wrap_triton(silent_kernel)[(1,)](x, out, BLOCK=16)
    return out


@triton_op("vk_broken::overwriting", mutates_args=())
def overwriting(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    wrap_triton(overwriting_kernel)[(1,)](x, out, BLOCK=16)
    return out
