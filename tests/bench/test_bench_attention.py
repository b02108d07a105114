"""`vk bench attention`: the benchmark of dense attention, its command, tables and pictures."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from tests.bench.verify import CPU, FLASH4, ROOT, anywhere, bench, bench_lines, by_case, golden_report, refused
from torch_ops.bench.app import BENCHES
from torch_ops.bench.commands import attention as attention_command
from torch_ops.bench.commands import options
from torch_ops.bench.commands import run as run_command
from torch_ops.bench.commands.attention import sweep
from torch_ops.bench.measure.opbench import Call, Impl
from torch_ops.bench.measure.results import (
    OK,
    REFERENCE_POINT,
    UNAVAILABLE,
    WRONG,
    Ceilings,
    Group,
    Report,
    read_report,
)
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.bench.measure.timing import make_timer
from torch_ops.bench.peers import dense as dense_peers
from torch_ops.bench.peers.dense import DENSE_BASELINES, dense_call
from torch_ops.bench.rooms import attention_decode
from torch_ops.bench.rooms.attention import AS_BF16, AS_FP16, BENCH, OURS
from torch_ops.bench.rooms.dense_cases import dense_notation, find_dense_cases
from torch_ops.bench.show.tables import markdown, tables, torch_baseline
from torch_ops.testing import references
from torch_ops.testing.cases import DENSE, DenseCase, DenseInputs, make_dense_inputs

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]

CUDA = torch.device("cuda")
SETUP = Setup(torch.float32, CPU, ("forward", "backward"), rounds=2, warm_up=1)
BASELINES = {baseline.name: baseline for baseline in DENSE_BASELINES}
TINY = (
    "--batch", 2, "--heads", 4, "--kv-heads", 2, "--seqlen", 24, "--headdim", 16, "--dtype", "float32", "--warmup", 1,
    "--iters", 3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this machine take longer than what is measured here."""
    monkeypatch.setattr(run_command, "measure_ceilings", lambda device, dtype: Ceilings(40.0, 0.1, "float32"))


def _impl(name: str, forward: Callable[..., Tensor], **rest: Any) -> Impl:
    """The reference, of which `forward(out, q)` makes something else."""

    def bind(case: DenseCase, inputs: DenseInputs) -> Call:
        return dense_call(inputs, lambda q, k, v: forward(inputs.call(references.attention, q=q, k=k, v=v)[0], q))

    return Impl(name, bind, **rest)


def _measured(*impls: Impl, shape: str = "2x4/2x24x16c", setup: Setup = SETUP) -> list[Group]:
    (case,) = find_dense_cases([shape], CPU)
    return by_case(run_case(BENCH, case, impls, setup))


def _noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs, and where their results would go."""
    asked: list[Any] = []

    def note(runs: Any, setup: Setup, output: Any) -> Report:
        asked.append((runs, setup, output))
        return dataclasses.replace(golden_report(), records=(), profiles=(), host=())

    monkeypatch.setattr(attention_command, "run_all", note)
    return asked


def test_the_command_of_the_report(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    result = bench("attention", *TINY, "--causal", "--both", "--json", out, "--commit", "abc", "--markdown")
    assert result.exit_code == 0, result.output
    report = read_report(out)
    assert report.provenance.commit == "abc" and set(report.provenance.baselines) == {"vk_as_fp16", "math"}
    groups = by_case(report.records)
    assert [one.ours.direction for one in groups] == ["forward", "backward"]
    for one in groups:
        ours, halves, plain = one.records
        assert (ours.op, ours.shape, ours.dtype, ours.warm_up) == ("attention", "2x4/2x24x16c", "float32", 1)
        assert [each.status for each in one.records] == [OK, REFERENCE_POINT, OK]
        assert {len(each.rounds_ms) for each in one.records} == {3}
        assert plain.to_ours < 1e-5 < halves.to_ours < 2e-2 and ours.to_ours is None
        assert one.best() is torch_baseline(one) is plain
    assert result.stdout == markdown(report, "passes")
    headers = (
        "| implementation | mean ms | median ms | TFLOP/s | its time / ours | max abs difference to ours "
        "| allclose, atol 0.02 | tolerance rule |"
    )
    assert result.stdout.count(headers) == 2
    for line in (
        "### attention, backward, 2x4/2x24x16c, float32, reference path",
        "times: median (min..max) of 3 interleaved iterations after 1 untimed ones of each, wall time",
        "tolerance rule: against fp64, on 2x4/2x24x16c",
        "vk_as_fp16: torch_ops.attention with compute_dtype=torch.float16",
    ):
        assert line in result.stdout


def test_flags_write_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the report this command repeats."""
    asked, paths = _noted(monkeypatch), []
    run_all = attention_command.run_all
    monkeypatch.setattr(
        attention_command, "run_all", lambda *rest: (paths.append(torch_ops.settings.path), run_all(*rest))[1]
    )
    flags = "--batch 32 --heads 10 --kv-heads 10 --seqlen 2048 --headdim 128 --dtype bfloat16 --causal"
    for more in ("", "--both", "--backward", "--no-warp-specialize", "--decode", "--decode --queries 5"):
        words = flags.replace(" --causal", "") if "--decode" in more else flags
        assert bench("attention", *words.split(), "--warmup", 50, "--iters", 100, *more.split()).exit_code == 0
    cases = [runs[0].case.name for runs, _, _ in asked]
    assert cases == ["32x10/10x2048x128c"] * 4 + ["32x10/10x1/2048x128", "32x10/10x5/2048x128"]
    setups = [setup for _, setup, _ in asked]
    assert [setup.directions for setup in setups[:3]] == [("forward",), ("forward", "backward"), ("backward",)]
    assert {(setup.dtype, setup.rounds, setup.warm_up) for setup in setups} == {(torch.bfloat16, 100, 50)}
    assert "vk_as_fp16" not in {impl.name for runs, _, _ in asked for run in runs for impl in run.impls}
    assert paths[3] == "portable" != paths[0] == torch_ops.settings.path
    before = asked[4][0][0].case
    assert before.lengths == (2048,) * 32 and (before.num_k_heads, before.queries) == (10, 1)


