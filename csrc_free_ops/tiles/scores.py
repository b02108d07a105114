"""From q k^T to the exponents of softmax, and back.

A kernel has one unit for all exponents: natural in fp32, base 2 in half types. Scores, their peak, and lse while it is
subtracted are exponents. lse in memory is always natural.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.score_mod import ALIBI, SOFTCAP

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-0.00021219444005469057)


@triton.jit
def tanh(x):
    """tanh and its slope.

    With d = exp(-2|x|) and r = 2 d / (1 + d), |tanh| = 1 - r and the slope 1 - tanh^2 = r (2 - r). 1 - r cancels near
    zero, so tanh is its Taylor series there; r (2 - r) cancels nowhere.
    """
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    gap = 2.0 * decay / (1.0 + decay)
    far = 1.0 - gap
    square = x * x
    near = x * (1.0 + square * (-0.33333333 + square * (0.13333334 + square * (-0.05396825 + square * 0.021869488))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far)), gap * (2.0 - gap)


@triton.jit
def modify_scores(products, rows, cols, shift, scale, score_mod, SCORE_MODS: tl.constexpr):
    """(scores, their slope) from products q k^T; without softcap and ALiBi the scores are the products.

    A softcap c gives c tanh(scale q.k / c). ALiBi (Press et al., arXiv 2108.12409) subtracts slope |row + shift - col|.
    rows and cols broadcast. The slope is d score / d (scale q.k).
    """
    softcap, alibi, _, _, _, _ = score_mod
    steepness = 1.0
    if SOFTCAP & SCORE_MODS:
        capped, steepness = tanh(products * (scale / softcap))
        scores = capped * softcap
    elif ALIBI & SCORE_MODS:
        scores = products * scale
    else:
        scores = products
    if ALIBI & SCORE_MODS:
        scores -= alibi * tl.abs(rows + shift - cols).to(tl.float32)
    return scores, steepness


@triton.jit
def exponent_factor(scale, SCORE_MODS: tl.constexpr, NATURAL: tl.constexpr):
    """The factor that turns scores of `modify_scores` into exponents, applied where the peak is subtracted.

    Half types use base 2, so that a weight is one multiply-add and one exp2. fp32 is NATURAL, because a factor of
    log2(e) would round more often than eager PyTorch does.
    """
    if (SOFTCAP | ALIBI) & SCORE_MODS:
        factor = 1.0
    else:
        factor = scale
    if not NATURAL:
        factor = factor * LOG2E
    return factor


@triton.jit
def exp_factors(x):
    """(power, excess) with exp(x) = power (1 + excess), for results that are neither denormal nor infinite.

    x = n ln 2 + r with ln 2 as a sum of two numbers; n times the first is exact. power is 2^n, made from its bits.
    excess is a Taylor polynomial in r, |r| <= ln(2) / 2, with an error below 1e-8.
    """
    within = tl.minimum(tl.maximum(x, -87.0), 88.0)
    n = tl.floor(within * LOG2E + 0.5)
    r = (within - n * LN2_HIGH) - n * LN2_LOW
    tail = 1.0 / 24 + r * (1.0 / 120 + r * (1.0 / 720 + r * (1.0 / 5040)))
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return power, r * (1.0 + r * (0.5 + r * (1.0 / 6 + r * tail)))


@triton.jit
def exp(x):
    """exp to about one unit in the last place; the GPU's own exp2 is off by up to four. Denormal results are 0."""
    power, excess = exp_factors(x)
    result = power + power * excess
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
    """log(norm exp(peak)), with peak as an exponent.

    fp32 rounds once, at the end, because an error of lse changes all weights of the row in the backward.
    """
    if NATURAL:
        # The GPU's log2 is off by more than the sum rounds, so one Newton step corrects it. The fma keeps the product
        # apart: a compiler would fold a plain product into the sum, and `log` would differ between its uses.
        log = tl.fma(tl.log2(norm), LN2, 0.0)
        high = peak + log
        back = high - peak
        low = (peak - (high - back)) + (log - back)
        power, excess = exp_factors(-log)
        scaled = norm * power
        lse = high + (low + ((scaled - 1.0) + scaled * excess))
    else:
        lse = (peak + tl.log2(norm)) * LN2
    return lse


@triton.jit
def exponent_of_lse(lse, NATURAL: tl.constexpr):
    if not NATURAL:
        lse = lse * LOG2E
    return lse


# A finite fp32 number below every lse.
LEAST_LSE = tl.constexpr(-3e38)


@triton.jit
def exponent_of_norm(lse, NATURAL: tl.constexpr):
    """The exponent that a backward subtracts from scores.

    A row whose scores are all -inf has lse -inf, and -inf minus -inf would be NaN in fp32. With a finite lse the
    weights of that row are 0. In fp32 scores of finite q and k can be -inf, since products overflow.
    """
    if NATURAL:
        lse = tl.maximum(lse, LEAST_LSE, propagate_nan=tl.PropagateNan.ALL)
    return exponent_of_lse(lse, NATURAL)
