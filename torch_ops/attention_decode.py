"""`vk::attention_decode`: attention of a few new queries of each sequence over its cache of keys.

What a language model does for every token that it writes. The cache is one tensor or pages of one, sequences are of any
lengths, which stay on the device, and what many of them begin with is read once. Kernels:
`csrc_free_ops.attention.portable.decode`.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from torch_ops._attention.decode import Decode, plan_decode
from torch_ops._attention.decode_checks import check_decode, check_decode_values, decode_outputs
from torch_ops._core.checks import capacity_of, check_number
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
    keeps_dtype=("k_cache", "v_cache", "alibi_slopes", "sinks", "prefix_k", "prefix_v"),
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
    """softmax(scale q k^T) v of each sequence's last Sq positions over all keys in its cache.

    Query row i of a sequence with L keys stands at key position L - Sq + i (aligned bottom-right). A row that sees no
    key gives out 0 and lse -inf, or lse the sink. An op for inference: it has no gradient, and refuses to give one.

    Args:
        q: [B, H, Sq, D] in fp16, bf16 or fp32, 1 to 16 queries of each sequence; D a multiple of 8 up to 256. Any
            strides; columns that are not contiguous are copied. On the CPU also fp64.
        k_cache, v_cache: [B, Hk, S, D] in any strides with contiguous columns, a transposed [B, S, Hk, D] for one;
            fp16, bf16 or fp32, which may be another than q's: what is read is then converted to that. H is a multiple
            of Hk: each key head serves H / Hk query heads, and is read once for all of them. With `block_table`
            [pages, Hk, page size, D], the page size a multiple of 16.
        cache_seqlens: int32 [B] on q's device: how many keys of each sequence count, those of the Sq queries included.
            Values are never copied to the host; they are clamped to what there is room for, and page numbers to the
            pages there are. `torch_ops.settings(checked=True)` refuses both by name.
        block_table: int32 [B, pages of a sequence]: where the pages of each sequence lie, in order.
        scale: what multiplies q k^T, a positive number; 1 / sqrt(D) where None.
        causal: whether a query sees only keys up to its own position.
        window_left, window_right: how many keys before and after its position a query sees; -1 is all. Keys before the
            window do not count, whatever they are; pages that hold none but those may be gone.
        softcap: c > 0 replaces a score s by c tanh(s / c).
        alibi_slopes: fp32 [H] or [B, H]; slope times the distance of query and key is taken from a score, after
            softcap.
        sinks: [H] in fp32 or q's dtype: one more score of each head in the denominator, of value 0.
        prefix_k, prefix_v: [P, Hk, Sp, D], P a divisor of B, in the dtype of the cache: keys before those of the cache,
            shared by B / P consecutive sequences and read once for all of them. Every query sees them, but for those
            before its window; distances count over both.
        prefix_seqlens: int32 [P], how many keys of each prefix count; all where None.
        num_splits: among how many programs the keys of a sequence are split; chosen by shapes where 0.
        batch_invariant: splits the keys at fixed positions. The same sequence then gives the same bits in any batch,
            beside any others, and in a cache of any capacity.
        return_lse: whether to return (out, lse). `torch.ops.vk.attention_decode` always does.

    Returns:
        out [B, H, Sq, D] in q's dtype, dense, its dimensions in the order in which q's lie in memory and D innermost;
        with return_lse also lse [B, H, Sq], fp32 (fp64 for fp64), natural logarithm of the sum of exp(score).

    Raises:
        ValueError: names the argument, what was wanted and what came.
        NotImplementedError: where a gradient is taken.
        RuntimeError: PyTorch's own, for an argument of another type.

    Products accumulate in fp32; fp32 inputs use tf32 only where `torch.backends.cuda.matmul` allows it. The same call
    gives the same bits every time. Flash-Decoding, https://pytorch.org/blog/flash-decoding.
    """
    for name, number in (("scale", scale), ("softcap", softcap)):
        check_number("attention_decode", name, number)
    out, lse = attention_decode_op(
        q, k_cache, v_cache, cache_seqlens, block_table, scale, causal, window_left, window_right, softcap,
        alibi_slopes, sinks, prefix_k, prefix_v, prefix_seqlens, num_splits, batch_invariant,
    )  # fmt: skip
    return (out, lse) if return_lse else out


__all__ = ["attention_decode"]
