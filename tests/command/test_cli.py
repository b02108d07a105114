"""The vk command: what it prints, and how it refuses."""

import json
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import torch_ops
from tests.command.verify import CPU, STREET, refused, vk
from torch_ops.command import encode as encode_command
from torch_ops.command.errors import OneLineErrors
from torch_ops.models.qwen_vl import encode, load_tower, open_image, preprocess

pytestmark = pytest.mark.no_interpret


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def unstyled(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture(scope="module")
def small_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("images") / "small.png"
    open_image(STREET).resize((300, 200)).save(file)
    return file


def test_encode_json(checkpoint: Path, small_image: Path) -> None:
    result = vk("encode", STREET, small_image, "--model", checkpoint, "--compare", "--json", *CPU)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["model"] == str(checkpoint)
    assert (report["tower"], report["seed"]) == (None, None)
    assert (report["device"], report["dtype"], report["compiled"]) == ("cpu", "float32", False)
    assert report["attention"] == "vk's encoder"
    street, small = report["images"]
    assert street == {
        "file": str(STREET),
        "size": [640, 440],
        "grid_thw": [1, 28, 40],
        "tokens": 1120,
        "last_hidden_state": [1120, 32],
        "pooler_output": [280, 24],
        "deepstack_features": [[280, 24]],
        "seconds_share": pytest.approx(report["seconds"] * 0.8),
    }
    assert (small["size"], small["grid_thw"], small["tokens"]) == ([300, 200], [1, 14, 20], 280)
    assert report["tokens"] == 1400
    assert report["tokens_per_second"] == pytest.approx(1400 / report["seconds"])
    compare = report["compare"]
    assert compare["attention"] == "sdpa"
    assert compare["speedup"] is None, "on the CPU both are ATen's attention"
    names = {"last_hidden_state", "pooler_output", "deepstack_features[0]"}
    assert compare["differences"].keys() == names


@torch.no_grad()
def test_compare_measures_the_difference(checkpoint: Path, small_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong attention must show in the figures, at its true size."""
    from torch_ops.models import _blocks, from_transformers

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        return v

    tower = load_tower(checkpoint)
    pixel_values, grid = preprocess([open_image(small_image)])
    right = encode(tower, pixel_values, grid).pooler_output
    monkeypatch.setattr(_blocks, "window_attn", wrong)
    result = vk("encode", small_image, "--model", checkpoint, "--compare", "--json", *CPU)
    differences = json.loads(result.stdout)["compare"]["differences"]["pooler_output"]
    ours = encode(from_transformers(tower), pixel_values, grid).pooler_output
    largest = (ours.double() - right.double()).abs().max().item()
    assert largest > 0
    assert differences["absolute"] == pytest.approx(largest)
    assert differences["relative"] == pytest.approx(largest / right.abs().max().item())


def test_encode_table(checkpoint: Path, small_image: Path) -> None:
    result = vk("encode", small_image, small_image, "--model", checkpoint, "--compare", *CPU)
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"1, 14, 20 +280 +hidden 280 x 32 ", result.stdout)) == 2
    assert "1 deepstack 70 x 24" in result.stdout
    assert "2 images, 560 tokens in one packed call: " in result.stdout
    assert "float32 on CPU; vk's encoder" in result.stdout
    assert "largest difference from Transformers' encoder (sdpa)" in result.stdout
    assert "deepstack_features[0]" in result.stdout


def test_encode_random_tower(small_image: Path) -> None:
    result = vk("encode", small_image, "--seed", 7, *CPU)
    assert result.exit_code == 0, result.output
    assert "hidden 280 x 768" in result.stdout
    assert "tower S, random weights of seed 7; 100.6 M parameters" in result.stdout
    assert "Transformers" not in result.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_encode_dtypes(checkpoint: Path, small_image: Path, dtype: str) -> None:
    result = vk("encode", small_image, "--model", checkpoint, "--dtype", dtype, "--json", *CPU)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["dtype"] == dtype


@torch.no_grad()
def test_encode_compiled(checkpoint: Path, small_image: Path) -> None:
    result = vk("encode", small_image, "--model", checkpoint, "--compile", "--compare", "--json", *CPU)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["compiled"] is True
    pixel_values, grid = preprocess([open_image(small_image)])
    eager = encode(load_tower(checkpoint), pixel_values, grid)
    exact = encode(load_tower(checkpoint, torch.float64), pixel_values.double(), grid)
    for name in ("last_hidden_state", "pooler_output"):
        error = (eager[name] - exact[name]).abs().max().item()
        rounded = exact[name].float()
        band = 2 * (rounded + 0.3 - 0.3 - rounded).abs().max().item()
        # each within the rule of its own reference, so the two within the sum of both
        assert report["compare"]["differences"][name]["absolute"] <= (2 * error + band) + error


def test_compiler_that_fails(checkpoint: Path, small_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(*_: Any, **__: Any) -> Any:
        raise RuntimeError("InvalidCxxCompiler: no compiler found\n\nSet TORCHDYNAMO_VERBOSE=1 ...")

    monkeypatch.setattr(torch, "compile", compile_)
    said = refused("encode", small_image, "--model", checkpoint, "--compile", *CPU, code=1)
    assert "torch.compile failed: InvalidCxxCompiler: no compiler found; leave out" in said


def test_progress_goes_to_stderr(checkpoint: Path, small_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to Rich
    result = vk("encode", small_image, "--model", checkpoint, "--json", *CPU)
    assert json.loads(result.stdout)["tokens"] == 280
    assert "encoding" in result.stderr


def test_the_old_path_still_runs_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torch_ops.cli", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torch_ops.cli", run_name="__main__", alter_sys=True)
    assert not ended.value.code and "Usage" in capsys.readouterr().out


def test_closed_pipe_is_quiet() -> None:
    command = [sys.executable, "-m", "torch_ops.command.app", "info"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1


def test_checkpoint_of_other_patches(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 14}')
    said = refused("encode", STREET, "--model", tmp_path, *CPU)
    assert "preprocessor_config.json has patch_size 14, and patch_size of the tower in " in said


def test_features_that_are_not_finite(checkpoint: Path, small_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_ops.models import _blocks

    monkeypatch.setattr(_blocks, "window_attn", lambda q, *_, **__: q * torch.inf)
    said = refused("encode", small_image, "--model", checkpoint, *CPU, code=1)
    assert "the features are not finite in float32; give another --dtype" in said


def test_out_of_memory(checkpoint: Path, small_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr(encode_command, "_run", run)
    said = refused("encode", small_image, "--model", checkpoint, *CPU, code=1)
    assert "cpu has not enough memory for 280 tokens in one call; give fewer or smaller images, or --chunk" in said


def test_interrupt_is_quiet(checkpoint: Path, small_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(encode_command, "_run", run)
    result = vk("encode", small_image, "--model", checkpoint, *CPU)
    assert (result.exit_code, result.output) == (130, "")


def test_defects_keep_their_traceback(checkpoint: Path, small_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise ValueError("a defect")

    monkeypatch.setattr(encode_command, "_run", run)
    result = vk("encode", small_image, "--model", checkpoint, *CPU)
    assert isinstance(result.exception, ValueError)


def test_info() -> None:
    result = vk("info")
    assert result.exit_code == 0, result.output
    assert torch.__version__ in result.stdout
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["versions", "devices", "paths", "launch rows", "ops"]
    assert "Tensor" not in result.stdout and "vk::window_attn(Tensor q" in vk("info", "--all").stdout
    assert json.loads(vk("info", "--json").stdout) == torch_ops.info()


def test_info_shows_paths_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "info", lambda: {"rows": {"source": "/a [/b]:smile:\x1b[2J"}, "ops": {}})
    assert "/a [/b]:smile:\\x1b[2J" in vk("info", "--all").stdout


@pytest.mark.parametrize("columns", ["0", "5", "80"])
def test_info_of_a_pipe_has_whole_lines(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = vk("info").stdout.splitlines()
    assert len(lines) == 5 and f"torch {torch.__version__}, triton" in lines[0]


def test_help_and_version() -> None:
    bare, asked = vk(), vk("--help")
    assert bare.exit_code == asked.exit_code == 0
    for command in ("encode", "info", "bench"):
        assert command in bare.stdout and command in asked.stdout
    assert "in one packed call" in unstyled(vk("encode", "--help").stdout)
    assert vk("--version").stdout == f"vk {torch_ops.__version__}\n"


def test_bench_is_mounted_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    bench = types.ModuleType("torch_ops.bench")
    bench.app = typer.Typer(cls=OneLineErrors)  # type: ignore[attr-defined]

    @bench.app.callback()
    def callback() -> None:
        """A group, as the benchmark's application is."""

    @bench.app.command()
    def window_attn(shapes: str = "", backward: bool = False) -> None:
        seen.append([shapes, str(backward)])
        raise typer.Exit(3)

    monkeypatch.setitem(sys.modules, "torch_ops.bench", bench)
    assert vk("bench", "window-attn", "--shapes", "1x64", "--backward").exit_code == 3
    assert seen == [["1x64", "True"]]
    assert "--shapes" in unstyled(vk("bench", "window-attn", "--help").stdout)
    assert "No such option: --nope" in refused("bench", "window-attn", "--nope")
