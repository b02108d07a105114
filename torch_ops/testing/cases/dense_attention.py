"""Cases of dense attention, [B, H, S, D]."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_ops.testing.cases._layouts import Layouts, drawn_as
from torch_ops.testing.cases.attention import CAUSAL, drawn_options


@dataclass(frozen=True)
class DenseCase:
    """Shapes and options of one call; `k_length` and `num_k_heads` are those of the queries where None.

    `layout` is that of all tensors, or of q, k, v and dout, with spaces between.
    """

    name: str
    reaches: str
    batch: int
    num_heads: int
    length: int
    head_dim: int
    num_k_heads: int | None = None
    k_length: int | None = None
    layout: str = "heads_first"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    tags: frozenset[str] = frozenset({"edge"})


@dataclass(frozen=True)
class DenseInputs:
    """Random tensors of a case, and upstream gradients for out and lse; `op` is what they are for."""

    op: ClassVar[str] = "attention"
    # Arguments after q, k and v, and in the backward after lse: none.
    places: ClassVar[tuple[Tensor | None, ...]] = ()

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    options: dict[str, Any]

    def call(self, function: Any, **tensors: Any) -> Any:
        """function(q, k, v, **options), with those of these tensors that are given."""
        given = replace(self, **tensors)
        return function(given.q, given.k, given.v, **given.options)


# Tensors [B, H, S, D].
_BATCHED: Layouts = {
    "heads_first": lambda draw, b, h, s, d: draw(b, h, s, d),
    "rows_first": lambda draw, b, h, s, d: draw(b, s, h, d).transpose(1, 2),
    "batch_inside": lambda draw, b, h, s, d: draw(s, b, h, d).permute(1, 2, 0, 3),
    "qkv_view": lambda draw, b, h, s, d: draw(b, s, 3, h, d)[:, :, 1].transpose(1, 2),
    "cut": lambda draw, b, h, s, d: draw(b, h, s + 9, d)[:, :, 4 : 4 + s],
    "rows_cut": lambda draw, b, h, s, d: draw(b, s + 9, h, d)[:, 4 : 4 + s].transpose(1, 2),
    "column_strided": lambda draw, b, h, s, d: draw(b, h, d, s).transpose(2, 3),
    "misaligned": lambda draw, *shape: draw(math.prod(shape) + 1)[1:].view(shape),
    "odd_strides": lambda draw, b, h, s, d: draw(b, h, s, d + 3)[..., :d],
}
DENSE_LAYOUTS = tuple(_BATCHED)


def make_dense_inputs(
    case: DenseCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> DenseInputs:
    """Fresh random inputs; the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype).to(device)

    rows = case.length if case.k_length is None else case.k_length
    q_shape = case.batch, case.num_heads, case.length, case.head_dim
    k_shape = case.batch, case.num_k_heads or case.num_heads, rows, case.head_dim
    layouts = case.layout.split()
    of_q, of_k, of_v, of_dout = layouts * 4 if len(layouts) == 1 else layouts
    return DenseInputs(
        q=drawn_as(_BATCHED, of_q, draw, *q_shape),
        k=drawn_as(_BATCHED, of_k, draw, *k_shape),
        v=drawn_as(_BATCHED, of_v, draw, *k_shape),
        dout=drawn_as(_BATCHED, of_dout, draw, *q_shape),
        dlse=draw(*q_shape[:3]).to(torch.promote_types(dtype, torch.float32)),
        options=drawn_options(case.options, case.batch, case.num_heads, draw, device),
    )


def _case(name: str, reaches: str, shape: tuple[int, int, int, int], *tags: str, **rest: Any) -> DenseCase:
    return DenseCase(name, reaches, *shape, tags=frozenset(tags or ("edge",)), **rest)


