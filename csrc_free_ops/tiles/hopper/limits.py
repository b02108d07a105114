"""Limits of a multiprocessor of Hopper GPUs (CUDA C++ Programming Guide, compute capability 9.0)."""

from triton.experimental.gluon import language as gl

# Bytes of shared memory that a program can ask for, and 32-bit registers.
SHARED_BYTES = gl.constexpr(232448)
REGISTERS = gl.constexpr(65536)
