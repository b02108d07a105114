"""How calls of packed attention run, in the words of `torch_ops.explain`."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torch_ops._attention.choose import choose, current_products, mean_length
from torch_ops._attention.dense import why_dense_portable
from torch_ops._attention.dense_few import launches_beside
from torch_ops._attention.dense_hopper import cast_launch
from torch_ops._attention.downcast import casts_as_it_goes
from torch_ops._attention.hopper import addressable, forward_launch
from torch_ops._attention.hopper_backward import APART, fits_apart
from torch_ops._attention.hopper_dkdv import KEYS_LAUNCH, takes_hopper_keys
from torch_ops._attention.plan import why_portable
from torch_ops._attention.rotate import rotation_launch, workspaces
from torch_ops._attention.scores import Scores, StepTensors
from torch_ops._attention.short import short_launch
from torch_ops._attention.steps import seed_of
from torch_ops._core.device import gpu
from torch_ops._core.registry import runs_kernels
from torch_ops._core.report import by_reference, called_on_fakes, describe

# By the kernel that takes a direction where segments are short, those that take it elsewhere.
KERNELS = {
    "attention_fwd_short": ("attention_fwd",),
    "attention_bwd_short": ("attention_bwd_dq", "attention_bwd_dkdv"),
}
# By the same, the one that takes it on the Hopper path.
HOPPER = {"attention_fwd_short": "attention_fwd_hopper", "attention_bwd_short": "attention_bwd_hopper"}


def explain_attention(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = True,
    return_lse: bool = False,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> dict[str, Any]:
    step = StepTensors(alibi_slopes, sinks, seed_of(q, dropout_p, dropout_seed))
    called_on_fakes(
        "window_attn", q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap,
        deterministic, return_lse, alibi_slopes, sinks, dropout_p, step.seed,
    )  # fmt: skip
    if not runs_kernels(q):
        return by_reference(op, q.device)
    scores = Scores.of(q.shape[2], scale, causal, window_left, window_right, softcap, step, dropout_p)
    segments = cu_seqlens.shape[0] - 1
    length = mean_length(q.shape[0], segments)
    why = why_portable(scores, length, q=q, k=k, v=v) or _why_not_addressable(q, k, v)
    path = "portable" if why else "hopper"
    kernels = {}
    for short, general in KERNELS.items():
        if not why and short == "attention_fwd_short":
            kernels[HOPPER[short]] = forward_launch(q, scores, segments)
        elif not why and fits_apart(q, k, segments, scores):
            kernels["attention_bwd_apart"] = APART, "one segment that leaves room for dq beside dk and dv"
        elif not why:
            kernels[HOPPER[short]] = choose(HOPPER[short], q, scores, length)
        elif chosen := short_launch(short, q, k, cu_seqlens_k, scores, length):
            kernels[short] = chosen
        else:
            for name in general:
                total = k.shape[0] if name == "attention_bwd_dkdv" else q.shape[0]
                kernels[name] = choose(name, q, scores, mean_length(total, segments))
    return describe(op, q.device, path, why or f"{gpu().name} is a Hopper GPU", kernels)


def explain_dense_attention(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    step = StepTensors(alibi_slopes, sinks, seed_of(q, dropout_p, dropout_seed))
    called_on_fakes(
        op, q, k, v, scale, causal, window_left, window_right, softcap, alibi_slopes, sinks, dropout_p, step.seed,
        deterministic, return_lse, compute_dtype,
    )  # fmt: skip
    scores = Scores.of(q.shape[3], scale, causal, window_left, window_right, softcap, step, dropout_p)
    is_cast = False
    if compute_dtype is not None:
        is_cast = casts_as_it_goes(compute_dtype, q, k, v, scores) and not _why_not_addressable(q, k, v)
        q, k, v = (tensor.to(compute_dtype) for tensor in (q, k, v))
    if not runs_kernels(q):
        return by_reference(op, q.device)
    why = why_dense_portable(scores, q=q, k=k, v=v) or _why_not_addressable(q, k, v)
    if why:
        lengths = {"attention_fwd": q.shape[2], "attention_bwd_dq": q.shape[2], "attention_bwd_dkdv": k.shape[2]}
        kernels = {name: choose(name, q, scores, length) for name, length in lengths.items()}
        products = current_products(q)
        beside = launches_beside(q, k, scores, products)
        takes_keys = takes_hopper_keys(q, k, scores, products, beside is not None)
        if beside is not None and not takes_keys:
            for name, launch in zip(("attention_bwd_dq", "attention_bwd_dkdv"), beside, strict=True):
                kernels[name] = launch, f"{kernels[name][1]}; one kernel for both, so few are the programs"
        if takes_keys:
            del kernels["attention_bwd_dkdv"]
            kernels["attention_bwd_keys_hopper"] = KEYS_LAUNCH, f"rule for {gpu().backend} {gpu().arch}"
    else:
        if is_cast:
            source = f"rule for {gpu().backend} {gpu().arch}: casts inputs as it goes"
            kernels = {"attention_fwd_cast_hopper": (cast_launch(q.shape[3]), source)}
        else:
            kernels = {"attention_fwd_hopper": forward_launch(q, scores, 1)}
        if fits_apart(q, k, 1, scores):
            kernels["attention_bwd_apart"] = APART, "so few tiles that there is room for dq beside dk and dv"
        else:
            kernels["attention_bwd_hopper"] = choose("attention_bwd_hopper", q, scores, q.shape[2])
    path = "portable" if why else "hopper"
    return describe(op, q.device, path, why or f"{gpu().name} is a Hopper GPU", kernels)


def _why_not_addressable(q: Tensor, k: Tensor, v: Tensor) -> str:
    if isinstance(q, FakeTensor) or addressable(q, k, v):
        return ""
    return "q, k or v does not begin at a multiple of 16 bytes, or is empty"


def explain_turned_attention(
    op: str, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, *args: Any, **options: Any
) -> dict[str, Any]:
    """That of the attention core on what q and k are turned into, and the pass that turns them."""
    called_on_fakes(op, q, k, v, cos, sin, cu_seqlens, *args, **options)
    report = explain_attention(op, *workspaces(q, k), v, cu_seqlens, *args, **options)
    if report["path"] == "reference":
        return report
    turning = describe(op, q.device, report["path"], report["why"], {"rope": rotation_launch(q)})
    return {**report, "kernels": turning["kernels"] | report["kernels"]}
