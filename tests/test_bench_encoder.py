"""The bench of the whole encoder: who is right, what is compiled how often, what tables and the timeline show."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from compile_tests.models import tiny_tower
from torch_ops import cli
from torch_ops.bench import documents, encoder, encoder_contest, encoder_peers, timing
from torch_ops.bench.app import app
from torch_ops.bench.encoder_contenders import CONTENDERS, Bound, EncoderContender
from torch_ops.bench.encoder_contest import contest_row
from torch_ops.bench.encoder_peers import Assembly
from torch_ops.bench.encoder_rows import (
    ROWS,
    SMOKE,
    Row,
    Scene,
    Session,
    count_flops,
    find_rows,
    make_scene,
    make_tower,
    named_features,
    transformers_metadata,
    truths,
)
from torch_ops.bench.results import FAILED, OK, UNAVAILABLE, WRONG, Ceilings, EncoderRow, Provenance, Report, Timed
from torch_ops.bench.timeline import KINDS, Lane, Timeline, bars, kernels_of, kind_of, read_timeline
from torch_ops.testing import check, references

pytestmark = pytest.mark.no_interpret

CPU = torch.device("cpu")
TINY, TRAINED = SMOKE
BY_NAME = {contender.name: contender for contender in CONTENDERS}
ORIGIN = Provenance("2030", "abc", "vk bench encoder", "NVIDIA H200", "580", {"torch": "2.11"}, {"vk": "ours"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(timing, "CPU_ROUND_MS", 0.5)
    monkeypatch.setattr(encoder_contest, "MOST_CALLS", 1)
    monkeypatch.setattr(encoder, "measure_ceilings", lambda device, dtype: Ceilings(10.0, 0.1, "float32"))
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    # What is so small has nothing to share out.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def session() -> Session:
    torch.manual_seed(0)
    return Session(make_tower(CPU, torch.float32))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """cuDNN's way of attention, by PyTorch's own, for all; compilers that only capture; whose graphs they were."""
    captured: list[str] = []

    class Captured:
        def __init__(self, function: Any, fullgraph: bool, dynamic: bool | None) -> None:
            self.compiled = compiler(function, backend=self.note, fullgraph=fullgraph, dynamic=dynamic)
            self.name = getattr(function, "__qualname__", type(function).__name__)

        def note(self, module: Any, inputs: Any) -> Any:
            captured.append(self.name)
            return module

        def __call__(self, *args: Any, **named: Any) -> Any:
            return self.compiled(*args, **named)

    def compile_(function: Any, fullgraph: bool = False, dynamic: bool | None = None, mode: str | None = None) -> Any:
        return Captured(function, fullgraph, dynamic)

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(encoder_peers, "SDPBackend", SimpleNamespace(CUDNN_ATTENTION=SDPBackend.MATH))
    for name in encoder_peers.ATTENTIONS:
        monkeypatch.setitem(encoder_peers.ATTENTIONS, name, encoder_peers.attend_cudnn)
    return captured


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def encoded(*arguments: object) -> Any:
    return run("encoder", "--device", "cpu", "--rounds", 2, "--commit", "abc", *arguments)


def changed(name: str, change: Callable[[Scene, Bound], Bound]) -> EncoderContender:
    contender = BY_NAME[name]
    return dataclasses.replace(contender, bind=lambda scene: change(scene, contender.bind(scene)))


def test_batches_are_those_of_the_models() -> None:
    patches = {row.name: sum(row.segments) for row in ROWS}
    assert patches == {
        "448": 784, "896": 3136, "8x896": 25088, "video16x448": 6272, "mixed": 12740, "video64x448": 25088,
        "train_8x896": 25088,
    }  # fmt: skip
    assert [row.name for row in ROWS if row.training] == ["train_8x896"]
    assert {row.name: row.shape for row in ROWS}["mixed"] == "784+1764+3136+7056"
    assert find_rows((), torch.device("cuda")) == ROWS and find_rows((), CPU) == SMOKE
    with pytest.raises(ValueError, match="no case is called '9x9'; give some of 448, 896"):
        find_rows(["9x9"], CPU)


def test_flops_are_those_of_the_products(session: Session) -> None:
    scene = make_scene(session, TINY)
    ready = transformers_metadata(scene)
    # The CPU's own attention is not counted.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        session.tower(scene.pixels, grid_thw=scene.grid, **ready)
    assert count_flops(scene) == counter.get_total_flops()
    assert 3 * count_flops(scene) < count_flops(make_scene(session, TRAINED)) < 3.5 * count_flops(scene)


@pytest.mark.parametrize("row", SMOKE, ids=lambda row: row.name)
def test_a_cpu_runs_what_is_eager_and_says_of_the_rest_why_not(session: Session, row: Row) -> None:
    said: list[str] = []
    made = contest_row(make_scene(session, row), CONTENDERS, 2, said.append)
    everyone = {timed.name: timed for timed in (*made.ours, *made.uncaptured, *made.assembled)}
    assert everyone.keys() == BY_NAME.keys()
    ran = {name for name, timed in everyone.items() if timed.status == OK}
    assert ran == {"vk", "vk_ready", "hf", "hf_ready"}
    for name, timed in everyone.items():
        assert (len(timed.rounds_ms) == 4) == (name in ran) and timed.peak_bytes is None
        if name not in ran:
            assert timed.status == UNAVAILABLE and timed.note in ("needs a GPU", "is for inference")
    assert made.path == "reference" and made.direction == row.direction and made.flops > 0
    assert any("vk: ok, ready after" in line for line in said)
    assert all(parameter.grad is None for parameter in session.tower.parameters()) != row.training


def test_what_is_off_or_raises_is_marked(session: Session) -> None:
    def off(scene: Scene, bound: Bound) -> Bound:
        def encode() -> Any:
            last, pooled, taps = bound.encode()
            return last, pooled * 1.01, taps

        return Bound(encode)

    def broken(scene: Scene, bound: Bound) -> Bound:
        raise RuntimeError("no kernel\nfor this")

    made = contest_row(make_scene(session, TINY), (changed("vk", off), changed("vk_ready", broken)), 2, str)
    wrong, failed = made.ours
    assert wrong.status == WRONG and "1 of 3 tensors: pooler_output: outside the rule" in wrong.note and wrong.rounds_ms
    assert failed.status == FAILED and failed.note == "RuntimeError: no kernel for this" and not failed.rounds_ms


class _WrongQueryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, dq: Tensor) -> Tensor:
        return dq.flip(0)


def test_a_wrong_gradient_of_queries_is_found_in_a_training_step(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FlashAttention-4 has it on Hopper."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, runs: Any) -> Tensor:
        return references.window_attn(_WrongQueryGradient.apply(q), k, v, cu_seqlens)[0]

    monkeypatch.setitem(encoder_peers.ATTENTIONS, "flash4", attend)
    peer = dataclasses.replace(BY_NAME["hf_flash4"], refuses=lambda scene: "")
    statuses = {}
    for row in SMOKE:
        (timed,) = contest_row(make_scene(session, row), (peer,), 2, str).uncaptured
        statuses[row.name] = timed.status
    assert statuses == {"tiny": OK, "train_tiny": WRONG}
    assert "d blocks" in timed.note and "qkv" in timed.note


@pytest.mark.parametrize("row", SMOKE, ids=lambda row: row.name)
def test_whatever_is_not_captured_is_right(session: Session, stand_ins: list[str], row: Row) -> None:
    scene = make_scene(session, row)
    names = [name for name in BY_NAME if "graph" not in name and "reduced" not in name]
    if row.training:
        names.remove("hf_compiled")
    runnable = [dataclasses.replace(BY_NAME[name], refuses=lambda scene: "") for name in names]
    made = contest_row(scene, runnable, 2, str)
    assert {timed.name: timed.note for timed in (*made.ours, *made.uncaptured)} == dict.fromkeys(names, "")


def test_one_block_is_compiled_for_all_that_share_it(session: Session, stand_ins: list[str]) -> None:
    with torch.no_grad():
        scene = make_scene(session, TINY)
        reference, eager = truths(scene)
        BY_NAME["hf_flash2_blocks"].bind(scene).encode()
        assert stand_ins == ["Qwen3VLVisionBlock.forward"], "of two blocks"
        assembly = Assembly(scene, "flash2")
        for _ in range(2):
            check(named_features(assembly(scene.pixels)), eager, reference)
        assert stand_ins[1:] == ["Qwen3VLVisionPatchMerger.forward"] * 2, "one before the shuffle, one after it"
        ours = BY_NAME["vk_compiled"]
        for grid in (TINY.grid, ((1, 8, 4), (1, 2, 2)), ((3, 2, 4),), ((1, 6, 6),)):
            other = make_scene(session, Row("other", grid))
            features = named_features(ours.bind(other).encode())
            check(features, *reversed(truths(other)))
    assert stand_ins[3:] == ["QwenVisionEncoder.encode_packed"] * 2, "one for all images, and one for one"


def test_twins_share_parameters_and_leave_the_tower_alone(session: Session, stand_ins: list[str]) -> None:
    made = encoder_peers.twin(session, "cudnn", compiled=True)
    theirs = dict(session.tower.named_parameters())
    for name, parameter in made.named_parameters():
        assert parameter is theirs[name], name
    assert type(session.tower.blocks[0].attn).__name__ == "Qwen3VLVisionAttention"
    assert "forward" not in session.tower.blocks[0].__dict__
    make_scene(session, TRAINED)
    assert made.training and session.encoder.training


@pytest.mark.gpu
@pytest.mark.slow
def test_everyone_is_right_on_a_gpu() -> None:
    small = Row("small", ((1, 16, 16), (1, 16, 16))), Row("mixed", ((1, 16, 8), (2, 16, 16)))
    tower = tiny_tower("qwen3_vl_vision", torch.bfloat16).cuda()
    session = Session(tower)
    for row in (*small, Row("train", small[0].grid, training=True)):
        made = contest_row(make_scene(session, row), CONTENDERS, 2, print)
        for timed in (*made.ours, *made.uncaptured, *made.assembled):
            wrong_by_design = row.training and "flash4" in timed.name
            assert timed.status in (OK, UNAVAILABLE) or wrong_by_design, timed
            assert timed.status != UNAVAILABLE or "flash4" in timed.name or timed.note == "is for inference"
            if timed.status == OK and "reduced" not in timed.name:
                assert timed.peak_bytes is not None and timed.peak_bytes > sum(p.nbytes for p in tower.parameters())


def test_command_writes_row_by_row_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    options = ("--contenders", "vk,hf*,graph_flash2", "--out", out)
    result = encoded(*options, "--rows", "tiny", "--markdown")
    assert result.exit_code == 0, result.output
    report = Report.from_json(out.read_text())
    (row,) = report.encoders
    assert report.provenance.commit == "abc" and "flash2" in report.provenance.peers
    assert Report.from_json(report.to_json()) == report
    assert "| vk | ours |" in result.stdout and "graph_flash2: unavailable, needs a GPU" in result.stdout
    again = encoded(*options, "--resume")
    assert again.exit_code == 0, again.output
    both = Report.from_json(out.read_text()).encoders
    assert both[0] == row and [each.row for each in both] == ["tiny", "train_tiny"]
    assert "tiny: kept" in again.stderr
    other = run("encoder", "--device", "cpu", *options, "--resume", "--commit", "other")
    assert other.exit_code == 2 and "of another commit, abc" in other.stderr


def test_command_refuses_and_tells_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "train_8x896" in encoded("--rows", "9").stderr
    assert "hf_flash2_blocks" in encoded("--contenders", "flash9").stderr
    assert "folder" in encoded("--out", tmp_path / "none" / "run.json").stderr
    assert "a timeline needs a GPU" in run("timeline", "--device", "cpu", "--out", tmp_path / "t.json").stderr

    def broken(scene: Scene, bound: Bound) -> Bound:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(encoder, "CONTENDERS", (changed("vk", broken),))
    result = encoded("--rows", "tiny")
    assert result.exit_code == 1 and "vk: vk is failed on tiny: RuntimeError: no kernel" in result.stderr


def timed(name: str, *ms: float, status: str = OK, note: str = "") -> Timed:
    return Timed(name, status, note, ms, "wall", 2**30)


def golden() -> Report:
    ours = (
        timed("vk", 4.0, 4.0, 5.0, 5.0),
        timed("vk_compiled", 2.1, 2.1),
        timed("vk_graph", 2.0, 2.0),
    )
    plain = timed("hf", 12.0, 12.0, 12.0, 12.0), timed("hf_flash4", 1.0, 1.0, 1.0, 1.0, status=WRONG, note="off")
    assembled = timed("graph_cudnn", 3.0, 3.0, 2.5, 2.5), Timed("graph_flash4", UNAVAILABLE, "is not installed")
    row = EncoderRow("448", "784", "forward", "bfloat16", "hopper", 800 * 10**9, ours, plain, assembled)
    step = dataclasses.replace(row, row="train_8x896", direction="training step", assembled=())
    return Report(ORIGIN, Ceilings(4000.0, 800.0, "bfloat16"), encoders=(row, step))


def test_tables_set_the_best_of_each_group_against_ours(tmp_path: Path) -> None:
    lines = documents.summary(golden()).splitlines()
    assert lines[0].startswith("| batch | patches of each frame | best of ours, ms | TFLOP/s | of matmul | compiled /")
    both = "2.00, 2.00 vk_graph | 400 | 50% | 1.05, 1.05 | 12.0, 12.0 hf | 6.00, 6.00"
    assert lines[2:4] == [
        f"| 448 | 784 | {both} | 3.00, 2.50 graph_cudnn | 1.50, 1.25 | 1024 / 1024 / 1024 |",
        f"| train_8x896, training step | 784 | {both} | - | - | 1024 / 1024 / - |",
    ]
    assert any("a training step: forward, a scalar loss" in line for line in lines)
    (tmp_path / "run.json").write_text(golden().to_json())
    table = CliRunner().invoke(app, ["table", str(tmp_path / "run.json")]).stdout
    assert "| vk | ours | 4.000 | 5.000 | 3.00, 2.40 | 0.75, 0.50 | 178 | 22% | 1024 |" in table
    assert "| hf_flash4 wrong | (a) |" in table and "- hf_flash4: wrong, off" in table
    assert "- graph_flash4: unavailable, is not installed" in table


def test_places_that_wait_for_results_stay_empty(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    text = "<!-- vk bench table {}run.json -->\n<!-- vk bench table end -->\n"
    for mark in ("--if-measured ", "--summary --if-measured "):
        document.write_text(text.format(mark))
        assert documents.refresh(document) and document.read_text() == text.format(mark)
        (tmp_path / "run.json").write_text(golden().to_json())
        assert documents.refresh(document) and "vk_graph" in document.read_text()
        (tmp_path / "run.json").unlink()
    document.write_text(text.format(""))
    with pytest.raises(ValueError, match="there are no results"):
        documents.refresh(document)


NAMES = {
    "void cutlass::device_kernel<flash::FlashAttnFwd>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
    "_attention_fwd_hopper_kernel": "attention",
    "_gemm_hopper_kernel": "matmul",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT": "matmul",
    "triton_per_fused_add_addmm_native_layer_norm_view_3": "norm",
    "_norm_fwd_kernel": "norm",
    "triton_poi_fused_addmm_gelu_view_4": "elementwise",
    "_rope_kernel": "elementwise",
    "void at::native::vectorized_elementwise_kernel<4>": "elementwise",
    "Memcpy DtoD (Device -> Device)": "copy",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_kernels_have_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def made_up(pause: float) -> dict[str, Any]:
    """Three layers of four kernels, and what ran on the host."""
    events: list[dict[str, Any]] = [{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 900.0}]
    now = 1000.0
    for _ in range(3):
        for name, duration in (("_norm_fwd_kernel", 2.0), ("gemm", 10.0), ("gemm", 5.0), ("flash_fwd", 20.0)):
            events.insert(0, {"cat": "kernel", "name": name, "ts": now, "dur": duration})
            now += duration + pause
    return {"traceEvents": [*events, {"cat": "gpu_user_annotation", "name": "x", "ts": 0.0, "dur": 1.0}, {"ph": "M"}]}


def test_a_timeline_is_stored_and_drawn(tmp_path: Path) -> None:
    dense, sparse = kernels_of(made_up(0.0)), kernels_of(made_up(4.0))
    assert [kernel.name for kernel in dense[:3]] == ["_norm_fwd_kernel", "gemm", "gemm"] and dense[0].start == 0.0
    lanes = Lane("hf_compiled", "theirs", sparse), Lane("vk_graph", "ours", dense)
    assert [lane.busy for lane in lanes] == [111.0, 111.0]
    assert [lane.end for lane in lanes] == [155.0, 111.0]
    assert lanes[1].end_of_layers(2) == 2 * 37.0 + 17.0
    assert bars(dense, 0.5)["matmul"] == [(2.0, 15.0), (39.0, 15.0), (76.0, 15.0)]
    assert len(bars(sparse, 0.5)["matmul"]) == 6
    timeline = Timeline(ORIGIN, "896", lanes)
    file = tmp_path / "timeline.json"
    timeline.write(file)
    assert read_timeline(file.read_text()) == timeline
    assert json.loads(file.read_text())["names"] == ["_norm_fwd_kernel", "flash_fwd", "gemm"]
    pictures = tmp_path / "one.svg", tmp_path / "two.svg"
    for picture in pictures:
        result = run("chart", file, picture)
        assert result.exit_code == 0, result.output
    one, two = (picture.read_text() for picture in pictures)
    assert one == two and len(one) < 100_000
    for word in (*KINDS, "gap", "hf_compiled", "vk_graph", "busy 72%", "0.111 ms, 12 kernels", "its first 2 layers"):
        assert word in one, word
    dataclasses.replace(timeline, lanes=()).write(file)
    assert "no kernels" in run("chart", file, pictures[0]).stderr
