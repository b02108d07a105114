"""The benchmarks of the norms, and a copy and a negation, which are reference points and no baselines."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from csrc_free_ops.configs.rows import Gpu
from tests.bench.verify import by_case
from torch_ops import settings
from torch_ops._norms import plan, portable
from torch_ops.bench.app import app
from torch_ops.bench.measure.opbench import find_named
from torch_ops.bench.measure.results import OK, REFERENCE_POINT, Report
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.bench.rooms import norms
from torch_ops.bench.show.tables import markdown
from torch_ops.testing.cases import NormCase, make_norm_inputs

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]

CPU = torch.device("cpu")
BENCHES = {bench.op: bench for bench in norms.BENCHES}
TINY = NormCase("tiny", "a contest", (30,), 64)


@pytest.mark.parametrize("op", BENCHES)
def test_ours_and_eager_are_right_and_yardsticks_are_no_peers(op: str) -> None:
    bench = BENCHES[op]
    baselines = tuple(baseline for baseline in bench.baselines if baseline.name != "compiled")
    setup = Setup(torch.float32, CPU, ("forward", "backward"), rounds=2)
    for measured in by_case(run_case(bench, TINY, (bench.ours, *baselines), setup)):
        assert measured.ours.status == OK, measured.ours
        statuses = {baseline.name: baseline.status for baseline in measured.baselines}
        assert statuses == {"eager": OK, "copy": REFERENCE_POINT, "neg": REFERENCE_POINT}
        assert all(baseline.ms for baseline in measured.baselines)
        assert measured.best() is not None and measured.best().name == "eager"


@pytest.mark.parametrize(
    ("op", "backward", "tensors", "vectors"),
    [
        ("layer_norm", False, 2, 2),
        ("add_layer_norm", False, 4, 2),
        ("layer_norm", True, 3, 3),
        ("add_rms_norm", True, 4, 2),
    ],
)
def test_bytes_count_once_and_yardsticks_move_all_rows(op: str, backward: bool, tensors: int, vectors: int) -> None:
    inputs = make_norm_inputs(op, TINY, torch.bfloat16)
    cost = BENCHES[op].cost(inputs, backward)
    assert cost.bytes_moved == 2 * 64 * (tensors * 30 + vectors)
    for each in norms.REFERENCE_POINTS:
        call = each.bind(TINY, inputs)
        (moved,) = call.backward_of(call.forward())() if backward else (call.forward(),)
        assert 2 * moved.nbytes == 2 * 64 * tensors * 30


def test_cases_by_name_and_by_shape() -> None:
    bench = BENCHES["rms_norm"]
    shapes = [bench.shape(case) for case in bench.cases(["784x1152,qwen_l_*", "30x7"], CPU)]
    assert shapes == ["784x1152", "784x1152", "4096x1152", "25088x1152", "30x7"]
    with pytest.raises(ValueError, match="no case is called '7x'"):
        bench.cases(["7x"], CPU)
    assert find_named(norms.NORMS, [BENCHES["rms_norm"].profiled])


@pytest.mark.parametrize("op", BENCHES)
def test_raw_launch_is_the_forward_kernel(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    class Kernel:
        def __init__(self, kernel: object) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **options: launched.append((grid, len(args)))

    monkeypatch.setattr(norms, "_path", lambda op, inputs: "portable")
    monkeypatch.setattr(plan, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(portable, "current_gpu", lambda: Gpu("stub", "cuda", 90, 232448))
    monkeypatch.setattr(portable, "can_overlap", lambda: False)
    monkeypatch.setattr(portable, "wrap_triton", Kernel)
    # A new generation: no plan is remembered.
    settings.generation += 1
    launch, why = norms._raw_launch(op, make_norm_inputs(op, TINY, torch.bfloat16))
    settings.generation += 1
    assert launch is not None and not why and len(launched) == 1


def test_command_writes_what_the_tables_show(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    arguments = ["add_rms_norm", "--device", "cpu", "--shapes", "30x64", "--peers", "eager,copy", "--rounds", "2"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(file)])
    assert result.exit_code == 0, result.output
    report = Report.from_json(file.read_text())
    assert json.loads(file.read_text())["records"][2]["status"] == REFERENCE_POINT
    shown = markdown(report)
    assert "copy is a reference point, not a baseline, on" in shown and "wrong" not in shown
    host = CliRunner().invoke(app, ["host", "add_rms_norm", "--device", "cpu"])
    assert host.exit_code == 0 and "torch_ops.add_rms_norm with gradients" in host.output
