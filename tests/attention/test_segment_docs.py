"""The code of docs/segment_attention.md, run by two ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.models import ranks
from torch_ops import window_attn
from torch_ops.testing.cases import cumulative

PAGE = Path(__file__).parents[2] / "docs" / "segment_attention.md"

pytestmark = pytest.mark.no_interpret


def page_runs(device: str) -> None:
    """Every block, in order and with the names of those before."""
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
        if "local_out" in block:
            _check_context_parallel(names)
        if "whole_sequences(" in block:
            _check_without_causal_order(names)
    assert names["lse"].shape == (8, 256) and names["q"].grad.shape == (256, 8, 64)
    assert names["kv_buffer"].grad.isfinite().all()
    for group, longest in (("0", 128), ("1", 128)):
        assert names[f"out{group}"].shape == names[f"q{group}"].shape and names[f"lse{group}"].shape == (16, longest)


def _check_context_parallel(names: dict[str, Any]) -> None:
    """out and gradients are those of one device that has all tokens."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in names["batch"])
    out = window_attn(q, k, v, cumulative(tuple(names["lengths"]), "cpu"), causal=True)
    out.sum().backward()
    own = names["tokens"][dist.get_rank()]
    torch.testing.assert_close(names["local_out"], out[own])
    for name, whole in (("q", q), ("k", k), ("v", v)):
        torch.testing.assert_close(names[name].grad, whole.grad[own])


def _check_without_causal_order(names: dict[str, Any]) -> None:
    """A window reaches across chunks, before and behind them."""
    whole = window_attn(*names["batch"], cumulative(tuple(names["lengths"]), "cpu"), window_left=9)
    torch.testing.assert_close(names["out"], whole[names["zigzag_indices"](names["lengths"], 0, 2)])


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of PyTorch has no gloo")
def test_code_of_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    ranks.start(2, "cpu", tmp_path, [page_runs])
