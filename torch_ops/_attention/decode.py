"""Attention over a KV cache: which launches a call takes, among how many programs keys are split, and the plan."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from csrc_free_ops.attention.portable.decode import _attention_decode_combine_kernel, _attention_decode_kernel
from csrc_free_ops.configs.attention import covered_width, split_head_dim
from csrc_free_ops.configs.decode import INVARIANT_KEYS, decode_splits
from csrc_free_ops.configs.pick import pick
from csrc_free_ops.configs.rows import Config
from csrc_free_ops.tiles.score_mod import SINKS
from torch_ops._attention.decode_checks import MOST_QUERIES, out_strides
from torch_ops._attention.decode_cpu import decode_cpu
from torch_ops._attention.options import AttentionOptions
from torch_ops._core.checks import capacity_of, dtype_name
from torch_ops._core.launch import WIDE_STRIDE, can_overlap, current_gpu, precision_of, readable, with_columns
from torch_ops._core.plan import Bound, Plan, reference_plan
from torch_ops._core.registry import runs_kernels, wrap_triton
from torch_ops._core.torch_private import statically_known_true
from torch_ops.settings import settings


def are_known(*sizes: int) -> bool:
    """Whether these are plain numbers; graphs of dynamic shape have symbols, which they may not branch on."""
    return not any(isinstance(size, torch.SymInt) for size in sizes)


@dataclass(frozen=True)
class Share:
    """A launch of the kernel that attends, to the cache or to what is before it.

    `samples` sequences share the keys of each of `groups`. Their query rows are cut into tiles of `rows`. `splits`
    programs share the keys that a tile sees.
    """

    launch: Config
    source: str
    is_prefix: bool
    groups: int
    samples: int
    rows: int
    splits: int


def _share(kernel: str, call: Any, keys: Tensor, groups: int, capacity: int, num_splits: int) -> Share:
    q, batch_invariant, is_prefix = call.q, call.batch_invariant, kernel.endswith("_shared")
    samples = q.shape[0] // groups if is_prefix else 1
    # Only properties of the sequence itself may then decide its bits.
    length = capacity if are_known(capacity) and not batch_invariant else None
    launch, source = pick(
        kernel, current_gpu(), dtype_name(q.dtype), q.dtype.itemsize, q.shape[3], False, length, settings.rows
    )
    if keys.dtype.itemsize > q.dtype.itemsize:
        # Launches are for keys of q's dtype; shared memory has room for as many bytes.
        launch = replace(launch, block_n=max(16, launch.block_n * q.dtype.itemsize // keys.dtype.itemsize))
    rows = launch.block_m
    # Numbers of heads are constants of the kernel, so a trace takes them for such in any case.
    num_k_heads, group = int(keys.shape[1]), int(q.shape[1] // keys.shape[1])
    most = samples * (q.shape[2] if are_known(q.shape[2]) else MOST_QUERIES) * group
    if are_known(most) and not (batch_invariant and is_prefix):
        rows = min(rows, max(16, next_power_of_2(most)))
    if 16 < rows and not is_prefix:
        # Registers hold no more than this beside twice the scores.
        launch = replace(launch, block_n=min(launch.block_n, 64))
    if batch_invariant:
        # A symbolic count is one too large, so that the compiler knows that it is neither 0 nor 1.
        splits = max(1, cdiv(capacity, INVARIANT_KEYS)) if are_known(capacity) else capacity // INVARIANT_KEYS + 2
    elif num_splits:
        splits = num_splits
    else:
        programs = groups * num_k_heads * cdiv(most, rows) if are_known(groups, most) else None
        row_bytes = 2 * covered_width(q.shape[3], q.dtype.itemsize) * keys.dtype.itemsize
        splits = decode_splits(current_gpu(), launch, programs, capacity if are_known(capacity) else None, row_bytes)
    return Share(launch, source, is_prefix, groups, samples, rows, splits)


def shares_of(call: Any) -> dict[str, Share]:
    """Keys: kernels, as launch rows name them; the prefix's kernel comes first, the cache's last.

    Where a program sees all keys of a row, its launch is that of "attention_decode", else of "attention_decode_split".
    """
    shares: dict[str, Share] = {}
    num_splits, k_cache = call.num_splits, call.k_cache
    if call.prefix_k is not None:
        name, prefix_k = "attention_decode_shared", call.prefix_k
        shares[name] = _share(name, call, prefix_k, prefix_k.shape[0], prefix_k.shape[2], num_splits)
    capacity = capacity_of(k_cache, call.block_table)
    for kernel in ("attention_decode", "attention_decode_split"):
        own = _share(kernel, call, k_cache, call.q.shape[0], capacity, num_splits)
        # The number of splits follows from the first launch.
        num_splits = 0 if call.batch_invariant else own.splits
        if not shares and not call.batch_invariant and are_known(own.splits) and own.splits == 1:
            break
    return {**shares, kernel: own}


def combining(width: int) -> Config:
    """Config of the second kernel: one row, and enough warps to hold the parts under way in registers."""
    return Config(1, width, next_power_of_2(cdiv(width, 96)), 1)


def _key_strides(k: Tensor, v: Tensor) -> tuple[int, tuple[int, ...], tuple[int, int]]:
    """STRIDE_UNIT; in it strides of blocks and of heads of k and v, and between keys; and constants of the latter.

    Keys of one head, or of all heads, follow each other in most caches, and their stride is a constant. Any other
    follows from a batch, and comes at run time (`row_step` of csrc_free_ops/tiles/rows.py).
    """
    strides, rows = [tensor.stride(dim) for tensor in (k, v) for dim in (0, 1)], (k.stride(2), v.stride(2))
    settled = all(not isinstance(row, torch.SymInt) and row in (k.shape[3], k.shape[1] * k.shape[3]) for row in rows)
    unit = 8 if all(stride % 8 == 0 for stride in (*strides, *(() if settled else rows))) else 1
    numbers = tuple([stride // unit for stride in strides])
    if settled:
        return unit, (*numbers, 0, 0), rows
    wide = any(isinstance(row, torch.SymInt) or row > WIDE_STRIDE for row in rows)
    return unit, (*numbers, *[row // unit for row in rows]), (-1, -1) if wide else (0, 0)


class Decode(NamedTuple):
    """out and lse are filled."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    prefix_k: Tensor | None
    prefix_v: Tensor | None
    prefix_seqlens: Tensor | None
    out: Tensor
    lse: Tensor

    @staticmethod
    def of(call: Any, made: tuple[Tensor, Tensor]) -> "Decode":
        return Decode._make((*call[:5], *call[10:15], *made))


