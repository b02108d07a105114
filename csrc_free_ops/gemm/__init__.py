"""The GEMM core: products with fused epilogues, and elementwise kernels for products without one."""
