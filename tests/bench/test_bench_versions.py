"""Versions of Triton side by side, each in a process of its own; here on a CPU, of one version."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import triton
import typer

from tests.bench.verify import CPU
from torch_ops.bench.app import BENCHES
from torch_ops.bench.commands import options
from torch_ops.bench.commands.versions import SHAPES, versions_command
from torch_ops.bench.measure import versions as measured
from torch_ops.bench.measure.opbench import split
from torch_ops.bench.measure.results import BASELINE, OURS
from torch_ops.bench.measure.run import Setup
from torch_ops.bench.measure.versions import Version, time_versions, versions


@pytest.fixture
def copies(tmp_path: Path) -> list[str]:
    """This version, and one that a folder holds."""
    (tmp_path / "triton").mkdir()
    code = f"import sys; sys.path = [path for path in sys.path if path not in ('', {str(tmp_path)!r})]\n"
    code += "del sys.modules['triton']; import triton\n"
    code += "triton.__version__, triton.__file__ = '3.99.0', __file__\n"
    (tmp_path / "triton" / "__init__.py").write_text(code)
    return ["", str(tmp_path)]


def test_each_version_is_timed_in_a_process_of_its_own_whose_end_is_reported(
    copies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU has no clock that must settle first.
    monkeypatch.setattr(measured, "WARM_UP_SECONDS", 0.01)
    bench = BENCHES["window_attn"]
    (case,) = bench.cases(["2x20x2x16"], CPU)
    setup = Setup(torch.float32, CPU, ("forward", "backward"), rounds=2)
    with versions(copies) as processes:
        assert [process.name for process in processes] == [triton.__version__, "3.99.0"]
        for direction in setup.directions:
            first, second = time_versions(bench, case, direction, setup, processes)
            assert (first.group, second.group, second.name) == (OURS, BASELINE, "3.99.0")
            assert (first.direction, first.path, first.case) == (direction, "reference", case.name)
            assert len(first.rounds_ms) == len(second.rounds_ms) >= 2 and min(*first.rounds_ms, *second.rounds_ms) > 0
        with pytest.raises(RuntimeError, match="ended with 1"):
            processes[0].ask({"op": "no such op", "case": "", "direction": "forward"})


def test_folders_without_another_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds neither triton nor torch_ops"), versions([str(tmp_path)]):
        pass
    (tmp_path / "triton.py").write_text("raise ImportError('no such GPU')")
    with pytest.raises(ValueError, match=f"{tmp_path}: a process that times ops ended with 1"):
        Version(str(tmp_path))


def test_another_state_of_this_library_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter((["3.9.0", "/site/triton/__init__.py", str(tmp_path / "torch_ops" / "__init__.py")],) * 3)
    monkeypatch.setattr(Version, "answer", lambda self: next(answers))
    monkeypatch.setattr(Version, "close", lambda self: None)
    monkeypatch.setattr(measured.subprocess, "Popen", mock.Mock())
    assert Version(str(tmp_path)).name == f"3.9.0 {tmp_path.name}"
    with pytest.raises(ValueError, match="give different ones"), versions(["", ""]):
        pass


def test_cases_are_known_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_device", lambda name: torch.device("cuda"))
    command = versions_command(BENCHES)
    with pytest.raises(typer.BadParameter, match="qwen3vl_l_4096") as refused:
        command([Path("nowhere")], op=["mlp"], shapes=["qwen3vl_l_4096"])
    assert "--shapes" in str(refused.value.param_hint)


def test_all_shapes_are_known() -> None:
    for op, shapes in SHAPES.items():
        assert len(BENCHES[op].cases([shapes], CPU)) == len(split([shapes]))
