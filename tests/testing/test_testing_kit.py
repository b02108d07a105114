"""The tolerance rule: what it passes, refuses and does not judge; inputs drawn again; shares of a run, and turns."""

import os
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor

from torch_ops.testing import check_draws, compare, redrawn
from torch_ops.testing.cases import NormCase, make_norm_inputs, make_projected_rope_inputs, rope_window_attn_cases
from torch_ops.testing.tolerance import Draw, assert_close_to_reference

pytestmark = pytest.mark.no_interpret

REFERENCE = torch.linspace(-3, 3, 101, dtype=torch.float64)
EAGER = REFERENCE.half()


def test_twice_the_error_of_eager_passes_and_more_does_not() -> None:
    assert compare(EAGER, EAGER, REFERENCE).passed
    allowed = compare(EAGER, EAGER, REFERENCE).max_allowed
    assert not compare((REFERENCE + 1.5 * allowed).half(), EAGER, REFERENCE).passed


def test_one_entry_far_off_or_all_a_little_are_refused() -> None:
    one = EAGER.clone()
    one[7] += 0.1
    with pytest.raises(AssertionError, match="outside the rule"):
        assert_close_to_reference(one, EAGER, REFERENCE)
    report = compare(EAGER, EAGER, REFERENCE)
    assert report.rms_allowed < report.max_allowed


def test_infinities_must_be_the_same() -> None:
    infinite = REFERENCE.clone()
    infinite[3] = -torch.inf
    assert compare(infinite.half(), infinite.half(), infinite).passed
    assert "not infinite where the reference is" in str(compare(EAGER, infinite.half(), infinite))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_result_that_is_not_finite_is_refused(value: float) -> None:
    bad = EAGER.clone()
    bad[0] = value
    assert "1 of 101 entries are not finite" in str(compare(bad, EAGER, REFERENCE))


def test_nothing_is_judged_by_an_eager_result_that_overflowed_or_a_reference_of_nan() -> None:
    overflowed = EAGER.clone()
    overflowed[0] = torch.inf
    unknown = REFERENCE.clone()
    unknown[0] = torch.nan
    for eager, reference in ((overflowed, REFERENCE), (EAGER, unknown)):
        report = compare(EAGER, eager, reference)
        assert not report.passed and "not to be judged" in str(report)


def test_shapes_must_be_the_same() -> None:
    assert "shape [100] where the reference has [101]" in str(compare(EAGER[1:], EAGER, REFERENCE))


class Drawing:
    """Draws where eager is wrong by 1 everywhere and, from the second on, by 2 somewhere."""

    def __init__(self, *actual: Tensor) -> None:
        self.actual = actual
        self.seeds: list[int] = []

    def __call__(self, seed: int) -> Draw:
        self.seeds.append(seed)
        eager = off(2.0 if seed else 1.0)
        return {"x": self.actual[min(seed, len(self.actual) - 1)]}, {"x": eager}, {"x": torch.zeros(10, 10).double()}


def off(most: float, rest: float = 1.0) -> Tensor:
    errors = torch.full((10, 10), rest)
    errors[3, 4] = most
    return errors


def test_a_maximum_outside_by_luck_passes_with_more_numbers() -> None:
    assert not compare(off(2.5), off(1.0), torch.zeros(10, 10)).passed
    draw = Drawing(off(2.5), off(1.0))
    report = check_draws(draw)["x"]
    assert draw.seeds == [0, 1, 2, 3]
    assert (report.max_error, report.max_allowed) == (2.5, 4.0)
    # Three in four draws of eager have an error of 2 in all numbers.
    assert report.rms_allowed == pytest.approx(2 * ((397 + 3 * 4) / 400) ** 0.5)


def test_more_numbers_do_not_hide_an_outlier() -> None:
    draw = Drawing(off(4.5), off(1.0))
    with pytest.raises(AssertionError, match="x: outside the rule; max 4.5 of 4 allowed"):
        check_draws(draw)
    assert draw.seeds == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="x: 1 of 100 entries are not finite"):
        check_draws(Drawing(off(2.5), off(1.0), off(torch.nan)))


@pytest.mark.parametrize("actual", [off(2.5, 2.5), off(torch.nan), off(1.0)[1:]], ids=["rms", "nan", "shape"])
def test_what_is_no_matter_of_luck_is_refused_at_once(actual: Tensor) -> None:
    draw = Drawing(actual, off(0.0, 0.0))
    with pytest.raises(AssertionError):
        check_draws(draw)
    assert draw.seeds == [0]


def test_what_passes_is_drawn_once() -> None:
    draw = Drawing(off(2.0))
    assert check_draws(draw)["x"].passed and draw.seeds == [0]


