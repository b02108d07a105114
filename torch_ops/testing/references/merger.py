"""Qwen-VL's patch merger."""

from torch import Tensor
from torch.nn import functional

from torch_ops.testing.references.norms import layer_norm, rms_norm


def patch_merger(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, fc1_weight: Tensor, fc1_bias: Tensor | None,
    fc2_weight: Tensor | None, fc2_bias: Tensor | None, merge_size: int = 2, norm_after: bool = False,
    eps: float = 1e-6, rms: bool = False,
) -> Tensor:  # fmt: skip
    """A norm, a view, two layers with GELU between, as Transformers has them; or a norm, a view and a layer."""
    width = merge_size**2 * x.shape[1]
    rows = x.reshape(-1, width) if norm_after else x
    if norm_weight is not None:
        rows = rms_norm(rows, norm_weight, eps) if rms else layer_norm(rows, norm_weight, norm_bias, eps)
    rows = functional.linear(rows.reshape(-1, width), fc1_weight, fc1_bias)
    return rows if fc2_weight is None else functional.linear(functional.gelu(rows), fc2_weight, fc2_bias)
