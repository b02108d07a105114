"""The benchmark of `vk::kv_cache_append`. Baselines turn q and k in PyTorch and write by index."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_ops
from torch_ops.bench.measure import results
from torch_ops.bench.measure.opbench import Call, Check, Cost, HostCall, Impl, OpBench, TunedKernel, op_calls, select
from torch_ops.testing import references
from torch_ops.testing.cases import KvCacheCase, KvCacheInputs, kv_cache_cases, make_kv_cache_inputs

# Sizes of a case that is compared in fp64; the caches of a timed case would fill a GPU.
MOST_KEYS, MOST_TOKENS, MOST_SEQUENCES = 300, 64, 4


def _eager(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, *rest: Any) -> Tensor:
    block_table, q, cos, sin, interleaved, _ = rest
    position = cache_seqlens.long()[:, None] + torch.arange(k.shape[2], device=k.device)
    page, row = torch.arange(k.shape[0], device=k.device)[:, None], position
    if block_table is not None:
        page = block_table.long().gather(1, position // k_cache.shape[2])
        row = position % k_cache.shape[2]
    if cos is not None and sin is not None:
        angles = cos[position][:, None], sin[position][:, None]
        k = references.turned(k, *angles, interleaved)
        q = None if q is None else references.turned(q, *angles, interleaved)
    k_cache[page, :, row] = k.transpose(1, 2).to(k_cache.dtype)
    v_cache[page, :, row] = v.transpose(1, 2).to(v_cache.dtype)
    return k.new_empty(0) if q is None else q


def _bind(function: Callable[..., Tensor], case: KvCacheCase, inputs: KvCacheInputs) -> Call:
    """Each implementation has caches of its own, so that none is right by what another wrote."""
    own = replace(inputs, k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())

    def forward() -> tuple[Tensor, ...]:
        return own.call(function), own.k_cache, own.v_cache

    return Call(forward, {}, (), outputs=("q", "k_cache", "v_cache"))


def _find(wanted: Sequence[str], device: torch.device) -> tuple[KvCacheCase, ...]:
    return select((*kv_cache_cases("bench"), *kv_cache_cases("smoke")), wanted, device)


def _shortened(case: KvCacheCase) -> KvCacheCase:
    before = tuple(min(each, MOST_KEYS) for each in case.before[:MOST_SEQUENCES])
    tokens = min(case.tokens, MOST_TOKENS)
    capacity = min(case.capacity, -(-(MOST_KEYS + MOST_TOKENS) // max(case.page_size, 1)))
    return replace(case, before=before, tokens=tokens, capacity=capacity)


def _checks(case: KvCacheCase, dtype: torch.dtype, device: torch.device, backward: bool) -> list[Check]:
    short = _shortened(case)
    inputs = make_kv_cache_inputs(short, dtype, device, 1)

    def truth(dtype: torch.dtype) -> dict[str, Tensor]:
        wide: dict[str, Any] = {
            name: value.to(dtype)
            for name, value in vars(inputs).items()
            if isinstance(value, Tensor) and value.is_floating_point() and name not in ("cos", "sin")
        }
        made = replace(inputs, **wide).call(references.kv_cache_append)
        return dict(zip(("q", "k_cache", "v_cache"), made, strict=True))

    return [Check(_shape(short), short, inputs, truth(torch.float64), truth(dtype))]


def _cost(inputs: KvCacheInputs, backward: bool) -> Cost:
    """Rows read and written once, and those of the tables, once for each token of each sequence."""
    rows = sum(2 * tensor.nbytes for tensor in (inputs.k, inputs.v, inputs.q) if tensor is not None)
    tokens = inputs.k.shape[0] * inputs.k.shape[2]
    angles = sum(tokens * table.shape[1] * table.itemsize for table in (inputs.cos, inputs.sin) if table is not None)
    return Cost(0, rows + angles)


def _shape(case: KvCacheCase) -> str:
    kind = f"pages of {case.page_size}" if case.page_size else "contiguous"
    heads = f"{case.num_heads}/{case.num_k_heads} heads of {case.head_dim}"
    return f"{len(case.before)} sequences x {case.tokens}, {heads}, {kind}"


def _host_calls(dtype: torch.dtype, device: torch.device) -> list[HostCall]:
    inputs = make_kv_cache_inputs(kv_cache_cases("smoke")[0], dtype, device, 0)
    return op_calls("kv_cache_append", lambda function, _: partial(inputs.call, function), inputs.k, gradients=False)


def _kernels(case: KvCacheCase, inputs: KvCacheInputs) -> list[TunedKernel]:
    if not inputs.k.is_cuda:
        return []
    dtype = str(inputs.k.dtype).removeprefix("torch.")
    return [TunedKernel("kv_cache_append", False, dtype, case.head_dim, False, case.tokens)]


def _impl(name: str, function: Callable[..., Tensor], about: str, group: str = results.BASELINE) -> Impl:
    return Impl(name, partial(_bind, function), about, directions=("forward",), group=group)


BENCH = OpBench(
    op="kv_cache_append", cases=_find, profiled="llama_decode_16", shape=_shape, inputs=make_kv_cache_inputs,
    checks=_checks, cost=_cost, path=lambda inputs: "portable" if inputs.k.is_cuda else "reference",
    ours=_impl(results.VK, torch_ops.kv_cache_append, "vk::kv_cache_append", results.OURS),
    baselines=(
        _impl("eager", _eager, f"rotation in eager PyTorch and writes by index, torch {torch.__version__}"),
        _impl("compiled", torch.compile(_eager), f"torch.compile of the same, torch {torch.__version__}"),
    ),
    usual={"cuda": ("eager", "compiled"), "cpu": ("eager",)}, host_calls=_host_calls, kernels=_kernels,
)  # fmt: skip
