"""What stands between q k^T and softmax, for every launcher of the attention core."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from csrc_free_ops.tiles import steps

# Kernels add and subtract window bounds in 32 bits; lengths stay far below this.
UNBOUNDED = 2**30


class StepTensors(NamedTuple):
    """What a step (`csrc_free_ops.tiles.steps`) reads: slopes of ALiBi, sinks, the seed of dropout; None where off."""

    slopes: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None

    @staticmethod
    def of(slopes: Tensor | None, sinks: Tensor | None, seed: Tensor | None) -> "StepTensors":
        """As kernels read them, without a look at strides."""
        slopes = slopes if slopes is None else slopes.contiguous()
        return StepTensors(slopes, sinks if sinks is None else sinks.contiguous(), seed)


NO_STEP = StepTensors()


@dataclass(frozen=True)
class Scores:
    """What stands between q k^T and softmax; `left` and `right` bound the keys around a query, -1 is unbounded.

    `alibi` is how many dimensions the slopes have, 0 for none; `dropout` is the probability.
    """

    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    alibi: int = 0
    has_sinks: bool = False
    dropout: float = 0.0

    @staticmethod
    def of(
        head_dim: int, scale: float | None, causal: bool, left: int, right: int, softcap: float,
        step: StepTensors = NO_STEP, dropout: float = 0.0,
    ) -> "Scores":  # fmt: skip
        """From an op's arguments; causal order is a right bound of 0."""
        scale = head_dim**-0.5 if scale is None else scale
        alibi = 0 if step.slopes is None else step.slopes.dim()
        # Rounded once, for what computes in fp32 and what does not.
        dropout = float(np.float32(dropout)) if dropout else 0.0
        return Scores(scale, left, 0 if causal else right, softcap, alibi, step.sinks is not None, dropout)

    @property
    def steps(self) -> int:
        """The bits of STEPS."""
        bits = {
            steps.SOFTCAP: self.softcap > 0, steps.ALIBI: self.alibi > 0, steps.DROPOUT: self.dropout > 0,
            steps.SINKS: self.has_sinks,
        }  # fmt: skip
        return sum(bit.value for bit, is_on in bits.items() if is_on)

    @property
    def backward_steps(self) -> int:
        """Sinks count in lse alone."""
        return self.steps & ~steps.SINKS.value

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

    def count_dense_pairs(self, q_length: int, k_length: int) -> int:
        """Of one sequence; all pairs where the lengths are symbols."""
        if not (isinstance(q_length, int) and isinstance(k_length, int)):
            return q_length * k_length
        left, right = self.bounds()
        position = np.arange(q_length) + (k_length - q_length)
        low, high = np.maximum(position - left, 0), np.minimum(position + right, k_length - 1)
        return int(np.maximum(high - low + 1, 0).sum())


def _lengths(cu: Tensor, total: int) -> np.ndarray:
    """Rows of each segment, clamped as the kernels clamp them."""
    return np.maximum(np.diff(cu.cpu().numpy().clip(0, total)), 0)
