"""Heads of grouped-query attention, apart and together."""

import re
from typing import Any

import pytest
import torch

from torch_ops.compat.gqa import reshape_for_gqa, restore_from_gqa
from torch_ops.testing import check

pytestmark = pytest.mark.no_interpret


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_round_trip_is_a_view(num_kv_heads: int, order: tuple[int, ...]) -> None:
    q = torch.randn([(2, 6, 5, 8)[dimension] for dimension in order]).permute(*torch.tensor(order).argsort().tolist())
    apart = reshape_for_gqa(q, num_kv_heads)
    assert apart.shape == (2, num_kv_heads, 6 // num_kv_heads, 5, 8) and apart.data_ptr() == q.data_ptr()
    group = 6 // num_kv_heads
    assert all(torch.equal(apart[:, head // group, head % group], q[:, head]) for head in range(6))
    together = restore_from_gqa(apart)
    assert torch.equal(together, q) and together.stride() == q.stride() and together.data_ptr() == q.data_ptr()


def test_attention_of_groups_is_that_of_repeated_heads() -> None:
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)

    def grouped(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        apart = reshape_for_gqa(q.to(dtype), 2)
        scores = apart @ k.to(dtype).unsqueeze(2).transpose(3, 4)
        return {"out": restore_from_gqa(scores.softmax(-1) @ v.to(dtype).unsqueeze(2))}

    def repeated(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        keys, values = (each.to(dtype).repeat_interleave(3, 1) for each in (k, v))
        return {"out": (q.to(dtype) @ keys.transpose(2, 3)).softmax(-1) @ values}

    check(grouped(torch.float32), repeated(torch.float32), repeated(torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reshape_for_gqa(torch.ones(6, 5, 8), 2),
         "reshape_for_gqa: q has shape [6, 5, 8], expected shape [B, H, S, D]"),
        (lambda: reshape_for_gqa(torch.ones(1, 6, 5, 8), 4),
         "reshape_for_gqa: num_kv_heads is 4, expected a divisor of q's 6 heads"),
        (lambda: reshape_for_gqa(torch.ones(1, 6, 5, 8), 0),
         "reshape_for_gqa: num_kv_heads is 0, expected a divisor of q's 6 heads"),
        (lambda: reshape_for_gqa(torch.ones(1, 6, 5, 8), 2.0),
         "reshape_for_gqa: num_kv_heads is 2.0, expected an integer"),
        (lambda: restore_from_gqa(torch.ones(1, 6, 5, 8)),
         "restore_from_gqa: out has shape [1, 6, 5, 8], expected shape [B, Hk, G, S, D]"),
    ],
)  # fmt: skip
def test_refuses(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()
