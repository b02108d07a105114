"""Context parallel with zigzag chunks, simulated on one device: every rank's part, put together, is the whole.

Each sequence is cut into 2 W chunks by floor division, and rank r holds chunks r and 2 W - 1 - r of every sequence. An
all-gather leaves the ranks' rows one after the other. Here the layout is made token by token.

In causal order a segment sees the keys up to its chunk's end. Without causal order it sees its whole sequence, and
query_start says where the chunk begins, because windows, ALiBi and dropout go by positions.
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
from torch_ops.segments import whole_sequences, zigzag, zigzag_indices
from torch_ops.testing import check_draws, poisoned, redrawn
from torch_ops.testing.cases import WindowAttnCase, WindowAttnInputs, cumulative, make_inputs
from torch_ops.testing.tolerance import Draw

OP, BACKWARD_OP = torch.ops.vk.segment_attention, torch.ops.vk.segment_attention_backward

pytestmark = pytest.mark.interpret


class Rank(NamedTuple):
    """The rows of the whole batch that a rank holds, and its index tensors for the gathered keys.

    `starts` has query_start, where segments see whole sequences.
    """

    tokens: Tensor
    places: tuple[Tensor, ...]
    starts: dict[str, Tensor]


@dataclass
class Layout:
    """The ranks, and the row of the gathered buffer that holds each token of the whole batch.

    With `in_whole` segments see whole sequences, else the keys up to their end. In a padded gather all ranks have
    equally many rows. Rows past a rank's tokens hold nothing.
    """

    lengths: tuple[int, ...]
    world_size: int
    device: str
    in_whole: bool = False
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
            limits = index([self.lengths[s] if self.in_whole else chunk.stop for s, chunk in chunks])
            first = {"query_start": index([chunk.start for _, chunk in chunks])} if self.in_whole else {}
            own = torch.tensor([starts[s] + key for s, key in tokens], dtype=torch.int64, device=self.device)
            self.ranks.append(Rank(own, (cu_seqlens_q, sequences, limits, index(bounds), index(rows)), first))

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
            out, lse = OP(q, k, v, *rank.places, **options, **rank.starts)
            dq, *partial_sums = BACKWARD_OP(
                dout, dlse, q, k, v, out, lse, *rank.places, **options, float32_kv=True, **rank.starts
            )
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
    "full_left": ((101, 37, 7), 6, 2, 40, {"causal": False, "window_left": 41}),
    "full_right": ((101, 37, 7), 7, 1, 16, {"causal": False, "window_right": 30}),
    "full_window": ((150, 37), 1, 1, 32, {"causal": False, "window_left": 25, "window_right": 41}),
    "full_narrow": ((150, 0, 37), 2, 2, 24, {"causal": False, "window_left": 3, "window_right": 2}),
    "full_alibi": ((101, 37), 6, 2, 24, {"causal": False, "alibi": 1}),
    "full_dropout": ((101, 37, 3), 7, 1, 16, {"causal": False, "dropout_p": 0.3}),
    "full_everything": ((61, 23, 5), 12, 4, 24, {**EVERY, "causal": False, "window_right": 17}),
}
INTERPRETED = ("shorter_than_2w", "window", "everything", "full_window")


def _inputs(setting: Setting, dtype: torch.dtype, device: str, more: dict[str, Any] | None = None) -> WindowAttnInputs:
    lengths, heads, k_heads, dim, options = setting
    case = WindowAttnCase("whole", "one device", lengths, heads, dim, num_k_heads=k_heads)
    return make_inputs(replace(case, options={**options, **(more or {})}), dtype, device)


def _layout(setting: Setting, world_size: int, device: str) -> Layout:
    lengths, *_, options = setting
    return Layout(lengths, world_size, device, in_whole=not options["causal"])


def _verify(setting: Setting, layout: Layout, dtype: torch.dtype, device: str) -> None:
    first = _inputs(setting, dtype, device)

    def draw(seed: int) -> Draw:
        inputs = redrawn(first, seed)
        return _by_ranks(layout, inputs), *expected(inputs)

    check_draws(draw)


@pytest.mark.parametrize("name", INTERPRETED if INTERPRET else SETTINGS)
@pytest.mark.parametrize("world_size", [2] if INTERPRET else [2, 4, 8])
def test_ranks_together_are_one_device(name: str, world_size: int, device: str) -> None:
    for dtype in [torch.float16] if INTERPRET else [HALVES[-1], torch.float32]:
        _verify(SETTINGS[name], _layout(SETTINGS[name], world_size, device), dtype, device)


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", ["uneven", "window", "everything"])
def test_causal_order_in_whole_sequences(name: str, device: str) -> None:
    """No row sees a key behind itself, wherever its segment ends."""
    layout = Layout(SETTINGS[name][0], 4, device, in_whole=True)
    _verify(SETTINGS[name], layout, torch.float16, device)


def test_a_padded_gather_holds_nothing_else(device: str) -> None:
    """Each rank gathers equally many rows, and rows of no token hold NaN."""
    setting = SETTINGS["shorter_than_2w"]
    _verify(setting, Layout(setting[0], 2 if INTERPRET else 4, device, padded=True), torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize(
    "options",
    [
        CAUSAL,
        FULL,
        {"causal": True, "window_left": 1000},
        {"causal": False, "window_left": 700, "window_right": 200, "dropout_p": 0.1},
    ],
    ids=str,
)
def test_ranks_together_are_one_device_at_real_shapes(options: dict[str, Any], world_size: int, device: str) -> None:
    setting = (3000, 1111, 17), 6, 2, 128, options
    _verify(setting, _layout(setting, world_size, device), torch.bfloat16, device)


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", ["uneven", "full", "everything", "full_everything"])
def test_gradients_flow_through_the_gather(name: str, device: str) -> None:
    """Autograd adds up the gradients of all ranks, for sinks too."""
    setting = SETTINGS[name]
    layout = _layout(setting, 2, device)

    def function(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        keys = layout.gather(k), layout.gather(v)
        parts = [OP(q[rank.tokens], *keys, *rank.places, **options, **rank.starts) for rank in layout.ranks]
        order = torch.cat([rank.tokens for rank in layout.ranks]).argsort()
        return torch.cat([out for out, _ in parts])[order], torch.cat([lse for _, lse in parts], 1)[:, order]

    first = _inputs(setting, torch.float32, device, {"sinks": True})

    def draw(seed: int) -> Draw:
        inputs = redrawn(first, seed)
        return differentiate(function, inputs), *expected(inputs)

    check_draws(draw)


@pytest.mark.parametrize("world_size", [2] if INTERPRET else [2, 4, 8])
@pytest.mark.parametrize(
    "order",
    [
        CAUSAL,
        *[FULL, {"causal": True, "window_left": 29}, {"causal": False, "window_left": 29, "window_right": 22}]
        * (not INTERPRET),
    ],
    ids=str,
)
def test_dropout_masks_are_those_of_one_device(order: dict[str, Any], world_size: int, device: str) -> None:
    """Unit vectors for values show which weights are dropped."""
    lengths, heads, dim = (48, 0, 37, 3), 1 if INTERPRET else 2, 48
    q, k = (torch.randn(sum(lengths), heads, dim, device=device) for _ in range(2))
    v = torch.cat([torch.eye(dim, device=device)[:length] for length in lengths])[:, None].repeat(1, heads, 1)
    options = {**order, "dropout_p": 0.4, "dropout_seed": torch.tensor([2**40 + 7], device=device)}
    whole = window_attn(q, k, v, cumulative(lengths, device), **options) != 0
    # Token 47 sees all keys of its sequence, or 30 of 48 in a window.
    seen = 30 / 48 if "window_left" in order else 1
    assert 0.5 < whole[47].float().mean() / seen < 0.75
    layout = Layout(lengths, world_size, device, in_whole=not order["causal"])
    for rank in layout.ranks:
        out, _ = OP(q[rank.tokens], layout.gather(k), layout.gather(v), *rank.places, **options, **rank.starts)
        assert torch.equal(out != 0, whole[rank.tokens])


@pytest.mark.no_interpret
@pytest.mark.parametrize(
    "name", ["documents", "gqa7", "full", "window", "everything", "full_window", "full_everything"]
)
def test_ranks_agree_with_packed_attention(name: str, device: str) -> None:
    """Ranks' errors are at most twice the errors of `window_attn` on one device, which has the same precision."""
    setting = SETTINGS[name]
    first = _inputs(setting, torch.float16, device)
    layout = _layout(setting, 4, device)

    def draw(seed: int) -> Draw:
        inputs = redrawn(first, seed)
        ranks = _by_ranks(layout, inputs)
        # Both sides then round dk and dv once.
        ranks |= {name: ranks[name].to(inputs.k.dtype) for name in ("dk", "dv")}
        return ranks, differentiate(torch.ops.vk.window_attn, inputs), expected(inputs)[1]

    check_draws(draw)


