"""The GEMM core: products with their epilogues, and the elementwise kernels of their gradients."""
