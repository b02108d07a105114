"""The launcher of the GEMM core: from tensors and options to the kernels' arguments.

Ops that stand on the core call `plan_linear`, `plan_gradient` and `plan_rotary` by bare name, and launch on tensors of
their own. Here the path is chosen: the Hopper kernel, opaque to graphs; the kernels in stock Triton; or PyTorch's own
product (`aten`), where a row or the rule says so.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from csrc_free_ops.configs.gemm import product_row
from csrc_free_ops.configs.gemm_hopper import few_for_gelu, linear_config, rotary_config, too_few
from csrc_free_ops.configs.rows import ATEN
from torch_ops._core.checks import dtype_name
from torch_ops._core.device import gpu
from torch_ops._core.hopper import programs
from torch_ops._core.plan import Plan, either, has_tma_addresses, merged
from torch_ops._core.planned_op import opaque_plan
from torch_ops._core.registry import INTERPRET, Mode, current_mode, is_eager
from torch_ops._gemm.aten import has_gelu_within, plan_gradient_aten, plan_linear_aten, plan_rotary_aten
from torch_ops._gemm.hopper import plan_gradient_hopper, plan_linear_hopper, plan_rotary_hopper, why_unsupported
from torch_ops._gemm.portable import (
    GATED,
    Chosen,
    Rows,
    choose_product,
    plan_linear_portable,
    plan_rotary_portable,
    product_kernel,
    product_size,
)
from torch_ops._gemm.tensors import Gradient, GradientOptions, Linear, LinearOptions, Rotary, RotaryOptions
from torch_ops.settings import settings

# Why a product that could take the Hopper path is PyTorch's, whatever rows say of the portable kernels.
NOTHING_FOLLOWS = "PyTorch's products are as fast where nothing follows them"
FEW_ROWS = "PyTorch's products are faster where rows are few"
GELU_WITHIN = "PyTorch's products make tanh GELU too, and are faster where rows are few"
ADDRESSES = "TMA cannot start at these addresses"
ACTIVATIONS = ("gelu_tanh", "gelu", "quick_gelu", "silu", "swiglu")


def why_not_hopper(rows: Rows, weight: Tensor, head_dim: int = 0, up: Tensor | None = None) -> str:
    """Why a product with this weight takes no Hopper kernel, or nothing. A rotated product has heads of `head_dim`."""
    if INTERPRET:
        return "TRITON_INTERPRET=1"
    if settings.path == "portable":
        return "settings.path is 'portable'"
    if current_mode() is Mode.PACKAGED:
        return "a package runs without opaque launches"
    if rows.known == 0:
        return "there are no rows"
    return why_unsupported(gpu(), rows, weight, head_dim, up)


def plan_linear(t: Linear, options: LinearOptions) -> Plan:
    rows, activation = Rows.of(t.x), options.activation
    if why_not_hopper(rows, t.weight, up=t.up):
        return _plan_linear_portable(t, activation)
    if activation == "none":
        # The Hopper kernel's gain is what it does behind the product (csrc_free_ops/configs/gemm_hopper.py).
        return plan_linear_aten(NOTHING_FOLLOWS, t, activation)
    if not is_eager():
        return _linear_opaque(options)
    within = has_gelu_within(t, activation)
    chosen = hopper_config(rows, t.weight, activation, t.up, within=within)
    if chosen[0] == ATEN:
        return plan_linear_aten(chosen[1], t, activation, within)
    hopper = plan_linear_hopper(chosen, t, activation)
    fits = _has_tma_addresses if t.up is None else _has_tma_addresses_with_up
    return either(t, hopper, fits, lambda t: _plan_linear_portable(t, activation), ADDRESSES)


def _plan_linear_portable(t: Linear, activation: str) -> Plan:
    chosen = choose_product(product_kernel(activation), Rows.of(t.x), t.weight, t.up)
    if chosen[0] == ATEN:
        return plan_linear_aten(chosen[1], t, activation)
    return plan_linear_portable(chosen, t, activation)


def _has_tma_addresses(t: Linear | Rotary) -> bool:
    return has_tma_addresses(t.x, t.weight)


def _has_tma_addresses_with_up(t: Linear) -> bool:
    return t.up is not None and has_tma_addresses(t.x, t.weight, t.up)


def takes_whole_gradient(rows: Rows, weight: Tensor, activation: str) -> bool:
    """Whether one launch makes a product and its slope; not where rows of pre do not all begin at 16 bytes."""
    return not (activation == GATED or weight.shape[1] % 8 or why_not_hopper(rows, weight))


def plan_gradient(t: Gradient, options: GradientOptions) -> Plan:
    """With `sums` partial is [count_of_column_sums(M), k]."""
    if not takes_whole_gradient(Rows.of(t.dout), t.weight, options.activation):
        # There are no rows, or the setting is another by now: a graph has what it was traced for.
        return plan_gradient_aten(t, options)
    if not is_eager():
        return _gradient_opaque(options)
    hopper = plan_gradient_hopper(t, options)
    return either(
        t, hopper, lambda t: has_tma_addresses(t.dout, t.weight, t.pre), lambda t: plan_gradient_aten(t, options),
        ADDRESSES,
    )  # fmt: skip


def plan_rotary(t: Rotary, options: RotaryOptions) -> Plan:
    rows, head_dim = Rows.of(t.x), t.q.shape[2]
    if why_not_hopper(rows, t.weight, head_dim):
        return _plan_rotary_portable(t)
    if not is_eager():
        return _rotary_opaque(options)
    chosen = hopper_config(rows, t.weight, "rotary", head_dim=head_dim)
    if chosen[0] == ATEN:
        return plan_rotary_aten(chosen[1], t)
    return either(t, plan_rotary_hopper(chosen, t), _has_tma_addresses, _plan_rotary_portable, ADDRESSES)


def _plan_rotary_portable(t: Rotary) -> Plan:
    chosen = choose_product("gemm_pair", Rows.of(t.x), t.weight)
    if chosen[0] == ATEN:
        return plan_rotary_aten(chosen[1], t)
    return plan_rotary_portable(chosen, t)


_linear_opaque = opaque_plan("_linear", Linear, LinearOptions, writes=("out", "pre"), plan=plan_linear)
_gradient_opaque = opaque_plan(
    "_gradient", Gradient, GradientOptions, writes=("dpre", "h", "partial"), plan=plan_gradient
)
_rotary_opaque = opaque_plan("_rotary", Rotary, RotaryOptions, writes=("q", "k", "v"), plan=plan_rotary)


def plan_of(launch: Callable[[Any], Any], *products: Plan) -> Plan:
    """The plan of an op that is made of these products; its path is "aten" where all of them are PyTorch's."""
    kernels = merged(*(plan.kernels for plan in products))
    paths = {plan.path for plan in products}
    path = next((each for each in ("hopper", "portable") if each in paths), "aten")
    left = [name for name, (chosen, _) in kernels.items() if chosen == ATEN]
    words = [f"{gpu().name} is a Hopper GPU"] if path == "hopper" else []
    if left:
        words.append(f"left to PyTorch: {', '.join(left)}")
    return Plan(launch, kernels, path, "; ".join(words) or "every product has a launch of its own")


def hopper_config(
    rows: Rows, weight: Tensor, epilogue: str, up: Tensor | None = None, head_dim: int = 0, within: bool = False
) -> Chosen:
    """The tile of a product that may take the Hopper path, or ATEN where PyTorch is to make it, and its source.
    `within`: whether PyTorch's makes the activation too (`has_gelu_within`)."""
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
        return rotary_config(head_dim), "as many whole heads as a tile has room for"
    return linear_config(rows.count, n, busy), "the tile whose waves take the least time"
