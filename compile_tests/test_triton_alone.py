"""Triton alone builds recorded launches, and finds the faults of builds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from compile_tests import triton_alone
from compile_tests.attention import hopper_launches
from compile_tests.contract.build import build, build_all
from compile_tests.contract.trace import SM90, fake_gpu
from compile_tests.contract.variants import Demands
from compile_tests.kernels import ROPE_WINDOW_ATTN
from csrc_free_ops.configs.attention_hopper import HEAD_DIMS
from csrc_free_ops.configs.rows import Config


def _record(file: Path, monkeypatch: pytest.MonkeyPatch, launches: list[Any], demands: Demands) -> None:
    monkeypatch.setenv("VK_RECORD_BUILDS", str(file))
    with fake_gpu(SM90), pytest.raises(pytest.skip.Exception, match="recorded"):
        build_all([(launch, demands) for launch in launches], SM90)
    monkeypatch.delenv("VK_RECORD_BUILDS")


@pytest.fixture
def variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "variants.jsonl"
    launches = [ROPE_WINDOW_ATTN.launch("_rope_kernel", head_dim=head_dim) for head_dim in (64, 64, 72)]
    _record(file, monkeypatch, launches, Demands())
    return file


def _build_alone(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command where PyTorch cannot be imported, not even by processes that it starts."""
    (folder / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "compile_tests.triton_alone", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_variants_are_built_without_torch(variants: Path, tmp_path: Path) -> None:
    """Each once, in several processes."""
    out = tmp_path / "figures.json"
    done = _build_alone(tmp_path, variants, "--jobs", "2", "--out", out)
    assert done.returncode == 0 and "2 of 2 variants are as they must be" in done.stdout, done.stderr
    assert all(each["spilled"] == 0 and "shared" in each for each in json.loads(out.read_text())["builds"])


def test_a_variant_that_ends_its_process_is_named(variants: Path, tmp_path: Path) -> None:
    first, second = map(json.loads, dict.fromkeys(variants.read_text().splitlines()))
    # LLVM ends the process over a GPU that it does not know.
    crash = {**first, "name": "crash", "target": ["cuda", 999, 32]}
    variants.write_text("\n".join(map(json.dumps, (crash, second))) + "\n\n")
    done = _build_alone(tmp_path, variants, "--jobs", "1")
    assert done.returncode == 1 and "0 of 2 variants" in done.stdout
    assert re.search(r"^its process ended with code -\d+: crash$", done.stdout, re.MULTILINE), done.stdout
    assert f"not tried: {second['name']}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernel", "("], "no regular expression"), (["--kernel", "no such"], "give another --kernel"),
        (["--jobs", "0"], "give 1 or more"), (["--out", "no/such/folder"], "give another file"),
    ],
)  # fmt: skip
def test_arguments_are_refused_in_a_line(
    arguments: list[str], said: str, variants: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["triton_alone", str(variants), *arguments])
    with pytest.raises(SystemExit) as ended:
        triton_alone.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"), (b"\xff", "cannot be read"), (b"\n", "is empty"), (b"[]", "a line without"),
        (b'{"kernel": "k"', "a line without"), (b'{"kernel": "k"}', "a line without args"),
    ],
    ids=range(6),
)  # fmt: skip
def test_a_file_of_no_variants_is_refused_in_a_line(
    text: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "variants.jsonl"
    if text is not None:
        file.write_bytes(text)
    monkeypatch.setattr(sys, "argv", ["triton_alone", str(file)])
    with pytest.raises(SystemExit) as ended:
        triton_alone.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, ""),
        ({"most_spilled": -1}, "0 spilled, at most -1 allowed"),
        ({"shared_memory": -1}, "bytes of shared memory"),
        ({"wgmma": "some"}, "products that are not wgmma"),
    ],
)
def test_what_is_wrong_with_a_build_is_said(change: dict[str, Any], found: str, variants: Path) -> None:
    variant = json.loads(variants.read_text().splitlines()[0]) | change
    wrong, figures = triton_alone.faults(variant)
    assert len(wrong) == bool(found) and all(re.search(found, each) for each in wrong)


def test_a_version_may_spill_more_in_kernels_that_are_named() -> None:
    def allowed(version: tuple[int, int], kernel: str, head_dim: int, most_spilled: int = 0) -> int:
        name = f"cuda-90 {kernel.rpartition('.')[2]} {{'HEAD_DIM': {head_dim}, 'MAIN': 64}}"
        return triton_alone.allowed_spills({"kernel": kernel, "name": name, "most_spilled": most_spilled}, version)

    decode, hopper = "csrc_free_ops.attention.portable.decode._attention_decode_kernel", "csrc_free_ops.gemm.hopper.k"
    assert [allowed(version, decode, 72) for version in ((3, 6), (3, 7), (3, 8), (3, 9), (4, 0))] == [
        40,
        0,
        288,
        360,
        360,
    ]
    assert allowed((3, 8), decode, 128) == 56 and allowed((3, 9), hopper, 128, 100) == 188
    assert allowed((3, 6), hopper, 128, 100) == 100


def test_a_build_leaves_the_driver_as_it_was(variants: Path) -> None:
    """On a GPU, kernels launch by it."""
    before = triton.runtime.driver._active
    triton_alone.build(json.loads(variants.read_text().splitlines()[0]))
    assert triton.runtime.driver._active is before


def test_a_kernel_that_does_not_build_is_named(variants: Path) -> None:
    variant = json.loads(variants.read_text().splitlines()[0])
    variant["kwargs"] = {**variant["kwargs"], "HEAD_DIM": 7}
    assert triton_alone._try(variant)["wrong"][0].startswith("does not build")


@pytest.fixture(scope="module")
def backward() -> str:
    rows = {"attention_fwd_hopper": HEAD_DIMS[72].unmasked, "attention_bwd_hopper": Config(64, 128, 8, 3)}
    launch = hopper_launches(rows, 72)["_attention_bwd_hopper_kernel"]
    with fake_gpu(SM90):
        return str(build(launch, SM90, wgmma="overlapping").asm["ttgir"])


def test_buffers_lie_where_kernels_look_for_them(backward: str) -> None:
    kernel = "csrc_free_ops.attention.hopper.bwd._attention_bwd_hopper_kernel"
    buffers = triton_alone.placed(backward)
    assert buffers[0][0] == 0 and buffers[1][0] == buffers[0][1] > 200000
    assert triton_alone.misplaced(kernel, backward) == ""


def test_buffers_that_lie_elsewhere_are_found(backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "csrc_free_ops.attention.hopper.bwd._attention_bwd_hopper_kernel"
    for places, said in (([(256, 4096), (0, 256)], "the largest buffer"), ([(0, 4096), (4352, 256)], "the second")):
        monkeypatch.setattr(triton_alone, "placed", lambda ttgir, places=places: places)
        assert triton_alone.misplaced(kernel, backward).startswith(said)
