"""`vk bench attention`: the room of dense attention, its command, tables and pictures."""

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ops
from tests.bench.verify import CPU, bench, golden_report, refused
from torch_ops.bench.app import ROOMS
from torch_ops.bench.commands import attention as attention_command
from torch_ops.bench.commands import attention_suite, options
from torch_ops.bench.commands import contest as contest_command
from torch_ops.bench.commands.attention_suite import decoding, suite_rows, sweep
from torch_ops.bench.measure.contest import Terms, contest
from torch_ops.bench.measure.results import (
    OK,
    UNAVAILABLE,
    WRONG,
    YARDSTICK,
    Ceilings,
    Measurement,
    Report,
    read_report,
)
from torch_ops.bench.measure.room import Call, Contender
from torch_ops.bench.measure.timing import make_timer
from torch_ops.bench.peers import dense as dense_peers
from torch_ops.bench.peers.dense import DENSE_PEERS, dense_call
from torch_ops.bench.rooms import attention_decode
from torch_ops.bench.rooms.attention import AS_BF16, AS_FP16, OURS, ROOM
from torch_ops.bench.rooms.dense_cases import dense_notation, find_dense_cases, shorten_dense
from torch_ops.bench.show import documents
from torch_ops.bench.show.attention import attention_tables, overview, torch_peer
from torch_ops.bench.show.tables import markdown
from torch_ops.testing import references
from torch_ops.testing.cases import DENSE, DenseCase, DenseInputs, make_dense_inputs

