"""`vk::patch_merger`: the merger at the end of Qwen-VL's vision encoders, from `layer_norm` or `rms_norm` and `mlp`.

    rows = norm(x) with merge_size^2 rows in one, or the norm of such rows
    out = gelu(rows fc1^T + b1) fc2^T + b2, or rows fc1^T + b1 alone

It is made of ops and has no kernels of its own. Rows in merge-block order become one row of a product without a copy. A
norm and `mlp` in sequence therefore launch, and keep for the backward, what a single op would.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torch_ops._core.checks import (
    FLOATS,
    check_device,
    check_eps,
    check_float,
    check_like,
    check_matrix,
    check_vector,
    dtype_name,
    refuse,
)
from torch_ops._core.planned_op import composed_call
from torch_ops.layer_norm import layer_norm
from torch_ops.mlp import mlp
from torch_ops.rms_norm import rms_norm

OP = "patch_merger"


class PatchMerger(NamedTuple):
    """The arguments of `vk::patch_merger`."""

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor | None
    fc2_bias: Tensor | None
    merge_size: int = 2
    norm_after: bool = False
    eps: float = 1e-6
    rms: bool = False


def _check_norm(call: PatchMerger, width: int) -> None:
    x = call.x
    if call.norm_bias is not None and (call.norm_weight is None or call.rms):
        refuse(OP, "norm_bias", "None without norm_weight, and with rms", "a tensor")
    for name, vector in (("norm_weight", call.norm_weight), ("norm_bias", call.norm_bias)):
        if vector is None:
            continue
        check_vector(OP, name, vector, width)
        check_device(OP, name, vector, "x", x)
        if vector.dtype not in (x.dtype, torch.float32):
            own = f"{dtype_name(x.dtype)} as x is"
            refuse(OP, name, own if x.dtype is torch.float32 else f"{own}, or float32", dtype_name(vector.dtype))


def _check_layer(x: Tensor, names: tuple[str, str], weight: Tensor, bias: Tensor | None, columns: int) -> None:
    check_matrix(OP, names[0], weight, "[out, in]", (None, columns))
    if bias is not None:
        check_vector(OP, names[1], bias, weight.shape[0])
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    for name, tensor in zip(names, (weight, bias), strict=True):
        if tensor is None:
            continue
        if autocast and x.dtype in FLOATS and tensor.dtype in FLOATS:
            # Which brings these to one dtype, and others not.
            check_device(OP, name, tensor, "x", x)
        else:
            check_like(OP, name, tensor, "x", x)


def _check(call: PatchMerger) -> int:
    """The columns of a merged row."""
    x, fc1_weight, fc2_weight = call.x, call.fc1_weight, call.fc2_weight
    check_matrix(OP, "x", x, "[T, C]", (None, None))
    check_float(OP, "x", x)
    if call.merge_size < 1:
        refuse(OP, "merge_size", "1 or more", call.merge_size)
    patches, (total, columns) = call.merge_size**2, x.shape
    if columns == 0:
        refuse(OP, "the number of columns of x", "1 or more", 0)
    if total % patches != 0:
        refuse(OP, "the number of rows of x", f"a multiple of merge_size^2 = {patches}", total)
    check_eps(OP, call.eps)
    width = patches * columns
    _check_norm(call, width if call.norm_after else columns)
    _check_layer(x, ("fc1_weight", "fc1_bias"), fc1_weight, call.fc1_bias, width)
    if fc2_weight is not None:
        _check_layer(x, ("fc2_weight", "fc2_bias"), fc2_weight, call.fc2_bias, fc1_weight.shape[0])
        for name, weight in (("fc1_weight", fc1_weight), ("fc2_weight", fc2_weight)):
            if weight.shape[0] == 0:
                refuse(OP, f"the number of rows of {name}", "1 or more", 0)
    elif call.fc2_bias is not None:
        refuse(OP, "fc2_bias", "None where fc2_weight is", "a tensor")
    return width


@composed_call(OP, PatchMerger, Tensor)
def patch_merger_op(call: PatchMerger) -> Tensor:
    width = _check(call)
    merged = call.x.shape[0] // call.merge_size**2, width
    rows = call.x.reshape(merged) if call.norm_after else call.x
    if call.norm_weight is not None:
        weight, bias, eps = call.norm_weight, call.norm_bias, call.eps
        rows = rms_norm(rows, weight, eps) if call.rms else layer_norm(rows, weight, bias, eps)
    rows = rows.reshape(merged)
    if call.fc2_weight is None:
        return functional.linear(rows, call.fc1_weight, call.fc1_bias)
    return mlp(rows, call.fc1_weight, call.fc1_bias, call.fc2_weight, call.fc2_bias, "gelu")


def patch_merger(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor | None,
    fc2_bias: Tensor | None,
    merge_size: int = 2,
    norm_after: bool = False,
    eps: float = 1e-6,
    rms: bool = False,
) -> Tensor:
    """Compute fc2(gelu(fc1(norm of each patch, merge_size^2 patches in one row))).

    Args:
        x: [T, C], fp16, bf16 or fp32, on the CPU also fp64, any strides: patches in merge-block order, as in Qwen-VL.
            Each merge_size^2 in sequence become one row. `spatial_merge` serves other orders.
        norm_weight: [C], with `norm_after` [merge_size^2 C]; x's dtype or fp32. None: no norm.
        norm_bias: as norm_weight, or None.
        fc1_weight: [H, merge_size^2 C], x's dtype, any strides, and so for all that follow.
        fc1_bias: [H], or None.
        fc2_weight: [N, H]. None: one projection and no activation.
        fc2_bias: [N], or None.
        merge_size: number of patches to a side, 1 or more. Default: 2.
        norm_after: whether the norm is of the merged rows, as in Qwen3-VL's deepstack mergers. Default: False.
        eps: eps of the norm. Default: 1e-6.
        rms: whether the norm is RMSNorm, as in Qwen2.5-VL. Default: False, LayerNorm.

    Returns:
        [T / merge_size^2, N], with one projection [T / merge_size^2, H]; contiguous, in x's dtype.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        RuntimeError: from PyTorch, for an argument of another type.

    GELU is by erf. Rounding, determinism and what the backward keeps are as in `layer_norm`, `rms_norm` and `mlp`. One
    projection is PyTorch's own product. Only the layers follow autocast. Transformers: Qwen3VLVisionPatchMerger,
    Qwen2_5_VLPatchMerger, PatchMerger of Qwen2-VL.
    """
    out: Tensor = patch_merger_op(
        x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, merge_size, norm_after, eps, rms
    )
    return out


__all__ = ["patch_merger"]
