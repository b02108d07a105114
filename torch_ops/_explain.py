"""What the library would do and why: `explain`, `info`, and `warmup` ahead of the first request."""

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from csrc_free_ops.configs import ATEN, PRODUCTS, Launch, Row, shipped_rows
from csrc_free_ops.gemm.hopper_launch import rotary_launch
from torch_ops._attention import why_portable
from torch_ops._attention_hopper import addressable, forward_launch, refusal
from torch_ops._attention_hopper_backward import APART, fits_apart
from torch_ops._attention_portable import choose, mean_length
from torch_ops._attention_short import short_launch
from torch_ops._device import gpu
from torch_ops._gemm import hopper_launch
from torch_ops._gemm import why_portable as why_no_hopper
from torch_ops._gemm_hopper import addressable as starts_at_16_bytes
from torch_ops._gemm_portable import Rows, choose_product, padded, product_kernel, product_size
from torch_ops._grids import grid_launch
from torch_ops._norms import norm_launches
from torch_ops._registry import INTERPRET, OPS, runs_kernels
from torch_ops._rope import rotation_launch, workspaces
from torch_ops._scores import Scores
from torch_ops.settings import settings

# By the kernel that takes a direction where segments are short, those that take it elsewhere.
KERNELS = {
    "attention_fwd_short": ("attention_fwd",),
    "attention_bwd_short": ("attention_bwd_dq", "attention_bwd_dkdv"),
}
# By the same, the one that takes it on the Hopper path.
HOPPER = {"attention_fwd_short": "attention_fwd_hopper", "attention_bwd_short": "attention_bwd_hopper"}
NORMS = ("add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm")
# Of the ops on image grids, by op, their kernels.
GRID_KERNELS = {
    "rotary_table": ("rotary_table",),
    "pos_embed_interpolate": ("pos_embed_fwd", "pos_embed_bwd"),
    "spatial_merge": ("spatial_merge_fwd", "spatial_merge_bwd"),
}
# All that `vk bench tune` makes rows for.
ROWED = (
    *(name for general in KERNELS.values() for name in general),
    *KERNELS,
    *HOPPER.values(),
    "norm_fwd",
    "norm_bwd",
    *PRODUCTS,
    *(name for kernels in GRID_KERNELS.values() for name in kernels),
    "rope",
)


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Says how `op(*args, **kwargs)` would run: which path, which launch of each kernel, and where that comes from.

    `op` is a public function or the operator, such as `torch_ops.window_attn` or `torch.ops.vk.window_attn`. Nothing
    is launched, but bad arguments are refused as the op itself would.
    """
    name = getattr(op, "__name__", str(op)).removeprefix("vk.").split(".")[0]
    explainers: dict[str, Callable[..., dict[str, Any]]] = {
        **{norm: partial(_explain_norm, norm) for norm in NORMS},
        **{op: partial(_explain_on_grids, op) for op in GRID_KERNELS},
        "qkv_rope": _explain_qkv_rope,
        "mlp": _explain_mlp,
        "rope_window_attn": _explain_rope_window_attn,
        "patch_merger": _explain_patch_merger,
        "window_attn": _explain_window_attn,
    }
    if name not in explainers:
        raise ValueError(f"explain: op must be one of {', '.join(explainers)}, got {name!r}")
    return explainers[name](*args, **kwargs)


def _explain_norm(name: str, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        OPS[name].overload(x, *args, **kwargs)
    report: dict[str, Any] = {"op": f"vk::{name}", "device": str(x.device)}
    if not runs_kernels(x):
        return {**report, "path": "reference", "why": f"tensors on {x.device} are computed by ATen", "kernels": {}}
    kernels = {
        kernel: {"launch": vars(launch), "source": source} for kernel, (launch, source) in norm_launches(x).items()
    }
    return {**report, "path": "portable", "why": "norms have one path", "kernels": kernels}


def _explain_on_grids(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        outputs = OPS[name].overload(*args, **kwargs)
    first = args[0] if args else next(iter(kwargs.values()))
    out = outputs[0] if isinstance(outputs, tuple) else outputs
    report: dict[str, Any] = {"op": f"vk::{name}", "device": str(first.device)}
    if not (runs_kernels(out) or INTERPRET and name == "rotary_table"):
        why = f"tensors on {first.device} are computed by ATen"
        return {**report, "path": "reference", "why": why, "kernels": {}}
    # A merge is tiled by the columns of x.
    width = (first if name == "spatial_merge" else out).shape[1]
    chosen = {kernel: grid_launch(kernel, out.dtype, width) for kernel in GRID_KERNELS[name]}
    kernels = {kernel: {"launch": vars(launch), "source": source} for kernel, (launch, source) in chosen.items()}
    return {**report, "path": "portable", "why": "it is the only one", "kernels": kernels}


def _explain_window_attn(
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
) -> dict[str, Any]:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        OPS["window_attn"](
            q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window_left, window_right, softcap, deterministic,
            return_lse,
        )  # fmt: skip
    report: dict[str, Any] = {"op": "vk::window_attn", "device": str(q.device)}
    if not runs_kernels(q):
        return {
            **report,
            "path": "reference",
            "why": f"tensors on {q.device} are computed by ATen",
            "kernels": {},
        }
    scores = Scores.of(q.shape[2], scale, causal, window_left, window_right, 0.0)
    segments = cu_seqlens.shape[0] - 1
    length = mean_length(q.shape[0], segments)
    why = why_portable(softcap, length, q=q, k=k, v=v)
    if not why and not isinstance(q, FakeTensor) and not addressable(q, k, v):
        why = "q, k or v does not begin at a multiple of 16 bytes, or is empty"
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
    described = {name: {"launch": vars(launch), "source": source} for name, (launch, source) in kernels.items()}
    why = why or f"{gpu().name} is a Hopper GPU"
    return {**report, "path": path, "why": why, "kernels": described}


def _explain_qkv_rope(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, num_heads: int,
    num_k_heads: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        q, _, _ = OPS["qkv_rope"](x, weight, bias, cos, sin, num_heads, num_k_heads)
    return _explain_products("qkv_rope", x, [_Product("gemm_pair", Rows.of(x), weight, head_dim=q.shape[2])])


def _explain_mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    recompute: bool = False, w_up: Tensor | None = None, b_up: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        OPS["mlp"](x, w1, b1, w2, b2, activation, not recompute, w_up, b_up)
    rows = Rows.of(x)
    between = Rows(rows.count, padded(w2.shape[1], x.dtype))
    first = _Product(product_kernel(activation), rows, w1, activation, up=w_up)
    return _explain_products("mlp", x, [first, _Product("gemm", between, w2, "none")])


def _explain_patch_merger(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, fc1_weight: Tensor, fc1_bias: Tensor | None,
    fc2_weight: Tensor | None, fc2_bias: Tensor | None, merge_size: int = 2, norm_after: bool = False,
    eps: float = 1e-6, rms: bool = False,
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
            _Product("gemm", rows, fc1_weight, "gelu"), _Product("gemm", between, fc2_weight, "none")
        ]  # fmt: skip
    report = _explain_products("patch_merger", merged, products)
    if report["path"] == "reference" or norm_weight is None:
        return report
    norms = {
        kernel: {"launch": vars(launch), "source": source} for kernel, (launch, source) in norm_launches(normed).items()
    }
    return {**report, "kernels": norms | report["kernels"]}


@dataclass(frozen=True)
class _Product:
    """One of the GEMM core's, with the kernel that takes it on the portable path."""

    kernel: str
    rows: Rows
    weight: Tensor
    activation: str = ""
    head_dim: int = 0
    up: Tensor | None = None

    def describe(self, x: Tensor) -> tuple[str, Launch, str]:
        """Its kernel and the size of its weight, as in "gemm 4304x1152"; its launch, and where that comes from."""
        n, k = product_size(self.weight, self.up)
        tensors = (x, self.weight) if self.up is None else (x, self.weight, self.up)
        why = why_no_hopper(self.rows, self.weight, self.head_dim, self.up)
        if not why and not isinstance(x, FakeTensor) and not starts_at_16_bytes(*tensors):
            why = "TMA cannot address tensors that do not begin at 16 bytes"
        if why:
            launch, source = choose_product(self.kernel, self.rows, self.weight, self.up)
            return f"{self.kernel} {n}x{k}", launch, source
        if self.activation == "none":
            return f"{self.kernel} {n}x{k}", ATEN, "PyTorch's products are as fast where nothing follows them"
        tile = rotary_launch(self.head_dim) if self.head_dim else hopper_launch(
            self.rows, self.weight, self.activation, self.up
        )  # fmt: skip
        return f"gemm_hopper {n}x{k}", tile, "the tile whose rounds take the least time"


