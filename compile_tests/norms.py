"""Calls of the norms on fake CUDA tensors, and what their bodies launch."""

from typing import Any

import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compile_tests.contract import SM90, KernelLaunch, fake_gpu, record_launches
from torch_ops._core.registry import OPS

NORMS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
KERNELS: dict[str, JITFunction] = {
    kernel.fn.__name__: kernel for name in NORMS for kernel in get_triton_kernels_for_op(f"vk::{name}_backward")
} | {kernel.fn.__name__: kernel for name in NORMS for kernel in get_triton_kernels_for_op(f"vk::{name}")}

BACKWARD = {"_norm_bwd_kernel", "_norm_bwd_wide_kernel", "_norm_bwd_sums_kernel"}
# The kernels of each op. What torch must take them to write depends on the call.
KERNELS_OF = {name: {"_norm_fwd_kernel", "_norm_fwd_wide_kernel"} for name in NORMS} | {
    f"{name}_backward": BACKWARD for name in NORMS
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {"parameters": torch.float32},
    "bare": {"parameters": None},
    "frozen": {"needs_parameters": False},
    "parameters_alone": {"needs_dx": False},
    "fp32": {"dtype": torch.float32, "width": 768},
    "three_dimensions": {"batch": (3, 50)},
    "wide": {"width": 20000},
}


def norm_calls(
    op: str, rows: Any = 200, width: Any = 1152, batch: tuple[Any, ...] = (), dtype: torch.dtype = torch.bfloat16,
    parameters: torch.dtype | None = torch.bfloat16, needs_dx: bool = True, needs_parameters: bool = True,
) -> dict[str, tuple[Any, ...]]:  # fmt: skip
    """Arguments of a norm and of its backward, on CUDA tensors of the fake mode in force.

    `parameters` is the dtype of weight and bias, or None for none; half ones follow x's dtype.
    """

    def drawn() -> Tensor:
        return torch.empty(*(batch or (rows,)), width, device="cuda", dtype=dtype)

    def vector() -> Tensor | None:
        if parameters is None:
            return None
        return torch.empty(width, device="cuda", dtype=torch.float32 if parameters is torch.float32 else dtype)

    vectors = [vector() for _ in range(2 if "layer" in op else 1)]
    needs = [needs_dx, *(parameters is not None and needs_parameters for _ in vectors)]
    added = "add" in op
    return {
        op: (drawn(), *([drawn()] if added else []), *vectors, 1e-6),
        f"{op}_backward": (drawn(), *([drawn()] if added else []), drawn(), *vectors, 1e-6, *needs),
    }


def norm_launches(
    op: str, target: GPUTarget = SM90, gpu: str = "no-such-gpu", **variant: Any
) -> dict[str, KernelLaunch]:
    """By kernel name, what the bodies of a norm and its backward launch on such a GPU."""
    with fake_gpu(target, gpu) as mode, record_launches() as launches, mode:
        for name, args in norm_calls(op, **variant).items():
            OPS[name].body(*args)
    return {launch.name: launch for launch in launches}
