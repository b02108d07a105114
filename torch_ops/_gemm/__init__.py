"""The GEMM family: products with their epilogues, and what PyTorch's own products leave to do."""
