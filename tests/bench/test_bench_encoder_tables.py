"""Tables of the encoder's bench, and their places in documents."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torch_ops.bench.app import app
from torch_ops.bench.measure.results import OK, UNAVAILABLE, WRONG, Ceilings, EncoderRow, Provenance, Report, Timed
from torch_ops.bench.show import documents
from torch_ops.bench.show.encoder import encoder_summary

pytestmark = pytest.mark.no_interpret

ORIGIN = Provenance("2030", "abc", "vk bench encoder", "NVIDIA H200", "580", {"torch": "2.11"}, {"vk": "ours"})


def timed(name: str, *ms: float, status: str = OK, note: str = "") -> Timed:
    return Timed(name, status, note, ms, "wall", 2**30)


def golden() -> Report:
    ours = (
        timed("vk", 4.0, 4.0, 5.0, 5.0),
        timed("vk_compiled", 2.1, 2.1),
        timed("vk_reduced_frozen", 2.05, 2.2),
        timed("vk_graph", 2.0, 2.0),
    )
    plain = timed("hf", 12.0, 12.0, 12.0, 12.0), timed("hf_flash4", 1.0, 1.0, 1.0, 1.0, status=WRONG, note="off")
    assembled = timed("graph_cudnn", 3.0, 3.0, 2.5, 2.5), Timed("graph_flash4", UNAVAILABLE, "is not installed")
    ready = {"vk": "nothing", "hf": "nothing", "vk_graph": "tables", "graph_cudnn": "tables", "graph_flash4": "tables"}
    row = EncoderRow("448", "784", "forward", "bfloat16", "hopper", 800 * 10**9, ours, plain, assembled, ready)
    step = dataclasses.replace(row, row="train_8x896", direction="training step", assembled=())
    return Report(ORIGIN, Ceilings(4000.0, 800.0, "bfloat16"), encoders=(row, step))


def test_tables_set_the_best_of_each_group_against_ours(tmp_path: Path) -> None:
    lines = documents.summary(golden()).splitlines()
    assert lines[0].startswith("| batch | patches of each frame | best of ours, ms | TFLOP/s | of matmul | compiled /")
    both = "2.00, 2.00 vk_graph | 400 | 50% | 1.05, 1.05 vk_compiled | 1.02, 1.10 | 12.0, 12.0 hf | 6.00, 6.00"
    assert lines[2:4] == [
        f"| 448 | 784 | {both} | 3.00, 2.50 graph_cudnn | 1.50, 1.25 | 1024 / 1024 / 1024 |",
        f"| train_8x896, training step | 784 | {both} | - | - | 1024 / 1024 / - |",
    ]
    assert any("a training step: forward, a scalar loss" in line for line in lines)
    (tmp_path / "run.json").write_text(golden().to_json())
    table = CliRunner().invoke(app, ["table", str(tmp_path / "run.json")]).stdout
    assert "| vk | ours | 4.000 | 5.000 | 3.00, 2.40 | 0.75, 0.50 | 178 | 22% | 1024 |" in table
    assert "| hf_flash4 wrong | (a) |" in table and "- hf_flash4: wrong, off" in table
    assert "- graph_flash4: unavailable, is not installed" in table
    note = "- of a batch's grid is made before the call, or remembered from the one before: "
    assert f"{note}nothing for vk, hf; tables for vk_graph, graph_cudnn\n" in table
    assert f"{note}tables for vk_graph, graph_cudnn; nothing for hf" in lines


def test_each_pass_is_set_against_its_own_best() -> None:
    """A peer that wavers is not to hide the one that was ahead of it in the other pass."""
    wavering, steady = timed("hf_reduced", 18.0, 18.0, 12.0, 12.0), timed("hf_flash2", 16.0, 16.0)
    row = dataclasses.replace(golden().encoders[0], uncaptured=(wavering, steady))
    (cells,) = encoder_summary(dataclasses.replace(golden(), encoders=(row,))).rows
    assert cells[7:9] == ("16.0 hf_flash2, 12.0 hf_reduced", "8.00, 6.00")


def test_rows_of_another_dtype_or_path_are_told_apart() -> None:
    report = golden()
    assert encoder_summary(report).title == "vision encoder, bfloat16, hopper path"
    row = dataclasses.replace(report.encoders[0], dtype="float32", path="portable")
    mixed = encoder_summary(dataclasses.replace(report, encoders=(report.encoders[0], row)))
    assert mixed.title == "vision encoder"
    assert [cells[0] for cells in mixed.rows] == ["448, bfloat16, hopper path", "448, float32, portable path"]
    assert [cells[4] for cells in mixed.rows] == ["50%", "-"], "of a matrix product of their dtype"


def test_places_that_wait_for_results_stay_empty(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    text = "<!-- vk bench table {}run.json -->\n<!-- vk bench table end -->\n"
    for mark in ("--if-measured ", "--summary --if-measured "):
        document.write_text(text.format(mark))
        assert documents.refresh(document) and document.read_text() == text.format(mark)
        (tmp_path / "run.json").write_text(golden().to_json())
        assert documents.refresh(document) and "vk_graph" in document.read_text()
        (tmp_path / "run.json").unlink()
    document.write_text(text.format(""))
    with pytest.raises(ValueError, match="there are no results"):
        documents.refresh(document)
