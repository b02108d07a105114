"""Dense attention, sequence by sequence as packed attention of one segment."""

from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.references.attention import window_attn, window_attn_backward


def _one(batch: Tensor, sequence: int) -> Tensor:
    """[S, H, D] of one sequence of [B, H, S, D]."""
    return batch[sequence].transpose(0, 1)


def _boundaries(tensor: Tensor) -> Tensor:
    return torch.tensor([0, tensor.shape[2]], dtype=torch.int32, device=tensor.device)


def _own_slopes(options: dict[str, Any], sequence: int) -> dict[str, Any]:
    slopes = options.get("alibi_slopes")
    return options if slopes is None or slopes.dim() == 1 else {**options, "alibi_slopes": slopes[sequence]}


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of `vk::attention`; options are those of `vk::window_attn`."""
    places = _boundaries(q), _boundaries(k)
    results = [
        window_attn(
            *(_one(tensor, sequence) for tensor in (q, k, v)), *places, first_sequence=sequence,
            **_own_slopes(options, sequence),
        )
        for sequence in range(q.shape[0])
    ]  # fmt: skip
    outs, lses = zip(*results, strict=True)
    return torch.stack(outs).transpose(1, 2), torch.stack(lses)


def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `vk::attention_backward`."""
    places = _boundaries(q), _boundaries(k)
    results = []
    for sequence in range(q.shape[0]):
        own_dout, *own = (_one(tensor, sequence) for tensor in (dout, q, k, v, out))
        own_dlse = None if dlse is None else dlse[sequence]
        results.append(
            window_attn_backward(
                own_dout, own_dlse, *own, lse[sequence], *places, first_sequence=sequence,
                **_own_slopes(options, sequence),
            )
        )  # fmt: skip
    dq, dk, dv = (torch.stack(gradients).transpose(1, 2) for gradients in zip(*results, strict=True))
    return dq, dk, dv
