"""Shared by the tests of the encoder's benchmark: a tower for the CPU, stand-ins for kernels and compilers."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from tests.bench.verify import CPU, anywhere
from torch_ops.bench.commands import run as run_command
from torch_ops.bench.encoder import peers as encoder_peers
from torch_ops.bench.encoder.impls import IMPLS, Bound, encoder_bench
from torch_ops.bench.encoder.rows import SMOKE, Features, Row, Scene, Session, check_of, make_tower, named_features
from torch_ops.bench.measure import timing
from torch_ops.bench.measure.opbench import Impl
from torch_ops.bench.measure.results import Ceilings, Record
from torch_ops.bench.measure.run import Setup, run_case
from torch_ops.testing import check

TINY, TRAINED = SMOKE
BY_NAME = {impl.name: impl for impl in IMPLS}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(timing, "CPU_ROUND_MS", 0.5)
    monkeypatch.setattr(timing, "MIN_SAMPLES", 1)
    monkeypatch.setattr(run_command, "measure_ceilings", lambda device, dtype: Ceilings(10.0, 0.1, "float32"))
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    # Tensors are too small for several threads.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def measured(session: Session, row: Row, impls: Sequence[Impl]) -> dict[str, Record]:
    """Two rounds, by name."""
    dtype = next(session.tower.parameters()).dtype
    setup = Setup(dtype, session.tower.device, (row.direction,), rounds=2, wall=True)
    able = [each for each in impls if row.direction in each.directions]
    return {one.name: one for one in run_case(encoder_bench(session), row, able, setup)}


def bound(name: str, scene: Scene) -> Bound:
    return BY_NAME[name].bind(scene.row, scene).bound


def check_features(features: Features, scene: Scene) -> None:
    truth = check_of(scene)
    check(named_features(features), truth.eager, truth.reference)


def runnable(*names: str) -> list[Impl]:
    return anywhere(*(BY_NAME[name] for name in names))


@pytest.fixture
def session() -> Session:
    torch.manual_seed(0)
    return Session(make_tower(CPU, torch.float32))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """cuDNN's way of attention, by PyTorch's own, for all; compilers that only capture; whose graphs they were."""
    captured: list[str] = []
    # Compilations by other tests count to PyTorch's limit, past which a function is left uncompiled.
    torch.compiler.reset()

    class Captured:
        def __init__(self, function: Any, fullgraph: bool, dynamic: bool | None) -> None:
            self.compiled = compiler(function, backend=self.note, fullgraph=fullgraph, dynamic=dynamic)
            self.name = getattr(function, "__qualname__", type(function).__name__)

        def note(self, module: Any, inputs: Any) -> Any:
            captured.append(self.name)
            return module

        def __call__(self, *args: Any, **named: Any) -> Any:
            return self.compiled(*args, **named)

    def compile_(function: Any, fullgraph: bool = False, dynamic: bool | None = None, **inductor: Any) -> Any:
        assert inductor.keys() <= {"mode", "options"}
        return Captured(function, fullgraph, dynamic)

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(encoder_peers, "SDPBackend", SimpleNamespace(CUDNN_ATTENTION=SDPBackend.MATH))
    for name in encoder_peers.ATTENTIONS:
        monkeypatch.setitem(encoder_peers.ATTENTIONS, name, encoder_peers.attend_cudnn)
    return captured
