"""One plain function per op, the maths as one would write it down: any dtype, differentiable by autograd.

Run in fp64 it is the truth, run in the tested dtype it is "eager PyTorch" of the tolerance rule.
"""

import torch
from torch import Tensor


def _bounds(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    values = cu_seqlens.tolist()
    return list(zip(values, values[1:], strict=False))


def window_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `vk::window_attn`, one segment after the other with the whole score matrix of each."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    keys = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    outs, lses = [q[:0]], [q.new_empty((q.shape[1], 0))]
    for (start, end), (k_start, k_end) in zip(_bounds(cu_seqlens), _bounds(keys), strict=True):
        q_segment = q[start:end].transpose(0, 1)
        k_segment = k[k_start:k_end].transpose(0, 1).repeat_interleave(group, 0)
        v_segment = v[k_start:k_end].transpose(0, 1).repeat_interleave(group, 0)
        scores = q_segment @ k_segment.transpose(1, 2) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        num_queries, num_keys = scores.shape[1:]
        position = torch.arange(num_queries, device=q.device)[:, None] + (num_keys - num_queries)
        key = torch.arange(num_keys, device=q.device)[None, :]
        seen = torch.ones((num_queries, num_keys), dtype=torch.bool, device=q.device)
        if causal:
            seen &= key <= position
        if window_left >= 0:
            seen &= key >= position - window_left
        if window_right >= 0:
            seen &= key <= position + window_right
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = torch.logsumexp(scores, -1) if num_keys else scores.new_full(scores.shape[:2], -torch.inf)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        outs.append((weights @ v_segment).transpose(0, 1))
        lses.append(lse)
    rest = q.shape[0] - int(cu_seqlens[-1])
    outs.append(q.new_zeros((rest, *q.shape[1:])))
    lses.append(q.new_full((q.shape[1], rest), -torch.inf))
    return torch.cat(outs), torch.cat(lses, 1)
