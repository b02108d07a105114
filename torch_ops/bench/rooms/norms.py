"""The benchmarks of the norms: `vk::layer_norm`, `vk::add_layer_norm`, `vk::rms_norm`, `vk::add_rms_norm`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_ops
from torch_ops.bench.measure import results
from torch_ops.bench.measure.host import raw_launch
from torch_ops.bench.measure.opbench import (
    ONE_KERNEL_US,
    Call,
    Check,
    Cost,
    HostCall,
    Impl,
    OpBench,
    TunedKernel,
    op_calls,
    select,
)
from torch_ops.testing import references
from torch_ops.testing.cases import NORMS, NormCase, NormInputs, make_norm_inputs

OPS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
HOST_CASE = NormCase("host", "so small that the device is never behind", (128,), 1152)
# Elements of a case that fit into memory in fp64, with the tensors that a gradient keeps.
JUDGED_ELEMENTS = {"cuda": 2**28, "cpu": 2**21}


def _from_notation(text: str) -> NormCase | None:
    shape = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    return NormCase(text, "the shape that was asked for", (int(shape[1]),), int(shape[2])) if shape else None


def _cases(wanted: Sequence[str], device: torch.device) -> tuple[NormCase, ...]:
    return select(NORMS, wanted, device, _from_notation, ", or ROWSxWIDTH such as 4096x1152")


def _shape(case: NormCase) -> str:
    return "x".join(map(str, case.shape))


def _bound(function: Callable[..., Any], inputs: NormInputs) -> Call:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.tensors.items()}
    outputs = ("normed",) if inputs.residual is None else ("normed", "sum")
    douts = (inputs.dout, inputs.dsum)[: len(outputs)]
    return Call(lambda: inputs.call(function, **leaves), leaves, douts, outputs=outputs)


def _impl(name: str, about: str, make: Callable[[], Callable[..., Any]], group: str = results.BASELINE) -> Impl:
    return Impl(name, lambda case, inputs: _bound(make(), inputs), about, group=group)


def _compiled(op: str) -> Callable[..., Any]:
    function: Callable[..., Any] = torch.compile(getattr(references, op), fullgraph=True, dynamic=False)
    return function


@dataclass(frozen=True)
class _Moves(Call):
    """Moves the rows that the norm must read and write, and computes nothing."""

    backward: Callable[[], Tensor] = torch.Tensor

    def backward_of(self, result: Any) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (self.backward(),)


def _bind_moves(move: Callable[[Tensor], Tensor], case: NormCase, inputs: NormInputs) -> Call:
    def moved(backward: bool) -> Callable[[], Tensor]:
        # Not the parameters: with their 2304 bytes the driver's copy takes half as long again (H200, CUDA 13.0).
        elements = _tensors_moved(inputs, backward) * inputs.x.numel() // 2
        source = torch.randn(elements, device=inputs.x.device).to(inputs.x.dtype)
        # Into memory of its own, as an op's result is: what comes next may lie where the last result lay.
        return partial(move, source)

    return _Moves(moved(False), {}, (), backward=moved(True))


def _reference_point(name: str, about: str, move: Callable[[Tensor], Tensor]) -> Impl:
    return Impl(name, partial(_bind_moves, move), about, reference_point=about)


# Copies are the driver's: of a GiB and at some odd sizes 2.7 TB/s on an H200, where elementwise kernels reach 4.
REFERENCE_POINTS = (
    _reference_point("copy", "clones as many bytes and computes nothing", torch.clone),
    _reference_point("neg", "negates as many bytes, by a kernel of PyTorch's as the norm is one", torch.neg),
)


def _tensors_moved(inputs: NormInputs, backward: bool) -> int:
    """Tensors of x's shape. Forward: x and the residual in, both results out. Backward: the gradients of the results
    and what was normed in, one gradient out."""
    tensors = 1 if inputs.residual is None else 2
    return 2 + tensors if backward else 2 * tensors


def _cost(inputs: NormInputs, backward: bool) -> Cost:
    """Per element some ten operations of fp32: what a copy of so many bytes has time for many times over."""
    moved = _tensors_moved(inputs, backward) * inputs.x.numel() * inputs.x.element_size()
    parameters = sum(vector.nbytes for vector in (inputs.weight, inputs.bias) if vector is not None)
    weight = 0 if inputs.weight is None else inputs.weight.nbytes
    return Cost((16 if backward else 8) * inputs.x.numel(), moved + (weight + parameters if backward else parameters))


def _checks(op: str, case: NormCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Check]:
    """Every row, or as many as fit into memory."""
    rows = max(1, min(case.rows[0], JUDGED_ELEMENTS[device.type] // case.width))
    reduced = case if rows == case.rows[0] else replace(case, rows=(rows, *case.rows[1:]))
    inputs = make_norm_inputs(op, reduced, dtype, device, seed=1)
    truths = (_bound(getattr(references, op), each).results(backward) for each in (inputs.exact, inputs))
    return [Check(_shape(reduced), reduced, inputs, *truths)]


def _report(op: str, inputs: NormInputs) -> dict[str, Any]:
    return torch_ops.explain(getattr(torch_ops, op), **inputs.tensors, eps=inputs.eps)


def _path(op: str, inputs: NormInputs) -> str:
    return str(_report(op, inputs)["path"])


def _kernels(op: str, case: NormCase, inputs: NormInputs) -> list[TunedKernel]:
    if _path(op, inputs) == "reference":
        return []
    dtype = str(inputs.x.dtype).removeprefix("torch.")
    width = inputs.x.shape[-1]
    rows = inputs.x.numel() // width
    return [TunedKernel(name, "bwd" in name, dtype, width, False, rows) for name in _report(op, inputs)["kernels"]]


def _host_calls(op: str, dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    """From the kernel to the public function with gradients, on one small case."""
    inputs = make_norm_inputs(op, HOST_CASE, dtype, device)
    call = partial(inputs.call, getattr(torch_ops, op))
    return [
        HostCall("eager PyTorch", lambda: inputs.call(getattr(references, op))),
        raw_launch("raw Triton launch of the forward kernel", call, _path(op, inputs)),
        *op_calls(op, lambda function, x: partial(inputs.call, function, x=x), inputs.x, most_us=ONE_KERNEL_US),
    ]


def _bench(op: str) -> OpBench:
    return OpBench(
        op=op, cases=_cases, profiled="qwen_l_4096", shape=_shape, inputs=partial(make_norm_inputs, op),
        checks=partial(_checks, op), cost=_cost, path=partial(_path, op),
        ours=_impl(results.VK, f"vk::{op}", lambda: getattr(torch_ops, op), results.OURS),
        baselines=(
            _impl("eager", f"torch_ops.testing.references.{op}", lambda: getattr(references, op)),
            _impl("compiled", "the same under torch.compile", partial(_compiled, op)),
            *REFERENCE_POINTS,
        ),
        usual={"cuda": ("eager", "compiled", "copy", "neg"), "cpu": ("eager", "copy", "neg")},
        host_calls=partial(_host_calls, op), kernels=partial(_kernels, op),
    )  # fmt: skip


BENCHES = tuple(map(_bench, OPS))