def test_tf32_is_pytorchs_setting() -> None:
    matmul = torch.backends.cuda.matmul
    before, seen = matmul.fp32_precision, []

    def look(out: Tensor, q: Tensor) -> Tensor:
        seen.append(matmul.fp32_precision)
        return out

    setup = dataclasses.replace(SETUP, directions=("forward",), tf32=True)
    (one,) = _measured(OURS, _impl("baseline", look), setup=setup)
    assert one.ours.dtype == "tf32" and set(seen) == {"tf32"} and matmul.fp32_precision == before
    _measured(OURS, _impl("baseline", look))
    assert seen[-1] == before


def test_suite_has_the_shapes_of_the_report_and_ends_with_a_step_of_decoding() -> None:
    suite = attention_command._suite
    runs = suite(BENCHES, dataclasses.replace(SETUP, device=CUDA, dtype=torch.bfloat16), False)
    shapes = "1x8x512x64c", "4x32x1024x64c", "8x32x2048x128c", "2x8/4x1024x128c", "32x10x2048x128c"
    found = [(dense_notation(case), setup.kind) for each, case, setup in runs if each.op == "attention"]
    assert sorted(found) == sorted(
        (each, kind) for each in shapes for kind in ("float32", "tf32", "float16", "bfloat16")
    )
    steps = [(each.op, case.name, setup.kind) for each, case, setup in runs[len(found) :]]
    assert steps == [("attention_decode", "llama_b16_8192", kind) for kind in ("float32", "float16", "bfloat16")]
    of_fp32 = suite(BENCHES, dataclasses.replace(SETUP, device=CUDA), True)
    assert {setup.kind for _, _, setup in of_fp32} == {"float32", "tf32"}
    for each, case, setup in suite(BENCHES, SETUP, False):
        small = each.op != "attention" or case.batch * case.num_heads * case.length**2 <= 2**20
        assert small and not setup.tf32


