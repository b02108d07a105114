"""How calls of the GEMM core run, in the words of `torch_ops.explain`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from csrc_free_ops.configs.rows import ATEN, Launch
from torch_ops._core.device import gpu
from torch_ops._core.registry import runs_kernels
from torch_ops._core.report import by_reference, called_on_fakes, describe
from torch_ops._gemm.aten import has_gelu_within
from torch_ops._gemm.hopper import addressable
from torch_ops._gemm.mlp import keeps_hidden
from torch_ops._gemm.plan import NOTHING_FOLLOWS, hopper_launch, why_portable
from torch_ops._gemm.portable import Rows, choose_product, padded, product_kernel, product_size


@dataclass(frozen=True)
class Product:
    """One of the GEMM core's, with the kernel that takes it on the portable path."""

    kernel: str
    rows: Rows
    weight: Tensor
    activation: str = ""
    head_dim: int = 0
    up: Tensor | None = None
    within: bool = False

    def describe(self, x: Tensor) -> tuple[str, Launch, str]:
        """Its kernel and the size of its weight, as in "gemm 4304x1152"; its launch, and where that comes from."""
        n, k = product_size(self.weight, self.up)
        tensors = (x, self.weight) if self.up is None else (x, self.weight, self.up)
        if not why_portable(self.rows, self.weight, self.head_dim, self.up):
            if self.activation == "none":
                return f"{self.kernel} {n}x{k}", ATEN, NOTHING_FOLLOWS
            epilogue = "rotary" if self.head_dim else self.activation
            launch, source = hopper_launch(self.rows, self.weight, epilogue, self.up, self.head_dim, self.within)
            if launch == ATEN:
                return f"{self.kernel} {n}x{k}", launch, source
            # Fake tensors have no address.
            if isinstance(x, FakeTensor) or addressable(*tensors):
                return f"gemm_hopper {n}x{k}", launch, source
        return f"{self.kernel} {n}x{k}", *choose_product(self.kernel, self.rows, self.weight, self.up)


def explain_products(op: str, x: Tensor, products: list[Product]) -> dict[str, Any]:
    if not runs_kernels(x):
        return by_reference(op, x.device)
    chosen = [product.describe(x) for product in products]
    left = [name for name, launch, _ in chosen if launch == ATEN]
    words = [f"left to PyTorch: {', '.join(left)}"] if left else []
    path = "aten" if len(left) == len(chosen) else "portable"
    if any(name.startswith("gemm_hopper") for name, *_ in chosen):
        path, words = "hopper", [f"{gpu().name} is a Hopper GPU", *words]
    why = "; ".join(words) or "every product has a launch of its own"
    kernels: dict[str, tuple[Launch, str]] = {}
    for name, launch, source in chosen:
        # Both products of a square weight may be PyTorch's, each for a reason of its own.
        before = kernels.get(name, (launch, source))[1]
        kernels[name] = launch, source if before == source else f"{before}; {source}"
    return describe(op, x.device, path, why, kernels)


def explain_qkv_rope(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, num_heads: int,
    num_k_heads: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    q, _, _ = called_on_fakes(op, x, weight, bias, cos, sin, num_heads, num_k_heads)
    return explain_products(op, x, [Product("gemm_pair", Rows.of(x), weight, head_dim=q.shape[2])])


def explain_mlp(
    op: str, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    recompute: bool = False, w_up: Tensor | None = None, b_up: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    keeps = keeps_hidden(recompute, x, w1, b1, w2, w_up, b_up)
    return explain_mlp_operator(op, x, w1, b1, w2, b2, activation, keeps, w_up, b_up)


def explain_mlp_operator(
    op: str, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str = "gelu_tanh",
    return_hidden: bool = True, w_up: Tensor | None = None, b_up: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    called_on_fakes(op, x, w1, b1, w2, b2, activation, return_hidden, w_up, b_up)
    rows = Rows.of(x)
    width = padded(w2.shape[1], x.dtype)
    between = Rows(rows.count, width)
    within = has_gelu_within(w1, b1 is not None, activation, return_hidden, width)
    first = Product(product_kernel(activation), rows, w1, activation, up=w_up, within=within)
    return explain_products(op, x, [first, Product("gemm", between, w2, "none")])
