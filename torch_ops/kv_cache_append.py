"""`vk::kv_cache_append`: keys and values of new tokens, with their rotary embedding, into a cache in its place.

Kernel and maths: `csrc_free_ops.kv_cache_append`. An inference op: it has no gradient.
"""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torch_ops._core.checks import refuse
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
    """Writes k and v into a cache, behind the keys that each sequence has, in one launch.

    Token i of sequence b goes to position cache_seqlens[b] + i; with cos and sin its key is turned by the angles of
    that position before it is stored, and so is its query.

    Args:
        k, v: [B, Hk, Sn, D] in fp16, bf16 or fp32, any strides; columns that are not contiguous are copied. On the CPU
            also fp64. D is a multiple of 8 up to 256.
        k_cache, v_cache: [B, Hk, S, D], or with a block_table [num_pages, Hk, page_size, D], in any strides but of
            contiguous columns: flash-attn's [B, S, Hk, D] is taken as `cache.transpose(1, 2)`. Their dtype may be
            another than k's. They are written to in place, at the new positions and nowhere else.
        cache_seqlens: int32 [B] on the device, keys that each sequence has before the call. It is not changed.
        block_table: int32 [B, max_pages], pages of each sequence in order. Two sequences may share pages that are read;
            where two tokens of a call go to one row of one page, which of them stays is not said.
        q: [B, H, Sn, D] in k's dtype, queries to turn as well; only with cos and sin.
        cos, sin: [max_positions, D], a column for each of a head, or [max_positions, R/2] with R <= D, one for each
            pair of its first R columns: with R < D the others are not turned. In fp32 or k's dtype. A position past the
            last row has the angles of that row.
        interleaved: pairs are columns 2i and 2i + 1 (GPT-J's order) instead of i and i + R/2 (GPT-NeoX's).
        lengths: int32 [B] on the device, of how many of its Sn tokens each sequence makes use, from the first; the
            others are not written. All where None.

    Returns:
        q, turned, in a new tensor of q's memory order; an empty tensor [0] where q is None.

    Raises:
        ValueError: names the argument, what was wanted and what came.
        NotImplementedError: for an argument that requires a gradient, outside torch.no_grad(): there is none.

    What only the device knows is not looked at: tokens past the capacity, on pages that are not there, or of a sequence
    of negative length are not written, and nothing else is harmed. `torch_ops.settings(checked=True)` refuses them by
    name before anything is written. The rotation is in fp32 and rounded once. The same inputs give the same bits.
    """
    if k_cache is v_cache:
        refuse("kv_cache_append", "v_cache", "another tensor than k_cache, since both are written", "the same")
    return kv_cache_append_op(k, v, k_cache, v_cache, cache_seqlens, block_table, q, cos, sin, interleaved, lengths)


__all__ = ["kv_cache_append"]
