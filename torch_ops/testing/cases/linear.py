"""Cases of projections: `qkv_rope` and `mlp`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

EDGE = frozenset({"edge"})
BOTH = frozenset({"smoke", "edge"})
BENCH = frozenset({"bench"})


@dataclass(frozen=True)
class QkvRopeCase:
    """Shapes of one call; `half_table` for tables [T, D / 2], `own_table` for tables in x's dtype."""

    name: str
    reaches: str
    rows: int
    width: int
    num_heads: int
    head_dim: int
    num_k_heads: int | None = None
    bias: bool = True
    half_table: bool = False
    own_table: bool = False
    layout: str = "contiguous"
    tags: frozenset[str] = EDGE

    @property
    def heads(self) -> int:
        """Heads of q, k and v together."""
        return self.num_heads + 2 * (self.num_k_heads or self.num_heads)


@dataclass(frozen=True)
class QkvRopeInputs:
    """Random tensors of a case, and upstream gradients for q, k and v."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cos: Tensor
    sin: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    num_heads: int
    num_k_heads: int | None

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Tensors whose gradients are taken."""
        named = {"x": self.x, "weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def douts(self) -> dict[str, Tensor]:
        """The upstream gradient of each result, by its name."""
        return {"q": self.dq, "k": self.dk, "v": self.dv}

    def call(self, function: Any, **tensors: Any) -> Any:
        """function(x, weight, bias, cos, sin, num_heads, num_k_heads), with those of these tensors that are given."""
        given = replace(self, **tensors)
        return function(given.x, given.weight, given.bias, given.cos, given.sin, given.num_heads, given.num_k_heads)


@dataclass(frozen=True)
class MlpCase:
    """Shapes of one call: x is [*lead, width], `inner` columns lie between the layers, out has `outer`, or width.

    `apart` for a gated layer of two weights.
    """

    name: str
    reaches: str
    lead: tuple[int, ...]
    width: int
    inner: int
    activation: str = "gelu_tanh"
    outer: int | None = None
    bias: bool = True
    recompute: bool = False
    layout: str = "contiguous"
    apart: bool = False
    tags: frozenset[str] = EDGE

    @property
    def rows(self) -> int:
        return torch.Size(self.lead).numel()


@dataclass(frozen=True)
class MlpInputs:
    """Random tensors of a case, and an upstream gradient for out."""

    x: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    dout: Tensor
    activation: str
    w_up: Tensor | None = None
    b_up: Tensor | None = None

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Tensors whose gradients are taken."""
        named = {"x": self.x, "w1": self.w1, "b1": self.b1, "w2": self.w2, "b2": self.b2}
        named |= {"w_up": self.w_up, "b_up": self.b_up}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def douts(self) -> dict[str, Tensor]:
        """The upstream gradient of each result, by its name."""
        return {"out": self.dout}

    def call(self, function: Any, *options: Any, **tensors: Any) -> Any:
        """function(x, w1, b1, w2, b2, activation, *options), with those of these tensors that are given.

        w_up and b_up are passed by name, where there is a w_up.
        """
        given = replace(self, **tensors)
        up = {} if given.w_up is None else {"w_up": given.w_up, "b_up": given.b_up}
        return function(given.x, given.w1, given.b1, given.w2, given.b2, given.activation, *options, **up)


def outcome(function: Any, inputs: Any, dtype: torch.dtype | None = None, backward: bool = True) -> dict[str, Tensor]:
    """Results of `inputs.call(function)` and, with `backward`, by autograd the gradient d<name> of every leaf.

    In `dtype`, or the inputs' own.
    """
    leaves = {
        name: tensor.detach().to(dtype or tensor.dtype).requires_grad_(backward)
        for name, tensor in inputs.leaves.items()
    }
    results = inputs.call(function, **leaves)
    named = dict(zip(inputs.douts, results if isinstance(results, tuple) else (results,), strict=True))
    if not backward:
        return named
    douts = [dout.to(result.dtype) for dout, result in zip(inputs.douts.values(), named.values(), strict=True)]
    grads = torch.autograd.grad(tuple(named.values()), tuple(leaves.values()), douts)
    named = {name: result.detach() for name, result in named.items()}
    return named | {f"d{name}": gradient for name, gradient in zip(leaves, grads, strict=True)}


LINEAR_LAYOUTS = ("contiguous", "row_strided", "column_strided", "misaligned", "weight_transposed", "weight_strided")


def _matrix(shape: tuple[int, ...], layout: str, draw: Callable[..., Tensor]) -> Tensor:
    """In the layout of x."""
    *lead, width = shape
    if layout == "row_strided":
        return draw(*lead, width + 24)[..., 8 : 8 + width]
    if layout == "column_strided":
        return draw(width, *lead).movedim(0, -1)
    if layout == "misaligned":
        return draw(torch.Size(shape).numel() + 1)[1:].view(shape)
    return draw(*shape)


def _weight(rows: int, columns: int, layout: str, draw: Callable[..., Tensor]) -> Tensor:
    """Draw a weight of a size that keeps products at about 1."""
    if layout == "weight_transposed":
        return draw(columns, rows, scale=columns**-0.5).t()
    if layout == "weight_strided":
        return draw(rows, columns, 2, scale=columns**-0.5)[..., 1]
    return draw(rows, columns, scale=columns**-0.5)


def _drawing(dtype: torch.dtype, device: torch.device | str, seed: int) -> Callable[..., Tensor]:
    """Fresh random tensors; the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, scale=1.0: (
        (torch.randn(shape, generator=generator, device="cpu") * scale).to(dtype).to(device)
    )


def make_qkv_rope_inputs(
    case: QkvRopeCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> QkvRopeInputs:
    """Angles are in fp32 (fp64 for fp64), and spread over several turns."""
    draw = _drawing(dtype, device, seed)
    columns = case.heads * case.head_dim
    wide = torch.promote_types(dtype, torch.float32)
    angles = _drawing(wide, "cpu", seed + 1)(case.rows, case.head_dim // (2 if case.half_table else 1)) * 10
    table = dtype if case.own_table else wide
    k_heads = case.num_k_heads or case.num_heads
    return QkvRopeInputs(
        x=_matrix((case.rows, case.width), case.layout, draw),
        weight=_weight(columns, case.width, case.layout, draw),
        bias=draw(columns) if case.bias else None,
        cos=angles.cos().to(table).to(device),
        sin=angles.sin().to(table).to(device),
        dq=draw(case.rows, case.num_heads, case.head_dim),
        dk=draw(case.rows, k_heads, case.head_dim),
        dv=draw(case.rows, k_heads, case.head_dim),
        num_heads=case.num_heads,
        num_k_heads=case.num_k_heads,
    )


def make_mlp_inputs(case: MlpCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> MlpInputs:
    draw = _drawing(dtype, device, seed)
    outer = case.outer or case.width
    rows = case.inner * (2 if case.activation == "swiglu" and not case.apart else 1)
    return MlpInputs(
        x=_matrix((*case.lead, case.width), case.layout, draw),
        w1=_weight(rows, case.width, case.layout, draw),
        b1=draw(rows) if case.bias else None,
        w2=_weight(outer, case.inner, case.layout, draw),
        b2=draw(outer) if case.bias else None,
        dout=_matrix((*case.lead, outer), case.layout, draw),
        activation=case.activation,
        w_up=_weight(rows, case.width, case.layout, draw) if case.apart else None,
        b_up=draw(rows) if case.apart and case.bias else None,
    )


TOWERS = ((1152, 16, 72), (1024, 16, 64), (1280, 16, 80), (768, 12, 64))
TOKENS = (784, 3136, 4096, 25088)
# (width, inner, activation, tokens) of the towers of Qwen3-VL and Qwen2.5-VL, and of a narrow one.
LAYERS = (
    (1152, 4304, "gelu_tanh", TOKENS),
    (1024, 4096, "gelu_tanh", TOKENS),
    (1280, 3420, "swiglu", TOKENS),
    (1280, 3456, "swiglu", (4096, 25088)),
    (512, 1365, "silu", (4096, 25088, 204800)),
)

QKV_ROPE = (
    QkvRopeCase("tower", "heads of 72, several tiles of each of q, k, v", 40, 40, 2, 72, tags=BOTH),
    QkvRopeCase("gqa", "fewer key heads, tiles that end within the last", 45, 40, 4, 40, num_k_heads=2, tags=BOTH),
    QkvRopeCase("half_table", "tables of half a head", 33, 48, 2, 80, half_table=True, tags=BOTH),
    QkvRopeCase("own_table", "tables in x's dtype", 33, 32, 2, 64, own_table=True),
    QkvRopeCase("own_half_table", "both", 20, 32, 1, 64, half_table=True, own_table=True),
    QkvRopeCase("bare", "no bias", 33, 32, 2, 64, bias=False),
    QkvRopeCase("odd_width", "rows that begin nowhere in particular, a masked tail of K", 40, 45, 2, 24),
    QkvRopeCase("narrow", "fewer columns than one step of K", 20, 5, 1, 16),
    QkvRopeCase("one_row", "a single row", 1, 24, 3, 8),
    QkvRopeCase("no_rows", "no rows at all", 0, 24, 2, 16),
    QkvRopeCase("many_rows", "several runs of rows in the sums of the bias", 300, 16, 1, 16),
    QkvRopeCase("mqa", "one key head", 25, 24, 5, 8, num_k_heads=1),
    QkvRopeCase("wide_head", "the widest head", 20, 32, 1, 256),
    *(QkvRopeCase(layout, f"layout {layout}", 40, 40, 2, 24, layout=layout) for layout in LINEAR_LAYOUTS[1:]),
    *(
        QkvRopeCase(f"qkv_{width}_{rows}", f"{rows} tokens", rows, width, heads, dim, tags=BENCH)
        for width, heads, dim in TOWERS
        for rows in TOKENS
    ),
)

MLP = (
    MlpCase("tower", "both layers, tails of N and K", (37,), 40, 76, tags=BOTH),
    MlpCase("swiglu", "paired rows", (45,), 32, 68, "swiglu", tags=BOTH),
    MlpCase("silu", "an odd width, between padded rows", (40,), 32, 85, "silu", outer=24, tags=BOTH),
    MlpCase("gelu", "by erf", (33,), 24, 40, "gelu"),
    MlpCase("quick_gelu", "by a sigmoid", (33,), 24, 40, "quick_gelu"),
    MlpCase("odd_swiglu", "gates and what they gate in odd columns", (30,), 21, 37, "swiglu", outer=19),
    MlpCase("apart", "gates and what they gate in weights of their own", (45,), 32, 68, "swiglu", apart=True),
    MlpCase("odd_apart", "the same in odd columns", (30,), 21, 37, "swiglu", outer=19, apart=True),
    MlpCase("strided_apart", "leading dimensions, strided columns", (2, 15), 24, 36, "swiglu", apart=True,
            layout="weight_strided"),
    MlpCase("bare_apart", "no biases", (33,), 24, 40, "swiglu", bias=False, apart=True, layout="weight_transposed"),
    MlpCase("recompute_apart", "both made again", (45,), 32, 68, "swiglu", recompute=True, apart=True),
    MlpCase("no_rows_apart", "no rows at all", (0,), 24, 40, "swiglu", apart=True),
    MlpCase("bare", "no biases", (33,), 24, 40, bias=False),
    MlpCase("lead", "leading dimensions", (2, 3, 7), 24, 40),
    MlpCase("vector", "no leading dimension", (), 24, 40),
    MlpCase("narrow", "a single column everywhere", (20,), 1, 1, "silu"),
    MlpCase("recompute", "the first product made again", (37,), 40, 76, recompute=True),
    MlpCase("recompute_swiglu", "both halves of it", (45,), 32, 68, "swiglu", recompute=True),
    MlpCase("no_rows", "no rows at all", (0,), 24, 40),
    MlpCase("many_rows", "several runs of rows in the sums of the bias", (300,), 16, 24),
    *(MlpCase(layout, f"layout {layout}", (40,), 40, 56, layout=layout) for layout in LINEAR_LAYOUTS[1:]),
    MlpCase("row_strided_lead", "leading dimensions that are no view of rows", (3, 9), 24, 40, layout="row_strided"),
    *(
        MlpCase(f"mlp_{width}_{inner}_{rows}", f"{rows} tokens", (rows,), width, inner, activation, tags=BENCH)
        for width, inner, activation, tokens in LAYERS
        for rows in tokens
    ),
)  # fmt: skip


def qkv_rope_cases(tag: str) -> tuple[QkvRopeCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in QKV_ROPE if tag in case.tags)


def mlp_cases(tag: str) -> tuple[MlpCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in MLP if tag in case.tags)
