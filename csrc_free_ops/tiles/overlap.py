"""Kernels that begin while the one before ends: its last programs leave room, and a launch takes its time.

Such a launch (`launch_pdl`) begins once every program of the kernel before has ended or said that it may. It must read
and write nothing before that kernel is done, whose own wait was for the one before it. CUDA C++ Programming Guide,
programmatic dependent launch.
"""

import triton
import triton.language as tl


@triton.jit
def await_before(OVERLAPS: tl.constexpr):
    """Ahead of all reads and writes: lets the kernel behind begin, and waits for the one before."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
