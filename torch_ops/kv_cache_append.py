"""`vk::kv_cache_append`: write keys and values of new tokens to a KV cache in place, with their rotary embedding.

Kernel and maths: `csrc_free_ops.kv_cache_append`. The op is for inference and has no gradient.
"""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torch_ops._core.plan import Plan
from torch_ops._core.planned_op import planned_op
from torch_ops._kv_cache.append import Append, check_append, check_append_values, new_queries, plan_append


class KVCacheAppend(NamedTuple):
    """The arguments of `vk::kv_cache_append`; the function below documents them."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None = None
    q: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False
    lengths: Tensor | None = None


def _tensors(call: Any, out: Tensor) -> Append:
    return Append._make((*call[:9], call.lengths, out))


def _plan(t: Append, call: KVCacheAppend) -> Plan:
    return plan_append(t, call.interleaved)


kv_cache_append_op = planned_op(
    "kv_cache_append",
    KVCacheAppend,
    Tensor,
    check=partial(check_append, "kv_cache_append"),
    outputs=lambda call: new_queries(call.k, call.q),
    tensors=_tensors,
    plan=_plan,
    check_values=partial(check_append_values, "kv_cache_append"),
    mutates=("k_cache", "v_cache"),
)


def kv_cache_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    lengths: Tensor | None = None,
) -> Tensor:
    """Write k and v to a cache, after the keys that each sequence has, in one launch.

    Token i of sequence b goes to position cache_seqlens[b] + i. With cos and sin its key is rotated by the angles of
    that position before it is stored, and so is its query.

    Args:
        k, v: [B, Hk, Sn, D], fp16, bf16 or fp32, on the CPU also fp64; D is a multiple of 8 up to 256. Any strides;
            columns that are not contiguous are copied.
        k_cache, v_cache: [B, Hk, S, D], or with a block_table [num_pages, Hk, page_size, D]. Any strides with
            contiguous columns: flash-attn's [B, S, Hk, D] is `cache.transpose(1, 2)`. The dtype may differ from k's.
            They are written to in place, at the new positions and nowhere else. Caches of one address are refused.
        cache_seqlens: int32 [B] on the device, number of keys that each sequence has before the call. It is not
            changed.
        block_table: int32 [B, max_pages], the pages of each sequence in order. Two sequences may share pages that are
            read. If two tokens of a call go to one row of one page, either may stay. Default: a contiguous cache.
        q: [B, H, Sn, D], k's dtype, queries to rotate too; needs cos and sin. Default: none.
        cos, sin: [max_positions, D], a column for each column of a head, or [max_positions, R/2] with R <= D, one for
            each pair of its first R columns. Columns from R on are not rotated. fp32 or k's dtype. A position past the
            last row has the angles of that row. Default: no rotation.
        interleaved: whether pairs are columns 2i and 2i + 1 (GPT-J's order) instead of i and i + R/2 (GPT-NeoX's).
            Default: False.
        lengths: int32 [B] on the device, how many of its Sn tokens each sequence uses, from the first; the others are
            not written. Default: all.

    Returns:
        Rotated q in a new tensor with q's dimension order in memory; an empty tensor [0] without q.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came.
        NotImplementedError: if an argument requires a gradient outside torch.no_grad(), because there is none.

    Values on the device are not checked. Tokens past the capacity, on pages that do not exist, or of a sequence of
    negative length are not written, and nothing else changes. `torch_ops.settings(checked=True)` refuses them by name
    before anything is written. The rotation is fp32 and rounded once. The same inputs give the same bits.
    """
    return kv_cache_append_op(k, v, k_cache, v_cache, cache_seqlens, block_table, q, cos, sin, interleaved, lengths)


__all__ = ["kv_cache_append"]
