"""The launcher of the GEMM core: from tensors and options to the kernels' arguments.

Ops that stand on the core call `plan_linear`, `plan_gradient` and `plan_rotary` by bare name. A plan depends on
metadata alone, never on values on the device; it returns the function that launches, which writes into tensors that the
op allocated. Here the path is chosen: the Hopper kernel, opaque to graphs; the kernels in stock Triton; or, where a row
or the rule says so, PyTorch's own product (`aten`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from csrc_free_ops.configs.gemm import product_row
from csrc_free_ops.configs.gemm_hopper import few_for_gelu, linear_launch, rotary_launch, too_few
from csrc_free_ops.configs.rows import ATEN, Launch
from torch_ops._core.checks import dtype_name
from torch_ops._core.device import gpu
from torch_ops._core.hopper import is_packaged, programs
from torch_ops._core.registry import INTERPRET, is_eager, opaque_launch, remembered
from torch_ops._gemm.aten import gelu_into, has_gelu_within, plan_gradient_aten, plan_linear_aten, plan_rotary_aten
from torch_ops._gemm.hopper import addressable, plan_gradient_hopper, plan_linear_hopper, plan_rotary_hopper, refusal
from torch_ops._gemm.portable import (
    GATED,
    Rows,
    choose_product,
    plan_linear_portable,
    plan_rotary_portable,
    product_kernel,
    product_size,
)
from torch_ops.settings import settings

# Why a product that could take the Hopper path is PyTorch's, whatever rows say of the portable kernels.
NOTHING_FOLLOWS = "PyTorch's products are as fast where nothing follows them"
FEW_ROWS = "PyTorch's products are faster where rows are few"
GELU_WITHIN = "PyTorch's products make tanh GELU too, and are faster where rows are few"
ACTIVATIONS = ("gelu_tanh", "gelu", "quick_gelu", "silu", "swiglu")


def why_portable(rows: Rows, weight: Tensor, head_dim: int = 0, up: Tensor | None = None) -> str:
    """Why a product with this weight takes no Hopper kernel, or nothing. Of one that is rotated, by its heads too."""
    if INTERPRET:
        return "TRITON_INTERPRET=1"
    if settings.path == "portable":
        return "settings.path is 'portable'"
    if is_packaged():
        return "a package runs without opaque launches"
    if rows.known == 0:
        return "there are no rows"
    return refusal(gpu(), rows, weight, head_dim, up)


def plan_linear(
    rows: Rows, weight: Tensor, has_bias: bool, activation: str = "none", keeps_pre: bool = False,
    width: int | None = None, up: Tensor | None = None,
) -> Callable[..., None]:  # fmt: skip
    """launch(x, weight, bias, out, pre, up, up_bias) fills out with activation(x weight^T + bias).

    x is [M, K] with contiguous columns, its layout `rows`; weight [n, K] in any strides; bias [n], None without
    `has_bias`. out is contiguous, rows of `width` columns: n, or of "swiglu" n / 2, and zeros behind where they are
    `padded`. Without an activation x may be such an out. With `keeps_pre` pre, contiguous [M, n], is filled with what
    the activation is of; else it is None.

    A gated layer may have two weights: then weight and bias are of the gates, up and up_bias, as large, of what they
    gate, and n is the rows of both. up and up_bias may be left out where there are none.
    """
    n, _ = product_size(weight, up)
    width = n if width is None else width

    # A function within is one call less: torch finds an op's kernels five calls deep (`get_inner_triton_kernels`). It
    # is given its tensors since a plan is remembered, and would keep those of its own call.
    def plan_stock(weight: Tensor, up: Tensor | None = None) -> Callable[..., None]:
        launch, _ = choose_product(product_kernel(activation), rows, weight, up)
        if launch == ATEN:
            return plan_linear_aten(rows, weight, activation, keeps_pre, width, up)
        return plan_linear_portable(launch, rows, weight, has_bias, activation, keeps_pre, width, up)

    if why_portable(rows, weight, up=up):
        return plan_stock(weight, up)
    if activation == "none":
        # The Hopper kernel's gain is what it does behind the product (csrc_free_ops/configs/gemm_hopper.py).
        return plan_linear_aten(rows, weight, activation, keeps_pre, width)
    if not is_eager():
        return partial(_launch_linear_in_graph, activation)
    within = has_gelu_within(weight, has_bias, activation, keeps_pre, width)
    launch, _ = hopper_launch(rows, weight, activation, up, within=within)
    if launch == ATEN:
        return gelu_into if within else plan_linear_aten(rows, weight, activation, keeps_pre, width, up)
    hopper = plan_linear_hopper(launch, rows, weight, has_bias, activation, keeps_pre, width, up)
    if up is None:
        return _where_addressable(hopper, lambda args: plan_stock(args[1]), (0, 1))
    return _where_addressable(hopper, lambda args: plan_stock(args[1], args[5]), (0, 1, 5))


def plan_gradient(rows: Rows, weight: Tensor, activation: str, sums: bool) -> Callable[..., None] | None:
    """launch(dout, weight, pre, dpre, h, partial): the gradient of a layer [n, k] and of the activation f before it.

    dpre = (dout weight) f'(pre) and h = f(pre); with `sums` partial, fp32 [count_of_sums(M), k], takes parts of the sum
    of dpre's rows. dout is [M, n], its layout `rows`; pre, dpre and h are contiguous [M, k]. None where the product and
    what follows it are to be apart, as where rows of pre do not all begin at 16 bytes.
    """
    if activation == GATED or weight.shape[1] % 8 or why_portable(rows, weight):
        return None
    if not is_eager():
        return partial(_launch_gradient_opaque, activation=activation, sums=sums)
    hopper = plan_gradient_hopper(rows, weight, activation, sums)
    return _where_addressable(hopper, lambda args: plan_gradient_aten(rows, args[1], activation, sums), (0, 1, 2))


def plan_rotary(
    rows: Rows, weight: Tensor, has_bias: bool, cos: Tensor, sin: Tensor, num_heads: int, num_k_heads: int
) -> Callable[..., None]:
    """launch(x, weight, bias, cos, sin, q, k, v) fills q, k and v, contiguous; x, weight and bias as above."""
    head_dim = weight.shape[0] // (num_heads + 2 * num_k_heads)

    def plan_stock(weight: Tensor, cos: Tensor, sin: Tensor) -> Callable[..., None]:
        launch, _ = choose_product("gemm_pair", rows, weight)
        if launch == ATEN:
            return plan_rotary_aten(rows, weight, cos, sin, num_heads, num_k_heads)
        return plan_rotary_portable(launch, rows, weight, has_bias, cos, sin, num_heads, num_k_heads)

    if why_portable(rows, weight, head_dim):
        return plan_stock(weight, cos, sin)
    if not is_eager():
        return partial(_launch_rotary_opaque, num_heads=num_heads, num_k_heads=num_k_heads)
    launch, _ = hopper_launch(rows, weight, "rotary", head_dim=head_dim)
    if launch == ATEN:
        return plan_rotary_aten(rows, weight, cos, sin, num_heads, num_k_heads)
    hopper = plan_rotary_hopper(launch, rows, weight, has_bias, cos, sin, num_heads, num_k_heads)
    return _where_addressable(hopper, lambda args: plan_stock(args[1], *args[3:5]), (0, 1))


def _where_addressable(
    hopper: Callable[..., None], plan_stock: Callable[[tuple[Any, ...]], Callable[..., None]],
    operands: tuple[int, ...],
) -> Callable[..., None]:  # fmt: skip
    """The Hopper launch; for calls whose `operands`, by place, TMA cannot address, `plan_stock` of the first such."""
    stock: list[Callable[..., None]] = []

    def launch_either(*args: Any) -> None:
        if addressable(*[args[place] for place in operands]):
            hopper(*args)
            return
        if not stock:
            stock.append(plan_stock(args))
        stock[0](*args)

    return launch_either


def hopper_launch(
    rows: Rows, weight: Tensor, epilogue: str, up: Tensor | None = None, head_dim: int = 0, within: bool = False
) -> tuple[Launch, str]:
    """The tile of a product that may take the Hopper path, its rows known, or ATEN where PyTorch is to make it; and
    where that comes from. `within`: whether PyTorch's makes the activation too (`has_gelu_within`)."""
    kernel = "gemm_pair" if epilogue == "rotary" else product_kernel(epilogue)
    n, k = product_size(weight, up)
    busy = programs(weight.device.index)
    if settings.path == "auto":
        # Other launches are of the portable kernels.
        row = product_row(settings.rows, kernel, gpu(), dtype_name(weight.dtype), n, k, rows.known)
        if row is not None and row.launch == ATEN:
            return ATEN, row.source
        if within and few_for_gelu(rows.count, n, busy):
            return ATEN, GELU_WITHIN
        if too_few(rows.count, n, k, epilogue, head_dim, busy):
            return ATEN, GELU_WITHIN if within else FEW_ROWS
    if epilogue == "rotary":
        return rotary_launch(head_dim), "as many whole heads as a tile has room for"
    return linear_launch(rows.count, n, busy), "the tile whose rounds take the least time"


