"""The tolerance rule itself: what it passes, what it refuses, and what it does not judge; and shares of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_ops.testing import compare
from torch_ops.testing.tolerance import assert_close_to_reference

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


def test_processes_that_meet_run_each_test_once(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (plugin,) = (each for each in pytestconfig.pluginmanager.get_plugins() if hasattr(each, "_keep_shard"))

    def run(name: str, meeting: Path | None = tmp_path) -> bool:
        item = SimpleNamespace(nodeid=name, config=SimpleNamespace(getoption={"meeting": meeting}.get))
        return plugin.pytest_runtest_protocol(item) is None

    assert [run(name) for name in ("a", "b", "a", "c", "b")] == [True, True, False, True, False]
    assert run("a", None) and run("a", None)
