"""Which path a call of the attention core takes: packed and dense calls alike, forward and backward.

Ops call `plan_forward` and `plan_backward` by bare name. A plan depends on metadata alone, never on values on the
device.
"""

from typing import Any

import torch
from torch import Tensor

from torch_ops._attention.cpu import backward_cpu, forward_cpu
from torch_ops._attention.hopper import fits_hopper, plan_forward_fp32_hopper, plan_forward_hopper, why_unsupported
from torch_ops._attention.hopper_backward import fits_hopper_backward, plan_backward_hopper
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.portable import plan_backward_portable, plan_forward_portable
from torch_ops._attention.small_segments import (
    plan_backward_small_segments,
    plan_forward_small_segments,
    small_segments_config,
)
from torch_ops._attention.tensors import Backward, Forward, num_segments, query_length
from torch_ops._core.device import gpu
from torch_ops._core.launch import dense_like
from torch_ops._core.plan import Plan, either, reference_plan
from torch_ops._core.planned_op import opaque_plan
from torch_ops._core.registry import INTERPRET, Mode, current_mode, runs_kernels
from torch_ops.settings import settings

# A Hopper tile has 128 query rows; shorter segments would leave it half empty. With more than MANY_SEGMENTS, whose
# programs outnumber those that run at once, that is still faster beyond 64 rows: 1000 segments of 100 rows, 16 heads of
# 80, take 427 us on an H200 and 517 on the portable path.
HOPPER_ROWS, SMALL_ROWS, MANY_SEGMENTS = 128, 64, 256
UNALIGNED = "q, k or v does not begin at a multiple of 16 bytes, or is empty"

# The method of tensors asks for their device, which traces of fake ones need not have.
_copy = torch.ops.aten.copy_.default


def why_not_hopper(options: AttentionOptions, length: int | None, segments: int = 1, **tensors: Tensor) -> str:
    """Return why a call with these tensors takes the portable path, or nothing where it takes the Hopper path.

    `length` is the mean length of its queries in so many `segments`, None if it is a symbol.
    """
    if INTERPRET:
        return "TRITON_INTERPRET=1"
    if settings.path == "portable":
        return "settings.path is 'portable'"
    if settings.path == "auto" and length is not None:
        least = HOPPER_ROWS if segments <= MANY_SEGMENTS else SMALL_ROWS + 1
        if length < least:
            return f"segments have {length} rows on average, and under {least} the portable path is faster"
    return why_unsupported(gpu(), options, **tensors)


def _hopper_reason() -> str:
    return f"{gpu().name} is a Hopper GPU"


def plan_forward(t: Forward, options: AttentionOptions) -> Plan:
    """Plan what fills out and lse."""
    if not runs_kernels(t.q):
        if options.compute_dtype is not None:
            return _plan_forward_on_copies(t, options)
        return reference_plan(lambda t: forward_cpu(options, t), t.q)
    why, mode = why_not_hopper(options, query_length(t), num_segments(t), q=t.q, k=t.k, v=t.v), current_mode()
    many_segments = why and _may_hide_long_segments(t, options)
    if mode is Mode.PACKAGED or (why and not many_segments):
        return _plan_forward_portable(t, options).because(why)
    if mode is Mode.TRACED:
        return _plan_forward_opaque(options)
    if many_segments:
        hopper = _plan_forward_of_many(t, options)
    elif options.compute_dtype is None:
        hopper = plan_forward_hopper(t, options)
    else:
        hopper = plan_forward_fp32_hopper(t, options)
    hopper.because(_hopper_reason(), "hopper")
    return either(t, hopper, fits_hopper, lambda t: _plan_forward_portable(t, options), UNALIGNED)


def _may_hide_long_segments(t: Forward, options: AttentionOptions) -> bool:
    """Whether segments without rows may make long ones look short on average, and a Hopper kernel could take those.

    A captured graph has boundaries for as many segments as there may ever be. With fewer than MANY_SEGMENTS, one more
    kernel would cost more than it can save.
    """
    if INTERPRET or settings.path != "auto" or query_length(t) is None or num_segments(t) <= MANY_SEGMENTS:
        return False
    has_kernel = small_segments_config("attention_fwd_small_segments", t, options) is not None
    return has_kernel and not why_unsupported(gpu(), options, q=t.q, k=t.k, v=t.v)


def _plan_forward_of_many(t: Forward, options: AttentionOptions) -> Plan:
    """Plan short segments by the kernel for them, and long ones by Hopper's, whichever there are."""
    chosen = small_segments_config("attention_fwd_small_segments", t, options)
    assert chosen is not None
    return plan_forward_small_segments(t, options, *chosen, plan_forward_hopper(t, options, chosen[0].block_m))