# Shapes of a report on an attention kernel.
SUITE = "bench", "suite"
DENSE = (
    _case("batch", "a tail in both blocks", (2, 2, 100, 72), "smoke", "edge"),
    _case("one", "one row", (3, 2, 1, 64)),
    _case("causal", "diagonal blocks", (2, 2, 70, 64), "smoke", "edge", options=CAUSAL),
    _case("causal_wide", "more keys than queries", (2, 1, 20, 32), k_length=90, options=CAUSAL),
    _case("causal_tall", "rows that see no key", (2, 1, 90, 32), k_length=30, options=CAUSAL),
    _case("cross", "another number of keys", (2, 2, 40, 72), k_length=77),
    _case("no_keys", "nothing to attend to", (2, 2, 10, 16), k_length=0),
    _case("no_rows", "no queries", (2, 2, 0, 16), k_length=5),
    _case("no_batch", "no sequences", (0, 2, 10, 16)),
    _case("gqa", "three heads on a key head", (2, 6, 50, 40), "smoke", "edge", num_k_heads=2, options=CAUSAL),
    _case("gqa7", "seven heads on a key head", (2, 7, 33, 16), num_k_heads=1),
    _case("window", "masked blocks on both sides", (2, 1, 150, 16), options={"window_left": 40, "window_right": 25}),
    _case("sliding", "a causal window", (1, 2, 130, 32), options={"causal": True, "window_left": 33}),
    _case("softcap", "capped scores", (2, 2, 60, 48), options={"softcap": 5.0}),
    _case("alibi", "slopes of each head", (2, 2, 60, 48), options={"alibi": 1, "causal": True}),
    _case("alibi_rows", "slopes of each sequence", (3, 2, 40, 16), options={"alibi": 2}),
    _case("sinks", "a logit more", (2, 4, 60, 64), num_k_heads=2, options={"sinks": True}),
    _case("sinks_tall", "rows that see a sink alone", (2, 2, 50, 72), k_length=20, options={"sinks": True, **CAUSAL}),
    _case("sinks_alone", "a sink and no keys", (2, 2, 9, 16), k_length=0, options={"sinks": True}),
    _case("dropout", "weights that are left out", (2, 2, 60, 40), options={"dropout_p": 0.3}),
    _case("dropout_gqa", "other key lengths", (2, 3, 37, 16), num_k_heads=1, k_length=70, options={"dropout_p": 0.1}),
    _case(
        "all_steps", "whatever stands between scores and sums", (2, 2, 70, 24),
        options={"alibi": 2, "sinks": True, "dropout_p": 0.2, "softcap": 3.0, "causal": True, "window_left": 30},
    ),
    _case("scale", "an explicit scale", (2, 1, 40, 16), options={"scale": 0.5}),
    *(_case(layout, f"{layout} strides", (3, 2, 50, 72), layout=layout, k_length=40) for layout in DENSE_LAYOUTS[1:]),
    _case("strides_of_the_batch", "row strides of no model", (5, 2, 50, 24), layout="batch_inside", num_k_heads=1),
    *(_case(f"d{d}", f"head dim {d}", (2, 1, 40, d), options={"causal": d % 16 == 0}) for d in range(8, 257, 8)),
    _case("b2h8kv4s1024d128_causal", "a small prefill", (2, 8, 1024, 128), *SUITE, num_k_heads=4, options=CAUSAL),
    _case("b32h10s2048d128_causal", "a batch in training", (32, 10, 2048, 128), *SUITE, options=CAUSAL),
    _case("b8h32s2048d128_causal", "a language model's prefill", (8, 32, 2048, 128), *SUITE, options=CAUSAL),
    _case("b4h32s1024d64_causal", "narrow heads", (4, 32, 1024, 64), *SUITE, options=CAUSAL),
    _case("b1h8s512d64_causal", "hardly any work", (1, 8, 512, 64), *SUITE, options=CAUSAL),
    _case("b8h32kv8s2048d128_causal", "four heads on one", (8, 32, 2048, 128), "bench", num_k_heads=8, options=CAUSAL),
    _case("b2h8kv4s1024d128", "the same without order", (2, 8, 1024, 128), "bench", num_k_heads=4),
    _case("b32h10s2048d128", "many sequences", (32, 10, 2048, 128), "bench"),
    _case("b8h32s2048d128", "a batch", (8, 32, 2048, 128), "bench"),
    _case("b8h32kv8s2048d128", "four heads on one", (8, 32, 2048, 128), "bench", num_k_heads=8),
    _case("b4h32s1024d64", "narrow heads", (4, 32, 1024, 64), "bench"),
    _case("b4h16s4096d64", "long sequences", (4, 16, 4096, 64), "bench"),
    _case("b1h8s512d64", "hardly any work", (1, 8, 512, 64), "bench"),
    _case("b4h8s11000k10000d64", "context and targets", (4, 8, 11000, 64), "bench", k_length=10000),
)  # fmt: skip


def dense_cases(tag: str) -> tuple[DenseCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in DENSE if tag in case.tags)
