"""Kernels that begin while the one before ends (`csrc_free_ops/tiles/overlap.py`): none reads or writes too early."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ops import add_layer_norm, add_rms_norm, layer_norm, mlp, qkv_rope, rms_norm, rope_window_attn, window_attn

pytestmark = [pytest.mark.gpu, pytest.mark.no_interpret]

WIDTH, HEADS, INNER = 1152, 16, 4304
ROUNDS = 12


def _draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


class Block:
    """A block of an encoder on buffers that the allocator hands from op to op; `then` is called between ops."""

    def __init__(self, rows: int, segments: int) -> None:
        torch.manual_seed(rows)
        self.x = _draw(rows, WIDTH)
        self.norm = _draw(WIDTH), _draw(WIDTH)
        self.qkv = _draw(3 * WIDTH, WIDTH, scale=0.03), _draw(3 * WIDTH)
        self.layers = _draw(INNER, WIDTH, scale=0.03), _draw(INNER), _draw(WIDTH, INNER, scale=0.02), _draw(WIDTH)
        angles = torch.randn(rows, WIDTH // HEADS // 2, device="cuda")
        self.tables = angles.cos(), angles.sin()
        self.boundaries = torch.arange(segments + 1, device="cuda", dtype=torch.int32) * (rows // segments)

    def run(self, kind: str, then: Callable[[], None]) -> Tensor:
        x, residual = self.x, self.x
        boundaries = self.boundaries
        for _ in range(ROUNDS):
            if kind == "rms":
                x = self._after(then, rms_norm(x, self.norm[0]))
                x, residual = self._after(then, add_rms_norm(x, residual, self.norm[0]))
            x = self._after(then, layer_norm(x, *self.norm))
            q, k, v = self._after(then, qkv_rope(x, *self.qkv, *self.tables, HEADS))
            if kind == "turned":
                x = self._after(then, rope_window_attn(q, k, v, *self.tables, boundaries))
            else:
                x = self._after(then, window_attn(q, k, v, boundaries))
            x, residual = self._after(then, add_layer_norm(x.flatten(1), residual, *self.norm))
            # The boundaries too are what the kernel before wrote: they must not be read before.
            boundaries = self._after(then, boundaries.clone())
            x = self._after(then, mlp(x, *self.layers))
        return x + residual

    @staticmethod
    def _after(then: Callable[[], None], result: Any) -> Any:
        then()
        return result


@pytest.mark.parametrize("kind", ["plain", "turned", "rms"])
@pytest.mark.parametrize(("rows", "segments"), [(64, 1), (784, 1), (784, 49), (3136, 4)])
def test_a_chain_gives_the_bits_of_one_that_waits_between_ops(rows: int, segments: int, kind: str) -> None:
    block = Block(rows, segments)
    expected = block.run(kind, torch.cuda.synchronize)
    assert expected.isfinite().all() and expected.abs().max() > 0
    for _ in range(5):
        assert torch.equal(block.run(kind, lambda: None), expected)


@pytest.mark.parametrize("kind", ["plain", "turned", "rms"])
def test_a_captured_chain_gives_the_same_bits(kind: str) -> None:
    """With what is no kernel before ours, a fill and a copy, and on other values than it was captured with."""
    block = Block(784, 4)
    expected = block.run(kind, torch.cuda.synchronize)
    given, block.x = block.x, torch.zeros_like(block.x)
    run: Callable[[], Tensor] = partial(block.run, kind, lambda: None)
    run()
    graph = torch.cuda.CUDAGraph()
    source = torch.empty_like(given)
    with torch.cuda.graph(graph):
        block.x.zero_()
        block.x.copy_(source)
        found = run()
    for _ in range(5):
        source.copy_(given)
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)
        source.zero_()
