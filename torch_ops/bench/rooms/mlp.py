"""The benchmark of `vk::mlp`."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from torch_ops import mlp
from torch_ops.bench.measure.opbench import LAYER_US, Impl, select
from torch_ops.bench.rooms.projections import bind, impl, make_bench
from torch_ops.testing import references
from torch_ops.testing.cases import MLP, MlpCase, make_mlp_inputs


def _pair(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str) -> Tensor:
    """Two products; of a gated layer the second takes half of what the first makes."""
    return functional.linear(functional.linear(x, w1)[..., : w2.shape[1]], w2)


PAIR = impl(
    "pair", _pair, "two F.linear after each other",
    reference_point="makes the two products alone, without biases and activation",
)  # fmt: skip


def _epilogue(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor | None, activation: str) -> Tensor:
    hidden = torch._addmm_activation(b1, x, w1.t(), use_gelu=True)
    return functional.linear(hidden, w2, b2)


def _epilogue_refuses(case: MlpCase, dtype: torch.dtype, device: torch.device) -> str:
    if case.activation != "gelu_tanh":
        return "has tanh GELU alone"
    if not case.bias or len(case.lead) != 1:
        return "takes two dimensions and a bias"
    # Elsewhere its GELU is the other one.
    return "" if device.type == "cuda" else "needs a GPU"


EPILOGUE = Impl(
    "epilogue", lambda case, inputs: bind(_epilogue, inputs),
    "torch._addmm_activation, cuBLAS's GELU epilogue, then F.linear", _epilogue_refuses, directions=("forward",),
)  # fmt: skip


def _notation(case: MlpCase) -> str:
    rows = "x".join(map(str, case.lead))
    return f"{rows}, {case.width}-{case.inner}-{case.outer or case.width} {case.activation}"


BENCH = make_bench(
    mlp, references.mlp, make_mlp_inputs, MlpCase("host", "host time", (128,), 1152, 4304),
    cases=partial(select, MLP), shape=_notation, baselines=(PAIR, EPILOGUE), profiled="mlp_1152_4304_4096",
    most_us=LAYER_US,
)  # fmt: skip
