"""Which calls of dense attention PyTorch's own kernels compute: those kernels, and the choice of one.

A choice depends on metadata and on PyTorch's switches, never on values on the device. Its rows are measured ones, in
`csrc_free_ops/configs/handover_<gpu>.json`.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from csrc_free_ops.configs.handover import HandOver, fitting, shipped_hand_over
from torch_ops._attention.checks import HALF_TYPES
from torch_ops._core.checks import dtype_name
from torch_ops._core.device import gpu, run_where_tensors_are
from torch_ops._core.planned_op import remember, signatures
from torch_ops._core.registry import Mode, current_mode, is_eager, recorded_tensor
from torch_ops._core.torch_private import statically_known_true

aten = torch.ops.aten

# Kernels whose backward gives the same bits for the same inputs. None was proved to.
REPEATABLE: frozenset[str] = frozenset()
# Elements of 2 bytes, of which 16 bytes hold so many; PyTorch's kernels load 16 bytes at once.
ALIGNED = 8
MOST_ELEMENTS = 2**31
MOST_HEADS = 65535


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, keeps_lse: bool) -> tuple[Tensor, Any]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, keeps_lse: bool) -> tuple[Tensor, Any]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, keeps_lse, 0.0, causal, False, scale=scale
    )
    # cuDNN's lse is [B, H, S, 1].
    return out, lse.reshape(q.shape[:3]) if keeps_lse else None


class Kernel(NamedTuple):
    """A kernel of PyTorch.

    Attributes:
        call: of q, k, v, causal, scale and keeps_lse. Returns out and lse, natural logarithm, fp32 [B, H, S]. PyTorch
            differentiates it.
        is_on: whether the user left the kernel on.
        can_take: whether PyTorch would give it a call, by the parameters of that call.
    """

    call: Callable[[Tensor, Tensor, Tensor, bool, float | None, bool], tuple[Tensor, Any]]
    is_on: Callable[[], bool]
    can_take: Callable[[Any], bool]


KERNELS = {
    "flash": Kernel(_flash, torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.can_use_flash_attention),
    "cudnn": Kernel(_cudnn, torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.can_use_cudnn_attention),
}


class AttentionCall(NamedTuple):
    """All that a choice depends on, but for addresses. `switches` are PyTorch's own settings."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    deterministic: bool
    is_differentiated: bool
    switches: tuple[Any, ...]


class Choice(NamedTuple):
    """The kernel of PyTorch that takes a call, None if ours does, and why. `trains`: PyTorch also differentiates."""

    kernel: str | None
    trains: bool
    why: str


_signature_of = signatures(get_type_hints(AttentionCall).values())
choices: dict[Any, Choice] = {}


def _active_flash() -> str | None:
    """Return the name of the implementation that replaces PyTorch's flash kernels, if any."""
    # Nothing can be active before this module is imported.
    module = sys.modules.get("torch.nn.attention")
    return None if module is None else module.current_flash_attention_impl()


def switches() -> tuple[Any, ...]:
    is_on = tuple(kernel.is_on() for kernel in KERNELS.values())
    return *is_on, _active_flash(), torch.are_deterministic_algorithms_enabled()


