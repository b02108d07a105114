"""What a multiprocessor of a Hopper GPU has (CUDA C++ Programming Guide, compute capability 9.0)."""

from triton.experimental.gluon import language as gl

# Bytes of shared memory that a program can ask for, and 32-bit registers.
SHARED_BYTES = gl.constexpr(232448)
REGISTERS = gl.constexpr(65536)
