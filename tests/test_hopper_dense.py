"""The Hopper path of attention on batches [B, H, S, D]: its orders of tiles, and its two backwards."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from csrc_free_ops.attention.hopper_work import DENSE_ENDS
from tests.attention import differentiate, verify
from torch_ops import _attention_dense_hopper, settings
from torch_ops._attention_dense_hopper import _forward_order
from torch_ops._attention_hopper import PARTS, forward_launch
from torch_ops._device import gpu
from torch_ops._hopper import programs
from torch_ops._scores import Scores
from torch_ops.testing.cases import DenseCase, make_dense_inputs

CAUSAL: dict[str, Any] = {"causal": True}
BOUNDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "window": {"window_left": 100, "window_right": 30},
    "sliding": {"window_left": 90, **CAUSAL},
    "ahead": {"window_right": 40},
    "behind": {"window_left": 200},
    "sinks": {"sinks": True, **CAUSAL},
}


@pytest.fixture(autouse=True)
def hopper(device: str) -> Iterator[None]:
    if device != "cuda" or gpu().arch != 90:
        pytest.skip("needs a Hopper GPU")
    with settings(path="hopper"):
        yield


def _assert_right(case: DenseCase, times: int = 5) -> None:
    """By the rule, and with the same bits each time."""
    inputs = make_dense_inputs(case, torch.bfloat16, "cuda")
    verify(inputs)
    first = differentiate(torch.ops.vk.attention, inputs)
    for _ in range(times):
        for name, again in differentiate(torch.ops.vk.attention, inputs).items():
            assert torch.equal(again, first[name]), name


@pytest.mark.parametrize(("length", "k_length"), [(1024, 1024), (1010, 1100), (1010, 700), (120, 400), (120, 60)])
@pytest.mark.parametrize("head_dim", PARTS)
def test_rows_from_either_end(head_dim: int, length: int, k_length: int) -> None:
    units = -(-length // 64)
    k_heads = -(-3 * programs(0) // (4 * units))
    case = DenseCase("ends", "one round", 1, 2 * k_heads, length, head_dim, k_heads, k_length, options=CAUSAL)
    scores = Scores.of(head_dim, None, True, -1, -1, 0.0)
    q = make_dense_inputs(case, torch.bfloat16, "cuda").q
    launch = forward_launch(q, scores, 1)[0]
    assert (_forward_order(q, launch, scores) == DENSE_ENDS.value) == (launch.block_m == 128)
    _assert_right(case, times=20)


@pytest.mark.parametrize("is_apart", [False, True], ids=["in_order", "apart"])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("head_dim", PARTS)
def test_gradients(head_dim: int, bounds: str, is_apart: bool) -> None:
    """Whichever backward there would have been for so few tiles."""
    case = DenseCase("grads", "a backward", 2, 6, 500, head_dim, 3, 610, "rows_first", BOUNDS[bounds])
    with mock.patch.object(_attention_dense_hopper, "fits_apart", lambda *_: is_apart):
        _assert_right(case)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("head_dim", PARTS)
def test_many_tiles(head_dim: int, bounds: str) -> None:
    _assert_right(DenseCase("rounds", "several of tiles", 5, 16, 700, head_dim, 4, 450, options=BOUNDS[bounds]))
