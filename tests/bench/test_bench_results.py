"""Figures, and what is made of them: JSON, tables, documents, charts."""

import dataclasses
import json
import os
import runpy
import shutil
import sys
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any
from unittest import mock

import expecttest
import pytest
import typer

from tests.bench.verify import CPU, ROOT, bench, by_case, golden_report, refused
from torch_ops.bench.commands.options import file_errors
from torch_ops.bench.measure import machine, results
from torch_ops.bench.measure.results import Report, read_report
from torch_ops.bench.show.tables import markdown, print_tables, tables

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]

refresh = runpy.run_path(str(ROOT / "docs" / "refresh.py"))["refresh"]


def test_ratios() -> None:
    one, two, bad = by_case(golden_report().records)
    assert one.ours.ms == 0.21 and one.ours.tflops == pytest.approx(200)
    assert one.best() is one.baselines[0], "the fastest is wrong"
    assert one.ratios == pytest.approx((0.42 / 0.21, 0.42 / 0.25, 0.44 / 0.2))
    assert two.best() is two.baselines[1]
    assert bad.ratios is None, "no speed-up is reported of what is wrong"


def test_bound_and_floor() -> None:
    report = golden_report()
    assert report.ceilings is not None and report.ceilings.ridge == pytest.approx(200)
    (profile,) = report.profiles
    assert profile.intensity == pytest.approx(40)
    assert profile.floor_ms(report.ceilings) == pytest.approx(0.025)
    assert profile.gb_s == pytest.approx(2000) and profile.tflops == pytest.approx(80)
    busy = dataclasses.replace(profile, flops=400 * 10**9)
    assert tables(dataclasses.replace(report, profiles=(profile, busy)))[1].rows[1][9] == "compute"
    assert busy.floor_ms(report.ceilings) == pytest.approx(0.5)


