"""PyTorch's `scaled_dot_product_attention` on `vk::attention`, with its signature and meaning. PyTorch's own function
computes whatever the op does not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Bound here, so that this function may be put in the place of PyTorch's.
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from torch_ops._attention.checks import can_drop
from torch_ops._core.checks import FLOATS, is_positive_fp32
from torch_ops._core.registry import runs_kernels
from torch_ops._core.torch_private import has_functorch_transforms, has_tangents, is_traceable_wrapper_subclass
from torch_ops._tools.explain import explained_as
from torch_ops.attention import attention
from torch_ops.compat._handover import hand_over


def _is_dense(tensor: object) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_traceable_wrapper_subclass(tensor)
    )


def _are_equal(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """One by one, which a graph of dynamic shape decides while it is made; shapes it would compare when it runs."""
    return len(sizes) == len(others) and all(size == other for size, other in zip(sizes, others, strict=True))


def _have_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Not empty, of one head dimension that kernels have, nothing to broadcast but grouped heads."""
    shape, key_shape = query.shape, key.shape
    if len(shape) < 2 or len(key_shape) != len(shape) or not _are_equal(key_shape, value.shape):
        return False
    head_dim = shape[-1]
    if head_dim != key_shape[-1] or not (8 <= head_dim <= 256 and head_dim % 8 == 0):
        return False
    if any(size == 0 for size in shape) or key_shape[-2] == 0:
        return False
    if len(shape) == 2:
        return True
    heads, key_heads = shape[-3], key_shape[-3]
    if key_heads == 0 or heads > 65535 or not _are_equal(shape[:-3], key_shape[:-3]):
        return False
    return heads == key_heads or (enable_gqa and heads % key_heads == 0)


def _have_values(dropout_p: object, is_causal: object, scale: object, enable_gqa: object) -> bool:
    return (
        isinstance(is_causal, bool)
        and isinstance(enable_gqa, bool)
        and isinstance(dropout_p, int | float)
        and can_drop(dropout_p)
        and (scale is None or (isinstance(scale, int | float) and is_positive_fp32(scale)))
    )


def _takes(query: Any, key: Any, value: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> bool:
    """Whether `attention` computes this, and has the derivatives that may be asked for."""
    if not (_is_dense(query) and _is_dense(key) and _is_dense(value) and runs_kernels(query)):
        return False
    if not (key.device == value.device == query.device) or has_tangents():
        return False
    if not torch.compiler.is_compiling() and has_functorch_transforms():
        return False
    dtypes = query.dtype, key.dtype, value.dtype
    alike = dtypes[1] == dtypes[2] == dtypes[0] or torch.is_autocast_enabled(query.device.type)
    return (
        alike
        and all(dtype in FLOATS for dtype in dtypes)
        and _have_values(dropout_p, is_causal, scale, enable_gqa)
        and _have_shapes(query, key, value, enable_gqa)
    )


def _four(tensor: Tensor) -> Tensor:
    """[B, H, S, D]: dimensions before that of heads are one."""
    if tensor.dim() == 4:
        return tensor
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor[(None,) * (4 - tensor.dim())]


@explained_as("attention")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` by `torch_ops.attention` where possible.

    Other calls go to PyTorch's function unchanged, and PyTorch's results and errors come back:

    - calls with an attn_mask, tensors on the CPU, fp64 and other types, nested, sparse and distributed tensors;
    - a head dimension that is not a multiple of 8 or above 256, or another one in value;
    - batches or heads that broadcast, empty tensors, a scale that is not positive, dropout_p = 1;
    - calls within torch.func, or in forward-mode AD.

    Args:
        query: [..., H, Sq, D] with any number of leading dimensions, also [H, Sq, D] and [Sq, D]; fp16, bf16 or fp32.
            More than four dimensions are viewed as four, and copied if strides do not allow that.
        key, value: [..., Hk, Sk, D], Hk = H unless enable_gqa.
        attn_mask: as in PyTorch.
        dropout_p: probability that a weight counts as 0. PyTorch's generator draws the seed, but the mask is that of
            `attention`, not PyTorch's for the seed. Default: 0.
        is_causal: whether query row i sees only keys up to row i: aligned top-left, unlike `attention`. Default: False.
        scale: number that multiplies q k^T. Default: 1 / sqrt(D).
        enable_gqa: whether H may be a multiple of Hk. Default: False.

    Returns:
        [..., H, Sq, D] in query's dtype and order of memory.

    Raises:
        RuntimeError, TypeError, ValueError: PyTorch's own.

    PyTorch's own kernel computes the forward where that was measured to be faster (docs/compat.md). The gradients are
    those of `attention`, deterministic and without a second derivative. `torch.nn.attention.sdpa_kernel` chooses among
    PyTorch's backends, so it affects only calls that PyTorch computes.
    """
    if attn_mask is not None or not _takes(query, key, value, dropout_p, is_causal, scale, enable_gqa):
        return torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )  # fmt: skip
    q, k, v = _four(query), _four(key), _four(value)
    rows, keys = q.shape[2], k.shape[2]
    causal, window_right, bounded = is_causal, -1, False
    if is_causal and rows < keys:
        # No query sees a key beyond the last row of queries.
        k, v = k[:, :, :rows], v[:, :, :rows]
    elif is_causal and rows > keys:
        causal, window_right, bounded = False, rows - keys, True
    out: Any = None
    if dropout_p == 0 and not bounded:
        out = hand_over(q, k, v, scale, causal, deterministic=True)
    if out is None:
        out = attention(q, k, v, scale, causal, window_right=window_right, dropout_p=dropout_p)
    assert isinstance(out, Tensor)
    return out if query.dim() == 4 else out.view(query.shape)


__all__ = ["scaled_dot_product_attention"]
