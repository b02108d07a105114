"""Activations and their slopes, elementwise in fp32.

With s(z) = 1 / (1 + exp(-z)):

    gelu_tanh     x s(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)         (0.5 (1 + tanh u) is s(2 u))
    gelu          x (1 + erf(x / sqrt 2)) / 2
    quick_gelu    x s(1.702 x)
    silu          x s(x)
    swiglu        silu(gate) up

Hendrycks and Gimpel, arXiv 1606.08415; Shazeer, arXiv 2002.05202. s needs one exponential and one division, and it
neither cancels nor overflows: an infinite exponential gives 1 / inf = 0. EXACT, for fp32 in memory, rounds the
exponential correctly to about the last place; half types use the GPU's exp2.
"""

import triton
import triton.language as tl

from csrc_free_ops.tiles.scores import LOG2E, exp

SQRT_HALF = tl.constexpr(0.7071067811865476)
TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
CUBE = tl.constexpr(0.044715)
QUICK = tl.constexpr(1.702)
# Bound of x^2. s is 0 or 1 beyond it; without the bound, infinity times 0 would be NaN.
SATURATED = tl.constexpr(4096.0)


@triton.jit
def _exponential(x, EXACT: tl.constexpr):
    if EXACT:
        power = exp(x)
    else:
        power = tl.exp2(x * LOG2E)
    return power


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    return 1.0 / (1.0 + _exponential(-x, EXACT))


@triton.jit
def _sigmoid_slope(x, EXACT: tl.constexpr):
    """s(x) and s(x) s(-x), neither of them computed as 1 minus another number."""
    decay = _exponential(-tl.abs(x), EXACT)
    inverse = 1.0 / (1.0 + decay)
    return tl.where(x < 0, decay * inverse, inverse), decay * inverse * inverse


@triton.jit
def _inner(x, ACTIVATION: tl.constexpr):
    """The argument of s for this activation, and its derivative."""
    if ACTIVATION == "gelu_tanh":
        square = tl.minimum(x * x, SATURATED)
        inner = x * TWICE_SQRT_2_OVER_PI * (1.0 + square * CUBE)
        slope = (1.0 + square * (3.0 * CUBE)) * TWICE_SQRT_2_OVER_PI
    elif ACTIVATION == "quick_gelu":
        inner = x * QUICK
        slope = QUICK
    else:
        tl.static_assert(ACTIVATION == "silu", "unknown activation; add its formula here and to the module's docstring")
        inner = x
        slope = 1.0
    return inner, slope


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """The activation of x in fp32; x itself for "none"."""
    if ACTIVATION == "none":
        result = x
    elif ACTIVATION == "gelu":
        result = x * (0.5 + 0.5 * tl.erf(x * SQRT_HALF))
    else:
        inner, _ = _inner(x, ACTIVATION)
        result = x * sigmoid(inner, EXACT)
    return result


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """The activation of x in fp32, and its derivative there."""
    if ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * SQRT_HALF)
        rise = _exponential(x * x * -0.5, EXACT) * INV_SQRT_2PI
    else:
        inner, slope = _inner(x, ACTIVATION)
        share, rise = _sigmoid_slope(inner, EXACT)
        rise = rise * slope
    return x * share, share + x * rise


@triton.jit
def swiglu(gate, up, EXACT: tl.constexpr):
    return activate(gate, "silu", EXACT) * up


@triton.jit
def swiglu_gradients(gate, up, gradient, EXACT: tl.constexpr):
    """(swiglu(gate, up), gradient of gate, gradient of up)."""
    activated, slope = activate_with_slope(gate, "silu", EXACT)
    return activated * up, gradient * up * slope, gradient * activated
