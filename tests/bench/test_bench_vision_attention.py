"""The benchmark of VisionAttention: the same module in PyTorch beside it, and less work as a reference point."""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.bench.verify import CPU, FLASH4, SETUP, anywhere, by_case, golden_report
from torch_ops.bench.encoder import peers as encoder_peers
from torch_ops.bench.measure.results import OK, OURS, REFERENCE_POINT, WRONG, Report
from torch_ops.bench.measure.run import run_case
from torch_ops.bench.rooms.vision_attention import BASELINES, BENCH, written_down
from torch_ops.bench.show.tables import markdown, tables
from torch_ops.testing import references
from torch_ops.testing.cases import VISION_ATTENTION, make_vision_attention_inputs, outcome, vision_attention_cases

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]

EVERYONE = ("eager", "eager_cudnn", "eager_flash4", "compiled", "compiled_cudnn", "compiled_flash4")


def test_default_cases_are_a_sweep_and_a_tower() -> None:
    cases = BENCH.cases((), torch.device("cuda"))
    assert [case.rows for case in cases if case.width == 1024] == [256, 512, 1024, 2048, 4096, 8192, 16384]
    assert all((case.num_heads, case.head_dim, case.turned) == (16, 64, False) for case in cases[:7])
    tower = cases[7:]
    assert {(case.width, case.num_heads, case.head_dim, case.turned) for case in tower} == {(1152, 16, 72, True)}
    inputs = make_vision_attention_inputs(dataclasses.replace(tower[0], rows=3), torch.bfloat16)
    assert inputs.cos is not None and inputs.cos.shape == (3, 36) and inputs.cos.dtype == torch.float32
    assert BENCH.usual["cuda"] == ("vk_compiled", "sdpa_alone", *EVERYONE)
    assert {case.name for case in BENCH.profiled_cases((), torch.device("cuda"))} == {"attention_1024_4096"}


@pytest.mark.parametrize("case", vision_attention_cases("smoke"), ids=lambda case: case.name)
def test_reference_is_that_of_pytorch(case: Any) -> None:
    inputs = make_vision_attention_inputs(case, torch.float64)

    def plain(*args: Any) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
            return references.window_attn(q, k, v, torch.tensor([0, case.rows], dtype=torch.int32))[0]

        return written_down(attend, torch.empty(0), *args)

    expected = outcome(plain, inputs)
    for name, tensor in outcome(references.vision_attention, inputs).items():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("case", vision_attention_cases("smoke"), ids=lambda case: case.name)
def test_ours_and_peers_are_right(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN and FlashAttention-4 stood in for by PyTorch's own attention; compilers only capture."""
    captured: list[bool] = []

    def note(module: Any, inputs: Any) -> Any:
        captured.append(True)
        return module

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=note, **options))
    monkeypatch.setattr(encoder_peers, "SDPBackend", SimpleNamespace(CUDNN_ATTENTION=SDPBackend.MATH))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", FLASH4)
    for measured in by_case(run_case(BENCH, case, (BENCH.ours, *anywhere(*BENCH.baselines)), SETUP)):
        assert measured.ours.status == OK, measured.ours
        compiled, alone, *baselines = measured.baselines
        notes = {baseline.name: (baseline.status, baseline.note) for baseline in (compiled, *baselines)}
        assert notes == dict.fromkeys(("vk_compiled", *EVERYONE), (OK, ""))
        best = measured.best()
        assert compiled.group == OURS and best is not None and best.name in EVERYONE
        assert alone.status == REFERENCE_POINT and alone.ms and best is not None and best.name != "sdpa_alone"
    assert captured


@pytest.mark.parametrize("name", ["plain", "turned"])
def test_flops_are_those_of_the_products(name: str) -> None:
    (case,) = BENCH.cases([name], CPU)
    inputs = BENCH.inputs(case, torch.float32, CPU, 0)
    (eager,) = (baseline for baseline in BASELINES if baseline.name == "eager")
    call = eager.bind(case, inputs)
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):
        result = call.forward()
    with FlopCounterMode(display=False) as backward, sdpa_kernel(SDPBackend.MATH):
        call.backward_of(result)()
    cost = BENCH.cost(inputs, False)
    assert cost.flops == forward.get_total_flops()
    # A backward that keeps the scores makes four products of attention, others five.
    attention = 4 * case.rows**2 * case.num_heads * case.head_dim
    assert BENCH.cost(inputs, True).flops == backward.get_total_flops() + attention // 2
    tensors = [each for each in vars(inputs).values() if isinstance(each, Tensor)]
    assert cost.bytes_moved == sum(each.nbytes for each in tensors)


def test_refusals_are_those_of_attention() -> None:
    case = VISION_ATTENTION[-1]
    refusals = {baseline.name: baseline.refuses(case, torch.bfloat16, CPU) for baseline in BASELINES}
    for name, reason in refusals.items():
        assert reason == ("needs a GPU" if "cudnn" in name or "flash4" in name else "")


@pytest.mark.parametrize(
    ("alone_ms", "status", "mark"),
    (
        (0.90, OK, "0.90 *reaches 0.9*"),
        (1.20, OK, "1.20 *reaches 0.9*"),
        (0.89, OK, "0.89 *below 0.9*"),
        (1.20, WRONG, "1.20 *reference point*"),
    ),
)
def test_summary_marks_where_ours_reaches_its_target(alone_ms: float, status: str, mark: str) -> None:
    (case,) = BENCH.cases(["plain"], CPU)
    setup = dataclasses.replace(SETUP, directions=("forward",))
    ours, alone = run_case(BENCH, case, (BENCH.ours, BASELINES[0]), setup)
    records = (
        dataclasses.replace(ours, status=status, rounds_ms=(1.0,)),
        dataclasses.replace(alone, rounds_ms=(alone_ms,)),
    )
    report = Report(golden_report().provenance, None, records)
    (table,) = tables(report, "summary")
    assert dict(zip(table.headers, table.rows[0], strict=True))["sdpa_alone"] == mark
    assert "*reaches 0.9*, *below 0.9*: sdpa_alone attends to ready q, k and v" in markdown(report, "summary")
