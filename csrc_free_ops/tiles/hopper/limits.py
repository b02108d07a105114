"""Limits of a multiprocessor of Hopper GPUs (CUDA C++ Programming Guide, compute capability 9.0)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Bytes of shared memory that a program can ask for, and 32-bit registers.
SHARED_BYTES = gl.constexpr(232448)
REGISTERS = gl.constexpr(65536)


@gluon.constexpr_function
def buffer_bytes(buffer):
    """Bytes of a buffer in shared memory."""
    count = buffer.dtype.primitive_bitwidth // 8
    for size in buffer.shape:
        count *= getattr(size, "value", size)
    return count