pytestmark = [pytest.mark.no_interpret, pytest.mark.usefixtures("quick_bench")]

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda")
TERMS = Terms(torch.float32, CPU, backward=True, rounds=2, cold=False, warm_up=1)
PEERS = {peer.name: peer for peer in DENSE_PEERS}
TINY = (
    "--batch", 2, "--heads", 4, "--kv-heads", 2, "--seqlen", 24, "--headdim", 16, "--dtype", "float32", "--warmup", 1,
    "--iters", 3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this machine take longer than what is measured here."""
    monkeypatch.setattr(contest_command, "measure_ceilings", lambda device, dtype: Ceilings(40.0, 0.1, "float32"))


def _contender(name: str, forward: Callable[..., Tensor], **rest: Any) -> Contender:
    """The reference, of which `forward(out, q)` makes something else."""

    def bind(case: DenseCase, inputs: DenseInputs) -> Call:
        return dense_call(inputs, lambda q, k, v: forward(inputs.call(references.attention, q=q, k=k, v=v)[0], q))

    return Contender(name, bind, lambda case, dtype, device: "", lambda: name, **rest)


def _measured(*contenders: Contender, shape: str = "2x4/2x24x16c", terms: Terms = TERMS) -> list[Measurement]:
    (case,) = find_dense_cases([shape])
    return contest(ROOM, case, contenders, terms)


def test_the_command_of_the_report(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    result = bench("attention", *TINY, "--causal", "--both", "--json", out, "--commit", "abc", "--markdown")
    assert result.exit_code == 0, result.output
    report = read_report(out)
    assert report.provenance.commit == "abc" and report.provenance.versions["torch"] == torch.__version__
    assert report.ceilings is not None and set(report.provenance.peers) == {"vk_as_fp16", "math"}
    assert [one.direction for one in report.measurements] == ["forward", "backward"]
    for one in report.measurements:
        assert (one.op, one.shape, one.dtype, one.warm_up) == ("attention", "2x4/2x24x16c", "float32", 1)
        assert {timed.name: timed.status for timed in one.peers} == {"vk_as_fp16": YARDSTICK, "math": OK}
        assert {len(timed.rounds_ms) for timed in (one.ours, *one.peers)} == {3}
        halves, plain = (timed.to_ours for timed in one.peers)
        assert plain.close and plain.max_abs < 1e-5 < halves.max_abs < halves.atol == 2e-2
        assert one.best_peer is torch_peer(one) is one.peers[1]
    assert result.stdout == markdown(report, attention_tables)
    headers = (
        "| contender | mean ms | median ms | TFLOP/s | its time / ours | max abs difference to ours "
        "| allclose, atol 0.02 | tolerance rule |"
    )
    assert result.stdout.count(headers) == 2
    for line in (
        "### attention, backward, 2x4/2x24x16c, float32, reference path",
        "as fast as the fastest correct peer, math",
        "wall time of a call; 3 iterations, in turns with all others after 1 untimed of each",
        "tolerance rule: against fp64, on 2x4/2x24x16c",
        "vk_as_fp16: torch_ops.attention with compute_dtype=torch.float16",
    ):
        assert line in result.stdout


@pytest.mark.parametrize(
    ("flags", "directions"),
    [((), ["forward"]), (("--backward",), ["backward"]), (("--both",), ["forward", "backward"])],
)
def test_passes(flags: tuple[str, ...], directions: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    result = bench("attention", *TINY, *flags, "--peers", "reference", "--out", out)
    assert result.exit_code == 0, result.output
    measurements = read_report(out).measurements
    assert [one.direction for one in measurements] == directions
    for one in measurements:
        assert [timed.name for timed in one.peers] == ["reference"]
        assert ("dq" in one.ours.gate[0].name) == (one.direction == "backward")
    assert "reference" in result.stdout and "tolerance rule" in result.stdout


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_have_no_other_type(dtype: str) -> None:
    result = bench("attention", *TINY, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert dtype in result.stdout and "vk_as_fp16" not in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[4:6]] == ["vk", "math"]


def test_without_warp_specialization(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []

    def contest_on(*_: Any) -> list[Measurement]:
        paths.append(torch_ops.settings.path)
        return []

    monkeypatch.setattr(contest_command, "contest", contest_on)
    before = torch_ops.settings.path
    for flags in (("--no-warp-specialize",), ("--path", "portable"), ()):
        assert bench("attention", *TINY, *flags).exit_code == 0
    assert paths == ["portable", "portable", before] and torch_ops.settings.path == before


def test_tf32_is_pytorchs_setting() -> None:
    matmul = torch.backends.cuda.matmul
    before, seen = matmul.fp32_precision, []

    def look(out: Tensor, q: Tensor) -> Tensor:
        seen.append(matmul.fp32_precision)
        return out

    (one,) = _measured(OURS, _contender("peer", look), terms=dataclasses.replace(TERMS, backward=False, tf32=True))
    assert one.dtype == "tf32" and set(seen) == {"tf32"} and matmul.fp32_precision == before
    _measured(OURS, _contender("peer", look))
    assert seen[-1] == before


def test_suite_has_the_rows_of_the_report() -> None:
    rows = suite_rows(dataclasses.replace(TERMS, device=CUDA, dtype=torch.bfloat16))
    found = {(dense_notation(case), terms.kind) for case, terms in rows}
    sizes = "1x8x512x64c", "4x32x1024x64c", "8x32x2048x128c"
    language_model = "2x8/4x1024x128c", "32x10x2048x128c"
    assert found == {(shape, kind) for shape in sizes for kind in ("float32", "tf32")} | {
        (shape, kind) for shape in (*sizes, *language_model) for kind in ("float16", "bfloat16")
    }
    assert len(rows) == len(found)
    assert {terms.warm_up for _, terms in rows} == {1}
    of_fp32 = suite_rows(dataclasses.replace(TERMS, device=CUDA), torch.float32)
    assert [terms.kind for _, terms in of_fp32] == ["float32", "tf32"] * 3
    for case, terms in suite_rows(TERMS):
        assert case.batch * case.num_heads * case.length**2 <= 2 * attention_suite.CPU_ENTRIES and not terms.tf32


def test_suite_is_one_document(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(attention_suite, "SIZES", ("b1h8s512d64_causal",))
    monkeypatch.setattr(attention_suite, "LANGUAGE_MODEL", ())
    monkeypatch.setattr(attention_suite, "CPU_ENTRIES", 2**17)
    out = tmp_path / "suite.json"
    result = bench("attention", "--suite", "--warmup", 0, "--iters", 2, "--out", out)
    assert result.exit_code == 0, result.output
    report = read_report(out)
    kinds = ["float32", "float16", "bfloat16"]
    assert [one.dtype for one in report.measurements] == [kind for kind in kinds for _ in range(2)]
    assert "on a CPU every case of the suite is cut down" in result.stderr
    assert {one.shape for one in report.measurements} == {"1x8x128x64c"}
    text = markdown(report, overview)
    assert text.count("| 1x8x128x64c | float32, vk_as_fp16 | ") == text.count("| not judged |") == 2
    assert "### attention, forward\n" in text and "### attention, backward\n" in text
    assert bench("table", "--suite", out).stdout == text
    page = tmp_path / "page.md"
    page.write_text("<!-- vk bench table --suite --if-measured suite.json -->\n<!-- vk bench table end -->\n")
    assert documents.refresh(page) and text in page.read_text()


@pytest.mark.parametrize("queries", [1, 3])
def test_decoding(queries: int, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    flags = "--decode", "--queries", queries, "--peers", "math,reference"
    result = bench("attention", *TINY, *flags, "--out", out)
    assert result.exit_code == 0, result.output
    (one,) = read_report(out).measurements
    assert (one.op, one.direction) == ("attention_decode", "forward")
    assert {timed.name: timed.status for timed in one.peers} == {"math": OK, "reference": OK}
    assert all(timed.to_ours.close for timed in one.peers)
    assert "TB/s" in result.stdout and "of a copy" in result.stdout
    item, keys = 4, 2 * 2 * 24 * 16
    assert one.bytes_moved == 2 * item * keys + 2 * item * 2 * 4 * queries * 16


def test_peers_of_decoding_say_what_they_cannot_run() -> None:
    peers = {peer.name: peer for peer in attention_decode.PEERS}

    def said(name: str, queries: int, keys: int = 24) -> str:
        return peers[name].refuses(decoding(1, 2, 2, keys, 16, queries), torch.bfloat16, CUDA)

    assert said("cudnn", 1) == said("flash2", 1) == said("flash2", 3) == said("cudnn", 24) == ""
    assert "top-left" in said("cudnn", 3) and "NaN" in said("flash2", 5, keys=4)


@pytest.mark.parametrize("flags", [("--both",), ("--decode",)])
def test_plot(flags: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, out = tmp_path / "sweep.svg", tmp_path / "run.json"
    result = bench("attention", *TINY, *flags, "--seqlen", 40, "--plot", picture, "--json", out)
    assert result.exit_code == 0, result.output
    report = read_report(out)
    assert len({one.case for one in report.measurements}) == len(sweep(40)) == 3
    text = picture.read_text()
    names = {timed.name for one in report.measurements for timed in (one.ours, *one.peers)}
    for words in (*names, "FLOP per byte moved", "float32 matmul 0.1 TFLOP/s, copy 40 GB/s"):
        assert f">{words}<" in text or words in text
    assert ("TB/s" in text) == (flags == ("--decode",))


def test_plot_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused("attention", *TINY, "--plot", tmp_path / "sweep.png")
    assert "'--plot'" in line and "pip install 'vk-ops[bench]'" in line


def test_lengths_of_a_sweep() -> None:
    assert sweep(1024) == [128, 256, 512, 1024] and sweep(300) == [128, 256, 300]
    assert sweep(40) == [16, 32, 40] and sweep(7) == [7]


@pytest.mark.parametrize(
    ("flags", "option", "words"),
    [
        (("--heads", 6, "--kv-heads", 4), "--kv-heads", "6 query heads cannot share 4 key heads"),
        (("--headdim", 70), "--headdim", "multiple of 8"),
        (("--headdim", 0), "--headdim", "multiple of 8"),
        (("--batch", 0), "--batch", ""),
        (("--iters", 0), "--iters", ""),
        (("--dtype", "int8"), "--dtype", "bfloat16"),
        (("--backward", "--both"), "--backward", "--both"),
        (("--queries", 3), "--queries", "--decode"),
        (("--decode", "--queries", 17), "--queries", "1 to 16"),
        (("--decode", "--queries", 8, "--seqlen", 4), "--queries", "--seqlen 4"),
        (("--decode", "--both"), "--decode", "no backward"),
        (("--suite", "--batch", 3, "--causal"), "--suite", "leave out --batch, --causal"),
        (("--suite", "--tf32"), "--suite", "--tf32"),
        (("--suite", "--shapes", "batch"), "--suite", "--shapes"),
        (("--shapes", "batch", "--seqlen", 9), "--shapes", "--seqlen"),
        (("--shapes", "nothing"), "--shapes", "BATCHxHEADSxLENGTHxHEAD_DIM"),
        (("--shapes", "1x6/4x8x16"), "--shapes", "key heads"),
        (("--tf32",), "--tf32", "CPU"),
        (("--tf32", "--dtype", "bfloat16"), "--tf32", "float32"),
        (("--no-warp-specialize", "--path", "hopper"), "--no-warp-specialize", "hopper"),
        (("--plot", "sweep.txt"), "--plot", "ends in"),
        (("--json", "none/run.json"), "--json", "folder"),
        (("--plot", "x.png", "--json", "./x.png"), "--plot", "--json is written to"),
        (("--peers", "flash9"), "--peers", "flash2"),
    ],
)
def test_refusals_name_the_option(flags: tuple[Any, ...], option: str, words: str) -> None:
    line = refused("attention", *flags)
    assert f"'{option}'" in line and words in line


def test_a_case_too_large_for_the_memory_names_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def contest_without_memory(*_: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(contest_command, "contest", contest_without_memory)
    result = bench("attention", *TINY)
    assert result.exit_code == 2 and "'--batch': 2x4/2x24x16 does not fit" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("spoil", "close"),
    [(lambda out, q: out + 0.001, "True"), (lambda out, q: out * 1.2, "False"), (lambda out, q: out / 0, "not finite")],
    ids=["slightly", "far", "infinite"],
)
def test_what_is_wrong_is_marked_and_never_best(spoil: Any, close: str) -> None:
    forward, _ = _measured(OURS, _contender("flash2", spoil), PEERS["math"])
    liar, plain = forward.peers
    assert liar.status == WRONG and len(liar.rounds_ms) == 2
    fast = dataclasses.replace(forward, peers=(dataclasses.replace(liar, rounds_ms=(1e-9, 1e-9)), plain))
    assert fast.best_peer is plain and torch_peer(fast) is plain, "PyTorch's other attention stands in"
    report = Report.from_json(dataclasses.replace(_report(), measurements=(fast,)).to_json())
    row = next(row for row in attention_tables(report)[0].rows if row[0] == "flash2")
    assert close in row and row[-1] == "outside"
    (notes,) = (table.notes for table in attention_tables(report))
    assert any(note.startswith("flash2 is wrong: out (2x4/2x24x16c)") for note in notes)


class _HalvedQueryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        return dout, dout


def test_a_wrong_gradient_is_seen_by_itself() -> None:
    liar = _contender("flash2", _HalvedQueryGradient.apply)
    forward, backward = _measured(OURS, liar, PEERS["math"])
    assert forward.peers[0].status == OK and forward.peers[0].to_ours.close
    assert backward.peers[0].status == WRONG and backward.peers[0].note.startswith("dq (")
    assert not backward.peers[0].to_ours.close and backward.best_peer is backward.peers[1]


def test_wrong_ours_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    liar = _contender("vk", lambda out, q: out * 1.01)
    monkeypatch.setitem(ROOMS, "attention", dataclasses.replace(ROOM, ours=liar))
    result = bench("attention", *TINY)
    assert result.exit_code == 1 and "vk: attention is wrong on 2x4/2x24x16, forward" in result.stderr
    assert "vk is wrong: out (" in result.stdout and "as fast as" not in result.stdout


def test_gate_looks_at_the_case_itself() -> None:
    """A contender that is wrong only where it is long, and only in the last sequence: a short case would miss it."""
    (case,) = find_dense_cases(["2x2/1x1500x8"])
    assert shorten_dense(case, 2**22).length < 1500

    def spoil(out: Tensor, q: Tensor) -> Tensor:
        return torch.cat((out[:1], out[1:] * 1.1)) if out.shape[2] >= 1500 else out

    trials = ROOM.trials(case, torch.float32, CPU, False)
    assert [trial.label for trial in trials][1] == "2x2/1x1500x8, the last of 1 key heads"
    right = [trial.look("out", OURS.bind(trial.case, trial.inputs).results(False)["out"]) for trial in trials]
    spoiled = _contender("peer", spoil)
    wrong = [trial.look("out", spoiled.bind(trial.case, trial.inputs).results(False)["out"]) for trial in trials]
    errors = [
        [(out - trial.reference["out"]).abs().max().item() for out, trial in zip(outs, trials, strict=True)]
        for outs in (right, wrong)
    ]
    assert max(errors[0]) < 1e-5 and errors[1][0] < 1e-5 < 1e-3 < errors[1][1]


@pytest.mark.parametrize("options_of_case", [{"alibi": 1, "sinks": True}, {"alibi": 2}, {"dropout_p": 0.2}], ids=str)
def test_cuts_of_a_case_keep_the_options_of_their_heads(
    options_of_case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("torch_ops.bench.rooms.attention.room_for_truth", lambda device: (2**14, 2**20))
    case = DenseCase("case", "", 3, 4, 150, 16, num_k_heads=2, options={**options_of_case, "causal": True})
    trials = ROOM.trials(case, torch.float32, CPU, True)
    assert len(trials) == (1 if "dropout_p" in options_of_case else 2)
    for trial in trials:
        results = OURS.bind(trial.case, trial.inputs).results(True)
        for name, truth in trial.reference.items():
            torch.testing.assert_close(trial.look(name, results[name]).double(), truth, atol=1e-4, rtol=1e-4)


def test_bench_cases_are_those_asked_for() -> None:
    shapes = {dense_notation(case): case.name for case in ROOM.cases((), CUDA)}
    for shape in ("2x8/4x1024x128", "32x10x2048x128", "8x32x2048x128", "4x32x1024x64", "1x8x512x64", "8x32/8x2048x128"):
        assert shapes[f"{shape}c"] == f"{shapes[shape]}_causal"
    assert {"4x16x4096x64", "4x8x11000/10000x64"} <= shapes.keys()
    assert ROOM.profiled((), CUDA)[0].name in shapes.values()
    assert {peer.name for peer in ROOM.peers} >= set(ROOM.default_peers(CUDA))
    assert options.find_peers(ROOM, [], CPU) == (AS_FP16, PEERS["math"])


def test_notation_reads_back() -> None:
    for case in DENSE:
        if min(case.batch, case.length, 1 if case.k_length is None else case.k_length):
            (again,) = find_dense_cases([dense_notation(case)])
            for name in ("batch", "num_heads", "length", "head_dim"):
                assert getattr(again, name) == getattr(case, name)
            assert dense_notation(again) == dense_notation(case)
    assert [case.name for case in find_dense_cases(["b4h32*,1x2x3x8"])] == [
        "b4h32s1024d64_causal", "b4h32s1024d64", "1x2x3x8",
    ]  # fmt: skip


def test_cost_is_that_of_the_same_segments() -> None:
    (dense,), (packed,) = ROOM.cases(["3x4/2x40x16c"], CPU), ROOMS["window_attn"].cases(["3x40x4/2x16c"], CPU)
    inputs = ROOMS["window_attn"].inputs(packed, torch.bfloat16, CPU, 0)
    for backward in (False, True):
        cost = ROOM.cost(ROOM.inputs(dense, torch.bfloat16, CPU, 0), backward)
        other = ROOMS["window_attn"].cost(inputs, backward)
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
    (case,) = find_dense_cases([shape])
    for name, peer in PEERS.items():
        said = peer.refuses(case, torch.bfloat16, CUDA)
        if name in refused_by or name != "flash4":
            assert refused_by[name] in said if name in refused_by else said == ""
        assert peer.refuses(case, torch.float32, CUDA) or name in ("efficient", "math", "reference")
    assert AS_FP16.refuses(case, torch.bfloat16, CUDA) and AS_BF16.refuses(case, torch.bfloat16, CUDA)


@pytest.mark.parametrize("shape", ["2x4/2x24x16c", "2x2x24x16", "1x2x20/40x16c", "1x2x1/40x16c"])
def test_peers_are_right(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels of PyTorch stood in for by its plain products, FlashAttention-4 by the reference."""
    seen = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, None]:
        seen.append((q.shape, k.shape, causal))
        heads_first = (each.transpose(1, 2) for each in (q, k, v))
        return references.attention(*heads_first, causal=causal)[0].transpose(1, 2).contiguous(), None

    plain, select = torch.nn.attention.SDPBackend.MATH, torch.nn.attention.sdpa_kernel
    monkeypatch.setattr(dense_peers, "sdpa_kernel", lambda backend: select(plain))
    monkeypatch.setattr(dense_peers, "flash4_function", lambda name: flash_attn_func)
    rivals = [dataclasses.replace(peer, refuses=lambda case, dtype, device: "") for peer in DENSE_PEERS]
    for one in _measured(OURS, *rivals, shape=shape):
        assert {peer.status for peer in one.peers} == {OK}, one.peers
    (case,) = find_dense_cases([shape])
    inputs = make_dense_inputs(case, torch.float32)
    assert seen[0] == (inputs.q.transpose(1, 2).shape, inputs.k.transpose(1, 2).shape, "causal" in case.options)