def _explain_products(op: str, x: Tensor, products: list[_Product]) -> dict[str, Any]:
    report: dict[str, Any] = {"op": f"vk::{op}", "device": str(x.device)}
    if not runs_kernels(x):
        return {**report, "path": "reference", "why": f"tensors on {x.device} are computed by ATen", "kernels": {}}
    chosen = [product.describe(x) for product in products]
    left = [name for name, launch, _ in chosen if launch == ATEN]
    words = [f"left to PyTorch: {', '.join(left)}"] if left else []
    path = "aten" if len(left) == len(chosen) else "portable"
    if any(name.startswith("gemm_hopper") for name, *_ in chosen):
        path, words = "hopper", [f"{gpu().name} is a Hopper GPU", *words]
    return {
        **report,
        "path": path,
        "why": "; ".join(words) or "every product has a launch of its own",
        "kernels": {name: {"launch": launch.entry(), "source": source} for name, launch, source in chosen},
    }


def _explain_rope_window_attn(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, *args: Any, **options: Any
) -> dict[str, Any]:
    """That of the attention core on what q and k are turned into, and the pass that turns them."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        OPS["rope_window_attn"].overload(q, k, v, cos, sin, cu_seqlens, *args, **options)
    report = _explain_window_attn(*workspaces(q, k), v, cu_seqlens, *args, **options)
    if report["path"] != "reference":
        launch, source = rotation_launch(q)
        report["kernels"] = {"rope": {"launch": vars(launch), "source": source}, **report["kernels"]}
    return {**report, "op": "vk::rope_window_attn"}


LAYOUTS = ("contiguous", "encoder", "qkv_view")


def warmup(
    head_dims: Iterable[int],
    dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    num_heads: Iterable[int] = (16,),
    mean_lengths: Iterable[int] = (64, 1024),
    layouts: Iterable[str] = ("contiguous", "encoder"),
    causal: bool = False,
    backward: bool = False,
    device: torch.device | str = "cuda",
) -> int:
    """Builds `window_attn`'s kernels before the first request pays for it; returns how many calls were made.

    Every combination is built, for one segment and for more. Head dimension, number of heads and layout set the strides
    between rows, which are constants of a kernel.

    Args:
        head_dims, dtypes, num_heads: of q, k and v, which have as many heads as each other.
        mean_lengths: tokens per segment to expect; a GPU's rows may hold different launches for short and long ones.
        layouts: "contiguous"; "qkv_view": q, k and v as views of one projection [T, 3, H, D]; "encoder": v as such a
            view, q and k contiguous, as Qwen-VL's encoders have them after the rotary embedding.
        causal: which variant.
        backward: the backward too, and the forward that keeps lse for it.

    Raises:
        ValueError: for a layout that is none of these, and where there is no such GPU: for the CPU nothing is built.
    """
    if not torch.cuda.is_available() or torch.device(device).type != "cuda":
        raise ValueError(f"warmup: device must be a GPU that PyTorch finds here, got {str(device)!r}")
    layouts = tuple(layouts)
    for layout in layouts:
        if layout not in LAYOUTS:
            raise ValueError(f"warmup: layouts must be some of {', '.join(LAYOUTS)}, got {layout!r}")
    calls = 0
    shapes = product(head_dims, dtypes, num_heads, mean_lengths, layouts, (1, 2))
    for head_dim, dtype, heads, length, layout, segments in shapes:
        packed = torch.randn(segments * length, 3, heads, head_dim, device=device, dtype=dtype)
        views = [packed[:, index] for index in range(3)]
        q, k, v = views if layout == "qkv_view" else (*(view.contiguous() for view in views[:2]), views[2])
        if layout == "contiguous":
            v = v.contiguous()
        cu_seqlens = torch.arange(segments + 1, dtype=torch.int32, device=device) * length
        forward = OPS["window_attn"].overload
        forward(q, k, v, cu_seqlens, causal=causal, return_lse=False)
        if backward:
            q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
            out, _ = forward(q, k, v, cu_seqlens, causal=causal)
            out.backward(out.detach())
        calls += 1
    return calls


def info() -> dict[str, Any]:
    """Versions, devices, registered ops, settings, and which paths and launch rows there are on this machine."""
    from torch_ops import __version__

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
            "kernels": {kernel: _rows_of(kernel, (*settings.rows, *shipped)) for kernel in ROWED},
        }
        example = torch.empty(1, 1, 64, dtype=torch.bfloat16, device="meta")
        paths = {"portable": "yes", "hopper": refusal(device, 0.0, q=example) or "yes"}
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
