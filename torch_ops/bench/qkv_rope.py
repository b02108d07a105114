"""The bench room of `vk::qkv_rope`."""

from collections.abc import Sequence
from functools import partial

import torch
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
from torch_ops.bench.room import Call, Contender, HostCall, Room, Trial
from torch_ops.testing import references
from torch_ops.testing.cases import QKV_ROPE, QkvRopeCase, QkvRopeInputs, make_qkv_rope_inputs

# So small that the device is never behind.
HOST_CASE = QkvRopeCase("host", "host time", 128, 1152, 16, 72)
PROFILED = "qkv_1152_4096"


def _linear(case: QkvRopeCase, inputs: QkvRopeInputs) -> Call:
    call = bind(lambda x, weight, bias, *rest: functional.linear(x, weight, bias), inputs)
    dout = torch.cat([dout.flatten(1) for dout in inputs.douts.values()], 1)
    return Call(call.forward, call.inputs, dout, outputs=("packed",))


LINEAR = Contender(
    "linear", _linear, lambda case, dtype, device: "", lambda: f"F.linear of torch {torch.__version__}, with its bias",
    yardstick="makes the product alone, without the rotation and in one tensor",
)  # fmt: skip
PEERS = (
    LINEAR,
    contender("eager", references.qkv_rope, "F.linear, then the rotation in fp32, in eager PyTorch"),
    compiled(references.qkv_rope, "torch.compile of the eager form"),
)


def _notation(case: QkvRopeCase) -> str:
    heads = str(case.num_heads) if case.num_k_heads is None else f"{case.num_heads}/{case.num_k_heads}"
    return f"{case.rows}x{case.width}, {heads}x{case.head_dim}"


def _trials(case: QkvRopeCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Trial]:
    inputs = make_qkv_rope_inputs(case, dtype, device, seed=1)
    return trials(references.qkv_rope, inputs, _notation(case), case, backward)


def _cases(wanted: Sequence[str], device: torch.device) -> tuple[QkvRopeCase, ...]:
    return find_cases(QKV_ROPE, "bench" if device.type == "cuda" else "smoke", wanted)


def _profiled(wanted: Sequence[str], device: torch.device) -> tuple[QkvRopeCase, ...]:
    return _cases(wanted or ([PROFILED] if device.type == "cuda" else ["tower"]), device)


def _default_peers(device: torch.device) -> tuple[str, ...]:
    return ("linear", "eager", "compiled") if device.type == "cuda" else ("linear", "eager")


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    return host_calls(torch.ops.vk.qkv_rope, torch_ops.qkv_rope, make_qkv_rope_inputs(HOST_CASE, dtype, device))


ROOM = Room(
    op="qkv_rope",
    cases=_cases,
    profiled=_profiled,
    shape=_notation,
    inputs=make_qkv_rope_inputs,
    trials=_trials,
    cost=partial(cost, torch.ops.vk.qkv_rope),
    path=lambda inputs: str(explained(torch_ops.qkv_rope, inputs)["path"]),
    ours=contender(results.OURS, torch_ops.qkv_rope, "vk::qkv_rope"),
    peers=PEERS,
    default_peers=_default_peers,
    host_calls=_host_calls,
    kernels=lambda case, inputs: kernels(torch_ops.qkv_rope, inputs, case.rows),
    jits=JITS,
)
