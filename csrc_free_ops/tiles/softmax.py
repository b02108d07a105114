"""Online softmax (Milakov and Gimelshein, 2018; FlashAttention-2, arXiv 2307.08691, section 3.1)."""

import triton
import triton.language as tl

from csrc_free_ops.tiles.rows import scale_rows
from csrc_free_ops.tiles.scores import exponent_of_lse, exponential, natural_lse
from csrc_free_ops.tiles.steps import DROPOUT, SINKS, kept_share


@triton.jit
def update(scores, factor, peak, norm, NATURAL: tl.constexpr):
    """One block of scores [M, N]: its weights, and the factor that moves earlier sums to the new peak.

    peak [M] is the running maximum of score * factor, norm [M] the running sum of exp(score * factor - peak), to the
    base 2 or e. A row may hold nothing but -inf so far, by masks or by its scores; its peak stays -inf and its weights
    are 0.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = exponential(scores * factor - anchor[:, None], NATURAL)
    rescale = exponential(peak - anchor, NATURAL)
    return weights, rescale, new_peak, norm * rescale + tl.sum(weights, 1)


@triton.jit
def normalize(acc, peak, norm, step, NATURAL: tl.constexpr, STEPS: tl.constexpr):
    """Rows of out and lse, once all blocks are summed up: 0 and -inf for a row without keys.

    A sink is one more logit of every row, whose value is 0, and the only one of a row without keys (as gpt-oss learns
    it; after Xiao et al., arXiv 2309.17453). After dropout what is kept grows by 1 / (1 - p).
    """
    _, _, sink, _, _, _ = step
    if SINKS & STEPS:
        sink = exponent_of_lse(sink, NATURAL)
        highest = tl.maximum(peak, sink)
        # -inf - -inf where there is neither a key nor a sink.
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        share = exponential(peak - highest, NATURAL)
        norm = norm * share + exponential(sink - highest, NATURAL)
        peak = highest
    # Not norm > 0: a row of NaN is no row without keys.
    inverse = tl.where(norm == 0, 0.0, 1.0 / norm)
    lse = tl.where(norm == 0, float("-inf"), natural_lse(peak, norm, NATURAL))
    if SINKS & STEPS:
        inverse *= share
    if DROPOUT & STEPS:
        inverse *= kept_share(step, STEPS)
    return scale_rows(acc, inverse[:, None]), lse
