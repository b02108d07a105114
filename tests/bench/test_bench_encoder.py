"""The bench of the whole encoder: who is right, what is compiled how often, what the command writes."""

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from compile_tests.models import tiny_tower
from tests.bench import encoder_bench
from tests.bench.encoder_bench import BY_NAME, CPU, TINY, TRAINED
from torch_ops.bench.commands import encoder
from torch_ops.bench.encoder import contest as encoder_contest
from torch_ops.bench.encoder import peers as encoder_peers
from torch_ops.bench.encoder.contenders import CONTENDERS, Bound, EncoderContender
from torch_ops.bench.encoder.contest import Entry, contest_row, may_win
from torch_ops.bench.encoder.rows import (
    ROWS,
    SMOKE,
    Row,
    Scene,
    Session,
    count_flops,
    find_rows,
    make_scene,
    transformers_metadata,
)
from torch_ops.bench.measure.results import FAILED, OK, UNAVAILABLE, WRONG, Report
from torch_ops.command import app as cli
from torch_ops.testing import references

pytestmark = pytest.mark.no_interpret
quick, session, stand_ins = encoder_bench.quick, encoder_bench.session, encoder_bench.stand_ins


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
    assert ran == {"vk", "vk_ready", "hf", "hf_ready", *([] if row.training else ["vk_graph", "vk_graph_new"])}
    for name, timed in everyone.items():
        assert bool(timed.rounds_ms) == (name in ran) and timed.peak_bytes is None
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
    runnable = [dataclasses.replace(BY_NAME[name], refuses=lambda scene: "") for name in names]
    made = contest_row(scene, runnable, 2, str)
    assert {timed.name: timed.note for timed in (*made.ours, *made.uncaptured)} == dict.fromkeys(names, "")


@pytest.mark.gpu
@pytest.mark.slow
def test_everyone_is_right_on_a_gpu() -> None:
    small = Row("small", ((1, 16, 16), (1, 16, 16))), Row("mixed", ((1, 16, 8), (2, 16, 16)))
    tower = tiny_tower("qwen3_vl_vision", torch.bfloat16)
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config)
    tower = tower.cuda()
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
    assert "tiny: kept" in again.stderr and "measured anew" not in again.stderr
    other = run("encoder", "--device", "cpu", *options, "--resume", "--commit", "other")
    assert other.exit_code == 2 and "of another commit, abc" in other.stderr


def test_rows_of_another_kind_are_not_taken_for_done(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    options = ("--rows", "tiny", "--out", out)

    def told(*more: object) -> str:
        result = encoded(*options, "--resume", *more)
        assert result.exit_code == 0, result.output
        return str(result.stderr)

    assert encoded(*options, "--contenders", "vk,hf", "--quick").exit_code == 0
    (quick_look,) = Report.from_json(out.read_text()).encoders
    assert {len(timed.rounds_ms) for timed in quick_look.everyone} == {2}
    assert "tiny: kept" in told("--contenders", "vk", "--quick")
    assert "tiny: measured anew" in told("--contenders", "vk,hf"), "after a quick look"
    assert "tiny: kept" in told("--contenders", "vk")
    assert "tiny: measured anew" in told("--contenders", "vk,hf_ready"), "of other contenders"
    assert "tiny: measured anew" in told("--contenders", "vk", "--dtype", "float16")
    report = Report.from_json(out.read_text())
    (row,) = report.encoders
    assert (row.dtype, [timed.name for timed in row.everyone]) == ("float16", ["vk"])
    other = dataclasses.replace(report, encoders=(dataclasses.replace(row, path="hopper"),))
    out.write_text(other.to_json())
    assert "tiny: measured anew" in told("--contenders", "vk", "--dtype", "float16"), "of another path"


def test_a_group_is_chosen_by_its_name_and_a_quick_look_is_at_two(tmp_path: Path) -> None:
    def names(*options: object) -> list[str]:
        out = tmp_path / "run.json"
        result = encoded("--rows", "tiny", "--out", out, *options)
        assert result.exit_code == 0, result.output
        (row,) = Report.from_json(out.read_text()).encoders
        return [timed.name for timed in row.everyone]

    ours = [each.name for each in CONTENDERS if each.group == "ours"]
    graphs = ["graph_cudnn", "graph_flash2", "graph_flash4"]
    assert names("--contenders", "ours,graph_*") == names("--quick") == [*ours, *graphs]
    assert names("--contenders", "assembled,vk") == ["vk", *graphs]


def test_peers_without_a_chance_are_not_timed_in_all_rounds(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = {
        "vk": 9.0,
        "vk_ready": 1.0,
        "hf": 2.0,
        "hf_ready": 1.5,
        "hf_flash2": 1.9,
        "hf_cudnn": 0.1,
        "graph_flash2": 7.0,
    }
    entries = [Entry(BY_NAME[name]) for name in looks]
    entries[5].status = WRONG
    assert may_win(entries, looks) == {"vk", "vk_ready", "hf_ready", "hf_flash2", "graph_flash2"}
    contenders = BY_NAME["vk"], BY_NAME["hf"], BY_NAME["hf_ready"]
    scene = make_scene(session, TINY)
    # Two take turns in whole cycles of two rounds.
    for slow_ms, count in ((1e9, 12), (0.0, 8)):
        monkeypatch.setattr(encoder_contest, "SLOW_MS", slow_ms)
        monkeypatch.setattr(encoder_contest, "may_win", lambda entries, looks: {"vk", "hf_ready"})
        made = contest_row(scene, contenders, 6, str)
        assert {timed.name: len(timed.rounds_ms) for timed in made.everyone} == {
            "vk": count,
            "hf": 2,
            "hf_ready": count,
        }


def test_weighing_looks_for_new_garbage_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, stood in for: what fails is marked, and afterwards everything is looked through again."""
    frozen: list[int] = []

    def weighed(scene: Any, entry: Entry) -> int:
        frozen.append(gc.get_freeze_count())
        if entry.contender.name == "hf":
            raise RuntimeError("out of memory")
        return 5

    monkeypatch.setattr(encoder_contest, "_peak_bytes", weighed)
    monkeypatch.setattr(encoder_contest, "synchronize", lambda device: None)
    entries = [Entry(BY_NAME[name], work=lambda: None) for name in ("vk", "hf", "hf_ready")]
    encoder_contest._weigh(cast(Scene, SimpleNamespace(device=torch.device("cuda"))), entries)
    assert [(entry.status, entry.peak) for entry in entries] == [(OK, 5), (FAILED, None), (OK, 5)]
    assert min(frozen) > 0 and gc.get_freeze_count() == 0


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
