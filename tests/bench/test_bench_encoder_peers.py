"""The encoder's baselines: what is compiled how often, which parameters they read, what a captured graph must write."""

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bench import encoder_bench
from tests.bench.encoder_bench import BY_NAME, TINY, TRAINED, bound, check_features, measured, runnable
from tests.bench.verify import FLASH4
from torch_ops.bench.encoder import impls as encoder_impls
from torch_ops.bench.encoder import peers as encoder_peers
from torch_ops.bench.encoder.impls import NO_TABLES, held_bytes
from torch_ops.bench.encoder.peers import Assembly
from torch_ops.bench.encoder.rows import Row, Scene, Session, make_scene, transformers_metadata
from torch_ops.bench.measure.results import WRONG
from torch_ops.models import _recording

pytestmark = pytest.mark.no_interpret
metadata_module = importlib.import_module("torch_ops.models.vision_metadata")
quick, session, stand_ins = encoder_bench.quick, encoder_bench.session, encoder_bench.stand_ins


def test_one_block_is_compiled_for_all_that_share_it(session: Session, stand_ins: list[str]) -> None:
    with torch.no_grad():
        scene = make_scene(session, TINY)
        bound("hf_flash2_blocks", scene).encode()
        assert stand_ins == ["Qwen3VLVisionBlock.forward"], "of two blocks"
        assembly = Assembly(scene, "flash2")
        for _ in range(2):
            check_features(assembly(scene.pixels), scene)
        assert stand_ins[1:] == ["Qwen3VLVisionPatchMerger.forward"] * 2, "one before the shuffle, one after it"
        for grid in (TINY.grid, ((1, 8, 4), (1, 2, 2)), ((3, 2, 4),), ((1, 6, 6),)):
            other = make_scene(session, Row("other", grid))
            check_features(bound("vk_compiled", other).encode(), other)
    assert stand_ins[3:] == ["QwenVisionEncoder.encode_packed"] * 2, "one for all images, and one for one"


