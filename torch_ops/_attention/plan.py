"""The launcher of the attention core: from tensors and options to the kernels' arguments.

Ops that stand on the core call `plan_forward` and `plan_backward` by bare name. A plan depends on metadata alone, never
on values on the device; it returns the function that launches, which writes into tensors that the op allocated.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from torch_ops._attention.choose import choose, mean_length
from torch_ops._attention.hopper import addressable, forward_launch, has_tiles, plan_forward_hopper, refusal
from torch_ops._attention.hopper_backward import plan_backward_hopper
from torch_ops._attention.portable import plan_backward_portable, plan_forward_portable
from torch_ops._attention.scores import NO_STEP, Scores, StepTensors
from torch_ops._attention.short import plan_backward_short, plan_forward_short, short_launch
from torch_ops._core.device import gpu
from torch_ops._core.hopper import is_packaged
from torch_ops._core.registry import INTERPRET, is_eager, opaque_launch, remembered
from torch_ops.settings import settings

# Of shorter segments the Hopper kernels' tiles would be half empty.
HOPPER_ROWS = 128


def why_portable(scores: Scores, length: int | None, dtype: torch.dtype | None = None, /, **tensors: Tensor) -> str:
    """Why a call with these tensors takes the portable path, or nothing where it takes the Hopper path.

    `length` is `mean_length` of its queries, `dtype` what it computes in, where that is not the tensors' own.
    """
    if INTERPRET:
        return "TRITON_INTERPRET=1"
    if settings.path == "portable":
        return "settings.path is 'portable'"
    if settings.path == "auto" and length is not None and length < HOPPER_ROWS:
        return f"segments have {length} rows on average, and under {HOPPER_ROWS} the portable path is faster"
    return refusal(gpu(), scores, dtype, **tensors)


def plan_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, scores: Scores, has_lse: bool = True
) -> Callable[..., None]:
    """launch(q, k, v, cu_q, cu_k, out, lse, step) fills out [Tq, H, D] and, with `has_lse`, lse [H, Tq], contiguous.

    cu_k is None where the keys have the boundaries of the queries; `step` is a StepTensors, or left out.
    """
    num_segments = cu_q.shape[0] - 1
    length = mean_length(q.shape[0], num_segments)
    if why_portable(scores, length, q=q, k=k, v=v) or is_packaged():
        return _plan_forward_stock(q, k, v, cu_q, cu_k, scores, has_lse)
    if not is_eager():

        def launch_opaque(
            q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, out: Tensor, lse: Tensor,
            step: StepTensors = NO_STEP,
        ) -> None:  # fmt: skip
            bounds = scores.scale, scores.left, scores.right
            _launch_forward_opaque(q, k, v, cu_q, cu_k, step.sinks, out, lse, *bounds)

        return launch_opaque
    launch, _ = forward_launch(q, scores, num_segments)
    hopper = plan_forward_hopper(q, k, num_segments, launch, scores, has_lse)
    portable: list[Callable[..., None]] = []

    def launch_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, out: Tensor, lse: Tensor,
        step: StepTensors = NO_STEP,
    ) -> None:  # fmt: skip
        if addressable(q, k, v):
            hopper(q, k, v, cu_q, cu_q if cu_k is None else cu_k, out, lse, step.sinks)
            return
        if not portable:
            portable.append(_plan_forward_stock(q, k, v, cu_q, cu_k, scores, has_lse))
        portable[0](q, k, v, cu_q, cu_k, out, lse, step)

    return launch_forward


def _plan_forward_stock(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, scores: Scores, has_lse: bool = True
) -> Callable[..., None]:
    short = short_launch("attention_fwd_short", q, k, cu_k, scores, mean_length(q.shape[0], cu_q.shape[0] - 1))
    if short is None:
        return plan_forward_portable(q, k, v, cu_q, cu_k, scores, has_lse)
    return plan_forward_short(q, k, v, cu_q, scores, short[0], has_lse)


@opaque_launch("_attention_fwd", writes=("out", "lse"))
def _launch_forward_opaque(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, sinks: Tensor | None, out: Tensor, lse: Tensor,
    scale: float, left: int, right: int,
) -> None:  # fmt: skip
    scores = Scores(scale, left, right, has_sinks=sinks is not None)
    plan = _prepare_forward(q, k, v, cu_q, cu_k, scores, lse.shape[1] == q.shape[0], sinks)
    plan(q, k, v, cu_q, cu_k, out, lse, StepTensors(sinks=sinks))


@remembered
def _prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, scores: Scores, has_lse: bool,
    sinks: Tensor | None,
) -> Callable[..., None]:  # fmt: skip
    """For each type of sinks a plan: the kernel that it keeps is built for one."""
    return plan_forward(q, k, v, cu_q, cu_k, scores, has_lse)


def plan_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    scores: Scores,
    deterministic: bool = True,
) -> Callable[..., None]:
    """launch(dout, dlse, q, k, v, out, lse, cu_q, cu_k, dq, dk, dv, step) fills the gradients, contiguous.

    out and lse come from anywhere, so that a context-parallel caller can pass merged ones. Unless `deterministic`, dq
    may be added up in any order.
    """
    num_segments = cu_q.shape[0] - 1
    length = mean_length(q.shape[0], num_segments)
    tensors = {"q": q, "k": k, "v": v, "out": out}
    if why_portable(scores, length, **tensors) or is_packaged():
        return _plan_backward_stock(dout, dlse, q, k, v, out, lse, cu_q, cu_k, scores)
    if not is_eager():
        bounds = scores.scale, scores.left, scores.right

        def launch_opaque(
            dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
            cu_q: Tensor, cu_k: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor, step: StepTensors = NO_STEP,
        ) -> None:  # fmt: skip
            tensors = dout, dlse, q, k, v, out, lse, cu_q, cu_k, dq, dk, dv
            _launch_backward_opaque(*tensors, *bounds, deterministic)

        return launch_opaque
    launch, _ = choose("attention_bwd_hopper", q, scores, length)
    # An expanded one, of a sum's backward, is copied.
    copied = not has_tiles(dout)
    layout = torch.empty(dout.shape, dtype=dout.dtype, device="meta") if copied else dout
    hopper = plan_backward_hopper(layout, q, k, out, num_segments, launch, scores, dlse is not None, deterministic)
    portable: list[Callable[..., None]] = []

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Tensor, cu_k: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor, step: StepTensors = NO_STEP,
    ) -> None:  # fmt: skip
        dout = dout.contiguous() if copied else dout
        if addressable(q, k, v, out, dout):
            hopper(dout, dlse, q, k, v, out, lse, cu_q, cu_q if cu_k is None else cu_k, dq, dk, dv)
            return
        if not portable:
            portable.append(_plan_backward_stock(dout, dlse, q, k, v, out, lse, cu_q, cu_k, scores))
        portable[0](dout, dlse, q, k, v, out, lse, cu_q, cu_k, dq, dk, dv, step)

    return launch_backward


def _plan_backward_stock(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor, cu_k: Tensor | None, scores: Scores,
) -> Callable[..., None]:  # fmt: skip
    short = short_launch("attention_bwd_short", q, k, cu_k, scores, mean_length(q.shape[0], cu_q.shape[0] - 1))
    if short is None:
        return plan_backward_portable(dout, dlse, q, k, v, out, lse, cu_q, cu_k, scores)
    return plan_backward_short(dout, dlse, q, k, v, out, lse, cu_q, scores, short[0])


@opaque_launch("_attention_bwd", writes=("dq", "dk", "dv"))
def _launch_backward_opaque(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor, cu_k: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor, scale: float, left: int, right: int,
    deterministic: bool,
) -> None:  # fmt: skip
    scores = Scores(scale, left, right)
    plan = _prepare_backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, scores, deterministic)
    plan(dout, dlse, q, k, v, out, lse, cu_q, cu_k, dq, dk, dv)


_prepare_backward = remembered(plan_backward)
