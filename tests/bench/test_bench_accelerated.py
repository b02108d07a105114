"""The encoder's benchmark of `accelerate(model)`: what is shared and counted, and what the first calls of a size do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bench import encoder_bench
from tests.bench.encoder_bench import BY_NAME, TINY, TRAINED, bound, check_features, measured
from torch_ops.bench.encoder import accelerated as accelerated_module
from torch_ops.bench.encoder.accelerated import Model, accelerated
from torch_ops.bench.encoder.impls import held_bytes
from torch_ops.bench.encoder.rows import Row, Session, make_scene
from torch_ops.bench.measure.results import OK, WRONG
from torch_ops.models import QwenVisionEncoder, from_transformers

pytestmark = pytest.mark.no_interpret
quick, session = encoder_bench.quick, encoder_bench.session


class Captured(nn.Module):
    """Our encoder, with graphs stood in for: a size met the second time is kept, and its pixels are static."""

    def __init__(self, tower: Any, replays: bool) -> None:
        super().__init__()
        self.encoder, self.replays = from_transformers(tower), replays
        self.events: list[str] = []
        self.seen: dict[int, Any] = {}
        self.graphs = SimpleNamespace(clear=self.clear, pool=(0, 1), static_tensors=())

    def clear(self) -> None:
        self.events.append("clear")
        self.seen.clear()
        self.graphs.static_tensors = ()

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> Any:
        rows = len(pixels)
        output = self.encoder(pixels, grid_thw)
        if rows not in self.seen:
            self.events.append("eager")
            self.seen[rows] = None
        elif self.seen[rows] is None:
            self.events.append("capture")
            self.seen[rows] = output
            self.graphs.static_tensors = (*self.graphs.static_tensors, pixels.clone())
        else:
            self.events.append("replay")
            output = output if self.replays else self.seen[rows]
        return output


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`captured(replays)` has `accelerate` put the stand-in into models, unless they ask for no graphs."""

    def patch(replays: bool) -> None:
        def accelerate(model: Model, graphs: bool) -> Model:
            tower = model.visual
            model.visual = Captured(tower, replays) if graphs else from_transformers(tower)
            return model

        monkeypatch.setattr(accelerated_module, "accelerate", accelerate)

    return patch


def test_both_are_ours_on_the_parameters_of_the_tower(session: Session) -> None:
    tower = session.tower
    theirs = dict(tower.named_parameters())
    made = [accelerated(session, graphs) for graphs in (True, False)]
    assert made[0] is accelerated(session, True) and made[0] is not made[1]
    for model in made:
        assert isinstance(model.visual, QwenVisionEncoder) and model.visual is not session.encoder
        assert {id(each) for each in model.parameters()} == {id(each) for each in theirs.values()}
        assert not model.visual.training
    assert session.tower is tower
    make_scene(session, TRAINED)
    assert all(model.visual.training for model in made)


def test_first_calls_are_measured_once_and_leave_a_graph(session: Session, captured: Any) -> None:
    captured(replays=True)
    found = measured(session, TINY, (BY_NAME["vk_default"], BY_NAME["vk_default_eager"]))
    assert {name: one.status for name, one in found.items()} == {"vk_default": OK, "vk_default_eager": OK}
    calls = found["vk_default"].first_calls
    assert calls is not None and found["vk_default_eager"].first_calls is None
    assert min(calls.eager_ms, calls.eager_new_ms, calls.first_ms, calls.second_ms) > 0
    events = accelerated(session, True).visual.events
    assert events[:5] == ["clear", "eager", "capture", "replay", "replay"], "the check sees a replay"
    repeated = ["clear", "eager", "capture"] * accelerated_module.REPETITIONS
    assert events[5 : 5 + len(repeated)] == repeated
    assert {*events[5 + len(repeated) :]} == {"replay"}


def test_memory_of_graphs_counts_for_the_batch_alone(
    session: Session, captured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(replays=True)
    segments = [{"segment_pool_id": (0, 1), "total_size": 5}, {"segment_pool_id": (0, 0), "total_size": 7}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    for row in (TINY, Row("other", ((1, 8, 4),))):
        scene = make_scene(session, row)
        with torch.no_grad():
            ours = bound("vk_default", scene)
            check_features(ours.encode(), scene)
        assert held_bytes(ours) == 5 + scene.pixels.nbytes
    scene = make_scene(session, TINY)
    with torch.no_grad():
        eager = bound("vk_default_eager", scene)
    assert held_bytes(eager) == sum(tensor.nbytes for _, tensor in scene.metadata().tensors())


def test_a_graph_that_writes_nothing_is_wrong(session: Session, captured: Any) -> None:
    captured(replays=False)
    (timed,) = measured(session, TINY, (BY_NAME["vk_default"],)).values()
    assert timed.status == WRONG


def test_a_training_step_has_no_graphs(session: Session, captured: Any) -> None:
    captured(replays=True)
    (timed,) = measured(session, TRAINED, (BY_NAME["vk_default"],)).values()
    assert timed.first_calls is None and timed.rounds_ms
