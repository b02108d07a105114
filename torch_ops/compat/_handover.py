"""Calls of dense attention that PyTorch's own kernels compute, where `_handover_rule` chooses one.

The forward may go over alone, because its out and lse feed `vk::attention_backward`. Forward and backward go over
together where the caller allows any order of sums, or if the kernel's backward was proved to repeat its bits.
"""

from typing import Any

import torch
from torch import Tensor

from torch_ops._attention.checks import HALF_TYPES, is_differentiated
from torch_ops._core.checks import is_positive_fp32
from torch_ops._core.launch import dense_like
from torch_ops._core.plan import Plan, has_tma_addresses
from torch_ops._core.planned_op import Planned
from torch_ops._core.registry import Mode, composed_op, current_mode, is_eager, record
from torch_ops._core.torch_private import (
    has_functorch_transforms,
    has_tangents,
    is_exporting,
    is_traceable_wrapper_subclass,
)
from torch_ops.attention import Attention, AttentionBackward, attention, attention_backward_op, attention_op
from torch_ops.compat._handover_rule import KERNELS, AttentionCall, Choice, chosen, switches
from torch_ops.settings import settings


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


class _ForwardByPyTorch(torch.autograd.Function):
    """PyTorch's forward and our backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, deterministic: bool, kernel: str
    ) -> Tensor:
        out, lse = KERNELS[kernel].call(q, k, v, causal, scale, True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {"scale": scale, "causal": causal, "deterministic": deterministic}
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients = attention_backward_op(*AttentionBackward(grads[0], None, *ctx.saved_tensors, **ctx.options))
        return *gradients, None, None, None, None


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as `vk::attention` does within autocast."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype, castable = torch.get_autocast_dtype(kind), (*HALF_TYPES, torch.float32)
    q, k, v = (tensor.to(dtype) if tensor.dtype in castable else tensor for tensor in (q, k, v))
    return q, k, v


def _compute(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, deterministic: bool) -> Tensor | None:
    mode = current_mode()
    if not settings.hand_over or settings.path != "auto" or mode is Mode.PACKAGED:
        return None
    q, k, v = _autocast(q, k, v)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    differentiated = is_differentiated(q, k, v)
    choice = chosen(AttentionCall(q, k, v, causal, deterministic, differentiated, switches()))
    if choice.kernel is not None and is_eager() and not has_tma_addresses(q, k, v):
        choice = Choice(None, False, "q, k or v does not begin at a multiple of 16 bytes")
    if mode is Mode.EXPLAINED:
        return _explain(choice, Attention(q, k, v, scale, causal, deterministic=deterministic))
    if choice.kernel is None:
        return None
    if differentiated and not choice.trains:
        out: Tensor = _ForwardByPyTorch.apply(q, k, v, scale, causal, deterministic, choice.kernel)
        return out
    return KERNELS[choice.kernel].call(q, k, v, causal, scale, differentiated)[0]


def _explain(choice: Choice, call: Attention) -> Tensor | None:
    """Record a call that goes over, or why it does not."""
    if choice.kernel is None:
        record(Planned(None, (), (), Plan(_launches_nothing, path="", extra={"hand_over": f"none: {choice.why}"})))
        return None
    backward = f"PyTorch's {choice.kernel} kernel" if choice.trains else "vk::attention_backward"
    extra = {"hand_over": f"{choice.kernel}, its gradients by {backward}"}
    out = dense_like(call.q)
    results = out, out.new_empty(out.shape[:3], dtype=torch.float32)
    plan = Plan(_launches_nothing, path="aten", why=choice.why, extra=extra)
    record(Planned(None if choice.trains else attention_op, tuple(call), results, plan))
    return out


def _launches_nothing(call: Any) -> None:
    """Stand in for a launch in plans that only `explain` reads."""


@composed_op("_attention_or_aten", private=True)
def _attention_or_aten(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, deterministic: bool
) -> Tensor:
    made = _compute(q, k, v, scale, causal, deterministic)
    if made is None:
        ours = attention(q, k, v, scale, causal, deterministic=deterministic)
        assert isinstance(ours, Tensor)
        return ours
    return made


def hand_over(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, deterministic: bool) -> Tensor | None:
    """Return attention by PyTorch's own kernel, or None if `attention` is to compute it.

    Args:
        q, k, v, scale, causal: those of `attention`. After None the caller calls it, and it refuses bad arguments.
        deterministic: whether gradients must have the same bits for the same inputs.

    Under torch.compile the choice is made when AOTAutograd traces: Dynamo sees one op, and no guard is added. Exported
    programs keep `vk::attention`, because they may run on another GPU.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and is_on_gpu(q)):
        return None
    if q.dtype not in HALF_TYPES and not torch.is_autocast_enabled(q.device.type):
        return None
    if not (isinstance(causal, bool) and isinstance(deterministic, bool)):
        return None
    if not (scale is None or (isinstance(scale, int | float) and is_positive_fp32(scale))):
        return None
    if has_tangents() or any([is_traceable_wrapper_subclass(tensor) for tensor in (q, k, v)]):
        return None
    if torch.compiler.is_compiling():
        if is_exporting():
            return None
        made: Tensor = _attention_or_aten(q, k, v, scale, causal, deterministic)
        return made
    return None if has_functorch_transforms() else _compute(q, k, v, scale, causal, deterministic)


__all__ = ["hand_over"]
