"""Context parallel with zigzag chunks, simulated on one device: every rank's part, put together, is the whole.

Each sequence is cut into 2 W chunks by floor division, and rank r holds chunks r and 2 W - 1 - r of every sequence. An
all-gather leaves the ranks' rows one after the other. Here the layout is made token by token.

A key limit says both how far a segment sees and where its queries stand. Without causal order each segment sees its
whole sequence, so its queries stand at the sequence's end, which windows, ALiBi and dropout would notice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.verify import differentiate, expected
from tests.verify import HALVES, INTERPRET
from torch_ops import window_attn
from torch_ops.testing import check_draws, poisoned, redrawn
from torch_ops.testing.cases import WindowAttnCase, WindowAttnInputs, cumulative, make_inputs
from torch_ops.testing.tolerance import Draw

OP, BACKWARD_OP = torch.ops.vk.segment_attention, torch.ops.vk.segment_attention_backward

pytestmark = pytest.mark.interpret


class Rank(NamedTuple):
    """The rows of the whole batch that a rank holds, and its index tensors for the gathered keys."""

    tokens: Tensor
    places: tuple[Tensor, ...]


@dataclass
class Layout:
    """The ranks, and the row of the gathered buffer that holds each token of the whole batch.

    In a padded gather all ranks have equally many rows. Rows past a rank's tokens hold nothing.
    """

    lengths: tuple[int, ...]
    world_size: int
    device: str
    causal: bool = True
    padded: bool = False
    gathered: Tensor = field(init=False)
    total: int = field(init=False)
    ranks: list[Rank] = field(init=False)

    def __post_init__(self) -> None:
        row_of: dict[tuple[int, int], int] = {}
        held = [[*self._tokens(rank)] for rank in range(self.world_size)]
        most = max(map(len, held))
        self.total = 0
        for rank, tokens in enumerate(held):
            self.total = rank * (most + 3) if self.padded else self.total
            row_of |= {token: self.total + index for index, token in enumerate(tokens)}
            self.total += most + 3 if self.padded else len(tokens)
        starts = [sum(self.lengths[:sequence]) for sequence in range(len(self.lengths))]
        in_order = [(sequence, key) for sequence, length in enumerate(self.lengths) for key in range(length)]
        self.gathered = torch.tensor([row_of[token] for token in in_order], dtype=torch.int64, device=self.device)
        bounds = [[self._chunk(sequence, i).start for i in range(2 * self.world_size)] for sequence in self._sequences]
        # The row of an empty chunk may be anything.
        rows = [[row_of.get((s, key), -5) for key in own] for s, own in enumerate(bounds)]
        bounds = [[*own, length] for own, length in zip(bounds, self.lengths, strict=True)]
        self.ranks = []
        for rank, tokens in enumerate(held):
            chunks = [(s, self._chunk(s, i)) for s in self._sequences for i in self._of_rank(rank)]
            index = partial(torch.tensor, dtype=torch.int32, device=self.device)
            cu_seqlens_q = cumulative(tuple(len(chunk) for _, chunk in chunks), self.device)
            sequences = index([s for s, _ in chunks])
            limits = index([chunk.stop if self.causal else self.lengths[s] for s, chunk in chunks])
            own = torch.tensor([starts[s] + key for s, key in tokens], dtype=torch.int64, device=self.device)
            self.ranks.append(Rank(own, (cu_seqlens_q, sequences, limits, index(bounds), index(rows))))

    @property
    def _sequences(self) -> range:
        return range(len(self.lengths))

    def _of_rank(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.world_size - 1 - rank

    def _chunk(self, sequence: int, index: int) -> range:
        length, chunks = self.lengths[sequence], 2 * self.world_size
        return range(length * index // chunks, length * (index + 1) // chunks)

    def _tokens(self, rank: int) -> Iterator[tuple[int, int]]:
        for sequence in self._sequences:
            for chunk in self._of_rank(rank):
                yield from ((sequence, key) for key in self._chunk(sequence, chunk))

    def gather(self, tensor: Tensor) -> Tensor:
        """The ranks' slices of a tensor, one after the other; NaN where a padded gather has rows of no token."""
        slices = [tensor[rank.tokens] for rank in self.ranks]
        if self.padded:
            size = self.total // self.world_size
            slices = [
                torch.cat((own, own.new_full((size - own.shape[0], *own.shape[1:]), torch.nan))) for own in slices
            ]
        return torch.cat(slices)


