"""Alternatives to our packed attention, each called as its own documentation says."""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from torch_ops.bench.measure.opbench import Call, Impl, one_line
from torch_ops.testing import references
from torch_ops.testing.cases import DenseCase, WindowAttnCase, WindowAttnInputs

# Under autograd the reference keeps about this many score matrices of every segment.
REFERENCE_MATRICES = 8
REFERENCE_BYTES = 8 * 2**30

AttentionCase = WindowAttnCase | DenseCase
# The value of each option of a case where it is off.
OFF = {
    "window_left": -1, "window_right": -1, "softcap": 0.0, "alibi": 0, "sinks": False, "dropout_p": 0.0,
}  # fmt: skip
BOUNDS = "window_left", "window_right"
SCORE_MODS = "alibi", "sinks", "dropout_p"

# A step before attention: from packed q, k and v to others.
Turn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def packed_call(inputs: WindowAttnInputs, forward: Callable[..., Tensor], turn: Turn | None = None) -> Call:
    """Make a call forward(q, k, v) whose tensors are packed as the op's are."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in ("q", "k", "v")}
    if turn is None:
        return Call(lambda: forward(*leaves.values()), leaves, inputs.dout)
    return Call(lambda: forward(*turn(*leaves.values())), leaves, inputs.dout)


def score_entries(case: WindowAttnCase) -> int:
    """Entries of all score matrices of a case, unseen ones included."""
    pairs = zip(case.lengths, case.k_lengths or case.lengths, strict=True)
    return case.num_heads * sum(queries * keys for queries, keys in pairs)


def needs_half_on_gpu(dtype: torch.dtype, device: torch.device) -> str:
    if device.type != "cuda":
        return "needs a GPU"
    return "" if dtype in (torch.float16, torch.bfloat16) else "takes fp16 and bf16 only"


def uses(case: AttentionCase, *options: str) -> str:
    """The first of these options that the case sets, "" if none."""
    return next((name for name in options if case.options.get(name, OFF[name]) != OFF[name]), "")


def grouped(case: AttentionCase) -> bool:
    return case.num_k_heads not in (None, case.num_heads)


def window_of(case: AttentionCase) -> tuple[int, int]:
    """(left, right) bounds around the query, -1 unbounded; causal order is a right bound of 0."""
    right = 0 if case.options.get("causal") else case.options.get("window_right", -1)
    return case.options.get("window_left", -1), right


def _lengths(case: WindowAttnCase) -> tuple[int, int]:
    return max(case.lengths, default=0), max(case.k_lengths or case.lengths, default=0)


def _cu_seqlens(inputs: WindowAttnInputs) -> tuple[Tensor, Tensor]:
    keys = inputs.cu_seqlens_k
    return inputs.cu_seqlens, inputs.cu_seqlens if keys is None else keys


def _cudnn_refuses(case: WindowAttnCase, dtype: torch.dtype, device: torch.device) -> str:
    if not case.uniform:
        return "takes batches of equal segments only"
    if option := uses(case, *BOUNDS, "softcap", *SCORE_MODS):
        return f"has no {option} in scaled_dot_product_attention"
    return needs_half_on_gpu(dtype, device)


def _batched_call(
    case: WindowAttnCase, inputs: WindowAttnInputs, forward: Callable[..., Tensor], turn: Turn | None,
    heads_first: bool = False,
) -> Call:  # fmt: skip
    """A call forward(q, k, v) on views of equal segments, [B, S, H, D] or [B, H, S, D]; `turn` sees packed tensors."""

    def batched(packed: Tensor) -> Tensor:
        batch = packed.unflatten(0, (len(case.lengths), -1))
        return batch.transpose(1, 2) if heads_first else batch

    def to_op_layout(result: Tensor) -> Tensor:
        if result.dim() == 3:
            return result
        return (result.transpose(1, 2) if heads_first else result).flatten(0, 1)

    if turn is not None:
        call = packed_call(inputs, lambda q, k, v: forward(*map(batched, (q, k, v))), turn)
        return replace(call, dout=batched(inputs.dout), to_op_layout=to_op_layout)
    leaves = {name: batched(getattr(inputs, name)).detach().requires_grad_() for name in ("q", "k", "v")}
    return Call(lambda: forward(*leaves.values()), leaves, batched(inputs.dout), to_op_layout)


def _bind_cudnn(case: WindowAttnCase, inputs: WindowAttnInputs, turn: Turn | None = None) -> Call:
    options: dict[str, Any] = {
        "is_causal": bool(case.options.get("causal")),
        "scale": case.options.get("scale"),
        "enable_gqa": grouped(case),
    }

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, **options)

    return _batched_call(case, inputs, forward, turn, heads_first=True)


def _cudnn_packed_refuses(case: WindowAttnCase, dtype: torch.dtype, device: torch.device) -> str:
    """Refuse the cases that PyTorch's `varlen_attn` does not pass on to the op."""
    if option := uses(case, *BOUNDS, "softcap", *SCORE_MODS):
        return f"has no {option} in _cudnn_attention_forward"
    if grouped(case):
        return "has no heads that share keys where segments are packed"
    if case.k_lengths not in (None, case.lengths) and case.options.get("causal"):
        return "aligns causal order of unequal lengths top-left"
    if case.skipped or case.padding:
        return "leaves rows outside all segments unwritten"
    if 0 in (*case.lengths, *(case.k_lengths or ())):
        return "is not called with empty segments here"
    return needs_half_on_gpu(dtype, device)


