"""The bench room of `vk::window_attn`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import torch_ops
from csrc_free_ops.attention import (
    hopper_bwd,
    hopper_bwd_apart,
    hopper_bwd_sums,
    hopper_fwd,
    portable_bwd,
    portable_fwd,
    short_bwd,
    short_fwd,
)
from torch_ops import _attention_portable, _attention_short
from torch_ops._attention import plan_forward
from torch_ops._scores import Scores
from torch_ops.bench import results
from torch_ops.bench.attention_peers import PEERS, packed_call
from torch_ops.bench.host import recorded_launches
from torch_ops.bench.packed_cases import find_cases, longest_within, notation, shorten
from torch_ops.bench.room import Call, Contender, Cost, HostCall, Room, Trial, TunedKernel
from torch_ops.testing import references
from torch_ops.testing.cases import (
    WindowAttnCase,
    WindowAttnInputs,
    cumulative,
    make_inputs,
    window_attn_cases,
)

# The case whose host time is taken: so small that the device is never behind.
HOST_CASE = "1x128x16x72"
PROFILED = "qwen3vl_l_4096"
JITS = tuple(
    vars(module)[name]
    for module in (
        portable_fwd,
        portable_bwd,
        short_fwd,
        short_bwd,
        hopper_fwd,
        hopper_bwd,
        hopper_bwd_apart,
        hopper_bwd_sums,
    )
    for name in vars(module)
    if name.startswith("_attention_") and name.endswith("_kernel")
)


def _ours(name: str, about: str, deterministic: bool = True, **rest: Any) -> Contender:
    op = partial(torch_ops.window_attn, deterministic=deterministic)

    def bind(case: WindowAttnCase, inputs: WindowAttnInputs) -> Call:
        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return inputs.call(op, q=q, k=k, v=v)

        return packed_call(inputs, forward)

    return Contender(name, bind, lambda case, dtype, device: "", lambda: about, **rest)


OURS = _ours(results.OURS, "vk::window_attn")
# The flag changes nothing in the forward.
OURS_FREE = _ours(
    results.OURS_FREE, "vk::window_attn with deterministic=False", deterministic=False, directions=("backward",)
)


def _cases(wanted: Sequence[str], device: torch.device) -> tuple[WindowAttnCase, ...]:
    if wanted:
        return find_cases(wanted)
    return window_attn_cases("bench" if device.type == "cuda" else "smoke")


def _profiled(wanted: Sequence[str], device: torch.device) -> tuple[WindowAttnCase, ...]:
    if wanted:
        return find_cases(wanted)
    return find_cases([PROFILED]) if device.type == "cuda" else window_attn_cases("smoke")[:1]


def _default_peers(device: torch.device) -> tuple[str, ...]:
    return ("cudnn", "flash2", "flash4") if device.type == "cuda" else ("reference",)


def _cost(inputs: WindowAttnInputs, backward: bool) -> Cost:
    """Two products in the forward, five in the backward, of the pairs that options leave seen."""
    flops = inputs.call(flop_registry[torch.ops.vk.window_attn])
    heads_rows = inputs.q.shape[0] * inputs.q.shape[1]
    lse = heads_rows * inputs.dlse.element_size()
    boundaries = inputs.cu_seqlens.nbytes
    if inputs.cu_seqlens_k is not None:
        boundaries += inputs.cu_seqlens_k.nbytes
    queries, keys = inputs.q.numel(), inputs.k.numel() + inputs.v.numel()
    item = inputs.q.element_size()
    if not backward:
        return Cost(flops, item * (2 * queries + keys) + lse + boundaries)
    # Read: q, k, v, out, dout, lse; written: dq, dk, dv.
    return Cost(flops * 5 // 2, item * (4 * queries + 2 * keys) + lse + boundaries)


def _explained(inputs: WindowAttnInputs) -> dict[str, Any]:
    explained: dict[str, Any] = inputs.call(
        lambda *args, **options: torch_ops.explain(torch_ops.window_attn, *args, **options)
    )
    return explained


def _path(inputs: WindowAttnInputs) -> str:
    return str(_explained(inputs)["path"])


def _kernels(case: WindowAttnCase, inputs: WindowAttnInputs) -> list[TunedKernel]:
    segments = len(case.lengths)
    options = inputs.options
    masked = bool(options.get("causal")) or any(options.get(f"window_{side}", -1) >= 0 for side in ("left", "right"))
    return [
        TunedKernel(
            name=name,
            backward="bwd" in name,
            dtype=str(inputs.q.dtype).removeprefix("torch."),
            head_dim=inputs.q.shape[2],
            masked=masked,
            length=(inputs.k if "dkdv" in name else inputs.q).shape[0] // max(segments, 1),
        )
        for name in _explained(inputs)["kernels"]
    ]


def _trials(case: WindowAttnCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Trial]:
    """Every row and head of a shortened case and, where it was shortened, a look at the case too.

    What is timed may run code that the shortened case does not reach: another launch, another path.
    So the case itself is run too, and the heads of its last key head are compared on the longest
    and the last segment, which is all that fp64 has room for.
    """
    # Entries of score matrices: in fp64, and with a gradient, the reference keeps several of them.
    entries, entries_of_one = 2**22, 2**24
    if device.type == "cuda":
        entries = entries_of_one = min(2**28, torch.cuda.get_device_properties(device).total_memory // 128)
    reduced = shorten(case, entries, case.num_heads)
    inputs = make_inputs(reduced, dtype, device, seed=1)
    truths = _truth(inputs, torch.float64, backward), _truth(inputs, dtype, backward)
    trials = [Trial(notation(reduced), reduced, inputs, lambda name, tensor: tensor, *truths)]
    if reduced == case:
        return trials
    group = case.num_heads // (case.num_k_heads or case.num_heads)
    whole = longest_within(case, entries_of_one // group)
    inputs = make_inputs(whole, dtype, device, seed=2)
    last = len(whole.lengths) - 1
    longest = whole.lengths.index(max(whole.lengths))
    cuts = [_Cut(whole, segment, group) for segment in sorted({longest, last})]
    label = f"{notation(whole)}, the last of {case.num_heads // group} key heads"

    def look(name: str, tensor: Tensor) -> Tensor:
        return torch.cat([cut(name, tensor).flatten() for cut in cuts])

    def truth(kind: torch.dtype) -> dict[str, Tensor]:
        parts = [_truth(cut.inputs(inputs), kind, backward) for cut in cuts]
        return {name: torch.cat([part[name].flatten() for part in parts]) for name in parts[0]}

    return [*trials, Trial(label, whole, inputs, look, truth(torch.float64), truth(dtype))]


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
        cut: dict[str, Any] = {name: self(name, getattr(inputs, name)) for name in ("q", "k", "v", "dout")}
        queries, keys = (cumulative((length,), device) for length in self.lengths)
        return replace(inputs, cu_seqlens=queries, cu_seqlens_k=keys, **cut)


def _truth(inputs: WindowAttnInputs, dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
    """out, and with `backward` dq, dk, dv, by the reference in `dtype`."""
    tensors = {name: getattr(inputs, name).detach().to(dtype).requires_grad_(backward) for name in ("q", "k", "v")}
    out, _ = inputs.call(references.window_attn, **tensors)
    if not backward:
        return {"out": out}
    grads = torch.autograd.grad(out, tuple(tensors.values()), inputs.dout.to(dtype), materialize_grads=True)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    """From ATen's smallest op to the public function with gradients, on one small case."""
    (case,) = find_cases([HOST_CASE])
    inputs = make_inputs(case, dtype, device)
    q, k, v, cu_seqlens = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
    leaf = q.detach().clone().requires_grad_()
    op = torch.ops.vk.window_attn
    number = torch.ones(16, device=device)
    launch, launcher, why = _raw_calls(inputs)
    return [
        HostCall("ATen add", lambda: torch.add(number, number)),
        HostCall("raw Triton launch of the forward kernel", launch, raw=True, note=why),
        HostCall("launcher, its plan made", launcher, note="" if launcher else why),
        HostCall("torch.ops.vk.window_attn", lambda: op(q, k, v, cu_seqlens), target=1.8),
        HostCall("torch_ops.window_attn", lambda: torch_ops.window_attn(q, k, v, cu_seqlens), target=1.8),
        HostCall(
            "torch.ops.vk.window_attn with gradients",
            lambda: op(leaf, k, v, cu_seqlens),
            target=2.5,
        ),
        HostCall(
            "torch_ops.window_attn with gradients",
            lambda: torch_ops.window_attn(leaf, k, v, cu_seqlens),
            target=2.5,
        ),
    ]