def _plan_forward_portable(t: Forward, options: AttentionOptions) -> Plan:
    if options.compute_dtype is not None:
        return _plan_forward_on_copies(t, options)
    chosen = small_segments_config("attention_fwd_small_segments", t, options)
    if chosen is None:
        return plan_forward_portable(t, options)
    return plan_forward_small_segments(t, options, *chosen)


def _cast(t: Forward, dtype: torch.dtype) -> Forward:
    q, k, v = t.q.to(dtype), t.k.to(dtype), t.v.to(dtype)
    return t._replace(q=q, k=k, v=v, out=dense_like(q))


def _plan_forward_on_copies(t: Forward, options: AttentionOptions) -> Plan:
    """Plan fp32 inputs that are computed in a half type, by a call on copies in that type."""
    dtype, own = options.compute_dtype, options._replace(compute_dtype=None)
    assert dtype is not None
    # A trace would keep the copies that a plan looks at.
    inner = None if _is_traced() else plan_forward(_cast(t, dtype), own)

    def launch(t: Forward) -> None:
        copies = _cast(t, dtype)
        (plan_forward(copies, own) if inner is None else inner).launch(copies)
        _copy(t.out, copies.out)

    return Plan(launch) if inner is None else Plan(launch, inner.kernels, inner.path, inner.why)


def _is_traced() -> bool:
    return current_mode() in (Mode.TRACED, Mode.PACKAGED)


_plan_forward_opaque = opaque_plan(
    "_attention_fwd", Forward, AttentionOptions, writes=("out", "lse"), plan=plan_forward
)


def plan_backward(t: Backward, options: AttentionOptions) -> Plan:
    """Plan what fills dq, dk and dv.

    out and lse come from anywhere, so that a context-parallel caller can pass merged ones. Unless deterministic, dq may
    be added up in any order.
    """
    if options.compute_dtype is not None:
        return _plan_backward_on_copies(t, options)
    if not runs_kernels(t.q):
        return reference_plan(lambda t: backward_cpu(options, t), t.q)
    why = why_not_hopper(options, query_length(t), num_segments(t), q=t.q, k=t.k, v=t.v, out=t.out)
    mode = current_mode()
    if why or mode is Mode.PACKAGED:
        return _plan_backward_portable(t, options).because(why)
    if mode is Mode.TRACED:
        return _plan_backward_opaque(options)
    hopper = plan_backward_hopper(t, options).because(_hopper_reason(), "hopper")
    return either(t, hopper, fits_hopper_backward, lambda t: _plan_backward_portable(t, options), UNALIGNED)


def _plan_backward_portable(t: Backward, options: AttentionOptions) -> Plan:
    chosen = small_segments_config("attention_bwd_small_segments", t, options)
    if chosen is None:
        return plan_backward_portable(t, options)
    return plan_backward_small_segments(t, options, *chosen)


def _cast_backward(t: Backward, dtype: torch.dtype) -> Backward:
    # out is only summed up, which fp32 does.
    dout, q, k, v = t.dout.to(dtype), t.q.to(dtype), t.k.to(dtype), t.v.to(dtype)
    return t._replace(dout=dout, q=q, k=k, v=v, dq=dense_like(q), dk=dense_like(k), dv=dense_like(v))


def _plan_backward_on_copies(t: Backward, options: AttentionOptions) -> Plan:
    dtype, own = options.compute_dtype, options._replace(compute_dtype=None)
    assert dtype is not None
    inner = None if _is_traced() else plan_backward(_cast_backward(t, dtype), own)

    def launch(t: Backward) -> None:
        copies = _cast_backward(t, dtype)
        (plan_backward(copies, own) if inner is None else inner).launch(copies)
        for gradient, half in zip(t[9:12], copies[9:12], strict=True):
            _copy(gradient, half)

    return Plan(launch) if inner is None else Plan(launch, inner.kernels, inner.path, inner.why)


_plan_backward_opaque = opaque_plan(
    "_attention_bwd", Backward, AttentionOptions, writes=("dq", "dk", "dv"), plan=plan_backward
)


def forward_tensors(call: Any, made: tuple[Tensor, Tensor]) -> Forward:
    """Gather the tensors of a packed or dense call, in which scores have tensors of their own."""
    slopes, sinks = call.alibi_slopes, call.sinks
    return Forward(
        call.q, call.k, call.v, getattr(call, "cu_seqlens", None), getattr(call, "cu_seqlens_k", None), *made,
        slopes if slopes is None else slopes.contiguous(), sinks if sinks is None else sinks.contiguous(),
        call.dropout_seed,
    )  # fmt: skip


def backward_tensors(call: Any, made: tuple[Tensor, Tensor, Tensor]) -> Backward:
    boundaries = getattr(call, "cu_seqlens", None), getattr(call, "cu_seqlens_k", None)
    slopes = call.alibi_slopes
    slopes = slopes if slopes is None else slopes.contiguous()
    return Backward._make((*call[:7], *boundaries, *made, slopes, call.dropout_seed))