@pytest.mark.no_interpret
@pytest.mark.parametrize("name", ["everything", "full_everything"])
def test_every_rank_gives_the_same_bits_every_time(name: str, device: str) -> None:
    inputs = _inputs(SETTINGS[name], torch.float16, device)
    layout = _layout(SETTINGS[name], 4, device)
    one, other = (_by_ranks(layout, inputs) for _ in range(2))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.no_interpret
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", [(128,), (101, 37, 7), (0, 3, 1, 75, 2, 0, 7)], ids=str)
def test_the_library_makes_these_layouts(lengths: tuple[int, ...], world_size: int, padded: bool, device: str) -> None:
    """Token by token here, by arithmetic there."""
    up_to_end = Layout(lengths, world_size, device, padded=padded)
    in_whole = Layout(lengths, world_size, device, in_whole=True, padded=padded)
    rows_per_rank = up_to_end.total // world_size if padded else None
    assert up_to_end.total == (world_size * rows_per_rank if rows_per_rank else sum(lengths))
    for number, (rank, whole) in enumerate(zip(up_to_end.ranks, in_whole.ranks, strict=True)):
        assert torch.equal(zigzag_indices(lengths, number, world_size).to(device), rank.tokens)
        segments = zigzag(lengths, number, world_size, rows_per_rank, device)
        seen, starts = whole_sequences(segments)
        has_rows, has_keys = rank.places[0].diff() > 0, rank.places[3].diff() > 0
        for made, wanted in ((segments, rank.places), (seen, whole.places)):
            for name in ("cu_seqlens_q", "key_sequence", "key_bounds"):
                assert torch.equal(getattr(made, name), wanted[made._fields.index(name)]), name
            # Limits of empty segments and rows of empty pieces may be anything.
            assert torch.equal(made.key_limit[has_rows], wanted[2][has_rows])
            assert torch.equal(made.key_rows[has_keys], wanted[4][has_keys])
        assert torch.equal(starts, whole.starts["query_start"])