def test_flash4_leaves_a_compiled_block_whole(session: Session, stand_ins: list[str], monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", FLASH4)
    monkeypatch.setitem(encoder_peers.ATTENTIONS, "flash4", encoder_peers.attend_flash4)
    names = [name for name in BY_NAME if name.startswith("hf_flash4")]
    for row in (TINY, Row("equal", ((1, 4, 4), (1, 4, 4))), TRAINED):
        found = measured(session, row, runnable(*names))
        assert {name: one.note for name, one in found.items()} == dict.fromkeys(names, "")
        if not row.training:
            assert set(stand_ins) == {"Qwen3VLVisionBlock.forward"} and len(stand_ins) == 1 + (row is not TINY)


def test_flash4_is_called_directly_where_nothing_is_compiled(session: Session, monkeypatch: Any) -> None:
    """An op of one's own is a trip through the dispatcher in every layer, which no user pays for."""

    class Seen(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", FLASH4)
    with torch.no_grad(), Seen() as seen:
        bound("hf_flash4", make_scene(session, TINY)).encode()
    assert seen.names and not [name for name in seen.names if name.startswith("vk_bench")]


def test_only_what_is_said_to_be_ready_is_made_before_a_call(session: Session, monkeypatch: Any) -> None:
    made: list[tuple[int, ...]] = []
    table = metadata_module.rotary_table

    def counted(grid: Tensor, *sizes: Any) -> Any:
        made.append(tuple(grid.shape))
        return table(grid, *sizes)

    monkeypatch.setattr(metadata_module, "rotary_table", counted)
    metadata_module._cached_metadata.cache_clear()
    counts = {}
    with torch.no_grad():
        scene = make_scene(session, TINY)
        remembered = scene.metadata()
        for name in ("vk", "vk_ready", "vk_graph", "vk_graph_new"):
            encode = bound(name, scene).encode
            encode()
            made.clear()
            for _ in range(3):
                encode()
            counts[name] = len(made)
            assert scene.metadata() is remembered, "of what others remember nothing is lost"
    assert counts == {"vk": 3, "vk_ready": 0, "vk_graph": 0, "vk_graph_new": 3}
    assert [name for name, each in BY_NAME.items() if each.ready == NO_TABLES] == ["vk", "vk_graph_new", "hf"]


def test_segments_that_are_read_back_stay_on_the_host(
    session: Session, stand_ins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Transformers' sdpa attention reads them in every layer."""
    asked: dict[str, bool] = {}
    original = encoder_impls.transformers_metadata

    def noted(scene: Scene, segments_on_host: bool = False) -> Any:
        asked[name] = segments_on_host
        return original(scene, segments_on_host)

    monkeypatch.setattr(encoder_impls, "transformers_metadata", noted)
    for name in BY_NAME:
        if name.startswith("hf"):
            bound(name, make_scene(session, TINY))
    assert [name for name, on_host in asked.items() if on_host] == ["hf_ready", "hf_compiled", "hf_reduced_host"]
    assert not asked["hf_reduced"]


def test_twins_share_parameters_and_leave_the_tower_alone(session: Session, stand_ins: list[str]) -> None:
    made = encoder_peers.twin(session, "cudnn", compiled=True)
    theirs = dict(session.tower.named_parameters())
    for name, parameter in made.named_parameters():
        assert parameter is theirs[name], name
    assert type(session.tower.blocks[0].attn).__name__ == "Qwen3VLVisionAttention"
    assert "forward" not in session.tower.blocks[0].__dict__
    make_scene(session, TRAINED)
    assert made.training and session.encoder.training


def test_our_graph_has_no_room_but_for_the_batch(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no graphs the encoder on the same static tensors stands in."""
    with torch.no_grad():
        scene = make_scene(session, TINY)
        ours = bound("vk_graph", scene)
        for _ in range(2):
            check_features(ours.encode(), scene)
    assert ours.pool is None
    pixels, grid, cu_seqlens, cos, sin = ours.held
    assert pixels.shape == scene.pixels.shape and pixels.data_ptr() != scene.pixels.data_ptr()
    assert torch.equal(grid, scene.grid) and cos.shape == sin.shape == (len(pixels), 16)
    assert cu_seqlens.diff().tolist() == list(TINY.segments)
    ours = dataclasses.replace(ours, pool=(0, 1))
    segments = [{"segment_pool_id": (0, 1), "total_size": 5}, {"segment_pool_id": (0, 0), "total_size": 7}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert held_bytes(ours) == 5 + sum(tensor.nbytes for tensor in ours.held)


def test_our_graph_that_writes_nothing_is_wrong(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def captured_alone(encode: Any) -> Any:
        with torch.no_grad():
            outputs = encode()
        return lambda: outputs

    monkeypatch.setattr(_recording, "_repeated", captured_alone)
    (timed,) = measured(session, TINY, (BY_NAME["vk_graph"],)).values()
    assert timed.status == WRONG and "entries are not finite" in timed.note


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CUDA graphs stood in for by ones that do nothing; a number for each replay."""
    replays: list[int] = []
    graph = SimpleNamespace(replay=lambda: replays.append(1))
    for attribute, value in {
        "CUDAGraph": lambda: graph, "graph": lambda *args, **named: contextlib.nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, attribute, value)
    own = SimpleNamespace(stream=None, pool=(0, 1))
    monkeypatch.setattr(encoder_impls, "own_stream", lambda device: own)
    return replays


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", [name for name in BY_NAME if "graph" in name or "ready" in name])
def test_what_is_made_before_the_call_counts_as_memory(
    session: Session, stand_ins: list[str], replayed: list[int], name: str
) -> None:
    """A graph's pixels are its own; rotary tables and segments are in everyone's metadata, or what they are made of."""
    scene = make_scene(session, TINY)
    with torch.no_grad():
        held = bound(name, scene).held
    tables = transformers_metadata(scene) if name == "hf_ready" else dict(scene.metadata().tensors())
    tables.pop("grid", None)
    least = nbytes(value for value in tables.values() if isinstance(value, Tensor))
    graph = "graph" in name
    assert nbytes(held) >= least + graph * scene.pixels.nbytes
    assert any(torch.equal(tensor, tables["cu_seqlens"]) for tensor in held)
    assert graph == any(torch.equal(tensor, scene.pixels) for tensor in held)
    assert all(tensor.data_ptr() != scene.pixels.data_ptr() for tensor in held)


def test_a_graph_that_writes_nothing_is_wrong(session: Session, stand_ins: list[str], replayed: list[int]) -> None:
    """A call copies its pixels in and replays, and what the capture left does not count."""
    scene = make_scene(session, TINY)
    (timed,) = measured(session, TINY, runnable("graph_flash2")).values()
    assert timed.status == WRONG and "entries are not finite" in timed.note and replayed
    ours = bound("graph_flash2", scene)
    static, *_ = ours.held
    assert static.data_ptr() != scene.pixels.data_ptr() and torch.equal(static, scene.pixels) and ours.pool == (0, 1)
