"""The options that act between q k^T and softmax, for every plan of the attention core."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from csrc_free_ops.tiles import score_mod
from torch_ops._core.torch_private import FakeTensor

# Kernels add and subtract window bounds in 32 bits; lengths stay far below this.
UNBOUNDED = 2**30


class AttentionOptions(NamedTuple):
    """The options of an attention call, without its tensors.

    left, right: keys that a query sees before and after its position, -1 for all
    alibi:       number of dimensions of the slopes, 0 for none
    dropout:     probability
    has_lse:     whether lse is filled
    compute_dtype: half type that fp32 inputs are computed in, None for their own
    """

    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    alibi: int = 0
    has_sinks: bool = False
    dropout: float = 0.0
    has_lse: bool = True
    deterministic: bool = True
    compute_dtype: torch.dtype | None = None

    @staticmethod
    def of(call: Any) -> "AttentionOptions":
        """Read the options off an op's call, whatever of them it has. Causal order is a right bound of 0."""
        slopes, dropout = getattr(call, "alibi_slopes", None), getattr(call, "dropout_p", 0.0)
        return AttentionOptions(
            scale=call.q.shape[-1] ** -0.5 if call.scale is None else call.scale,
            left=call.window_left,
            right=0 if call.causal else call.window_right,
            softcap=call.softcap,
            alibi=0 if slopes is None else slopes.dim(),
            has_sinks=getattr(call, "sinks", None) is not None,
            # Rounded once, for what computes in fp32 and what does not.
            dropout=float(np.float32(dropout)) if dropout else 0.0,
            has_lse=getattr(call, "return_lse", True),
            deterministic=getattr(call, "deterministic", True),
            compute_dtype=getattr(call, "compute_dtype", None),
        )

    @property
    def score_mods(self) -> int:
        """The bits of SCORE_MODS."""
        bits = {
            score_mod.SOFTCAP: self.softcap > 0, score_mod.ALIBI: self.alibi > 0, score_mod.DROPOUT: self.dropout > 0,
            score_mod.SINKS: self.has_sinks,
        }  # fmt: skip
        return sum(bit.value for bit, is_on in bits.items() if is_on)

    @property
    def backward_score_mods(self) -> int:
        """Sinks count in lse alone."""
        return self.score_mods & ~score_mod.SINKS.value

    @property
    def causal(self) -> bool:
        return self.right == 0 and self.left < 0

    @property
    def masked(self) -> bool:
        return self.right >= 0 or self.left >= 0

    def bounds(self) -> tuple[int, int]:
        left = UNBOUNDED if self.left < 0 else min(self.left, UNBOUNDED)
        right = UNBOUNDED if self.right < 0 else min(self.right, UNBOUNDED)
        return left, right

    def count_pairs(self, cu_q: Tensor, cu_k: Tensor | None, total_q: int, total_k: int) -> int:
        """Query-key pairs that are seen; all pairs, an upper bound, where the lengths are fake."""
        if isinstance(cu_q, FakeTensor) or cu_q.is_meta:
            return total_q * total_k
        q_lengths = _lengths(cu_q, total_q)
        k_lengths = q_lengths if cu_k is None else _lengths(cu_k, total_k)
        return sum(map(self.count_dense_pairs, q_lengths.tolist(), k_lengths.tolist()))

    def count_dense_pairs(self, q_length: int, k_length: int, start: int | None = None) -> int:
        """The query-key pairs of one sequence, all pairs where the lengths are symbols.

        `start` is the key position of the first query; by default the last query stands at the last key.
        """
        if not (isinstance(q_length, int) and isinstance(k_length, int)):
            return q_length * k_length
        left, right = self.bounds()
        position = np.arange(q_length) + (k_length - q_length if start is None else start)
        low, high = np.maximum(position - left, 0), np.minimum(position + right, k_length - 1)
        return int(np.maximum(high - low + 1, 0).sum())


def _lengths(cu: Tensor, total: int) -> np.ndarray:
    """Rows of each segment, clamped as the kernels clamp them."""
    return np.maximum(np.diff(cu.cpu().numpy().clip(0, total)), 0)
