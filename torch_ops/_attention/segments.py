"""Which path a call of segment attention takes. Ops call `plan_segment_forward` and its backward by bare name."""

from functools import partial
from typing import Any

from torch import Tensor

from torch_ops._attention.cpu import segment_backward_cpu, segment_forward_cpu
from torch_ops._attention.options import AttentionOptions
from torch_ops._attention.tensors import SegmentBackward, SegmentForward
from torch_ops._core.plan import Plan, reference_plan


def plan_segment_forward(t: SegmentForward, options: AttentionOptions) -> Plan:
    """Plan what fills out and lse."""
    return reference_plan(partial(segment_forward_cpu, options), t.q)


def plan_segment_backward(t: SegmentBackward, options: AttentionOptions) -> Plan:
    """Plan what fills dq, dk and dv."""
    return reference_plan(partial(segment_backward_cpu, options), t.q)


def segment_forward_tensors(call: Any, made: tuple[Tensor, Tensor]) -> SegmentForward:
    slopes, sinks = call.alibi_slopes, call.sinks
    return SegmentForward._make((
        *call[:8], *made,
        slopes if slopes is None else slopes.contiguous(), sinks if sinks is None else sinks.contiguous(),
        call.dropout_seed,
    ))  # fmt: skip


def segment_backward_tensors(call: Any, made: tuple[Tensor, Tensor, Tensor]) -> SegmentBackward:
    slopes = call.alibi_slopes
    slopes = slopes if slopes is None else slopes.contiguous()
    return SegmentBackward._make((*call[:12], *made, slopes, call.dropout_seed))