def test_json_round_trip(tmp_path: Path) -> None:
    report = golden_report()
    report.write(tmp_path / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    text = (tmp_path / "run.json").read_text()
    assert Report.from_json(text) == report
    document = json.loads(text)
    assert list(document) == ["schema", "provenance", "ceilings", "records", "profiles", "host"]
    assert sum(line.startswith('{"op": "window_attn", "case"') for line in text.splitlines()) == 10, "a record a line"
    for other in ({**document, "schema": 1}, {}, [1], {**document, "host": [{"name": 1}]}):
        with pytest.raises(ValueError, match=r"expected 2|schema 2"):
            Report.from_json(json.dumps(other))


class TestMarkdown(expecttest.TestCase):
    maxDiff = None

    def test_golden(self) -> None:
        self.assertExpectedInline(
            markdown(golden_report()),
            """\
### window_attn, backward, bfloat16, portable path, warm cache

| case | shape | ours ms | cudnn ms | flash4 ms | best correct baseline / ours | TFLOP/s | peak MiB, ours / best baseline |
| --- | --- | --- | --- | --- | --- | --- | --- |
| one | 1x40x2x72 | 0.2100 (0.2000..0.2500) | 0.4200 (0.4100..0.4400) | 0.1000 (0.1000..0.1000) wrong | 2.00 (1.68..2.20) cudnn | 200 | 3.0 / 4.0 |
| two | 40+8x2x72 | 0.2100 (0.2000..0.2500) | - | 0.4200 (0.4100..0.4400) | 2.00 (1.68..2.20) flash4 | 200 | 3.0 / 4.0 |
| bad | 1x8x2x72 | 0.2100 (0.2000..0.2500) wrong | 0.4200 (0.4100..0.4400) | 0.1000 (0.1000..0.1000) wrong | ours is wrong | 200 | 1.0 / 4.0 |

- geometric mean of 2 ratios: 2.00, least 2.00
- times: median (min..max) of 3 interleaved rounds, CUDA graph replays, but between events for flash4 on two
- cudnn cannot run two: takes batches of equal segments only
- flash4 is wrong on one, bad: dq (1x40x2x72): outside the rule; max 1.3 of 0.02 allowed, rms 0.4 of 0.01 allowed
- vk is wrong on bad: off

### against the ceilings of this machine

| call | shape | ms | MB moved | GB/s | of copy | TFLOP/s | of matmul | FLOP/byte | bound | floor ms | time / floor |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| window_attn forward, one, bfloat16, portable path | 1x40x2x72 | 0.05000 | 100 | 2000 | 50.0% | 80.0 | 10.0% | 40.0 | memory | 0.02500 | 2.00 |

- bytes moved: each input read once, each output written once
- compute-bound where FLOP/byte exceeds the measured matmul rate over the measured copy rate, else memory-bound

### window_attn, host time per call

| call | host microseconds | / raw launch | at most |
| --- | --- | --- | --- |
| raw | 10.0 | 1.00 |  |
| op | 17.5 | 1.75 | 20 |
| launcher | - | - |  |

- launcher: not here

- NVIDIA H200, driver 580.1; torch 2.11.0, triton 3.6.0
- cudnn: cuDNN 9
- flash4: FlashAttention-4
- measured in this run: memory 4000 GB/s, bfloat16 matmul 800 TFLOP/s
- 2030-01-02T03:04:05+00:00, commit abc: `vk bench window_attn`
""",  # noqa: E501
        )


def test_commit_is_that_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.provenance(CPU, "abc", {}).commit == "abc"
    answers = {"rev-parse": str(machine.PACKAGE.parent), "describe": "1234-dirty"}
    monkeypatch.setattr(machine, "_output", lambda command: answers[command[3]])
    assert machine.provenance(CPU, None, {}).commit == "1234-dirty"
    answers["rev-parse"] = "/somewhere/else"
    assert machine.provenance(CPU, None, {}).commit == "unknown"


def test_commands_are_noted_without_where_results_go(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["/x/vk", "bench", "host", "--out", "/a/b.json", "--commit=abc", "--trace", "t", "--cold"]
    monkeypatch.setattr(sys, "argv", typed)
    assert machine._command_line() == "vk bench host --cold"


MARKED = "# Title\n\n<!-- vk bench table {}run.json -->\nold\n<!-- vk bench table end -->\n\nRest.\n"


@pytest.mark.parametrize("option", ["", "--summary"])
def test_tables_in_documents_are_made_anew(tmp_path: Path, option: str) -> None:
    document = tmp_path / "page.md"
    document.write_text(MARKED.format(f"{option} --if-measured ".lstrip()))
    assert refresh(document) and "old" not in document.read_text(), "a place that waits for results is empty"
    (tmp_path / "run.json").write_text(golden_report().to_json())
    assert refresh(document)
    text = document.read_text()
    made = bench("table", *[option] * bool(option), tmp_path / "run.json").stdout
    assert made in text and text.startswith("# Title\n") and text.endswith("\n\nRest.\n")
    assert refresh(document) and document.read_text() == text


def test_documents_without_results_or_ends_are_refused(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    for text, message in (
        (MARKED.format(""), "there are no results at"),
        ("<!-- vk bench table other.json -->\n\nprose\n\n" + MARKED.format(""), "table of other.json has no end mark"),
    ):
        document.write_text(text)
        with pytest.raises(ValueError, match=message):
            refresh(document)
        assert document.read_text() == text
    document.write_text("no tables\n")
    assert not refresh(document)


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    link.symlink_to(file)
    results.replace_text(link, "after")
    assert link.is_symlink() and file.read_text() == "after"
    monkeypatch.setattr(results.os, "replace", mock.Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        results.replace_text(file, "lost")
    assert file.read_text() == "after" and {path.name for path in tmp_path.iterdir()} == {"file", "link"}
    results.replace_text(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()


def test_summary_sets_every_peer_against_ours() -> None:
    lines = markdown(golden_report(), "summary").splitlines()
    assert lines[0] == "| case | shape | backward ms | cudnn | flash4 |"
    assert lines[2:5] == [
        "| one | 1x40x2x72 | 0.210 | 2.00 | 0.48 *wrong* |",
        "| two | 40+8x2x72 | 0.210 | - | 2.00 |",
        "| bad | 1x8x2x72 | 0.210 *wrong* | 2.00 | 0.48 *wrong* |",
    ]


def test_summary_says_what_was_measured() -> None:
    report = golden_report()
    (kind,) = {f"{one.dtype}, {one.cache} cache, {one.path} path" for one in report.records}
    assert f"\n- {kind}\n" in markdown(report, "summary")
    first, *others = report.records
    cold = dataclasses.replace(first, cache="cold", path="portable", case="cold_one")
    parted = dataclasses.replace(report, records=(cold, *others))
    assert f"\n- {kind}; cold_one: {first.dtype}, cold cache, portable path\n" in markdown(parted, "summary")


PAGES = [f"docs/{name}.md" for name in ("benchmarks", "encoder", "gemm", "grids", "norms", "rope", "segment_attention")]


@pytest.mark.parametrize("name", PAGES)
def test_tables_of_this_repository_are_those_of_its_results(name: str, tmp_path: Path) -> None:
    page = ROOT / name
    copy = tmp_path / name
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    copy.write_text(page.read_text())
    assert refresh(copy)
    assert copy.read_text() == page.read_text(), f"out of date: python docs/refresh.py {name}"


def test_chart_shows_every_contender_and_is_the_same_twice(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(golden_report().to_json())
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        assert bench("chart", tmp_path / "run.json", picture).exit_code == 0
    one, two = (picture.read_text() for picture in pictures)
    assert one == two
    for word in ("vk", "cudnn", "flash4", "result is wrong", "window_attn, backward, bfloat16, NVIDIA H200", "200"):
        assert f">{word}<" in one or f"> {word}<" in one, word
    (tmp_path / "host.json").write_text(dataclasses.replace(golden_report(), records=()).to_json())
    assert "no measurements" in refused("chart", tmp_path / "host.json", tmp_path / "three.svg")
    assert "Format 'word' is not supported" in refused("chart", tmp_path / "run.json", tmp_path / "three.word")


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a document, of a list those of its first one."""
    yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(min(1, len(value))):
            yield from _places(value[key], (*at, key))


def test_any_value_in_a_stored_document(tmp_path: Path) -> None:
    """Tables are made of it, or one line names the file."""
    document, file = json.loads(golden_report().to_json()), tmp_path / "a [b].json"
    outcomes = set()
    for at in _places(document):
        for value in (None, True, 0, 10**30, float("nan"), "x\n[/b]", ["a"], {"a": 1}):
            copy: Any = {"": json.loads(json.dumps(document))}
            reduce(getitem, ("", *at)[:-1], copy)[("", *at)[-1]] = value
            file.write_text(json.dumps(copy[""]))
            try:
                with file_errors(file):
                    markdown(read_report(file))
            except typer.BadParameter as error:
                assert "\n" not in error.message
                outcomes.add(error.message)
            else:
                outcomes.add("")
    assert "schema 2.records[0].rounds_ms is true, expected a tuple." in outcomes
    assert "schema 2.provenance.versions is a list, expected a dict." in outcomes
    assert "schema 2.records[0].a is not known, expected some of op, case, " in "".join(outcomes)
    assert "" in outcomes and "status of vk is 'x\\n[/b]', expected one of ok, wrong, " in "".join(outcomes)
    assert "schema 2.records[0].name is true" in "".join(outcomes)
    line = refused("table", file)
    assert str(file) in line


def test_tables_show_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    name, report = "[/b] [red]x :smile:", golden_report()
    records = tuple(dataclasses.replace(one, case=f"{name} {one.case}") for one in report.records)
    origin = dataclasses.replace(report.provenance, device=name, driver="1")
    print_tables(dataclasses.replace(report, records=records, provenance=origin))
    shown = capsys.readouterr().out
    assert f"{name}, driver" in shown and f"{name} {report.records[0].case}" in shown


def test_files_that_are_no_documents(tmp_path: Path) -> None:
    for content in (b"", b"\xff", b"[" * 99999, b"{}", b"5", b'{"schema": "vk timeline 1"}'):
        (tmp_path / "x.json").write_bytes(content)
        for command in (("table", tmp_path / "x.json"), ("chart", tmp_path / "x.json", tmp_path / "x.svg")):
            assert str(tmp_path / "x.json") in refused(*command)


def test_pipes_and_devices_are_no_documents(tmp_path: Path) -> None:
    """To read one may never end."""
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link.json").symlink_to(pipe)
    for file in (pipe, link, Path("/dev/zero"), Path("/dev/null")):
        for command in (("table", file), ("chart", file, tmp_path / "x.svg")):
            assert f"{file} is a pipe or a device; give a file" in refused(*command)


def test_a_picture_behind_links_that_lead_to_each_other(tmp_path: Path) -> None:
    (file := tmp_path / "a.json").write_text(golden_report().to_json())
    (picture := tmp_path / "x.svg").symlink_to(picture)
    assert f"'{picture}' cannot be written: Too many levels of symbolic links" in refused("chart", file, picture)


def test_tables_escape_what_no_line_holds(tmp_path: Path) -> None:
    document, file = json.loads(golden_report().to_json()), tmp_path / "a.json"
    for value in ("\udcff", "\x1b[31m", "\u202e", "\r"):
        document["records"][0]["case"] = document["provenance"]["device"] = f"a{value}b"
        file.write_text(json.dumps(document))
        for options in ((), ("--summary",), ("--suite",)):
            shown = bench("table", file, *options).stdout
            assert value not in shown and value.encode("unicode_escape").decode() in shown
