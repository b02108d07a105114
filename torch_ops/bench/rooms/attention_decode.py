"""The benchmark of `vk::attention_decode`: next to PyTorch's attention on caches that are full."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import torch_ops
from torch_ops.bench.measure import results
from torch_ops.bench.measure.host import raw_launch
from torch_ops.bench.measure.opbench import Call, Check, Cost, HostCall, Impl, OpBench, TunedKernel, select
from torch_ops.bench.peers.dense import sdpa_options
from torch_ops.bench.rooms.dense_cases import parse_dense
from torch_ops.testing import references
from torch_ops.testing.cases import DECODE, DecodeCase, DecodeInputs, make_decode_inputs

NOTATION = ", a pattern of names, or BATCHxHEADS[/KEY_HEADS]xTOKENS/KEYSxHEAD_DIM such as 16x32/8x1/8192x128"
# So small that the device is never behind.
HOST_CASE = DecodeCase("host", "a small cache", (128,), 128, 32, 8, 128)


def _find(wanted: Sequence[str], device: torch.device) -> tuple[DecodeCase, ...]:
    return select(DECODE, wanted, device, _from_notation, NOTATION)


def _from_notation(text: str) -> DecodeCase | None:
    """A step of decoding with full caches of so many keys."""
    shape = parse_dense(text)
    if shape is None:
        return None
    queries, keys = shape["length"], shape["k_length"]
    if not 1 <= queries <= min(16, keys):
        raise ValueError(
            f"{text!r} has {queries} new tokens and {keys} keys; give 1 to 16 tokens, which are among the keys"
        )
    lengths = (keys,) * shape["batch"]
    return DecodeCase(
        text, "the shape that was asked for", lengths, keys, shape["heads"], shape["k_heads"], shape["dim"],
        queries=queries,
    )  # fmt: skip


def _notation(case: DecodeCase) -> str:
    lengths = str(case.capacity) if set(case.lengths) == {case.capacity} else f"up to {max(case.lengths)}"
    return f"{len(case.lengths)} x {lengths} keys, {case.num_heads}/{case.num_k_heads} heads x {case.head_dim}"


def _call(inputs: DecodeInputs, function: Callable[..., Any]) -> Call:
    return Call(lambda: inputs.call(function), {}, inputs.q)


def _impl(name: str, function: Callable[..., Any], about: str, **rest: Any) -> Impl:
    return Impl(name, lambda case, inputs: _call(inputs, function), about, directions=("forward",), **rest)


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


def _sdpa_baseline(name: str, backend: SDPBackend, needs_half: bool = True) -> Impl:
    about = f"scaled_dot_product_attention by {backend.name}, torch {torch.__version__}"
    return _impl(name, partial(_sdpa, backend), about, refuses=partial(_sdpa_refuses, backend, needs_half))


OURS = _impl(results.VK, torch_ops.attention_decode, "vk::attention_decode", group=results.OURS)
BASELINES = (
    _sdpa_baseline("cudnn", SDPBackend.CUDNN_ATTENTION),
    # FlashAttention-2, which splits keys where there are few queries.
    _sdpa_baseline("flash2", SDPBackend.FLASH_ATTENTION),
    _sdpa_baseline("math", SDPBackend.MATH, needs_half=False),
    _impl(
        "reference", lambda *args, **options: references.attention_decode(*args, **options)[0], "eager PyTorch"
    ),
)  # fmt: skip


def _checks(case: DecodeCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Check]:
    inputs = make_decode_inputs(case, dtype, device, seed=1)
    exact, eager = (
        {"out": each.call(references.attention_decode)[0]} for each in (inputs.to(torch.float64), inputs)
    )  # fmt: skip
    return [Check(case.name, case, inputs, exact, eager)]


def _cost(inputs: DecodeInputs, backward: bool) -> Cost:
    """Keys and values once for all query heads and, of a prefix, for all samples; those before a window not at all."""
    queries, head_dim = inputs.q.shape[2:]
    left = inputs.options.get("window_left", -1)
    lengths = inputs.cache_seqlens.tolist()
    # The keys that a sequence's queries see, from the first query's window on.
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
    op = torch.ops.vk.attention_decode
    few = partial(op, inputs.q, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens)
    return [
        raw_launch("raw Triton launch of the kernel", partial(few, num_splits=1), _explained(inputs)["path"]),
        HostCall("torch.ops.vk.attention_decode in one split", lambda: few(num_splits=1)),
        HostCall("torch.ops.vk.attention_decode in four splits", lambda: few(num_splits=4)),
        HostCall("torch_ops.attention_decode", lambda: inputs.call(torch_ops.attention_decode)),
    ]


BENCH = OpBench(
    op="attention_decode", cases=_find, profiled="llama_b16_8192", shape=_notation, inputs=make_decode_inputs,
    checks=_checks, cost=_cost, path=lambda inputs: str(_explained(inputs)["path"]), ours=OURS,
    baselines=BASELINES, usual={"cuda": ("cudnn", "flash2", "math"), "cpu": ("reference",)},
    host_calls=_host_calls, kernels=_kernels,
)  # fmt: skip
