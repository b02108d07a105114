"""Dense attention, sequence by sequence as packed attention of one segment."""

from typing import Any

import torch
from torch import Tensor

from torch_ops.testing.references.packed_attention import window_attn, window_attn_backward


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
    outs, lses = [q[:0].transpose(1, 2)], [q[:0, :, :, 0]]
    for sequence in range(q.shape[0]):
        own_q, own_k, own_v = (_one(tensor, sequence) for tensor in (q, k, v))
        own_options = _own_slopes(options, sequence)
        out, lse = window_attn(own_q, own_k, own_v, *places, first_sequence=sequence, **own_options)
        outs.append(out[None])
        lses.append(lse[None])
    return torch.cat(outs).transpose(1, 2), torch.cat(lses)


def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `vk::attention_backward`."""
    places = _boundaries(q), _boundaries(k)
    results = [tuple(tensor[:0].transpose(1, 2) for tensor in (q, k, v))]
    for sequence in range(q.shape[0]):
        own_dout, own_q, own_k, own_v, own_out = (_one(tensor, sequence) for tensor in (dout, q, k, v, out))
        own_dlse = None if dlse is None else dlse[sequence]
        own = own_dout, own_dlse, own_q, own_k, own_v, own_out, lse[sequence], *places
        gradients = window_attn_backward(*own, first_sequence=sequence, **_own_slopes(options, sequence))
        results.append(tuple(gradient[None] for gradient in gradients))
    dq, dk, dv = (torch.cat(gradients).transpose(1, 2) for gradients in zip(*results, strict=True))
    return dq, dk, dv
