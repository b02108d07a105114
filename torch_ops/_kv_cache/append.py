"""The plan of `vk::kv_cache_append`, what it refuses, and what it allocates."""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from csrc_free_ops.configs.pick import pick
from csrc_free_ops.kv_cache_append import _kv_cache_append_kernel
from torch_ops._core.checks import (
    capacity_of,
    check_dense,
    check_device,
    check_float,
    check_float32_or,
    check_head_dim,
    check_like,
    check_matrix,
    check_num_heads,
    check_vector,
    dtype_name,
    refuse,
)
from torch_ops._core.launch import are_settled, blocks_of, contiguous_like, current_gpu, with_columns
from torch_ops._core.plan import Bound, Plan, reference_plan
from torch_ops._core.registry import is_eager, runs_kernels, wrap_triton
from torch_ops._core.torch_private import statically_known_true
from torch_ops._kv_cache.cpu import append_cpu, rotary_dim
from torch_ops.settings import settings

# The limit of a grid's second dimension.
MOST_SEQUENCES = 65535
# Rows of a sequence are counted in 32 bits.
MOST_ROWS = 2**30
# Wanted and got, where both caches are one.
SHARED = "in memory of its own, since both are written", "in the memory of k_cache"


def check_shape(op: str, argument: str, tensor: Tensor, named: str, sizes: tuple[int | None, ...]) -> None:
    """Refuse tensors of other sizes, where sizes are given; `named` names them, as in "[B, H, S, D]"."""
    check_dense(op, argument, tensor)
    if tensor.dim() != len(sizes) or any(
        size not in (None, own) for size, own in zip(sizes, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        refuse(op, argument, f"of shape {named} = [{wanted}]", list(tensor.shape))


def _has_no_tokens(k: Tensor) -> bool:
    return statically_known_true(k.shape[0] * k.shape[2] == 0)


def check_count(op: str, argument: str, count: int, most: int, least: int = 0) -> None:
    """A graph of dynamic shape may not branch on a count; none that it has is 0."""
    if not isinstance(count, torch.SymInt) and not least <= count <= most:
        refuse(op, argument, f"from {least} to {most}", count)


def check_counts(op: str, argument: str, counts: Tensor, size: int, like_name: str, like: Tensor) -> None:
    check_vector(op, argument, counts, size)
    if counts.dtype != torch.int32:
        refuse(op, argument, "int32", dtype_name(counts.dtype))
    check_device(op, argument, counts, like_name, like)


def _check_caches(op: str, call: Any) -> None:
    k, v, k_cache, v_cache, block_table = call.k, call.v, call.k_cache, call.v_cache, call.block_table
    check_shape(op, "k", k, "[B, Hk, Sn, D]", (None,) * 4)
    batch, num_heads, tokens, head_dim = k.shape
    check_float(op, "k", k)
    check_head_dim(op, "k", head_dim)
    check_num_heads(op, "k", num_heads)
    check_count(op, "the number of sequences of k", batch, MOST_SEQUENCES)
    check_count(op, "the number of tokens of k", tokens, MOST_ROWS // num_heads)
    check_shape(op, "v", v, "[B, Hk, Sn, D]", tuple(k.shape))
    check_like(op, "v", v, "k", k)
    named, pages = ("[B, Hk, S, D]", batch) if block_table is None else ("[num_pages, Hk, page_size, D]", None)
    check_shape(op, "k_cache", k_cache, named, (pages, num_heads, None, head_dim))
    check_float(op, "k_cache", k_cache)
    check_device(op, "k_cache", k_cache, "k", k)
    check_shape(op, "v_cache", v_cache, named, tuple(k_cache.shape))
    check_like(op, "v_cache", v_cache, "k_cache", k_cache)
    if v_cache is k_cache:
        refuse(op, "v_cache", *SHARED)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(3) != 1:
            refuse(op, name, "of contiguous columns, since it is written in its place", f"strides {cache.stride()}")
        places = zip(cache.shape, cache.stride(), strict=True)
        if any(isinstance(stride, int) and stride == 0 and size != 1 for size, stride in places):
            refuse(op, name, "of a place for each of its elements, not expanded", f"strides {cache.stride()}")
    check_count(op, f"the number of {'positions' if block_table is None else 'rows of a page'} of k_cache",
                k_cache.shape[2], MOST_ROWS)  # fmt: skip
    if block_table is None:
        return
    check_count(op, "the number of pages of k_cache", k_cache.shape[0], MOST_ROWS)
    check_matrix(op, "block_table", block_table, "[B, max_pages]", (batch, None))
    if block_table.dtype != torch.int32:
        refuse(op, "block_table", "int32", dtype_name(block_table.dtype))
    check_device(op, "block_table", block_table, "k", k)
    check_count(op, "the number of columns of block_table", block_table.shape[1], MOST_ROWS)


def _check_rotation(op: str, k: Tensor, q: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> None:
    if cos is None or sin is None:
        for name, tensor, others in (("cos", cos, "sin is"), ("sin", sin, "cos is"), ("q", q, "cos and sin are")):
            if tensor is not None:
                refuse(op, name, f"None where {others}: it is for the rotary embedding", "a tensor")
        return
    batch, _, tokens, head_dim = k.shape
    for name, table in (("cos", cos), ("sin", sin)):
        check_matrix(op, name, table, "[max_positions, columns]", (None, None))
        columns = table.shape[1]
        if not (columns == head_dim or 1 <= columns <= head_dim // 2):
            wanted = f"of {head_dim} columns or, for pairs, 1 to {head_dim // 2}"
            refuse(op, name, wanted, columns)
        check_float32_or(op, name, table, k.dtype, "k")
        check_device(op, name, table, "k", k)
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        got = f"{list(sin.shape)} in {dtype_name(sin.dtype)}"
        refuse(op, "sin", f"{list(cos.shape)} in {dtype_name(cos.dtype)} as cos is", got)
    check_count(op, "the number of rows of cos", cos.shape[0], MOST_ROWS, least=0 if _has_no_tokens(k) else 1)
    if q is not None:
        check_shape(op, "q", q, "[B, H, Sn, D]", (batch, None, tokens, head_dim))
        check_like(op, "q", q, "k", k)
        check_num_heads(op, "q", q.shape[1])
        check_count(op, "the number of tokens of q", tokens, MOST_ROWS // q.shape[1])


def check_append(op: str, call: Any) -> None:
    k = call.k
    _check_caches(op, call)
    check_counts(op, "cache_seqlens", call.cache_seqlens, k.shape[0], "k", k)
    if call.lengths is not None:
        check_counts(op, "lengths", call.lengths, k.shape[0], "k", k)
    _check_rotation(op, k, call.q, call.cos, call.sin)


def check_append_values(op: str, call: Any) -> None:
    """Refuse what only the device knows; costs a synchronisation."""
    k, k_cache, cache_seqlens, block_table = call.k, call.k_cache, call.cache_seqlens, call.block_table
    cos, lengths = call.cos, call.lengths
    tokens, page_size = k.shape[2], k_cache.shape[2]
    capacity = capacity_of(k_cache, block_table)
    counts = [tokens] * k.shape[0] if lengths is None else lengths.tolist()
    pages = None if block_table is None else block_table.tolist()
    for index, (before, count) in enumerate(zip(cache_seqlens.tolist(), counts, strict=True)):
        if not 0 <= count <= tokens:
            refuse(op, f"lengths[{index}]", f"from 0 to the {tokens} tokens of k", count)
        if not 0 <= before <= capacity - count:
            refuse(op, f"cache_seqlens[{index}]", f"from 0 to {capacity} positions less {count} new tokens", before)
        if cos is not None and count and before + count > cos.shape[0]:
            refuse(op, "the number of rows of cos", f"{before + count} or more for sequence {index}", cos.shape[0])
        if pages is not None and count:
            for column in range(before // page_size, (before + count - 1) // page_size + 1):
                page = pages[index][column]
                if not 0 <= page < k_cache.shape[0]:
                    wanted = f"one of the {k_cache.shape[0]} pages of k_cache"
                    refuse(op, f"block_table[{index}, {column}]", wanted, page)


def new_queries(k: Tensor, q: Tensor | None) -> Tensor:
    """In q's memory order but for columns that are not contiguous; [0] where there is no q."""
    if q is None:
        return k.new_empty((0,))
    out = torch.empty_like(q)
    return out if out.stride(3) == 1 else contiguous_like(q)


def _stride(tensor: Tensor, dimension: int) -> int:
    """As `with_columns(tensor)` has it; 0 of a single row, head or sequence, by whose stride nothing is reached."""
    if tensor.shape[dimension] == 1:
        return 0
    return tensor.stride(dimension) if tensor.stride(-1) == 1 else math.prod(tensor.shape[dimension + 1 :])


class Append(NamedTuple):
    """The caches are written in their place, and out is filled with q as it is rotated."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None
    q: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    lengths: Tensor | None
    out: Tensor


def plan_append(t: Append, interleaved: bool) -> Plan:
    plan = _plan_append(t, interleaved)
    if is_eager():
        launch = plan.launch

        def launch_apart(t: Append) -> None:
            _refuse_shared_memory(t.k_cache, t.v_cache)
            launch(t)

        plan.launch = launch_apart
    return plan


def _refuse_shared_memory(k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuse caches that begin at one address. Metadata does not show it, and fake tensors have no address."""
    if k_cache.data_ptr() == v_cache.data_ptr() and k_cache.numel():
        refuse("kv_cache_append", "v_cache", *SHARED)


def _plan_append(t: Append, interleaved: bool) -> Plan:
    k, q, cos, sin, block_table = t.k, t.q, t.cos, t.sin, t.block_table
    if _has_no_tokens(k):
        return Plan(lambda t: None, why="there are no tokens")
    # The interpreter has neither bf16 nor fp64, in k or in its cache.
    if not (runs_kernels(k) and runs_kernels(t.k_cache)):
        return reference_plan(partial(append_cpu, interleaved), k)
    batch, num_k_heads, tokens, head_dim = k.shape
    name = "kv_cache_append"
    launch, source = pick(
        name, current_gpu(), dtype_name(k.dtype), k.dtype.itemsize, head_dim, False, None, settings.rows
    )
    num_heads = 0 if q is None else q.shape[1]
    moved = (k, t.v, k if q is None else q, k if q is None else t.out, t.k_cache, t.v_cache)
    strides = [_stride(tensor, dimension) for tensor in moved for dimension in (0, 1)]
    rows = [_stride(tensor, 2) for tensor in moved]
    # Strides that follow from a batch or a length come at run time; as constants each would cost a build.
    settled = are_settled([row or head_dim for row in rows], [tensor.shape[1] for tensor in moved], head_dim)
    stride_unit = 8 if all(stride % 8 == 0 for stride in (*strides, *(() if settled else rows))) else 1
    scalars = (
        *(stride // stride_unit for stride in strides), *(0 if settled else row // stride_unit for row in rows),
        0 if block_table is None else _stride(block_table, 0),
        tokens, capacity_of(t.k_cache, block_table), t.k_cache.shape[0], 1 if cos is None else cos.shape[0],
    )  # fmt: skip
    constants = {
        **{
            f"STRIDE_{letters}S": row if settled else -1
            for letters, row in zip(("K", "V", "Q", "O", "KC", "VC"), rows, strict=True)
        },
        "STRIDE_CS": 0 if cos is None else _stride(cos, 0), "STRIDE_SS": 0 if sin is None else _stride(sin, 0),
        "STRIDE_UNIT": stride_unit,
        "NUM_HEADS": num_heads, "NUM_K_HEADS": num_k_heads, "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim(cos, head_dim), "PAGE_SIZE": 0 if block_table is None else t.k_cache.shape[2],
        "SHARED_ANGLES": cos is None or cos.shape[1] != head_dim, "INTERLEAVED": interleaved,
        "HAS_LENGTHS": t.lengths is not None, **blocks_of(launch),
    }  # fmt: skip
    grid = (2 * cdiv(num_k_heads * tokens, launch.block_m) + cdiv(num_heads * tokens, launch.block_m), batch)
    bound = Bound(wrap_triton(_kv_cache_append_kernel), grid, scalars, constants)

    def launch_append(t: Append) -> None:
        # Absent tensors are not read, so any tensor stands in for them.
        k, cache_seqlens = with_columns(t.k), t.cache_seqlens.contiguous()
        q, cos, sin = (k if tensor is None else with_columns(tensor) for tensor in (t.q, t.cos, t.sin))
        lengths = cache_seqlens if t.lengths is None else t.lengths.contiguous()
        table = cache_seqlens if t.block_table is None else with_columns(t.block_table)
        bound(k, with_columns(t.v), q, cos, sin, cache_seqlens, lengths, table, t.k_cache, t.v_cache, t.out)

    return Plan(launch_append, {name: (launch, source)}, why="it is the only one")
