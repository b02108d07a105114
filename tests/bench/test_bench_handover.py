"""`vk bench handover`: the rule that makes rows of times, and the command on a CPU, where no kernel of PyTorch runs."""

import json
from pathlib import Path

import pytest
import torch
import typer

from csrc_free_ops.configs.handover import HandOver, read_hand_over
from torch_ops.bench.commands.handover import handover
from torch_ops.bench.measure.handover import ANY_ORDER, handover_cases, in_words, rows_of
from torch_ops.bench.measure.results import BASELINE, OK, OURS, VK, WRONG, Record, read_report

LENGTHS = (512, 2048, 8192)


def record(direction: str, name: str, length: int, ms: float, causal: bool = False, status: str = OK) -> Record:
    shape = f"4x16x{length}x256{'c' * causal}"
    group = OURS if name.startswith("vk") else BASELINE
    return Record("attention", shape, shape, direction, "bfloat16", "hopper", name, group, status, rounds_ms=(ms, ms))


def records(ours: list[float], flash: list[float], cudnn: list[float], status: str = OK) -> list[Record]:
    """Forwards as given, and backwards that take twice as long as their forward."""
    made = []
    for direction, factor in (("forward", 1), ("backward", 2)):
        for length, *times in zip(LENGTHS, ours, flash, cudnn, strict=True):
            for name, ms in zip((VK, "flash", "cudnn"), times, strict=True):
                made.append(record(direction, name, length, factor * ms, status=OK if name == VK else status))
            if direction == "backward":
                made.append(record(direction, ANY_ORDER, length, factor * times[0]))
    return made


def row(kernel: str, direction: str, min_length: int, every_length: bool) -> HandOver:
    return HandOver(kernel, direction, "bfloat16", 256, False, min_length, every_length)


def test_a_kernel_wins_at_a_length_and_all_longer_ones() -> None:
    made = rows_of(records([1, 1, 1], [0.5, 0.98, 0.5], [0.9, 0.9, 0.6]), LENGTHS)
    assert [each for each in made if each.direction == "forward"] == [
        row("flash", "forward", 8192, False), row("cudnn", "forward", 512, True)
    ]  # fmt: skip
    # At 2048 rows cuDNN's forward may go over alone, and its backward gains more than 3 % too.
    assert [each.kernel for each in made if each.direction == "training"] == ["flash", "cudnn"]


def test_training_is_held_against_the_best_forward_that_goes_over() -> None:
    """Forward 0.5 and backward 2.5 against 0.5 and 2: only the forward goes over."""
    made = []
    for length in LENGTHS:
        made += [record("forward", VK, length, 1), record("forward", "flash", length, 0.5)]
        made += [record("backward", VK, length, 2.2), record("backward", ANY_ORDER, length, 2)]
        made += [record("backward", "flash", length, 2.5)]
    assert rows_of(made, LENGTHS) == [row("flash", "forward", 512, True)]


def test_wrong_kernels_and_unfinished_head_dimensions_get_no_row() -> None:
    times = [1.0, 1, 1], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]
    assert rows_of(records(*times, status=WRONG), LENGTHS) == []
    assert rows_of(records(*times), (*LENGTHS, 16384)) == []
    assert len(rows_of(records(*times), LENGTHS[:2])) == 4


def test_cases_keep_the_number_of_tokens() -> None:
    cases = handover_cases([64], LENGTHS, 16, 8192)
    assert [case.batch for case in cases] == [16, 4, 1] * 2
    assert [bool(case.options) for case in cases] == [False] * 3 + [True] * 3


def test_a_case_in_words() -> None:
    said = in_words([record("forward", VK, 512, 2.0), record("forward", "flash", 512, 1.0)])
    assert said == "forward 2.000 ms, flash 0.50"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has rows")
def test_the_command_goes_on_from_what_it_wrote(tmp_path: Path) -> None:
    out, rows = tmp_path / "out.json", tmp_path / "rows.json"

    def run(head_dims: str) -> int:
        handover([head_dims], ["8,16"], ["float16"], 1, 16, 2, 0, "cpu", rows, out, "abc")
        return len(read_report(out).records)

    first = run("16")
    assert run("16") == first and run("16:24:8") == 2 * first
    assert read_hand_over(rows) == () and json.loads(rows.read_text())["provenance"]["commit"] == "abc"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head_dims": ["20"]}, "no multiples of 8"),
        ({"head_dims": ["16:64"]}, "neither a number nor FIRST:LAST:STEP"),
        ({"lengths": ["long"]}, "invalid literal"),
        ({"dtype": ["float32"]}, "bfloat16 and float16 alone"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, list[str]], said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        handover(**options, device="cpu")


@pytest.mark.gpu
def test_rows_of_a_gpu_are_read_back(tmp_path: Path) -> None:
    out, rows = tmp_path / "out.json", tmp_path / "rows.json"
    handover(["64,256"], ["512,1024"], ["bfloat16"], 4, 1024, 2, 0, "cuda", rows, out, "abc")
    report = read_report(out)
    assert {one.name for one in report.records} == {VK, ANY_ORDER, "flash", "cudnn"}
    flash = [one for one in report.records if one.name == "flash"]
    assert len(flash) == 16 and all(one.status == OK and one.timer == "graph" for one in flash)
    for each in read_hand_over(rows):
        assert each.date and each.cudnn > 0
