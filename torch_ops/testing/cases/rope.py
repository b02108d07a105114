"""Cases of packed attention with a rotary embedding: those of `window_attn` whose keys have the rows of the queries."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from torch_ops.testing.cases.attention import WINDOW_ATTN, WindowAttnCase, WindowAttnInputs, make_inputs

# How cos and sin lie: as Transformers makes them; one column for both halves; in the dtype of q; angles of the halves
# that differ; columns that are not contiguous; rows of a wider table; base pointers off 16 bytes.
TABLES = ("full", "half", "own", "half_own", "apart", "column_strided", "row_strided", "misaligned")

SCORE_MODS = {"alibi", "sinks", "dropout_p"}
ROPE_WINDOW_ATTN = (
    # The op has no score modification but softcap.
    *(case for case in WINDOW_ATTN if case.total_k == case.total_q and SCORE_MODS.isdisjoint(case.options)),
    WindowAttnCase("own_boundaries", "keys cut elsewhere", (40, 8, 3), 2, 72, k_lengths=(11, 0, 40), padding=5),
    WindowAttnCase("own_boundaries_gqa", "causal, rows that see no key", (40, 8), 4, 16, (8, 40), 2,
                   options={"causal": True}),
    *(
        WindowAttnCase(f"qwen3vl_l_{rows}", f"L tower, {pixels} px", (rows,), 16, 72, tags=frozenset({"bench"}))
        for rows, pixels in ((784, 448), (1764, 672), (3136, 896), (7056, 1344))
    ),
)  # fmt: skip


@dataclass(frozen=True)
class RopeWindowAttnInputs(WindowAttnInputs):
    """Random tensors of a case with their tables, and upstream gradients for out and lse."""

    op: ClassVar[str] = "rope_window_attn"

    cos: Tensor
    sin: Tensor

    @property
    def places(self) -> tuple[Tensor | None, ...]:
        return self.cos, self.sin, *super().places


def _laid_out(table: Tensor, tables: str) -> Tensor:
    rows, columns = table.shape
    if tables == "column_strided":
        return table.t().contiguous().t()
    if tables == "row_strided":
        return torch.cat([table, table], 1)[:, columns:]
    if tables == "misaligned":
        return table.new_empty(table.numel() + 1)[1:].view(rows, columns).copy_(table)
    return table


def make_rope_inputs(
    case: WindowAttnCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0, tables: str = "full"
) -> RopeWindowAttnInputs:
    """Fresh random inputs, with `tables` one of TABLES; the same for the same seed on every device."""
    if tables not in TABLES:
        raise ValueError(f"tables is {tables!r}, expected one of {', '.join(TABLES)}")
    inputs = make_inputs(case, dtype, device, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    half = case.head_dim // 2
    angles = 3 * torch.randn(
        case.total_q, case.head_dim if tables == "apart" else half, generator=generator, device="cpu"
    )
    if tables not in ("half", "half_own", "apart"):
        angles = torch.cat([angles, angles], 1)
    kept = dtype if "own" in tables else torch.float32
    cos, sin = (_laid_out(table.to(kept).to(device), tables) for table in (angles.cos(), angles.sin()))
    return RopeWindowAttnInputs(**vars(inputs), cos=cos, sin=sin)


def make_projected_rope_inputs(
    case: WindowAttnCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> RopeWindowAttnInputs:
    """The same with q, k and v as views of one packed projection, as models have them."""
    inputs = make_rope_inputs(case, dtype, device, seed)
    packed = (inputs.q, inputs.k, inputs.v)
    q, k, v = torch.cat(packed, 1).split([tensor.shape[1] for tensor in packed], 1)
    return replace(inputs, q=q, k=k, v=v)


def rope_window_attn_cases(tag: str) -> tuple[WindowAttnCase, ...]:
    """The cases that carry a tag."""
    return tuple(case for case in ROPE_WINDOW_ATTN if tag in case.tags)
