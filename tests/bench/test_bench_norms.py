"""The benchmarks of the norms, and a copy and a negation, which are reference points and no baselines."""

import pytest
import torch

import torch_ops
from csrc_free_ops.configs.rows import Gpu
from tests.bench.verify import CPU, SETUP, by_case, golden_report
from torch_ops import settings
from torch_ops._norms import plan, portable
from torch_ops.bench.measure.host import raw_launch
from torch_ops.bench.measure.opbench import find_named
from torch_ops.bench.measure.results import OK, REFERENCE_POINT, Report
from torch_ops.bench.measure.run import run_case
from torch_ops.bench.rooms import norms
from torch_ops.bench.show.tables import markdown
from torch_ops.testing.cases import NormCase, make_norm_inputs

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]

BENCHES = {bench.op: bench for bench in norms.BENCHES}
TINY = NormCase("tiny", "a contest", (30,), 64)


@pytest.mark.parametrize("op", BENCHES)
def test_ours_and_eager_are_right_and_yardsticks_are_no_peers(op: str) -> None:
    bench = BENCHES[op]
    baselines = tuple(baseline for baseline in bench.baselines if baseline.name != "compiled")
    records = run_case(bench, TINY, (bench.ours, *baselines), SETUP)
    assert "copy is a reference point, not a baseline, on tiny" in markdown(
        Report(golden_report().provenance, None, tuple(records))
    )
    for measured in by_case(records):
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

    monkeypatch.setattr(plan, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(portable, "current_gpu", lambda: Gpu("stub", "cuda", 90, 232448))
    monkeypatch.setattr(portable, "can_overlap", lambda: False)
    monkeypatch.setattr(portable, "wrap_triton", Kernel)
    # A new generation: no plan is remembered.
    settings.generation += 1
    inputs = make_norm_inputs(op, TINY, torch.bfloat16)
    raw = raw_launch("raw", lambda: inputs.call(getattr(torch_ops, op)), "portable")
    settings.generation += 1
    assert raw.call is not None and not raw.note and len(launched) == 1
