"""What a call asks for beyond scale and mask: the bits of STEPS, and the numbers that go with them.

The numbers of a step travel together: (softcap, slope, sink, dropout, seed, stream). ALiBi's slope and the sink are a
head's; dropout is a probability, its numbers have a seed, and a stream for each sequence and head.
"""

import triton
import triton.language as tl

SOFTCAP = tl.constexpr(1)
ALIBI = tl.constexpr(2)
DROPOUT = tl.constexpr(4)
SINKS = tl.constexpr(8)


@triton.jit
def capped_step(softcap):
    """Of softcap alone."""
    return tl.cast(softcap, tl.float32), 0.0, 0.0, 0.0, 0, 0


@triton.jit
def step_of_sequence(seed_ptr, sequence, heads, softcap, dropout, STEPS: tl.constexpr):
    """Before it is known of which of the sequence's heads."""
    seed = 0
    if DROPOUT & STEPS:
        seed = tl.load(seed_ptr)
    return tl.cast(softcap, tl.float32), 0.0, 0.0, tl.cast(dropout, tl.float32), seed, sequence * heads


@triton.jit
def step_of_head(step, slopes_ptr, sinks_ptr, sequence, head, stride_slopes, STEPS: tl.constexpr):
    softcap, slope, sink, dropout, seed, stream = step
    if ALIBI & STEPS:
        slope = tl.load(slopes_ptr + sequence * stride_slopes + head).to(tl.float32)
    if SINKS & STEPS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
    if DROPOUT & STEPS:
        stream += head
    return softcap, slope, sink, dropout, seed, stream


@triton.jit
def without_sink(step, condition):
    """step, and where the condition, of one value, holds a sink that weighs nothing."""
    softcap, slope, sink, dropout, seed, stream = step
    return softcap, slope, tl.where(condition, float("-inf"), sink), dropout, seed, stream


@triton.jit
def kept_share(step, STEPS: tl.constexpr):
    """What weights that dropout keeps grow by, 1 / (1 - p)."""
    growth = 1.0
    if DROPOUT & STEPS:
        growth = 1.0 / (1.0 - step[3])
    return growth