def _by_ranks(layout: Layout, inputs: WindowAttnInputs) -> dict[str, Tensor]:
    """out, lse and gradients of the whole batch, from each rank's; dk and dv are sums over the ranks in fp32."""
    options = inputs.options
    k, v = layout.gather(inputs.k), layout.gather(inputs.v)
    results = {"out": torch.full_like(inputs.q, torch.nan), "dq": torch.full_like(inputs.q, torch.nan)}
    results["lse"] = torch.full_like(inputs.dlse, torch.nan)
    dk, dv = (torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) for tensor in (k, v))
    for rank in layout.ranks:
        own = rank.tokens
        q, dout, dlse = inputs.q[own], inputs.dout[own], inputs.dlse[:, own]
        with poisoned():
            out, lse = OP(q, k, v, *rank.places, **options)
            dq, *partial_sums = BACKWARD_OP(dout, dlse, q, k, v, out, lse, *rank.places, **options, float32_kv=True)
        results["out"][own], results["lse"][:, own], results["dq"][own] = out, lse, dq
        for total, part in zip((dk, dv), partial_sums, strict=True):
            assert part.dtype == torch.float32
            total += part
    unheld = torch.ones(layout.total, dtype=torch.bool, device=k.device)
    unheld[layout.gathered] = False
    for name, total in (("dk", dk), ("dv", dv)):
        assert (total[unheld] == 0).all()
        results[name] = total[layout.gathered]
    return results


FULL = {"causal": False}
CAUSAL = {"causal": True}
EVERY = {"alibi": 2, "dropout_p": 0.2, "softcap": 3.0, "causal": True, "window_left": 30}
# Lengths of the sequences, heads, key heads, head dim and options.
Setting = tuple[tuple[int, ...], int, int, int, dict[str, Any]]
SETTINGS: dict[str, Setting] = {
    "equal": ((128,), 2, 2, 64, CAUSAL),
    "documents": ((96, 40, 64), 2, 2, 40, CAUSAL),
    "uneven": ((101, 37, 7), 1, 1, 72, CAUSAL),
    "shorter_than_2w": ((0, 3, 1, 75, 2, 0, 7), 1, 1, 32, CAUSAL),
    "gqa3": ((101, 37), 6, 2, 40, CAUSAL),
    "gqa7": ((101, 37), 7, 1, 16, CAUSAL),
    "full": ((101, 37, 2), 1, 1, 40, FULL),
    "window": ((150, 37), 1, 1, 32, {"causal": True, "window_left": 41}),
    "alibi": ((101, 37), 2, 2, 24, {"causal": True, "alibi": 1}),
    "alibi_rows": ((101, 37), 2, 2, 24, {"causal": True, "alibi": 2}),
    "dropout": ((101, 37), 4, 2, 40, {"causal": True, "dropout_p": 0.3}),
    "full_gqa7": ((101, 0, 37), 7, 1, 16, {"causal": False, "softcap": 3.0}),
    "everything": ((61, 23, 5), 3, 1, 24, EVERY),
}
INTERPRETED = ("shorter_than_2w", "full", "window", "everything")


def _inputs(setting: Setting, dtype: torch.dtype, device: str, more: dict[str, Any] | None = None) -> WindowAttnInputs:
    lengths, heads, k_heads, dim, options = setting
    case = WindowAttnCase("whole", "one device", lengths, heads, dim, num_k_heads=k_heads)
    return make_inputs(replace(case, options={**options, **(more or {})}), dtype, device)


def _verify(setting: Setting, world_size: int, dtype: torch.dtype, device: str, padded: bool = False) -> None:
    first = _inputs(setting, dtype, device)
    layout = Layout(setting[0], world_size, device, setting[-1]["causal"], padded)

    def draw(seed: int) -> Draw:
        inputs = redrawn(first, seed)
        return _by_ranks(layout, inputs), *expected(inputs)

    check_draws(draw)


