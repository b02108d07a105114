"""ALiBi, sinks and dropout, as the ops of the attention core take them: checks, the seed, the gradient of sinks."""

import torch
from torch import Tensor

from torch_ops._core.checks import check_dense, check_device, check_float32_or, dtype_name, refuse

# From here on fp32 has 1.
ROUNDED_TO_ONE = 1 - 2**-25


def can_drop(dropout_p: float) -> bool:
    """Whether it is a probability that leaves some weights, in fp32 too, in which kernels have it."""
    return 0 <= dropout_p < ROUNDED_TO_ONE


def check_steps(
    op: str, q: Tensor, num_sequences: int, alibi_slopes: Tensor | None, sinks: Tensor | None, dropout_p: float,
    dropout_seed: Tensor | None, compute_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    heads = q.shape[1]
    if alibi_slopes is not None:
        check_dense(op, "alibi_slopes", alibi_slopes)
        if alibi_slopes.dtype != torch.float32:
            refuse(op, "alibi_slopes", "float32", dtype_name(alibi_slopes.dtype))
        if alibi_slopes.shape != (heads,) and alibi_slopes.shape != (num_sequences, heads):
            wanted = f"of shape [H] = [{heads}] or one row for each sequence, {[num_sequences, heads]}"
            refuse(op, "alibi_slopes", wanted, list(alibi_slopes.shape))
        check_device(op, "alibi_slopes", alibi_slopes, "q", q)
    if sinks is not None:
        check_dense(op, "sinks", sinks)
        dtype, said_by = (q.dtype, "q") if compute_dtype is None else (compute_dtype, "compute_dtype")
        check_float32_or(op, "sinks", sinks, dtype, said_by)
        if sinks.shape != (heads,):
            refuse(op, "sinks", f"of shape [H] = [{heads}]", list(sinks.shape))
        check_device(op, "sinks", sinks, "q", q)
    if not can_drop(dropout_p):
        refuse(op, "dropout_p", "a probability from 0 to below 1, in fp32 too", dropout_p)
    if dropout_seed is not None:
        check_dense(op, "dropout_seed", dropout_seed)
        if dropout_seed.dtype != torch.int64 or dropout_seed.numel() != 1 or dropout_seed.dim() != 1:
            refuse(
                op,
                "dropout_seed",
                "int64 of shape [1]",
                f"{dtype_name(dropout_seed.dtype)} of {list(dropout_seed.shape)}",
            )
        check_device(op, "dropout_seed", dropout_seed, "q", q)
    elif dropout_p > 0:
        refuse(op, "dropout_seed", "an int64 tensor of shape [1] where dropout_p is not 0", "None")


def seed_of(q: Tensor, dropout_p: float, dropout_seed: Tensor | None) -> Tensor | None:
    """The seed that was given, or one by PyTorch's generator of q's device, where dropout asks for one."""
    if dropout_p == 0 or dropout_seed is not None or not isinstance(q, Tensor):
        return dropout_seed
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)


def refuse_slopes_gradient(op: str, needs_gradient: bool) -> None:
    if needs_gradient:
        refuse(op, "alibi_slopes", "a tensor that wants no gradient, since there is none for it", "one that does")


def sinks_gradient(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Of rows i, - sum_i exp(sink - lse_i) (dout_i . out_i - dlse_i).

    Dimensions of dout and out are those of lse, with heads behind rows, and columns. A sink has a weight of
    exp(sink - lse) and no value; rows outside of all segments have no sink.
    """
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    by_head = sinks.to(lse.dtype)[:, None]
    weights = torch.exp(by_head - lse).masked_fill(lse == -torch.inf, 0.0)
    over = tuple(dim for dim in range(lse.dim()) if dim != lse.dim() - 2)
    return -(weights * delta).sum(over).to(sinks.dtype)
