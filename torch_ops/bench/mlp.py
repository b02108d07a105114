"""The bench room of `vk::mlp`."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import torch_ops
from torch_ops.bench import results
from torch_ops.bench.projections import (
    JITS,
    bind,
    compiled,
    contender,
    cost,
    explained,
    find_cases,
    host_calls,
    kernels,
    trials,
)
from torch_ops.bench.room import Contender, HostCall, Room, Trial
from torch_ops.testing import references
from torch_ops.testing.cases import MLP, MlpCase, make_mlp_inputs

# So small that the device is never behind.
HOST_CASE = MlpCase("host", "host time", (128,), 1152, 4304)
PROFILED = "mlp_1152_4304_4096"


def _pair(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str) -> Tensor:
    """Two products; of a gated layer the second takes half of what the first makes."""
    return functional.linear(functional.linear(x, w1)[..., : w2.shape[1]], w2)


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


EPILOGUE = Contender(
    "epilogue", lambda case, inputs: bind(_epilogue, inputs), _epilogue_refuses,
    lambda: "torch._addmm_activation, cuBLAS's GELU epilogue, then F.linear", directions=("forward",),
)  # fmt: skip
PEERS = (
    contender(
        "pair", _pair, "two F.linear after each other",
        yardstick="makes the two products alone, without biases and activation",
    ),
    contender("eager", references.mlp, "F.linear, the activation, F.linear, in eager PyTorch"),
    compiled(references.mlp, "torch.compile of the eager form"),
    EPILOGUE,
)  # fmt: skip


def _notation(case: MlpCase) -> str:
    rows = "x".join(map(str, case.lead))
    return f"{rows}, {case.width}-{case.inner}-{case.outer or case.width} {case.activation}"


def _trials(case: MlpCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Trial]:
    inputs = make_mlp_inputs(case, dtype, device, seed=1)
    return trials(references.mlp, inputs, _notation(case), case, backward)


def _cases(wanted: Sequence[str], device: torch.device) -> tuple[MlpCase, ...]:
    return find_cases(MLP, "bench" if device.type == "cuda" else "smoke", wanted)


def _profiled(wanted: Sequence[str], device: torch.device) -> tuple[MlpCase, ...]:
    return _cases(wanted or ([PROFILED] if device.type == "cuda" else ["tower"]), device)


def _default_peers(device: torch.device) -> tuple[str, ...]:
    return tuple(peer.name for peer in PEERS) if device.type == "cuda" else ("pair", "eager")


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    return host_calls(torch.ops.vk.mlp, torch_ops.mlp, make_mlp_inputs(HOST_CASE, dtype, device))


ROOM = Room(
    op="mlp",
    cases=_cases,
    profiled=_profiled,
    shape=_notation,
    inputs=make_mlp_inputs,
    trials=_trials,
    cost=partial(cost, torch.ops.vk.mlp),
    path=lambda inputs: str(explained(torch_ops.mlp, inputs)["path"]),
    ours=contender(results.OURS, torch_ops.mlp, "vk::mlp"),
    peers=PEERS,
    default_peers=_default_peers,
    host_calls=_host_calls,
    kernels=lambda case, inputs: kernels(torch_ops.mlp, inputs, case.rows),
    jits=JITS,
)
