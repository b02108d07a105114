"""Cases of packed attention."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_ops.testing.cases._layouts import Layouts, drawn_as

# 1920 x 1080 through Qwen2.5-VL's 112 px windows: 153 of 8 x 8 patches and the ragged ones at the edges.
RAGGED_WINDOWS = (64,) * 153 + (48,) * 17 + (16,) * 9 + (12,)


@dataclass(frozen=True)
class WindowAttnCase:
    """Shapes and options of one call; `k_lengths` and `num_k_heads` are those of the queries where None.

    `skipped` rows come before the first segment, `padding` rows after the last.
    """

    name: str
    reaches: str
    lengths: tuple[int, ...]
    num_heads: int
    head_dim: int
    k_lengths: tuple[int, ...] | None = None
    num_k_heads: int | None = None
    skipped: int = 0
    padding: int = 0
    layout: str = "contiguous"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    tags: frozenset[str] = frozenset({"edge"})

    @property
    def total_q(self) -> int:
        return self.skipped + sum(self.lengths) + self.padding

    @property
    def total_k(self) -> int:
        return self.total_q if self.k_lengths is None else self.skipped + sum(self.k_lengths) + self.padding

    @property
    def uniform(self) -> bool:
        """Whether the call is a batch of equal, square segments: what dense peers can run too."""
        return len(set(self.lengths)) == 1 and self.k_lengths is None and self.skipped == self.padding == 0


@dataclass(frozen=True)
class WindowAttnInputs:
    """Random tensors of a case, and upstream gradients for out and lse; `op` is what they are for."""

    op: ClassVar[str] = "window_attn"

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor | None
    dout: Tensor
    dlse: Tensor
    options: dict[str, Any]

    @property
    def places(self) -> tuple[Tensor | None, ...]:
        """Arguments after q, k and v, and in the backward after lse."""
        return self.cu_seqlens, self.cu_seqlens_k

    def call(self, function: Any, **tensors: Any) -> Any:
        """function(q, k, v, cu_seqlens, cu_seqlens_k, **options), with those of these tensors that are given."""
        given = replace(self, **tensors)
        return function(given.q, given.k, given.v, *given.places, **given.options)


def cumulative(lengths: tuple[int, ...], device: torch.device | str) -> Tensor:
    """int32 [n + 1] boundaries of segments of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cpu").to(device)


PACKED: Layouts = {
    "contiguous": lambda draw, rows, heads, dim: draw(rows, heads, dim),
    "qkv_view": lambda draw, rows, heads, dim: draw(rows, 3, heads, dim)[:, 1],
    "head_major": lambda draw, rows, heads, dim: draw(heads, rows, dim).transpose(0, 1),
    "column_strided": lambda draw, rows, heads, dim: draw(dim, rows, heads).permute(1, 2, 0),
    "misaligned": lambda draw, rows, heads, dim: draw(rows * heads * dim + 1)[1:].view(rows, heads, dim),
    "odd_strides": lambda draw, rows, heads, dim: draw(rows, heads, dim + 3)[:, :, :dim],
}
LAYOUTS = tuple(PACKED)


def drawn_options(options: dict[str, Any], sequences: int, heads: int, draw: Any, device: Any) -> dict[str, Any]:
    """Options of a call from those of a case; dropout gets a seed.

    "alibi" is the number of dimensions of the slopes, and "sinks" says whether there are sinks.
    """
    drawn = {name: value for name, value in options.items() if name not in ("alibi", "sinks")}
    if "alibi" in options:
        drawn["alibi_slopes"] = draw(*(sequences, heads)[-options["alibi"] :]).abs().float() / 8
    if "sinks" in options:
        drawn["sinks"] = draw(heads)
    if "dropout_p" in options:
        drawn["dropout_seed"] = torch.tensor([2**40 + 7], device=device)
    return drawn


