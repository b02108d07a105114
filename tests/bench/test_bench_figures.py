"""The Makefile's benchmarks: their commands run, and their tables hold the cases that the targets ask for."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from tests.bench.verify import ROOT, bench, bench_lines, golden_report, refused
from torch_ops.bench.app import BENCHES, FAMILIES
from torch_ops.bench.commands import options
from torch_ops.bench.measure.results import BASELINE, OK, OURS, WRONG, Record, read_report
from torch_ops.bench.show.tables import markdown

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def commands() -> dict[str, list[str]]:
    """Arguments of `vk bench` by the file of results."""
    found = {}
    for arguments in bench_lines("figures-ops"):
        place = arguments.index("--out")
        found[Path(arguments[place + 1]).name] = arguments[:place] + arguments[place + 2 :]
    return found


def _names(commands: dict[str, list[str]], op: str) -> set[str]:
    arguments = commands[f"h200_{op}.json"]
    shapes = [arguments[arguments.index("--shapes") + 1]] if "--shapes" in arguments else []
    return {case.name for each in FAMILIES.get(op, (op,)) for case in BENCHES[each].cases(shapes, CUDA)}


def test_every_run_has_rooms_and_a_place_in_a_page(commands: dict[str, list[str]]) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    wanted = {"qkv_rope", "mlp", "norms", "rope_window_attn", "vision_attention", "patch_merger", "grids", "host"}
    assert commands.keys() == {f"h200_{name}.json" for name in wanted}
    for file, (command, *rest) in commands.items():
        assert f"--if-measured results/{file} -->" in pages
        ops = rest if command == "host" else [command]
        for op in (each for name in ops for each in FAMILIES.get(name, (name,))):
            assert options.find_baselines(BENCHES[op], [], CUDA)
        assert command == "host" or _names(commands, command)
    assert set(commands["h200_host.json"][1:]) == wanted - {"host"} | {"window_attn"}


def test_runs_reach_what_targets_ask_for(commands: dict[str, list[str]]) -> None:
    projections = _names(commands, "qkv_rope")
    assert projections == {f"qkv_{width}_{rows}" for width in (1152, 1024, 1280) for rows in (4096, 25088)}
    layers = ("1152_4304", "1024_4096", "1280_3420", "1280_3456", "512_1365")
    assert _names(commands, "mlp") >= {f"mlp_{layer}_{rows}" for layer in layers for rows in (4096, 25088)}
    assert {case.activation for case in BENCHES["mlp"].cases(["mlp_1280_3456_*"], CUDA)} == {"swiglu"}
    images = {f"qwen3vl_l_{rows}" for rows in (1024, 2304, 4096, 9216, 784, 1764, 3136, 7056)}
    assert _names(commands, "rope_window_attn") >= images | {"qwen3vl_l_16x1024", "qwen25vl_windows"}
    assert len(_names(commands, "norms")) == 7 and "qwen_l_25088" in _names(commands, "norms")
    usual = {op: BENCHES[op].usual["cuda"] for op in BENCHES}
    assert usual["qkv_rope"] == ("linear", "eager", "compiled")
    assert usual["mlp"] == ("pair", "epilogue", "eager", "compiled")
    assert all(usual[op][-2:] == ("copy", "neg") for op in FAMILIES["norms"])
    backward = {file for file, arguments in commands.items() if "--backward" in arguments}
    assert backward == {f"h200_{name}.json" for name in ("norms", "rope_window_attn", "vision_attention")}


def test_empty_segments_are_timed_in_the_run_of_the_same_rows_without() -> None:
    (arguments,) = bench_lines("figures-replayed")
    shapes = arguments[arguments.index("--shapes") + 1]
    first, second = BENCHES[arguments[0]].cases([shapes], CUDA)
    assert second.lengths == (*first.lengths, *(0,) * 2000)
    assert "--if-measured results/h200_window_attn_replayed.json -->" in (ROOT / "docs" / "benchmarks.md").read_text()


def test_a_family_is_one_document(tmp_path: Path) -> None:
    out = tmp_path / "norms.json"
    result = bench("norms", "--shapes", "narrow", "--rounds", 2, "--out", out)
    assert result.exit_code == 0, result.output
    report = read_report(out)
    assert tuple(dict.fromkeys(one.op for one in report.records)) == FAMILIES["norms"]
    about = report.provenance.baselines["eager"]
    assert all(f"torch_ops.testing.references.{op}" in about.split("; ") for op in FAMILIES["norms"])
    text = markdown(report, "summary")
    head = r"\| case \| shape \| forward ms \| eager \| copy \| neg \|"
    parts = re.findall(rf"\*\*(\w+)\*\*\n\n{head}\n\|.*\n\| narrow \|", text)
    assert tuple(parts) == FAMILIES["norms"]
    assert all(text.count(f"- *reference point*: {name}") == 1 for name in ("copy", "neg"))
    assert text.count("Under a baseline's name") == 1


def test_host_times_of_several_ops(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    result = bench("host", "grids", "rms_norm", "--out", out, "--markdown")
    assert result.exit_code == 0, result.output
    assert tuple(dict.fromkeys(time.op for time in read_report(out).host)) == (*FAMILIES["grids"], "rms_norm")
    assert "### rms_norm, host time per call" in result.stdout
    assert "no op 'conv' has a benchmark" in refused("host", "rms_norm", "conv")


def _image(tokens: int, status: str = OK, direction: str = "forward") -> list[Record]:
    def record(name: str, group: str, status: str, *ms: float) -> Record:
        return Record(
            "rope_window_attn", f"qwen3vl_l_{tokens}", f"1x{tokens}x16x72", direction, "bfloat16", "hopper",
            name, group, status, "", ms,
        )  # fmt: skip

    ours = record("vk", OURS, status, 1.5, 1.5)
    return [ours, record("eager_flash2", BASELINE, OK, 3.0, 3.0), record("compiled_flash2", BASELINE, OK, 2.0, 2.0)]


def test_table_of_single_images(tmp_path: Path) -> None:
    records = _image(9216) + _image(784) + _image(784, WRONG, "backward") + _image(1764, WRONG) + _image(500)
    file = tmp_path / "run.json"
    dataclasses.replace(golden_report(), records=tuple(records)).write(file)
    text = bench("table", "--images", file).stdout
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("**")] == [
        f"**Patches of {side} x {side} pixels**" for side in (14, 16)
    ]  # fmt: skip
    assert "| image size | tokens | Flash+RoPE, ms | ours, ms | speedup |" in lines
    assert "| 1344x1344 | 9,216 | 3.00 | 1.50 | 2.00x |" in lines and "| 448x448 | 784 | 3.00 | 1.50 | 2.00x |" in lines
    assert "| 672x672 | 1,764 | 3.00 | 1.50 *wrong* | - |" in lines and "| 500 |" not in text
    assert "- attention only, of one layer, forward" in text
    dataclasses.replace(golden_report(), records=tuple(_image(500))).write(file)
    assert "it holds no forward of an image of 448" in refused("table", "--images", file)
