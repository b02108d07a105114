"""Checks for the attention ops: outputs and all gradients by the tolerance rule."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_ops import settings
from torch_ops.testing import check, check_draws, poisoned, redrawn, references
from torch_ops.testing.cases import DecodeInputs, DenseInputs, SegmentInputs, WindowAttnInputs
from torch_ops.testing.tolerance import Draw

AttentionInputs = WindowAttnInputs | DenseInputs | SegmentInputs


@contextmanager
def plans_made_anew() -> Iterator[None]:
    """Path "auto", and nothing remembered of calls before: plans are kept until settings change."""
    with settings(path="portable"), settings(path="auto"):
        yield


def differentiate(function: Any, inputs: AttentionInputs, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """out, lse and, by autograd, all gradients of a weighted sum of both; in `dtype` where given."""
    leaves = {name: getattr(inputs, name) for name in ("q", "k", "v")}
    if "sinks" in inputs.options:
        leaves["sinks"] = inputs.options["sinks"]
    leaves = {name: leaf.detach().to(dtype or leaf.dtype).requires_grad_() for name, leaf in leaves.items()}
    q, k, v, *sinks = leaves.values()
    options = {**inputs.options, "sinks": sinks[0]} if sinks else inputs.options
    out, lse = inputs.call(function, q=q, k=k, v=v, options=options)
    seen = torch.isfinite(lse)
    loss = (out * inputs.dout.to(out.dtype)).sum() + (lse[seen] * inputs.dlse.to(lse.dtype)[seen]).sum()
    gradients = torch.autograd.grad(loss, tuple(leaves.values()), materialize_grads=True)
    return {"out": out, "lse": lse, **{f"d{name}": grad for name, grad in zip(leaves, gradients, strict=True)}}


def backward(inputs: AttentionInputs, out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """The backward reference at the inputs' dtype, from this out and lse. Sinks have theirs by autograd alone."""
    tensors = (inputs.dout, inputs.dlse.to(lse.dtype), inputs.q, inputs.k, inputs.v, out, lse)
    options = {name: value for name, value in inputs.options.items() if name != "sinks"}
    grads = getattr(references, f"{inputs.op}_backward")(*tensors, *inputs.places, **options)
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


def verify(inputs: AttentionInputs) -> None:
    """The op against its reference, by the tolerance rule, with unwritten memory poisoned.

    Boundaries may hold anything; the reference takes them `settled`.
    Eager's gradients start, as the op's do, from an out and lse that were rounded to be saved.
    """
    check_draws(lambda seed: _judged(redrawn(inputs, seed)))


