"""What stands between q k^T and softmax, for every launcher of the attention core."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Kernels add and subtract window bounds in 32 bits; lengths stay far below this.
UNBOUNDED = 2**30


@dataclass(frozen=True)
class Scores:
    """What stands between q k^T and softmax; `left` and `right` bound the keys around a query, -1 is unbounded."""

    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0

    @staticmethod
    def of(head_dim: int, scale: float | None, causal: bool, left: int, right: int, softcap: float) -> "Scores":
        """From an op's arguments; causal order is a right bound of 0."""
        scale = head_dim**-0.5 if scale is None else scale
        return Scores(scale, left, 0 if causal else right, softcap)

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
        left, right = self.bounds()
        pairs = 0
        for q_length, k_length in zip(q_lengths.tolist(), k_lengths.tolist(), strict=True):
            position = np.arange(q_length) + (k_length - q_length)
            low, high = np.maximum(position - left, 0), np.minimum(position + right, k_length - 1)
            pairs += int(np.maximum(high - low + 1, 0).sum())
        return pairs


def _lengths(cu: Tensor, total: int) -> np.ndarray:
    """Rows of each segment, clamped as the kernels clamp them."""
    return np.maximum(np.diff(cu.cpu().numpy().clip(0, total)), 0)
