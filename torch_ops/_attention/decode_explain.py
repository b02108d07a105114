"""How calls of attention over a cache run, in the words of `torch_ops.explain`."""

from typing import Any

from torch import Tensor

from csrc_free_ops.configs.attention import covered_width
from torch_ops._attention.decode import are_known, combining, shares_of
from torch_ops._core.registry import runs_kernels
from torch_ops._core.report import by_reference, called_on_fakes, describe


def explain_decode(
    op: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None = None,
    *options: Any, return_lse: bool = False, **named: Any,
) -> dict[str, Any]:  # fmt: skip
    """What `torch_ops.explain` says, and by kernel among how many programs the keys of a tile of rows are split."""
    names = (
        "scale", "causal", "window_left", "window_right", "softcap", "alibi_slopes", "sinks", "prefix_k", "prefix_v",
        "prefix_seqlens", "num_splits", "batch_invariant",
    )  # fmt: skip
    given = {**dict(zip(names, options, strict=False)), **named}
    called_on_fakes(op, q, k_cache, v_cache, cache_seqlens, block_table, **given)
    if not runs_kernels(q):
        return by_reference(op, q.device)
    shares = shares_of(
        q, k_cache, block_table, given.get("prefix_k"), given.get("num_splits", 0), given.get("batch_invariant", False)
    )
    kernels = {name: (share.launch, share.source) for name, share in shares.items()}
    splits = sum(share.splits for share in shares.values())
    if not are_known(splits) or splits > 1:
        kernels["attention_decode_combine"] = combining(covered_width(q.shape[3], q.dtype.itemsize)), "by the head"
    report = describe(op, q.device, "portable", "stock Triton on every GPU", kernels)
    return {**report, "splits": {name: share.splits for name, share in shares.items()}}