@pytest.mark.parametrize("name", INTERPRETED if INTERPRET else SETTINGS)
@pytest.mark.parametrize("world_size", [2] if INTERPRET else [2, 4, 8])
def test_ranks_together_are_one_device(name: str, world_size: int, device: str) -> None:
    for dtype in [torch.float16] if INTERPRET else [HALVES[-1], torch.float32]:
        _verify(SETTINGS[name], world_size, dtype, device)


def test_a_padded_gather_holds_nothing_else(device: str) -> None:
    """Each rank gathers equally many rows, and rows of no token hold NaN."""
    _verify(SETTINGS["shorter_than_2w"], 2 if INTERPRET else 4, torch.float16, device, padded=True)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("options", [CAUSAL, FULL, {"causal": True, "window_left": 1000}], ids=str)
def test_ranks_together_are_one_device_at_real_shapes(options: dict[str, Any], world_size: int, device: str) -> None:
    _verify(((3000, 1111, 17), 6, 2, 128, options), world_size, torch.bfloat16, device)


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", ["uneven", "full", "everything"])
def test_gradients_flow_through_the_gather(name: str, device: str) -> None:
    """Autograd adds up the gradients of all ranks, for sinks too."""
    setting = SETTINGS[name]
    layout = Layout(setting[0], 2, device, setting[-1]["causal"])

    def function(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        keys = layout.gather(k), layout.gather(v)
        parts = [OP(q[rank.tokens], *keys, *rank.places, **options) for rank in layout.ranks]
        order = torch.cat([rank.tokens for rank in layout.ranks]).argsort()
        return torch.cat([out for out, _ in parts])[order], torch.cat([lse for _, lse in parts], 1)[:, order]

    first = _inputs(setting, torch.float32, device, {"sinks": True})

    def draw(seed: int) -> Draw:
        inputs = redrawn(first, seed)
        return differentiate(function, inputs), *expected(inputs)

    check_draws(draw)


@pytest.mark.parametrize("world_size", [2] if INTERPRET else [2, 4, 8])
def test_dropout_masks_are_those_of_one_device(world_size: int, device: str) -> None:
    """Unit vectors for values show which weights are dropped."""
    lengths, heads, dim = (48, 0, 37, 3), 1 if INTERPRET else 2, 48
    q, k = (torch.randn(sum(lengths), heads, dim, device=device) for _ in range(2))
    v = torch.cat([torch.eye(dim, device=device)[:length] for length in lengths])[:, None].repeat(1, heads, 1)
    options = {"causal": True, "dropout_p": 0.4, "dropout_seed": torch.tensor([2**40 + 7], device=device)}
    whole = window_attn(q, k, v, cumulative(lengths, device), **options) != 0
    assert 0.5 < whole[47].float().mean() < 0.75
    layout = Layout(lengths, world_size, device)
    for rank in layout.ranks:
        out, _ = OP(q[rank.tokens], layout.gather(k), layout.gather(v), *rank.places, **options)
        assert torch.equal(out != 0, whole[rank.tokens])


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", ["documents", "gqa7", "full", "window", "everything"])
def test_ranks_agree_with_packed_attention(name: str, device: str) -> None:
    """Ranks' errors are at most twice the errors of `window_attn` on one device, which has the same precision."""
    setting = SETTINGS[name]
    first = _inputs(setting, torch.float16, device)
    layout = Layout(setting[0], 4, device, setting[-1]["causal"])

    def draw(seed: int) -> Draw:
        inputs = redrawn(first, seed)
        ranks = _by_ranks(layout, inputs)
        # Both sides then round dk and dv once.
        ranks |= {name: ranks[name].to(inputs.k.dtype) for name in ("dk", "dv")}
        return ranks, differentiate(torch.ops.vk.window_attn, inputs), expected(inputs)[1]

    check_draws(draw)


@pytest.mark.no_interpret
def test_every_rank_gives_the_same_bits_every_time(device: str) -> None:
    inputs = _inputs(SETTINGS["everything"], torch.float16, device)
    layout = Layout(SETTINGS["everything"][0], 4, device)
    one, other = (_by_ranks(layout, inputs) for _ in range(2))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
