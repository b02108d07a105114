"""Launch choice: measured rows, one rule file for each family of kernels, and `pick`."""
