"""Arrows between the rooms of the house point one way, and private names stay in theirs."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compile_tests.contract.process import ROOT
from torch_ops._core.registry import OPS, KernelOp
from torch_ops.bench.app import BENCHES

# An op lives in a module of its own name, or in that of a close relative, whose public functions it is among.
OP_MODULES = {op.body.__module__ for op in OPS.values() if isinstance(op, KernelOp)}
COMPOSITIONS = {op.body.__module__ for op in OPS.values()} - OP_MODULES

# A room is a package, or all modules of one kind; the first pattern that fits a module names its room.
ROOMS = (
    ("tiles", r"csrc_free_ops\.tiles(\..*)?"),
    ("configs", r"csrc_free_ops\.configs(\..*)?"),
    ("kernels", r"csrc_free_ops(\..*)?"),
    ("settings", r"torch_ops\.settings"),
    ("_core", r"torch_ops\._core(\..*)?"),
    ("_attention", r"torch_ops\._attention(\..*)?"),
    ("_gemm", r"torch_ops\._gemm(\..*)?"),
    ("_norms", r"torch_ops\._norms(\..*)?"),
    ("_kv_cache", r"torch_ops\._kv_cache(\..*)?"),
    ("_grids", r"torch_ops\._grids"),
    # Plans of two families together.
    ("_projected_attention", r"torch_ops\._projected_attention"),
    ("ops", "|".join(map(re.escape, OP_MODULES))),
    # Ops made of ops, the caches that an op fills, and the index tensors that one takes.
    ("compositions", "|".join((*map(re.escape, COMPOSITIONS), r"torch_ops\.kv_cache(\..*)?", r"torch_ops\.segments"))),
    ("_tools", r"torch_ops\._tools(\..*)?"),
    ("the public face", r"torch_ops"),
    ("testing", r"torch_ops\.testing(\..*)?"),
    ("compat", r"torch_ops\.compat(\..*)?"),
    ("models", r"torch_ops\.models(\..*)?"),
    ("integrations", r"torch_ops\.integrations(\..*)?"),
    ("distributed", r"torch_ops\.distributed(\..*)?"),
    ("command", r"torch_ops\.(command(\..*)?|cli)"),
    ("bench", r"torch_ops\.bench(\..*)?"),
)
# From the ground up: a room imports from itself and from lower floors, and never from another room of its own floor.
FLOORS = (
    ("tiles",),
    ("configs",),
    ("kernels",),
    ("settings",),
    ("_core",),
    ("_attention", "_gemm", "_norms", "_kv_cache", "_grids"),
    ("_projected_attention",),
    ("ops",),
    ("compositions",),
    ("_tools",),
    ("the public face",),
    ("testing",),
    ("compat", "models"),
    ("integrations", "distributed", "command"),
    ("bench",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FAMILIES = FLOORS[FLOOR["_attention"]]
SOURCES = sorted(path for package in ("csrc_free_ops", "torch_ops") for path in (ROOT / package).rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path) for path in SOURCES}


def _room(module: str) -> str:
    rooms = [room for room, pattern in ROOMS if re.fullmatch(pattern, module)]
    assert rooms, f"{module} is in no room; add a new package to ROOMS and FLOORS of {Path(__file__).name}"
    return rooms[0]


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


def test_every_op_is_in_a_module_of_its_family() -> None:
    for name, op in OPS.items():
        module = sys.modules[op.body.__module__]
        public = name.removesuffix("_backward").removeprefix("_")
        assert public in module.__all__, f"vk::{name} is in {module.__name__}, which has no public {public}"
        assert public.endswith(module.__name__.removeprefix("torch_ops.")), f"vk::{name} is in {module.__name__}"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("op", sorted({name.removesuffix("_backward").removeprefix("_") for name in OPS}))
def test_every_op_has_its_rooms(op: str) -> None:
    """Test files have the op's name or its family's, and `make` and the benchmark find them by the op's name."""

    def found_by(target: str) -> list[tuple[str, str]]:
        command = ["make", "-n", target, f"OP={op}"]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert not made.returncode, made.stderr
        return re.findall(r"(tests/\w+|compile_tests)/test_(\w+)\.py", made.stdout)

    found = found_by("gpu-test")
    # Without a GPU the interpreter runs those of `tests` too.
    assert found_by("test") == found + [each for each in found if each[0].startswith("tests/")]
    files = [(folder, name) for folder, name in found if not re.match("gemm|products", name)]
    assert (found != files) == (op in ("mlp", "patch_merger", "qkv_rope"))
    wanted = f"expected tests/<family>/test_{op}.py and compile_tests/test_{op}.py, found {files}"
    assert [folder.split("/")[0] for folder, _ in files] == ["tests", "compile_tests"], wanted
    ((room,),) = ({name for _, name in files},)
    assert op == room or op.endswith(room.removesuffix("s").split("_")[-1])
    bench = ROOT / "torch_ops" / "bench" / "rooms" / f"{room}.py"
    assert bench.is_file() and op in BENCHES, f"no benchmark of {op}; add {bench.name} and list it in bench/app.py"