def _bind_cudnn_packed(case: WindowAttnCase, inputs: WindowAttnInputs, turn: Turn | None = None) -> Call:
    places = (*_cu_seqlens(inputs), *_lengths(case))
    causal, scale = bool(case.options.get("causal")), case.options.get("scale")

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        needs_lse = torch.is_grad_enabled() and q.requires_grad
        results: tuple[Tensor, ...] = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, *places, needs_lse, 0.0, causal, False, scale=scale
        )
        return results[0]

    return packed_call(inputs, forward, turn)


def _varlen_attn() -> Any:
    return importlib.import_module("torch.nn.attention.varlen").varlen_attn


def _flash2_refuses(case: WindowAttnCase, dtype: torch.dtype, device: torch.device) -> str:
    if option := uses(case, "softcap", *SCORE_MODS):
        return f"has no {option} in varlen_attn"
    if case.skipped or case.padding:
        return "leaves rows outside all segments unwritten"
    return needs_half_on_gpu(dtype, device)


def _bind_flash2(case: WindowAttnCase, inputs: WindowAttnInputs, turn: Turn | None = None) -> Call:
    varlen_attn = _varlen_attn()
    places = (*_cu_seqlens(inputs), *_lengths(case))
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if window_of(case) != (-1, -1):
        # Before it had windows, the function had causal order alone.
        options |= {"window_size": window_of(case)} if "window_size" in known else {"is_causal": True}
    if "scale" in case.options:
        options["scale"] = case.options["scale"]
    if grouped(case) and "enable_gqa" in known:
        options["enable_gqa"] = True
    return packed_call(inputs, lambda q, k, v: varlen_attn(q, k, v, *places, **options), turn)


def flash4_function(name: str) -> Any:
    return getattr(importlib.import_module("flash_attn.cute.interface"), name)


