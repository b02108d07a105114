"""Warp-specialized attention kernels for Hopper GPUs, in Gluon.

    fwd, fwd_producer              forward: consumer warpgroups, and the warp that loads for them
    fwd_fp32, fwd_fp32_producer    forward for fp32 inputs, with warps that round keys and values
    fwd_config                     constants, barriers and slots of the forward
    scheduler, tile_info           which tile a program computes, and how its warps know
    bwd, bwd_producer, bwd_protocol, bwd_dq_reduce, bwd_dq_finalize, dq_order    backward
    bwd_small                      backward for few tiles
    bwd_fp32_dkdv                  gradients of keys and values for fp32 inputs

docs/glossary.md explains the words: tiles, warps, barriers, accumulators.
"""
