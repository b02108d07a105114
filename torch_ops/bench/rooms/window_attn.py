"""The bench room of `vk::window_attn`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_ops
from torch_ops.bench.measure import results
from torch_ops.bench.measure.host import recorded_launches
from torch_ops.bench.measure.room import Call, Contender, HostCall, Room
from torch_ops.bench.peers.packed import PEERS, packed_call
from torch_ops.bench.rooms.packed import JITS, attention_cost, attention_path, packed_kernels, packed_trials
from torch_ops.bench.rooms.packed_cases import find_cases, notation
from torch_ops.testing.cases import (
    WindowAttnCase,
    WindowAttnInputs,
    make_inputs,
    window_attn_cases,
)

# The case whose host time is taken: so small that the device is never behind.
HOST_CASE = "1x128x16x72"
PROFILED = "qwen3vl_l_4096"


def _ours(name: str, about: str, deterministic: bool = True, **rest: Any) -> Contender:
    op = partial(torch_ops.window_attn, deterministic=deterministic)

    def bind(case: WindowAttnCase, inputs: WindowAttnInputs) -> Call:
        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return inputs.call(op, q=q, k=k, v=v)

        return packed_call(inputs, forward)

    return Contender(name, bind, lambda case, dtype, device: "", lambda: about, **rest)


OURS = _ours(results.OURS, "vk::window_attn")
# The flag changes nothing in the forward.
OURS_FREE = _ours(
    results.OURS_FREE, "vk::window_attn with deterministic=False", deterministic=False, directions=("backward",)
)


def _cases(wanted: Sequence[str], device: torch.device) -> tuple[WindowAttnCase, ...]:
    if wanted:
        return find_cases(wanted)
    return window_attn_cases("bench" if device.type == "cuda" else "smoke")


def _profiled(wanted: Sequence[str], device: torch.device) -> tuple[WindowAttnCase, ...]:
    if wanted:
        return find_cases(wanted)
    return find_cases([PROFILED]) if device.type == "cuda" else window_attn_cases("smoke")[:1]


def _default_peers(device: torch.device) -> tuple[str, ...]:
    return ("cudnn", "flash2", "flash4") if device.type == "cuda" else ("reference",)


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    """From ATen's smallest op to the public function with gradients, on one small case."""
    (case,) = find_cases([HOST_CASE])
    inputs = make_inputs(case, dtype, device)
    q, k, v, cu_seqlens = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
    leaf = q.detach().clone().requires_grad_()
    op = torch.ops.vk.window_attn
    number = torch.ones(16, device=device)
    launch, why = _raw_launch(inputs)
    return [
        HostCall("ATen add", lambda: torch.add(number, number)),
        HostCall("raw Triton launch of the forward kernel", launch, raw=True, note=why),
        HostCall("torch.ops.vk.window_attn", lambda: op(q, k, v, cu_seqlens), target=1.8),
        HostCall("torch_ops.window_attn", lambda: torch_ops.window_attn(q, k, v, cu_seqlens), target=1.8),
        HostCall(
            "torch.ops.vk.window_attn with gradients",
            lambda: op(leaf, k, v, cu_seqlens),
            target=2.5,
        ),
        HostCall(
            "torch_ops.window_attn with gradients",
            lambda: torch_ops.window_attn(leaf, k, v, cu_seqlens),
            target=2.5,
        ),
    ]


def _raw_launch(inputs: WindowAttnInputs) -> tuple[Callable[[], object] | None, str]:
    """The launch of a forward's kernels, or why there is none."""
    if attention_path(inputs) == "reference":
        return None, "there is none on this device"
    with recorded_launches() as launches:
        torch.ops.vk.window_attn(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)
    return launches.replay, ""


ROOM = Room(
    op="window_attn",
    cases=_cases,
    profiled=_profiled,
    shape=notation,
    inputs=make_inputs,
    trials=partial(packed_trials, make_inputs),
    cost=attention_cost,
    path=attention_path,
    ours=OURS,
    peers=(OURS_FREE, *PEERS),
    default_peers=_default_peers,
    host_calls=_host_calls,
    kernels=packed_kernels,
    jits=JITS,
)