def plan_decode(t: Decode, call: Any) -> Plan:
    """Plan up to three kernels: keys of a prefix, keys of the cache, and adding up the parts of split keys."""
    options = AttentionOptions.of(call)
    if statically_known_true(t.q.numel() == 0):
        return Plan(lambda t: None, why="there are no queries")
    if not runs_kernels(t.q):
        return reference_plan(lambda t: decode_cpu(options, t), t.q)
    q = t.q
    batch, num_heads, queries, head_dim = q.shape
    total_rows = batch * num_heads * queries
    shares = shares_of(call)
    own, before = list(shares.values())[-1], shares.get("attention_decode_shared")
    splits = own.splits + (0 if before is None else before.splits)
    # Whether one program sees all keys of a row; symbols may not be branched on.
    whole = before is None and are_known(splits) and splits == 1
    attend_before = None if before is None else _bind_attend(t, call, before, whole, 0)
    attend = _bind_attend(t, call, own, whole, 0 if before is None else before.splits)
    combine = combining(covered_width(head_dim, q.dtype.itemsize))
    overlap = can_overlap()
    combine_constants = {
        **_columns(q), "NATURAL": q.dtype is torch.float32, "SCORE_MODS": options.score_mods, "OVERLAPS": overlap,
        "num_warps": combine.num_warps, "num_stages": combine.num_stages, **({"launch_pdl": True} if overlap else {}),
    }  # fmt: skip
    add_up = Bound(
        wrap_triton(_attention_decode_combine_kernel), (batch, num_heads, queries),
        (*out_strides(q)[:3], total_rows, splits), combine_constants,
    )  # fmt: skip
    ready = readable(q) and all(x is None or x.is_contiguous() for x in _vectors(t))

    def launch_decode(t: Decode) -> None:
        q, out, lse = t.q, t.out, t.lse
        # Kernels want a tensor in every place, and read what is there only if it was given.
        lengths, table, slopes, sinks, key_lengths = (t.cache_seqlens if x is None else x for x in _vectors(t))
        if not ready:
            q = with_columns(q)
            lengths, table, slopes, sinks, key_lengths = (
                each.contiguous() for each in (lengths, table, slopes, sinks, key_lengths)
            )
        setting = precision_of(q)
        partial_out, exponents = out, lse
        if not whole:
            partial_out = q.new_empty((splits, total_rows, head_dim), dtype=torch.float32)
            exponents = q.new_empty((splits, total_rows), dtype=torch.float32)
        if attend_before is not None:
            attend_before[setting](
                q, t.prefix_k, t.prefix_v, lengths, key_lengths, lengths, slopes, sinks, partial_out, exponents
            )
        attend[setting](q, t.k_cache, t.v_cache, lengths, lengths, table, slopes, sinks, partial_out, exponents)
        if not whole:
            add_up(partial_out, exponents, sinks, out, lse)

    kernels = {name: (share.launch, share.source) for name, share in shares.items()}
    if not whole:
        kernels["attention_decode_combine"] = combine, "by the head"
    why, extra = "stock Triton on every GPU", {"splits": {name: share.splits for name, share in shares.items()}}
    return Plan(launch_decode, kernels, why=why, extra=extra)