def test_a_case_of_nothing_has_no_difference() -> None:
    (case,) = find_dense_cases(["no_rows"])
    for one in contest(ROOM, case, (OURS, PEERS["math"], PEERS["reference"]), TERMS):
        assert [peer.status for peer in one.peers] == [UNAVAILABLE, OK] and one.peers[0].note == "is empty"
        assert one.peers[1].to_ours is None or one.peers[1].to_ours.max_abs < 1e-5


@pytest.mark.parametrize("name", ["dq", "dv"])
def test_a_gradient_that_is_not_a_number_is_no_small_difference(name: str) -> None:
    def bind(case: DenseCase, inputs: DenseInputs) -> Call:
        call = OURS.bind(case, inputs)
        call.inputs[name[1:]].register_hook(lambda gradient: gradient * torch.nan)
        return call

    _, backward = _measured(OURS, Contender("peer", bind, lambda case, dtype, device: "", lambda: "peer"))
    assert backward.peers[0].status == WRONG
    assert backward.peers[0].to_ours.max_abs is None and not backward.peers[0].to_ours.close


def test_a_peer_of_another_device_is_unavailable() -> None:
    for one in _measured(OURS, *(PEERS[name] for name in ("cudnn", "flash2", "flash4"))):
        assert [peer.status for peer in one.peers] == [UNAVAILABLE] * 3 and one.best_peer is torch_peer(one) is None
        assert all(peer.to_ours is None for peer in one.peers)


