"""The benchmark of `vk::qkv_rope`."""

from functools import partial

import torch
from torch.nn import functional

from torch_ops import qkv_rope
from torch_ops.bench.measure.opbench import Call, Impl, select
from torch_ops.bench.rooms.projections import bind, make_bench
from torch_ops.testing import references
from torch_ops.testing.cases import QKV_ROPE, QkvRopeCase, QkvRopeInputs, make_qkv_rope_inputs


def _linear(case: QkvRopeCase, inputs: QkvRopeInputs) -> Call:
    call = bind(lambda x, weight, bias, *rest: functional.linear(x, weight, bias), inputs)
    dout = torch.cat([dout.flatten(1) for dout in inputs.douts.values()], 1)
    return Call(call.forward, call.inputs, dout, outputs=("packed",))


LINEAR = Impl(
    "linear", _linear, f"F.linear of torch {torch.__version__}, with its bias",
    reference_point="makes the product alone, without the rotation and in one tensor",
)  # fmt: skip


def _notation(case: QkvRopeCase) -> str:
    heads = str(case.num_heads) if case.num_k_heads is None else f"{case.num_heads}/{case.num_k_heads}"
    return f"{case.rows}x{case.width}, {heads}x{case.head_dim}"


BENCH = make_bench(
    qkv_rope, references.qkv_rope, make_qkv_rope_inputs, QkvRopeCase("host", "host time", 128, 1152, 16, 72),
    cases=partial(select, QKV_ROPE), shape=_notation, baselines=(LINEAR,), profiled="qkv_1152_4096",
)  # fmt: skip
