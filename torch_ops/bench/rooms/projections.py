"""Shared by the benchmarks of the projections: cases by name, calls, reference, kernels, host time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import torch_ops
from csrc_free_ops.configs.rows import PRODUCTS
from torch_ops._gemm.plan import FEW_ROWS, GELU_WITHIN, NOTHING_FOLLOWS
from torch_ops.bench.measure.host import recorded_launches
from torch_ops.bench.measure.opbench import Call, Check, Cost, HostCall, Impl, OpBench, TunedKernel, most_us_of
from torch_ops.bench.measure.results import OURS, VK
from torch_ops.testing.cases import MergerInputs, MlpInputs, QkvRopeInputs, VisionAttentionInputs, outcome

Inputs = QkvRopeInputs | MlpInputs | MergerInputs | VisionAttentionInputs


def bind(function: Callable[..., Any], inputs: Inputs) -> Call:
    """A call of function(*args) as the op is called."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.leaves.items()}
    return Call(
        lambda: inputs.call(function, **leaves), leaves, tuple(inputs.douts.values()), outputs=tuple(inputs.douts)
    )


def impl(name: str, function: Callable[..., Any], about: str, **rest: Any) -> Impl:
    """One that takes whatever the op takes."""
    return Impl(name, lambda case, inputs: bind(function, inputs), about, **rest)


def _compiled(reference: Callable[..., Any], about: str) -> Impl:
    """`torch.compile` of the eager form, compiled for each case anew."""

    def bind_compiled(case: Any, inputs: Inputs) -> Call:
        return bind(torch.compile(reference, fullgraph=True, dynamic=False), inputs)

    return Impl("compiled", bind_compiled, about)


def whole_checks(reference: Callable[..., Any], inputs: Inputs, label: str, case: Any, backward: bool) -> list[Check]:
    """Every result and gradient of the case itself."""
    truth = outcome(reference, inputs, torch.float64, backward)
    return [Check(label, case, inputs, truth, outcome(reference, inputs, None, backward))]


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
        # Other kernels than products have a benchmark of their own, and on the Hopper path no row decides.
        if name not in PRODUCTS or {FEW_ROWS, GELU_WITHIN, NOTHING_FOLLOWS}.issuperset(choice["source"].split("; ")):
            continue
        n, k = map(int, size.split("x"))
        found.append(TunedKernel(name, False, str(inputs.x.dtype).removeprefix("torch."), 0, False, rows, n, k))
    return found


def _host_calls(
    op: Any, function: Callable[..., Any], reference: Callable[..., Any], inputs: Inputs, most_us: float | None
) -> list[HostCall]:
    """From the kernels to the public function with gradients; inputs are so small that no call waits."""
    x = inputs.x.detach().clone().requires_grad_()
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
    of_op = [] if op is None else [HostCall(name, lambda: inputs.call(op))]
    return [
        HostCall("eager PyTorch", lambda: inputs.call(reference)),
        HostCall("eager PyTorch with gradients", lambda: inputs.call(reference, x=x)),
        HostCall("raw Triton launches of the forward", launch, raw=True, note=why),
        *of_op,
        HostCall(f"torch_ops.{function.__name__}", lambda: inputs.call(function), most_us=most_us),
        HostCall(
            f"torch_ops.{function.__name__} with gradients",
            lambda: inputs.call(function, x=x),
            most_us=most_us_of(most_us, " with gradients"),
        ),
    ]


def make_bench(
    function: Callable[..., Any], reference: Callable[..., Any], inputs: Callable[..., Any], host_case: Any,
    flops: Callable[..., int] | None = None, most_us: float | None = None, **rest: Any,
) -> OpBench:  # fmt: skip
    """The benchmark of the op whose public function this is; `rest` are fields of `OpBench`.

    The eager form and its torch.compile version are baselines besides the given ones.

    Args:
        host_case: a case so small that the device is never behind.
        flops: counts a call of a function that is no op of its own.
        most_us: what the host may take for an eager call.
    """
    name = function.__name__
    op = getattr(torch.ops.vk, name) if flops is None else None
    count = flops or flop_registry[op]
    eager = impl("eager", reference, "the ops one after another in eager PyTorch")
    baselines = (*rest.pop("baselines"), eager, _compiled(reference, "torch.compile of the eager form"))
    shape = rest["shape"]

    def make_checks(case: Any, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Check]:
        return whole_checks(reference, inputs(case, dtype, device, seed=1), shape(case), case, backward)

    names = tuple(each.name for each in baselines)
    return OpBench(
        **rest, op=name, inputs=inputs, checks=make_checks,
        cost=lambda drawn, backward: linear_cost(count, drawn, backward),
        path=lambda drawn: str(_explained(function, drawn)["path"]),
        ours=impl(VK, function, f"vk::{name}" if op else f"torch_ops.{name}", group=OURS), baselines=baselines,
        usual={"cuda": names, "cpu": tuple(each for each in names if each != "compiled")},
        host_calls=lambda dtype, device: _host_calls(
            op, function, reference, inputs(host_case, dtype, device), most_us
        ),
        kernels=lambda case, drawn: _kernels(function, drawn, case.rows),
    )  # fmt: skip
