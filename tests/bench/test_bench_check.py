"""The benchmark's correctness check, and the baselines."""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.bench.verify import CPU, FLASH4, anywhere, broken, golden_report, measured, spoiled, wrong_dq
from torch_ops.bench.measure import check as checks
from torch_ops.bench.measure.opbench import Check
from torch_ops.bench.measure.results import FAILED, OK, UNAVAILABLE, WRONG, Group, Report
from torch_ops.bench.peers import packed as attention_peers
from torch_ops.bench.peers.packed import REFERENCE
from torch_ops.bench.rooms.packed_cases import find_cases, shorten
from torch_ops.bench.rooms.window_attn import BENCH, OURS, OURS_FREE
from torch_ops.bench.show.tables import markdown
from torch_ops.testing import references

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]


def test_the_check_passes_what_is_right() -> None:
    for one in measured(OURS, REFERENCE):
        assert one.ours.status == OK and one.baselines[0].status == OK
        assert one.best() is one.baselines[0]
        assert one.ratios is not None and one.ratios[0] > 0
        names = ["out"] if one.ours.direction == "forward" else ["dq", "dk", "dv"]
        assert [report.name.split()[0] for report in one.ours.reports] == names
        assert all(report.passed for report in one.ours.reports)


def test_our_other_way_is_no_baseline() -> None:
    forward, backward = measured(OURS, OURS_FREE, REFERENCE)
    assert [baseline.name for baseline in forward.baselines] == ["reference"], "it is the same forward"
    free, reference = backward.baselines
    assert free.status == OK and free.rounds_ms
    fast = dataclasses.replace(free, rounds_ms=(1e-9, 1e-9))
    backward = Group((backward.ours, fast, reference))
    assert backward.best() is reference
    report = Report(golden_report().provenance, records=(*forward.records, *backward.records))
    assert f"{reference.ms / 1e-9:.2f} for vk_free |" in markdown(report)
    assert markdown(report, "summary").splitlines()[0].endswith("| reference | backward ms | vk_free | reference |")


def test_the_check_finds_one_wrong_gradient() -> None:
    forward, backward = measured(OURS, wrong_dq(), REFERENCE)
    assert forward.baselines[0].status == OK
    assert backward.baselines[0].status == WRONG
    assert backward.baselines[0].note.startswith("dq (") and "dk" not in backward.baselines[0].note
    assert backward.best() is backward.baselines[1]


def test_the_check_finds_unwritten_output() -> None:
    forward, _ = measured(OURS, spoiled("lazy", lambda out: 0 * out + torch.empty_like(out)))
    assert forward.baselines[0].status == WRONG


@pytest.mark.parametrize(("later", "status"), [(4e-3, OK), (1e-3, WRONG), (None, WRONG)])
def test_the_check_takes_more_numbers_where_a_maximum_alone_is_outside(later: float | None, status: str) -> None:
    """Eager's largest error may be small by luck."""

    def draw(seed: int) -> Check:
        reference = torch.linspace(-1, 1, 1000, dtype=torch.float64)
        actual, eager = reference + 1e-3, reference + 1e-3
        actual[7] += 4e-3
        eager[5] += (later or 0.0) if seed else 0.0
        inputs = SimpleNamespace(actual=actual.float())
        again = None if later is None else draw
        return Check("drawn", None, inputs, {"out": reference}, {"out": eager.float()}, again=again)

    def bind(_: Any, inputs: Any) -> Any:
        return SimpleNamespace(results=lambda backward: {"out": inputs.actual})

    drawn = dataclasses.replace(REFERENCE, bind=bind)
    assert checks.check_impl(drawn, BENCH.cases([], CPU)[0], [draw(0)], torch.float32, CPU, False).status == status


