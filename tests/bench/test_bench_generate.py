"""The benchmark of whole models: the command, what it refuses, what it counts."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import encoder_bench
from tests.bench.verify import CPU, bench, golden_report
from torch_ops.bench.encoder import generation
from torch_ops.bench.encoder.generation import ALL, FIRST, IMPLS, Picture, Prompt, build_model, count_syncs
from torch_ops.bench.encoder.rows import make_tower
from torch_ops.bench.measure.results import OK, WRONG, Report
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.bench.show.tables import markdown, tables
from torch_ops.models import QwenVisionEncoder

pytestmark = pytest.mark.no_interpret
quick = encoder_bench.quick


def run(*arguments: object) -> Any:
    return bench("generate", "--device", "cpu", "--rounds", 2, "--layers", 1, "--commit", "abc", *arguments)


def test_command_measures_both_times_of_every_image(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    result = run("--images", "32,64x32", "--max-new-tokens", 3, "--out", out, "--markdown")
    assert result.exit_code == 0, result.output
    report = Report.from_json(out.read_text())
    assert Report.from_json(report.to_json()) == report
    found = [(one.case, one.direction, one.name) for one in report.records]
    names = [impl.name for impl in IMPLS]
    assert found == [(image, end, name) for image in ("32", "64x32") for end in (FIRST, ALL) for name in names]
    assert {one.shape for one in report.records} == {"4, 10 + 3", "8, 11 + 3"}
    for one in report.records:
        assert (one.status, one.op, one.timer, one.syncs, len(one.tokens)) == (OK, "generate", "wall", None, 3)
        (rule,) = one.reports
        assert rule.name == "logits (first token)"
    assert "| 64x32 | 8, 11 + 3 | all tokens |" in result.stdout
    assert "leading token ids equal to hf's: 3 of 3 for vk_default on 32, " in result.stdout
    assert tables(report, "summary") == tables(report)


def test_command_refuses_what_it_cannot_read() -> None:
    for images in ("40", "0", "64x40", "wide"):
        assert "expected SIDE or HEIGHTxWIDTH in multiples of 32" in run("--images", images).stderr
    assert "give one of S, M, L" in run("--tower", "XL").stderr


def test_models_share_parameters_and_other_logits_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build_model(make_tower(CPU, torch.float32), 1)
    theirs = {id(each) for each in model.parameters()}
    seen = []

    def spoil(call: Any) -> Any:
        logits = generation.GenerateCall.results(call, False)["logits"]
        return {"logits": logits * 1.01}

    def bind(picture: Picture, prompt: Prompt) -> Any:
        call = IMPLS[0].bind(picture, prompt)
        seen.append(call.model)
        return type("Spoiled", (generation.GenerateCall,), {"results": lambda self, backward: spoil(self)})(
            call.model, call.prompt, call.inputs
        )

    pictures = generation.find_pictures(["32"], 2)
    made = generation.generate_bench(model, pictures)
    setup = Setup(torch.float32, CPU, (FIRST, ALL), 2, wall=True)
    records = run_case(made, pictures[0], (dataclasses.replace(IMPLS[0], bind=bind), *IMPLS[1:]), setup)
    assert [one.status for one in records] == [WRONG, OK, OK] * 2
    assert {id(each) for each in seen[0].parameters()} == theirs
    assert isinstance(seen[0].model.visual, QwenVisionEncoder)
    assert not isinstance(model.model.visual, QwenVisionEncoder)


def test_only_synchronisations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call() -> None:
        warnings.warn("Synchronization debug mode does not detect all synchronizing operations", stacklevel=1)
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)

    assert count_syncs(call, torch.device("cuda")) == 2 and modes == ["warn", 0]
    assert count_syncs(call, CPU) is None


def test_table_tells_of_synchronisations_and_of_what_is_wrong() -> None:
    model = build_model(make_tower(CPU, torch.float32), 1)
    pictures = generation.find_pictures(["32"], 2)
    setup = Setup(torch.float32, CPU, (FIRST,), 2, wall=True)
    ours, eager, theirs = run_case(generation.generate_bench(model, pictures), pictures[0], IMPLS, setup)
    ours = dataclasses.replace(ours, syncs=1, tokens=(1, 2))
    theirs = dataclasses.replace(theirs, syncs=28, tokens=(1, 3))
    eager = dataclasses.replace(eager, status=WRONG, note="off", tokens=())
    text = markdown(Report(golden_report().provenance, records=(ours, eager, theirs)))
    assert "- synchronisations of a call of the encoder alone, grid on the device: 1 for vk_default" in text
    assert "28 for hf on 32" in text and "equal to hf's: 1 of 2 for vk_default on 32\n" in text
    assert "- vk_default_eager is wrong on 32, first token: off" in text and "*wrong*" in text
