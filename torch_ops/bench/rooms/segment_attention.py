"""The benchmark of `vk::segment_attention`, on ranks of zigzag context parallel."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import torch_ops
from torch_ops.bench.measure.host import raw_launch
from torch_ops.bench.measure.opbench import BOTH, LAYER_US, Call, Check, Cost, HostCall, Impl, OpBench, op_calls, ours
from torch_ops.bench.peers.zigzag import DIRECTIONS, ZIGZAG_BASELINES
from torch_ops.bench.rooms.packed import entries_for_truth, truth_of
from torch_ops.bench.rooms.zigzag_cases import (
    ZigzagCase,
    find_zigzag_cases,
    longest_zigzag_within,
    make_zigzag_inputs,
    shorten_zigzag,
    zigzag_notation,
)
from torch_ops.testing import references
from torch_ops.testing.cases import SegmentInputs

# The case whose host time is taken: so small that the device is never behind.
HOST_CASE = "0of2:1x256x16x64"


def _bind(function: Any, case: ZigzagCase, inputs: SegmentInputs) -> Call:
    """out alone has a gradient, but lse is computed too, as the peers compute it."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")}
    op = partial(function, return_lse=True)

    def forward() -> Tensor:
        out: Tensor = inputs.call(op, **leaves)[0]
        return out

    return Call(forward, leaves, inputs.dout)


OURS = ours(partial(_bind, torch_ops.segment_attention), "vk::segment_attention", directions=DIRECTIONS)
REFERENCE = Impl(
    "reference", partial(_bind, references.segment_attention),
    "torch_ops.testing.references, one segment after the other in eager PyTorch",
    lambda case, dtype, device: "" if device.type == "cpu" else "is for small cases on a CPU", DIRECTIONS,
)  # fmt: skip


def _checks(case: ZigzagCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Check]:
    """Check every row and head of a shortened case. If it was shortened, also check the last key head of the case."""
    entries, entries_of_one = entries_for_truth(device)
    if device.type == "cuda":
        # A key head of the longest cases in fp64.
        entries_of_one = min(2**30, torch.cuda.get_device_properties(device).total_memory // 128)
    reduced = shorten_zigzag(case, entries)

    def draw(seed: int) -> Check:
        inputs = make_zigzag_inputs(reduced, dtype, device, seed=1 + 2 * seed)
        truths = truth_of(inputs, torch.float64, backward), truth_of(inputs, dtype, backward)
        return Check(zigzag_notation(reduced), reduced, inputs, *truths, again=draw)

    checks = [draw(0)]
    if reduced == case:
        return checks
    whole, group = longest_zigzag_within(case, entries_of_one // case.group), case.group
    label = f"{zigzag_notation(whole)}, the last of {case.num_heads // group} key heads"

    def look(name: str, tensor: Tensor) -> Tensor:
        return tensor[:, -1:] if name in ("k", "v", "dk", "dv") else tensor[:, -group:]

    inputs = make_zigzag_inputs(whole, dtype, device, seed=2)
    tensors: dict[str, Any] = {name: look(name, getattr(inputs, name)) for name in ("q", "k", "v", "dout")}
    cut = replace(inputs, **tensors)
    truths = truth_of(cut, torch.float64, backward), truth_of(cut, dtype, backward)
    return [*checks, Check(label, whole, inputs, *truths, look=look)]


def _cost(inputs: SegmentInputs, backward: bool) -> Cost:
    """Two products in the forward, five in the backward, of seen pairs; keys that no segment sees do not move."""
    flops = int(inputs.call(flop_registry[torch.ops.vk.segment_attention]))
    seen: dict[int, int] = {}
    for sequence, limit in zip(inputs.key_sequence.tolist(), inputs.key_limit.tolist(), strict=True):
        seen[sequence] = max(seen.get(sequence, 0), limit)
    item, queries = inputs.q.element_size(), inputs.q.numel()
    keys = 2 * sum(seen.values()) * inputs.k[:1].numel()
    rest = inputs.dlse.nbytes + sum(place.nbytes for place in inputs.places)
    if not backward:
        return Cost(flops, item * (2 * queries + keys) + rest)
    # Read: q, keys and values, out, dout, lse; written: dq, and all rows of dk and dv.
    return Cost(flops * 5 // 2, item * (4 * queries + keys + 2 * inputs.k.numel()) + rest)


def _path(inputs: SegmentInputs) -> str:
    return str(inputs.call(partial(torch_ops.explain, torch_ops.segment_attention))["path"])


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    """From the kernels to the public function with gradients, on one small case."""
    (case,) = find_zigzag_cases([HOST_CASE], device)
    inputs = make_zigzag_inputs(case, dtype, device)
    rest = inputs.k, inputs.v, *inputs.places
    call = partial(torch.ops.vk.segment_attention, inputs.q, *rest)
    return [
        raw_launch("raw Triton launches of the list of tiles and the forward kernel", call, _path(inputs)),
        *op_calls("segment_attention", lambda function, q: partial(function, q, *rest), inputs.q, most_us=LAYER_US),
    ]


BENCH = OpBench(
    op="segment_attention", cases=find_zigzag_cases, profiled="zigzag_8k_rank0", shape=zigzag_notation,
    inputs=make_zigzag_inputs, checks=_checks, cost=_cost, path=_path, ours=OURS,
    baselines=(*ZIGZAG_BASELINES, REFERENCE),
    usual={
        "cuda": ("flash2_twice", "window_attn_twice", "flash2_alone", "window_attn_alone"),
        "cpu": ("window_attn_twice", "reference"),
    },
    timed=("forward", BOTH), host_calls=_host_calls,
)  # fmt: skip
