"""What the Makefile measures: that its commands run, and that what the targets ask for is in the tables they make."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.bench.verify import bench, golden_report, refused
from torch_ops.bench.app import FAMILIES, ROOMS, app
from torch_ops.bench.commands import options
from torch_ops.bench.measure import timing
from torch_ops.bench.measure.results import OK, WRONG, Measurement, Report, Timed, read_report
from torch_ops.bench.show import documents

pytestmark = pytest.mark.no_interpret

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_ROUND_MS", 0.5)


@pytest.fixture(scope="module")
def commands() -> dict[str, list[str]]:
    """Arguments of `vk bench` by the file of results."""
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    # Not with what this make, if one runs these tests, was given.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "ARGS"}
    run = subprocess.run(
        ["make", "-n", "figures-ops"], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True, env=environment
    )
    found = {}
    for line in run.stdout.splitlines():
        _, is_bench, rest = line.partition(" -m torch_ops.bench ")
        if is_bench:
            arguments = shlex.split(rest)
            place = arguments.index("--out")
            found[Path(arguments[place + 1]).name] = arguments[:place] + arguments[place + 2 :]
    return found


def _names(commands: dict[str, list[str]], op: str) -> set[str]:
    arguments = commands[f"h200_{op}.json"]
    shapes = [arguments[arguments.index("--shapes") + 1]] if "--shapes" in arguments else []
    return {case.name for each in FAMILIES.get(op, (op,)) for case in ROOMS[each].cases(shapes, CUDA)}


def test_every_run_has_rooms_and_a_place_in_a_page(commands: dict[str, list[str]]) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    wanted = {"qkv_rope", "mlp", "norms", "rope_window_attn", "vision_attention", "patch_merger", "grids", "host_ops"}
    assert commands.keys() == {f"h200_{name}.json" for name in wanted}
    for file, (command, *rest) in commands.items():
        assert f"--if-measured results/{file} -->" in pages
        ops = rest if command == "host" else [command]
        for op in (each for name in ops for each in FAMILIES.get(name, (name,))):
            assert options.find_peers(ROOMS[op], [], CUDA)
        assert command == "host" or _names(commands, command)
    assert set(commands["h200_host_ops.json"][1:]) == wanted - {"host_ops"}


def test_runs_reach_what_targets_ask_for(commands: dict[str, list[str]]) -> None:
    projections = _names(commands, "qkv_rope")
    assert projections == {f"qkv_{width}_{rows}" for width in (1152, 1024, 1280) for rows in (4096, 25088)}
    layers = ("1152_4304", "1024_4096", "1280_3420", "1280_3456", "512_1365")
    assert _names(commands, "mlp") >= {f"mlp_{layer}_{rows}" for layer in layers for rows in (4096, 25088)}
    assert {case.activation for case in ROOMS["mlp"].cases(["mlp_1280_3456_*"], CUDA)} == {"swiglu"}
    images = {f"qwen3vl_l_{rows}" for rows in (1024, 2304, 4096, 9216, 784, 1764, 3136, 7056)}
    assert _names(commands, "rope_window_attn") >= images | {"qwen3vl_l_16x1024", "qwen25vl_windows"}
    assert len(_names(commands, "norms")) == 7 and "qwen_l_25088" in _names(commands, "norms")
    peers = {op: ROOMS[op].default_peers(CUDA) for op in ROOMS}
    assert peers["qkv_rope"] == ("linear", "eager", "compiled")
    assert peers["mlp"] == ("pair", "epilogue", "eager", "compiled")
    assert all(peers[op][-2:] == ("copy", "neg") for op in FAMILIES["norms"])
    backward = {file for file, arguments in commands.items() if "--backward" in arguments}
    assert backward == {f"h200_{name}.json" for name in ("norms", "rope_window_attn", "vision_attention")}


def test_a_family_is_one_document(tmp_path: Path) -> None:
    out = tmp_path / "norms.json"
    arguments = ["norms", "--shapes", "narrow", "--device", "cpu", "--rounds", "2", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = read_report(out)
    assert tuple(one.op for one in report.measurements) == FAMILIES["norms"]
    about = report.provenance.peers["eager"]
    assert all(f"torch_ops.testing.references.{op}" in about.split("; ") for op in FAMILIES["norms"])
    text = documents.summary(report)
    head = r"\| case \| shape \| forward ms \| eager \| copy \| neg \|"
    parts = re.findall(rf"\*\*(\w+)\*\*\n\n{head}\n\|.*\n\| narrow \|", text)
    assert tuple(parts) == FAMILIES["norms"]
    assert all(text.count(f"- *yardstick*: {name}") == 1 for name in ("copy", "neg"))
    assert text.count("Under a peer's name") == 1


def test_host_times_of_several_ops(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    result = bench("host", "grids", "rms_norm", "--out", out, "--markdown")
    assert result.exit_code == 0, result.output
    assert tuple(dict.fromkeys(time.op for time in read_report(out).host)) == (*FAMILIES["grids"], "rms_norm")
    assert "### rms_norm, host time per call" in result.stdout
    assert "no op 'conv' has a bench room" in refused("host", "rms_norm", "conv")


def _image(tokens: int, ours: Timed, direction: str = "forward") -> Measurement:
    (one, *_) = golden_report().measurements
    peers = Timed("eager_flash2", OK, rounds_ms=(3.0, 3.0)), Timed("compiled_flash2", OK, rounds_ms=(2.0, 2.0))
    return dataclasses.replace(
        one, case=f"qwen3vl_l_{tokens}", shape=f"1x{tokens}x16x72", direction=direction, ours=ours, peers=peers
    )


def test_table_of_single_images(tmp_path: Path) -> None:
    ours, wrong = Timed("vk", OK, rounds_ms=(1.5, 1.5)), Timed("vk", WRONG, "off", (1.0, 1.0))
    measured = (
        _image(9216, ours), _image(784, ours), _image(784, wrong, "backward"), _image(1764, wrong), _image(500, ours),
    )  # fmt: skip
    report: Report = dataclasses.replace(golden_report(), measurements=measured)
    (tmp_path / "run.json").write_text(report.to_json())
    document = tmp_path / "page.md"
    mark = "<!-- vk bench table --images --if-measured run.json -->\n{}<!-- vk bench table end -->\n"
    document.write_text(mark.format("old\n"))
    assert documents.refresh(document)
    text = document.read_text()
    lines = text.splitlines()
    assert lines[1] == "Patches of 14 x 14 pixels:"
    assert lines[3] == "| image size | tokens | Flash+RoPE, ms | ours, ms | speedup |"
    assert lines[5] == "| 1344x1344 | 9,216 | 3.00 | 1.50 | 2.00x |"
    assert lines[7] == "Patches of 16 x 16 pixels:"
    assert lines[11:13] == ["| 448x448 | 784 | 3.00 | 1.50 | 2.00x |", "| 672x672 | 1,764 | 3.00 | 1.00 *wrong* | - |"]
    assert "- attention only, of one layer, forward" in text and "| 500 |" not in text
    assert bench("table", "--images", tmp_path / "run.json").stdout == documents.images(report)
    (tmp_path / "run.json").unlink()
    assert documents.refresh(document) and document.read_text() == mark.format("")
    (tmp_path / "run.json").write_text(dataclasses.replace(report, measurements=measured[-1:]).to_json())
    assert "it holds no forward of an image of 448 pixels" in refused("table", "--into", document)
