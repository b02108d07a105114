"""Shared by the benchmarks of attention, packed attention above all: reference, cost, path and kernels of a call."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import torch_ops
from torch_ops.bench.measure.opbench import Check, Cost, TunedKernel
from torch_ops.bench.rooms.packed_cases import longest_within, notation, shorten
from torch_ops.testing import references
from torch_ops.testing.cases import DenseInputs, SegmentInputs, WindowAttnCase, WindowAttnInputs, cumulative


def attention_cost(inputs: WindowAttnInputs | DenseInputs, backward: bool) -> Cost:
    """Two products in the forward, five in the backward, of the pairs that options leave seen."""
    flops = inputs.call(flop_registry[getattr(torch.ops.vk, inputs.op)])
    lse = inputs.q.shape[:-1].numel() * inputs.dlse.element_size()
    places = getattr(inputs, "cu_seqlens", None), getattr(inputs, "cu_seqlens_k", None)
    boundaries = sum(place.nbytes for place in places if place is not None)
    queries, keys = inputs.q.numel(), inputs.k.numel() + inputs.v.numel()
    item = inputs.q.element_size()
    if not backward:
        return Cost(flops, item * (2 * queries + keys) + lse + boundaries)
    # Read: q, k, v, out, dout, lse; written: dq, dk, dv.
    return Cost(flops * 5 // 2, item * (4 * queries + 2 * keys) + lse + boundaries)


def explained(inputs: WindowAttnInputs | DenseInputs) -> dict[str, Any]:
    report: dict[str, Any] = inputs.call(partial(torch_ops.explain, getattr(torch_ops, inputs.op)))
    return report


def attention_path(inputs: WindowAttnInputs | DenseInputs) -> str:
    return str(explained(inputs)["path"])


def is_masked(options: dict[str, Any]) -> bool:
    return bool(options.get("causal")) or any(options.get(f"window_{side}", -1) >= 0 for side in ("left", "right"))


def packed_kernels(case: WindowAttnCase, inputs: WindowAttnInputs) -> list[TunedKernel]:
    segments = len(case.lengths)
    masked = is_masked(inputs.options)

    def tuned(name: str) -> TunedKernel:
        rows = (inputs.k if "dkdv" in name else inputs.q).shape[0]
        # The rotation of q and k knows rows alone, and neither segments nor bounds.
        rotation = name == "rope"
        return TunedKernel(
            name=name, backward="bwd" in name, dtype=str(inputs.q.dtype).removeprefix("torch."),
            head_dim=inputs.q.shape[2], masked=masked and not rotation,
            length=rows if rotation else rows // max(segments, 1),
        )  # fmt: skip

    return list(map(tuned, explained(inputs)["kernels"]))


def entries_for_truth(device: torch.device) -> tuple[int, int]:
    """The most entries of score matrices of a whole case, and of a cut of one; in fp64 the reference keeps several."""
    if device.type != "cuda":
        return 2**22, 2**24
    entries = min(2**28, torch.cuda.get_device_properties(device).total_memory // 128)
    return entries, entries


def packed_checks(
    make: Callable[..., WindowAttnInputs], case: WindowAttnCase, dtype: torch.dtype, device: torch.device,
    backward: bool,
) -> list[Check]:  # fmt: skip
    """Every row and head of a shortened case and, where it was shortened, a look at the case too.

    The timed case may run code that the shortened case does not reach: another launch, another path.
    So the case itself is run too. The heads of its last key head are compared on the longest and the last segment,
    which fit into memory in fp64.
    """
    entries, entries_of_one = entries_for_truth(device)
    reduced = shorten(case, entries, case.num_heads)
    inputs = make(reduced, dtype, device, seed=1)
    truths = truth_of(inputs, torch.float64, backward), truth_of(inputs, dtype, backward)
    checks = [Check(notation(reduced), reduced, inputs, *truths)]
    if reduced == case:
        return checks
    group = case.num_heads // (case.num_k_heads or case.num_heads)
    whole = longest_within(case, entries_of_one // group)
    inputs = make(whole, dtype, device, seed=2)
    last = len(whole.lengths) - 1
    longest = whole.lengths.index(max(whole.lengths))
    cuts = [_Cut(whole, segment, group) for segment in sorted({longest, last})]
    label = f"{notation(whole)}, the last of {case.num_heads // group} key heads"

    def look(name: str, tensor: Tensor) -> Tensor:
        return torch.cat([cut(name, tensor).flatten() for cut in cuts])

    def truth(kind: torch.dtype) -> dict[str, Tensor]:
        parts = [truth_of(cut.inputs(inputs), kind, backward) for cut in cuts]
        return {name: torch.cat([part[name].flatten() for part in parts]) for name in parts[0]}

    return [*checks, Check(label, whole, inputs, truth(torch.float64), truth(dtype), look=look)]


class _Cut:
    """One segment and the heads of the last key head: attention of its own."""

    def __init__(self, case: WindowAttnCase, segment: int, group: int) -> None:
        self.lengths = case.lengths[segment], (case.k_lengths or case.lengths)[segment]
        starts = sum(case.lengths[:segment]), sum((case.k_lengths or case.lengths)[:segment])
        self.rows, self.keys = (
            slice(start, start + length) for start, length in zip(starts, self.lengths, strict=True)
        )
        self.group = group

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The part of q, k, v, out or a gradient, by its name, that belongs here."""
        if name in ("k", "v", "dk", "dv"):
            return tensor[self.keys, -1:]
        return tensor[self.rows, -self.group :]

    def inputs(self, inputs: WindowAttnInputs) -> WindowAttnInputs:
        device = inputs.q.device
        by_row = ("q", "k", "v", "dout")
        cut: dict[str, Any] = {name: self(name, getattr(inputs, name)) for name in by_row}
        # One row for all heads.
        cut |= {name: getattr(inputs, name)[self.rows] for name in ("cos", "sin") if hasattr(inputs, name)}
        queries, keys = (cumulative((length,), device) for length in self.lengths)
        return replace(inputs, cu_seqlens=queries, cu_seqlens_k=keys, **cut)


def truth_of(
    inputs: WindowAttnInputs | DenseInputs | SegmentInputs, dtype: torch.dtype, backward: bool
) -> dict[str, Tensor]:
    """out, and with `backward` dq, dk, dv, by the reference in `dtype`."""
    tensors = {name: getattr(inputs, name).detach().to(dtype).requires_grad_(backward) for name in ("q", "k", "v")}
    out, _ = inputs.call(getattr(references, inputs.op), **tensors)
    if not backward:
        return {"out": out}
    grads = torch.autograd.grad(out, tuple(tensors.values()), inputs.dout.to(dtype), materialize_grads=True)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
