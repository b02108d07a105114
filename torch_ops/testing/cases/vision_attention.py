"""Cases of `torch_ops.models.VisionAttention`: one image through projection, attention and projection."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.cases.linear import BENCH, BOTH, EDGE


@dataclass(frozen=True)
class VisionAttentionCase:
    """Shapes of one call; with `turned` tables [T, D / 2], else as the module's defaults are: no rotation."""

    name: str
    reaches: str
    rows: int
    width: int
    num_heads: int
    head_dim: int
    turned: bool = False
    tags: frozenset[str] = EDGE


@dataclass(frozen=True)
class VisionAttentionInputs:
    """Random tensors of a case, and an upstream gradient for out."""

    x: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    cos: Tensor | None
    sin: Tensor | None
    dout: Tensor
    num_heads: int

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Tensors whose gradients are taken."""
        return {name: getattr(self, name) for name in ("x", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias")}

    @property
    def douts(self) -> dict[str, Tensor]:
        """The upstream gradient of each result, by its name."""
        return {"out": self.dout}

    def call(self, function: Any, **tensors: Any) -> Any:
        """function by its arguments' order, with those of these tensors that are given."""
        given = replace(self, **tensors)
        return function(*given.leaves.values(), given.cos, given.sin, given.num_heads)


def make_vision_attention_inputs(
    case: VisionAttentionCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> VisionAttentionInputs:
    """Angles are in fp32 (fp64 for fp64), and spread over several turns."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, kind: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cpu") * scale).to(kind).to(device)

    columns = case.num_heads * case.head_dim
    angles = None
    if case.turned:
        wide = torch.promote_types(dtype, torch.float32)
        angles = draw(case.rows, case.head_dim // 2, scale=10.0, kind=wide)
    return VisionAttentionInputs(
        x=draw(case.rows, case.width),
        qkv_weight=draw(3 * columns, case.width, scale=case.width**-0.5),
        qkv_bias=draw(3 * columns),
        proj_weight=draw(case.width, columns, scale=columns**-0.5),
        proj_bias=draw(case.width),
        cos=None if angles is None else angles.cos(),
        sin=None if angles is None else angles.sin(),
        dout=draw(case.rows, case.width),
        num_heads=case.num_heads,
    )


VISION_ATTENTION = (
    VisionAttentionCase("plain", "no rotation, one segment", 40, 32, 2, 16, tags=BOTH),
    VisionAttentionCase("turned", "a rotation, heads that are no share of the width", 45, 40, 2, 24, True, tags=BOTH),
    *(VisionAttentionCase(f"attention_1024_{2**n}", f"{2**n} rows", 2**n, 1024, 16, 64, tags=BENCH)
      for n in range(8, 15)),
    *(VisionAttentionCase(f"attention_1152_{rows}", f"Qwen3-VL's L tower, {rows} rows", rows, 1152, 16, 72, True,
                          tags=BENCH) for rows in (1024, 4096, 16384)),
)  # fmt: skip


def vision_attention_cases(tag: str) -> tuple[VisionAttentionCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in VISION_ATTENTION if tag in case.tags)
