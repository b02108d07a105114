"""Cases of attention over a cache of keys."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.cases._layouts import Layouts, drawn_as


@dataclass(frozen=True)
class DecodeCase:
    """Shapes and options of one call.

    `lengths` are the keys of each sequence, in a cache with room for `capacity` of each, or, with a `page_size`, in
    pages that lie anywhere. `prefixes` are the lengths of what equally many sequences share before that, in room for
    `prefix_capacity`. `layout` is how q lies in memory and `cache_layout` how the cache does: "bhsd" or "bshd".
    """

    name: str
    reaches: str
    lengths: tuple[int, ...]
    capacity: int
    num_heads: int
    num_k_heads: int
    head_dim: int
    queries: int = 1
    page_size: int = 0
    prefixes: tuple[int, ...] = ()
    prefix_capacity: int = 0
    layout: str = "bhsd"
    cache_layout: str = "bhsd"
    cache_dtype: torch.dtype | None = None
    alibi: str = ""
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    tags: frozenset[str] = frozenset({"edge"})

    @property
    def uniform(self) -> bool:
        """Whether all room is used, and nothing but keys and queries: what dense peers can run too."""
        plain = not self.options and not self.alibi and not self.sinks and not self.prefixes and not self.page_size
        return plain and set(self.lengths) == {self.capacity}


@dataclass(frozen=True)
class DecodeInputs:
    """Random tensors of a case."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    prefix_k: Tensor | None
    prefix_v: Tensor | None
    prefix_seqlens: Tensor | None
    options: dict[str, Any]

    def call(self, function: Any, **changes: Any) -> Any:
        """function(q, ..., **options), with those tensors and options that are given in place of these."""
        tensors = {name: value for name, value in vars(self).items() if name != "options"}
        return function(**{**tensors, **self.options, **changes})

    def to(self, dtype: torch.dtype) -> "DecodeInputs":
        """With all floating tensors in that dtype."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        cast: dict[str, Any] = {name: each.to(dtype) for name, each in tensors.items() if each.is_floating_point()}
        return replace(self, **cast)


# Tensors [B, H, S, D].
_LAYOUTS: Layouts = {
    "bhsd": lambda draw, b, h, s, d: draw(b, h, s, d),
    "bshd": lambda draw, b, h, s, d: draw(b, s, h, d).transpose(1, 2),
    "sbhd": lambda draw, b, h, s, d: draw(s, b, h, d).permute(1, 2, 0, 3),
    "padded": lambda draw, b, h, s, d: draw(b, h, s, d + 3)[..., :d],
    "column_strided": lambda draw, b, h, s, d: draw(d, b, h, s).permute(1, 2, 3, 0),
}
# A cache with columns apart is refused.
DECODE_LAYOUTS = tuple(_LAYOUTS)[:-1]


def make_decode_inputs(
    case: DecodeCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> DecodeInputs:
    """Fresh random inputs; the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(case.lengths)

    def draw_in(kind: torch.dtype) -> Any:
        return lambda *shape: torch.randn(shape, generator=generator, device="cpu").to(kind).to(device)

    def integers(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    blocks, rows, table = batch, case.capacity, None
    if case.page_size:
        pages = (case.capacity + case.page_size - 1) // case.page_size
        # Some are nobody's.
        blocks, rows = batch * pages + 2, case.page_size
        order = torch.randperm(blocks, generator=generator, device="cpu")[: batch * pages]
        table = order.view(batch, pages).to(torch.int32).to(device)
    of_queries, of_keys = draw_in(dtype), draw_in(case.cache_dtype or dtype)
    keys = (blocks, case.num_k_heads, rows, case.head_dim)
    before = (len(case.prefixes), case.num_k_heads, case.prefix_capacity, case.head_dim)
    q = drawn_as(_LAYOUTS, case.layout, of_queries, batch, case.num_heads, case.queries, case.head_dim)
    k_cache, v_cache = (drawn_as(_LAYOUTS, case.cache_layout, of_keys, *keys) for _ in range(2))
    prefix_k, prefix_v = (
        drawn_as(_LAYOUTS, case.cache_layout, of_keys, *before) if case.prefixes else None for _ in range(2)
    )
    slopes = {"": None, "heads": (case.num_heads,), "batch": (batch, case.num_heads)}[case.alibi]
    whole = set(case.prefixes) <= {case.prefix_capacity}
    return DecodeInputs(
        q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=integers(case.lengths), block_table=table,
        alibi_slopes=None if slopes is None else draw_in(torch.float32)(*slopes).abs() * 0.2,
        sinks=of_queries(case.num_heads) if case.sinks else None,
        prefix_k=prefix_k, prefix_v=prefix_v, prefix_seqlens=None if whole else integers(case.prefixes),
        options=dict(case.options),
    )  # fmt: skip


def _case(
    name: str, reaches: str, lengths: tuple[int, ...], capacity: int, heads: tuple[int, int], dim: int, *tags: str,
    **rest: Any,
) -> DecodeCase:  # fmt: skip
    return DecodeCase(name, reaches, lengths, capacity, *heads, dim, tags=frozenset(tags or ("edge",)), **rest)


SPLIT = {"num_splits": 3}
INVARIANT = {"batch_invariant": True}
EVERYTHING = {"window_left": 50, "softcap": 5.0, "num_splits": 2}

DECODE = (
    _case("one_token", "one query, lengths that end anywhere", (70, 33, 1), 80, (4, 2), 64, "smoke", "edge"),
    _case("whole", "one program for all keys of a row", (70, 33), 80, (4, 2), 64, options={"num_splits": 1}),
    _case("split", "more splits than blocks of the shorter one", (90, 20), 90, (2, 2), 32, options=SPLIT),
    _case("empty", "sequences without keys", (0, 40, 0), 48, (2, 1), 64),
    _case("empty_whole", "the same without a second kernel", (0, 40), 48, (2, 1), 64, options={"num_splits": 1}),
    _case("no_room", "a cache of no keys", (0, 0), 0, (2, 1), 16),
    _case("speculative", "a diagonal across the last block", (70, 16), 70, (2, 2), 72, "smoke", "edge", queries=5),
    _case("few_keys", "queries before the first key", (3, 0, 9), 32, (2, 1), 40, queries=6),
    _case("many_queries", "several tiles of rows", (60, 45), 64, (8, 1), 40, queries=16),
    _case("not_causal", "every query sees all keys", (37,), 40, (2, 2), 16, queries=4, options={"causal": False}),
    _case("mha", "a key head for each head", (50,), 64, (3, 3), 80),
    _case("group_3", "a group that is no power of two", (50, 64), 64, (6, 2), 48, queries=2),
    _case("group_7", "seven heads on a key head", (61,), 64, (7, 1), 128),
    _case("group_8", "eight heads on a key head", (61, 30), 64, (16, 2), 64, queries=2, layout="bshd"),
    _case("d256", "the widest head", (30,), 40, (2, 1), 256),
    _case("d8", "the narrowest head", (30,), 40, (2, 1), 8),
    _case("pages_16", "blocks that straddle pages", (90, 33, 0), 96, (4, 2), 64, "smoke", "edge", page_size=16),
    _case("pages_48", "pages that are no power of two", (90, 47), 96, (2, 1), 72, page_size=48, queries=3),
    _case("pages_128", "blocks within pages", (200, 129, 128), 256, (2, 1), 64, page_size=128),
    _case("pages_bshd", "pages as flash-attn has them", (70, 20), 96, (4, 2), 64, page_size=32, cache_layout="bshd"),
    _case("window", "keys before the window are not read", (150, 20), 160, (2, 1), 32, options={"window_left": 33}),
    _case("window_both", "bounds on both sides", (90, 70), 96, (2, 1), 32, queries=8,
          options={"causal": False, "window_left": 20, "window_right": 3}),
    _case("window_zero", "a window of the query's own position", (40,), 40, (2, 2), 16, queries=3,
          options={"window_left": 0}),
    _case("softcap", "capped scores", (60,), 64, (2, 1), 64, options={"softcap": 3.0}),
    _case("alibi", "slopes of heads", (75, 40), 80, (4, 2), 64, queries=2, alibi="heads"),
    _case("alibi_batch", "slopes of each sequence", (75, 40), 80, (3, 3), 32, alibi="batch", options={"softcap": 5.0}),
    _case("sinks", "one more score of each head", (60, 0), 64, (4, 2), 64, sinks=True),
    _case("sinks_whole", "the same without a second kernel", (60, 0), 64, (4, 2), 64, sinks=True,
          options={"num_splits": 1}),
    _case("prefix", "one prefix for all", (40, 33, 0, 17), 48, (2, 1), 64, "smoke", "edge", prefixes=(50,),
          prefix_capacity=50),
    _case("prefixes", "prefixes of several lengths", (40, 33, 8, 17), 48, (4, 2), 40, prefixes=(50, 0),
          prefix_capacity=70, queries=3),
    _case("prefix_tiles", "samples in several tiles of rows", (20,) * 12, 32, (8, 1), 16, prefixes=(40,),
          prefix_capacity=48, queries=2),
    _case("prefix_everything", "a window into the prefix, from pages", (40, 33, 70, 17), 80, (4, 2), 64,
          prefixes=(45, 50), prefix_capacity=50, page_size=16, queries=2, alibi="heads", sinks=True,
          options=EVERYTHING),
    _case("invariant", "splits at fixed positions", (70, 530), 600, (2, 1), 16, options=INVARIANT),
    _case("cache_fp32", "a cache wider than q", (50,), 64, (2, 1), 64, cache_dtype=torch.float32),
    _case("cache_fp16", "a cache narrower than q", (50,), 64, (2, 1), 64, cache_dtype=torch.float16, page_size=32),
    _case("bshd", "views of [B, S, H, D]", (50, 64), 64, (4, 2), 72, queries=3, layout="bshd", cache_layout="bshd"),
    _case("sbhd", "sequences innermost", (50, 64), 64, (4, 2), 64, queries=2, layout="sbhd", cache_layout="sbhd"),
    _case("odd_strides", "strides that are no multiple of 8", (50,), 64, (2, 1), 64, layout="padded",
          cache_layout="padded"),
    _case("column_strided", "columns of q that are not contiguous", (50,), 64, (2, 1), 16, layout="column_strided"),
    _case("scale", "an explicit scale", (50,), 64, (2, 1), 16, options={"scale": 0.5}),
    *(
        _case(f"llama_b{batch}_{keys}", f"{batch} sequences of {keys} keys", (keys,) * batch, keys, (32, 8), 128,
              "bench", *["suite"] * (batch == 16))
        for batch, keys in ((1, 8192), (1, 65536), (4, 16384), (16, 8192), (64, 4096), (128, 1024))
    ),
    _case("llama_b16_8192_bshd", "the cache as flash-attn has it", (8192,) * 16, 8192, (32, 8), 128, "bench",
          cache_layout="bshd"),
    _case("llama_b16_8192_pages", "pages of 64 keys", (8192,) * 16, 8192, (32, 8), 128, "bench", page_size=64),
    _case("llama_b16_8192_pages_16", "pages of 16 keys", (8192,) * 16, 8192, (32, 8), 128, "bench", page_size=16),
    _case("ragged_b16", "lengths from 128 to 8192", tuple(range(512, 8193, 512)), 8192, (32, 8), 128, "bench"),
    _case("speculative_b16_8192", "five tokens at once", (8192,) * 16, 8192, (32, 8), 128, "bench", queries=5),
    _case("invariant_b16_8192", "splits at fixed positions", (8192,) * 16, 8192, (32, 8), 128, "bench",
          options=INVARIANT),
    _case("prefix_b64_8192", "64 samples of one prompt", (256,) * 64, 256, (32, 8), 128, "bench", prefixes=(8192,),
          prefix_capacity=8192),
    _case("qwen_b16_8192", "seven heads on a key head", (8192,) * 16, 8192, (28, 4), 128, "bench"),
    _case("mha_d64_b16_4096", "no groups", (4096,) * 16, 4096, (16, 16), 64, "bench"),
)  # fmt: skip


def decode_cases(tag: str) -> tuple[DecodeCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in DECODE if tag in case.tags)