def verify_merged_halves(inputs: AttentionInputs, *half: Tensor) -> None:
    """Context parallel: merge halves of the keys by lse, then differentiate each with the merged out and lse.

    `half` holds cu_seqlens and the boundaries of a half's keys, where tensors are packed.
    """
    dim = 0 if half else 2

    def merged(ops: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        forward, differentiate = getattr(ops, inputs.op), getattr(ops, f"{inputs.op}_backward")
        q, k, v, dout = (tensor.to(dtype) for tensor in (inputs.q, inputs.k, inputs.v, inputs.dout))
        halves = list(zip(k.chunk(2, dim), v.chunk(2, dim), strict=True))
        parts = [forward(q, *keys, *half) for keys in halves]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        weights = [torch.exp(part_lse - lse) for _, part_lse in parts]
        out = sum(
            part * (weight.T if half else weight)[..., None] for (part, _), weight in zip(parts, weights, strict=True)
        )
        (one_dq, *one), (other_dq, *other) = (differentiate(dout, None, q, *keys, out, lse, *half) for keys in halves)
        dk, dv = (torch.cat(pair, dim) for pair in zip(one, other, strict=True))
        return {"out": out, "lse": lse, "dq": one_dq + other_dq, "dk": dk, "dv": dv}

    q, k, v, dout = (tensor.double() for tensor in (inputs.q, inputs.k, inputs.v, inputs.dout))
    out, lse = getattr(references, inputs.op)(q, k, v, *half[:1])
    grads = getattr(references, f"{inputs.op}_backward")(dout, None, q, k, v, out, lse, *half[:1])
    whole = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    check(merged(torch.ops.vk, torch.float32), merged(references, torch.float32), whole)


def verify_downcast(inputs: DenseInputs, compute_dtype: torch.dtype) -> None:
    """The same of fp32 inputs that are computed in a half type, by the error of that type.

    They hold numbers of that type afterwards, in their own strides: how inputs are rounded is not asked here.
    """
    check_draws(lambda seed: _judged_downcast(redrawn(inputs, seed), compute_dtype))


def _judged_downcast(inputs: DenseInputs, compute_dtype: torch.dtype) -> Draw:
    halves = {name: getattr(inputs, name).to(compute_dtype) for name in ("q", "k", "v", "dout")}
    for name, half in halves.items():
        getattr(inputs, name).copy_(half)
    with poisoned():
        wide = differentiate(partial(torch.ops.vk.attention, compute_dtype=compute_dtype), inputs)
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    kept = "lse", "dsinks"
    actual = {name: tensor if name in kept else tensor.to(compute_dtype) for name, tensor in wide.items()}
    return actual, *expected(replace(inputs, **halves))


def _judged(inputs: AttentionInputs) -> Draw:
    with poisoned():
        actual = differentiate(getattr(torch.ops.vk, inputs.op), inputs)
    return actual, *expected(settled(inputs))


def settled(inputs: AttentionInputs) -> AttentionInputs:
    """These inputs with the boundaries that the contract gives them: clamped to the tensor, and none falls.

    The reference of segment attention settles index tensors by itself.
    """
    if not isinstance(inputs, WindowAttnInputs):
        return inputs
    boundaries = {
        name: cu_seqlens.clamp(0, rows.shape[0]).cummax(0).values
        for name, cu_seqlens, rows in zip(
            ("cu_seqlens", "cu_seqlens_k"), inputs.places[-2:], (inputs.q, inputs.k), strict=True
        )
        if cu_seqlens is not None
    }
    return replace(inputs, **boundaries)


def expected(inputs: AttentionInputs) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Results of eager PyTorch at the inputs' type, and in fp64."""
    dtype = inputs.q.dtype
    reference = getattr(references, inputs.op)
    truth = differentiate(reference, inputs, torch.float64)
    out, lse = inputs.call(reference)
    saved_lse = truth["lse"].to(torch.promote_types(dtype, torch.float32))
    eager = {"out": out, "lse": lse, **backward(inputs, truth["out"].to(dtype), saved_lse)}
    if "dsinks" in truth:
        eager["dsinks"] = differentiate(reference, inputs)["dsinks"]
    return eager, truth


def verify_decode(inputs: DecodeInputs) -> None:
    """The op against its reference, by the tolerance rule, with unwritten memory and unused keys poisoned."""
    check_draws(lambda seed: _judged_decode(redrawn(inputs, seed)))


def _judged_decode(inputs: DecodeInputs) -> Draw:
    names = "out", "lse"
    with poisoned():
        actual = _with_nan(inputs).call(torch.ops.vk.attention_decode)
    eager = inputs.call(references.attention_decode)
    truth = inputs.to(torch.float64).call(references.attention_decode)
    judged = (dict(zip(names, results, strict=True)) for results in (actual, eager, truth))
    return next(judged), next(judged), next(judged)


def _with_nan(inputs: DecodeInputs) -> DecodeInputs:
    """The same with NaN in every place of a cache or prefix that holds no key, or one before every query's window.

    Pages of such keys alone are none.
    """
    own, shared = _spans(inputs)
    changed: dict[str, Tensor] = {}
    for name in ("k_cache", "v_cache"):
        cache = changed[name] = getattr(inputs, name).clone()
        unused = torch.ones(cache.shape[0], cache.shape[2], dtype=torch.bool)
        for index, keys in enumerate(own):
            if inputs.block_table is None:
                unused[index, keys.start : keys.stop] = False
                continue
            pages = inputs.block_table[index].tolist()
            for key in keys:
                unused[pages[key // cache.shape[2]], key % cache.shape[2]] = False
        cache.transpose(1, 2)[unused.to(cache.device)] = torch.nan
    if inputs.block_table is not None:
        table = changed["block_table"] = inputs.block_table.clone()
        for index, keys in enumerate(own):
            table[index, : keys.start // inputs.k_cache.shape[2]] = -1
    for name in ("prefix_k", "prefix_v") if shared else ():
        prefix = changed[name] = getattr(inputs, name).clone()
        for index, keys in enumerate(shared):
            prefix[index, :, : keys.start] = prefix[index, :, keys.stop :] = torch.nan
    return replace(inputs, **changed)


def _spans(inputs: DecodeInputs) -> tuple[list[range], list[range]]:
    """Keys of each sequence's cache and of each prefix, from the first that a query's window holds to the last."""
    left = inputs.options.get("window_left", -1)
    lengths = inputs.cache_seqlens.tolist()
    prefixes: list[int] = []
    if inputs.prefix_k is not None:
        whole = [inputs.prefix_k.shape[2]] * inputs.prefix_k.shape[0]
        prefixes = whole if inputs.prefix_seqlens is None else inputs.prefix_seqlens.tolist()
    firsts = [length - inputs.q.shape[2] - left if left >= 0 else 0 for length in lengths]
    each = len(lengths) // max(len(prefixes), 1)
    own = [range(min(max(first, 0), length), length) for first, length in zip(firsts, lengths, strict=True)]
    shared = [
        range(min(max(prefix + min(firsts[index * each : (index + 1) * each]), 0) if left >= 0 else 0, prefix), prefix)
        for index, prefix in enumerate(prefixes)
    ]
    return own, shared
