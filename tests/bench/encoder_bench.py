"""What the tests of the encoder's bench share: a tower for the CPU, and stand-ins for kernels and compilers."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from torch_ops.bench.commands import encoder
from torch_ops.bench.encoder import contest as encoder_contest
from torch_ops.bench.encoder import peers as encoder_peers
from torch_ops.bench.encoder.contenders import CONTENDERS
from torch_ops.bench.encoder.rows import SMOKE, Session, make_tower
from torch_ops.bench.measure import timing
from torch_ops.bench.measure.results import Ceilings

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
    # What other tests have compiled of the same functions counts to the limit, past which they are left uncompiled.
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
