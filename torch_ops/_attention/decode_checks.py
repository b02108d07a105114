"""Checks and outputs of attention over a KV cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ops._attention.checks import check_options, check_score_tensors, lse_dtype
from torch_ops._core.checks import (
    capacity_of,
    check_dense,
    check_device,
    check_float,
    check_head_dim,
    check_num_heads,
    check_vector,
    dtype_name,
    refuse,
)

MOST_QUERIES = 16
PAGE_UNIT = 16
MOST_SPLITS = 1024


def check_decode(op: str, call: Any) -> None:
    q, k_cache, v_cache, cache_seqlens, block_table = call[:5]
    _check_four(op, "q", q, "[B, H, Sq, D]")
    check_float(op, "q", q)
    batch, num_heads, queries, head_dim = q.shape
    check_num_heads(op, "q", num_heads)
    check_head_dim(op, "q", head_dim)
    if not 0 <= queries <= MOST_QUERIES:
        refuse(op, "the number of queries of q", f"from 0 to {MOST_QUERIES}", queries)
    layout = "[B, Hk, S, D]" if block_table is None else "[pages, Hk, page size, D]"
    _check_keys(op, q, "k_cache", k_cache, "v_cache", v_cache, layout)
    _check_lengths(op, "cache_seqlens", cache_seqlens, batch, q)
    if block_table is None:
        if k_cache.shape[0] != batch:
            refuse(op, "k_cache", f"of {batch} sequences as q is, unless block_table is given", k_cache.shape[0])
    else:
        check_dense(op, "block_table", block_table)
        _check_int32(op, "block_table", block_table)
        if block_table.dim() != 2 or block_table.shape[0] != batch:
            refuse(op, "block_table", f"of shape [B, pages] = [{batch}, any]", list(block_table.shape))
        check_device(op, "block_table", block_table, "q", q)
        if k_cache.shape[0] == 0:
            refuse(op, "k_cache", "of one page or more", list(k_cache.shape))
        if k_cache.shape[2] == 0 or k_cache.shape[2] % PAGE_UNIT != 0:
            refuse(op, "the page size of k_cache", f"a multiple of {PAGE_UNIT}", k_cache.shape[2])
    check_options(op, call)
    check_score_tensors(op, call, batch)
    _check_prefix(op, q, k_cache, call.prefix_k, call.prefix_v, call.prefix_seqlens)
    num_splits = call.num_splits
    if not 0 <= num_splits <= MOST_SPLITS:
        refuse(op, "num_splits", f"0 (chosen) or up to {MOST_SPLITS}", num_splits)
    if call.batch_invariant and num_splits:
        refuse(op, "num_splits", "0 with batch_invariant, which has splits of its own", num_splits)


def _check_four(op: str, argument: str, tensor: Tensor, layout: str) -> None:
    check_dense(op, argument, tensor)
    if tensor.dim() != 4:
        refuse(op, argument, f"of shape {layout}", list(tensor.shape))


def _check_int32(op: str, argument: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int32:
        refuse(op, argument, "int32", dtype_name(tensor.dtype))


def _check_lengths(op: str, argument: str, lengths: Tensor, size: int, q: Tensor) -> None:
    check_vector(op, argument, lengths, size)
    _check_int32(op, argument, lengths)
    check_device(op, argument, lengths, "q", q)


def _check_keys(op: str, q: Tensor, k_name: str, k: Tensor, v_name: str, v: Tensor, layout: str) -> None:
    for name, tensor in ((k_name, k), (v_name, v)):
        _check_four(op, name, tensor, layout)
        check_float(op, name, tensor)
        check_device(op, name, tensor, "q", q)
        if tensor.shape[3] != q.shape[3]:
            refuse(op, f"the head dimension of {name}", f"{q.shape[3]} as that of q is", tensor.shape[3])
        # A copy of a cache would cost more than the attention to it.
        if tensor.stride(3) != 1:
            refuse(op, name, "of contiguous columns", f"strides {list(tensor.stride())}")
    if v.shape != k.shape:
        refuse(op, v_name, f"of shape {list(k.shape)} as {k_name} is", list(v.shape))
    if v.dtype != k.dtype:
        refuse(op, v_name, f"{dtype_name(k.dtype)} as {k_name} is", dtype_name(v.dtype))
    if (q.dtype is torch.float64) != (k.dtype is torch.float64):
        refuse(op, k_name, f"float64 exactly where q is, which is {dtype_name(q.dtype)}", dtype_name(k.dtype))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        refuse(op, f"the number of heads of {k_name}", f"a divisor of the {q.shape[1]} heads of q", k.shape[1])


def _check_prefix(
    op: str, q: Tensor, k_cache: Tensor, prefix_k: Tensor | None, prefix_v: Tensor | None, prefix_seqlens: Tensor | None
) -> None:
    if prefix_k is None or prefix_v is None:
        for name, tensor in (("prefix_k", prefix_k), ("prefix_v", prefix_v), ("prefix_seqlens", prefix_seqlens)):
            if tensor is not None:
                other = "prefix_v" if name == "prefix_k" else "prefix_k"
                refuse(op, name, f"None where {other} is", "a tensor")
        return
    _check_keys(op, q, "prefix_k", prefix_k, "prefix_v", prefix_v, "[P, Hk, Sp, D]")
    if prefix_k.dtype != k_cache.dtype:
        refuse(op, "prefix_k", f"{dtype_name(k_cache.dtype)} as k_cache is", dtype_name(prefix_k.dtype))
    if prefix_k.shape[1] != k_cache.shape[1]:
        refuse(op, "the number of heads of prefix_k", f"{k_cache.shape[1]} as of k_cache", prefix_k.shape[1])
    if prefix_k.shape[0] == 0 or q.shape[0] % prefix_k.shape[0] != 0:
        refuse(op, "the number of prefixes of prefix_k", f"a divisor of the {q.shape[0]} sequences", prefix_k.shape[0])
    if prefix_seqlens is not None:
        _check_lengths(op, "prefix_seqlens", prefix_seqlens, prefix_k.shape[0], q)


def check_decode_values(op: str, call: Any) -> None:
    """Refuse what only the device knows.

    Pages that lie before every query's window are not looked at: they may have been given to others.
    """
    k_cache, block_table, window_left = call.k_cache, call.block_table, call.window_left
    prefix_k, prefix_seqlens, num_queries = call.prefix_k, call.prefix_seqlens, call.q.shape[2]
    lengths = call.cache_seqlens.tolist()
    _check_within(op, "cache_seqlens", lengths, capacity_of(k_cache, block_table))
    if prefix_k is not None and prefix_seqlens is not None:
        _check_within(op, "prefix_seqlens", prefix_seqlens.tolist(), prefix_k.shape[2])
    if block_table is not None:
        page_size, last = k_cache.shape[2], k_cache.shape[0] - 1
        for row, (pages, length) in enumerate(zip(block_table.tolist(), lengths, strict=True)):
            first = max(length - num_queries - window_left, 0) // page_size if window_left >= 0 else 0
            for column in range(first, (length + page_size - 1) // page_size):
                if not 0 <= pages[column] <= last:
                    refuse(op, f"block_table[{row}, {column}]", f"from 0 to {last}", pages[column])


def _check_within(op: str, argument: str, values: Sequence[int], most: int) -> None:
    for index, value in enumerate(values):
        if not 0 <= value <= most:
            refuse(op, f"{argument}[{index}]", f"from 0 to {most}, the keys there is room for", value)


def out_strides(q: Tensor) -> tuple[int, ...]:
    """Strides of out: dense, columns innermost, the other dimensions in q's order."""
    strides = [1, 1, 1, 1]
    step = q.shape[3]
    for dim in sorted((2, 1, 0), key=lambda dim: q.stride(dim)):
        strides[dim] = step
        step = step * q.shape[dim]
    return tuple(strides)


def decode_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty_strided(q.shape, out_strides(q)), q.new_empty(q.shape[:3], dtype=lse_dtype(q))
