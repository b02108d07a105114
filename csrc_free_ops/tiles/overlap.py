"""Kernels that start while the previous kernel ends (`launch_pdl`), which hides the time of a launch.

The kernel starts once every program of the previous kernel has ended or has called `gdc_launch_dependents`. Until its
`gdc_wait` returns, it must not read or write memory. The previous kernel has waited for the one before it in turn. See
CUDA C++ Programming Guide, programmatic dependent launch.
"""

import triton
import triton.language as tl


@triton.jit
def await_before(OVERLAPS: tl.constexpr):
    """Let the next kernel start and wait for the previous one; call this before all reads and writes."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
