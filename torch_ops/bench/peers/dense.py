"""Alternatives to our dense attention, each called as its own documentation says."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from torch_ops.bench.measure.opbench import Call, Impl
from torch_ops.bench.peers.packed import (
    BOUNDS,
    REFERENCE_BYTES,
    REFERENCE_MATRICES,
    SCORE_MODS,
    about_flash4,
    flash4_function,
    flash4_options,
    flash4_refuses,
    grouped,
    needs_half_on_gpu,
    uses,
)
from torch_ops.testing import references
from torch_ops.testing.cases import DenseCase, DenseInputs

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def _rows_first(tensor: Tensor) -> Tensor:
    """A view [B, S, H, D] of [B, H, S, D], and the other way round."""
    return tensor.transpose(1, 2)


def dense_call(inputs: DenseInputs, forward: Forward, rows_first: bool = False) -> Call:
    """A call forward(q, k, v) on tensors [B, H, S, D], or on views [B, S, H, D] of them."""
    view = _rows_first if rows_first else Tensor.detach
    leaves = {name: view(getattr(inputs, name)).detach().requires_grad_() for name in ("q", "k", "v")}
    back = _rows_first if rows_first else lambda tensor: tensor
    return Call(lambda: forward(*leaves.values()), leaves, view(inputs.dout), back)


def sdpa_options(queries: int, keys: int, causal: bool) -> dict[str, Any]:
    """Causal order aligned bottom-right, which of unequal lengths PyTorch has as a bias."""
    if not causal or queries == keys or queries == 1:
        return {"is_causal": causal and queries == keys}
    return {"attn_mask": causal_lower_right(queries, keys)}


def _bind_sdpa(backend: SDPBackend, case: DenseCase, inputs: DenseInputs) -> Call:
    options = sdpa_options(inputs.q.shape[2], inputs.k.shape[2], bool(case.options.get("causal")))
    options |= {"scale": case.options.get("scale"), "enable_gqa": grouped(case)}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **options)

    return dense_call(inputs, forward)


def _unequal_causal(case: DenseCase) -> bool:
    return bool(case.options.get("causal")) and case.k_length not in (None, case.length)


def _sdpa_refuses(case: DenseCase) -> str:
    if option := uses(case, *BOUNDS, "softcap", *SCORE_MODS):
        return f"has no {option} in scaled_dot_product_attention"
    if _unequal_causal(case) and (case.k_length or 0) < case.length:
        return "gives NaN where a row sees no key"
    return "" if min(case.batch, case.length, case.length if case.k_length is None else case.k_length) else "is empty"


def _cudnn_refuses(case: DenseCase, dtype: torch.dtype, device: torch.device) -> str:
    if _unequal_causal(case):
        return "aligns causal order of unequal lengths top-left"
    return _sdpa_refuses(case) or needs_half_on_gpu(dtype, device)


def _flash2_refuses(case: DenseCase, dtype: torch.dtype, device: torch.device) -> str:
    return _sdpa_refuses(case) or needs_half_on_gpu(dtype, device)


def _efficient_refuses(case: DenseCase, dtype: torch.dtype, device: torch.device) -> str:
    if grouped(case):
        return "has no heads that share keys"
    return _sdpa_refuses(case) or ("" if device.type == "cuda" else "needs a GPU")


def _too_large(case: DenseCase, dtype: torch.dtype) -> str:
    keys = case.length if case.k_length is None else case.k_length
    needed = REFERENCE_MATRICES * dtype.itemsize * case.batch * case.num_heads * case.length * keys
    return "" if needed <= REFERENCE_BYTES else f"its score matrices would take {needed / 2**30:.0f} GiB"


def _math_refuses(case: DenseCase, dtype: torch.dtype, device: torch.device) -> str:
    return _sdpa_refuses(case) or _too_large(case, dtype)


def _bind_flash4(deterministic: bool, case: DenseCase, inputs: DenseInputs) -> Call:
    function, options = flash4_function("flash_attn_func"), flash4_options(case)
    options |= {"deterministic": True} if deterministic else {}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    return dense_call(inputs, forward, rows_first=True)


def _bind_reference(case: DenseCase, inputs: DenseInputs) -> Call:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = inputs.call(references.attention, q=q, k=k, v=v)[0]
        return out

    return dense_call(inputs, forward)


def _sdpa(name: str, backend: SDPBackend, refuses: Any, what: str) -> Impl:
    about = f"scaled_dot_product_attention by {what}, torch {torch.__version__}"
    return Impl(name, partial(_bind_sdpa, backend), about, refuses)


DENSE_BASELINES = (
    _sdpa(
        "cudnn", SDPBackend.CUDNN_ATTENTION, _cudnn_refuses, f"cuDNN {torch.backends.cudnn.version() or '(not here)'}"
    ),
    _sdpa("flash2", SDPBackend.FLASH_ATTENTION, _flash2_refuses, "FlashAttention-2"),
    Impl("flash4", partial(_bind_flash4, False), about_flash4(), flash4_refuses),
    Impl(
        "flash4_deterministic", partial(_bind_flash4, True), f"{about_flash4()}, with deterministic=True",
        flash4_refuses, directions=("backward",),
    ),
    _sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION, _efficient_refuses, "its memory-efficient kernels"),
    _sdpa("math", SDPBackend.MATH, _math_refuses, "plain products and softmax"),
    Impl(
        "reference", _bind_reference, "torch_ops.testing.references, one sequence after the other in eager PyTorch",
        lambda case, dtype, device: _too_large(case, dtype),
    ),
)  # fmt: skip
