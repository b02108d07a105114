"""The benchmark of `vk::attention`; its command is that of `attention_command`."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_ops
from torch_ops.bench.measure.host import raw_launch
from torch_ops.bench.measure.machine import dtype_name
from torch_ops.bench.measure.opbench import Call, Check, HostCall, Impl, OpBench, TunedKernel, op_calls, ours
from torch_ops.bench.measure.results import OURS as GROUP
from torch_ops.bench.peers.dense import DENSE_BASELINES, dense_call
from torch_ops.bench.rooms.dense_cases import dense_notation, find_dense_cases, longest_dense_within, shorten_dense
from torch_ops.bench.rooms.packed import (
    attention_cost,
    attention_path,
    entries_for_truth,
    explained,
    is_masked,
    truth_of,
)
from torch_ops.testing.cases import DenseCase, DenseInputs, make_dense_inputs

# The case whose host time is taken: so small that the device is never behind.
HOST_CASE = "1x16x128x64"
# Ours, where it computes in another type than the inputs'; the second only where it is asked for.
OURS_AS_FP16, OURS_AS_BF16 = "vk_as_fp16", "vk_as_bf16"


def _bind(options: dict[str, Any], case: DenseCase, inputs: DenseInputs) -> Call:
    op = partial(torch_ops.attention, **options)
    return dense_call(inputs, lambda q, k, v: inputs.call(op, q=q, k=k, v=v))


OURS = ours(partial(_bind, {}), "vk::attention")


def _in_half(name: str, dtype: torch.dtype, short: str) -> Impl:
    return Impl(
        name, partial(_bind, {"compute_dtype": dtype}),
        f"torch_ops.attention with compute_dtype={dtype}: fp32 inputs are rounded to {short}, computed with at its "
        "rate and error, and the results are fp32",
        lambda case, dtype, device: "" if dtype is torch.float32 else "is for fp32 inputs",
        reference_point=f"computes in {short} what comes in fp32, which is less work and less accurate",
        group=GROUP,
    )  # fmt: skip


AS_FP16 = _in_half(OURS_AS_FP16, torch.float16, "fp16")
AS_BF16 = _in_half(OURS_AS_BF16, torch.bfloat16, "bf16")


def _checks(case: DenseCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Check]:
    """Check every row and head of a shortened case. If it was shortened, also check the last key head of the case's
    last sequence."""
    entries, entries_of_one = entries_for_truth(device)
    reduced = shorten_dense(case, entries)

    def draw(seed: int) -> Check:
        inputs = make_dense_inputs(reduced, dtype, device, seed=1 + 2 * seed)
        truths = truth_of(inputs, torch.float64, backward), truth_of(inputs, dtype, backward)
        return Check(dense_notation(reduced), reduced, inputs, *truths, again=draw)

    checks = [draw(0)]
    # Which weights dropout leaves out depends on the numbers of sequence and head.
    if reduced == case or case.options.get("dropout_p"):
        return checks
    group = case.num_heads // (case.num_k_heads or case.num_heads)
    whole = longest_dense_within(case, entries_of_one // group)
    label = f"{dense_notation(whole)}, the last of {case.num_heads // group} key heads"

    def look(name: str, tensor: Tensor) -> Tensor:
        return tensor[-1:, -1:] if name in ("k", "v", "dk", "dv") else tensor[-1:, -group:]

    def draw_last(seed: int) -> Check:
        inputs = make_dense_inputs(whole, dtype, device, seed=2 + 2 * seed)
        tensors: dict[str, Any] = {name: look(name, getattr(inputs, name)) for name in ("q", "k", "v", "dout", "dlse")}
        cut = replace(inputs, options=_options_of_last(inputs.options, group), **tensors)
        truths = truth_of(cut, torch.float64, backward), truth_of(cut, dtype, backward)
        return Check(label, whole, inputs, *truths, look=look, again=draw_last)

    return [*checks, draw_last(0)]


def _options_of_last(options: dict[str, Any], group: int) -> dict[str, Any]:
    """For the last heads of the last sequence."""
    cut = dict(options)
    for name in ("alibi_slopes", "sinks"):
        if name in cut:
            cut[name] = cut[name][..., -group:][-1:] if cut[name].dim() == 2 else cut[name][-group:]
    return cut


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    """From the kernel to the public function with gradients, on one small case."""
    (case,) = find_dense_cases([HOST_CASE], device)
    inputs = make_dense_inputs(case, dtype, device)
    call = partial(torch.ops.vk.attention, inputs.q, inputs.k, inputs.v)
    return [
        raw_launch("raw Triton launch of the forward kernel", call, attention_path(inputs)),
        *op_calls("attention", lambda function, q: partial(function, q, inputs.k, inputs.v), inputs.q),
    ]


def _kernels(case: DenseCase, inputs: DenseInputs) -> list[TunedKernel]:
    dtype, masked = dtype_name(inputs.q.dtype), is_masked(inputs.options)
    lengths = {name: (inputs.k if "dkdv" in name else inputs.q).shape[2] for name in explained(inputs)["kernels"]}
    return [TunedKernel(name, "bwd" in name, dtype, case.head_dim, masked, length) for name, length in lengths.items()]


BENCH = OpBench(
    op="attention", cases=find_dense_cases, profiled="b8h32s2048d128_causal", shape=dense_notation,
    inputs=make_dense_inputs, checks=_checks, cost=attention_cost, path=attention_path, ours=OURS,
    baselines=(AS_FP16, AS_BF16, *DENSE_BASELINES),
    # Those of 16-bit types and those of fp32; what cannot run a type says so.
    usual={
        "cuda": (OURS_AS_FP16, "cudnn", "flash2", "flash4", "flash4_deterministic", "efficient", "math"),
        "cpu": (OURS_AS_FP16, "math"),
    },
    host_calls=_host_calls, kernels=_kernels,
)  # fmt: skip
