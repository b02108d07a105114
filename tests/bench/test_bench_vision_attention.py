"""The benchmark of VisionAttention: the same module in PyTorch beside it, and less work as a reference point."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from tests.bench.verify import by_case
from torch_ops.bench.app import app
from torch_ops.bench.encoder import peers as encoder_peers
from torch_ops.bench.measure import timing
from torch_ops.bench.measure.results import OK, REFERENCE_POINT, read_report
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.bench.rooms.vision_attention import BASELINES, BENCH, written_down
from torch_ops.bench.show.tables import markdown
from torch_ops.testing import check, references
from torch_ops.testing.cases import VISION_ATTENTION, make_vision_attention_inputs, outcome, vision_attention_cases

pytestmark = pytest.mark.no_interpret

CPU = torch.device("cpu")
SETUP = Setup(torch.float32, CPU, ("forward", "backward"), rounds=2)
EVERYONE = ("eager", "eager_cudnn", "eager_flash4", "compiled", "compiled_cudnn", "compiled_flash4")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_ROUND_MS", 0.5)


def test_default_cases_are_a_sweep_and_a_tower() -> None:
    cases = BENCH.cases((), torch.device("cuda"))
    assert [case.rows for case in cases if case.width == 1024] == [256, 512, 1024, 2048, 4096, 8192, 16384]
    assert all((case.num_heads, case.head_dim, case.turned) == (16, 64, False) for case in cases[:7])
    tower = cases[7:]
    assert {(case.width, case.num_heads, case.head_dim, case.turned) for case in tower} == {(1152, 16, 72, True)}
    inputs = make_vision_attention_inputs(dataclasses.replace(tower[0], rows=3), torch.bfloat16)
    assert inputs.cos is not None and inputs.cos.shape == (3, 36) and inputs.cos.dtype == torch.float32
    assert BENCH.usual["cuda"] == ("sdpa_alone", *EVERYONE)
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

    def batched(q: Tensor, k: Tensor, v: Tensor) -> Any:
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return functional.scaled_dot_product_attention(*heads_first).transpose(1, 2).contiguous(), None

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=note, **options))
    monkeypatch.setattr(encoder_peers, "SDPBackend", SimpleNamespace(CUDNN_ATTENTION=SDPBackend.MATH))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", SimpleNamespace(flash_attn_func=batched))
    rivals = [dataclasses.replace(baseline, refuses=lambda case, dtype, device: "") for baseline in BASELINES]
    for measured in by_case(run_case(BENCH, case, (BENCH.ours, *rivals), SETUP)):
        assert measured.ours.status == OK, measured.ours
        notes = {baseline.name: (baseline.status, baseline.note) for baseline in measured.baselines[1:]}
        assert notes == dict.fromkeys(EVERYONE, (OK, ""))
        alone, best = measured.baselines[0], measured.best()
        assert alone.status == REFERENCE_POINT and alone.ms and best is not None and best.name != "sdpa_alone"
    assert captured


def test_a_peer_that_turns_wrongly_is_seen() -> None:
    (case,) = BENCH.cases(["turned"], CPU)
    (whole,) = BENCH.checks(case, torch.float32, CPU, True)
    (eager,) = (baseline for baseline in BASELINES if baseline.name == "eager")
    check(eager.bind(case, whole.inputs).results(True), whole.eager, whole.reference)
    other = dataclasses.replace(whole.inputs, sin=-whole.inputs.sin)
    with pytest.raises(AssertionError, match="outside the rule"):
        check(eager.bind(case, other).results(True), whole.eager, whole.reference)


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


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    arguments = ["--device", "cpu", "--rounds", "2", "--out", str(out)]
    result = CliRunner().invoke(app, ["vision_attention", "--shapes", "turned", *arguments])
    assert result.exit_code == 0, result.output
    table = markdown(read_report(out), "summary")
    assert table.startswith("| case | shape | forward ms | sdpa_alone | eager |") and "*reference point*" in table
    host = CliRunner().invoke(app, ["host", "vision_attention", "--device", "cpu", "--markdown"])
    assert host.exit_code == 0 and "VisionAttention with gradients" in host.stdout
    profiled = CliRunner().invoke(app, ["profile", "vision_attention", "--device", "cpu", "--backward"])
    assert profiled.exit_code == 0, profiled.output
