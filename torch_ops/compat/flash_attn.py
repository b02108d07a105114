"""flash-attn's functions for training on `vk::attention` and `vk::window_attn`, with the signatures of flash-attn 2.8.

Tensors [B, S, H, D] become the transposed views that the ops take. Options that flash-attn has and the ops lack are
refused by name; other refusals are those of the ops.
"""

from typing import Any

from torch import Tensor

from torch_ops._core.checks import check_number
from torch_ops._tools.explain import explained_as
from torch_ops.attention import attention
from torch_ops.compat._flash_attn_checks import bounds_of, check_layout, check_softmax_scale, refuse_given
from torch_ops.compat._handover import hand_over
from torch_ops.window_attn import window_attn

Attended = Tensor | tuple[Tensor, Tensor, None]


def _attended(out: Any, transpose: bool, return_attn_probs: bool) -> Attended:
    """flash-attn's third result, weights with dropout's mask in their signs, is for its own tests."""
    if not return_attn_probs:
        return out.transpose(1, 2) if transpose else out
    out, lse = out
    return out.transpose(1, 2) if transpose else out, lse, None


@explained_as("attention")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """Compute `flash_attn.flash_attn_func` by `torch_ops.attention`.

    Args:
        q: [B, Sq, H, D], fp16, bf16 or fp32; D is a multiple of 8 up to 256. Any strides.
        k, v: [B, Sk, Hk, D], dtype and device of q, H a multiple of Hk.
        dropout_p: probability that a weight counts as 0; PyTorch's generator draws the seed. Default: 0.
        softmax_scale: number that multiplies q k^T. Default: 1 / sqrt(D).
        causal: whether a query sees only keys up to its own position, aligned bottom-right. Default: False.
        window_size: number of keys that a query sees before and after its position; -1 is all. causal makes the second
            0.
        softcap: c > 0 replaces a score s by c tanh(s / c). Default: 0, none.
        alibi_slopes: fp32 [H] or [B, H]. They get no gradient. Default: none.
        deterministic: False lets the backward add dq in any order if that is faster, also in PyTorch's own kernel.
        return_attn_probs: whether to return (out, softmax_lse, None). Default: False.

    Returns:
        out [B, Sq, H, D]; with return_attn_probs also softmax_lse [B, H, Sq], fp32, which is differentiable here.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
    """
    op = "flash_attn_func"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_layout(op, name, tensor, "[B, S, H, D]")
    check_softmax_scale(op, softmax_scale)
    bounds = bounds_of(op, window_size)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out: Any = None
    dropout_p, softcap = check_number(op, "dropout_p", dropout_p), check_number(op, "softcap", softcap)
    if _is_plain(dropout_p, bounds, softcap, alibi_slopes, return_attn_probs):
        out = hand_over(q, k, v, softmax_scale, causal, deterministic)
    if out is None:
        out = attention(
            q, k, v, softmax_scale, causal, *bounds, softcap=softcap, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
            deterministic=deterministic, return_lse=return_attn_probs,
        )  # fmt: skip
    return _attended(out, True, return_attn_probs)


def _is_plain(
    dropout_p: float, bounds: tuple[int, int], softcap: float, alibi_slopes: object, return_attn_probs: bool
) -> bool:
    """Whether PyTorch's kernels have all that a call asks for."""
    return dropout_p == softcap == 0 and bounds == (-1, -1) and alibi_slopes is None and not return_attn_probs


@explained_as("attention")
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """Compute `flash_attn_func` of kv [B, Sk, 2, Hk, D], which is not copied."""
    check_layout("flash_attn_kvpacked_func", "kv", kv, "[B, S, 2, H, D]", 2)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


@explained_as("attention")
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """Compute `flash_attn_func` of qkv [B, S, 3, H, D], which is not copied."""
    check_layout("flash_attn_qkvpacked_func", "qkv", qkv, "[B, S, 3, H, D]", 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


@explained_as("window_attn")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Attended:
    """Compute `flash_attn.flash_attn_varlen_func` by `torch_ops.window_attn`.

    Args:
        q: [Tq, H, D], fp16, bf16 or fp32; D is a multiple of 8 up to 256. Any strides.
        k, v: [Tk, Hk, D], dtype and device of q, H a multiple of Hk.
        cu_seqlens_q, cu_seqlens_k: int32 [n + 1] on q's device. One tensor for both tells the kernels for small
            segments that the boundaries are the same.
        max_seqlen_q, max_seqlen_k: ignored; the ops find lengths on the device.
        alibi_slopes: fp32 [H] or [n, H]. They get no gradient. Default: none.
        block_table: must be None; for pages use `flash_attn_with_kvcache`.

    The other arguments are those of `flash_attn_func`.

    Returns:
        out [Tq, H, D]; with return_attn_probs (out, softmax_lse [H, Tq], None).

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
    """
    op = "flash_attn_varlen_func"
    refuse_given(op, block_table=block_table)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_layout(op, name, tensor, "[T, H, D]")
    check_softmax_scale(op, softmax_scale)
    shared = cu_seqlens_k is cu_seqlens_q and k.shape[0] == q.shape[0]
    out = window_attn(
        q, k, v, cu_seqlens_q, None if shared else cu_seqlens_k, softmax_scale, causal, *bounds_of(op, window_size),
        softcap=softcap, deterministic=deterministic, return_lse=return_attn_probs, alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
    )  # fmt: skip
    return _attended(out, False, return_attn_probs)


@explained_as("window_attn")
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """Compute `flash_attn_varlen_func` of kv [Tk, 2, Hk, D], which is not copied."""
    check_layout("flash_attn_varlen_kvpacked_func", "kv", kv, "[T, 2, H, D]", 2)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@explained_as("window_attn")
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Attended:
    """Compute `flash_attn_varlen_func` of qkv [T, 3, H, D], which is not copied."""
    check_layout("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "[T, 3, H, D]", 3)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]
