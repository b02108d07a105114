"""flash-attn's `flash_attn_with_kvcache` on `vk::kv_cache_append` and `vk::attention_decode`."""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_ops._attention.decode_checks import MOST_QUERIES
from torch_ops._core.checks import check_int, check_matrix, refuse
from torch_ops._core.plan import Plan
from torch_ops._core.planned_op import opaque_plan
from torch_ops._core.torch_private import is_exporting
from torch_ops.attention_decode import attention_decode
from torch_ops.compat._flash_attn_checks import bounds_of, check_layout, check_softmax_scale, refuse_given
from torch_ops.kv_cache_append import kv_cache_append


class NewKeys(NamedTuple):
    """The tensors of an append in flash-attn's layout; `turned` is filled with q as it is rotated, in the op's."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None
    q: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    turned: Tensor | None = None


class AppendOptions(NamedTuple):
    """How the rotary embedding pairs columns."""

    interleaved: bool


def _append(t: NewKeys, interleaved: bool) -> Tensor:
    """Append, and return q as it is rotated, in the op's layout."""
    new, caches = (t.k.transpose(1, 2), t.v.transpose(1, 2)), (t.k_cache.transpose(1, 2), t.v_cache.transpose(1, 2))
    queries = None if t.q is None else t.q.transpose(1, 2)
    return kv_cache_append(*new, *caches, t.cache_seqlens, t.block_table, queries, t.cos, t.sin, interleaved)


def _plan_append(t: NewKeys, options: AppendOptions) -> Plan:
    def launch(t: NewKeys) -> None:
        out = _append(t, options.interleaved)
        if t.turned is not None:
            t.turned.copy_(out)

    return Plan(launch)


opaque_plan("_flash_attn_append", NewKeys, AppendOptions, writes=("k_cache", "v_cache", "turned"), plan=_plan_append)


def _append_compiled(t: NewKeys, interleaved: bool) -> Tensor:
    """Append in a graph, in which nothing copies a cache.

    If a kernel writes to a view of an input, such as a transposed cache, Inductor has it write to a clone of the input.
    An opaque op gets the input itself.
    """
    turned = None if t.q is None else torch.empty_like(t.q.transpose(1, 2))
    torch.ops.vk._flash_attn_append(*t[:9], turned, interleaved)
    return t.k if turned is None else turned


def _check_new_keys(
    op: str, q: Tensor, k: Tensor | None, v: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    cache_seqlens: object, moves: bool,
) -> None:  # fmt: skip
    """Before anything is written. `moves` says whether each query has an angle of its own, as flash-attn has it."""
    for name, tensor, other, beside in (
        ("k", k, "v", v), ("v", v, "k", k),
        ("rotary_cos", cos, "rotary_sin", sin), ("rotary_sin", sin, "rotary_cos", cos),
        ("rotary_cos", cos, "k", k),
    ):  # fmt: skip
        if tensor is not None and beside is None:
            refuse(op, name, f"None where {other} is", "a tensor")
    if k is None:
        return
    for name, tensor in (("k", k), ("v", v)):
        assert tensor is not None
        check_layout(op, name, tensor, "[B, S, H, D]")
    if cache_seqlens is None:
        refuse(op, "cache_seqlens", "lengths where k is given, to say where k goes", "None")
    if cos is None:
        return
    if q.shape[1] != k.shape[1]:
        refuse(op, "q", f"of {k.shape[1]} rows as k is, where rotary_cos is given", q.shape[1])
    if q.shape[1] > 1 and not moves:
        wanted = "None for several queries, unless causal or window_size gives each an angle of its own"
        refuse(op, "rotary_cos", wanted, "a tensor")


