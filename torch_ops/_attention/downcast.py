"""The launcher of dense attention of fp32 inputs in a half type.

On the Hopper path one kernel casts them as it goes, and out is not rounded. All else works on copies in that type, by
the plans of `dense`, and so does the backward.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torch_ops._attention.dense import prepare_dense_backward, prepare_dense_forward, why_dense_portable
from torch_ops._attention.dense_calls import dense_gradients
from torch_ops._attention.dense_hopper import cast_launch, plan_dense_forward_cast
from torch_ops._attention.hopper import addressable
from torch_ops._attention.scores import NO_STEP, Scores, StepTensors
from torch_ops._core.hopper import is_packaged
from torch_ops._core.launch import dense_like
from torch_ops._core.registry import is_eager, opaque_launch, remembered, runs_kernels

# The method of tensors asks for their device, which traces of fake ones need not have.
_copy = torch.ops.aten.copy_.default


def casts_as_it_goes(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> bool:
    """Whether the Hopper path takes these fp32 tensors as they are, where it can address them."""
    return runs_kernels(q) and not why_dense_portable(scores, dtype, q=q, k=k, v=v)


def plan_dense_forward_in(
    dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, scores: Scores, has_lse: bool = True
) -> Callable[..., None]:
    """What `plan_dense_forward` gives, for fp32 inputs that are computed in `dtype`."""
    if not casts_as_it_goes(dtype, q, k, v, scores) or is_packaged():
        return partial(_launch_on_copies, dtype, scores, has_lse)
    if not is_eager():

        def launch_opaque(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, step: StepTensors = NO_STEP
        ) -> None:
            _launch_dense_cast_opaque(q, k, v, step.sinks, out, lse, dtype, scores.scale, scores.left, scores.right)

        return launch_opaque
    launch = cast_launch(q.shape[3])
    hopper = plan_dense_forward_cast(q, k, v, dense_like(q), dtype, launch, scores, has_lse)

    def launch_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, step: StepTensors = NO_STEP) -> None:
        if addressable(q, k, v):
            hopper(q, k, v, out, lse, step.sinks)
        else:
            _launch_on_copies(dtype, scores, has_lse, q, k, v, out, lse, step)

    return launch_forward


@remembered
def _prepare_forward_in(
    dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, scores: Scores, has_lse: bool, sinks: Tensor | None
) -> Callable[..., None]:
    """For each type of sinks a plan: the kernel that it keeps is built for one."""
    return plan_dense_forward_in(dtype, q, k, v, scores, has_lse)


@opaque_launch("_attention_dense_cast_fwd", writes=("out", "lse"))
def _launch_dense_cast_opaque(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, dtype: torch.dtype, scale: float,
    left: int, right: int,
) -> None:  # fmt: skip
    scores = Scores(scale, left, right, has_sinks=sinks is not None)
    plan = _prepare_forward_in(dtype, q, k, v, scores, lse.shape[2] == q.shape[2], sinks)
    plan(q, k, v, out, lse, StepTensors(sinks=sinks))


def _launch_on_copies(
    dtype: torch.dtype, scores: Scores, has_lse: bool,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, step: StepTensors = NO_STEP,
) -> None:  # fmt: skip
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    plan = prepare_dense_forward(q, k, v, scores, has_lse, step.sinks)
    rounded = dense_like(q)
    plan(q, k, v, rounded, lse, step)
    _copy(out, rounded)


def plan_dense_backward_in(dtype: torch.dtype, scores: Scores) -> Callable[..., None]:
    """What `plan_dense_backward` gives, for fp32 inputs that are computed in `dtype`."""

    def launch_backward(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, step: StepTensors = NO_STEP,
    ) -> None:  # fmt: skip
        # Of out nothing is multiplied in the half type.
        dout, q, k, v = dout.to(dtype), q.to(dtype), k.to(dtype), v.to(dtype)
        plan = prepare_dense_backward(dout, dlse, q, k, v, out, lse, scores)
        rounded = dense_gradients(q, k, v)
        plan(dout, dlse, q, k, v, out, lse, *rounded, step)
        for gradient, half in zip((dq, dk, dv), rounded, strict=True):
            _copy(gradient, half)

    return launch_backward
