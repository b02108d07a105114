"""The bench room of `vk::attention_decode`: next to PyTorch's attention on caches that are full."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import torch_ops
from csrc_free_ops.attention.portable import decode
from torch_ops.bench.measure import results
from torch_ops.bench.measure.host import recorded_launches
from torch_ops.bench.measure.room import Call, Contender, Cost, HostCall, Room, Trial, TunedKernel, find_named
from torch_ops.bench.peers.dense import sdpa_options
from torch_ops.testing import references
from torch_ops.testing.cases import DECODE, DecodeCase, DecodeInputs, decode_cases, make_decode_inputs

PROFILED = "llama_b16_8192"
# So small that the device is never behind.
HOST_CASE = DecodeCase("host", "a small cache", (128,), 128, 32, 8, 128)


def _cases(wanted: Sequence[str], device: torch.device) -> tuple[DecodeCase, ...]:
    if wanted:
        return find_named(DECODE, wanted)
    return decode_cases("bench" if device.type == "cuda" else "smoke")


def _profiled(wanted: Sequence[str], device: torch.device) -> tuple[DecodeCase, ...]:
    if wanted:
        return find_named(DECODE, wanted)
    return find_named(DECODE, [PROFILED]) if device.type == "cuda" else decode_cases("smoke")[:1]


def _notation(case: DecodeCase) -> str:
    lengths = str(case.capacity) if set(case.lengths) == {case.capacity} else f"up to {max(case.lengths)}"
    return f"{len(case.lengths)} x {lengths} keys, {case.num_heads}/{case.num_k_heads} heads x {case.head_dim}"


def _call(inputs: DecodeInputs, function: Callable[..., Any]) -> Call:
    return Call(lambda: inputs.call(function), {}, inputs.q)


def _contender(
    name: str, function: Callable[..., Any], about: str,
    refuses: Callable[[DecodeCase, torch.dtype, torch.device], str] = lambda case, dtype, device: "",
) -> Contender:  # fmt: skip
    def bind(case: DecodeCase, inputs: DecodeInputs) -> Call:
        return _call(inputs, function)

    return Contender(name, bind, refuses, lambda: about, directions=("forward",))


def _sdpa(backend: SDPBackend, q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any, **__: Any) -> Tensor:
    options = sdpa_options(q.shape[2], k_cache.shape[2], causal=True)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(
            q, k_cache, v_cache, enable_gqa=q.shape[1] != k_cache.shape[1], **options
        )  # fmt: skip


def _sdpa_refuses(
    backend: SDPBackend, needs_half: bool, case: DecodeCase, dtype: torch.dtype, device: torch.device
) -> str:
    if not case.uniform:
        return "takes full caches without pages, bounds or biases"
    if case.queries > case.capacity:
        return "gives NaN where a row sees no key"
    if case.queries not in (1, case.capacity) and backend is SDPBackend.CUDNN_ATTENTION:
        return "aligns causal order of unequal lengths top-left"
    if needs_half and device.type != "cuda":
        return "needs a GPU"
    return "takes fp16 and bf16 only" if needs_half and dtype.itemsize != 2 else ""


def _sdpa_peer(name: str, backend: SDPBackend, needs_half: bool = True) -> Contender:
    about = f"scaled_dot_product_attention by {backend.name}, torch {torch.__version__}"
    return _contender(name, partial(_sdpa, backend), about, partial(_sdpa_refuses, backend, needs_half))


OURS = _contender(results.OURS, torch_ops.attention_decode, "vk::attention_decode")
PEERS = (
    _sdpa_peer("cudnn", SDPBackend.CUDNN_ATTENTION),
    # FlashAttention-2, which splits keys where there are few queries.
    _sdpa_peer("flash2", SDPBackend.FLASH_ATTENTION),
    _sdpa_peer("math", SDPBackend.MATH, needs_half=False),
    _contender(
        "reference", lambda *args, **options: references.attention_decode(*args, **options)[0], "eager PyTorch"
    ),
)  # fmt: skip


def _default_peers(device: torch.device) -> tuple[str, ...]:
    return ("cudnn", "flash2", "math") if device.type == "cuda" else ("reference",)


def _trials(case: DecodeCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Trial]:
    inputs = make_decode_inputs(case, dtype, device, seed=1)
    exact, eager = (
        {"out": each.call(references.attention_decode)[0]} for each in (inputs.to(torch.float64), inputs)
    )  # fmt: skip
    return [Trial(case.name, case, inputs, lambda name, tensor: tensor, exact, eager)]


def _cost(inputs: DecodeInputs, backward: bool) -> Cost:
    """Keys and values once for all query heads and, of a prefix, for all samples; those before a window not at all."""
    queries, head_dim = inputs.q.shape[2:]
    left = inputs.options.get("window_left", -1)
    lengths = inputs.cache_seqlens.tolist()
    # What the queries of a sequence see, from the first one's window on.
    own = [length if left < 0 else min(length, left + queries) for length in lengths]
    before: list[int] = []
    if inputs.prefix_k is not None:
        whole = [inputs.prefix_k.shape[2]] * inputs.prefix_k.shape[0]
        before = whole if inputs.prefix_seqlens is None else inputs.prefix_seqlens.tolist()
    samples = len(lengths) // max(1, len(before))
    pairs = sum(own) + samples * sum(before)
    keys = inputs.k_cache.shape[1] * head_dim * (sum(own) + sum(before))
    bytes_moved = 2 * keys * inputs.k_cache.element_size() + 2 * inputs.q.numel() * inputs.q.element_size()
    return Cost(4 * inputs.q.shape[1] * queries * head_dim * pairs, bytes_moved)


def _explained(inputs: DecodeInputs) -> dict[str, Any]:
    report: dict[str, Any] = inputs.call(partial(torch_ops.explain, torch_ops.attention_decode))
    return report


def _kernels(case: DecodeCase, inputs: DecodeInputs) -> list[TunedKernel]:
    dtype = str(inputs.q.dtype).removeprefix("torch.")
    capacities = {
        **dict.fromkeys(("attention_decode", "attention_decode_split"), case.capacity),
        "attention_decode_shared": case.prefix_capacity,
    }
    return [
        TunedKernel(name, False, dtype, case.head_dim, False, capacities[name])
        for name in _explained(inputs)["kernels"]
        if name in capacities
    ]


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    inputs = make_decode_inputs(HOST_CASE, dtype, device)
    number = torch.ones(16, device=device)
    op = torch.ops.vk.attention_decode
    launch, why = None, "there is none on this device"
    if _explained(inputs)["path"] != "reference":
        with recorded_launches() as launches:
            op(inputs.q, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens, num_splits=1)
        launch, why = launches.replay, ""
    few = partial(op, inputs.q, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens)
    return [
        HostCall("ATen add", lambda: torch.add(number, number)),
        HostCall("raw Triton launch of the kernel", launch, raw=True, note=why),
        HostCall("torch.ops.vk.attention_decode in one split", lambda: few(num_splits=1), target=1.8),
        HostCall("torch.ops.vk.attention_decode in four splits", lambda: few(num_splits=4)),
        HostCall("torch_ops.attention_decode", lambda: inputs.call(torch_ops.attention_decode)),
    ]


ROOM = Room(
    op="attention_decode",
    cases=_cases,
    profiled=_profiled,
    shape=_notation,
    inputs=make_decode_inputs,
    trials=_trials,
    cost=_cost,
    path=lambda inputs: str(_explained(inputs)["path"]),
    ours=OURS,
    peers=PEERS,
    default_peers=_default_peers,
    host_calls=_host_calls,
    kernels=_kernels,
    jits=tuple(vars(decode)[name] for name in ("_attention_decode_kernel", "_attention_decode_combine_kernel")),
)