def flash4_refuses(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> str:
    if option := uses(case, *SCORE_MODS):
        return f"is not called with {option} here"
    if reason := needs_half_on_gpu(dtype, device):
        return reason
    try:
        flash4_function("flash_attn_varlen_func")
    except Exception as error:
        # Its packages fail at import in ways of their own where they do not fit the GPU or driver.
        return f"is not installed here ({one_line(error)})"
    return ""


def _packed_flash4_refuses(case: WindowAttnCase, dtype: torch.dtype, device: torch.device) -> str:
    reason = flash4_refuses(case, dtype, device)
    return reason or ("leaves rows past the last segment unwritten" if case.padding else "")


def flash4_options(case: AttentionCase) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": bool(case.options.get("causal"))}
    if "scale" in case.options:
        options["softmax_scale"] = case.options["scale"]
    if uses(case, "softcap"):
        options["softcap"] = case.options["softcap"]
    if uses(case, *BOUNDS):
        left, right = window_of(case)
        options["window_size"] = (None if left < 0 else left, None if right < 0 else right)
    return options


def _bind_flash4(
    case: WindowAttnCase, inputs: WindowAttnInputs, turn: Turn | None = None, deterministic: bool = False
) -> Call:
    """Equal segments go to its function for batches, as they do with cuDNN."""
    options = {**flash4_options(case), **({"deterministic": True} if deterministic else {})}
    if case.uniform:
        function = flash4_function("flash_attn_func")
    else:
        function = flash4_function("flash_attn_varlen_func")
        queries, keys = _cu_seqlens(inputs)
        longest_queries, longest_keys = _lengths(case)
        options |= {"cu_seqlens_q": queries, "cu_seqlens_k": keys}
        options |= {"max_seqlen_q": longest_queries, "max_seqlen_k": longest_keys}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    return _batched_call(case, inputs, forward, turn) if case.uniform else packed_call(inputs, forward, turn)


def about_flash4() -> str:
    try:
        return f"FlashAttention-4, flash-attn-4 {importlib.metadata.version('flash-attn-4')}"
    except importlib.metadata.PackageNotFoundError:
        return "FlashAttention-4, not installed"


def _reference_refuses(case: WindowAttnCase, dtype: torch.dtype, device: torch.device) -> str:
    needed = REFERENCE_MATRICES * dtype.itemsize * score_entries(case)
    if needed <= REFERENCE_BYTES:
        return ""
    return f"its score matrices would take {needed / 2**30:.0f} GiB"


def _bind_reference(case: WindowAttnCase, inputs: WindowAttnInputs, turn: Turn | None = None) -> Call:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = inputs.options
        return references.window_attn(q, k, v, inputs.cu_seqlens, inputs.cu_seqlens_k, **options)[0]

    return packed_call(inputs, forward, turn)


CUDNN = Impl(
    "cudnn", _bind_cudnn,
    f"scaled_dot_product_attention by cuDNN {torch.backends.cudnn.version() or '(not here)'}", _cudnn_refuses,
)  # fmt: skip


def packed_cudnn_directions(version: str) -> tuple[str, ...]:
    """Return the directions that are right in this version of PyTorch.

    Before PyTorch called the op, its forward stored lse where the backward does not look. The backward then returns
    wrong gradients, or reads memory that is not there. Source: PyTorch's aten/src/ATen/native/cudnn/MHA.cpp.
    """
    called = tuple(map(int, version.split(".")[:2])) >= (2, 14)
    return ("forward", "backward") if called else ("forward",)


CUDNN_PACKED = Impl(
    "cudnn_packed", _bind_cudnn_packed,
    f"aten._cudnn_attention_forward of torch {torch.__version__} with boundaries of packed segments, by cuDNN "
    f"{torch.backends.cudnn.version() or '(not here)'}", _cudnn_packed_refuses,
    packed_cudnn_directions(torch.__version__),
)  # fmt: skip
FLASH2 = Impl(
    "flash2", _bind_flash2, f"FlashAttention-2, varlen_attn of torch {torch.__version__}", _flash2_refuses,
)  # fmt: skip
FLASH4 = Impl("flash4", _bind_flash4, about_flash4(), _packed_flash4_refuses)
# Its forward is the same with the flag and without.
FLASH4_DETERMINISTIC = Impl(
    "flash4_deterministic", partial(_bind_flash4, deterministic=True), f"{about_flash4()}, with deterministic=True",
    _packed_flash4_refuses, directions=("backward",),
)  # fmt: skip
REFERENCE = Impl(
    "reference", _bind_reference, "torch_ops.testing.references, one segment after the other in eager PyTorch",
    _reference_refuses,
)  # fmt: skip
BASELINES = (CUDNN, CUDNN_PACKED, FLASH2, FLASH4, FLASH4_DETERMINISTIC, REFERENCE)

_BINDS = {CUDNN: _bind_cudnn, FLASH2: _bind_flash2, FLASH4: _bind_flash4, REFERENCE: _bind_reference}


def turned_first(baseline: Impl, name: str, turn_of: Callable[[Any], Turn], about: str) -> Impl:
    """Put `turn_of(inputs)`, which `about` describes, before a baseline of _BINDS; its tensors are packed."""
    bind = _BINDS[baseline]
    return Impl(
        name,
        lambda case, inputs: bind(case, inputs, turn_of(inputs)),
        f"{about}, then {baseline.about}",
        baseline.refuses,
    )
