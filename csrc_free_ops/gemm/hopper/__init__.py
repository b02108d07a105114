"""The GEMM core in Gluon, for Hopper GPUs."""
