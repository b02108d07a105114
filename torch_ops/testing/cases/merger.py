"""Cases of `patch_merger`."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.cases.linear import BENCH, BOTH, EDGE


@dataclass(frozen=True)
class MergerCase:
    """Shapes of one call; `outer` is None for one projection, which has `inner` columns, or as many as a merged row."""

    name: str
    reaches: str
    total: int
    width: int
    outer: int | None
    inner: int | None = None
    merge_size: int = 2
    norm: str = "layer"
    norm_after: bool = False
    bias: bool = True
    fp32_norm: bool = False
    layout: str = "contiguous"
    tags: frozenset[str] = EDGE

    @property
    def rows(self) -> int:
        """Columns of the result."""
        return self.total // self.merge_size**2

    @property
    def merged(self) -> int:
        return self.merge_size**2 * self.width


@dataclass(frozen=True)
class MergerInputs:
    """Random tensors of a case, and an upstream gradient for out; what a case has not is None."""

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor | None
    fc2_bias: Tensor | None
    dout: Tensor
    case: MergerCase

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Tensors whose gradients are taken."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor) and name != "dout"}

    @property
    def douts(self) -> dict[str, Tensor]:
        """The upstream gradient of each result, by its name."""
        return {"out": self.dout}

    def call(self, function: Any, **tensors: Any) -> Any:
        """function by its arguments' order, with those of these tensors that are given."""
        given = replace(self, **tensors)
        return function(
            given.x, given.norm_weight, given.norm_bias, given.fc1_weight, given.fc1_bias, given.fc2_weight,
            given.fc2_bias, given.case.merge_size, given.case.norm_after, 1e-6, given.case.norm == "rms",
        )  # fmt: skip


def make_merger_inputs(
    case: MergerCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> MergerInputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cpu") * scale).to(dtype).to(device)

    x = draw(case.total, case.width + 24)[:, 8 : 8 + case.width] if case.layout == "row_strided" else None
    if case.layout == "column_strided":
        x = draw(case.width, case.total).t()
    inner = case.inner or case.merged
    normed = case.merged if case.norm_after else case.width
    of_norm = torch.promote_types(dtype, torch.float32) if case.fp32_norm else dtype
    return MergerInputs(
        x=draw(case.total, case.width) if x is None else x,
        norm_weight=draw(normed, dtype=of_norm) if case.norm != "none" else None,
        norm_bias=draw(normed, dtype=of_norm) if case.norm == "layer" and case.bias else None,
        fc1_weight=draw(inner, case.merged, scale=case.merged**-0.5),
        fc1_bias=draw(inner) if case.bias else None,
        fc2_weight=draw(case.outer, inner, scale=inner**-0.5) if case.outer else None,
        fc2_bias=draw(case.outer) if case.outer and case.bias else None,
        dout=draw(case.rows, case.outer or inner),
        case=case,
    )


# (width, out, norm) of Qwen3-VL's towers and Qwen2.5-VL's.
_MERGERS = ((1152, 4096, "layer"), (1024, 2560, "layer"), (1280, 3584, "rms"))

MERGERS = (
    MergerCase("tower", "norm, concat, both layers", 140, 24, 40, tags=BOTH),
    MergerCase("after", "the norm of merged rows", 140, 24, 40, norm_after=True, tags=BOTH),
    MergerCase("rms", "RMSNorm", 140, 24, 40, norm="rms", tags=BOTH),
    MergerCase("rms_after", "RMSNorm of merged rows", 120, 24, 40, norm="rms", norm_after=True),
    MergerCase("projection", "one projection of normed rows", 140, 24, None, inner=56),
    MergerCase("bare_projection", "concat and one projection", 140, 24, None, inner=56, norm="none", bias=False),
    MergerCase("no_norm", "both layers of rows as they are", 140, 24, 40, norm="none"),
    MergerCase("bare", "no biases", 140, 24, 40, bias=False),
    MergerCase("three", "nine patches in a row, odd widths", 261, 13, 21, inner=35, merge_size=3),
    MergerCase("one", "no merge at all", 40, 24, 40, merge_size=1),
    MergerCase("fp32_norm", "norm parameters in fp32", 140, 24, 40, fp32_norm=True),
    MergerCase("no_rows", "no rows at all", 0, 24, 40),
    MergerCase("row_strided", "rows further apart", 140, 24, 40, layout="row_strided"),
    MergerCase(
        "after_column_strided", "columns that are copied", 140, 24, 40, norm_after=True, layout="column_strided"
    ),
    *(
        MergerCase(f"merger_{width}_{total}", f"{total} patches", total, width, outer, norm=norm, tags=BENCH)
        for width, outer, norm in _MERGERS
        for total in (784, 3136, 25088)
    ),
    *(
        MergerCase(f"deepstack_1152_{total}", f"{total} patches", total, 1152, 4096, norm_after=True, tags=BENCH)
        for total in (784, 3136, 25088)
    ),
)


def merger_cases(tag: str) -> tuple[MergerCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in MERGERS if tag in case.tags)