def _why_unsuitable(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str:
    """Return why PyTorch's kernels may not take tensors, or nothing. Symbolic sizes get no guards."""
    known = statically_known_true
    if not (q.dtype == k.dtype == v.dtype and q.dtype in HALF_TYPES):
        return "PyTorch's kernels take fp16 and bf16 alone"
    if not (q.dim() == k.dim() == v.dim() == 4 and q.device == k.device == v.device):
        return "the arguments are for attention to check"
    # Graphs of dynamic shape specialise on the head dimension, as kernels do.
    batch, heads, rows, head_dim = *q.shape[:3], int(q.shape[3])
    key_heads, keys = k.shape[1:3]
    alike = zip((*k.shape, batch, head_dim), (*v.shape, k.shape[0], k.shape[3]), strict=True)
    if not all(known(one == other) for one, other in alike) or not known(key_heads > 0):
        return "the arguments are for attention to check"
    if not known(heads % key_heads == 0) or head_dim % ALIGNED or not ALIGNED <= head_dim <= 256:
        return "the arguments are for attention to check"
    if causal and not known(rows == keys):
        return "causal calls go over with equal lengths alone, because PyTorch's kernels align others differently"
    if not all(known(size > 0) for size in (batch, heads, rows)) or not known(keys > 1):
        return "PyTorch's kernels take no empty tensor and no single key"
    for tensor in (q, k, v):
        if not _is_regular(tensor):
            return "q, k or v has strides or an offset that PyTorch's kernels may not take"
    sizes = [each for tensor in (q, k, v) for each in (tensor.numel(), _extent(tensor))]
    if any(isinstance(size, int) and size >= MOST_ELEMENTS for size in sizes):
        return "q, k or v has 2^31 elements or more"
    if any(isinstance(size, int) and size > MOST_HEADS for size in (batch, heads)):
        return f"there are more than {MOST_HEADS} sequences or heads"
    return ""


def _is_regular(tensor: Tensor) -> bool:
    """Whether columns are contiguous, and rows begin at multiples of 16 bytes and do not overlap."""
    known, strides = statically_known_true, tensor.stride()
    rows = zip(tensor.shape[:3], strides[:3], strict=True)
    aligned = all(known(size == 1) or (known(stride % ALIGNED == 0) and known(stride > 0)) for size, stride in rows)
    return aligned and known(strides[3] == 1) and known(tensor.storage_offset() % ALIGNED == 0)


def _extent(tensor: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _why_unavailable(row: HandOver, call: AttentionCall) -> str:
    """Return why the kernel of a row cannot take a call now, or nothing."""
    kernel = KERNELS[row.kernel]
    if row.kernel == "flash" and (active := _active_flash()) is not None:
        return f"{active!r} is PyTorch's active flash implementation"
    if not kernel.is_on():
        return f"PyTorch's {row.kernel} kernel is switched off"
    if row.kernel == "cudnn":
        if (torch.backends.cudnn.version() or 0) < row.cudnn:
            return f"cuDNN is older than the {row.cudnn} that was measured"
        if torch.are_deterministic_algorithms_enabled():
            return "PyTorch does not take cuDNN under torch.use_deterministic_algorithms(True)"
    if is_eager():
        q, k, v = (recorded_tensor(tensor) for tensor in call[:3])
        if q is None or k is None or v is None:
            return ""
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, call.causal, q.shape[1] != k.shape[1])
        if not kernel.can_take(params):
            return f"PyTorch's {row.kernel} kernel refuses the call"
    return ""


def _gpu_name(tensor: Tensor) -> str:
    # Fake tensors may name a device that this machine lacks.
    if current_mode() is not Mode.EAGER:
        return gpu().name
    name: str = run_where_tensors_are(lambda tensor: gpu().name, tensor)
    return name


def _shortest(call: AttentionCall) -> int | None:
    lengths = call.q.shape[2], call.k.shape[2]
    return None if any(isinstance(length, torch.SymInt) for length in lengths) else min(lengths)


def _choose(call: AttentionCall) -> Choice:
    if why := _why_unsuitable(*call[:4]):
        return Choice(None, False, why)
    name, head_dim, refused = _gpu_name(call.q), int(call.q.shape[3]), ""
    rows = shipped_hand_over(name)
    if not rows:
        return Choice(None, False, f"PyTorch's kernels were not measured on {name}")
    for direction in ("training", "forward") if call.is_differentiated else ("forward",):
        for row in fitting(rows, direction, dtype_name(call.q.dtype), head_dim, call.causal, _shortest(call)):
            trains = direction == "training"
            if trains and call.deterministic and row.kernel not in REPEATABLE:
                continue
            if why := _why_unavailable(row, call):
                refused = refused or why
                continue
            why = f"PyTorch's {row.kernel} kernel is faster for head dim {head_dim} (measured {row.date})"
            return Choice(row.kernel, trains, why)
    return Choice(None, False, refused or f"no kernel of PyTorch was measured to be faster for head dim {head_dim}")


def chosen(call: AttentionCall) -> Choice:
    signature = _signature_of(call)
    choice = choices.get(signature)
    if choice is None:
        choice = _choose(call)
        if signature is not None:
            remember(choices, signature, choice)
    return choice