def test_a_brief_sample_is_one_call() -> None:
    calls: list[int] = []
    timer = make_timer([lambda: calls.append(0), lambda: calls.append(1)], CPU, briefly=True)
    calls.clear()
    assert all(timer.sample() >= 0 for _ in range(5)) and calls == [0, 1, 0, 1, 0]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_what_the_makefile_measures_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []

    def note(runs: Any, terms: Terms, out: Path, *_: Any) -> Report:
        asked.append((len(runs), out.name))
        return dataclasses.replace(golden_report(), measurements=(), profiles=(), host=())

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(attention_command, "contests", note)
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "ARGS"}
    made = subprocess.run(
        ["make", "-n", "figures-attention"], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True,
        env=environment,
    ).stdout  # fmt: skip
    for line in made.splitlines():
        _, is_bench, arguments = line.partition(" -m torch_ops.bench ")
        if is_bench:
            result = bench(*shlex.split(arguments))
            assert result.exit_code == 0, result.output
    assert [count for count, _ in asked] == [len(suite_rows(TERMS)), 3, 3, 1, 1]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"<!-- vk bench table --suite --if-measured results/{name} -->" in page for _, name in asked)
    for name in ("attention_decode", "attention_decode_fp16"):
        assert f"<!-- vk bench table --if-measured results/h200_{name}.json -->" in page


def test_other_commands_know_the_room() -> None:
    host = bench("host", "attention", "--markdown")
    assert host.exit_code == 0 and "### attention, host time per call" in host.stdout, host.output
    profiled = bench("profile", "attention", "--shapes", "1x2x24x16", "--backward")
    assert profiled.exit_code == 0 and "vk::attention" in profiled.stdout, profiled.output
    assert "computes in fp16" in AS_FP16.yardstick


def _report() -> Report:
    return dataclasses.replace(golden_report(), profiles=(), host=())
