"""`vk::attention_decode`: attention of a few new queries of each sequence over its KV cache.

A language model does this for every token that it writes. The cache is one tensor or pages of one. Lengths stay on the
device, and a common beginning of several sequences is read once. Kernels: `csrc_free_ops.attention.portable.decode`.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from torch_ops._attention.decode import Decode, plan_decode
from torch_ops._attention.decode_checks import check_decode, check_decode_values, decode_outputs
from torch_ops._core.checks import capacity_of
from torch_ops._core.planned_op import planned_op


class AttentionDecode(NamedTuple):
    """The arguments of `vk::attention_decode`; the function below documents them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None = None
    scale: float | None = None
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    prefix_k: Tensor | None = None
    prefix_v: Tensor | None = None
    prefix_seqlens: Tensor | None = None
    num_splits: int = 0
    batch_invariant: bool = False


def _flops(call: AttentionDecode) -> int:
    """4 D per head, query and key there is room for, whatever bounds there are: lengths are the device's to know."""
    prefix = 0 if call.prefix_k is None else call.prefix_k.shape[2]
    return 4 * call.q.numel() * (capacity_of(call.k_cache, call.block_table) + prefix)


attention_decode_op = planned_op(
    "attention_decode",
    AttentionDecode,
    tuple[Tensor, Tensor],
    check=partial(check_decode, "attention_decode"),
    outputs=lambda call: decode_outputs(call.q),
    tensors=Decode.of,
    plan=plan_decode,
    check_values=partial(check_decode_values, "attention_decode"),
    flops=_flops,
    autocast=True,
    keeps_dtype=("alibi_slopes", "sinks"),
    reads_any=("k_cache", "v_cache", "prefix_k", "prefix_v"),
)
attention_decode_op.refuse_autograd("it is for inference")


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    prefix_k: Tensor | None = None,
    prefix_v: Tensor | None = None,
    prefix_seqlens: Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale q k^T) v for the last Sq positions of each sequence over all keys in its cache.

    Query row i of a sequence with L keys stands at key position L - Sq + i (aligned bottom-right). A row that sees no
    key gives out 0 and lse -inf, or lse the sink. The op is for inference: it has no gradient and refuses to give one.

    Args:
        q: [B, H, Sq, D], fp16, bf16 or fp32, on the CPU also fp64. Up to 16 queries of each sequence, D a multiple of
            8 up to 256. Any strides; columns that are not contiguous are copied.
        k_cache, v_cache: [B, Hk, S, D] in any strides with contiguous columns, such as a transposed [B, S, Hk, D]. With
            `block_table` [pages, Hk, page size, D], page size a multiple of 16. fp16, bf16 or fp32; another dtype than
            q's is converted to q's when read. H is a multiple of Hk: each key head is read once for its H / Hk query
            heads.
        cache_seqlens: int32 [B] on q's device, number of keys of each sequence, those of the Sq queries included.
            Values are never copied to the host. They are clamped to the capacity, and page numbers to the existing
            pages; `torch_ops.settings(checked=True)` refuses both by name.
        block_table: int32 [B, pages of a sequence], the pages of each sequence in order. Default: a contiguous cache.
        scale: positive number that multiplies q k^T. Default: 1 / sqrt(D).
        causal: whether a query sees only keys up to its own position. Default: True.
        window_left, window_right: number of keys that a query sees before and after its position. Keys before the
            window do not count, whatever they are; pages that hold only such keys may be gone. Default: -1, all.
        softcap: c > 0 replaces a score s by c tanh(s / c). Default: 0, none.
        alibi_slopes: fp32 [H] or [B, H]. Slope times the distance of query and key is subtracted from a score, after
            the softcap. Default: none.
        sinks: [H], fp32 or q's dtype; one more logit of each head in the denominator, of value 0. Default: none.
        prefix_k, prefix_v: [P, Hk, Sp, D], dtype of the cache, P a divisor of B: keys before those of the cache. B / P
            consecutive sequences share a prefix, which is read once for all of them. Every query sees them, except
            those before its window; distances count over both. Default: none.
        prefix_seqlens: int32 [P], number of keys of each prefix. Default: all.
        num_splits: number of programs that share the keys of a sequence. Default: 0, chosen by shapes.
        batch_invariant: whether keys are split at fixed positions. A sequence then gives the same bits in any batch,
            beside any other sequences, and at any capacity. Default: False.
        return_lse: whether to return (out, lse). `torch.ops.vk.attention_decode` always does. Default: False.

    Returns:
        out [B, H, Sq, D] in q's dtype, dense, with the dimension order of q in memory and D innermost. With return_lse
        also lse [B, H, Sq], fp32 (fp64 for fp64): the natural logarithm of the sum of exp(score).

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        NotImplementedError: if a gradient is taken.
        RuntimeError: from PyTorch, for an argument of another type.

    Products accumulate in fp32. fp32 inputs use tf32 only if `torch.backends.cuda.matmul` allows it. The same call
    gives the same bits every time. Flash-Decoding, https://pytorch.org/blog/flash-decoding.
    """
    out, lse = attention_decode_op(
        q, k_cache, v_cache, cache_seqlens, block_table, scale, causal, window_left, window_right, softcap,
        alibi_slopes, sinks, prefix_k, prefix_v, prefix_seqlens, num_splits, batch_invariant,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["attention_decode"]
