"""Pieces of Hopper kernels: exact-width wgmma, shared memory, barriers."""