def test_the_check_looks_at_the_case_itself() -> None:
    """An implementation is wrong only where it is long; the shortened case alone would miss it."""
    (case,) = find_cases(["300+1500x4/2x16c"], CPU)
    assert max(shorten(case, 2**22, 4).lengths) < 1500

    def spoil(out: Tensor) -> Tensor:
        return out * 1.1 if out.shape[0] >= 1500 else out

    found = BENCH.checks(case, torch.float32, CPU, True)
    assert len(found) == 2 and found[1].case == case
    liar = checks.check_impl(spoiled("liar", spoil), case, found, torch.float32, CPU, True)
    assert all(report.passed == ("key heads" not in report.name) for report in liar.reports[:5])
    for right in (OURS, REFERENCE):
        checked = checks.check_impl(right, case, found, torch.float32, CPU, True)
        assert checked.status == OK, checked.reports


def test_the_check_ends_where_the_device_is_lost() -> None:
    """The next implementation would fail too and be blamed for it."""
    (case,) = find_cases(["30x2x16"], CPU)
    found = BENCH.checks(case, torch.float32, CPU, True)
    lost = mock.patch.object(torch.cuda, "synchronize", side_effect=RuntimeError("lost"))
    with lost, pytest.raises(RuntimeError, match="lost"):
        checks.check_impl(broken(), case, found, torch.float32, torch.device("cuda"), True)


def test_the_check_marks_what_fails_and_what_cannot_run() -> None:
    forward, backward = measured(OURS, broken(), attention_peers.CUDNN, attention_peers.FLASH4)
    for one in (forward, backward):
        assert [baseline.status for baseline in one.baselines] == [FAILED, UNAVAILABLE, UNAVAILABLE]
        assert one.baselines[0].note.endswith("RuntimeError: no kernel for this")
        assert [baseline.note for baseline in one.baselines[1:]] == ["needs a GPU"] * 2
        assert one.best() is None and one.ratios is None


@pytest.mark.parametrize(
    ("shape", "cudnn", "flash2"),
    [
        ("1x40x2x16", "", ""),
        ("2x40x2x16c", "", ""),
        ("40+30x2x16", "equal segments", ""),
        ("cross", "equal segments", ""),
        ("window", "window_left", ""),
        ("softcap_causal", "softcap", "softcap"),
        ("padding", "equal segments", "unwritten"),
        ("alibi", "equal segments", "alibi"),
        ("sinks", "equal segments", "sinks"),
        ("dropout", "equal segments", "dropout_p"),
    ],
)
def test_peers_say_what_they_cannot_run(shape: str, cudnn: str, flash2: str) -> None:
    (case,) = find_cases([shape], CPU)
    device = torch.device("cuda")
    for baseline, reason in ((attention_peers.CUDNN, cudnn), (attention_peers.FLASH2, flash2)):
        said = baseline.refuses(case, torch.bfloat16, device)
        assert reason in said if reason else said == ""
        assert baseline.refuses(case, torch.float32, device)


def test_cudnn_view_is_the_packed_maths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batched view of packed tensors, run by a backend that the CPU has."""
    monkeypatch.setattr(
        attention_peers,
        "sdpa_kernel",
        lambda backend: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    )
    (baseline,) = anywhere(attention_peers.CUDNN)
    for shape in ("3x20x2x16", "2x20x4/2x16c"):
        for one in measured(OURS, baseline, shape=shape):
            assert one.baselines[0].status == OK, one.baselines[0].note


@pytest.mark.parametrize(
    ("shape", "refused"),
    [
        ("40+30x2x16", ""),
        ("40+30x2x16c", ""),
        ("2x40x2x16", ""),
        ("40+30x4/2x16", "share keys"),
        ("window", "window_left"),
        ("softcap_causal", "softcap"),
        ("40+30x2x16", "needs a GPU"),
    ],
)
def test_packed_cudnn_takes_what_its_op_takes(shape: str, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op is called with boundaries, and asked for lse where there will be a backward."""
    seen: list[tuple[Any, ...]] = []

    def forward(q, k, v, bias, cu_q, cu_k, max_q, max_k, lse, dropout, causal, debug, *, scale):
        seen.append((bias, max_q, max_k, lse, dropout, causal, debug, scale))
        return references.window_attn(q, k, v, cu_q, cu_k, causal=causal)[0], None

    monkeypatch.setattr(torch.ops.aten, "_cudnn_attention_forward", forward)
    (case,) = find_cases([shape], CPU)
    baseline = dataclasses.replace(
        attention_peers.CUDNN_PACKED, directions=attention_peers.packed_cudnn_directions("2.15.0")
    )
    if refused == "needs a GPU":
        assert baseline.refuses(case, torch.bfloat16, CPU) == refused
        return
    monkeypatch.setattr(attention_peers, "needs_half_on_gpu", lambda dtype, device: "")
    assert refused in baseline.refuses(case, torch.bfloat16, CPU)
    if refused:
        return
    for one in measured(OURS, baseline, shape=shape):
        assert one.baselines[0].status == OK, one.baselines[0].note
    longest, causal = max(case.lengths), bool(case.options.get("causal"))
    assert {call[3] for call in seen} == {True, False}
    assert {(*call[:3], *call[4:]) for call in seen} == {(None, longest, longest, 0.0, causal, False, None)}


