"""Cases of appending to a cache: what sequences have, what is new, where it goes, how it is turned."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# How new tokens and caches lie: heads one after the other; tokens, as projections and flash-attn's caches have them;
# with room between columns, heads and sequences; and of new ones alone, columns that are not contiguous.
CACHE_LAYOUTS = ("heads", "tokens", "gaps")
TOKEN_LAYOUTS = (*CACHE_LAYOUTS, "columns")


@dataclass(frozen=True)
class KvCacheCase:
    """`before` are the keys that sequences have; `capacity` is in positions or, with a page_size, in pages of each.

    `columns` are those of cos and sin, 0 without rotation. `num_heads` are q's, 0 without q. `lengths` say how many
    tokens count.
    """

    name: str
    branch: str
    before: tuple[int, ...]
    tokens: int
    num_k_heads: int
    head_dim: int
    capacity: int
    page_size: int = 0
    num_heads: int = 0
    columns: int = 0
    interleaved: bool = False
    lengths: tuple[int, ...] | None = None
    layout: str = "heads"
    cache_layout: str = "heads"
    cache_dtype: torch.dtype | None = None
    tags: frozenset[str] = field(default=frozenset({"edge"}))

    @property
    def positions(self) -> int:
        """That a sequence can have."""
        return self.capacity * (self.page_size or 1)


SMOKE = frozenset({"edge", "smoke"})
BENCH = frozenset({"bench"})
KV_CACHE = (
    KvCacheCase("decode", "one token", (0, 7, 30), 1, 2, 64, 31, num_heads=4, columns=32, tags=SMOKE),
    KvCacheCase("paged", "tokens across pages", (3, 0, 14), 9, 2, 64, 3, 8, 4, 64, layout="tokens", tags=SMOKE),
    KvCacheCase("plain", "nothing is turned", (1, 0), 5, 3, 72, 6),
    KvCacheCase("single_page", "pages of one row", (2, 0), 3, 1, 16, 6, 1, 1, 8),
    KvCacheCase("odd_pages", "pages of no power of two", (4, 11), 8, 1, 16, 4, 5, 2, 8),
    KvCacheCase("partial", "columns that pass", (0, 5), 4, 2, 80, 9, num_heads=2, columns=16, layout="tokens"),
    KvCacheCase("partial_odd", "a number of pairs that no vector has", (0, 5), 4, 2, 72, 9, columns=5),
    KvCacheCase("interleaved", "neighbours are pairs", (0, 5), 4, 2, 72, 9, num_heads=2, columns=36, interleaved=True),
    KvCacheCase("interleaved_full", "a column for each", (0, 5), 4, 2, 16, 9, columns=16, interleaved=True),
    KvCacheCase("interleaved_partial", "some neighbours pass", (2, 0), 4, 1, 64, 3, 4, 2, 12, interleaved=True),
    KvCacheCase("wide", "two blocks of columns", (0, 2), 3, 1, 256, 8, num_heads=1, columns=128),
    KvCacheCase("full", "tokens past the capacity", (7, 5, 20), 4, 2, 16, 8, num_heads=2, columns=8),
    KvCacheCase("full_pages", "tokens past the table", (7, 5, 20), 4, 2, 16, 2, 4, 2, 8),
    KvCacheCase("negative", "no sequence", (-1, 2, -2147483648), 4, 2, 16, 8, num_heads=2, columns=8),
    KvCacheCase("far", "lengths near the last integer", (2147483646, 1), 4, 2, 16, 8, num_heads=2, columns=8),
    KvCacheCase("ragged", "fewer tokens count", (0, 3, 2), 5, 2, 16, 8, columns=8, lengths=(5, 0, 3)),
    KvCacheCase("ragged_pages", "padding without a page", (0, 3, 2), 5, 2, 16, 4, 2, columns=8, lengths=(1, 2, 5)),
    KvCacheCase("gaps", "room between rows", (0, 3), 5, 2, 40, 8, 0, 3, 20, layout="gaps", cache_layout="gaps"),
    KvCacheCase("flash", "a cache of tokens", (0, 3), 5, 2, 64, 8, 0, 3, 32, layout="tokens", cache_layout="tokens"),
    KvCacheCase("flash_pages", "pages of tokens", (0, 3), 5, 2, 64, 4, 2, 3, 32, cache_layout="tokens"),
    KvCacheCase("columns", "copied first", (0, 3), 5, 2, 16, 8, 0, 3, 8, layout="columns"),
    KvCacheCase("to_half", "rounded when stored", (0, 3), 5, 2, 64, 8, columns=32, cache_dtype=torch.float16),
    KvCacheCase("to_single", "widened when stored", (0, 3), 5, 2, 64, 8, columns=32, cache_dtype=torch.float32),
    KvCacheCase("to_bfloat", "of another half type", (0, 3), 5, 2, 64, 8, columns=32, cache_dtype=torch.bfloat16),
    *(
        KvCacheCase(f"llama_decode_{batch}", "one token of a 32 / 8 head layer", (4095,) * batch, 1, 8, 128, 32, 128,
                    32, 64, layout="tokens", tags=BENCH)
        for batch in (1, 16, 128)
    ),
    KvCacheCase("llama_prefill_4096", "a prompt", (0,), 4096, 8, 128, 8192, 0, 32, 64, layout="tokens", tags=BENCH),
    KvCacheCase("llama_prefill_4x2048_pages", "a batch of prompts", (0,) * 4, 2048, 8, 128, 16, 128, 32, 64,
                layout="tokens", tags=BENCH),
)  # fmt: skip


@dataclass(frozen=True)
class KvCacheInputs:
    """Random tensors of a case, among them caches that hold something everywhere."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None
    q: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    lengths: Tensor | None

    def call(self, function: Callable[..., Any], **changed: Any) -> Any:
        return function(*({**vars(self), **changed}).values())


