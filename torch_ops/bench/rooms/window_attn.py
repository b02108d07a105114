"""The benchmark of `vk::window_attn`."""

from functools import partial

import torch

import torch_ops
from torch_ops.bench.measure import results
from torch_ops.bench.measure.host import raw_launch
from torch_ops.bench.measure.opbench import LAYER_US, Call, HostCall, Impl, OpBench, op_calls, ours
from torch_ops.bench.peers.packed import BASELINES, packed_call
from torch_ops.bench.rooms.packed import attention_cost, attention_path, packed_checks, packed_kernels
from torch_ops.bench.rooms.packed_cases import find_cases, notation
from torch_ops.testing.cases import WindowAttnCase, WindowAttnInputs, make_inputs

# The case whose host time is taken: so small that the device is never behind.
HOST_CASE = "1x128x16x72"


def _bind(deterministic: bool, case: WindowAttnCase, inputs: WindowAttnInputs) -> Call:
    op = partial(torch_ops.window_attn, deterministic=deterministic)
    return packed_call(inputs, lambda q, k, v: inputs.call(op, q=q, k=k, v=v))


OURS = ours(partial(_bind, True), "vk::window_attn")
# The flag changes nothing in the forward.
OURS_FREE = Impl(
    results.VK_FREE, partial(_bind, False), "vk::window_attn with deterministic=False", directions=("backward",),
    group=results.OURS,
)  # fmt: skip


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    """From the kernel to the public function with gradients, on one small case."""
    (case,) = find_cases([HOST_CASE], device)
    inputs = make_inputs(case, dtype, device)
    rest = inputs.k, inputs.v, inputs.cu_seqlens
    call = partial(torch.ops.vk.window_attn, inputs.q, *rest)
    return [
        raw_launch("raw Triton launch of the forward kernel", call, attention_path(inputs)),
        *op_calls("window_attn", lambda function, q: partial(function, q, *rest), inputs.q, most_us=LAYER_US),
    ]


BENCH = OpBench(
    op="window_attn", cases=find_cases, profiled="qwen3vl_l_4096", shape=notation, inputs=make_inputs,
    checks=partial(packed_checks, make_inputs), cost=attention_cost, path=attention_path, ours=OURS,
    baselines=(OURS_FREE, *BASELINES),
    usual={
        "cuda": ("cudnn", "cudnn_packed", "flash2", "flash4", "flash4_deterministic"), "cpu": ("reference",),
    },
    host_calls=_host_calls, kernels=packed_kernels,
)  # fmt: skip
