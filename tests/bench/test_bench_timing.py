"""The order of timed calls, and the raw launch that host times are compared with."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

import torch_ops
from csrc_free_ops.configs.rows import Gpu
from tests.bench.verify import CPU
from torch_ops import settings
from torch_ops._attention import plan as attention
from torch_ops._attention import portable as attention_portable
from torch_ops._attention import small_segments
from torch_ops._core import launch as launch_module
from torch_ops.bench.measure import timing
from torch_ops.bench.measure.host import raw_launch
from torch_ops.bench.rooms.packed_cases import find_cases
from torch_ops.testing.cases import make_inputs

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_orders_are_balanced(count: int) -> None:
    orders = timing.balanced_orders(count)
    for place in range(count):
        assert Counter(order[place] for order in orders) == dict.fromkeys(range(count), len(orders) // count)
    follows = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(follows) == count * (count - 1) and len(set(follows.values())) <= 1


def test_every_contender_is_timed_in_every_round() -> None:
    taken: list[str] = []

    def timer(name: str) -> timing.Timer:
        def sample() -> float:
            taken.append(name)
            return float(taken.count(name))

        return timing.Timer("wall", sample)

    figures = timing.interleave({name: timer(name) for name in "ab"}, 3)
    assert "".join(taken) == "abbaabba" and figures == {"a": (1, 2, 3, 4), "b": (1, 2, 3, 4)}
    assert timing.interleave({}, 3) == {}


@pytest.mark.parametrize(
    ("rounds", "count", "whole"), [(2, 3, 2), (6, 3, 6), (7, 3, 12), (10, 4, 12), (10, 5, 10), (11, 5, 20), (3, 1, 4)]
)
def test_a_cycle_of_orders_is_ended(rounds: int, count: int, whole: int) -> None:
    """Each runs as often after every other, but where there are fewer rounds than orders."""
    assert timing.whole_cycles(rounds, count) == whole


def test_wall_timer_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test has its own clock, because one call may take a whole round on a busy machine."""
    milliseconds = itertools.count()
    monkeypatch.setattr(timing, "CPU_ROUND_MS", 9.5)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(milliseconds) / 1e3)
    seen: list[int] = []
    timer = timing.make_timer([lambda: seen.append(0), lambda: seen.append(1)], CPU)
    assert timer.kind == "wall"
    assert timer.sample() == pytest.approx(1)
    assert seen == [0, *[0, 1] * 5]


@pytest.mark.parametrize("length", [40, 100], ids=["short", "long"])
def test_recorded_launches_repeat_the_call(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: made.append((grid, args, options))

    made: list[Any] = []
    (case,) = find_cases([f"1x{length}x2x16"], CPU)
    inputs = make_inputs(case, torch.float16)
    monkeypatch.setattr(attention_portable, "_attention_fwd_kernel", Kernel())
    monkeypatch.setattr(small_segments, "_attention_fwd_small_segments_kernel", Kernel())
    monkeypatch.setattr(small_segments, "_attention_fwd_long_segments_fallback_kernel", Kernel())
    monkeypatch.setattr(attention, "runs_kernels", lambda tensor: True)
    for module in (attention, launch_module):
        monkeypatch.setattr(module, "gpu", lambda: Gpu("stub", "cuda", 80, 232448))
    # A new generation: no plan is remembered.
    settings.generation += 1
    raw = raw_launch("raw", lambda: inputs.call(torch_ops.window_attn), "portable")
    assert raw.call is not None and raw.note == ""
    raw.call()
    settings.generation += 1
    launches = 2 if length <= 64 else 1
    recorded, repeated = made[:launches], made[launches:]
    assert recorded == repeated
    assert recorded[0][0][-1] == (1 if length <= 64 else case.num_heads) and recorded[0][1][0] is inputs.q
