"""The encoder as a user of `accelerate(model)` calls it, and what the first two calls of a size cost."""

import importlib
import statistics
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from torch_ops.bench.encoder.rows import Features, Session
from torch_ops.bench.measure.results import FirstCalls
from torch_ops.bench.measure.run import DIGITS_OF_MS
from torch_ops.bench.measure.timing import call_ms
from torch_ops.integrations.transformers_encoder import accelerate

REPETITIONS = 5


class Model(nn.Module):
    """Holds the tower where whole models of Transformers do."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.visual = tower


def accelerated(session: Session, graphs: bool) -> Any:
    """A model on the parameters of the session's tower after `accelerate(model, graphs=graphs)`."""

    def make() -> Model:
        return accelerate(Model(session.tower), graphs=graphs).train(session.tower.training)

    return session.once(f"accelerated, graphs={graphs}", make)


def forget(graphs: Any) -> None:
    """Drop all graphs of an encoder and return their memory, so that every size is new again."""
    if graphs is not None:
        graphs.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def on_new_grid(encode: Callable[[], Features]) -> Callable[[], Features]:
    """A call that does not find the metadata of the call before; what others remember stays as it is."""
    module = importlib.import_module("torch_ops.models.vision_metadata")
    cached = module._cached_metadata
    uncached = lru_cache(maxsize=0)(cached.__wrapped__)

    def call() -> Features:
        module._cached_metadata = uncached  # type: ignore[attr-defined]
        try:
            return encode()
        finally:
            module._cached_metadata = cached  # type: ignore[attr-defined]

    return call


@torch.no_grad()
def first_calls(
    encode: Callable[[], Features], eager: Callable[[], Features], graphs: Any, device: torch.device
) -> FirstCalls:
    """Measure the first two calls of a size again and again, each time after `forget`; the last leaves its graph.

    The eager call goes first, because it compiles kernels and gets ordinary memory from the driver.
    """
    rounds = []
    for _ in range(REPETITIONS):
        forget(graphs)
        eager()
        rounds.append(
            (
                call_ms(on_new_grid(eager), device), call_ms(eager, device),
                call_ms(on_new_grid(encode), device), call_ms(encode, device),
            )
        )  # fmt: skip
    return FirstCalls(*(round(statistics.median(times), DIGITS_OF_MS) for times in zip(*rounds, strict=True)))
