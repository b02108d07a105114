"""`vk::attention_decode`: attention of a few new queries of each sequence over its cache of keys.

What a language model does for every token that it writes. The cache is one tensor or pages of one, sequences are of any
lengths, which stay on the device, and what many of them begin with is read once. Kernels:
`csrc_free_ops.attention.portable.decode`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from torch_ops._attention.decode import plan_decode
from torch_ops._attention.decode_calls import check_decode, check_decode_values, decode_outputs
from torch_ops._attention.decode_cpu import decode_cpu
from torch_ops._attention.scores import Scores, StepTensors
from torch_ops._core.checks import capacity_of, check_number
from torch_ops._core.registry import remembered, runs_kernels, vk_op

TABLES = ("k_cache", "v_cache", "alibi_slopes", "sinks", "prefix_k", "prefix_v")


def _attention_decode_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None = None,
    scale: float | None = None, causal: bool = True, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    prefix_k: Tensor | None = None, prefix_v: Tensor | None = None, prefix_seqlens: Tensor | None = None,
    num_splits: int = 0, batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_decode(
        "attention_decode", q, k_cache, v_cache, cache_seqlens, block_table, scale, causal, window_left, window_right,
        softcap, alibi_slopes, sinks, prefix_k, prefix_v, prefix_seqlens, num_splits, batch_invariant,
    )  # fmt: skip
    return decode_outputs(q)


def _attention_decode_flops(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None = None,
    *rest: Any, prefix_k: Tensor | None = None, **__: Any,
) -> int:  # fmt: skip
    """4 D per head, query and key there is room for, whatever bounds there are: lengths are the device's to know."""
    if len(rest) > 7:
        prefix_k = rest[7]
    keys = capacity_of(k_cache, block_table) + (0 if prefix_k is None else prefix_k.shape[2])
    return 4 * q.numel() * keys


@remembered
def _prepare_attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None,
    scale: float | None, causal: bool, window_left: int, window_right: int, softcap: float,
    alibi_slopes: Tensor | None, sinks: Tensor | None,
    prefix_k: Tensor | None, prefix_v: Tensor | None, prefix_seqlens: Tensor | None,
    num_splits: int, batch_invariant: bool,
) -> Callable[..., None]:  # fmt: skip
    check_decode(
        "attention_decode", q, k_cache, v_cache, cache_seqlens, block_table, scale, causal, window_left, window_right,
        softcap, alibi_slopes, sinks, prefix_k, prefix_v, prefix_seqlens, num_splits, batch_invariant,
    )  # fmt: skip
    step = StepTensors(alibi_slopes, sinks)
    scores = Scores.of(q.shape[3], scale, causal, window_left, window_right, softcap, step)
    if runs_kernels(q):
        return plan_decode(
            q, k_cache, v_cache, cache_seqlens, block_table, alibi_slopes, sinks, prefix_k, prefix_v, prefix_seqlens,
            scores, num_splits, batch_invariant,
        )  # fmt: skip
    return partial(decode_cpu, scores)


@vk_op(
    "attention_decode", fake=_attention_decode_fake, autocast=True, keeps_dtype=TABLES, flops=_attention_decode_flops
)  # fmt: skip
def attention_decode_op(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None = None,
    scale: float | None = None, causal: bool = True, window_left: int = -1, window_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    prefix_k: Tensor | None = None, prefix_v: Tensor | None = None, prefix_seqlens: Tensor | None = None,
    num_splits: int = 0, batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    launch = _prepare_attention_decode(
        q, k_cache, v_cache, cache_seqlens, block_table, scale, causal, window_left, window_right, softcap,
        alibi_slopes, sinks, prefix_k, prefix_v, prefix_seqlens, num_splits, batch_invariant,
    )  # fmt: skip
    check_decode_values(
        "attention_decode", k_cache, cache_seqlens, block_table, prefix_k, prefix_seqlens, q.shape[2], window_left
    )
    out, lse = decode_outputs(q)
    launch(
        q, k_cache, v_cache, cache_seqlens, block_table, alibi_slopes, sinks, prefix_k, prefix_v, prefix_seqlens,
        out, lse,
    )  # fmt: skip
    return out, lse


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
