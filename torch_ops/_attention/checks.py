"""What the ops of the attention core check, allocate and count alike, by the call's own names of arguments.

A call with `cu_seqlens` is packed, [T, H, D]; one without is dense, [B, H, S, D].
"""

import operator
from typing import Any

import torch
from torch import Tensor

from torch_ops._attention.options import AttentionOptions
from torch_ops._core.checks import (
    check_cu_seqlens,
    check_cu_seqlens_values,
    check_dense,
    check_device,
    check_float,
    check_float32_or,
    check_head_dim,
    check_like,
    check_num_heads,
    check_packed,
    check_scale,
    check_softcap,
    check_window,
    dtype_name,
    refuse,
)
from torch_ops._core.launch import contiguous_like, dense_like
from torch_ops._core.registry import KernelOp
from torch_ops._core.torch_private import without_autocast

HALF_TYPES = torch.float16, torch.bfloat16
# From here on fp32 has 1.
ROUNDED_TO_ONE = 1 - 2**-25


def can_drop(dropout_p: float) -> bool:
    """Whether it is a probability that leaves some weights, in fp32 too, in which kernels have it."""
    return 0 <= dropout_p < ROUNDED_TO_ONE


def is_packed(call: Any) -> bool:
    return hasattr(call, "cu_seqlens") or hasattr(call, "cu_seqlens_q")


def check_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Heads, the second dimension of each, and head dimensions, the last."""
    check_num_heads(op, "q", q.shape[1])
    check_head_dim(op, "q", q.shape[-1])
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[-1] != q.shape[-1]:
            refuse(op, f"the head dimension of {name}", f"{q.shape[-1]} as that of q is", tensor.shape[-1])
    if v.shape[:2] != k.shape[:2]:
        refuse(op, "v", f"of shape {list(k.shape)} as k is", list(v.shape))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        refuse(op, "the number of heads of k", f"a divisor of the {q.shape[1]} heads of q", k.shape[1])


def check_attention(op: str, call: Any) -> None:
    """Refuse arguments that window_attn, rope_window_attn or attention cannot take, or the forward's of a backward."""
    if is_packed(call):
        _check_packed_tensors(op, call)
        sequences = call.cu_seqlens.shape[0] - 1
    else:
        _check_dense_tensors(op, call)
        sequences = call.q.shape[0]
    check_options(op, call)
    if hasattr(call, "alibi_slopes"):
        check_score_tensors(op, call, sequences)


def check_options(op: str, call: Any) -> None:
    check_scale(op, call.scale)
    check_window(op, "window_left", call.window_left)
    check_window(op, "window_right", call.window_right)
    check_softcap(op, call.softcap)


