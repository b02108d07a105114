"""The library's version. Its import refuses pairs of torch and triton that are known not to work together."""

import os

import torch
import triton

__version__ = "0.1.0"


def refuse_pair(torch_version: str, triton_version: str) -> None:
    torch_minor, triton_minor = (
        tuple(map(int, v.split("+")[0].split(".")[:2])) for v in (torch_version, triton_version)
    )
    if torch_minor < (2, 11):
        raise ImportError(f"vk needs torch 2.11 or newer, found {torch_version}")
    if triton_minor < (3, 6):
        raise ImportError(f"vk needs triton 3.6 or newer, found {triton_version}")
    # For tests and measurements: eager calls on a GPU need nothing of PyTorch's compiler.
    if torch_minor == (2, 11) and triton_minor >= (3, 7) and os.environ.get("VK_ANY_TRITON") != "1":
        # torch 2.11 reads kernels' mutations with an interface that triton 3.7 changed (pytorch issue 170049).
        raise ImportError(
            f"torch {torch_version} works with triton 3.6 only, found {triton_version}: "
            "install triton 3.6 or torch 2.13 or newer"
        )


def not_run_on_a_gpu(torch_version: str) -> list[str]:
    """Return the version of torch if tests ran with it on CPUs only."""
    newest_run = (2, 11)
    minor = tuple(map(int, torch_version.split("+")[0].split(".")[:2]))
    return [f"torch {torch_version}"] if minor > newest_run else []


refuse_pair(torch.__version__, triton.__version__)
