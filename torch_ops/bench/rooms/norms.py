"""The bench rooms of the norms: `vk::layer_norm`, `vk::add_layer_norm`, `vk::rms_norm`, `vk::add_rms_norm`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_ops
from csrc_free_ops import norms as kernels
from torch_ops.bench.measure import results
from torch_ops.bench.measure.host import recorded_launches
from torch_ops.bench.measure.room import Call, Contender, Cost, HostCall, Room, Trial, TunedKernel, find_named
from torch_ops.testing import references
from torch_ops.testing.cases import NORMS, NormCase, NormInputs, make_norm_inputs, norm_cases

OPS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
PROFILED = "qwen_l_4096"
HOST_CASE = NormCase("host", "so small that the device is never behind", (128,), 1152)
JITS = tuple(jit for name, jit in vars(kernels).items() if name.startswith("_norm_") and name.endswith("_kernel"))
# Of fp64 tensors of a case, and of those that a gradient keeps, memory has room for so many elements.
JUDGED_ELEMENTS = {"cuda": 2**28, "cpu": 2**21}


def _find_cases(wanted: Sequence[str]) -> tuple[NormCase, ...]:
    """Cases by name, by a pattern of names or as ROWSxWIDTH; ValueError names the choices."""
    found: dict[str, NormCase] = {}
    for text in (text.strip() for item in wanted for text in item.split(",")):
        shape = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if shape:
            rows, width = map(int, shape.groups())
            found[text] = NormCase(text, "the shape that was asked for", (rows,), width)
        else:
            found |= {case.name: case for case in find_named(NORMS, [text])}
    return tuple(found.values())


def _cases(wanted: Sequence[str], device: torch.device) -> tuple[NormCase, ...]:
    return _find_cases(wanted) if wanted else norm_cases("bench" if device.type == "cuda" else "smoke")


def _profiled(wanted: Sequence[str], device: torch.device) -> tuple[NormCase, ...]:
    if wanted:
        return _find_cases(wanted)
    return _find_cases([PROFILED]) if device.type == "cuda" else norm_cases("smoke")[:1]


def _shape(case: NormCase) -> str:
    return "x".join(map(str, case.shape))


def _bound(function: Callable[..., Any], inputs: NormInputs) -> Call:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.tensors.items()}
    outputs = ("normed",) if inputs.residual is None else ("normed", "sum")
    douts = (inputs.dout, inputs.dsum)[: len(outputs)]
    return Call(lambda: inputs.call(function, **leaves), leaves, douts, outputs=outputs)


def _contender(name: str, about: str, make: Callable[[], Callable[..., Any]]) -> Contender:
    return Contender(name, lambda case, inputs: _bound(make(), inputs), lambda case, dtype, device: "", lambda: about)


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


def _yardstick(name: str, about: str, move: Callable[[Tensor], Tensor]) -> Contender:
    return Contender(name, partial(_bind_moves, move), lambda case, dtype, device: "", lambda: about, yardstick=about)


# Copies are the driver's: of a GiB and at some odd sizes 2.7 TB/s on an H200, where elementwise kernels reach 4.
YARDSTICKS = (
    _yardstick("copy", "clones as many bytes and computes nothing", torch.clone),
    _yardstick("neg", "negates as many bytes, by a kernel of PyTorch's as the norm is one", torch.neg),
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


def _trials(op: str, case: NormCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Trial]:
    """Every row, or as many as there is room for."""
    rows = max(1, min(case.rows[0], JUDGED_ELEMENTS[device.type] // case.width))
    reduced = case if rows == case.rows[0] else replace(case, rows=(rows, *case.rows[1:]))
    inputs = make_norm_inputs(op, reduced, dtype, device, seed=1)
    truths = (_bound(getattr(references, op), each).results(backward) for each in (inputs.exact, inputs))
    return [Trial(_shape(reduced), reduced, inputs, lambda name, tensor: tensor, *truths)]


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
    """From ATen's smallest op to the public function with gradients, on one small case."""
    inputs = make_norm_inputs(op, HOST_CASE, dtype, device)
    leaf = inputs.x.detach().clone().requires_grad_()
    number = torch.ones(16, device=device)
    operator, public = getattr(torch.ops.vk, op), getattr(torch_ops, op)
    launch, why = _raw_launch(op, inputs)
    return [
        HostCall("ATen add", lambda: torch.add(number, number)),
        HostCall("eager PyTorch", lambda: inputs.call(getattr(references, op))),
        HostCall("raw Triton launch of the forward kernel", launch, raw=True, note=why),
        HostCall(f"torch.ops.vk.{op}", lambda: inputs.call(operator), target=1.8),
        HostCall(f"torch_ops.{op}", lambda: inputs.call(public), target=1.8),
        HostCall(f"torch_ops.{op} with gradients", lambda: inputs.call(public, x=leaf), target=2.5),
    ]


def _raw_launch(op: str, inputs: NormInputs) -> tuple[Callable[[], object] | None, str]:
    if _path(op, inputs) == "reference":
        return None, "there is none on this device"
    with recorded_launches() as launches:
        inputs.call(getattr(torch_ops, op))
    return launches.replay, ""


def _room(op: str) -> Room:
    return Room(
        op=op,
        cases=_cases,
        profiled=_profiled,
        shape=_shape,
        inputs=partial(make_norm_inputs, op),
        trials=partial(_trials, op),
        cost=_cost,
        path=partial(_path, op),
        ours=_contender(results.OURS, f"vk::{op}", lambda: getattr(torch_ops, op)),
        peers=(
            _contender("eager", f"torch_ops.testing.references.{op}", lambda: getattr(references, op)),
            _contender("compiled", "the same under torch.compile", partial(_compiled, op)),
            *YARDSTICKS,
        ),
        default_peers=lambda device: ("eager", *(("compiled",) if device.type == "cuda" else ()), "copy", "neg"),
        host_calls=partial(_host_calls, op),
        kernels=partial(_kernels, op),
        jits=JITS,
    )


ROOMS = tuple(map(_room, OPS))
