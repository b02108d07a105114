"""Score modifications: softcap, ALiBi, dropout and sinks. SCORE_MODS has a bit for each that a call uses.

Their numbers travel as one tuple, score_mod = (softcap, slope, sink, dropout, seed, stream). The ALiBi slope and the
sink belong to a head. dropout is a probability; its random numbers have a seed, and a stream for each sequence and
head.
"""

import triton
import triton.language as tl

SOFTCAP = tl.constexpr(1)
ALIBI = tl.constexpr(2)
DROPOUT = tl.constexpr(4)
SINKS = tl.constexpr(8)


@triton.jit
def softcap_score_mod(softcap):
    """score_mod with a softcap and nothing else."""
    return tl.cast(softcap, tl.float32), 0.0, 0.0, 0.0, 0, 0


@triton.jit
def sequence_score_mod(seed_ptr, sequence, heads, softcap, dropout, SCORE_MODS: tl.constexpr):
    """score_mod of a sequence; `head_score_mod` adds what belongs to one of its heads."""
    seed = 0
    if DROPOUT & SCORE_MODS:
        seed = tl.load(seed_ptr)
    return tl.cast(softcap, tl.float32), 0.0, 0.0, tl.cast(dropout, tl.float32), seed, sequence * heads


@triton.jit
def head_score_mod(
    score_mod, slopes_ptr, sinks_ptr, sequence, head, stride_slopes, SCORE_MODS: tl.constexpr, has_sequence=None
):  # fmt: skip
    """score_mod of one head, from the sequence's; `has_sequence` is false where there may be no slopes to read."""
    softcap, slope, sink, dropout, seed, stream = score_mod
    if ALIBI & SCORE_MODS:
        slope = tl.load(slopes_ptr + sequence * stride_slopes + head, mask=has_sequence).to(tl.float32)
    if SINKS & SCORE_MODS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
    if DROPOUT & SCORE_MODS:
        stream += head
    return softcap, slope, sink, dropout, seed, stream


@triton.jit
def without_sink(score_mod, condition):
    """score_mod, with a sink of no weight if the scalar condition holds."""
    softcap, slope, sink, dropout, seed, stream = score_mod
    return softcap, slope, tl.where(condition, float("-inf"), sink), dropout, seed, stream


@triton.jit
def dropout_factor(score_mod, SCORE_MODS: tl.constexpr):
    """The factor 1 / (1 - p) of the weights that dropout keeps."""
    factor = 1.0
    if DROPOUT & SCORE_MODS:
        factor = 1.0 / (1.0 - score_mod[3])
    return factor