def test_every_package_of_torch_ops_is_a_room_of_its_own() -> None:
    rooms = [_room(_module(path)) for path in SOURCES if path.match("torch_ops/*/__init__.py")]
    assert len(rooms) > 10 and len(set(rooms)) == len(rooms), rooms


def test_few_private_files_lie_outside_of_packages() -> None:
    loose = sorted(path.name for path in (ROOT / "torch_ops").glob("_*.py") if path.name != "__init__.py")
    assert len(loose) <= 4, loose


def test_imports_point_down_and_families_never_import_each_other() -> None:
    wrong = []
    for path in SOURCES:
        own = _room(_module(path))
        for module, _ in _imports(path):
            if module not in MODULES or (room := _room(module)) == own:
                continue
            if FLOOR[room] >= FLOOR[own]:
                wrong.append(f"{_module(path)} ({own}) imports {module} ({room})")
    assert not wrong, "\n".join(wrong)


def test_configs_import_no_kernel() -> None:
    taken = {module for path in SOURCES if _room(_module(path)) == "configs" for module, _ in _imports(path)}
    assert not {module for module in taken if module in MODULES and _room(module) in ("tiles", "kernels")}


def test_no_test_imports_another_test_file() -> None:
    """Families share code in their verify.py, compile tests in modules without `test_`."""
    files = sorted(path for folder in ("tests", "compile_tests") for path in (ROOT / folder).rglob("*.py"))
    taken = [(path, f"{module}.{name}") for path in files for module, name in _imports(path)]
    test_file = re.compile(r"(compile_)?tests\.(.*\.)?test_")
    wrong = [f"{path.relative_to(ROOT)}: {name}" for path, name in taken if test_file.match(name)]
    assert len(files) > 100 and not wrong, "\n".join(wrong)


def test_private_names_stay_in_their_module() -> None:
    """Kernels begin with an underscore too; launchers import them."""
    taken = [
        f"{_module(path)}: {module}.{name}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "torch_ops")
        for module, name in _imports(path)
        if module.startswith("torch_ops") and re.match(r"_(?!_)", name)
    ]
    assert not taken, "\n".join(taken)


def test_kernels_import_triton_alone_and_read_no_environment() -> None:
    allowed = {"triton", "csrc_free_ops", *sys.stdlib_module_names} - {"os"}
    wrong = []
    for path in SOURCES:
        if not path.is_relative_to(ROOT / "csrc_free_ops"):
            continue
        wrong += [f"{_module(path)}: {module}" for module, _ in _imports(path) if module.split(".")[0] not in allowed]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("csrc_free_ops"):
                wrong += [f"{_module(path)} renames {alias.name}" for alias in node.names if alias.asname]
            if isinstance(node, ast.Import):
                wrong += [
                    f"{_module(path)} imports triton.language as {alias.asname}"
                    for alias in node.names
                    if alias.name == "triton.language" and alias.asname != "tl"
                ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU machine brings the libraries that it has")
@pytest.mark.parametrize("library", ["accelerate", "peft", "transformers"])
def test_libraries_that_tests_skip_without_are_here(library: str) -> None:
    """The test extra holds them, so no skip hides them where the suite decides."""
    assert importlib.util.find_spec(library) is not None


def test_the_library_imports_without_what_only_some_of_it_needs() -> None:
    """Benchmarks, models, integrations and the testing kit are for those who ask for them."""
    optional = {"matplotlib", "pytest", "rich", "transformers", "typer"}
    public = [path for path in SOURCES if FLOOR[_room(_module(path))] < FLOOR["testing"]]
    found = {f"{_module(path)}: {module}" for path in public for module, _ in _imports(path) if module in optional}
    assert not found