def make_inputs(
    case: WindowAttnCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> WindowAttnInputs:
    """Fresh random inputs; the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype).to(device)

    q_shape = (case.total_q, case.num_heads, case.head_dim)
    k_shape = (case.total_k, case.num_k_heads or case.num_heads, case.head_dim)
    return WindowAttnInputs(
        q=drawn_as(PACKED, case.layout, draw, *q_shape),
        k=drawn_as(PACKED, case.layout, draw, *k_shape),
        v=drawn_as(PACKED, case.layout, draw, *k_shape),
        cu_seqlens=case.skipped + cumulative(case.lengths, device),
        cu_seqlens_k=None if case.k_lengths is None else case.skipped + cumulative(case.k_lengths, device),
        dout=drawn_as(PACKED, case.layout, draw, *q_shape),
        dlse=draw(case.num_heads, case.total_q).to(torch.promote_types(dtype, torch.float32)),
        options=drawn_options(case.options, len(case.lengths), case.num_heads, draw, device),
    )


def _case(
    name: str, reaches: str, lengths: tuple[int, ...], heads: int, dim: int, *tags: str, **rest: Any
) -> WindowAttnCase:
    return WindowAttnCase(name, reaches, lengths, heads, dim, tags=frozenset(tags or ("edge",)), **rest)


CAUSAL = {"causal": True}


def _window(left: int, right: int) -> dict[str, int]:
    return {"window_left": left, "window_right": right}


WINDOW_ATTN = (
    _case("image", "one segment, split head dim, a tail in both blocks", (100,), 2, 72, "smoke", "edge"),
    _case("ragged", "segments shorter and longer than a tile", (33, 1, 64, 17, 130), 2, 80, "smoke", "edge"),
    _case("empty", "empty segments first, last and between", (0, 5, 0, 0, 40, 0), 1, 64),
    _case("padding", "rows past the last segment", (37, 20), 2, 72, padding=45),
    _case("skipped", "rows before the first segment", (37, 20), 2, 72, skipped=45, padding=3),
    _case("skipped_cross", "keys before the first segment", (7, 30), 1, 64, k_lengths=(40, 5), skipped=33),
    _case("peaked", "scores so large that a row sees one key", (50,), 2, 64, options={"scale": 4.0}),
    _case("no_segments", "nothing but padding", (), 1, 16, padding=20),
    _case("no_rows", "no rows at all", (0,), 2, 64),
    _case("many", "many short segments", (3, 1, 2, 5) * 40, 1, 8),
    _case("causal", "diagonal blocks", (70, 33), 2, 64, "smoke", "edge", options=CAUSAL),
    _case("causal_wide", "more keys than queries", (20, 9), 1, 32, k_lengths=(90, 9), options=CAUSAL),
    _case("causal_tall", "rows that see no key", (90, 12), 1, 32, k_lengths=(30, 12), options=CAUSAL),
    _case("cross", "other key lengths, some without keys", (40, 8, 3), 2, 72, k_lengths=(11, 0, 77)),
    _case("gqa", "three query heads on each key head", (50, 21), 6, 40, num_k_heads=2, options=CAUSAL),
    _case("mqa", "one key head for all", (45,), 4, 16, num_k_heads=1),
    _case("window", "masked blocks on both sides of full ones", (150,), 1, 16, options=_window(40, 25)),
    _case("window_left", "sliding causal window", (130, 20), 1, 32, options={"causal": True, "window_left": 33}),
    _case("window_zero", "a window of the query's own position", (40,), 1, 8, options=_window(0, 0)),
    _case("window_beyond", "a window wider than the segment", (40,), 1, 8, options=_window(500, 500)),
    _case("softcap", "capped scores", (60, 10), 2, 48, options={"softcap": 5.0}),
    _case("softcap_causal", "capped and masked scores", (60,), 1, 24, options={"softcap": 1.5, "causal": True}),
    _case("alibi", "slopes of each head", (60, 10), 2, 48, options={"alibi": 1}),
    _case("alibi_rows", "slopes of each segment, softcap", (40, 0, 30), 2, 16, options={"alibi": 2, "softcap": 4.0}),
    _case("sinks", "a logit more", (60, 10), 2, 64, skipped=3, padding=4, options={"sinks": True}),
    _case(
        "sinks_tall", "rows that see a sink alone", (50, 7), 2, 72, k_lengths=(20, 0),
        options={"sinks": True, "causal": True},
    ),
    _case("dropout", "weights that are left out", (60, 37), 2, 40, options={"dropout_p": 0.3}),
    _case(
        "dropout_gqa", "other key lengths, three heads on a key head", (37, 20), 3, 16, k_lengths=(70, 33),
        num_k_heads=1, options={"dropout_p": 0.1, "causal": True},
    ),
    _case(
        "all_steps", "whatever stands between scores and sums", (70, 21), 2, 24,
        options={"alibi": 2, "sinks": True, "dropout_p": 0.2, "softcap": 3.0, "causal": True, "window_left": 30},
    ),
    _case("scale", "an explicit scale", (40,), 1, 16, options={"scale": 0.5}),
    _case("qkv_view", "views of a packed projection", (50, 30), 2, 72, layout="qkv_view"),
    _case("head_major", "head stride beyond the row stride", (50, 30), 2, 64, layout="head_major"),
    _case("column_strided", "columns that are not contiguous", (50,), 2, 16, layout="column_strided"),
    _case("misaligned", "base pointers off 16 bytes", (50,), 2, 72, layout="misaligned"),
    _case("odd_strides", "strides that are no multiple of 8", (50,), 2, 72, layout="odd_strides"),
    *(_case(f"d{d}", f"head dim {d}", (40, 25), 1, d, options={"causal": d % 16 == 0}) for d in range(8, 257, 8)),
    _case("qwen3vl_l_1024", "L tower, 512 px", (1024,), 16, 72, "bench"),
    _case("qwen3vl_l_2304", "L tower, 768 px", (2304,), 16, 72, "bench"),
    _case("qwen3vl_l_4096", "L tower, 1024 px", (4096,), 16, 72, "bench"),
    _case("qwen3vl_l_9216", "L tower, 1536 px", (9216,), 16, 72, "bench"),
    _case("qwen3vl_l_16384", "L tower, 2048 px", (16384,), 16, 72, "bench"),
    _case("qwen3vl_l_35344", "L tower, 3008 px", (35344,), 16, 72, "bench"),
    _case("qwen3vl_l_16x1024", "L tower, 16 images of 512 px", (1024,) * 16, 16, 72, "bench"),
    _case("qwen3vl_l_8x4096", "L tower, 8 images of 1024 px", (4096,) * 8, 16, 72, "bench"),
    _case("qwen3vl_l_mixed", "L tower, 448 + 672 + 896 + 1344 px", (784, 1764, 3136, 7056), 16, 72, "bench"),
    _case("qwen25vl_4096", "Qwen2.5-VL, one image", (4096,), 16, 80, "bench"),
    _case("qwen25vl_9216", "Qwen2.5-VL, one large image", (9216,), 16, 80, "bench"),
    _case("qwen25vl_16x1024", "Qwen2.5-VL, 16 images", (1024,) * 16, 16, 80, "bench"),
    _case("qwen25vl_4x4096", "Qwen2.5-VL full layers", (4096,) * 4, 16, 80, "bench"),
    _case("qwen25vl_windows", "Qwen2.5-VL windows", (64,) * 256, 16, 80, "bench"),
    _case("qwen25vl_ragged", "Qwen2.5-VL windows of a full HD image", RAGGED_WINDOWS, 16, 80, "bench"),
    _case("replayed_40x784", "40 images of 448 px in a captured graph", (784,) * 40, 16, 72, "bench"),
    _case("replayed_40x784_empty", "2000 empty segments behind them", (784,) * 40 + (0,) * 2000, 16, 72, "bench"),
    *(_case(f"dense_d64_{2**n}", "one sequence", (2**n,), 16, 64, "bench") for n in range(8, 15)),
    _case("dense_d64_16x1024", "a batch", (1024,) * 16, 16, 64, "bench"),
    _case("qwen3vl_m_4x4096", "M tower", (4096,) * 4, 16, 64, "bench"),
    _case("dense_d128_8x4096", "a batch", (4096,) * 8, 16, 128, "bench"),
    _case("dense_d128_causal_32x2048", "a batch in training", (2048,) * 32, 10, 128, "bench", options=CAUSAL),
    _case("dense_d128_causal", "a language model's prefill", (2048,) * 8, 32, 128, "bench", options=CAUSAL),
    _case("dense_d128_gqa", "four query heads on a key head", (2048,) * 8, 32, 128, "bench", num_k_heads=8),
    _case(
        "dense_d128_gqa_causal", "the same in a prefill", (2048,) * 8, 32, 128, "bench", num_k_heads=8, options=CAUSAL
    ),
)  # fmt: skip


def window_attn_cases(tag: str) -> tuple[WindowAttnCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in WINDOW_ATTN if tag in case.tags)
