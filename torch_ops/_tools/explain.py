"""What the library would do and why: `explain` and `info`."""

import inspect
import platform
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import triton
from torch import Tensor

from csrc_free_ops.configs.candidates import CANDIDATES
from csrc_free_ops.configs.rows import Row, shipped_rows
from torch_ops._attention.decode_explain import explain_decode
from torch_ops._attention.explain import explain_attention, explain_dense_attention, explain_turned_attention
from torch_ops._attention.hopper import refusal
from torch_ops._attention.scores import Scores
from torch_ops._core.device import gpu
from torch_ops._core.registry import INTERPRET, OPS
from torch_ops._core.report import describe
from torch_ops._core.versions import __version__
from torch_ops._gemm.explain import Product, explain_mlp, explain_mlp_operator, explain_products, explain_qkv_rope
from torch_ops._gemm.portable import Rows, padded
from torch_ops._grids import GRID_KERNELS, explain_on_grids
from torch_ops._kv_cache.append import explain_append
from torch_ops._norms.plan import explain_norm
from torch_ops._norms.portable import norm_launches
from torch_ops.settings import settings


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Says how `op(*args, **kwargs)` would run: which path, which launch of each kernel, and where that comes from.

    `op` is a public function or the operator, such as `torch_ops.window_attn` or `torch.ops.vk.window_attn`. Nothing
    is launched, but bad arguments are refused as the op itself would.
    """
    name = getattr(op, "__name__", str(op)).removeprefix("vk.").split(".")[0]
    if name not in EXPLAINERS:
        raise ValueError(f"explain: op must be one of {', '.join(EXPLAINERS)}, got {name!r}")
    if isinstance(op, FunctionType):
        try:
            inspect.signature(op).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
    explainers = EXPLAINERS if isinstance(op, FunctionType) else EXPLAINERS | OPERATOR_EXPLAINERS
    return explainers[name](name, *args, **kwargs)


def _explain_patch_merger(
    op: str, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor | None, fc2_bias: Tensor | None,
    merge_size: int = 2, norm_after: bool = False, eps: float = 1e-6, rms: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Of its norm and its products; one projection is PyTorch's own."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        OPS["patch_merger"](
            x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, merge_size, norm_after, eps, rms
        )  # fmt: skip
        merged = x.new_empty((x.shape[0] // merge_size**2, fc1_weight.shape[1]))
        normed = merged if norm_after else x.new_empty(x.shape)
    products = []
    if fc2_weight is not None:
        rows = Rows(merged.shape[0], merged.shape[1])
        between = Rows(rows.count, padded(fc2_weight.shape[1], x.dtype))
        products = [
            Product("gemm", rows, fc1_weight, "gelu"), Product("gemm", between, fc2_weight, "none")
        ]  # fmt: skip
    report = explain_products(op, merged, products)
    if report["path"] == "reference" or norm_weight is None:
        return report
    norms = describe(op, x.device, report["path"], report["why"], norm_launches(normed))
    return {**report, "kernels": norms["kernels"] | report["kernels"]}


# By op, what says it of a call, given the op's name and the call's arguments.
EXPLAINERS: dict[str, Callable[..., dict[str, Any]]] = {
    **dict.fromkeys(("add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"), explain_norm),
    **dict.fromkeys(GRID_KERNELS, explain_on_grids),
    "attention": explain_dense_attention,
    "attention_decode": explain_decode,
    "kv_cache_append": explain_append,
    "qkv_rope": explain_qkv_rope,
    "mlp": explain_mlp,
    "rope_window_attn": explain_turned_attention,
    "patch_merger": _explain_patch_merger,
    "window_attn": explain_attention,
}
# Of operators whose arguments are not the public function's.
OPERATOR_EXPLAINERS = {"mlp": explain_mlp_operator}


def info() -> dict[str, Any]:
    """Versions, devices, registered ops, settings, and which paths and launch rows there are on this machine."""
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {"name": properties.name, "capability": f"{properties.major}.{properties.minor}",
             "memory_gib": round(properties.total_memory / 2**30, 1)}
        )  # fmt: skip
    rows: dict[str, Any] = {"user": len(settings.rows)}
    paths = {}
    if torch.cuda.is_available():
        device = gpu()
        shipped = shipped_rows(device.name)
        rows |= {
            "gpu": device.name,
            "shipped": len(shipped),
            "source": shipped[0].source if shipped else "rule, unmeasured",
            "kernels": {kernel: _rows_of(kernel, (*settings.rows, *shipped)) for kernel in CANDIDATES},
        }
        example = torch.empty(1, 1, 64, dtype=torch.bfloat16, device="meta")
        paths = {"portable": "yes", "hopper": refusal(device, Scores(1.0), q=example) or "yes"}
    else:
        rows |= {"gpu": None, "shipped": 0, "source": "no GPU: the CPU reference computes", "kernels": {}}
    return {
        "versions": {
            "vk": __version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "devices": devices,
        "interpreter": INTERPRET,
        "settings": {"path": settings.path, "checked": settings.checked},
        "ops": {name: str(op.overload._schema) for name, op in sorted(OPS.items())},
        "paths": paths,
        "rows": rows,
    }


def _rows_of(kernel: str, rows: tuple[Row, ...]) -> str:
    count = sum(row.kernel == kernel for row in rows)
    return f"{count} rows" if count else "rule, unmeasured"
