"""Promises of `torch_ops._core.registry` for every op: silent failures of torch and triton are loud or impossible."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op

from compile_tests import broken_ops
from compile_tests.contract.trace import (
    KernelLaunch,
    assert_kernels,
    assert_plain_launch,
    capture_graphs,
    fake_gpu,
    trace_kernels,
)
from compile_tests.kernels import EVERY
from torch_ops import settings, window_attn
from torch_ops._core import plan as plans
from torch_ops._core import registry
from torch_ops._core.plan import Plan
from torch_ops._core.planned_op import planned_op
from torch_ops._core.registry import OPS, KernelOp, composed_op, vk_op
from torch_ops._core.versions import refuse_pair
from torch_ops.settings import Settings

SCHEMAS = Path(__file__).with_name("schemas.txt")


def test_every_op_with_kernels_has_them_in_the_graph_contract() -> None:
    traced = {op for kernels in EVERY for op in kernels.ops}
    missing = {name for name in OPS if get_triton_kernels_for_op(f"vk::{name}")} ^ traced
    assert not missing, f"{sorted(missing)}: every op with kernels has a Kernels in EVERY of compile_tests/kernels.py"
    assert {name for name, op in OPS.items() if not isinstance(op, KernelOp)} == {"patch_merger"}


@pytest.mark.parametrize(
    "op, kernel, message",
    (
        (broken_ops.silent, "silent_kernel", "kernels in the graph"),
        (broken_ops.overwriting, "overwriting_kernel", "to be written"),
    ),
    ids=("lost_kernel", "cloned_input"),
)
def test_a_broken_trace_is_caught(op: Callable[..., Tensor], kernel: str, message: str) -> None:
    with fake_gpu() as mode:
        with mode:
            x = torch.empty(16, device="cuda")
        trace = trace_kernels(op, (x,))
    with pytest.raises(AssertionError, match=message):
        assert_kernels(trace, [(kernel, {"out_ptr"})])


@pytest.mark.parametrize(
    "arguments, message",
    (
        ({"SCALE": 1, "num_warps": 4, "num_stages": 1, "maxnreg": 128}, "maxnreg"),
        ({"num_warps": 4, "num_stages": 1}, "without {'SCALE'}"),
        ({"SCALE": 1}, "launched with {}"),
    ),
    ids=("dropped_option", "argument_left_to_its_default", "options_left_to_their_defaults"),
)
def test_a_launch_that_loses_something_is_caught(arguments: dict[str, Any], message: str) -> None:
    launch = KernelLaunch(broken_ops.copying_kernel, (1,), (None, None), {"BLOCK": 16, **arguments})
    with pytest.raises(AssertionError, match=message):
        assert_plain_launch(launch)


def test_autocast_leaves_alone_the_arguments_that_keep_their_dtype() -> None:
    @vk_op("_test_tables", fake=lambda x, table, y: x.new_empty(3), autocast=True, keeps_dtype=("table",))
    def tables(x: Tensor, table: Tensor, y: Tensor) -> Tensor:
        return torch.tensor([each.dtype is torch.bfloat16 for each in (x, table, y)], dtype=x.dtype)

    try:
        tensors = [torch.zeros(2) for _ in range(3)]
        with torch.autocast("cpu", torch.bfloat16):
            cast = tables(*tensors)
        assert cast.tolist() == [1, 0, 1] and tables(*tensors).tolist() == [0, 0, 0]
    finally:
        del OPS["_test_tables"]


def test_autocast_leaves_alone_what_is_given_a_dtype() -> None:
    @vk_op("_test_given", fake=lambda x, dtype=None: x.new_empty(1), autocast=True, dtype_argument="dtype")
    def given(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor([x.dtype is torch.bfloat16, dtype is torch.float16], dtype=x.dtype)

    try:
        with torch.autocast("cpu", torch.bfloat16):
            calls = given(torch.zeros(2)), given(torch.zeros(2), None), given(torch.zeros(2), torch.float16)
        assert [call.tolist() for call in calls] == [[1, 0], [1, 0], [0, 1]]
    finally:
        del OPS["_test_given"]


def test_an_op_that_writes_to_arguments_says_so_and_refuses_gradients() -> None:
    @vk_op("_test_mutating", fake=lambda x, y: x.new_empty(0), mutates=("y",))
    def add_to(x: Tensor, y: Tensor) -> Tensor:
        y += x
        return x.new_empty(0)

    try:
        assert "Tensor x, Tensor(a1!) y" in str(add_to.overload._schema)
        x, y = torch.ones(3), torch.zeros(3)
        add_to(x, y)
        assert y.tolist() == [1, 1, 1] and y._version > 0 and x._version == 0
        leaf = torch.ones(3, requires_grad=True)
        with pytest.raises(NotImplementedError, match="vk::_test_mutating has no gradient, and x requires one"):
            add_to(leaf, y)
        with torch.no_grad():
            add_to(leaf, y)
        function, graphs = capture_graphs(lambda x, y: (torch.ops.vk._test_mutating.default(x, y), y * 1))
        assert function(x, y)[1].tolist() == [3, 3, 3] and y.tolist() == [3, 3, 3]
        assert graphs.dynamo.startswith("vk._test_mutating.default\n")
    finally:
        del OPS["_test_mutating"]


def test_an_op_made_of_ops_is_taken_apart_above_autograd() -> None:
    """So that its parts alone decide what it keeps, and each is seen by autocast."""

    @composed_op("_test_composed")
    def twice(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        return torch.ops.vk.rms_norm(torch.ops.vk.rms_norm(x, weight, eps), weight, eps)

    try:
        x = torch.randn(3, 8, requires_grad=True)
        expected = torch.ops.vk.rms_norm(torch.ops.vk.rms_norm(x))
        function, graphs = capture_graphs(lambda x: torch.ops.vk._test_composed.default(x))
        for out in (twice(x), function(x)):
            assert torch.equal(out, expected)
            assert torch.equal(*(torch.autograd.grad(each.sum(), x, retain_graph=True)[0] for each in (out, expected)))
        assert graphs.dynamo == "vk._test_composed.default\n"
        assert graphs.forward == "vk.rms_norm.default\n" * 2
    finally:
        del OPS["_test_composed"]


def test_plans_are_kept_until_a_setting_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(NamedTuple):
        x: Tensor
        option: int = 1

    planned = []

    def plan(tensors: Any, call: Twice) -> Plan:
        planned.append(call.option)
        return Plan(lambda tensors: tensors[1].copy_(2 * tensors[0]))

    try:
        op = planned_op(
            "_test_planned", Twice, Tensor, check=lambda call: None, outputs=lambda call: torch.empty_like(call.x),
            tensors=lambda call, made: (call.x, made), plan=plan,
        )  # fmt: skip
        x = torch.randn(3, 4)
        with settings(path="auto"):
            for tensor, option in ((x, 1), (torch.randn(3, 4), 1), (x, 2), (x.t(), 1), (x.double(), 1)):
                assert torch.equal(op(tensor, option), 2 * tensor)
            assert planned == [1, 2, 1, 1]
            with settings(path="portable"):
                op(x, 1)
        assert planned == [1, 2, 1, 1, 1]
    finally:
        del OPS["_test_planned"]


def test_a_trace_is_not_disturbed_by_explain_in_another_thread() -> None:
    entered, leave = threading.Event(), threading.Event()

    def explain() -> None:
        with registry.explaining({}):
            entered.set()
            leave.wait()

    with fake_gpu() as mode:
        with mode:
            x = torch.empty(64, 1152, device="cuda", dtype=torch.bfloat16)
        other = threading.Thread(target=explain)
        other.start()
        entered.wait()
        try:
            trace = trace_kernels(lambda x: torch.ops.vk.rms_norm(x), (x,))
        finally:
            leave.set()
            other.join()
    assert [kernel.name for kernel in trace.kernels] == ["_norm_fwd_kernel"]


def test_compiled_graphs_in_memory_are_dropped_when_a_setting_changes(device: str) -> None:
    function, graphs = capture_graphs(window_attn)
    q = torch.randn(20, 1, 16, device=device).half()
    cu = torch.tensor([0, 20], dtype=torch.int32, device=device)
    with settings(path="auto"):
        for _ in range(2):
            function(q, q, q, cu)
        assert graphs.compiled == 1
        with settings(path="portable"):
            function(q, q, q, cu)
    assert graphs.compiled == 2


def test_cache_key_holds_settings_row_contents_and_the_users_own_tag(tmp_path: Path) -> None:
    launch = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
    row = {"kernel": "attention_fwd", "dtype": "bfloat16", "head_dim": 72, "launch": launch}
    provenance = {"gpu": "any", "triton": triton.__version__, "date": "2026-01-01"}
    rows = tmp_path / "rows.json"
    tags = []
    with torch.compiler.config.patch(cache_key_tag="mine"):
        own = Settings()
        own(path="auto")
        tags.append(torch.compiler.config.cache_key_tag)
        with own(path="portable"):
            tags.append(torch.compiler.config.cache_key_tag)
        for warps in (4, 8):
            launch["num_warps"] = warps
            rows.write_text(json.dumps({"provenance": provenance, "rows": [row]}))
            with own(rows=str(rows)):
                tags.append(torch.compiler.config.cache_key_tag)
        assert torch.compiler.config.cache_key_tag == tags[0]
    assert len(set(tags)) == 4
    assert all(tag.startswith("mine|") for tag in tags)


def _schemas() -> str:
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("vk::")}
    public = sorted(name for name in names if not name.startswith("vk::_"))
    return "".join(f"{schema}\n" for name in public for schema in torch._C._jit_get_schemas_for_operator(name))


def test_schemas_are_those_on_record() -> None:
    if os.environ.get("EXPECTTEST_ACCEPT"):
        SCHEMAS.write_text(_schemas())
    assert _schemas() == SCHEMAS.read_text(), (
        "A schema differs from compile_tests/schemas.txt. New trailing arguments with defaults are free; anything else "
        "breaks callers and exported programs, and needs an entry in CHANGELOG.md. To accept: "
        "EXPECTTEST_ACCEPT=1 python -m pytest compile_tests/test_registry.py -k schemas"
    )


@pytest.mark.parametrize(
    "torch_version, triton_version",
    (("2.10.0", "3.6.0"), ("2.13.0+cpu", "3.5.1"), ("2.11.0+cu130", "3.7.0"), ("2.11.1", "3.9.0")),
)
def test_versions_that_cannot_work_are_refused(torch_version: str, triton_version: str) -> None:
    with pytest.raises(ImportError, match="found"):
        refuse_pair(torch_version, triton_version)


def test_the_refusal_of_a_pair_is_lifted_for_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VK_ANY_TRITON", "1")
    refuse_pair("2.11.0+cu130", "3.9.0")
    with pytest.raises(ImportError, match="torch 2.11 or newer"):
        refuse_pair("2.10.0", "3.9.0")


@pytest.mark.parametrize(
    "torch_version, triton_version",
    (("2.11.0+cu130", "3.6.0"), ("2.13.0+cpu", "3.7.1"), ("2.13.0", "3.6.0"), ("2.15.0a0+git1", "3.9.0")),
)
def test_versions_that_work_are_let_in(torch_version: str, triton_version: str) -> None:
    refuse_pair(torch_version, triton_version)


class TestBound:
    """A bound kernel keeps its first launch; stand-ins replace the kernel and its compiled form."""

    @pytest.fixture
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        launched: list[tuple[Any, ...]] = []

        class Compiled:
            src = SimpleNamespace(fn=SimpleNamespace(arg_names=("x_ptr", "size", "A", "B")))

            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *args: launched.append(("kept", grid, *args))

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                def launch(*args: Any, **options: Any) -> Any:
                    launched.append(("anew", grid, *args))
                    return self.compiled

                return launch

        monkeypatch.setattr(plans, "CompiledKernel", Compiled)
        self.kernel = Kernel()
        self.kernel.compiled = Compiled()
        return launched

    def test_constants_follow_the_kernel_s_order_and_options_are_left_out(self, launched: list[Any]) -> None:
        bound, x, y = plans.Bound(self.kernel, (3, 2), (64,), {"num_warps": 4, "B": 2, "A": 1}), *torch.randn(2, 4)
        bound(x)
        bound(y)
        assert launched == [("anew", (3, 2), x, 64), ("kept", (3, 2, 1), y, 64, 1, 2)] and launched[1][2] is y

    def test_misaligned_tensors_are_left_to_triton(self, launched: list[Any]) -> None:
        bound, x = plans.Bound(self.kernel, (1,)), torch.zeros(5)
        for tensor in (x[1:], x, x[1:], x):
            bound(tensor)
        assert [way for way, *_ in launched] == ["anew", "anew", "anew", "kept"]

    def test_nothing_is_kept_of_a_trace(self, launched: list[Any]) -> None:
        self.kernel.compiled = None
        bound, x = plans.Bound(self.kernel, (1,)), torch.zeros(4)
        bound(x)
        bound(x)
        assert [way for way, *_ in launched] == ["anew", "anew"]
