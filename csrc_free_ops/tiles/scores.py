"""The step between q k^T and softmax."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """tanh from exp2, with its Taylor series where 1 - exp(-2|x|) would cancel."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = x * (1.0 + square * (-0.33333333 + square * (0.13333334 + square * (-0.05396825 + square * 0.021869488))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def cap_scores(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores from q k^T and their slope over scale q.k: softcap tanh(scale q.k / softcap), else the products."""
    if SOFTCAP:
        capped = tanh(products * (scale / softcap))
        scores = capped * softcap
        slope = 1.0 - capped * capped
    else:
        scores = products
        slope = 1.0
    return scores, slope


@triton.jit
def log2_factor(scale, SOFTCAP: tl.constexpr):
    """What turns the scores of `cap_scores` into base-2 exponents, in the same step that subtracts the peak."""
    if SOFTCAP:
        factor = LOG2E
    else:
        factor = scale * LOG2E
    return factor