def test_suite_is_one_document(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suite, few = attention_command._suite, ("b1h8s512d64_causal", "one_token")
    monkeypatch.setattr(
        attention_command, "_suite", lambda *rest: [each for each in suite(*rest) if each[1].name in few]
    )
    monkeypatch.setattr(attention_command, "CPU_ENTRIES", 2**17)
    out = tmp_path / "suite.json"
    result = bench("attention", "--suite", "--warmup", 0, "--iters", 2, "--out", out)
    assert result.exit_code == 0, result.output
    report = read_report(out)
    dense = [one for one in by_case(report.records) if one.ours.op == "attention"]
    kinds = ["float32", "float16", "bfloat16"]
    assert [one.ours.dtype for one in dense] == [kind for kind in kinds for _ in range(2)]
    assert {one.ours.shape for one in dense} == {"1x8x128x64c"}
    assert "on a CPU every case of the suite is cut down" in result.stderr
    text = bench("table", "--suite", out).stdout
    assert text == markdown(report, "suite")
    assert text.count("| 1x8x128x64c | float32, vk_as_fp16 | ") == text.count("| not checked |") == 2
    assert "### attention, forward\n" in text and "### attention, backward\n" in text


@pytest.mark.parametrize("queries", [1, 3])
def test_decoding(queries: int, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    result = bench("attention", *TINY, "--decode", "--queries", queries, "--peers", "math,reference", "--out", out)
    assert result.exit_code == 0, result.output
    (one,) = by_case(read_report(out).records)
    assert (one.ours.op, one.ours.direction) == ("attention_decode", "forward")
    assert {each.name: each.status for each in one.baselines} == {"math": OK, "reference": OK}
    assert all(each.to_ours < 1e-5 for each in one.baselines)
    assert "TB/s" in result.stdout and "of a copy" in result.stdout
    item, keys = 4, 2 * 2 * 24 * 16
    assert one.ours.bytes_moved == 2 * item * keys + 2 * item * 2 * 4 * queries * 16


def test_baselines_of_decoding_say_what_they_cannot_run() -> None:
    baselines = {baseline.name: baseline for baseline in attention_decode.BASELINES}

    def said(name: str, queries: int, keys: int = 24) -> str:
        case = dataclasses.replace(attention_decode.HOST_CASE, lengths=(keys,), capacity=keys, queries=queries)
        return baselines[name].refuses(case, torch.bfloat16, CUDA)

    assert said("cudnn", 1) == said("flash2", 1) == said("flash2", 3) == said("cudnn", 24) == ""
    assert "top-left" in said("cudnn", 3) and "NaN" in said("flash2", 5, keys=4)


@pytest.mark.parametrize("flags", [("--both",), ("--decode",)])
def test_plot(flags: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, out = tmp_path / "sweep.svg", tmp_path / "run.json"
    result = bench("attention", *TINY, *flags, "--seqlen", 40, "--plot", picture, "--json", out)
    assert result.exit_code == 0, result.output
    records = read_report(out).records
    assert len({one.case for one in records}) == len(sweep(40)) == 3
    text = picture.read_text()
    for words in (*{one.name for one in records}, "FLOP per byte moved", "float32 matmul 0.1 TFLOP/s, copy 40 GB/s"):
        assert f">{words}<" in text or words in text
    assert ("TB/s" in text) == (flags == ("--decode",))


def test_plot_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused("attention", *TINY, "--plot", tmp_path / "sweep.png")
    assert "'--plot'" in line and "pip install 'vk-ops[bench]'" in line


def test_lengths_of_a_sweep() -> None:
    assert sweep(1024) == [128, 256, 512, 1024] and sweep(300) == [128, 256, 300]
    assert sweep(40) == [16, 32, 40] and sweep(7) == [7] and sweep(64, 20) == [32, 64]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--heads", 6, "--kv-heads", 4), "6 query heads and 4 key heads"),
        (("--headdim", 70), "head dim 70; give a multiple of 8"),
        (("--headdim", 0), "multiple of 8"),
        (("--batch", 0), "'--batch'"),
        (("--iters", 0), "'--iters'"),
        (("--backward", "--both"), "'--backward'"),
        (("--queries", 3), "'--queries': it goes with --decode"),
        (("--decode", "--queries", 17), "17 new tokens and 1024 keys; give 1 to 16"),
        (("--decode", "--queries", 8, "--seqlen", 4), "8 new tokens and 4 keys"),
        (("--decode", "--both"), "'--decode': decoding has no backward"),
        (("--suite", "--batch", 3, "--causal"), "'--suite': it has shapes and types of its own; leave out --batch"),
        (("--suite", "--tf32"), "leave out --tf32"),
        (("--suite", "--shapes", "batch"), "leave out --shapes"),
        (("--shapes", "batch", "--seqlen", 9), "'--shapes': it says what shapes there are; leave out --seqlen"),
        (("--shapes", "nothing"), "BATCHxHEADS[/KEY_HEADS]xLENGTHxHEAD_DIM"),
        (("--tf32",), "'--tf32': a CPU has no tf32"),
        (("--tf32", "--dtype", "bfloat16"), "'--tf32': it is for fp32"),
        (("--no-warp-specialize", "--path", "hopper"), "'--no-warp-specialize': it is --path portable"),
        (("--plot", "sweep.txt"), "'--plot': 'sweep.txt' is no picture; give a file that ends in"),
        (("--json", "none/run.json"), "'--json': there is no folder"),
        (("--plot", "x.png", "--json", "./x.png"), "'--plot': --json goes there too"),
        (("--peers", "flash9"), "'--peers': unknown baseline 'flash9'"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(flags: tuple[Any, ...], words: str) -> None:
    assert words in refused("attention", *flags)


@pytest.mark.parametrize(
    ("spoil", "close"),
    [(lambda out, q: out + 0.001, "True"), (lambda out, q: out * 1.2, "False"), (lambda out, q: out / 0, "-")],
    ids=["slightly", "far", "infinite"],
)
def test_what_is_wrong_is_marked_and_never_best(spoil: Any, close: str) -> None:
    forward, _ = _measured(OURS, _impl("flash2", spoil), BASELINES["math"])
    liar, plain = forward.baselines
    assert liar.status == WRONG and len(liar.rounds_ms) == 2
    fast = Group((forward.ours, dataclasses.replace(liar, rounds_ms=(1e-9, 1e-9)), plain))
    assert fast.best() is plain and torch_baseline(fast) is plain, "PyTorch's other attention stands in"
    report = dataclasses.replace(golden_report(), records=fast.records)
    (table,) = tables(Report.from_json(report.to_json()), "passes")
    row = next(row for row in table.rows if row[0] == "flash2")
    assert row[-2:] == (close, "outside")
    assert any(note.startswith("flash2 is wrong on 2x4/2x24x16c: out (2x4/2x24x16c)") for note in table.notes)


@pytest.mark.parametrize("options_of_case", [{"alibi": 1, "sinks": True}, {"alibi": 2}, {"dropout_p": 0.2}], ids=str)
def test_cuts_of_a_case_keep_the_options_of_their_heads(
    options_of_case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("torch_ops.bench.rooms.attention.entries_for_truth", lambda device: (2**14, 2**20))
    case = DenseCase("case", "", 3, 4, 150, 16, num_k_heads=2, options={**options_of_case, "causal": True})
    checks = BENCH.checks(case, torch.float32, CPU, True)
    assert len(checks) == (1 if "dropout_p" in options_of_case else 2)
    # The last check runs the whole case, of which it compares the last sequence.
    assert {(check.case.batch, check.case.length) for check in checks[1:]} <= {(3, 150)}
    for check in checks:
        results = OURS.bind(check.case, check.inputs).results(True)
        for name, truth in check.reference.items():
            torch.testing.assert_close(check.look(name, results[name]).double(), truth, atol=1e-4, rtol=1e-4)


def test_bench_cases_are_those_asked_for() -> None:
    shapes = {dense_notation(case): case.name for case in BENCH.cases((), CUDA)}
    for shape in ("2x8/4x1024x128", "32x10x2048x128", "8x32x2048x128", "4x32x1024x64", "1x8x512x64", "8x32/8x2048x128"):
        assert shapes[f"{shape}c"] == f"{shapes[shape]}_causal"
    assert {"4x16x4096x64", "4x8x11000/10000x64"} <= shapes.keys()
    assert BENCH.profiled_cases((), CUDA)[0].name in shapes.values()
    assert {baseline.name for baseline in BENCH.baselines} >= set(BENCH.usual["cuda"])
    assert options.find_baselines(BENCH, [], CPU) == (AS_FP16, BASELINES["math"])


def test_notation_reads_back() -> None:
    for case in DENSE:
        if min(case.batch, case.length, 1 if case.k_length is None else case.k_length):
            (again,) = find_dense_cases([dense_notation(case)], CPU)
            for name in ("batch", "num_heads", "length", "head_dim"):
                assert getattr(again, name) == getattr(case, name)
            assert dense_notation(again) == dense_notation(case)
    assert [case.name for case in find_dense_cases(["b4h32*,1x2x3x8"], CPU)] == [
        "b4h32s1024d64_causal", "b4h32s1024d64", "1x2x3x8",
    ]  # fmt: skip


def test_cost_is_that_of_the_same_segments() -> None:
    (dense,), (packed,) = BENCH.cases(["3x4/2x40x16c"], CPU), BENCHES["window_attn"].cases(["3x40x4/2x16c"], CPU)
    inputs = BENCHES["window_attn"].inputs(packed, torch.bfloat16, CPU, 0)
    for backward in (False, True):
        cost = BENCH.cost(BENCH.inputs(dense, torch.bfloat16, CPU, 0), backward)
        other = BENCHES["window_attn"].cost(inputs, backward)
        assert cost.flops == other.flops and cost.bytes_moved == other.bytes_moved - inputs.cu_seqlens.nbytes


@pytest.mark.parametrize(
    ("shape", "refused_by"),
    [
        ("2x4x40x16c", {}),
        ("2x4/2x40x16", {"efficient": "share keys"}),
        ("1x2x20/40x16", {}),
        ("causal_wide", {"cudnn": "top-left"}),
        ("causal_tall", {"cudnn": "top-left", "flash2": "NaN", "efficient": "NaN", "math": "NaN"}),
        ("softcap", dict.fromkeys(("cudnn", "flash2", "efficient", "math"), "has no softcap")),
        ("sinks", dict.fromkeys(("cudnn", "flash2", "math"), "has no sinks") | {"flash4": "sinks", "efficient": ""}),
        ("b8h32s2048d128", {"math": "GiB", "reference": "GiB"}),
    ],
)
def test_peers_say_what_they_cannot_run(shape: str, refused_by: dict[str, str]) -> None:
    (case,) = find_dense_cases([shape], CPU)
    for name, baseline in BASELINES.items():
        said = baseline.refuses(case, torch.bfloat16, CUDA)
        if name in refused_by or not name.startswith("flash4"):
            assert refused_by[name] in said if name in refused_by else said == ""
        assert baseline.refuses(case, torch.float32, CUDA) or name in ("efficient", "math", "reference")
    assert AS_FP16.refuses(case, torch.bfloat16, CUDA) and AS_BF16.refuses(case, torch.bfloat16, CUDA)


@pytest.mark.parametrize("shape", ["2x4/2x24x16c", "2x2x24x16", "1x2x20/40x16c", "1x2x1/40x16c"])
def test_peers_are_right(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain products stand in for PyTorch's fused kernels, and the reference for FlashAttention-4."""
    seen = []

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool = False
    ) -> tuple[Tensor, None]:
        seen.append((q.shape, k.shape, causal))
        return FLASH4.flash_attn_func(q, k, v, causal)

    plain, select = torch.nn.attention.SDPBackend.MATH, torch.nn.attention.sdpa_kernel
    monkeypatch.setattr(dense_peers, "sdpa_kernel", lambda backend: select(plain))
    monkeypatch.setattr(dense_peers, "flash4_function", lambda name: flash_attn_func)
    for one in _measured(OURS, *anywhere(*DENSE_BASELINES), shape=shape):
        assert {each.status for each in one.baselines} == {OK}, one.baselines
    (case,) = find_dense_cases([shape], CPU)
    inputs = make_dense_inputs(case, torch.float32)
    assert seen[0] == (inputs.q.transpose(1, 2).shape, inputs.k.transpose(1, 2).shape, "causal" in case.options)


def test_a_case_of_nothing_has_no_difference() -> None:
    for one in _measured(OURS, BASELINES["math"], BASELINES["reference"], shape="no_rows"):
        assert [each.status for each in one.baselines] == [UNAVAILABLE, OK] and one.baselines[0].note == "is empty"
        assert one.baselines[1].to_ours is None or one.baselines[1].to_ours < 1e-5


@pytest.mark.parametrize("name", ["dq", "dv"])
def test_a_gradient_that_is_not_a_number_is_no_small_difference(name: str) -> None:
    def bind(case: DenseCase, inputs: DenseInputs) -> Call:
        call = OURS.bind(case, inputs)
        call.inputs[name[1:]].register_hook(lambda gradient: gradient * torch.nan)
        return call

    _, backward = _measured(OURS, Impl("baseline", bind))
    assert (backward.baselines[0].status, backward.baselines[0].to_ours) == (WRONG, None)


def test_a_brief_sample_is_one_call() -> None:
    calls: list[int] = []
    timer = make_timer([lambda: calls.append(0), lambda: calls.append(1)], CPU, briefly=True)
    calls.clear()
    assert all(timer.sample() >= 0 for _ in range(5)) and calls == [0, 1, 0, 1, 0]


def test_what_the_makefile_measures_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _noted(monkeypatch)
    monkeypatch.chdir(ROOT)
    for arguments in bench_lines("figures-attention"):
        result = bench(*arguments)
        assert result.exit_code == 0, result.output
    assert [len(runs) for runs, _, _ in asked] == [18, 3, 3, 1, 1]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    places = [output.out.name for _, _, output in asked]
    assert all(f"<!-- vk bench table --suite --if-measured results/{name} -->" in page for name in places)
    for name in ("attention_decode", "attention_decode_fp16"):
        assert f"<!-- vk bench table --if-measured results/h200_{name}.json -->" in page
