"""Arrows between the rooms of the house point one way, and private names stay in theirs."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_tests.contract import ROOT
from torch_ops._registry import OPS, KernelOp
from torch_ops.bench.app import ROOMS as BENCH_ROOMS

# An op lives in a module of its own name, or in that of a close relative, whose public functions it is among.
OP_MODULES = {op.body.__module__ for op in OPS.values() if isinstance(op, KernelOp)}
COMPOSITIONS = {op.body.__module__ for op in OPS.values()} - OP_MODULES

# From the ground up: a room imports from its own and from those before it.
ROOMS = (
    ("tiles", r"csrc_free_ops\.tiles(\..*)?"),
    ("kernels", r"csrc_free_ops(\..*)?"),
    ("foundations", r"torch_ops\.(_autocast|_checks|_device|_explanations|_launches|_registry|_versions|settings)"),
    ("ops", "|".join(map(re.escape, OP_MODULES))),
    ("compositions", "|".join((*map(re.escape, COMPOSITIONS), r"torch_ops\.(_caches|kv_cache)"))),
    ("the bench and the command", r"torch_ops\.(bench(\..*)?|cli|_encode\w*)"),
    ("models and integrations", r"torch_ops\.(models|integrations|compat|distributed)(\..*)?"),
    ("testing", r"torch_ops\.testing(\..*)?"),
    ("the public face", r"torch_ops(\._explain|\._warmup)?"),
    ("launchers", r"torch_ops\._\w+"),
)
ORDER = (
    "tiles",
    "kernels",
    "foundations",
    "launchers",
    "ops",
    # Ops made of ops, and the caches that an op fills.
    "compositions",
    "the public face",
    "testing",
    "models and integrations",
    "the bench and the command",
)
SOURCES = sorted(path for package in ("csrc_free_ops", "torch_ops") for path in (ROOT / package).rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path) for path in SOURCES}


def _room(module: str) -> str:
    return next(room for room, pattern in ROOMS if re.fullmatch(pattern, module))


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name taken from it, or nothing) of every import, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in MODULES else (node.module, alias.name)


def _ids(path: Path) -> str:
    return _module(path)


def test_every_op_is_in_a_module_of_its_family() -> None:
    for name, op in OPS.items():
        module = sys.modules[op.body.__module__]
        public = name.removesuffix("_backward")
        assert public in module.__all__, f"vk::{name} is in {module.__name__}, which has no public {public}"
        assert public.endswith(module.__name__.removeprefix("torch_ops.")), f"vk::{name} is in {module.__name__}"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("op", sorted({name.removesuffix("_backward") for name in OPS}))
def test_every_op_has_its_rooms(op: str) -> None:
    """Of its own name or of its family's, and `make` and the benchmark find them by the op's."""

    def found_by(target: str) -> list[tuple[str, str]]:
        command = ["make", "-n", target, f"OP={op}"]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        return re.findall(r"((?:compile_)?tests)/test_(\w+)\.py", made.stdout)

    found = found_by("gpu-test")
    # Without a GPU the interpreter runs those of `tests` first.
    assert found_by("test") == [each for each in found if each[0] == "tests"] + found
    files = [(folder, name) for folder, name in found if not re.match("gemm|products", name)]
    assert (found != files) == (op in ("mlp", "patch_merger", "qkv_rope"))
    assert [folder for folder, _ in files] == ["tests", "compile_tests"]
    ((room,),) = ({name for _, name in files},)
    assert op == room or op.endswith(room.removesuffix("s").split("_")[-1])
    assert (ROOT / "torch_ops" / "bench" / f"{room}.py").is_file() and op in BENCH_ROOMS


@pytest.mark.parametrize("path", SOURCES, ids=_ids)
def test_imports_point_down(path: Path) -> None:
    own = _room(_module(path))
    climbing = [
        f"{module} ({_room(module)})"
        for module, _ in _imports(path)
        if module in MODULES and ORDER.index(_room(module)) > ORDER.index(own)
    ]
    assert not climbing, f"{_module(path)} ({own}) imports {', '.join(climbing)}"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.is_relative_to(ROOT / "torch_ops")], ids=_ids)
def test_private_names_stay_in_their_module(path: Path) -> None:
    """Kernels begin with an underscore and are the launchers' to import."""
    taken = [
        f"{module}.{name}"
        for module, name in _imports(path)
        if module.startswith("torch_ops") and re.match(r"_(?!_)", name)
    ]
    assert not taken, f"{_module(path)} imports {', '.join(taken)}"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.is_relative_to(ROOT / "csrc_free_ops")], ids=_ids)
def test_kernels_import_triton_alone_and_read_no_environment(path: Path) -> None:
    allowed = {"triton", "csrc_free_ops", *sys.stdlib_module_names} - {"os"}
    imported = {module.split(".")[0] for module, _ in _imports(path)}
    assert imported <= allowed, f"{_module(path)} imports {', '.join(sorted(imported - allowed))}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("csrc_free_ops"):
            aliased = [alias.name for alias in node.names if alias.asname]
            assert not aliased, f"{_module(path)} renames {', '.join(aliased)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                language = alias.name != "triton.language" or alias.asname == "tl"
                assert language, f"{_module(path)} imports triton.language as {alias.asname}"


def test_the_library_imports_without_what_only_some_of_it_needs() -> None:
    """Benchmarks, models, integrations and the testing kit are for those who ask for them."""
    optional = {"matplotlib", "pytest", "rich", "transformers", "typer"}
    upper = {"testing", "models and integrations", "the bench and the command"}
    public = [path for path in SOURCES if _room(_module(path)) not in upper]
    found = {f"{_module(path)}: {module}" for path in public for module, _ in _imports(path) if module in optional}
    assert not found
