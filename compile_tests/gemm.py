"""Calls of the ops of the GEMM core on fake CUDA tensors, and what their bodies launch."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests.contract import SM90, KernelLaunch, Recorder, fake_gpu, record_launches
from csrc_free_ops.configs.gemm_hopper import rotary_launch
from csrc_free_ops.configs.rows import Launch
from csrc_free_ops.gemm.hopper.kernel import _gemm_hopper_kernel
from torch_ops._core.plan import Plan
from torch_ops._core.registry import OPS
from torch_ops._gemm import aten as gemm_aten
from torch_ops._gemm import hopper as gemm_hopper
from torch_ops._gemm.portable import padded
from torch_ops._gemm.tensors import Gradient, GradientOptions, Linear, Rotary

GEMM = ("mlp", "mlp_backward", "qkv_rope", "qkv_rope_backward")
GEMM_KERNELS: dict[str, JITFunction] = {
    kernel.fn.__name__: kernel for name in GEMM for kernel in get_triton_kernels_for_op(f"vk::{name}")
}
# By op, what a call changes of the plain one.
GEMM_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu", "inner": 1365},
    "swiglu": {"activation": "swiglu", "inner": 3420, "num_k_heads": 2, "half_table": True},
    "apart": {"activation": "swiglu", "inner": 3420, "apart": True},
    "apart_again": {"activation": "swiglu", "inner": 3420, "apart": True, "return_hidden": False},
    "bare": {"bias": False, "activation": "quick_gelu", "table_dtype": torch.bfloat16},
    "forward_alone": {"return_hidden": False},
    "fp32": {"dtype": torch.float32},
}

Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


def gemm_calls(
    rows: Any = 200, width: int = 1152, inner: int = 4304, num_heads: int = 16, num_k_heads: int | None = None,
    head_dim: int = 72, activation: str = "gelu_tanh", bias: bool = True, return_hidden: bool = True,
    half_table: bool = False, table_dtype: torch.dtype = torch.float32, dtype: torch.dtype = torch.bfloat16,
    apart: bool = False,
) -> Calls:  # fmt: skip
    """Arguments of the ops, on CUDA tensors of the fake mode in force; `apart` for two weights of a gated layer."""

    def new(*shape: Any, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype)

    gated = 2 if activation == "swiglu" else 1
    k_heads = num_k_heads or num_heads
    x, w1, w2 = new(rows, width), new(gated * inner, width), new(width, inner)
    b1, b2 = (new(gated * inner), new(width)) if bias else (None, None)
    hidden = new(rows, gated * inner if return_hidden else 0)
    weight = new((num_heads + 2 * k_heads) * head_dim, width)
    rest: tuple[Any, ...] = (return_hidden,)
    needs: tuple[Any, ...] = (True, True, bias, True, bias)
    if apart:
        w1, w_up = new(inner, width), new(inner, width)
        b1, b_up = (new(inner), new(inner)) if bias else (None, None)
        rest, needs = (return_hidden, w_up, b_up), (*needs, w_up, b_up, True, bias)
    tables = [new(rows, head_dim // 2 if half_table else head_dim, dtype=table_dtype) for _ in range(2)]
    q, k = (new(rows, heads, head_dim) for heads in (num_heads, k_heads))
    return {
        "mlp": ((x, w1, b1, w2, b2, activation, *rest), {}),
        "mlp_backward": ((x, x, w1, b1, w2, hidden, activation, *needs), {}),
        "qkv_rope": ((x, weight, new(weight.shape[0]) if bias else None, *tables, num_heads, k_heads), {}),
        "qkv_rope_backward": ((q, k, k, x, weight, *tables, True, True, bias), {}),
    }


def gemm_launches(
    target: GPUTarget = SM90, gpu: str = "no-such-gpu", path: str = "portable", **variant: Any
) -> dict[str, list[KernelLaunch]]:
    """By op, what its body launches on such a GPU, beside the products that are left to PyTorch."""
    found = {}
    with fake_gpu(target, gpu, path) as mode, mode, mock.patch.object(gemm_aten, "linear_into"):
        for name, (args, options) in gemm_calls(**variant).items():
            with record_launches() as launches:
                OPS[name].body(*args, **options)
            found[name] = list(launches)
    return found


def _recorded_on_hopper(plan: Callable[..., Plan], t: Any, *args: Any) -> KernelLaunch:
    """What `plan(*args)` launches on these tensors."""
    launched: list[KernelLaunch] = []
    recorder = Recorder(launched, _gemm_hopper_kernel)
    with (
        mock.patch.object(gemm_hopper, "programs", lambda index: 132),
        mock.patch.object(gemm_hopper, "_gemm_hopper_kernel", recorder),
    ):
        plan(*args).launch(t)
    (launch,) = launched
    return launch


def hopper_linear(
    launch: Launch, activation: str, bias: bool = True, keeps_pre: bool = True, apart: bool = False,
    dtype: torch.dtype = torch.bfloat16, rows: int = 3136, n: int = 4304, k: int = 1152,
) -> KernelLaunch:  # fmt: skip
    """A linear layer of n columns on the Hopper path with this tile; `apart` for two weights of n / 2."""
    weight, x, out, pre = (
        torch.empty(shape, device="meta", dtype=dtype)
        for shape in (
            (n // 2 if apart else n, k),
            (rows, k),
            (rows, padded(n // 2 if activation == "swiglu" else n, dtype)),
            (rows, n),
        )
    )
    up = torch.empty_like(weight) if apart else None
    biases = [weight[:, 0] if bias else None, weight[:, 0] if bias and apart else None]
    t = Linear(x, weight, biases[0], out, pre if keeps_pre else None, up, biases[1])
    return _recorded_on_hopper(gemm_hopper.plan_linear_hopper, t, (launch, ""), t, activation)


def hopper_gradient(
    activation: str, bias: bool = True, dtype: torch.dtype = torch.bfloat16, rows: int = 3136, n: int = 1152,
    k: int = 4304,
) -> KernelLaunch:  # fmt: skip
    """The gradient of a layer [n, k] and of the activation before it, on the Hopper path."""
    weight, dout, pre, dpre, h = (
        torch.empty(shape, device="meta", dtype=dtype) for shape in ((n, k), (rows, n), (rows, k), (rows, k), (rows, k))
    )
    sums = torch.empty((gemm_hopper.count_of_sums(rows), k), device="meta")
    t = Gradient(dout, weight, pre, dpre, h, sums)
    return _recorded_on_hopper(gemm_hopper.plan_gradient_hopper, t, t, GradientOptions(activation, bias))


def hopper_rotary(
    head_dim: int, num_heads: int = 16, num_k_heads: int = 16, half_table: bool = False, bias: bool = True,
    table_dtype: torch.dtype = torch.float32, dtype: torch.dtype = torch.bfloat16, rows: int = 3136, k: int = 1152,
) -> KernelLaunch:  # fmt: skip
    """A projection that is rotated, on the Hopper path."""
    x = torch.empty(rows, k, device="meta", dtype=dtype)
    weight = torch.empty((num_heads + 2 * num_k_heads) * head_dim, k, device="meta", dtype=dtype)
    table = torch.empty(rows, head_dim // (2 if half_table else 1), device="meta", dtype=table_dtype)
    q, heads = (torch.empty(rows, count, head_dim, device="meta", dtype=dtype) for count in (num_heads, num_k_heads))
    t = Rotary(x, weight, weight[:, 0] if bias else None, table, table, q, heads, heads)
    return _recorded_on_hopper(gemm_hopper.plan_rotary_hopper, t, (rotary_launch(head_dim), ""), t)
