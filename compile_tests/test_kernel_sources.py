"""Kernels as text. torch.compile writes their source and the values of its names into one file. Code that does not
survive this is lost, or fails on the user's machine only."""

import ast
import builtins
import dis
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
from torch._library.triton import get_triton_kernels_for_op
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from compile_tests.contract.build import build_now
from compile_tests.contract.kernels import Kernels
from compile_tests.contract.process import ROOT
from compile_tests.contract.trace import SM90, KernelLaunch, fake_gpu
from compile_tests.kernels import EVERY, NORMS

# Where PyTorch makes the products, kernels beside them are launched.
BESIDE_PRODUCTS = {"path": "auto", "dtype": torch.float32}
KERNELS: dict[str, tuple[JITFunction, Kernels]] = {
    name: (function, kernels)
    for kernels in (*EVERY, NORMS["add_layer_norm"])
    for name, function in kernels.functions.items()
}


def _launch(name: str) -> KernelLaunch:
    """One of the launches of the kernel by its op."""
    _, kernels = KERNELS[name]
    beside = BESIDE_PRODUCTS if kernels.others else {"dtype": torch.float32}
    for variant in ({}, beside, *kernels.variants.values()):
        for launches in kernels.launches(**variant).values():
            for launch in launches:
                if launch.name == name:
                    return launch
    raise AssertionError(f"no variant launches {name}")


def test_some_variant_launches_every_portable_kernel() -> None:
    used = {name for kernels in EVERY for op in kernels.ops for name in kernels.used(op)}
    found = {kernel.fn for kernels in EVERY for op in kernels.ops for kernel in get_triton_kernels_for_op(f"vk::{op}")}
    # The kernels of opaque launches are in no graph.
    assert {fn.__name__ for fn in found if ".hopper." not in fn.__module__} == used


def _global_names(kernel: JITFunction) -> Iterator[tuple[JITFunction, str, Any]]:
    """(function, name, what it means there) for the global names of a kernel and of every function it calls."""
    waiting, seen = [kernel], {kernel}
    while waiting:
        function = waiting.pop()
        for instruction in dis.get_instructions(function.fn):
            if instruction.opname != "LOAD_GLOBAL":
                continue
            name = instruction.argval
            value = function.fn.__globals__.get(name, getattr(builtins, name, None))
            yield function, name, value
            if isinstance(value, JITFunction) and value not in seen:
                seen.add(value)
                waiting.append(value)


@pytest.mark.parametrize("name", KERNELS)
def test_names_in_kernels_keep_their_meaning(name: str) -> None:
    meanings: dict[str, Any] = {"tl": tl}
    problems = []
    for function, used, value in _global_names(KERNELS[name][0]):
        where = f"{function.fn.__module__}.{function.fn.__name__}"
        if meanings.setdefault(used, value) is not value:
            problems.append(f"{where}: {used} means one thing here and another elsewhere in the kernel")
        elif isinstance(value, JITFunction):
            if value.fn.__name__ != used:
                problems.append(f"{where}: {used} is an alias of {value.fn.__name__}")
        elif isinstance(value, tl.constexpr):
            if used in function.fn.__globals__.get("__annotations__", {}):
                problems.append(f"{where}: {used} is annotated; write {used} = tl.constexpr(...)")
        elif used != "tl" and getattr(builtins, used, None) is not value:
            problems.append(f"{where}: {used} is neither a JIT function nor a tl.constexpr")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", KERNELS)
def test_reemitted_kernel_builds_to_the_same_operations(name: str, tmp_path: Path) -> None:
    """Inductor's own text of the kernel, alone in a file, against the kernel where it lives."""
    launch = _launch(name)
    source = user_defined_triton_kernel_transitive_closure_source_code(KERNELS[name][0])
    file = tmp_path / "reemitted.py"
    file.write_text(f"import triton\nimport triton.language as tl\n\n@triton.jit\n{source}")
    spec = importlib.util.spec_from_file_location("reemitted", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Without the options of jit, which are lost too; and not yet built by another test.
    kernels = (triton.jit(KERNELS[name][0].fn), vars(module)[name])
    with fake_gpu(SM90):
        built, rebuilt = (_operations(replace(launch, kernel=kernel)) for kernel in kernels)
    assert rebuilt == built and len(built) > 5, f"Inductor's text of {name} builds other code:\n{source}"


class _OperationsReadError(Exception):
    """Ends a build once its operations are known: equal operations are built to equal code."""


def _operations(launch: KernelLaunch) -> list[str]:
    """What Triton makes of the kernel's text, line by line, without files, lines and modules of functions."""

    def read(source: ASTSource, *args: Any) -> Any:
        raise _OperationsReadError(str(make_ir(source, *args)))

    make_ir = ASTSource.make_ir
    with triton.knobs.compilation.scope(), mock.patch.object(ASTSource, "make_ir", read):
        triton.knobs.compilation.always_compile = True
        with pytest.raises(_OperationsReadError) as caught:
            build_now(launch, SM90)
    text = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", str(caught.value))
    return [line for line in re.sub(r"\b(?:\w+\.)+(\w+__)", r"\1", text).splitlines() if not line.startswith("#loc")]


def _jit_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those of stock Triton; what Gluon's `gluon.jit` makes reaches no compiler of PyTorch's."""
    for path in sorted((ROOT / "csrc_free_ops").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                if [ast.unparse(getattr(d, "func", d)) for d in node.decorator_list] == ["gluon.jit"]:
                    continue
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def _keywords(call: ast.Call) -> dict[str | None, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


def test_kernels_keep_to_what_torch_carries() -> None:
    """Options of jit and defaults of arguments are lost; some writes are not seen; some names are mangled."""
    functions = dict(_jit_functions())
    problems = []
    for where, node in functions.items():
        calls = [decorator for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
        names = [ast.unparse(getattr(decorator, "func", decorator)) for decorator in node.decorator_list]
        options = {name for call in calls for name in _keywords(call)}
        # These save builds of equal code in eager calls; losing them loses nothing else.
        if names != ["triton.jit"] or options - {"do_not_specialize", "do_not_specialize_on_alignment"}:
            problems.append(f"{where}: decorated by more than triton.jit")
        if node.name.startswith("__"):
            problems.append(f"{where}: its name begins with two underscores")
        if node.name.endswith("_kernel") and (node.args.defaults or any(node.args.kw_defaults)):
            problems.append(f"{where}: an argument has a default")
        for inner in ast.walk(node):
            if inner is not node and isinstance(inner, ast.FunctionDef | ast.Lambda):
                problems.append(f"{where}: holds another function")
            if isinstance(inner, ast.Attribute) and inner.attr in ("make_block_ptr", "pointer_type", "scatter"):
                problems.append(f"{where}: {inner.attr} can hide a write")
            if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "tl.inline_asm_elementwise":
                if _keywords(inner).get("is_pure") != "True":
                    problems.append(f"{where}: inline assembly without is_pure=True")
    assert functions
    assert not problems, "\n".join(problems)
