"""The launcher of attention over a cache of keys.

`plan_decode` looks at metadata and options alone and returns launch(q, ..., out, lse), which makes the workspaces of
split calls and launches up to three kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from csrc_free_ops.attention.portable.decode import _attention_decode_combine_kernel, _attention_decode_kernel
from csrc_free_ops.configs.attention import covered_width, split_head_dim
from csrc_free_ops.configs.decode import INVARIANT_KEYS, decode_splits
from csrc_free_ops.configs.pick import pick
from csrc_free_ops.configs.rows import Gpu, Launch
from csrc_free_ops.tiles.steps import SINKS
from torch_ops._attention.decode_calls import MOST_QUERIES, out_strides
from torch_ops._attention.scores import Scores
from torch_ops._core.checks import capacity_of, dtype_name
from torch_ops._core.device import INTERPRETED_GPU, gpu
from torch_ops._core.launch import Relaunch, can_overlap, precision_of, readable, with_columns
from torch_ops._core.registry import INTERPRET, wrap_triton
from torch_ops.settings import settings


def are_known(*sizes: int) -> bool:
    """Whether these are plain numbers; graphs of dynamic shape have symbols, which they may not branch on."""
    return not any(isinstance(size, torch.SymInt) for size in sizes)


def _gpu() -> Gpu:
    return INTERPRETED_GPU if INTERPRET else gpu()


@dataclass(frozen=True)
class Share:
    """A launch of the kernel that attends, to the cache or to what is before it.

    `samples` sequences share the keys of each of `groups`; their query rows are cut into tiles of `rows`, and the keys
    that a tile sees are split among `splits` programs.
    """

    launch: Launch
    source: str
    groups: int
    samples: int
    rows: int
    splits: int


def _share(
    kernel: str, q: Tensor, keys: Tensor, groups: int, samples: int, capacity: int, num_splits: int,
    batch_invariant: bool,
) -> Share:  # fmt: skip
    # What decides about a sequence's bits must then be of that sequence alone.
    length = capacity if are_known(capacity) and not batch_invariant else None
    launch, source = pick(
        kernel, _gpu(), dtype_name(q.dtype), q.dtype.itemsize, q.shape[3], False, length, settings.rows
    )
    if keys.dtype.itemsize > q.dtype.itemsize:
        # Launches are for keys of q's dtype; shared memory has room for as many bytes.
        launch = replace(launch, block_n=max(16, launch.block_n * q.dtype.itemsize // keys.dtype.itemsize))
    rows = launch.block_m
    # Numbers of heads are constants of the kernel, so a trace takes them for such in any case.
    num_k_heads, group = int(keys.shape[1]), int(q.shape[1] // keys.shape[1])
    most = samples * (q.shape[2] if are_known(q.shape[2]) else MOST_QUERIES) * group
    if are_known(most) and not (batch_invariant and kernel.endswith("_shared")):
        rows = min(rows, max(16, next_power_of_2(most)))
    if 16 < rows and not kernel.endswith("_shared"):
        # Beside twice the scores, registers do not hold more.
        launch = replace(launch, block_n=min(launch.block_n, 64))
    if batch_invariant:
        # Of symbols one more than there may be, so that it is known to be none of 0 and 1.
        splits = max(1, cdiv(capacity, INVARIANT_KEYS)) if are_known(capacity) else capacity // INVARIANT_KEYS + 2
    elif num_splits:
        splits = num_splits
    else:
        programs = groups * num_k_heads * cdiv(most, rows) if are_known(groups, most) else None
        row_bytes = 2 * covered_width(q.shape[3], q.dtype.itemsize) * keys.dtype.itemsize
        splits = decode_splits(_gpu(), launch, programs, capacity if are_known(capacity) else None, row_bytes)
    return Share(launch, source, groups, samples, rows, splits)


def shares_of(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, prefix_k: Tensor | None, num_splits: int,
    batch_invariant: bool,
) -> dict[str, Share]:  # fmt: skip
    """By kernel, as launch rows have it: that of the prefix first if there is one, that of the cache last.

    Where a program sees all keys of a row, its launch is that of "attention_decode", else of "attention_decode_split".
    """
    shares: dict[str, Share] = {}
    if prefix_k is not None:
        prefixes = prefix_k.shape[0]
        shares["attention_decode_shared"] = _share(
            "attention_decode_shared", q, prefix_k, prefixes, q.shape[0] // prefixes, prefix_k.shape[2], num_splits,
            batch_invariant,
        )  # fmt: skip
    capacity = capacity_of(k_cache, block_table)
    for kernel in ("attention_decode", "attention_decode_split"):
        own = _share(kernel, q, k_cache, q.shape[0], 1, capacity, num_splits, batch_invariant)
        # By splits that follow from the first launch.
        num_splits = 0 if batch_invariant else own.splits
        if not shares and not batch_invariant and are_known(own.splits) and own.splits == 1:
            break
    return {**shares, kernel: own}


def combining(width: int) -> Launch:
    """Of the second kernel: a row, and so many warps that registers hold the parts that are under way at once."""
    return Launch(1, width, next_power_of_2(cdiv(width, 96)), 1)


def _key_strides(k: Tensor, v: Tensor) -> tuple[int, tuple[int, ...]]:
    """As `head_strides` of packed tensors: UNIT, and in it what is between blocks and between heads of k and of v."""
    strides = [tensor.stride(dim) for tensor in (k, v) for dim in (0, 1)]
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    return unit, tuple(stride // unit for stride in strides)


def plan_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None,
    alibi_slopes: Tensor | None, sinks: Tensor | None,
    prefix_k: Tensor | None, prefix_v: Tensor | None, prefix_seqlens: Tensor | None,
    scores: Scores, num_splits: int, batch_invariant: bool,
) -> Callable[..., None]:  # fmt: skip
    batch, num_heads, queries, head_dim = q.shape
    total_rows = batch * num_heads * queries
    main, tail = split_head_dim(head_dim, q.dtype.itemsize)
    columns = {"HEAD_DIM": head_dim, "MAIN": main, "TAIL": tail}
    overlap = can_overlap()
    early = {"launch_pdl": True} if overlap else {}
    shares = shares_of(q, k_cache, block_table, prefix_k, num_splits, batch_invariant)
    own, before = list(shares.values())[-1], shares.get("attention_decode_shared")
    splits = own.splits + (0 if before is None else before.splits)
    # Whether one program sees all keys of a row; symbols may not be branched on.
    whole = before is None and are_known(splits) and splits == 1
    strides = out_strides(q)[:3]
    q_strides = q.stride()[:3] if readable(q) else (num_heads * queries * head_dim, queries * head_dim, head_dim)
    slope_stride = num_heads if scores.alibi == 2 else 0

    def launcher(share: Share, k: Tensor, v: Tensor, shared: bool, first_split: int) -> Callable[..., None]:
        group = num_heads // k.shape[1]
        table = None if shared else block_table
        unit, key_strides = _key_strides(k, v)
        tiles = (share.samples * queries * group + share.rows - 1) // share.rows
        grid = (share.groups * share.splits * k.shape[1] * tiles,)
        scalars = (
            *q_strides, *key_strides, 0 if table is None else table.shape[1], slope_stride, *strides,
            share.samples, queries, capacity_of(k_cache, block_table), k.shape[2] if shared else 0, k.shape[0],
            share.splits, first_split, total_rows, scores.scale, scores.softcap, *scores.bounds(),
        )  # fmt: skip
        constants = {
            "STRIDE_KS": k.stride(2), "STRIDE_VS": v.stride(2), "UNIT": unit, **columns,
            "NUM_K_HEADS": k.shape[1], "GROUP": group, "HAS_LEFT": scores.left >= 0,
            # A single query is the last, behind which nothing is.
            "HAS_RIGHT": scores.right >= 0 and not shared and not (are_known(queries) and queries == 1),
            "STEPS": scores.steps if whole else scores.steps & ~SINKS.value,
            "SHARED": shared, "HAS_KEY_LENGTHS": shared and prefix_seqlens is not None, "PARTIAL": not whole,
            "PAGE_SIZE": 0 if table is None else k.shape[2], "SPLIT_KEYS": INVARIANT_KEYS if batch_invariant else 0,
            "OVERLAPS": overlap, "BLOCK_M": share.rows, "BLOCK_N": share.launch.block_n,
            "num_warps": share.launch.num_warps, "num_stages": share.launch.num_stages, **early,
        }  # fmt: skip
        relaunch = Relaunch(grid, scalars)

        def launch(precision: str, *tensors: Tensor) -> None:
            if not relaunch(precision, tensors):
                options = {"PRECISION": precision, **constants}
                compiled = wrap_triton(_attention_decode_kernel)[grid](*tensors, *scalars, **options)
                relaunch.keep(precision, tensors, options, compiled)

        return launch

    attend_before = None
    if before is not None and prefix_k is not None and prefix_v is not None:
        attend_before = launcher(before, prefix_k, prefix_v, True, 0)
    attend = launcher(own, k_cache, v_cache, False, 0 if before is None else before.splits)
    combine_grid = (batch, num_heads, queries)
    combine = combining(covered_width(head_dim, q.dtype.itemsize))
    combine_scalars = (*strides, total_rows, splits)
    combine_constants = {
        **columns, "NATURAL": q.dtype is torch.float32, "STEPS": scores.steps,
        "OVERLAPS": overlap, "num_warps": combine.num_warps, "num_stages": combine.num_stages, **early,
    }  # fmt: skip
    relaunch_combine = Relaunch(combine_grid, combine_scalars)
    vectors = (cache_seqlens, block_table, alibi_slopes, sinks, prefix_seqlens)
    ready = readable(q) and all(tensor is None or tensor.is_contiguous() for tensor in vectors)

    def launch_decode(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None,
        alibi_slopes: Tensor | None, sinks: Tensor | None,
        prefix_k: Tensor | None, prefix_v: Tensor | None, prefix_seqlens: Tensor | None, out: Tensor, lse: Tensor,
    ) -> None:  # fmt: skip
        vectors = (cache_seqlens, block_table, alibi_slopes, sinks, prefix_seqlens)
        # Kernels want a tensor in every place, and read what is there only if it was given.
        lengths, table, slopes, sinks, key_lengths = (cache_seqlens if each is None else each for each in vectors)
        if not ready:
            q = with_columns(q)
            lengths, table, slopes, sinks, key_lengths = (
                each.contiguous() for each in (lengths, table, slopes, sinks, key_lengths)
            )
        precision = precision_of(q)
        parts, exponents = out, lse
        if not whole:
            parts = q.new_empty((splits, total_rows, head_dim), dtype=torch.float32)
            exponents = q.new_empty((splits, total_rows), dtype=torch.float32)
        if attend_before is not None:
            attend_before(
                precision, q, prefix_k, prefix_v, lengths, key_lengths, lengths, slopes, sinks, parts, exponents
            )
        attend(precision, q, k_cache, v_cache, lengths, lengths, table, slopes, sinks, parts, exponents)
        if whole:
            return
        tensors = (parts, exponents, sinks, out, lse)
        if not relaunch_combine(None, tensors):
            compiled = wrap_triton(_attention_decode_combine_kernel)[combine_grid](
                *tensors, *combine_scalars, **combine_constants
            )
            relaunch_combine.keep(None, tensors, combine_constants, compiled)

    return launch_decode
