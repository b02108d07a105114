"""Small cases of every family of Hopper kernels against the portable path: `python -m torch_ops._tools.self_test GPU`.

Exits with 0 if all agree. `torch_ops._core.self_test` runs it once for a version of Triton that nobody has measured.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from torch_ops.attention import attention
from torch_ops.mlp import mlp
from torch_ops.qkv_rope import qkv_rope
from torch_ops.settings import settings
from torch_ops.window_attn import window_attn

# Both paths round to bf16 and add in another order; a wrong tile is off by a whole.
MOST_RELATIVE_ERROR = 2e-2

Case = tuple[str, Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...], dict[str, object]]


def cases(device: torch.device) -> Iterator[Case]:
    """Name, op, tensors of which it has gradients, and the rest: attention's tails, masks, groups; every epilogue."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    boundaries = torch.tensor([0, 300, 300, 1000], dtype=torch.int32, device=device)
    for head_dim, causal in ((64, False), (72, True), (80, False), (128, True)):
        q, k, v = draw(1000, 4, head_dim), draw(1000, 2, head_dim), draw(1000, 2, head_dim)
        op = partial(window_attn, cu_seqlens=boundaries, causal=causal)
        yield f"window_attn, head dimension {head_dim}", op, (q, k, v), {}
    for head_dim in (96, 128):
        dense = tuple(draw(2, 4, 400, head_dim) for _ in range(3))
        yield f"attention, head dimension {head_dim}", attention, dense, {"window_left": 100}
    single = tuple(draw(2, 4, 300, 64, dtype=torch.float32) for _ in range(3))
    yield "attention of fp32 inputs", attention, single, {"compute_dtype": torch.bfloat16, "causal": True}
    x, w2 = draw(600, 1152), draw(1152, 4304)
    for activation, inner in (("gelu_tanh", 4304), ("swiglu", 8608)):
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
    """In the Frobenius norm; infinite where a number is not finite."""
    found, expected = found.double(), expected.double()
    error = ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def disagreement(case: Case) -> str:
    """What differs between the paths, or nothing."""
    expected, found = results(case, "portable"), results(case, "hopper")
    errors = list(map(relative_error, found, expected))
    worst = max(errors)
    return f"{case[0]}: relative error {worst:.1e}" if worst > MOST_RELATIVE_ERROR else ""


def main() -> None:
    torch.cuda.set_device(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for case in cases(torch.device("cuda", torch.cuda.current_device())):
        if wrong := disagreement(case):
            sys.exit(wrong)


if __name__ == "__main__":
    main()
