"""The launcher of the attention core for batches of sequences of one length, [B, H, S, D]: which path a call takes.

Plans are as those of `_attention`, without boundaries.
"""

from collections.abc import Callable

from torch import Tensor

from torch_ops._attention_dense_portable import plan_backward_dense, plan_forward_dense
from torch_ops._scores import Scores


def plan_dense_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, has_lse: bool = True) -> Callable[..., None]:
    """launch(q, k, v, out, lse, step) fills out, in the order of memory of q (`dense_like`), and lse [B, H, Sq]."""
    return plan_forward_dense(q, k, v, scores, has_lse)


def plan_dense_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores,
    deterministic: bool = True,
) -> Callable[..., None]:  # fmt: skip
    """launch(dout, dlse, q, k, v, out, lse, dq, dk, dv, step) fills the gradients, each in the order of its input."""
    return plan_backward_dense(dout, dlse, q, k, v, out, lse, scores)
