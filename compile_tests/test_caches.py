"""Stale caches: an edited kernel, launcher or backward, or a changed setting, is never served an old artefact.

Every call runs in a process of its own, on a copy of the packages, with compiler caches that outlive it. On a CPU the
op is opaque to the compiler, but its backward formula is not. Edits of launchers and kernels are therefore run on a
GPU; a CPU tests that they change the key of every artefact.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.contract.process import ROOT, run_python
from torch_ops.settings import hash_sources, source_hash

COMPILED_CALL = """
import json, torch
from torch._dynamo.utils import counters
from torch_ops import window_attn
torch.manual_seed(0)
q, k, v = (torch.randn(200, 2, 16).to({device!r}, {dtype}).requires_grad_() for _ in range(3))
cu = torch.tensor([0, 80, 200], dtype=torch.int32, device=q.device)
out, lse = torch.compile(window_attn, fullgraph=True)(q, k, v, cu, return_lse=True)
out.square().sum().backward()
results = {{"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}}
sums = {{name: value.double().sum().item() for name, value in results.items()}}
print(json.dumps({{"hits": counters["aot_autograd"]["autograd_cache_hit"], **sums}}))
"""


class Installation:
    """A copy of the packages that may be edited, with compiler caches of its own."""

    def __init__(self, root: Path, device: str) -> None:
        self.packages, self.caches, self.device = root / "packages", root / "caches", device
        for name in ("csrc_free_ops", "torch_ops"):
            shutil.copytree(ROOT / name, self.packages / name, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, **environment: str) -> dict[str, Any]:
        # Not fp16 on a GPU: twice a number that it holds with fewer digits, being small, rounds otherwise.
        output = run_python(
            COMPILED_CALL.format(device=self.device, dtype=torch.bfloat16 if self.device == "cuda" else torch.float32),
            path=self.packages,
            TORCHINDUCTOR_FORCE_DISABLE_CACHES="0",
            TORCHINDUCTOR_CACHE_DIR=str(self.caches / "inductor"),
            TRITON_CACHE_DIR=str(self.caches / "triton"),
            **{"VK_PATH": "auto", **environment},
        )
        return json.loads(output)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.packages / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} no longer holds {old!r}: edit something else in this test"
        path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Installation, dict[str, Any]]:
    """An installation whose caches a first process has filled, and what a second one printed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    installation = Installation(tmp_path_factory.mktemp("installation"), device)
    assert installation.run()["hits"] == 0
    return installation, installation.run()


@pytest.fixture
def edited(warm: tuple[Installation, dict[str, Any]]) -> Iterator[Installation]:
    """The installation with its warm caches, for one test to edit."""
    installation, _ = warm
    kept = installation.packages.with_name("kept")
    shutil.copytree(installation.packages, kept)
    yield installation
    shutil.rmtree(installation.packages)
    kept.rename(installation.packages)


@pytest.fixture
def before(warm: tuple[Installation, dict[str, Any]]) -> dict[str, Any]:
    return warm[1]


def test_unchanged_library_is_served_from_the_warm_cache(before: dict[str, Any]) -> None:
    assert before["hits"] > 0


def test_edited_backward_takes_effect(edited: Installation, before: dict[str, Any]) -> None:
    edited.edit("torch_ops/_attention/checks.py", "pick((dout, dlse,", "pick((2 * dout, dlse,")
    after = edited.run()
    assert after["hits"] == 0
    for gradient in ("dq", "dk", "dv"):
        assert after[gradient] == pytest.approx(2 * before[gradient])


@pytest.mark.gpu
def test_edited_launcher_takes_effect(edited: Installation, before: dict[str, Any]) -> None:
    edited.edit("torch_ops/_attention/options.py", "-0.5 if call.scale is None", "-1.0 if call.scale is None")
    after = edited.run()
    assert after["hits"] == 0
    assert after["lse"] != pytest.approx(before["lse"])


@pytest.mark.parametrize(
    "file",
    [
        "csrc_free_ops/attention/portable/fwd.py",
        "csrc_free_ops/configs/h200.json",
        "csrc_free_ops/configs/norms.py",
        "csrc_free_ops/tiles/scores.py",
        "torch_ops/_attention/options.py",
        "torch_ops/_attention/portable.py",
        "torch_ops/_core/launch.py",
        "torch_ops/_gemm/portable.py",
        "torch_ops/_grids.py",
        "torch_ops/_kv_cache/append.py",
        "torch_ops/_norms/portable.py",
        "torch_ops/compat/_handover_rule.py",
        "torch_ops/models/vision.py",
        "torch_ops/window_attn.py",
    ],
)
def test_an_edit_in_any_package_changes_the_key(edited: Installation, file: str) -> None:
    before = hash_sources(edited.packages)
    path = edited.packages / file
    path.write_text(path.read_text() + "\n")
    assert hash_sources(edited.packages) != before


def test_the_key_is_that_of_these_sources(edited: Installation) -> None:
    assert hash_sources(ROOT) == hash_sources(edited.packages) == source_hash()
    assert source_hash() in torch.compiler.config.cache_key_tag


@pytest.mark.gpu
def test_edited_kernel_takes_effect(edited: Installation, before: dict[str, Any]) -> None:
    edited.edit("csrc_free_ops/attention/portable/fwd.py", "+ rows, lse, mask=", "+ rows, 2 * lse, mask=")
    after = edited.run()
    assert after["hits"] == 0
    assert after["lse"] == pytest.approx(2 * before["lse"])


@pytest.mark.gpu
def test_edited_tile_takes_effect(edited: Installation, before: dict[str, Any]) -> None:
    """A constant in a file that kernels import."""
    edited.edit("csrc_free_ops/tiles/scores.py", "LN2 = tl.constexpr(0.69", "LN2 = tl.constexpr(2 * 0.69")
    after = edited.run()
    assert after["hits"] == 0
    assert after["lse"] == pytest.approx(2 * before["lse"])


@pytest.mark.parametrize(("variable", "value"), [("VK_PATH", "portable"), ("VK_HAND_OVER", "0")])
def test_changed_setting_takes_effect(variable: str, value: str, edited: Installation) -> None:
    assert edited.run(**{variable: value})["hits"] == 0