def _launch_linear_in_graph(
    activation: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None,
    up: Tensor | None = None, up_bias: Tensor | None = None,
) -> None:  # fmt: skip
    kept = x.new_empty(0) if pre is None else pre
    _launch_linear_opaque(x, weight, bias, up, up_bias, out, kept, activation, pre is not None)


@opaque_launch("_linear", writes=("out", "pre"))
def _launch_linear_opaque(
    x: Tensor, weight: Tensor, bias: Tensor | None, up: Tensor | None, up_bias: Tensor | None, out: Tensor,
    pre: Tensor, activation: str, keeps_pre: bool,
) -> None:  # fmt: skip
    plan = _prepare_linear(x, weight, bias, up, out, activation, keeps_pre)
    plan(x, weight, bias, out, pre if keeps_pre else None, up, up_bias)


@remembered
def _prepare_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, up: Tensor | None, out: Tensor, activation: str, keeps_pre: bool
) -> Callable[..., None]:
    return plan_linear(Rows.of(x), weight, bias is not None, activation, keeps_pre, out.shape[1], up)


@opaque_launch("_gradient", writes=("dpre", "h", "partial"))
def _launch_gradient_opaque(
    dout: Tensor, weight: Tensor, pre: Tensor, dpre: Tensor, h: Tensor, partial: Tensor, activation: str, sums: bool
) -> None:
    _prepare_gradient(dout, weight, activation, sums)(dout, weight, pre, dpre, h, partial)


@remembered
def _prepare_gradient(dout: Tensor, weight: Tensor, activation: str, sums: bool) -> Callable[..., None]:
    rows = Rows.of(dout)
    plan = plan_gradient(rows, weight, activation, sums)
    # There are no rows, or the setting is another by now: the graph has what it was traced for.
    return plan_gradient_aten(rows, weight, activation, sums) if plan is None else plan


@opaque_launch("_rotary", writes=("q", "k", "v"))
def _launch_rotary_opaque(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor,
    num_heads: int, num_k_heads: int,
) -> None:  # fmt: skip
    _prepare_rotary(x, weight, bias, cos, sin, num_heads, num_k_heads)(x, weight, bias, cos, sin, q, k, v)


@remembered
def _prepare_rotary(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, num_heads: int, num_k_heads: int
) -> Callable[..., None]:
    return plan_rotary(Rows.of(x), weight, bias is not None, cos, sin, num_heads, num_k_heads)