def _raw_calls(
    inputs: WindowAttnInputs,
) -> tuple[Callable[[], object] | None, Callable[[], object] | None, str]:
    """The kernel's launch and the launcher's call, or why there are none."""
    path = _path(inputs)
    if path == "reference":
        return None, None, "there is none on this device"
    q, k, v, cu_seqlens = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
    out, lse = torch.ops.vk.window_attn(q, k, v, cu_seqlens)
    scores = Scores.of(q.shape[2], None, False, -1, -1, 0.0)
    planned = plan_forward(q, k, v, cu_seqlens, None, scores)

    def launcher() -> None:
        planned(q, k, v, cu_seqlens, None, out, lse)

    if path == "hopper":
        return None, launcher, "Hopper's launcher keeps its launches to itself"
    with recorded_launches((_attention_portable, _attention_short)) as launches:
        launcher()
    return launches.replay, launcher, ""


ROOM = Room(
    op="window_attn",
    cases=_cases,
    profiled=_profiled,
    shape=notation,
    inputs=make_inputs,
    trials=_trials,
    cost=_cost,
    path=_path,
    ours=OURS,
    peers=(OURS_FREE, *PEERS),
    default_peers=_default_peers,
    host_calls=_host_calls,
    kernels=_kernels,
    jits=JITS,
)
