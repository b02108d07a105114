"""How a product's launch is chosen, explained, tuned and measured."""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from typer.testing import CliRunner

import torch_ops
from compile_tests.contract.trace import fake_gpu
from csrc_free_ops.configs.candidates import CANDIDATES
from csrc_free_ops.configs.gemm import pick_product, product_rule
from csrc_free_ops.configs.gemm_hopper import (
    SHORT_TILE_COST,
    WAVE,
    linear_config,
    rotary_config,
    shared_out,
    tall_tiles,
)
from csrc_free_ops.configs.rows import ATEN, PRODUCTS, Config, Gpu, TunedConfig, as_document, read_rows
from tests.bench.verify import by_case
from torch_ops._core import plan
from torch_ops._core.device import SHARED_MEMORY
from torch_ops._gemm import aten as gemm_aten
from torch_ops._gemm import hopper as gemm_hopper
from torch_ops._gemm import plan as gemm
from torch_ops._gemm.tensors import Linear, LinearOptions
from torch_ops.bench.measure import timing, tune
from torch_ops.bench.measure.opbench import Impl, OpBench, TunedKernel
from torch_ops.bench.measure.results import OK, REFERENCE_POINT, UNAVAILABLE, Group, Provenance, Report
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.bench.measure.tune import Measured, Tried, rows_of
from torch_ops.bench.rooms import mlp, patch_merger, qkv_rope
from torch_ops.bench.show.tables import markdown
from torch_ops.command import app as cli
from torch_ops.testing.cases import MLP, QKV_ROPE, MergerCase, make_merger_inputs, make_mlp_inputs, make_qkv_rope_inputs

pytestmark = pytest.mark.no_interpret

H200 = Gpu("h200", "cuda", 90, SHARED_MEMORY[90])
A100 = Gpu("a100", "cuda", 80, SHARED_MEMORY[80])
CPU = torch.device("cpu")
WIDE, TALL = Config(128, 256, 8, 3, 64), Config(256, 64, 8, 3, 64)
PROVENANCE = {"gpu": "any", "triton": "3.6.0", "date": "2026-11-23"}


def _pick(rows: tuple[TunedConfig, ...], n: int, k: int, count: int | None, aten: bool = True) -> Config:
    return pick_product("gemm", H200, "bfloat16", 2, n, k, count, rows, aten)[0]


def test_rows_belong_to_sizes_of_a_weight_and_to_rows_of_x() -> None:
    rows = (
        TunedConfig("gemm", "bfloat16", 0, WIDE, n=4304, k=1152, max_length=1000),
        TunedConfig("gemm", "bfloat16", 0, TALL, n=4304, k=1152, min_length=1000),
        TunedConfig("gemm", "bfloat16", 0, ATEN, k=4304),
    )
    rule = product_rule("gemm", H200, 2)
    assert [_pick(rows, 4304, 1152, count) for count in (999, 1000, None)] == [WIDE, TALL, TALL]
    assert [_pick(rows, n, k, 10) for n, k in ((1152, 4304), (4304, 1151), (4303, 1152))] == [ATEN, rule, rule]
    assert _pick(rows, 1152, 4304, 10, aten=False) == rule


@pytest.mark.parametrize("arch", sorted(SHARED_MEMORY))
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_exact_fp32_products_are_pytorch_s_unless_it_may_not(kernel: str, arch: int) -> None:
    gpu = Gpu("x", "cuda", arch, SHARED_MEMORY[arch])
    assert product_rule(kernel, gpu, 4) == ATEN
    for itemsize in (2, 4):
        launch = product_rule(kernel, gpu, itemsize, aten=False)
        weights = launch.block_n * (2 if kernel == "gemm_pair" else 1)
        assert launch.num_stages * launch.block_k * (launch.block_m + weights) * itemsize <= gpu.shared_memory


