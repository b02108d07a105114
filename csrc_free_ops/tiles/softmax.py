"""Online softmax (Milakov and Gimelshein, 2018; FlashAttention-2, arXiv 2307.08691, section 3.1)."""

import triton
import triton.language as tl

from csrc_free_ops.tiles.rows import scale_rows
from csrc_free_ops.tiles.score_mod import DROPOUT, SINKS, dropout_factor
from csrc_free_ops.tiles.scores import exponent_of_lse, exponential, natural_lse


@triton.jit
def update(scores, factor, peak, norm, NATURAL: tl.constexpr):
    """(weights, rescale, peak, norm) after one more block of scores [M, N].

    peak [M] is the running maximum of score * factor. norm [M] is the running sum of exp(score * factor - peak), to the
    base 2 or e. rescale [M] is the factor for earlier sums. A row that holds only -inf so far, by masks or by scores,
    keeps the peak -inf and gets weights of 0.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = exponential(scores * factor - anchor[:, None], NATURAL)
    rescale = exponential(peak - anchor, NATURAL)
    return weights, rescale, new_peak, norm * rescale + tl.sum(weights, 1)


@triton.jit
def normalize(acc, peak, norm, score_mod, NATURAL: tl.constexpr, SCORE_MODS: tl.constexpr):
    """(out, lse) from the sums over all blocks; a row without keys gets 0 and -inf.

    A sink is one more logit of every row with a value of 0, as gpt-oss learns it (after Xiao et al., arXiv 2309.17453).
    A row without keys has only the sink. Weights that dropout keeps get the factor 1 / (1 - p).
    """
    _, _, sink, _, _, _ = score_mod
    if SINKS & SCORE_MODS:
        sink = exponent_of_lse(sink, NATURAL)
        highest = tl.maximum(peak, sink)
        # Without a key and a sink, -inf - -inf would be NaN.
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        share = exponential(peak - highest, NATURAL)
        norm = norm * share + exponential(sink - highest, NATURAL)
        peak = highest
    # Not `norm > 0`, because a row of NaN must stay NaN.
    inverse = tl.where(norm == 0, 0.0, 1.0 / norm)
    lse = tl.where(norm == 0, float("-inf"), natural_lse(peak, norm, NATURAL))
    if SINKS & SCORE_MODS:
        inverse *= share
    if DROPOUT & SCORE_MODS:
        inverse *= dropout_factor(score_mod, SCORE_MODS)
    return scale_rows(acc, inverse[:, None]), lse
