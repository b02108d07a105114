"""Launches of products on the Hopper path, whose kernel is opaque in traces."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from compile_tests.contract.trace import KernelLaunch, Recorder
from csrc_free_ops.configs.gemm_hopper import rotary_config
from csrc_free_ops.configs.rows import Config
from csrc_free_ops.gemm.hopper.kernel import _gemm_hopper_kernel
from torch_ops._core.plan import Plan
from torch_ops._gemm import hopper as gemm_hopper
from torch_ops._gemm.portable import padded
from torch_ops._gemm.tensors import Gradient, GradientOptions, Linear, Rotary


def _recorded_on_hopper(plan: Callable[..., Plan], t: Any, *args: Any) -> KernelLaunch:
    """The kernels that `plan(*args)` launches on these tensors."""
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
    launch: Config, activation: str, bias: bool = True, keeps_pre: bool = True, apart: bool = False,
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
    sums = torch.empty((gemm_hopper.count_of_column_sums(rows), k), device="meta")
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
    return _recorded_on_hopper(gemm_hopper.plan_rotary_hopper, t, (rotary_config(head_dim), ""), t)
