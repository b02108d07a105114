"""PyTorch's flash attention on the ops of this library.

PyTorch keeps a registry of flash attention implementations. The import of this module registers "VK" there and changes
nothing else. Activation replaces the CUDA kernels of up to five aten ops until ``restore_flash_attention_impl()``:

    import torch_ops.integrations.torch_flash
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("VK")

From then on ``torch.nn.attention.varlen.varlen_attn`` and the flash backend of
``torch.nn.functional.scaled_dot_product_attention`` run `window_attn` and `attention`. Graphs that were compiled before
follow too, because they call the aten ops when they run.

Each function here implements the aten op of its name. Results have the shapes and dtypes of PyTorch's fake kernels, and
their strides in dimensions longer than 1. The functions also take CPU tensors, on which ATen computes. Source:
``torch/nn/attention/_registry.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.library import Library

from torch_ops._core.checks import check_like, dtype_name, refuse
from torch_ops._core.torch_private import without_autocast
from torch_ops.attention import AttentionBackward, attention, attention_backward_op
from torch_ops.window_attn import WindowAttnBackward, window_attn, window_attn_backward_op

try:
    from torch.nn.attention import register_flash_attention_impl
except ImportError as error:
    raise ImportError(
        "torch_ops.integrations.torch_flash needs torch.nn.attention.register_flash_attention_impl, which torch "
        f"{torch.__version__} lacks; install a torch from 2.11 to 2.15 that has it"
    ) from error

IMPLEMENTATION = "VK"

Gradients = tuple[Tensor, Tensor, Tensor]

# Calls that take the arguments that the ops lack.
_INSTEAD = dict.fromkeys(("seqused_k", "block_table"), "call torch_ops.attention_decode on a KV cache")


def _lack(op: str, argument: str, got: object, fix: str, wanted: str = "None") -> NoReturn:
    raise NotImplementedError(f"{op}: {argument} is {got}, expected {wanted}; {fix}")


def _refuse_unsupported(op: str, return_debug_mask: bool = False, **arguments: Any) -> None:
    """Refuse by name the arguments that the ops have no equivalent for.

    `arguments` also holds arguments that a later PyTorch added, which the dispatcher passes only with other values than
    their defaults.
    """
    if return_debug_mask:
        _lack(op, "return_debug_mask", True, "the ops never store the dropout mask", "False")
    num_splits = arguments.pop("num_splits", None)
    if num_splits not in (None, 1):
        _lack(op, "num_splits", num_splits, "the ops choose how they split keys", "None or 1")
    for argument, value in arguments.items():
        if value is not None:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            _lack(op, argument, got, _INSTEAD.get(argument, f'"{IMPLEMENTATION}" does not know this argument'))


def _check_layout(op: str, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, **tensors: Tensor) -> None:
    """Boundaries come for both or for neither, and say how many dimensions the tensors have."""
    for argument, own, other in (("cum_seq_k", cum_seq_k, cum_seq_q), ("cum_seq_q", cum_seq_q, cum_seq_k)):
        if own is None and other is not None:
            refuse(op, argument, "an int32 tensor of shape [n + 1], as the other boundaries are", "None")
    dims, letters = (4, "[B, S, H, D]") if cum_seq_q is None else (3, "[T, H, D]")
    for argument, tensor in tensors.items():
        if tensor.dim() != dims:
            refuse(op, argument, f"of shape {letters}", list(tensor.shape))


def _boundaries_of_keys(query: Tensor, key: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor) -> Tensor | None:
    """Return None for shared boundaries, which tells the kernels for small segments that they are shared."""
    return None if cum_seq_k is cum_seq_q and key.shape[0] == query.shape[0] else cum_seq_k


def _width(window_size: int | None) -> int:
    return -1 if window_size is None else max(window_size, -1)


def _laid_out_as(made: Tensor, like: Tensor) -> Tensor:
    """Return `made` with the strides of torch.empty_like(like), which PyTorch's fake kernels promise.

    Only packed tensors whose rows are not outermost in memory, and columns that are not contiguous, cost a copy.
    """
    if like.is_contiguous() and made.is_contiguous():
        return made
    if made.stride() == torch.empty_like(like, device="meta").stride():
        return made
    return torch.empty_like(like).copy_(made)


def _transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Exchange the dimensions of heads and rows, as views."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _draw_rng_state(query: Tensor, dropout_p: float) -> Tensor:
    """Return uint64 [2] for the backward: a seed by PyTorch's generator and an unused number.

    Without dropout nothing reads it, so it is not filled.
    """
    if dropout_p == 0:
        return torch.empty(2, dtype=torch.uint64, device=query.device)
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=query.device).view(torch.uint64)


def _seed_of(rng_state: Tensor, dropout_p: float) -> Tensor | None:
    return None if dropout_p == 0 else rng_state.view(torch.int64)[:1]


def _check_rng_state(op: str, argument: str, rng_state: Tensor, dropout_p: float) -> None:
    if dropout_p != 0 and (rng_state.dtype is not torch.uint64 or rng_state.shape != (2,)):
        got = f"{dtype_name(rng_state.dtype)} {list(rng_state.shape)}"
        refuse(op, argument, "uint64 [2], as the forward returned it", got)


def _unused_of(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the philox offset, uint64 [], and the empty debug mask."""
    return torch.empty((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _dense_forward(
    query: Tensor, key: Tensor, value: Tensor, rng_state: Tensor, dropout_p: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute out and lse for [B, H, S, D]. Autocast casts above the aten op, and never in its kernel."""
    seed = _seed_of(rng_state, dropout_p)
    with without_autocast():
        made: Any = attention(query, key, value, dropout_p=dropout_p, dropout_seed=seed, return_lse=True, **options)
    out, lse = made
    return _laid_out_as(out, query), lse


def _dense_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> Gradients:
    call = AttentionBackward(grad_out, None, query, key, value, out, lse, **options)
    dq, dk, dv = attention_backward_op(*call)
    return _laid_out_as(dq, query), _laid_out_as(dk, key), _laid_out_as(dv, value)


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    alibi_slopes: Tensor | None = None,
    **unsupported: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `aten::_flash_attention_forward` by `window_attn` or, without boundaries, by `attention`.

    Args:
        query: packed [T, H, D] or dense [B, S, H, D], fp16, bf16 or fp32; D is a multiple of 8 up to 256. Any strides.
        key, value: packed [Tk, Hk, D] or dense [B, Sk, Hk, D], dtype and device of query, H a multiple of Hk.
        cum_seq_q, cum_seq_k: int32 [n + 1] on query's device, or None for dense tensors.
        max_q, max_k: ignored; the ops find lengths on the device.
        dropout_p: probability that a weight counts as 0. PyTorch's generator draws the seed; the mask is
            `attention`'s.
        is_causal: whether a query sees only keys up to its own position, aligned bottom-right.
        return_debug_mask: must be False.
        scale: positive number that multiplies q k^T. Default: 1 / sqrt(D).
        window_size_left, window_size_right: number of keys that a query sees before and after its position. Default:
            None, all, and so are negative numbers. is_causal makes the second 0.
        alibi_slopes: fp32 [H] or [n, H]. Only in torch.inference_mode(), since `aten::_flash_attention_backward` takes
            no slopes and compiled graphs do not show their gradients to this function. Default: none.
        unsupported: `num_splits`, None or 1. `seqused_k`, `block_table` and arguments of a later PyTorch must be None.

    Returns:
        (out, lse, rng_state, unused, debug_mask). out has query's shape, dtype and order of memory. lse is fp32, packed
        [H, T] or dense [B, H, S]; a row that sees no key has -inf. rng_state is uint64 [2], unused is uint64 [], and
        debug_mask is empty.

    Raises:
        NotImplementedError: for an argument that the ops lack. The message names it.
        ValueError: for tensors of other dimensions than the Args say. Also for an argument that `window_attn` or
            `attention` refuses; the message then has the op's name of it.

    Without dropout, equal calls give equal bits. FlashAttention-2, arXiv 2307.08691.
    """
    op = "_flash_attention_forward"
    _refuse_unsupported(op, return_debug_mask, **unsupported)
    if alibi_slopes is not None and not torch.is_inference_mode_enabled():
        fix = "aten::_flash_attention_backward takes no slopes; call it within torch.inference_mode()"
        _lack(op, "alibi_slopes", "a tensor", fix, "None outside of inference mode")
    _check_layout(op, cum_seq_q, cum_seq_k, query=query, key=key, value=value)
    rng_state = _draw_rng_state(query, dropout_p)
    options: dict[str, Any] = {
        "scale": scale, "causal": is_causal, "window_left": _width(window_size_left),
        "window_right": _width(window_size_right), "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    if cum_seq_q is None or cum_seq_k is None:
        q, k, v = _transposed(query, key, value)
        out, lse = _dense_forward(q, k, v, rng_state, dropout_p, **options)
        (out,) = _transposed(out)
    else:
        cu_seqlens_k = _boundaries_of_keys(query, key, cum_seq_q, cum_seq_k)
        with without_autocast():
            made: Any = window_attn(
                query, key, value, cum_seq_q, cu_seqlens_k, return_lse=True, dropout_p=dropout_p,
                dropout_seed=_seed_of(rng_state, dropout_p), **options,
            )  # fmt: skip
        out, lse = made
    return _laid_out_as(out, query), lse, rng_state, *_unused_of(query)


def flash_attention_forward_no_dropout_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> Tensor:
    """Compute `aten::_flash_attention_forward_no_dropout_inplace`: fill `out` and return lse.

    Args:
        out: shape, dtype and device of query, any strides. The result is copied into it.
        dropout_p: must be 0.
        options: the keyword arguments of `flash_attention_forward`.

    The other arguments are those of `flash_attention_forward`.

    Returns:
        lse, as `flash_attention_forward` returns it.

    Raises:
        NotImplementedError: for an argument that the ops lack. The message names it.
        ValueError: for tensors of other dimensions than the Args say. Also for an argument that `window_attn` or
            `attention` refuses; the message then has the op's name of it.
    """
    op = "_flash_attention_forward_no_dropout_inplace"
    check_like(op, "out", out, "query", query)
    if out.shape != query.shape:
        refuse(op, "out", f"of shape {list(query.shape)} as query is", list(out.shape))
    if dropout_p != 0:
        _lack(op, "dropout_p", dropout_p, "use the op that returns its random state", "0")
    made, lse, *_ = flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options
    )
    out.copy_(made)
    return lse


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unsupported: Any,
) -> Gradients:
    """Compute `aten::_flash_attention_backward`, the gradients of `flash_attention_forward`.

    Args:
        grad_out, out: shape, dtype and device of query. Any strides.
        logsumexp: fp32, packed [H, T] or dense [B, H, S]; with out from anywhere, also merged from parts.
        rng_state: uint64 [2] of the forward; read only with dropout.
        unused: ignored.

    The other arguments are those of `flash_attention_forward`.

    Returns:
        dq, dk and dv in the shapes, dtypes and orders of memory of query, key and value.

    Raises:
        NotImplementedError: for an argument that the ops lack. The message names it.
        ValueError: for tensors of other dimensions than the Args say, and for another rng_state with dropout. Also for
            an argument that `window_attn` or `attention` refuses; the message then has the op's name of it.

    Deterministic for dense tensors; for packed ones under `torch.use_deterministic_algorithms(True)`.
    """
    op = "_flash_attention_backward"
    _refuse_unsupported(op, **unsupported)
    _check_layout(op, cum_seq_q, cum_seq_k, grad_out=grad_out, query=query, key=key, value=value, out=out)
    _check_rng_state(op, "rng_state", rng_state, dropout_p)
    options: dict[str, Any] = {
        "scale": scale, "causal": is_causal, "window_left": _width(window_size_left),
        "window_right": _width(window_size_right), "dropout_p": dropout_p,
        "dropout_seed": _seed_of(rng_state, dropout_p),
    }  # fmt: skip
    if cum_seq_q is None or cum_seq_k is None:
        dout, q, k, v, out = _transposed(grad_out, query, key, value, out)
        dq, dk, dv = _transposed(*_dense_backward(dout, q, k, v, out, logsumexp, **options))
    else:
        call = WindowAttnBackward(
            grad_out, None, query, key, value, out, logsumexp, cum_seq_q,
            _boundaries_of_keys(query, key, cum_seq_q, cum_seq_k),
            deterministic=torch.are_deterministic_algorithms_enabled(), **options,
        )  # fmt: skip
        dq, dk, dv = window_attn_backward_op(*call)
    return _laid_out_as(dq, query), _laid_out_as(dk, key), _laid_out_as(dv, value)


def scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **unsupported: Any,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    """Compute `aten::_scaled_dot_product_flash_attention` by `attention`.

    Args:
        query: [B, H, S, D], fp16, bf16 or fp32; D is a multiple of 8 up to 256. Any strides.
        key, value: [B, Hk, Sk, D], dtype and device of query, H a multiple of Hk.
        is_causal: whether a query sees only keys up to its own position, aligned bottom-right as in PyTorch's own
            kernel. scaled_dot_product_attention, aligned top-left, comes here with equal lengths only. Default: False.

    The other arguments are those of `flash_attention_forward`.

    Returns:
        (out, lse, None, None, S, Sk, rng_state, unused, debug_mask). out has query's shape, dtype and order of memory.
        lse is fp32 [B, H, S]. The others are those of `flash_attention_forward`.

    Raises:
        NotImplementedError: for an argument that the ops lack. The message names it.
        ValueError: for an argument that `attention` refuses. The message has the op's name of it.
    """
    _refuse_unsupported("_scaled_dot_product_flash_attention", return_debug_mask, **unsupported)
    rng_state = _draw_rng_state(query, dropout_p)
    out, lse = _dense_forward(query, key, value, rng_state, dropout_p, scale=scale, causal=is_causal)
    return out, lse, None, None, query.shape[2], key.shape[2], rng_state, *_unused_of(query)


def scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
    **unsupported: Any,
) -> Gradients:
    """Compute `aten::_scaled_dot_product_flash_attention_backward`.

    Args:
        grad_out, out: shape, dtype and device of query, [B, H, S, D]. Any strides.
        logsumexp: fp32 [B, H, S].
        cum_seq_q, cum_seq_k, max_q, max_k, philox_offset: ignored.
        philox_seed: rng_state of the forward, uint64 [2]; read only with dropout.

    The other arguments are those of `scaled_dot_product_flash_attention`.

    Returns:
        dq, dk and dv in the shapes, dtypes and orders of memory of query, key and value. Always deterministic.

    Raises:
        NotImplementedError: for an argument that the ops lack. The message names it.
        ValueError: for another philox_seed with dropout. Also for an argument that `attention` refuses; the message
            then has the op's name of it.
    """
    op = "_scaled_dot_product_flash_attention_backward"
    _refuse_unsupported(op, **unsupported)
    _check_rng_state(op, "philox_seed", philox_seed, dropout_p)
    seed = _seed_of(philox_seed, dropout_p)
    return _dense_backward(
        grad_out, query, key, value, out, logsumexp, scale=scale, causal=is_causal, dropout_p=dropout_p,
        dropout_seed=seed,
    )  # fmt: skip


KERNELS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_no_dropout_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_flash_attention_backward,
}


@dataclass
class Overrides:
    """Hold the kernels that replace PyTorch's until `remove()`. PyTorch's registry keeps it."""

    library: Library | None

    def remove(self) -> None:
        # The library's finalizer takes its kernels off the dispatcher.
        self.library = None


def override_kernels(dispatch_key: str = "CUDA") -> Overrides:
    """Put the functions of `KERNELS` in place of PyTorch's kernels, for the aten ops that this PyTorch has.

    Args:
        dispatch_key: backend whose kernels are replaced. Default: "CUDA".

    Returns:
        The handle that undoes it, which must be kept.
    """
    library = Library("aten", "IMPL", dispatch_key)
    for name, function in KERNELS.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, function, dispatch_key)
    return Overrides(library)


register_flash_attention_impl(IMPLEMENTATION, register_fn=override_kernels)

__all__ = ["IMPLEMENTATION", "KERNELS", "Overrides", "override_kernels", *[f.__name__ for f in KERNELS.values()]]