def _vectors(t: Decode) -> tuple[Tensor | None, ...]:
    return t.cache_seqlens, t.block_table, t.slopes, t.sinks, t.prefix_seqlens


def _columns(q: Tensor) -> dict[str, int]:
    main, tail = split_head_dim(q.shape[3], q.dtype.itemsize)
    return {"HEAD_DIM": q.shape[3], "MAIN": main, "TAIL": tail}


def _bind_attend(t: Decode, call: Any, share: Share, whole: bool, first_split: int) -> dict[str, Bound]:
    """Bind the kernel that attends to a share, for each of PyTorch's settings of fp32 products."""
    q, options = t.q, AttentionOptions.of(call)
    shared = share.is_prefix
    k, v = (t.prefix_k, t.prefix_v) if shared else (t.k_cache, t.v_cache)
    assert k is not None and v is not None
    batch, num_heads, queries, head_dim = q.shape
    group, table = num_heads // k.shape[1], None if shared else t.block_table
    stride_unit, key_strides, rows = _key_strides(k, v)
    q_strides = q.stride()[:3] if readable(q) else (num_heads * queries * head_dim, queries * head_dim, head_dim)
    tiles = (share.samples * queries * group + share.rows - 1) // share.rows
    grid = (share.groups * share.splits * k.shape[1] * tiles,)
    scalars = (
        *q_strides, *key_strides, 0 if table is None else table.shape[1], num_heads if options.alibi == 2 else 0,
        *out_strides(q)[:3], share.samples, queries, capacity_of(t.k_cache, t.block_table),
        k.shape[2] if shared else 0, k.shape[0], share.splits, first_split, batch * num_heads * queries,
        options.scale, options.softcap, *options.bounds(),
    )  # fmt: skip
    overlap = can_overlap()
    constants = {
        "STRIDE_KS": rows[0], "STRIDE_VS": rows[1], "STRIDE_UNIT": stride_unit, **_columns(q),
        "NUM_K_HEADS": k.shape[1], "GROUP": group, "HAS_LEFT": options.left >= 0,
        # A single query is the last, behind which nothing is.
        "HAS_RIGHT": options.right >= 0 and not shared and not (are_known(queries) and queries == 1),
        "SCORE_MODS": options.score_mods if whole else options.score_mods & ~SINKS.value,
        "SHARED": shared, "HAS_KEY_LENGTHS": shared and t.prefix_seqlens is not None, "PARTIAL": not whole,
        "PAGE_SIZE": 0 if table is None else k.shape[2], "SPLIT_KEYS": INVARIANT_KEYS if call.batch_invariant else 0,
        "OVERLAPS": overlap, "BLOCK_M": share.rows, "BLOCK_N": share.launch.block_n,
        "num_warps": share.launch.num_warps, "num_stages": share.launch.num_stages,
        **({"launch_pdl": True} if overlap else {}),
    }  # fmt: skip
    settings_of = ("ieee", "tf32") if q.dtype is torch.float32 else ("ieee",)
    return {
        setting: Bound(wrap_triton(_attention_decode_kernel), grid, scalars, {"PRECISION": setting, **constants})
        for setting in settings_of
    }
