"""Small cases of Hopper kernels against the portable path: `python -m torch_ops._tools.self_test GPU TRITON`.

`torch_ops._core.self_test` runs it once under a Triton version without measurements. The exit code is 0 if all cases
agree and WRONG if one does not or its kernels fail; other codes say nothing about the kernels.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
from torch import Tensor

from torch_ops._core.device import out_of_memory
from torch_ops._core.self_test import WRONG
from torch_ops.attention import attention
from torch_ops.mlp import mlp
from torch_ops.qkv_rope import qkv_rope
from torch_ops.settings import settings
from torch_ops.window_attn import window_attn

# Both paths round to bf16 and add in another order. A wrong tile is off by a whole in its own block of rows.
MOST_RELATIVE_ERROR = 4e-2
BLOCK_ROWS = 64

Case = tuple[str, Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...], dict[str, object]]


def cases(device: torch.device) -> Iterator[Case]:
    """Name, op, tensors that get gradients, and options: attention's head dimensions, masks and groups; epilogues."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    boundaries = torch.tensor([0, 300, 300, 1000], dtype=torch.int32, device=device)
    for head_dim, causal in ((64, False), (72, True), (80, False), (128, True)):
        q, k, v = draw(1000, 4, head_dim), draw(1000, 2, head_dim), draw(1000, 2, head_dim)
        op = partial(window_attn, cu_seqlens=boundaries, causal=causal)
        yield f"window_attn, head dimension {head_dim}", op, (q, k, v), {}
        yield f"window_attn in windows, head dimension {head_dim}", op, (q, k, v), {"window_left": 70}
    for head_dim in (96, 128):
        dense = tuple(draw(2, 4, 400, head_dim) for _ in range(3))
        yield f"attention, head dimension {head_dim}", attention, dense, {"window_left": 100}
    q, k, v, sinks = draw(1, 4, 500, 64), draw(1, 2, 500, 64), draw(1, 2, 500, 64), draw(4, dtype=torch.float32)
    yield "attention with few tiles", attention, (q, k, v), {"causal": True}
    with_sinks = partial(attention, sinks=sinks)
    yield "attention with sinks", with_sinks, (q, k, v), {}
    single = tuple(draw(2, 4, 300, 64, dtype=torch.float32) for _ in range(3))
    yield "attention in fp32", attention, tuple(draw(8, 32, 300, 64, dtype=torch.float32) for _ in range(3)), {}
    yield "attention of fp32 inputs", attention, single, {"compute_dtype": torch.bfloat16, "causal": True}
    x, w2 = draw(600, 1152), draw(1152, 4304)
    plain = [(activation, 4304) for activation in ("gelu_tanh", "gelu", "quick_gelu", "silu")]
    for activation, inner in (*plain, ("swiglu", 8608)):
        weights = draw(inner, 1152) * 0.03, draw(inner), w2 * 0.03, draw(1152)
        yield f"mlp with {activation}", mlp, (x, *weights), {"activation": activation}
    angles = draw(600, 72, dtype=torch.float32)
    rotated = (x, draw(3 * 16 * 72, 1152) * 0.03, draw(3 * 16 * 72))

    def project(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return qkv_rope(x, weight, bias, angles.cos(), angles.sin(), 16)

    yield "qkv_rope", project, rotated, {}


def results(case: Case, path: str) -> list[Tensor]:
    """What a case gives on a path, and the gradients of its sum."""
    _, op, tensors, options = case
    with settings(path=path):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        found = op(*leaves, **options)
        outputs = list(found) if isinstance(found, tuple) else [found]
        douts = [torch.linspace(-1, 1, each.numel(), device=each.device).view_as(each).to(each) for each in outputs]
        return [*(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, douts)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest of all blocks of rows, in the Frobenius norm; infinite where a number is not finite.

    A block counts for at least a tenth of an average one.
    """
    found, expected = (each.double().reshape(-1, each.shape[-1]) for each in (found, expected))
    average = expected.norm() * (BLOCK_ROWS / max(len(expected), BLOCK_ROWS)) ** 0.5
    worst = 0.0
    for block, right in zip(found.split(BLOCK_ROWS), expected.split(BLOCK_ROWS), strict=True):
        error = ((block - right).norm() / torch.maximum(right.norm(), average / 10).clamp_min(1e-30)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def disagreement(case: Case) -> str:
    """What differs between the paths, or nothing."""
    expected, found = results(case, "portable"), results(case, "hopper")
    errors = list(map(relative_error, found, expected))
    worst = max(errors)
    return f"{case[0]}: relative error {worst:.1e}" if worst > MOST_RELATIVE_ERROR else ""


def main() -> None:
    index, version = int(sys.argv[1]), sys.argv[2]
    if triton.__version__ != version:
        sys.exit(f"the self-test of triton {version} found triton {triton.__version__}")
    torch.cuda.set_device(index)
    for case in cases(torch.device("cuda", index)):
        try:
            wrong = disagreement(case)
        except Exception as error:
            if out_of_memory(error):
                raise
            wrong = f"{case[0]}: {type(error).__name__}: {error}"
        if wrong:
            print(" ".join(wrong.split()), file=sys.stderr)
            sys.exit(WRONG)


if __name__ == "__main__":
    main()
