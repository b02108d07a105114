"""The one attention core, of packed and of dense calls: docs/attention.md, docs/dense.md and docs/decode.md.

portable/  stock Triton, on every GPU, any head dimension, all options; small_segments_* take segments of at most one
           block, which is loaded at once; bwd_small is the backward of few tiles; bwd_split adds up split sums of
           gradients; decode attends with a few queries to a KV cache
hopper/    Gluon, Hopper only; *_fp32 compute fp32 in a half type; bwd_fp32_dkdv makes fp32 gradients of keys and values
"""