def check_packed_rows(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    check_packed(op, "q", q)
    check_float(op, "q", q)
    for name, tensor in (("k", k), ("v", v)):
        check_packed(op, name, tensor)
        check_like(op, name, tensor, "q", q)
    check_heads(op, q, k, v)


def _check_packed_tensors(op: str, call: Any) -> None:
    q, k, v = call.q, call.k, call.v
    check_packed_rows(op, q, k, v)
    cu_q, cu_k = call.cu_seqlens, call.cu_seqlens_k
    check_cu_seqlens(op, "cu_seqlens", cu_q, "q", q)
    if cu_k is None:
        if k.shape[0] != q.shape[0]:
            refuse(op, "k", f"of {q.shape[0]} rows as q is, unless cu_seqlens_k is given", k.shape[0])
    else:
        check_cu_seqlens(op, "cu_seqlens_k", cu_k, "q", q)
        if cu_k.shape != cu_q.shape:
            refuse(op, "cu_seqlens_k", f"of shape {list(cu_q.shape)} as cu_seqlens is", list(cu_k.shape))


def _check_dense_tensors(op: str, call: Any) -> None:
    q, k, v = call.q, call.k, call.v
    if call.compute_dtype is not None:
        _check_downcast(op, q, k, v, call.compute_dtype)
    _check_batch(op, "q", q)
    check_float(op, "q", q)
    for name, tensor in (("k", k), ("v", v)):
        _check_batch(op, name, tensor)
        check_like(op, name, tensor, "q", q)
        if tensor.shape[0] != q.shape[0]:
            refuse(op, f"the batch of {name}", f"{q.shape[0]} as that of q is", tensor.shape[0])
    check_heads(op, q, k, v)
    if v.shape[2] != k.shape[2]:
        refuse(op, "v", f"of {k.shape[2]} rows as k is", v.shape[2])


def _check_batch(op: str, argument: str, tensor: Tensor) -> None:
    check_dense(op, argument, tensor)
    if tensor.dim() != 4:
        refuse(op, argument, "of shape [B, H, S, D]", list(tensor.shape))


def _check_downcast(op: str, q: Tensor, k: Tensor, v: Tensor, compute_dtype: torch.dtype) -> None:
    if compute_dtype not in HALF_TYPES:
        refuse(op, "compute_dtype", "torch.float16, torch.bfloat16 or None", compute_dtype)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_batch(op, name, tensor)
        if tensor.dtype != torch.float32:
            refuse(op, name, "float32 where compute_dtype is given", dtype_name(tensor.dtype))


def check_score_tensors(op: str, call: Any, num_sequences: int) -> None:
    """ALiBi, sinks and dropout, of those that the op has."""
    q, slopes, sinks = call.q, call.alibi_slopes, getattr(call, "sinks", None)
    dropout_p, dropout_seed = getattr(call, "dropout_p", 0.0), getattr(call, "dropout_seed", None)
    compute_dtype, heads = getattr(call, "compute_dtype", None), q.shape[1]
    if slopes is not None:
        check_dense(op, "alibi_slopes", slopes)
        if slopes.dtype != torch.float32:
            refuse(op, "alibi_slopes", "float32", dtype_name(slopes.dtype))
        if slopes.shape != (heads,) and slopes.shape != (num_sequences, heads):
            wanted = f"of shape [H] = [{heads}] or one row for each sequence, {[num_sequences, heads]}"
            refuse(op, "alibi_slopes", wanted, list(slopes.shape))
        check_device(op, "alibi_slopes", slopes, "q", q)
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


def check_attention_backward(op: str, call: Any) -> None:
    check_attention(op, call)
    check_upstream(op, call)


def check_upstream(op: str, call: Any) -> None:
    """Refuse a backward's dout, dlse, out or lse that do not fit its q."""
    q = call.q
    for name, tensor in (("out", call.out), ("dout", call.dout)):
        check_dense(op, name, tensor)
        check_like(op, name, tensor, "q", q)
        if tensor.shape != q.shape:
            refuse(op, name, f"of shape {list(q.shape)} as q is", list(tensor.shape))
    shape = (q.shape[1], q.shape[0]) if is_packed(call) else tuple(q.shape[:3])
    letters = "[H, T]" if is_packed(call) else "[B, H, S]"
    for name, statistic in (("lse", call.lse), *([] if call.dlse is None else [("dlse", call.dlse)])):
        check_dense(op, name, statistic)
        if statistic.dtype != lse_dtype(q):
            refuse(op, name, dtype_name(lse_dtype(q)), dtype_name(statistic.dtype))
        if statistic.shape != shape:
            refuse(op, name, f"of shape {letters} = {list(shape)}", list(statistic.shape))
        check_device(op, name, statistic, "q", q)


def check_values(op: str, call: Any) -> None:
    check_cu_seqlens_values(op, "cu_seqlens", call.cu_seqlens, call.q.shape[0])
    if call.cu_seqlens_k is not None:
        check_cu_seqlens_values(op, "cu_seqlens_k", call.cu_seqlens_k, call.k.shape[0])


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def attention_outputs(call: Any) -> tuple[Tensor, Tensor]:
    q = call.q
    if is_packed(call):
        return contiguous_like(q), q.new_empty((q.shape[1], q.shape[0] if call.return_lse else 0), dtype=lse_dtype(q))
    batch, heads, rows, _ = q.shape
    return dense_like(q), q.new_empty((batch, heads, rows if call.return_lse else 0), dtype=lse_dtype(q))


def attention_gradients(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    allocate = contiguous_like if is_packed(call) else dense_like
    return allocate(call.q), allocate(call.k), allocate(call.v)


def attention_flops(call: Any) -> int:
    """4 D per head and seen pair. Where cu_seqlens is fake, a single segment is counted, the upper bound."""
    q, k, options = call.q, call.k, AttentionOptions.of(call)
    if is_packed(call):
        pairs = options.count_pairs(call.cu_seqlens, call.cu_seqlens_k, q.shape[0], k.shape[0])
    else:
        pairs = q.shape[0] * options.count_dense_pairs(q.shape[2], k.shape[2])
    return 4 * q.shape[1] * q.shape[-1] * pairs


def attention_backward_flops(call: Any) -> int:
    """Five products, where the forward has two."""
    return attention_flops(call) * 5 // 2


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Return whether a gradient may be wanted, so that lse is kept. The check refuses arguments that are no tensors."""
    return torch.is_grad_enabled() and any(
        x is not None and (not isinstance(x, Tensor) or x.requires_grad) for x in tensors
    )


def seed_of(q: Tensor, dropout_p: float, dropout_seed: Tensor | None) -> Tensor | None:
    """The seed that was given, or one by PyTorch's generator of q's device, where dropout asks for one."""
    if dropout_p == 0 or dropout_seed is not None or not isinstance(q, Tensor):
        return dropout_seed
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)


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


def differentiate_attention(op: KernelOp, arguments: Any, backward_op: KernelOp, backward_arguments: Any) -> Any:
    """Return the gradient of a packed or dense op, for `gradient`, by its backward op.

    Arguments of the backward op have the names of those of the op, besides dout, dlse, out and lse.
    """
    # Gradients of keys come in their own dtype.
    names = ("dout", "dlse", "out", "lse", "needs_tables", "float32_kv", *arguments._fields)
    pick = operator.itemgetter(*[names.index(field) for field in backward_arguments._fields])
    gradients = [name for name in ("q", "k", "v", "cos", "sin") if name in arguments._fields]

    def differentiate(call: Any, results: Any, grads: Any, needed: frozenset[str]) -> dict[str, Tensor | None]:
        (out, lse), (dout, dlse) = results, grads
        if dout is None:
            dout = out.new_zeros(()).expand_as(out)
        if lse.numel() == 0 and call.q.numel() != 0:
            # It was not made: captured without gradients, in an exported program for one, and run with them.
            with without_autocast():
                lse, dlse = op(*call._replace(return_lse=True))[1], None
        needs_tables = "cos" in needed or "sin" in needed
        made = dict(zip(gradients, backward_op(*pick((dout, dlse, out, lse, needs_tables, False, *call))), strict=True))
        if "sinks" in needed:
            if is_packed(call):
                made["sinks"] = sinks_gradient(dout, dlse, out, lse, call.sinks)
            else:
                made["sinks"] = sinks_gradient(dout.transpose(1, 2), dlse, out.transpose(1, 2), lse, call.sinks)
        return made

    return differentiate