def test_rows_of_products_survive_the_file(tmp_path: Path) -> None:
    rows = [
        TunedConfig("gemm", "bfloat16", 0, WIDE, n=4304, k=1152, min_length=5),
        TunedConfig("gemm_pair", "float16", 0, ATEN, n=3456),
        TunedConfig("attention_fwd", "float16", 64, Config(64, 32, 4, 2)),
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(as_document(rows, PROVENANCE)))
    entries = json.loads(path.read_text())["rows"]
    assert entries[1]["launch"] == {"path": "aten"} and "block_k" not in entries[2]["launch"]
    assert [dataclasses.replace(row, source="", gpu="") for row in read_rows(path)] == rows
    del entries[0]["head_dim"]
    path.write_text(json.dumps({"provenance": PROVENANCE, "rows": entries[:1]}))
    assert read_rows(path)[0].head_dim == 0


@pytest.mark.parametrize(
    ("kernel", "launch", "message"),
    [
        ("attention_fwd", {"path": "aten"}, "only gemm and gemm_pair can be left to ATen"),
        ("gemm", {"path": "cublas"}, "is no launch: the path that needs none is 'aten'"),
        ("gemm", {**ATEN.entry(), "block_m": 64}, "is no launch"),
        ("gemm", Config(64, 64, 4, 3).entry(), "products alone have a block_k"),
        ("gemm", Config(64, 64, 4, 3, 48).entry(), "products alone have a block_k, a power of two"),
        ("attention_fwd", Config(64, 64, 4, 3, 64).entry(), "products alone have a block_k"),
        ("gemm_pair", Config(64, 48, 4, 3, 64).entry(), "rows, columns and warps are powers of two"),
    ],
)
def test_a_launch_that_no_product_takes_is_refused(kernel: str, launch: dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = {"kernel": kernel, "dtype": "float16", "head_dim": 64, "launch": launch}
    path.write_text(json.dumps({"provenance": PROVENANCE, "rows": [row]}))
    with pytest.raises(ValueError, match=f"holds no launch rows: .*{message}"):
        read_rows(path)


@contextlib.contextmanager
def _running_on(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake tensors of CUDA are explained as if they were there."""
    for module in (gemm, gemm_hopper):
        monkeypatch.setattr(module, "programs", lambda index: 132)
    # Fake tensors have no address, and those of a view count from its base.
    monkeypatch.setattr(plan, "_address", lambda tensor: tensor.storage_offset() * tensor.itemsize)
    with fake_gpu(GPUTarget(gpu.backend, gpu.arch, 32), gpu.name):
        yield


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with _running_on(A100, monkeypatch):
        yield


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with _running_on(H200, monkeypatch):
        yield


# All fake tensors of a call are of one mode.
FAKES = FakeTensorMode()


def _new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with FAKES:
        return torch.empty(shape, dtype=dtype, device="cuda")


def _off_16_bytes(*shape: int) -> Tensor:
    return _new(math.prod(shape) + 1).narrow(0, 1, math.prod(shape)).view(shape)


def _on_cuda(inputs: Any) -> Any:
    tensors = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    with FAKES:
        return dataclasses.replace(
            inputs, **{name: torch.empty_like(FAKES.from_tensor(each), device="cuda") for name, each in tensors.items()}
        )


# PyTorch without CUDA aborts where autograd sees a tensor there; what requires a gradient still says so.
_without_autograd = torch._C._AutoDispatchBelowAutograd


def _bench_on_cuda(bench: OpBench) -> OpBench:
    def kernels(case: Any, inputs: Any) -> list[TunedKernel]:
        with _without_autograd():
            return list(bench.kernels(case, inputs))

    return dataclasses.replace(bench, inputs=lambda *args: _on_cuda(bench.inputs(*args)), kernels=kernels)


@pytest.mark.parametrize("tile", WAVE, ids=str)
def test_tiles_have_every_row_once(tile: tuple[int, int]) -> None:
    """As the kernel counts them, whole ones first; and no program takes longer than it would with whole tiles alone."""
    mixed = 0

    def longest(costs: list[float], whole: int) -> float:
        """132 programs take one tile in each round, from the other end where all that are left are short."""
        taken = [0.0] * 132
        for begin in range(0, len(costs), 132):
            order = range(131, -1, -1) if begin >= whole else range(132)
            for program, cost in zip(order, costs[begin : begin + 132], strict=False):
                taken[program] += cost
        return max(taken)

    for total, n in itertools.product((1, 64, 192, 784, 1000, 3136, 4096, 12740, 25088), (8, 1152, 4304, 6840)):
        rows, short, across = tile[0], tile[0] - 64, -(-n // tile[1])
        tall = tall_tiles(tile, total, n, 132)
        count = tall + max(0, -(-(total - tall * rows) // short))
        ends = [min(i + 1, tall) * rows + max(i + 1 - tall, 0) * short for i in range(count)]
        assert ends[-1] >= total and (count == 1 or ends[-2] < total)
        whole = -(-total // rows)
        mixed += tall < whole - 1
        cost = WAVE.get((short, tile[1]), SHORT_TILE_COST * WAVE[tile])
        costs = [WAVE[tile]] * (tall * across) + [cost] * ((count - tall) * across)
        time = longest(costs, tall * across)
        assert shared_out(tile, total, n, 132) == (pytest.approx(time), tall)
        assert time <= longest([WAVE[tile]] * (whole * across), whole * across) + 1e-9
    assert mixed


@pytest.mark.usefixtures("on_hopper")
def test_explain_says_the_path_and_the_tile_on_hopper() -> None:
    x, w1, w2 = _new(784, 1152), _new(4304, 1152), _new(1152, 4304)
    with torch_ops.settings(path="auto"):
        report = torch_ops.explain(torch_ops.mlp, x, w1, None, w2, None)
        assert report["path"] == "hopper"
        assert report["why"] == "h200 is a Hopper GPU; left to PyTorch: gemm 1152x4304"
        tile = linear_config(784, 4304, 132)
        assert report["kernels"]["gemm_hopper 4304x1152"]["launch"] == tile.entry()
        gated = torch_ops.explain(torch_ops.mlp, x, w1, None, w2, None, "swiglu", w_up=w1)
        tile = linear_config(784, 8608, 132)
        assert gated["kernels"]["gemm_hopper 8608x1152"]["launch"] == tile.entry()
        for shape in ((784, 1152), (2, 392, 1152)):
            odd = _off_16_bytes(*shape)
            assert torch_ops.explain(torch_ops.mlp, odd, w1, None, w2, None)["path"] == "portable"
        weight, table = _new(3456, 1152), _new(784, 72, dtype=torch.float32)
        report = torch_ops.explain(torch_ops.qkv_rope, x, weight, None, table, table, 16)
        assert report["path"] == "hopper" and report["why"] == "h200 is a Hopper GPU"
        assert report["kernels"]["gemm_hopper 3456x1152"]["launch"] == rotary_config(72).entry()
        for op, *args in (
            (torch_ops.mlp, _new(196, 1152), w1, None, w2, None),
            (torch_ops.qkv_rope, _new(448, 1152), weight, None, *[table.narrow(0, 0, 448)] * 2, 16),
        ):
            report = torch_ops.explain(op, *args)
            assert report["path"] == "aten" and gemm.FEW_ROWS in str(report["kernels"])
            # That rows are few comes before what they begin at.
            assert torch_ops.explain(op, _off_16_bytes(*args[0].shape), *args[1:]) == report
            with torch_ops.settings(path="hopper"):
                assert torch_ops.explain(op, *args)["path"] == "hopper"
        with torch_ops.settings(path="portable"):
            for args in (
                (torch_ops.mlp, x, w1, None, w2, None),
                (torch_ops.qkv_rope, x, weight, None, table, table, 16),
            ):
                assert torch_ops.explain(*args)["path"] == "portable"


@pytest.mark.usefixtures("on_hopper")
def test_explain_says_where_pytorchs_product_makes_gelu_too() -> None:
    """Covers few rows, with a bias, and where nothing else is kept."""

    def explained(
        rows: int, op: Any = torch_ops.mlp, activation: str = "gelu_tanh", inner: int = 4304, **options: Any
    ) -> Any:
        args = [_new(*shape) for shape in ((rows, 1152), (inner, 1152), (inner,), (1152, inner), (1152,))]
        if options.pop("without_bias", False):
            args[2] = None
        args[1].requires_grad_(options.pop("trains", False))
        with _without_autograd():
            return torch_ops.explain(op, *args, activation, **options)

    with torch_ops.settings(path="auto"):
        for rows in (1, 784, 1205):
            report = explained(rows)
            assert report["path"] == "aten"
            assert report["kernels"]["gemm 4304x1152"] == {"launch": {"path": "aten"}, "source": gemm.GELU_WITHIN}
            assert explained(rows, torch.ops.vk.mlp, return_hidden=False) == report
            assert explained(rows, recompute=True, trains=True) == report
            layer = Linear(
                *(torch.empty(shape).half() for shape in ((rows, 1152), (4304, 1152), (4304,), (rows, 4304)))
            )
            made = gemm.plan_linear(layer, LinearOptions("gelu_tanh"))
            assert made.launch is gemm_aten.gelu_into
        square = [_new(*shape) for shape in ((784, 3072), (3072, 3072), (3072,))]
        said = torch_ops.explain(torch_ops.mlp, *square, *square[1:])["kernels"]["gemm 3072x3072"]["source"]
        assert said == f"{gemm.GELU_WITHIN}; {gemm.NOTHING_FOLLOWS}"
        for report in (
            explained(1206), explained(784, activation="gelu"), explained(784, without_bias=True),
            explained(784, trains=True), explained(784, torch.ops.vk.mlp), explained(784, inner=4300),
        ):  # fmt: skip
            assert report["path"] == "hopper", report
    with torch_ops.settings(path="hopper"):
        assert explained(784)["path"] == "hopper"


@pytest.mark.usefixtures("on_hopper")
def test_explain_takes_the_operators_own_arguments() -> None:
    args = (_new(784, 1152), _new(4304, 1152), None, _new(1152, 4304), None)
    said = torch_ops.explain(torch_ops.mlp, *args, recompute=True)
    assert said == torch_ops.explain(torch.ops.vk.mlp, *args, return_hidden=False)
    assert said == torch_ops.explain(torch.ops.vk.mlp.default, *args, return_hidden=False)
    with pytest.raises(TypeError, match="recompute"):
        torch_ops.explain(torch.ops.vk.mlp, *args, recompute=True)


@pytest.mark.usefixtures("on_hopper")
def test_explain_says_what_a_merger_is_made_of() -> None:
    case = MergerCase("explained", "", 8192, 1152, 4096)
    args = _on_cuda(make_merger_inputs(case, torch.bfloat16)).call(lambda *args: args)
    with torch_ops.settings(path="auto"):
        report = torch_ops.explain(torch_ops.patch_merger, *args)
        assert report["op"] == "vk::patch_merger" and report["path"] == "hopper"
        assert list(report["kernels"]) == [
            "norm_fwd", "gemm_hopper 4608x4608", "gemm 4096x4608",
            "norm_bwd", "norm_bwd_sums", "gemm_hopper_gradient 4096x4608",
        ]  # fmt: skip
        projection = torch_ops.explain(torch_ops.patch_merger, args[0], None, None, args[3], None, None, None)
        assert projection["path"] == "aten" and not projection["kernels"]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("bench", "name"), [(mlp.BENCH, "tower"), (qkv_rope.BENCH, "gqa")], ids=["mlp", "qkv_rope"])
def test_nothing_is_tuned_where_no_row_decides(bench: OpBench, name: str) -> None:
    (case,) = bench.cases([name], CPU)
    setup = Setup(torch.bfloat16, CPU, ("forward", "backward"), rounds=2)
    is_mlp, bench = bench is mlp.BENCH, _bench_on_cuda(bench)

    def weights(path: str) -> list[tuple[int | None, int | None]]:
        return [(point.kernel.n, point.kernel.k) for point, _ in tune.find_points(bench, [case], [path], [], setup)]

    assert len(weights("portable")) == (2 if is_mlp else 1)
    for path in ("hopper", "auto"):
        if is_mlp:
            # Its second weight has rows that TMA cannot address.
            assert weights(path) == [(40, 76)]
        else:
            with pytest.raises(ValueError, match="nothing is left to tune"):
                weights(path)


@pytest.mark.usefixtures("on_a_gpu")
def test_explain_says_which_products_are_pytorch_s(tmp_path: Path) -> None:
    inputs = _on_cuda(make_mlp_inputs(next(case for case in MLP if case.name == "swiglu"), torch.bfloat16))
    args = inputs.call(lambda *args: args)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(as_document([TunedConfig("gemm", "bfloat16", 0, ATEN, n=32, k=68)], PROVENANCE)))
    with torch_ops.settings(rows=str(path), path="auto"):
        report = torch_ops.explain(torch_ops.mlp, *args)
        assert report["path"] == "portable" and report["why"] == "left to PyTorch: gemm 32x68"
        assert report["kernels"]["gemm 32x68"]["launch"] == {"path": "aten"}
        assert report["kernels"]["gemm_pair 136x32"]["launch"]["block_k"] == 64
        with torch_ops.settings(path="portable"):
            report = torch_ops.explain(torch_ops.mlp, *args)
            assert report["why"] == "every product has a launch of its own"
    inputs = _on_cuda(make_qkv_rope_inputs(QKV_ROPE[0], torch.float32))
    with torch_ops.settings(path="auto"):
        report = inputs.call(lambda *args: torch_ops.explain(torch.ops.vk.qkv_rope, *args))
    assert report["path"] == "aten" and list(report["kernels"]) == [
        "gemm_pair 432x40", "rotate", "qkv_rope_bwd", "rope_tables_bwd"
    ]  # fmt: skip


def test_explain_refuses_and_says_where_there_are_no_kernels() -> None:
    inputs = make_mlp_inputs(MLP[0], torch.float32)
    assert inputs.call(lambda *args: torch_ops.explain(torch_ops.mlp, *args))["path"] == "reference"
    with pytest.raises(ValueError, match="activation is .*, expected one of"):
        torch_ops.explain(torch_ops.mlp, *inputs.call(lambda *args: args)[:5], "relu")


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("bench", "name", "found"),
    [(mlp.BENCH, "tower", {"gemm 76x40", "gemm 40x76"}), (qkv_rope.BENCH, "gqa", {"gemm_pair 320x40"})],
    ids=["mlp", "qkv_rope"],
)
def test_every_product_is_a_point_to_tune(bench: OpBench, name: str, found: set[str]) -> None:
    (case,) = bench.cases([name], CPU)
    setup = Setup(torch.bfloat16, CPU, ("forward", "backward"), rounds=2)
    points = tune.find_points(_bench_on_cuda(bench), [case], ["portable"], [], setup)
    assert {f"{point.kernel.name} {point.kernel.n}x{point.kernel.k}" for point, _ in points} == found
    assert all(point.kernel.length == case.rows and f" {name} " in point.key for point, _ in points)


def test_tuned_rows_are_of_a_weight() -> None:
    def point(length: int, k: int, launch: Config) -> Measured:
        return Measured(TunedKernel("gemm", False, "bfloat16", 0, False, length, 64, k), (Tried(launch, (1.0,)),))

    points = [point(1024, 32, WIDE), point(4096, 32, ATEN), point(1024, 48, TALL)]
    assert rows_of(points) == [
        TunedConfig("gemm", "bfloat16", 0, WIDE, max_length=2048, n=64, k=32),
        TunedConfig("gemm", "bfloat16", 0, ATEN, min_length=2048, n=64, k=32),
        TunedConfig("gemm", "bfloat16", 0, TALL, n=64, k=48),
    ]
    for each in points:
        assert Measured.of(json.loads(json.dumps(each.entry()))) == each
    assert ATEN in CANDIDATES["gemm"] and ATEN in CANDIDATES["gemm_pair"]


def _measure(bench: OpBench, name: str, *impls: Impl) -> list[Group]:
    (case,) = bench.cases([name], CPU)
    return by_case(run_case(bench, case, impls, Setup(torch.float32, CPU, ("forward", "backward"), rounds=2)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_ROUND_MS", 0.5)


@pytest.mark.parametrize(
    ("bench", "name"),
    [(mlp.BENCH, "swiglu"), (qkv_rope.BENCH, "gqa"), (patch_merger.BENCH, "rms")],
    ids=["mlp", "qkv_rope", "patch_merger"],
)
def test_a_reference_point_is_timed_and_neither_checked_nor_a_baseline(bench: OpBench, name: str) -> None:
    point = next(each for each in bench.baselines if each.reference_point)
    eager = next(each for each in bench.baselines if each.name == "eager")
    found = _measure(bench, name, bench.ours, point, eager)
    assert [one.ours.direction for one in found] == ["forward", "backward"]
    for one in found:
        beside, right = one.baselines
        assert (beside.status, beside.note) == (REFERENCE_POINT, point.reference_point)
        assert beside.rounds_ms and not beside.reports
        assert one.ours.status == right.status == OK and right.reports
        # However fast it is.
        assert one.best() is right
    records = tuple(each for one in found for each in one.records)
    report = Report(Provenance("now", "c", "vk", "CPU", None, {}, {}), records=records)
    assert f"{point.name} is a reference point, not a baseline, on" in markdown(report)
    told = f"*reference point*: {point.name} {point.reference_point}, so it is no baseline"
    assert told in markdown(report, "summary")
    assert Report.from_json(report.to_json()) == report


def test_one_without_a_backward_is_checked_by_its_results() -> None:
    eager = next(each for each in mlp.BENCH.baselines if each.name == "eager")

    def bind(case: Any, inputs: Any) -> Any:
        call = eager.bind(case, inputs)

        def forward() -> Tensor:
            with torch.no_grad():
                return call.forward()

        return dataclasses.replace(call, forward=forward)

    forward, backward = _measure(
        mlp.BENCH, "tower", mlp.BENCH.ours, dataclasses.replace(eager, bind=bind, directions=("forward",))
    )
    assert [each.status for each in forward.baselines] == [OK] and not backward.baselines


def test_cublas_s_epilogue_says_what_it_cannot() -> None:
    cases = {case.name: case for case in MLP}
    cuda = torch.device("cuda")
    refusals = {
        name: mlp.EPILOGUE.refuses(cases[name], torch.bfloat16, cuda) for name in ("tower", "silu", "bare", "lead")
    }
    assert [bool(refusal) for refusal in refusals.values()] == [False, True, True, True]
    (forward, _) = _measure(mlp.BENCH, "tower", mlp.BENCH.ours, mlp.EPILOGUE)
    assert (forward.baselines[0].status, forward.baselines[0].note) == (UNAVAILABLE, "needs a GPU")


@pytest.mark.parametrize("op", ["mlp", "qkv_rope", "patch_merger"])
def test_commands_run(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = CliRunner().invoke(cli.app, ["bench", op, "--device", "cpu", "--shapes", "tower", "--rounds", "2"])
    assert run.exit_code == 0, run.output
    assert f"{op}, forward, float32, reference path" in run.stdout
    run = CliRunner().invoke(cli.app, ["bench", op, "--device", "cpu", "--shapes", "nosuch"])
    assert run.exit_code == 2 and "no case is called 'nosuch'" in run.stderr
    run = CliRunner().invoke(cli.app, ["bench", "profile", op, "--device", "cpu", "--shapes", "tower", "--backward"])
    assert run.exit_code == 0 and ("vk::mlp" if op == "patch_merger" else f"vk::{op}") in run.stdout


@pytest.mark.parametrize("bench", [mlp.BENCH, qkv_rope.BENCH], ids=["mlp", "qkv_rope"])
def test_host_calls_are_there(bench: OpBench) -> None:
    calls = bench.host_calls(torch.float32, CPU)
    assert [call.name for call in calls[:2]] == ["eager PyTorch", "eager PyTorch with gradients"]
    assert [call.raw for call in calls] == [False, False, True, False, False, False]
    assert calls[2].call is None and calls[2].note == "there is none on this device"
