"""Activations and their slopes, elementwise in fp32.

With s(z) = 1 / (1 + exp(-z)):

    gelu_tanh     x s(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)         (0.5 (1 + tanh u) is s(2 u))
    gelu          x (1 + erf(x / sqrt 2)) / 2
    quick_gelu    x s(1.702 x)
    silu          x s(x)
    swiglu        silu(gate) up

Hendrycks and Gimpel, arXiv 1606.08415; Shazeer, arXiv 2002.05202. s needs one exp2 and one division, neither cancels
nor overflows: exp2 of a large number is infinite, and 1 over that is 0.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SQRT_HALF = tl.constexpr(0.7071067811865476)
TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
CUBE = tl.constexpr(0.044715)
QUICK = tl.constexpr(1.702)
# Of x squared: beyond it s is 0 or 1, and what would be infinite times 0 stays 0.
SATURATED = tl.constexpr(4096.0)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def _share(x, ACTIVATION: tl.constexpr):
    """What the activation multiplies x by."""
    if ACTIVATION == "gelu_tanh":
        share = sigmoid(x * TWICE_SQRT_2_OVER_PI * (1.0 + tl.minimum(x * x, SATURATED) * CUBE))
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * SQRT_HALF)
    elif ACTIVATION == "quick_gelu":
        share = sigmoid(x * QUICK)
    else:
        tl.static_assert(ACTIVATION == "silu")
        share = sigmoid(x)
    return share


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of x in fp32; x itself for "none"."""
    if ACTIVATION == "none":
        result = x
    else:
        result = x * _share(x, ACTIVATION)
    return result


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr):
    """The activation of x in fp32, and its derivative there."""
    share = _share(x, ACTIVATION)
    if ACTIVATION == "gelu_tanh":
        steepness = (1.0 + tl.minimum(x * x, SATURATED) * (3.0 * CUBE)) * TWICE_SQRT_2_OVER_PI
        rise = share * (1.0 - share) * steepness
    elif ACTIVATION == "gelu":
        rise = tl.exp2(x * x * (-0.5 * LOG2E)) * INV_SQRT_2PI
    elif ACTIVATION == "quick_gelu":
        rise = share * (1.0 - share) * QUICK
    else:
        rise = share * (1.0 - share)
    return x * share, share + x * rise


@triton.jit
def swiglu(gate, up):
    return activate(gate, "silu") * up


@triton.jit
def swiglu_gradients(gate, up, gradient):
    """swiglu(gate, up), and the gradients of gate and up."""
    activated, slope = activate_with_slope(gate, "silu")
    return activated * up, gradient * up * slope, gradient * activated
