"""The bench room of `vk::attention`; its command is that of `attention_command`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_ops
from torch_ops.bench.measure import results
from torch_ops.bench.measure.host import recorded_launches
from torch_ops.bench.measure.room import Call, Contender, HostCall, Room, Trial, TunedKernel
from torch_ops.bench.peers.dense import DENSE_PEERS, dense_call
from torch_ops.bench.rooms.dense_cases import dense_notation, find_dense_cases, longest_dense_within, shorten_dense
from torch_ops.bench.rooms.packed import (
    JITS,
    attention_cost,
    attention_path,
    explained,
    is_masked,
    room_for_truth,
    truth_of,
)
from torch_ops.testing.cases import DenseCase, DenseInputs, dense_cases, make_dense_inputs

# The case whose host time is taken: so small that the device is never behind.
HOST_CASE = "1x16x128x64"
PROFILED = "b8h32s2048d128_causal"
# Ours, where it computes in another type than the inputs'; the second only where it is asked for.
OURS_AS_FP16, OURS_AS_BF16 = "vk_as_fp16", "vk_as_bf16"


def _ours(
    name: str, about: str, refuses: Any = lambda case, dtype, device: "", rest: dict[str, Any] | None = None,
    **options: Any,
) -> Contender:  # fmt: skip
    op = partial(torch_ops.attention, **options)

    def bind(case: DenseCase, inputs: DenseInputs) -> Call:
        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = inputs.call(op, q=q, k=k, v=v)
            return out

        return dense_call(inputs, forward)

    return Contender(name, bind, refuses, lambda: about, **(rest or {}))


OURS = _ours(results.OURS, "vk::attention")


def _in_half(name: str, dtype: torch.dtype, short: str) -> Contender:
    return _ours(
        name,
        f"torch_ops.attention with compute_dtype={dtype}: fp32 inputs are rounded to {short}, computed with at its "
        "rate and error, and the results are fp32",
        lambda case, dtype, device: "" if dtype is torch.float32 else "is for fp32 inputs",
        {"yardstick": f"computes in {short} what comes in fp32, which is less work and less accurate"},
        compute_dtype=dtype,
    )


AS_FP16 = _in_half(OURS_AS_FP16, torch.float16, "fp16")
AS_BF16 = _in_half(OURS_AS_BF16, torch.bfloat16, "bf16")


def _cases(wanted: Sequence[str], device: torch.device) -> tuple[DenseCase, ...]:
    if wanted:
        return find_dense_cases(wanted)
    return dense_cases("bench" if device.type == "cuda" else "smoke")


def _profiled(wanted: Sequence[str], device: torch.device) -> tuple[DenseCase, ...]:
    if wanted:
        return find_dense_cases(wanted)
    return find_dense_cases([PROFILED]) if device.type == "cuda" else dense_cases("smoke")[:1]


def _default_peers(device: torch.device) -> tuple[str, ...]:
    """Those of 16-bit types and those of fp32; what cannot run a type says so."""
    if device.type != "cuda":
        return OURS_AS_FP16, "math"
    return OURS_AS_FP16, "cudnn", "flash2", "flash4", "efficient", "math"


def _trials(case: DenseCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Trial]:
    """Every row and head of a shortened case and, where it was shortened, the last key head of the last sequence of the
    case itself, as of packed attention."""
    entries, entries_of_one = room_for_truth(device)
    reduced = shorten_dense(case, entries)

    def draw(seed: int) -> Trial:
        inputs = make_dense_inputs(reduced, dtype, device, seed=1 + 2 * seed)
        truths = truth_of(inputs, torch.float64, backward), truth_of(inputs, dtype, backward)
        return Trial(dense_notation(reduced), reduced, inputs, lambda name, tensor: tensor, *truths, again=draw)

    trials = [draw(0)]
    # Which weights dropout leaves out depends on the numbers of sequence and head.
    if reduced == case or case.options.get("dropout_p"):
        return trials
    group = case.num_heads // (case.num_k_heads or case.num_heads)
    whole = longest_dense_within(case, entries_of_one // group)
    label = f"{dense_notation(whole)}, the last of {case.num_heads // group} key heads"

    def look(name: str, tensor: Tensor) -> Tensor:
        return tensor[-1:, -1:] if name in ("k", "v", "dk", "dv") else tensor[-1:, -group:]

    def draw_last(seed: int) -> Trial:
        inputs = make_dense_inputs(whole, dtype, device, seed=2 + 2 * seed)
        tensors: dict[str, Any] = {name: look(name, getattr(inputs, name)) for name in ("q", "k", "v", "dout", "dlse")}
        cut = replace(inputs, options=_options_of_last(inputs.options, group), **tensors)
        truths = truth_of(cut, torch.float64, backward), truth_of(cut, dtype, backward)
        return Trial(label, whole, inputs, look, *truths, again=draw_last)

    return [*trials, draw_last(0)]


def _options_of_last(options: dict[str, Any], group: int) -> dict[str, Any]:
    """For the last heads of the last sequence."""
    cut = dict(options)
    for name in ("alibi_slopes", "sinks"):
        if name in cut:
            cut[name] = cut[name][..., -group:][-1:] if cut[name].dim() == 2 else cut[name][-group:]
    return cut


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    """From ATen's smallest op to the public function with gradients, on one small case."""
    (case,) = find_dense_cases([HOST_CASE])
    inputs = make_dense_inputs(case, dtype, device)
    q, k, v = inputs.q, inputs.k, inputs.v
    leaf = q.detach().clone().requires_grad_()
    op = torch.ops.vk.attention
    number = torch.ones(16, device=device)
    launch, why = _raw_launch(inputs)
    return [
        HostCall("ATen add", lambda: torch.add(number, number)),
        HostCall("raw Triton launch of the forward kernel", launch, raw=True, note=why),
        HostCall("torch.ops.vk.attention", lambda: op(q, k, v), target=1.8),
        HostCall("torch_ops.attention", lambda: torch_ops.attention(q, k, v), target=1.8),
        HostCall("torch.ops.vk.attention with gradients", lambda: op(leaf, k, v), target=2.5),
        HostCall("torch_ops.attention with gradients", lambda: torch_ops.attention(leaf, k, v), target=2.5),
    ]


def _raw_launch(inputs: DenseInputs) -> tuple[Callable[[], object] | None, str]:
    """The launch of a forward's kernel, or why there is none."""
    if attention_path(inputs) == "reference":
        return None, "there is none on this device"
    with recorded_launches() as launches:
        torch.ops.vk.attention(inputs.q, inputs.k, inputs.v)
    return launches.replay, ""


def _kernels(case: DenseCase, inputs: DenseInputs) -> list[TunedKernel]:
    return [
        TunedKernel(
            name=name,
            backward="bwd" in name,
            dtype=str(inputs.q.dtype).removeprefix("torch."),
            head_dim=case.head_dim,
            masked=is_masked(inputs.options),
            length=(inputs.k if "dkdv" in name else inputs.q).shape[2],
        )
        for name in explained(inputs)["kernels"]
    ]


ROOM = Room(
    op="attention",
    cases=_cases,
    profiled=_profiled,
    shape=dense_notation,
    inputs=make_dense_inputs,
    trials=_trials,
    cost=attention_cost,
    path=attention_path,
    ours=OURS,
    peers=(AS_FP16, AS_BF16, *DENSE_PEERS),
    default_peers=_default_peers,
    host_calls=_host_calls,
    kernels=_kernels,
    jits=JITS,
)