def test_packed_cudnn_has_a_backward_where_pytorch_calls_it() -> None:
    directions = attention_peers.packed_cudnn_directions
    assert directions("2.11.0+cu130") == directions("2.13.0") == ("forward",)
    assert directions("2.14.0a0") == directions("2.15.0") == ("forward", "backward")


@pytest.mark.parametrize("shape", ["12+30x2x16", "3x20x2x16"])
def test_flash4_comes_in_both_forms(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deterministic one is timed in the backward alone."""
    asked: list[bool] = []

    def noting(function: Any) -> Any:
        def call(*args: Any, deterministic: bool = False, **options: Any) -> Any:
            asked.append(deterministic)
            return function(*args, **options)

        return call

    monkeypatch.setattr(attention_peers, "flash4_function", lambda name: noting(getattr(FLASH4, name)))
    both = anywhere(attention_peers.FLASH4, attention_peers.FLASH4_DETERMINISTIC)
    forward, backward = measured(OURS, *both, shape=shape)
    assert [each.name for each in forward.baselines] == ["flash4"]
    assert [(each.name, each.status) for each in backward.baselines] == [("flash4", OK), ("flash4_deterministic", OK)]
    assert {True, False} == set(asked)


@pytest.mark.parametrize(
    ("shape", "flash2", "flash4"),
    [
        ("12+30x4/2x16c", (30, 30, None, (-1, 0), True), (30, 30)),
        ("3x20x4/2x16", (20, 20, None, (-1, -1), True), ((3, 20, 4, 16), (3, 20, 2, 16))),
    ],
)
def test_flash_peers_are_called_as_documented(
    shape: str, flash2: tuple[Any, ...], flash4: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        seen["flash2"] = (max_q, max_k, scale, window_size, enable_gqa)
        return references.window_attn(q, k, v, cu_q, cu_k, causal=window_size == (-1, 0))[0]

    def flash_attn_varlen_func(q, k, v, **options):
        seen["flash4"] = (options["max_seqlen_q"], options["max_seqlen_k"])
        return FLASH4.flash_attn_varlen_func(q, k, v, **options)

    def flash_attn_func(q, k, v, *, causal):
        seen["flash4"] = q.shape, k.shape
        return FLASH4.flash_attn_func(q, k, v, causal)

    interface = {function.__name__: function for function in (flash_attn_func, flash_attn_varlen_func)}
    monkeypatch.setattr(attention_peers, "_varlen_attn", lambda: varlen_attn)
    monkeypatch.setattr(attention_peers, "flash4_function", interface.__getitem__)
    for one in measured(OURS, *anywhere(attention_peers.FLASH2, attention_peers.FLASH4), shape=shape):
        assert [baseline.status for baseline in one.baselines] == [OK, OK], one.baselines
    assert seen == {"flash2": flash2, "flash4": flash4}
