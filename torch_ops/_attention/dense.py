"""The launcher of the attention core for batches of sequences of one length, [B, H, S, D]: which path a call takes.

Plans are as those of `plan`, without boundaries.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torch_ops._attention.choose import choose
from torch_ops._attention.cpu import dense_backward_cpu, dense_forward_cpu
from torch_ops._attention.dense_hopper import plan_dense_backward_hopper, plan_dense_forward_hopper
from torch_ops._attention.dense_portable import plan_dense_backward_portable, plan_dense_forward_portable
from torch_ops._attention.hopper import addressable, forward_launch, has_tiles
from torch_ops._attention.plan import why_portable
from torch_ops._attention.scores import NO_STEP, Scores, StepTensors
from torch_ops._core.hopper import is_packaged
from torch_ops._core.launch import dense_like, length_of
from torch_ops._core.registry import is_eager, opaque_launch, remembered, runs_kernels


def why_dense_portable(scores: Scores, dtype: torch.dtype | None = None, /, **tensors: Tensor) -> str:
    """Why a call with these tensors takes the portable path, or nothing where it takes the Hopper path.

    `dtype` is what it computes in, where that is not the tensors' own.
    """
    return why_portable(scores, length_of(tensors["q"]), dtype, **tensors)


def plan_dense_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, has_lse: bool = True) -> Callable[..., None]:
    """launch(q, k, v, out, lse, step) fills out, in the order of memory of q (`dense_like`), and lse [B, H, Sq]."""
    if not runs_kernels(q):
        return partial(dense_forward_cpu, scores)
    if why_dense_portable(scores, q=q, k=k, v=v) or is_packaged():
        return plan_dense_forward_portable(q, k, v, scores, has_lse)
    if not is_eager():

        def launch_opaque(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, step: StepTensors = NO_STEP
        ) -> None:
            _launch_dense_forward_opaque(q, k, v, step.sinks, out, lse, scores.scale, scores.left, scores.right)

        return launch_opaque
    launch, _ = forward_launch(q, scores, 1)
    hopper = plan_dense_forward_hopper(q, k, v, dense_like(q), launch, scores, has_lse)
    portable: list[Callable[..., None]] = []

    def launch_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, step: StepTensors = NO_STEP) -> None:
        if addressable(q, k, v):
            hopper(q, k, v, out, lse, step.sinks)
            return
        if not portable:
            portable.append(plan_dense_forward_portable(q, k, v, scores, has_lse))
        portable[0](q, k, v, out, lse, step)

    return launch_forward


@opaque_launch("_attention_dense_fwd", writes=("out", "lse"))
def _launch_dense_forward_opaque(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, scale: float, left: int, right: int
) -> None:
    scores = Scores(scale, left, right, has_sinks=sinks is not None)
    plan = prepare_dense_forward(q, k, v, scores, lse.shape[2] == q.shape[2], sinks)
    plan(q, k, v, out, lse, StepTensors(sinks=sinks))


@remembered
def prepare_dense_forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, has_lse: bool, sinks: Tensor | None
) -> Callable[..., None]:
    """For each type of sinks a plan: the kernel that it keeps is built for one."""
    return plan_dense_forward(q, k, v, scores, has_lse)


def plan_dense_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Callable[..., None]:  # fmt: skip
    """launch(dout, dlse, q, k, v, out, lse, dq, dk, dv, step) fills the gradients, each in the order of its input."""
    if not runs_kernels(q):
        return partial(dense_backward_cpu, scores)
    if why_dense_portable(scores, q=q, k=k, v=v, out=out) or is_packaged():
        return plan_dense_backward_portable(dout, dlse, q, k, v, out, lse, scores)
    if not is_eager():
        bounds = scores.scale, scores.left, scores.right

        def launch_opaque(
            dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
            dq: Tensor, dk: Tensor, dv: Tensor, step: StepTensors = NO_STEP,
        ) -> None:  # fmt: skip
            tensors = dout, dlse, q, k, v, out, lse, dq, dk, dv
            _launch_dense_backward_opaque(*tensors, *bounds)

        return launch_opaque
    launch, _ = choose("attention_bwd_hopper", q, scores, length_of(q))
    # An expanded one, of a sum's backward, is copied.
    copied = not has_tiles(dout)
    layout = torch.empty(dout.shape, dtype=dout.dtype, device="meta") if copied else dout
    hopper = plan_dense_backward_hopper(layout, q, k, v, out, launch, scores, dlse is not None)
    portable: list[Callable[..., None]] = []

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, step: StepTensors = NO_STEP,
    ) -> None:  # fmt: skip
        dout = dout.contiguous() if copied else dout
        if addressable(q, k, v, out, dout):
            hopper(dout, dlse, q, k, v, out, lse, dq, dk, dv)
            return
        if not portable:
            portable.append(plan_dense_backward_portable(dout, dlse, q, k, v, out, lse, scores))
        portable[0](dout, dlse, q, k, v, out, lse, dq, dk, dv, step)

    return launch_backward


@opaque_launch("_attention_dense_bwd", writes=("dq", "dk", "dv"))
def _launch_dense_backward_opaque(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, scale: float, left: int, right: int,
) -> None:  # fmt: skip
    plan = prepare_dense_backward(dout, dlse, q, k, v, out, lse, Scores(scale, left, right))
    plan(dout, dlse, q, k, v, out, lse, dq, dk, dv)


prepare_dense_backward = remembered(plan_dense_backward)