def _lay_out(tensor: Tensor, layout: str) -> Tensor:
    """In memory of its own, which "gaps" fills with more of the same."""
    if layout == "tokens":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "columns":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "gaps":
        outer, heads, rows, columns = tensor.shape
        wider = tensor.repeat(2, 2, 2, 2)[: outer + 1, : heads + 1, : rows + 1, : columns + 3].contiguous()
        view = wider[1:, 1:, 1:, 3:]
        return view.copy_(tensor)
    return tensor.contiguous()


def make_kv_cache_inputs(
    case: KvCacheCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> KvCacheInputs:
    """Fresh random inputs; the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(case.before)

    def draw(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(to)

    def new(heads: int) -> Tensor:
        return _lay_out(draw(batch, heads, case.tokens, case.head_dim), case.layout).to(device)

    pages = batch * case.capacity + 2
    shape = (pages, case.num_k_heads, case.page_size) if case.page_size else (batch, case.num_k_heads, case.capacity)
    k_cache, v_cache = (
        _lay_out(draw(*shape, case.head_dim, to=case.cache_dtype or dtype), case.cache_layout).to(device)
        for _ in range(2)
    )
    table = None
    if case.page_size:
        table = torch.randperm(pages, generator=generator, device="cpu")[: batch * case.capacity].view(batch, -1).int()
        # Pages that no token goes to need not be there.
        counts = case.lengths or (case.tokens,) * batch
        for b, (before, count) in enumerate(zip(case.before, counts, strict=True)):
            table[b, max(0, math.ceil((before + count) / case.page_size)) :] = pages + 2**30 if b % 2 else -1
    cos = sin = None
    if case.columns:
        rows = max(1, min(case.positions, max(case.before) + case.tokens))
        angles = 3 * torch.randn(rows, case.columns, generator=generator, device="cpu")
        cos, sin = angles.cos().to(device), angles.sin().to(device)

    def counted(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return KvCacheInputs(
        new(case.num_k_heads), new(case.num_k_heads), k_cache, v_cache, counted(case.before),
        None if table is None else table.to(device), new(case.num_heads) if case.num_heads else None, cos, sin,
        case.interleaved, None if case.lengths is None else counted(case.lengths),
    )  # fmt: skip


def kv_cache_cases(tag: str) -> tuple[KvCacheCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in KV_CACHE if tag in case.tags)
