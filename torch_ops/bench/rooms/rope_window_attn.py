"""The benchmark of `vk::rope_window_attn`: baselines turn q and k by a call of their own, and then attend."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_ops
from torch_ops.bench.measure.opbench import Call, Cost, HostCall, OpBench, op_calls, ours, select
from torch_ops.bench.peers.packed import CUDNN, FLASH2, FLASH4, REFERENCE, Turn, packed_call, turned_first
from torch_ops.bench.rooms.packed import attention_cost, attention_path, packed_checks, packed_kernels
from torch_ops.bench.rooms.packed_cases import NOTATION, from_notation, notation
from torch_ops.testing import references
from torch_ops.testing.cases import (
    ROPE_WINDOW_ATTN,
    WINDOW_ATTN,
    RopeWindowAttnInputs,
    WindowAttnCase,
    make_projected_rope_inputs,
)

# One image by patches of 14 pixels and of 16, a batch, and windows, full and ragged.
SHAPES = (
    *(f"qwen3vl_l_{rows}" for rows in (1024, 2304, 4096, 9216, 784, 1764, 3136, 7056)),
    "qwen3vl_l_16x1024", "qwen25vl_windows", "qwen25vl_ragged",
)  # fmt: skip
HOST_CASE = "1x128x16x72"


def _find(wanted: Sequence[str], device: torch.device) -> tuple[WindowAttnCase, ...]:
    wanted = wanted or (SHAPES if device.type == "cuda" else ())
    found = select((*ROPE_WINDOW_ATTN, *WINDOW_ATTN), wanted, device, from_notation, NOTATION)
    for case in found:
        if case.k_lengths is not None:
            raise ValueError(f"{case.name!r} has boundaries of its own for keys; give a case without")
    return found


def _bind_ours(case: WindowAttnCase, inputs: RopeWindowAttnInputs) -> Call:
    return packed_call(inputs, lambda q, k, v: inputs.call(torch_ops.rope_window_attn, q=q, k=k, v=v))


def _turn_q_and_k(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return references.rotated(q, cos, sin), references.rotated(k, cos, sin)


def _eagerly(inputs: RopeWindowAttnInputs) -> Turn:
    return lambda q, k, v: (*_turn_q_and_k(q, k, inputs.cos, inputs.sin), v)


def _compiled(inputs: RopeWindowAttnInputs) -> Turn:
    turn: Callable[..., Any] = torch.compile(_turn_q_and_k, fullgraph=True, dynamic=False)
    return lambda q, k, v: (*turn(q, k, inputs.cos, inputs.sin), v)


EAGER, COMPILED = "rotation in eager PyTorch", "rotation by torch.compile"
BASELINES = (
    turned_first(FLASH2, "eager_flash2", _eagerly, EAGER),
    turned_first(CUDNN, "compiled_cudnn", _compiled, COMPILED),
    turned_first(FLASH2, "compiled_flash2", _compiled, COMPILED),
    turned_first(FLASH4, "compiled_flash4", _compiled, COMPILED),
    turned_first(REFERENCE, "reference", _eagerly, EAGER),
)


def _cost(inputs: RopeWindowAttnInputs, backward: bool) -> Cost:
    """That of attention, and the tables, which are read once more."""
    attention = attention_cost(inputs, backward)
    return Cost(attention.flops, attention.bytes_moved + inputs.cos.nbytes + inputs.sin.nbytes)


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    """From attention alone to the public function with gradients, on one small case."""
    (case,) = _find([HOST_CASE], device)
    inputs = make_projected_rope_inputs(case, dtype, device)
    q, k = _turn_q_and_k(inputs.q, inputs.k, inputs.cos, inputs.sin)
    attend = partial(torch_ops.window_attn, q, k, inputs.v, inputs.cu_seqlens)
    return [
        HostCall("torch_ops.window_attn of what was turned", attend),
        *op_calls("rope_window_attn", lambda function, q: partial(inputs.call, function, q=q), inputs.q),
    ]


BENCH = OpBench(
    op="rope_window_attn", cases=_find, profiled="qwen3vl_l_4096", shape=notation,
    inputs=make_projected_rope_inputs, checks=partial(packed_checks, make_projected_rope_inputs), cost=_cost,
    path=attention_path, ours=ours(_bind_ours, "vk::rope_window_attn"), baselines=BASELINES,
    usual={"cuda": tuple(each.name for each in BASELINES[:-1]), "cpu": ("reference",)}, host_calls=_host_calls,
    kernels=packed_kernels,
)  # fmt: skip
