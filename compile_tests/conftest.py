"""Every test here starts from clean compilers, and runs unchanged on a CPU and on a GPU.

Inductor's caches are off, because their keys miss changed op bodies and backwards (test_caches.py). Triton's cache is
kept between runs: its key holds the kernel's sources, the options, the target and Triton's version.
"""

import os
from collections.abc import Iterator
from pathlib import Path

# Inductor reads these when it is first imported; the fixtures below see to what is read later.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
# Graphs here are small; a pool of compiling processes would cost more to start than it saves.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Else every process asks the C++ compiler, by three builds, whether it knows the CPU's vector instructions.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch
import torch._inductor.config as inductor_config

import torch_ops

HERE = Path(__file__).parent
TRITON_CACHE = HERE.parent / ".pytest_cache" / "triton"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.no_interpret)
        if INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="the interpreter neither compiles nor traces"))
        elif item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        # A package includes its headers once; compiling them ahead takes longer.
        patch.setattr(inductor_config.aot_inductor, "precompile_headers", False, raising=False)
        patch.setenv("TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR") or str(TRITON_CACHE))
        yield


@pytest.fixture(autouse=True)
def _clean_compilers() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    # A developer's own rows or settings must not decide what is tested; VK_PATH tests another path on purpose.
    with torch_ops.settings(checked=False, rows=""):
        yield
    torch.compiler.reset()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