class DrawingTwo:
    """The same of x, and y, which is right at first; a draw may not find another's tensors."""

    def __init__(self, later: float) -> None:
        self._errors = (0.5, later)
        self._seen: list[weakref.ref[Tensor]] = []

    def __call__(self, seed: int) -> Draw:
        assert all(tensor() is None for tensor in self._seen)
        drawn = (
            {"x": off(1.0 if seed else 2.5), "y": torch.full((10, 10), self._errors[min(seed, 1)])},
            {"x": off(2.0 if seed else 1.0), "y": torch.ones(10, 10)},
            {"x": torch.zeros(10, 10).double(), "y": torch.zeros(10, 10).double()},
        )
        self._seen += [weakref.ref(tensor) for tensors in drawn for tensor in tensors.values()]
        return drawn


def test_draws_are_judged_together_and_not_kept() -> None:
    reports = check_draws(DrawingTwo(1.5))
    assert {name: report.max_error for name, report in reports.items()} == {"x": 2.5, "y": 1.5}
    assert reports["y"].rms_error == pytest.approx(((0.5**2 + 3 * 1.5**2) / 4) ** 0.5)


def test_what_passed_at_first_is_refused_where_more_numbers_show_it_wrong() -> None:
    with pytest.raises(AssertionError, match="y: outside the rule; max 3 of 2 allowed"):
        check_draws(DrawingTwo(3.0))


@pytest.mark.parametrize("layout", ["contiguous", "row_strided", "column_strided", "misaligned", "expanded"])
def test_redrawn_inputs_have_the_same_numbers_elsewhere(layout: str) -> None:
    case = NormCase("redrawn", "", (6, 5), 24, layout, offset=3.0 if layout == "contiguous" else 0.0)
    inputs = make_norm_inputs("add_layer_norm", case, torch.float16)
    before = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
    first, second, again = (redrawn(inputs, seed) for seed in (1, 2, 1))
    for name, tensor in inputs.tensors.items():
        drawn, other = first.tensors[name], second.tensors[name]
        assert (drawn.stride(), drawn.storage_offset()) == (tensor.stride(), tensor.storage_offset())
        assert torch.equal(drawn.flatten().sort().values, tensor.flatten().sort().values)
        assert torch.equal(drawn, again.tensors[name]) and torch.equal(tensor, before[name])
        assert not torch.equal(drawn, tensor) and not torch.equal(drawn, other)
    assert redrawn(inputs, 0) is inputs and first.eps == inputs.eps
    assert redrawn(replace(inputs, bias=None), 1).bias is None


def test_redrawn_inputs_keep_tables_and_what_they_share() -> None:
    inputs = make_projected_rope_inputs(rope_window_attn_cases("smoke")[0], torch.float16)
    drawn = redrawn(inputs, 1)
    assert torch.equal(drawn.cos, inputs.cos) and torch.equal(drawn.cu_seqlens, inputs.cu_seqlens)
    places = [tensor.untyped_storage().data_ptr() for tensor in (drawn.q, drawn.k, drawn.v)]
    assert len(set(places)) == 1 and places[0] != inputs.q.untyped_storage().data_ptr()
    assert not torch.equal(drawn.dout, inputs.dout)


@pytest.mark.parametrize(("before", "after"), [(None, "1,2,0"), ("7,5,3", "5,3,7")])
def test_workers_begin_with_gpus_in_turns(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    (plugin,) = (each for each in pytestconfig.pluginmanager.get_plugins() if hasattr(each, "_begin_with_own_gpu"))
    monkeypatch.setattr(plugin, "WORKER", "gw4")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before or "")
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    plugin._begin_with_own_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == after


@pytest.mark.parametrize("turns", (1, 2))
def test_large_tests_take_turns(
    turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """Locks belong to a file as it was opened, so that threads exclude each other as processes do."""
    (plugin,) = (each for each in pytestconfig.pluginmanager.get_plugins() if hasattr(each, "_take_turn"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    order: list[str] = []

    def take_second() -> None:
        with ExitStack() as stack:
            plugin._take_turn(stack, "gpu", turns)
            order.append("second")

    second = Thread(target=take_second)
    with ExitStack() as stack:
        plugin._take_turn(stack, "gpu", turns)
        second.start()
        second.join(0.5 if turns == 1 else 30)
        order.append("first")
    second.join(30)
    assert order == (["first", "second"] if turns == 1 else ["second", "first"])
    assert len(list(tmp_path.iterdir())) == turns


def test_large_tests_are_spread_over_a_run(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> None:
    """And all others stay in their order."""
    (plugin,) = (each for each in pytestconfig.pluginmanager.get_plugins() if hasattr(each, "_spread_large"))

    def run(name: str, *marks: pytest.MarkDecorator) -> pytest.Item:
        item = pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
        for mark in marks:
            item.add_marker(mark)
        return item

    items = [*(run(f"large{index}", pytest.mark.large) for index in range(3)), *map(run, "abcdefgh")]
    plugin._spread_large(items)
    assert [item.name for item in items] == ["large0", "a", "b", "large1", "c", "d", "e", "large2", "f", "g", "h"]
    plain = [run(name) for name in "ab"]
    plugin._spread_large(plain)
    assert [item.name for item in plain] == ["a", "b"]
