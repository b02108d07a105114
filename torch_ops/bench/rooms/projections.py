"""What the bench rooms of the projections share: cases by name, calls, what is right, kernels, host time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import torch_ops
from csrc_free_ops.configs.rows import PRODUCTS
from csrc_free_ops.gemm import activations, portable, rotary
from torch_ops._gemm.plan import FEW_ROWS, GELU_WITHIN, NOTHING_FOLLOWS
from torch_ops.bench.measure import results
from torch_ops.bench.measure.host import recorded_launches
from torch_ops.bench.measure.room import Call, Contender, Cost, HostCall, Room, Trial, TunedKernel, find_named
from torch_ops.testing.cases import MergerInputs, MlpInputs, QkvRopeInputs, VisionAttentionInputs, outcome

Inputs = QkvRopeInputs | MlpInputs | MergerInputs | VisionAttentionInputs
JITS = tuple(
    kernel
    for module in (portable, activations, rotary)
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
)


def bind(function: Callable[..., Any], inputs: Inputs) -> Call:
    """A call of function(*args) as the op is called."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
    return Call(
        lambda: inputs.call(function, **leaves), leaves, tuple(inputs.douts.values()), outputs=tuple(inputs.douts)
    )


def contender(name: str, function: Callable[..., Any], about: str, **rest: Any) -> Contender:
    """One that takes whatever the op takes."""
    return Contender(name, lambda case, inputs: bind(function, inputs), runs_anywhere, lambda: about, **rest)


def _compiled(reference: Callable[..., Any], about: str) -> Contender:
    """`torch.compile` of the eager form, compiled for each case anew."""

    def bind_compiled(case: Any, inputs: Inputs) -> Call:
        return bind(torch.compile(reference, fullgraph=True, dynamic=False), inputs)

    return Contender("compiled", bind_compiled, runs_anywhere, lambda: about)


def runs_anywhere(case: Any, dtype: torch.dtype, device: torch.device) -> str:
    return ""


def whole_trials(reference: Callable[..., Any], inputs: Inputs, label: str, case: Any, backward: bool) -> list[Trial]:
    """Every result and gradient of the case itself."""
    truth = outcome(reference, inputs, torch.float64, backward)
    return [Trial(label, case, inputs, lambda name, tensor: tensor, truth, outcome(reference, inputs, None, backward))]


def linear_cost(count: Callable[..., int], inputs: Inputs, backward: bool) -> Cost:
    """The backward makes two products for each of the forward's, reads the upstream gradients, and writes all."""
    flops = int(inputs.call(count))
    read = sum(tensor.nbytes for tensor in vars(inputs).values() if isinstance(tensor, Tensor))
    written = sum(leaf.nbytes for leaf in inputs.leaves.values())
    # Upstream gradients are as large as the results.
    return Cost(2 * flops, read + written) if backward else Cost(flops, read)


def _explained(function: Callable[..., Any], inputs: Inputs, **leaves: Tensor) -> dict[str, Any]:
    report: dict[str, Any] = inputs.call(lambda *args, **up: torch_ops.explain(function, *args, **up), **leaves)
    return report


def _kernels(function: Callable[..., Any], inputs: Inputs, rows: int) -> list[TunedKernel]:
    found = []
    # As in training, whose gradient makes no product again.
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
    for described, choice in _explained(function, inputs, **leaves)["kernels"].items():
        name, _, size = described.partition(" ")
        # Beside products there may be kernels that have a room of their own, and on the Hopper path no row decides.
        if name not in PRODUCTS or {FEW_ROWS, GELU_WITHIN, NOTHING_FOLLOWS}.issuperset(choice["source"].split("; ")):
            continue
        n, k = map(int, size.split("x"))
        found.append(TunedKernel(name, False, str(inputs.x.dtype).removeprefix("torch."), 0, False, rows, n, k))
    return found


def _host_calls(op: Any, function: Callable[..., Any], inputs: Inputs) -> list[HostCall]:
    """From ATen's smallest op to the public function with gradients; inputs are so small that no call waits."""
    x = inputs.x.detach().clone().requires_grad_()
    number = torch.ones(16, device=inputs.x.device)
    launch, why = None, "there is none on this device"
    taken = _explained(function, inputs)["path"]
    if op is not None and taken == "portable":
        with recorded_launches() as launches:
            inputs.call(op)
        launch, why = launches.replay, ""
    elif inputs.x.is_cuda:
        why = "launches on the Hopper path are not recorded" if taken == "hopper" else "PyTorch makes the products"
    if op is None:
        why = "they are those of its parts"
    name = f"torch.ops.vk.{function.__name__}"
    of_op = [] if op is None else [HostCall(name, lambda: inputs.call(op), target=1.8)]
    return [
        HostCall("ATen add", lambda: torch.add(number, number)),
        HostCall("raw Triton launches of the forward", launch, raw=True, note=why),
        *of_op,
        HostCall(f"torch_ops.{function.__name__}", lambda: inputs.call(function), target=1.8),
        HostCall(f"torch_ops.{function.__name__} with gradients", lambda: inputs.call(function, x=x), target=2.5),
    ]


def make_room(
    function: Callable[..., Any], reference: Callable[..., Any], cases: tuple[Any, ...],
    inputs: Callable[..., Any], shape: Callable[[Any], str], peers: tuple[Contender, ...], host_case: Any,
    profiled: str, flops: Callable[..., int] | None = None,
) -> Room:  # fmt: skip
    """The room of the op whose public function this is; `host_case` is so small that the device is never behind.

    `flops` counts a call of one that is no op of its own.

    Beside ours and the peers that are given, the eager form and what torch.compile makes of it.
    """
    name = function.__name__
    op = getattr(torch.ops.vk, name) if flops is None else None
    count = flops or flop_registry[op]
    everyone = (
        *peers,
        contender("eager", reference, "the ops one after another in eager PyTorch"),
        _compiled(reference, "torch.compile of the eager form"),
    )

    def find_cases(wanted: Sequence[str], device: torch.device) -> tuple[Any, ...]:
        tag = "bench" if device.type == "cuda" else "smoke"
        return find_named(cases, wanted) if wanted else tuple(case for case in cases if tag in case.tags)

    def find_profiled(wanted: Sequence[str], device: torch.device) -> tuple[Any, ...]:
        return find_cases(wanted or ([profiled] if device.type == "cuda" else ["tower"]), device)

    def make_trials(case: Any, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Trial]:
        return whole_trials(reference, inputs(case, dtype, device, seed=1), shape(case), case, backward)

    def default_peers(device: torch.device) -> tuple[str, ...]:
        return tuple(peer.name for peer in everyone if device.type == "cuda" or peer.name != "compiled")

    return Room(
        op=name,
        cases=find_cases,
        profiled=find_profiled,
        shape=shape,
        inputs=inputs,
        trials=make_trials,
        cost=lambda drawn, backward: linear_cost(count, drawn, backward),
        path=lambda drawn: str(_explained(function, drawn)["path"]),
        ours=contender(results.OURS, function, f"vk::{name}" if op else f"torch_ops.{name}"),
        peers=everyone,
        default_peers=default_peers,
        host_calls=lambda dtype, device: _host_calls(op, function, inputs(host_case, dtype, device)),
        kernels=lambda case, drawn: _kernels(function, drawn, case.rows),
        jits=JITS,
    )
