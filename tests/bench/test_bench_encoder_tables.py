"""Tables of the encoder's benchmark."""

import dataclasses

import pytest

from tests.bench.verify import golden_report
from torch_ops.bench.measure.results import (
    ASSEMBLED,
    OK,
    OURS,
    UNAVAILABLE,
    UNCAPTURED,
    WRONG,
    Ceilings,
    FirstCalls,
    Record,
    Report,
)
from torch_ops.bench.show.tables import markdown, tables

pytestmark = pytest.mark.no_interpret


def timed(name: str, group: str, *ms: float, ready: str = "", status: str = OK, note: str = "") -> Record:
    return Record(
        "encoder", "448", "784", "forward", "bfloat16", "hopper", name, group, status, note, ms, "wall", 2**30,
        800 * 10**9, ready=ready,
    )  # fmt: skip


BATCH = (
    timed("vk", OURS, 4.0, 4.0, 5.0, 5.0, ready="nothing"),
    timed("vk_compiled", OURS, 2.1, 2.1),
    timed("vk_reduced_frozen", OURS, 2.05, 2.2),
    timed("vk_graph", OURS, 2.0, 2.0, ready="tables"),
    timed("vk_default", OURS, 2.04, 2.1, ready="tables"),
    timed("hf", UNCAPTURED, 12.0, 12.0, 12.0, 12.0, ready="nothing"),
    timed("hf_flash4", UNCAPTURED, 1.0, 1.0, 1.0, 1.0, status=WRONG, note="off"),
    timed("graph_cudnn", ASSEMBLED, 3.0, 3.0, 2.5, 2.5, ready="tables"),
    timed("graph_flash4", ASSEMBLED, ready="tables", status=UNAVAILABLE, note="is not installed"),
)


def report(*records: Record) -> Report:
    return Report(golden_report().provenance, Ceilings(4000.0, 800.0, "bfloat16"), records)


def test_tables_set_the_best_of_each_group_against_ours() -> None:
    step = (
        dataclasses.replace(one, case="train", direction="training step") for one in BATCH if one.group != ASSEMBLED
    )
    golden = report(*BATCH, *step)
    lines = markdown(golden, "summary").splitlines()
    assert lines[0].startswith(
        "| batch | patches of each frame | best of ours, ms | TFLOP/s | of matmul | vk_default, ms | "
        "best (a) / vk_default | vk_default / vk_graph | compiled /"
    )
    both = (
        "2.00, 2.00 vk_graph | 400 | 50% | 2.04, 2.10 | 5.88, 5.71 | 1.02, 1.05 | 1.05, 1.05 vk_compiled | 1.02, 1.10 "
        "| 12.0, 12.0 hf | 6.00, 6.00"
    )
    assert lines[2:4] == [
        f"| 448 | 784 | {both} | 3.00, 2.50 graph_cudnn | 1.50, 1.25 | 1024 / 1024 / 1024 | 1024 / 1024 |",
        f"| train, training step | 784 | {both} | - | - | 1024 / 1024 / - | 1024 / 1024 |",
    ]
    assert any("- vk_default: the call of the model's encoder after accelerate(model)" in line for line in lines)
    assert any("a training step: forward, a scalar loss" in line for line in lines)
    table = markdown(golden)
    assert "| vk | ours | 4.000 | 5.000 | 3.00, 2.40 | 0.75, 0.50 | 178 | 22% | 1024 |" in table
    assert "| hf_flash4 wrong | (a) |" in table and "- hf_flash4: wrong, off" in table
    assert "- graph_flash4: unavailable, is not installed" in table
    note = "- of a batch's grid is made before the call, or remembered from the one before: "
    assert f"{note}nothing for vk, hf; tables for vk_graph, vk_default, graph_cudnn\n" in table
    assert f"{note}tables for vk_graph, graph_cudnn; nothing for hf" in lines


def test_each_half_is_set_against_its_own_best() -> None:
    """A baseline that wavers is not to hide the one that was ahead of it in the other half."""
    wavering, steady = (
        timed("hf_reduced", UNCAPTURED, 18.0, 18.0, 12.0, 12.0),
        timed("hf_flash2", UNCAPTURED, 16.0, 16.0),
    )
    (cells,) = tables(report(*BATCH[:5], wavering, steady), "summary")[0].rows
    assert cells[10:12] == ("16.0 hf_flash2, 12.0 hf_reduced", "8.00, 6.00")


def test_rows_of_another_dtype_or_path_have_a_table_of_their_own() -> None:
    other = (dataclasses.replace(one, dtype="float32", path="portable") for one in BATCH)
    found = tables(report(*BATCH, *other), "summary")
    assert [table.title for table in found] == [
        "vision encoder, bfloat16, hopper path", "vision encoder, float32, portable path",
    ]  # fmt: skip
    assert [table.rows[0][4] for table in found] == ["50%", "-"], "of a matrix product of their dtype"


def test_a_report_without_the_default_call_has_dashes() -> None:
    before = report(*(one for one in BATCH if one.name != "vk_default"))
    (table,) = tables(before, "summary")
    row = dict(zip(table.headers, table.rows[0], strict=True))
    assert {row[name] for name in row if "vk_default" in name} == {"-", "- / 1024"}
    assert not any("vk_default" in note for note in table.notes)


def test_first_calls_are_a_note_under_the_table() -> None:
    calls = FirstCalls(eager_new_ms=4.0, eager_ms=3.0, first_ms=4.4, second_ms=30.0)
    told = report(*(dataclasses.replace(one, first_calls=calls) if one.name == "vk_default" else one for one in BATCH))
    assert Report.from_json(told.to_json()) == told
    note = "first and second call of a size, vk_default, over an eager call: 448 1.10, 10.00 (4.40 and 30.0 ms)"
    assert note in tables(told, "summary")[0].notes
