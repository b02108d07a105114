"""The benchmark of the whole encoder: what is right, what is compiled how often, what the command writes."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from compile_tests.models import tiny_tower
from tests.bench import encoder_bench
from tests.bench.encoder_bench import BY_NAME, TINY, TRAINED, measured, runnable
from tests.bench.verify import CPU, bench
from torch_ops.bench.commands import encoder
from torch_ops.bench.encoder import peers as encoder_peers
from torch_ops.bench.encoder.impls import IMPLS, Bound, EncoderCall
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
from torch_ops.bench.measure.opbench import Impl
from torch_ops.bench.measure.results import FAILED, OK, UNAVAILABLE, WRONG, Record, Report
from torch_ops.testing import references

pytestmark = pytest.mark.no_interpret
quick, session, stand_ins = encoder_bench.quick, encoder_bench.session, encoder_bench.stand_ins


def encoded(*arguments: object) -> Any:
    return bench("encoder", "--device", "cpu", "--rounds", 2, "--commit", "abc", *arguments)


def changed(name: str, change: Callable[[Bound], Bound]) -> Impl:
    def bind(row: Row, scene: Scene) -> EncoderCall:
        return EncoderCall(scene, change(BY_NAME[name].bind(row, scene).bound))

    return dataclasses.replace(BY_NAME[name], bind=bind)


def broken(bound: Bound) -> Bound:
    raise RuntimeError("no kernel\nfor this")


def test_batches_are_those_of_the_models() -> None:
    patches = {row.name: sum(row.segments) for row in ROWS}
    assert patches == {
        "448": 784, "896": 3136, "1504x640": 3760, "8x896": 25088, "video16x448": 6272, "mixed": 12740,
        "video64x448": 25088, "train_448": 784, "train_8x896": 25088,
    }  # fmt: skip
    assert [row.name for row in ROWS if row.training] == ["train_448", "train_8x896"]
    assert {row.name: row.shape for row in ROWS}["mixed"] == "784+1764+3136+7056"
    assert find_rows((), torch.device("cuda")) == ROWS and find_rows((), CPU) == SMOKE


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
    found = measured(session, row, IMPLS)
    assert found.keys() == {each.name for each in IMPLS if row.direction in each.directions}
    ran = {name for name, one in found.items() if one.status == OK}
    everywhere = {"vk", "vk_ready", "vk_default", "vk_default_eager", "hf", "hf_ready"}
    assert ran == everywhere | (set() if row.training else {"vk_graph", "vk_graph_new"})
    for name, one in found.items():
        assert bool(one.rounds_ms) == (name in ran) and one.peak_bytes is None
        assert name in ran or (one.status, one.note) == (UNAVAILABLE, "needs a GPU")
        assert (one.path, one.direction, one.timer) == ("reference", row.direction, "wall" * (name in ran))
        assert one.flops > 0 and len(one.reports) <= 6
    assert all(parameter.grad is None for parameter in session.tower.parameters()) != row.training


def test_what_is_off_or_raises_is_marked(session: Session) -> None:
    def off(bound: Bound) -> Bound:
        def encode() -> Any:
            last, pooled, taps = bound.encode()
            return last, pooled * 1.01, taps

        return Bound(encode)

    wrong, failed = measured(session, TINY, (changed("vk", off), changed("vk_ready", broken))).values()
    assert wrong.status == WRONG and wrong.note.startswith("pooler_output") and wrong.rounds_ms
    assert failed.status == FAILED and failed.note.endswith("RuntimeError: no kernel for this") and not failed.rounds_ms


def test_a_wrong_gradient_of_queries_is_found_in_a_training_step(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FlashAttention-4 has it on Hopper."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, runs: Any) -> Tensor:
        q = q.clone()
        if q.requires_grad:
            q.register_hook(lambda dq: dq.flip(0))
        return references.window_attn(q, k, v, cu_seqlens)[0]

    monkeypatch.setitem(encoder_peers.ATTENTIONS, "flash4", attend)
    found = {row.name: measured(session, row, runnable("hf_flash4"))["hf_flash4"] for row in SMOKE}
    assert {name: one.status for name, one in found.items()} == {"tiny": OK, "train_tiny": WRONG}
    note = found["train_tiny"].note
    assert "d blocks" in note and "qkv" in note


@pytest.mark.parametrize("row", SMOKE, ids=lambda row: row.name)
def test_whatever_is_not_captured_is_right(session: Session, stand_ins: list[str], row: Row) -> None:
    names = [name for name in BY_NAME if "graph" not in name and "reduced" not in name]
    found = measured(session, row, runnable(*names))
    assert {name: one.note for name, one in found.items()} == dict.fromkeys(names, "")


@pytest.mark.gpu
@pytest.mark.slow
def test_everyone_is_right_on_a_gpu() -> None:
    small = Row("small", ((1, 16, 16), (1, 16, 16))), Row("mixed", ((1, 16, 8), (2, 16, 16)))
    tower = tiny_tower("qwen3_vl_vision", torch.bfloat16)
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config)
    tower = tower.cuda()
    session = Session(tower)
    for row in (*small, Row("train", small[0].grid, training=True)):
        for name, one in measured(session, row, IMPLS).items():
            wrong_by_design = row.training and "flash4" in name
            assert one.status in (OK, UNAVAILABLE) or wrong_by_design, one
            assert one.status != UNAVAILABLE or "flash4" in name
            if one.status == OK and "reduced" not in name:
                assert one.peak_bytes is not None and one.peak_bytes > sum(p.nbytes for p in tower.parameters())


def records(file: Path) -> tuple[Record, ...]:
    return Report.from_json(file.read_text()).records


def test_command_writes_row_by_row_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    options = ("--contenders", "vk,hf*,graph_flash2", "--out", out)
    result = encoded(*options, "--rows", "tiny", "--markdown")
    assert result.exit_code == 0, result.output
    report = Report.from_json(out.read_text())
    assert report.provenance.commit == "abc" and "flash2" in report.provenance.baselines
    assert Report.from_json(report.to_json()) == report
    assert "| vk | ours |" in result.stdout
    assert re.search("graph_flash2[^:]*: unavailable, needs a GPU", result.stdout)
    again = encoded(*options, "--resume")
    assert again.exit_code == 0, again.output
    assert records(out)[: len(report.records)] == report.records
    assert {one.case for one in records(out)} == {"tiny", "train_tiny"}
    assert "tiny: kept" in again.stderr and "measured anew" not in again.stderr
    other = bench("encoder", "--device", "cpu", *options, "--resume", "--commit", "other")
    assert other.exit_code == 2 and "of another commit, abc" in other.stderr
    for more in (("--dtype", "float16"), ("--contenders", "vk,hf_ready")):
        told = encoded("--rows", "tiny", "--out", out, "--resume", "--contenders", "vk", *more)
        assert told.exit_code == 0 and "tiny: measured anew" in told.stderr, told.output
    assert [one.name for one in records(out) if one.case == "tiny"] == ["vk", "hf_ready"]


def test_a_group_is_chosen_by_its_name_and_a_quick_look_is_at_two(tmp_path: Path) -> None:
    def names(*options: object) -> list[str]:
        out = tmp_path / "run.json"
        result = encoded("--rows", "tiny", "--out", out, *options)
        assert result.exit_code == 0, result.output
        return [one.name for one in records(out)]

    ours = [each.name for each in IMPLS if each.group == "ours"]
    graphs = ["graph_cudnn", "graph_flash2", "graph_flash4"]
    assert names("--contenders", "ours,graph_*") == names("--quick") == [*ours, *graphs]


def test_command_refuses_and_tells_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "train_8x896" in encoded("--rows", "9").stderr
    assert "hf_flash2_blocks" in encoded("--contenders", "flash9").stderr
    skipped = encoded("--rows", "train_tiny", "--contenders", "vk_graph")
    assert skipped.exit_code == 0 and "train_tiny: skipped" in skipped.stderr
    assert "folder" in encoded("--out", tmp_path / "none" / "run.json").stderr
    assert "a timeline needs a GPU" in bench("timeline", "--device", "cpu", "--out", tmp_path / "t.json").stderr
    monkeypatch.setattr(encoder, "IMPLS", (changed("vk", broken),))
    result = encoded("--rows", "tiny")
    assert result.exit_code == 1 and "vk: encoder failed on tiny, forward, vk: tiny" not in result.stdout
    assert "RuntimeError: no kernel for this" in result.stderr
