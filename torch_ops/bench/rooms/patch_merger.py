"""The benchmark of `patch_merger`."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from torch_ops import patch_merger
from torch_ops.bench.measure.opbench import select
from torch_ops.bench.rooms.projections import impl, make_bench
from torch_ops.testing import references
from torch_ops.testing.cases import MERGERS, MergerCase, make_merger_inputs


def _products(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, fc1_weight: Tensor, fc1_bias: Tensor | None,
    fc2_weight: Tensor | None, *rest: Any,
) -> Tensor:  # fmt: skip
    rows = functional.linear(x.reshape(-1, fc1_weight.shape[1]), fc1_weight)
    return rows if fc2_weight is None else functional.linear(rows, fc2_weight)


PRODUCTS = impl(
    "products", _products, "F.linear of merged rows, once or twice",
    reference_point="makes the products alone, without norm, biases and activation",
)  # fmt: skip


def _flops(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, fc1_weight: Tensor, fc1_bias: Tensor | None,
    fc2_weight: Tensor | None, *rest: Any,
) -> int:  # fmt: skip
    """FLOPs of the products; norm and activation are not counted."""
    rows = x.numel() // fc1_weight.shape[1]
    return 2 * rows * (fc1_weight.numel() + (0 if fc2_weight is None else fc2_weight.numel()))


def _notation(case: MergerCase) -> str:
    place = "after" if case.norm_after else "before"
    layers = f"{case.merged}-{case.inner or case.merged}" + (f"-{case.outer}" if case.outer else "")
    return f"{case.total}x{case.width}, {layers}, {case.norm} norm {place}"


BENCH = make_bench(
    patch_merger, references.patch_merger, make_merger_inputs, MergerCase("host", "host time", 512, 1152, 4096), _flops,
    cases=partial(select, MERGERS), shape=_notation, baselines=(PRODUCTS,), profiled="merger_1152_3136",
)  # fmt: skip
