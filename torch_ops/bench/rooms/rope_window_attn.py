"""The bench room of `vk::rope_window_attn`: peers turn q and k by a call of their own, and then attend."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_ops
from csrc_free_ops import rope
from torch_ops.bench.measure import results
from torch_ops.bench.measure.room import Call, Contender, Cost, HostCall, Room, named
from torch_ops.bench.peers.packed import CUDNN, FLASH2, FLASH4, REFERENCE, Turn, packed_call, turned_first
from torch_ops.bench.rooms import packed
from torch_ops.bench.rooms.packed import attention_cost, attention_path, packed_kernels, packed_trials
from torch_ops.bench.rooms.packed_cases import find_cases, notation
from torch_ops.testing import references
from torch_ops.testing.cases import (
    ROPE_WINDOW_ATTN,
    RopeWindowAttnInputs,
    WindowAttnCase,
    make_projected_rope_inputs,
    rope_window_attn_cases,
)

# One image by patches of 14 pixels and of 16, a batch, and windows, full and ragged.
SHAPES = (
    *(f"qwen3vl_l_{rows}" for rows in (1024, 2304, 4096, 9216, 784, 1764, 3136, 7056)),
    "qwen3vl_l_16x1024", "qwen25vl_windows", "qwen25vl_ragged",
)  # fmt: skip
HOST_CASE = "1x128x16x72"
PROFILED = "qwen3vl_l_4096"


def _find(wanted: Sequence[str]) -> tuple[WindowAttnCase, ...]:
    """Cases by name, by a pattern of names or in the notation; ValueError names the choices."""
    found: dict[str, WindowAttnCase] = {}
    for text in (text.strip() for item in wanted for text in item.split(",")):
        cases = named(ROPE_WINDOW_ATTN, text) or find_cases([text])
        found |= {case.name: case for case in cases}
    for case in found.values():
        if case.k_lengths is not None:
            raise ValueError(f"{case.name!r} has boundaries of its own for keys; give a case without")
    return tuple(found.values())


def _cases(wanted: Sequence[str], device: torch.device) -> tuple[WindowAttnCase, ...]:
    if wanted:
        return _find(wanted)
    return _find(SHAPES) if device.type == "cuda" else rope_window_attn_cases("smoke")


def _profiled(wanted: Sequence[str], device: torch.device) -> tuple[WindowAttnCase, ...]:
    if wanted:
        return _find(wanted)
    return _find([PROFILED]) if device.type == "cuda" else rope_window_attn_cases("smoke")[:1]


def _bind_ours(case: WindowAttnCase, inputs: RopeWindowAttnInputs) -> Call:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = inputs.call(torch_ops.rope_window_attn, q=q, k=k, v=v)
        return out

    return packed_call(inputs, forward)


def _turn_q_and_k(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return references.rotated(q, cos, sin), references.rotated(k, cos, sin)


def _eagerly(inputs: RopeWindowAttnInputs) -> Turn:
    return lambda q, k, v: (*_turn_q_and_k(q, k, inputs.cos, inputs.sin), v)


def _compiled(inputs: RopeWindowAttnInputs) -> Turn:
    turn: Callable[..., Any] = torch.compile(_turn_q_and_k, fullgraph=True, dynamic=False)
    return lambda q, k, v: (*turn(q, k, inputs.cos, inputs.sin), v)


EAGER, COMPILED = "rotation in eager PyTorch", "rotation by torch.compile"
PEERS = (
    turned_first(FLASH2, "eager_flash2", _eagerly, EAGER),
    turned_first(CUDNN, "compiled_cudnn", _compiled, COMPILED),
    turned_first(FLASH2, "compiled_flash2", _compiled, COMPILED),
    turned_first(FLASH4, "compiled_flash4", _compiled, COMPILED),
    turned_first(REFERENCE, "reference", _eagerly, EAGER),
)


def _default_peers(device: torch.device) -> tuple[str, ...]:
    return tuple(peer.name for peer in PEERS[:-1]) if device.type == "cuda" else ("reference",)


def _cost(inputs: RopeWindowAttnInputs, backward: bool) -> Cost:
    """That of attention, and the tables, which are read once more."""
    attention = attention_cost(inputs, backward)
    return Cost(attention.flops, attention.bytes_moved + inputs.cos.nbytes + inputs.sin.nbytes)


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    """From ATen's smallest op to the public function with gradients, on one small case."""
    (case,) = _find([HOST_CASE])
    inputs = make_projected_rope_inputs(case, dtype, device)
    leaf = inputs.q.detach().clone().requires_grad_()
    q, k = _turn_q_and_k(inputs.q, inputs.k, inputs.cos, inputs.sin)
    attend = partial(torch_ops.window_attn, q, k, inputs.v, inputs.cu_seqlens)
    number = torch.ones(16, device=device)
    return [
        HostCall("ATen add", lambda: torch.add(number, number)),
        HostCall("torch_ops.window_attn of what was turned", attend),
        HostCall("torch.ops.vk.rope_window_attn", lambda: inputs.call(torch.ops.vk.rope_window_attn)),
        HostCall("torch_ops.rope_window_attn", lambda: inputs.call(torch_ops.rope_window_attn)),
        HostCall("torch_ops.rope_window_attn with gradients", lambda: inputs.call(torch_ops.rope_window_attn, q=leaf)),
    ]


ROOM = Room(
    op="rope_window_attn",
    cases=_cases,
    profiled=_profiled,
    shape=notation,
    inputs=make_projected_rope_inputs,
    trials=partial(packed_trials, make_projected_rope_inputs),
    cost=_cost,
    path=attention_path,
    ours=Contender(results.OURS, _bind_ours, lambda case, dtype, device: "", lambda: "vk::rope_window_attn"),
    peers=PEERS,
    default_peers=_default_peers,
    host_calls=_host_calls,
    kernels=packed_kernels,
    jits=(*packed.JITS, vars(rope)["_rope_kernel"]),
)
