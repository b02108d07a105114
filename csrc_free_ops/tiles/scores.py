"""The step between q k^T and softmax.

Exponents (scores, their peak, lse while it is subtracted) are in one unit throughout a kernel: natural in fp32, base 2
in half types. lse in memory is always natural.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.steps import ALIBI, SOFTCAP

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-0.00021219444005469057)


@triton.jit
def tanh(x):
    """tanh and its slope from d = exp(-2|x|): with r = 2 d / (1 + d), 1 - r and 1 - tanh^2 = r (2 - r).

    Near zero 1 - r cancels, and tanh is its Taylor series; r (2 - r) cancels nowhere.
    """
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    rest = 2.0 * decay / (1.0 + decay)
    far = 1.0 - rest
    square = x * x
    near = x * (1.0 + square * (-0.33333333 + square * (0.13333334 + square * (-0.05396825 + square * 0.021869488))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far)), rest * (2.0 - rest)


@triton.jit
def step_scores(products, rows, cols, shift, scale, step, STEPS: tl.constexpr):
    """Scores from q k^T and how steeply they rise with scale q.k; without a step that needs them, the products.

    With a softcap c, c tanh(scale q.k / c); with ALiBi (Press et al., arXiv 2108.12409) less slope |row + shift - col|,
    where rows and cols broadcast against each other.
    """
    softcap, alibi, _, _, _, _ = step
    steepness = 1.0
    if SOFTCAP & STEPS:
        capped, steepness = tanh(products * (scale / softcap))
        scores = capped * softcap
    elif ALIBI & STEPS:
        scores = products * scale
    else:
        scores = products
    if ALIBI & STEPS:
        scores -= alibi * tl.abs(rows + shift - cols).to(tl.float32)
    return scores, steepness


@triton.jit
def exponent_factor(scale, STEPS: tl.constexpr, NATURAL: tl.constexpr):
    """What turns the scores of `step_scores` into exponents, in the same step that subtracts the peak.

    Half types take base 2, where a weight is one multiply-add and one exp2. fp32 is NATURAL: a factor of log2(e) would
    round more often than eager PyTorch does.
    """
    if (SOFTCAP | ALIBI) & STEPS:
        factor = 1.0
    else:
        factor = scale
    if not NATURAL:
        factor = factor * LOG2E
    return factor


@triton.jit
def exp_parts(x):
    """(power, part) with exp(x) = power (1 + part), where it is neither denormal nor infinite.

    x = n ln 2 + r, with ln 2 in two parts of which n times the first is exact; power is 2^n, from its bits, and part a
    Taylor polynomial in r, |r| <= ln(2) / 2, that is off by less than 1e-8.
    """
    within = tl.minimum(tl.maximum(x, -87.0), 88.0)
    n = tl.floor(within * LOG2E + 0.5)
    r = (within - n * LN2_HIGH) - n * LN2_LOW
    tail = 1.0 / 24 + r * (1.0 / 120 + r * (1.0 / 720 + r * (1.0 / 5040)))
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return power, r * (1.0 + r * (0.5 + r * (1.0 / 6 + r * tail)))


@triton.jit
def exp(x):
    """exp to about one unit in the last place, where a GPU's own exp2 is off by up to four. What would be denormal is
    0."""
    power, part = exp_parts(x)
    result = power + power * part
    result = tl.where(x < -87.0, 0.0, tl.where(x > 88.0, float("inf"), result))
    return tl.where(x == x, result, x)


@triton.jit
def exponential(exponent, NATURAL: tl.constexpr):
    if NATURAL:
        power = exp(exponent)
    else:
        power = tl.exp2(exponent)
    return power


@triton.jit
def natural_lse(peak, norm, NATURAL: tl.constexpr):
    """log of norm * exp(peak), with peak in the unit of the exponents.

    In fp32 it is rounded once, at the end: all weights of a row that the backward makes are off by its error.
    """
    if NATURAL:
        # A GPU's log2 is off by more than the sum rounds; one step of Newton's makes up for it. A plain product would
        # be folded into the sum and not be the same number elsewhere.
        log = tl.fma(tl.log2(norm), LN2, 0.0)
        high = peak + log
        back = high - peak
        low = (peak - (high - back)) + (log - back)
        power, part = exp_parts(-log)
        scaled = norm * power
        lse = high + (low + ((scaled - 1.0) + scaled * part))
    else:
        lse = (peak + tl.log2(norm)) * LN2
    return lse


@triton.jit
def exponent_of_lse(lse, NATURAL: tl.constexpr):
    if not NATURAL:
        lse = lse * LOG2E
    return lse


# Of fp32, far from where an lse is.
LEAST_LSE = tl.constexpr(-3e38)


@triton.jit
def exponent_of_norm(lse, NATURAL: tl.constexpr):
    """What a backward takes off scores. Of fp32, where products of finite numbers may be infinite, an lse of -inf, that
    of scores of -inf alone, would make them NaN: they weigh nothing."""
    if NATURAL:
        lse = tl.maximum(lse, LEAST_LSE, propagate_nan=tl.PropagateNan.ALL)
    return exponent_of_lse(lse, NATURAL)
