"""Cases of the norms, with or without a residual, mean, weight and bias."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.cases._layouts import Layouts, drawn_as


@dataclass(frozen=True)
class NormCase:
    """Shapes of one call; `parameters` is "same" (x's dtype), "fp32" or "none", "weight" has no bias.

    `offset` is added to x: a mean far from 0.
    """

    name: str
    reaches: str
    rows: tuple[int, ...]
    width: int
    layout: str = "contiguous"
    parameters: str = "same"
    eps: float = 1e-6
    offset: float = 0.0
    tags: frozenset[str] = frozenset({"edge"})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows, self.width)


@dataclass(frozen=True)
class NormInputs:
    """Random tensors of a case, and upstream gradients; without a bias or a residual the field is None."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    dout: Tensor
    dsum: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors whose gradients are taken, in the order of the op's arguments."""
        named = {"x": self.x, "residual": self.residual, "weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def exact(self) -> "NormInputs":
        """The same in fp64."""
        tensors = {name: value.double() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return NormInputs(**{**vars(self), **tensors})

    def call(self, function: Any, **tensors: Tensor) -> tuple[Tensor, ...]:
        """The results of function(x[, residual], weight[, bias], eps), by these tensors where they are given."""
        given = {**self.tensors, **tensors}
        result = function(**given, eps=self.eps)
        return result if isinstance(result, tuple) else (result,)


_DRAWN: Layouts = {
    "contiguous": lambda draw, *shape: draw(*shape),
    "row_strided": lambda draw, *shape: draw(*shape[:-1], 2, shape[-1])[..., 1, :],
    "column_strided": lambda draw, *shape: draw(shape[-1], *shape[:-1]).movedim(0, -1),
    "swapped": lambda draw, *shape: (
        draw(shape[1], shape[0], shape[2]).transpose(0, 1) if len(shape) == 3 else draw(*shape)
    ),
    "misaligned": lambda draw, *shape: draw(math.prod(shape) + 1)[1:].view(shape),
    "odd_strides": lambda draw, *shape: draw(*shape[:-1], shape[-1] + 3)[..., : shape[-1]],
    "expanded": lambda draw, *shape: draw(shape[-1]).expand(shape),
}
NORM_LAYOUTS = tuple(_DRAWN)


def make_norm_inputs(
    op: str, case: NormCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> NormInputs:
    """Fresh random inputs of a norm by its name; the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype).to(device)

    def parameter(present: bool, mean: float) -> Tensor | None:
        if not present or case.parameters == "none":
            return None
        drawn = mean + torch.randn(case.width, generator=generator, device="cpu") / 4
        kept = torch.promote_types(dtype, torch.float32) if case.parameters == "fp32" else dtype
        return drawn.to(kept).to(device)

    x = drawn_as(_DRAWN, case.layout, draw, *case.shape)
    return NormInputs(
        x=x + case.offset if case.offset else x,
        residual=drawn_as(_DRAWN, case.layout, draw, *case.shape) if op.startswith("add_") else None,
        weight=parameter(True, 1.0),
        bias=parameter("layer" in op and case.parameters != "weight", 0.0),
        eps=case.eps,
        dout=drawn_as(_DRAWN, case.layout, draw, *case.shape),
        dsum=drawn_as(_DRAWN, case.layout, draw, *case.shape),
    )


def _case(name: str, reaches: str, rows: tuple[int, ...], width: int, *tags: str, **rest: Any) -> NormCase:
    return NormCase(name, reaches, rows, width, tags=frozenset(tags or ("edge",)), **rest)


TOWERS = {"s": 768, "m": 1024, "l": 1152, "qwen25": 1280}
ROWS = (784, 4096, 25088)

NORMS = (
    _case("l_tower", "several parts, the last of them half empty", (13,), 1152, "smoke", "edge"),
    _case("s_tower", "parts without a rest", (9,), 768, "smoke", "edge"),
    _case("narrow", "several rows to a warp", (70,), 72, "smoke", "edge"),
    # Without parameters, and of many rows: of a few numbers eager's error is luck.
    _case("one_column", "a mean that is the row itself", (200,), 1, eps=0.1, parameters="none"),
    _case("odd_width", "columns that no load of 16 bytes divides", (21,), 331),
    _case("one_row", "fewer rows than a tile has", (1,), 1024),
    _case("one_dimension", "no leading dimension", (), 200),
    _case("no_rows", "nothing to norm, sums of nothing", (0,), 96),
    _case("no_rows_of_many", "an empty leading dimension", (3, 0), 96),
    _case("many_rows", "several tiles to a program of the interpreter", (90,), 40),
    _case("merger", "a row of several warps", (5,), 4608),
    _case("decoder", "a row of several warps, no rest", (4,), 4096),
    _case("wide", "columns in blocks, the last not full", (3,), 16500),
    _case("wide_rows", "a gradient of columns in blocks, more rows than an interpreter's programs", (20,), 6200),
    _case("batched", "leading dimensions that fold into one", (2, 3, 5), 160),
    _case("fp32_parameters", "parameters of another dtype", (11,), 768, parameters="fp32"),
    _case("bare", "no parameters", (11,), 200, parameters="none"),
    _case("weight_alone", "no bias", (11,), 200, parameters="weight"),
    _case("large_mean", "differences that are small beside the mean", (12,), 512, offset=30.0),
    _case("large_eps", "an eps that decides", (12,), 320, eps=0.5),
    *(
        _case(layout, f"the layout {layout}", (6, 7), 96, layout=layout)
        for layout in NORM_LAYOUTS
        if layout != "contiguous"
    ),
    *(
        _case(f"qwen_{tower}_{rows}", f"{width} columns", (rows,), width, "bench")
        for tower, width in TOWERS.items()
        for rows in ROWS
    ),
    *(_case(f"merger_{rows // 4}", "the merger's norm of four patches", (rows // 4,), 4608, "bench") for rows in ROWS),
    _case("decoder_4096", "a language model's width", (4096,), 4096, "bench"),
    _case("decoder_5120", "a language model's width", (4096,), 5120, "bench"),
)


def norm_cases(tag: str) -> tuple[NormCase, ...]:
    return tuple(case for case in NORMS if tag in case.tags)
