"""The one attention core, of packed and of dense calls: docs/attention.md, docs/dense.md and docs/decode.md.

portable_*  stock Triton, on every GPU, any head dimension, all steps; _few: backward of few tiles
short_*     the same of segments of one block at most, which is loaded at once
hopper_*    Gluon, Hopper only; _cast: fp32 computed in a half type; _keys: fp32 gradients of keys and values
bwd_parts   adds up gradients that several programs made parts of
decode      a few queries over a cache
"""
