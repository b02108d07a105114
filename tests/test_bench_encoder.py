"""The bench of the whole encoder: who is right, what is compiled how often, what the command writes."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
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

from compile_tests.models import tiny_tower
from torch_ops import cli
from torch_ops.bench import encoder, encoder_contest, encoder_peers, timing
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
from torch_ops.bench.results import FAILED, OK, UNAVAILABLE, WRONG, Ceilings, Report
from torch_ops.testing import check, references

pytestmark = pytest.mark.no_interpret

CPU = torch.device("cpu")
TINY, TRAINED = SMOKE
BY_NAME = {contender.name: contender for contender in CONTENDERS}


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


def test_flash4_leaves_a_compiled_block_whole(session: Session, stand_ins: list[str], monkeypatch: Any) -> None:
    """Its package stood in for by the reference."""

    def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, **named: Any) -> Any:
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        return references.window_attn(q, k, v, cu_seqlens_q)[0], None

    def batched(q: Tensor, k: Tensor, v: Tensor) -> Any:
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return functional.scaled_dot_product_attention(*heads_first).transpose(1, 2).contiguous(), None

    interface = SimpleNamespace(flash_attn_func=batched, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setitem(encoder_peers.ATTENTIONS, "flash4", encoder_peers.attend_flash4)
    names = [name for name in BY_NAME if name.startswith("hf_flash4")]
    peers = [dataclasses.replace(BY_NAME[name], refuses=lambda scene: "") for name in names]
    for row in (TINY, Row("equal", ((1, 4, 4), (1, 4, 4))), TRAINED):
        made = contest_row(make_scene(session, row), peers, 2, str)
        assert {timed.name: timed.note for timed in made.uncaptured} == dict.fromkeys(names, "")
        if not row.training:
            assert set(stand_ins) == {"Qwen3VLVisionBlock.forward"} and len(stand_ins) == 1 + (row is not TINY)


def test_twins_share_parameters_and_leave_the_tower_alone(session: Session, stand_ins: list[str]) -> None:
    made = encoder_peers.twin(session, "cudnn", compiled=True)
    theirs = dict(session.tower.named_parameters())
    for name, parameter in made.named_parameters():
        assert parameter is theirs[name], name
    assert type(session.tower.blocks[0].attn).__name__ == "Qwen3VLVisionAttention"
    assert "forward" not in session.tower.blocks[0].__dict__
    make_scene(session, TRAINED)
    assert made.training and session.encoder.training


@pytest.mark.parametrize("name", ["vk_graph", "graph_flash2"])
def test_a_graph_that_writes_nothing_is_wrong(
    session: Session, stand_ins: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """CUDA stood in for: a call copies its pixels in and replays, and what the capture left does not count."""
    replayed: list[int] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: replayed.append(1), pool=lambda: (0, 1))
    for attribute, value in {
        "Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": lambda: graph,
        "stream": contextlib.nullcontext, "graph": lambda *args, **named: contextlib.nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, attribute, value)
    scene = make_scene(session, TINY)
    contender = dataclasses.replace(BY_NAME[name], refuses=lambda scene: "")
    made = contest_row(scene, (contender,), 2, str)
    (timed,) = (*made.ours, *made.assembled)
    assert timed.status == WRONG and "entries are not finite" in timed.note and replayed
    bound = contender.bind(scene)
    static, *held = bound.held
    assert static.data_ptr() != scene.pixels.data_ptr() and torch.equal(static, scene.pixels)
    assert len(held) == (3 if name == "graph_flash2" else 0)
    segments = [{"segment_pool_id": (0, 1), "total_size": 5}, {"segment_pool_id": (0, 0), "total_size": 7}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert encoder_contest._held_bytes(bound) == 5 + sum(tensor.nbytes for tensor in bound.held)


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