def _check_length(op: str, cache_seqlens: int, capacity: int, k: Tensor | None, cos: Tensor | None) -> int:
    """Check a length that the host knows: the keys, with the new ones, fit the cache and have angles."""
    length = check_int(op, "cache_seqlens", cache_seqlens)
    added = 0 if k is None else k.shape[1]
    if is_exporting():
        # The sizes that a program will run with are not known.
        return length
    if not 0 <= length <= capacity - added:
        refuse(op, "cache_seqlens", f"from 0 to {capacity} positions less {added} new keys", length)
    if added and cos is not None and length + added > cos.shape[0]:
        refuse(op, "the number of rows of rotary_cos", f"{length + added} or more", cos.shape[0])
    return length


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `flash_attn.flash_attn_with_kvcache` by `torch_ops.kv_cache_append` and `torch_ops.attention_decode`.

    New k and v are written to the caches in place, after the keys of each sequence. The queries, the last of each
    sequence, then attend to all keys. The function is for inference and has no gradient.

    Args:
        q: [B, Sq, H, D], fp16, bf16 or fp32, up to 16 queries of each sequence; D is a multiple of 8 up to 256.
        k_cache, v_cache: [B, S, Hk, D] in any strides with contiguous columns, or with block_table [num_blocks, page
            size, Hk, D], page size a multiple of 16. The dtype may differ from q's.
        k, v: [B, Sn, Hk, D], new keys and values. Default: none.
        rotary_cos, rotary_sin: [positions, R / 2], to rotate the first R columns of k and q by the angles of their
            positions. k and q then have the same number of rows, and several queries need causal or a window.
        cache_seqlens: int32 [B] on the device, or one integer for all: keys in the cache before the call. Never
            changed. An integer that leaves no room for k is refused; of a tensor, keys without room are dropped.
            Default: the capacity, without k.
        cache_batch_idx, cache_leftpad: must be None; there is no equivalent.
        block_table: int32 [B, blocks of a sequence]. Default: a contiguous cache.
        rotary_interleaved: whether pairs are columns 2i and 2i + 1 instead of i and i + R / 2.
        alibi_slopes: fp32 [H] or [B, H]. Default: none.
        num_splits: number of programs that share the keys of a sequence. Default: 0, chosen by shapes.
        return_softmax_lse: whether to return (out, softmax_lse). Default: False.

    The other arguments are those of `flash_attn_func`.

    Returns:
        out [B, Sq, H, D]; with return_softmax_lse also softmax_lse [B, H, Sq], fp32.

    Raises:
        ValueError: for a bad argument. The message names it, what was expected and what came. k and v may be in the
            caches by then, past the keys that count.
        NotImplementedError: if a gradient is taken.
    """
    op = "flash_attn_with_kvcache"
    refuse_given(op, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    check_layout(op, "q", q, "[B, S, H, D]")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_layout(op, name, cache, "[B, S, H, D]" if block_table is None else "[blocks, page size, H, D]")
    if not 0 <= q.shape[1] <= MOST_QUERIES:
        refuse(op, "q", f"of 0 to {MOST_QUERIES} queries of each sequence", q.shape[1])
    check_softmax_scale(op, softmax_scale)
    window = bounds_of(op, window_size)
    moves = causal or window != (-1, -1)
    _check_new_keys(op, q, k, v, rotary_cos, rotary_sin, cache_seqlens, moves)
    if block_table is not None:
        check_matrix(op, "block_table", block_table, "[B, pages]", (q.shape[0], None))
    capacity = k_cache.shape[1] if block_table is None else k_cache.shape[1] * block_table.shape[1]
    if cache_seqlens is None:
        cache_seqlens = capacity
    if not isinstance(cache_seqlens, Tensor):
        length = _check_length(op, cache_seqlens, capacity, k, rotary_cos)
        cache_seqlens = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    queries = q.transpose(1, 2)
    if k is not None and v is not None:
        is_graph = q.is_cuda and torch.compiler.is_compiling() and not is_exporting()
        append = _append_compiled if is_graph else _append
        turning = None if rotary_cos is None else q
        tensors = NewKeys(k, v, k_cache, v_cache, cache_seqlens, block_table, turning, rotary_cos, rotary_sin)
        turned = append(tensors, rotary_interleaved)
        queries = queries if rotary_cos is None else turned
        cache_seqlens = cache_seqlens + k.shape[1]
    result = attention_decode(
        queries, k_cache.transpose(1, 2), v_cache.transpose(1, 2), cache_seqlens, block_table, softmax_scale, causal,
        *window, softcap=softcap, alibi_slopes=alibi_slopes, num_splits=num_splits, return_lse=return_softmax_lse,
    )  # fmt: skip
    if isinstance(result, Tensor):
        return result.transpose(1, 2)
    out, lse = result
    return out.transpose(1, 2), lse


__all__ = ["flash_attn_with_kvcache"]
